"""The drop-in for verl, without verl: its switches, its errors. tests/conformance compares its results with verl's."""

from __future__ import annotations

import math
import sys
import threading
from functools import partial
from types import ModuleType

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near, near
from builders.threaded_ranks import Rank, Ranks
from frameworks import calls
from frameworks.calls import DataProto
from rollout_corr.frameworks.verl import dropin

EVERYTHING = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.2,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.8_1.3,0.05",
}


pytestmark = pytest.mark.usefixtures("frameworks_there")

batch = partial(calls.batch, mask_dtype=torch.int64)


def correct(*given, **options):
    proto, mask, metrics = dropin.compute_rollout_correction_and_rejection_mask(*given, **options)
    return None if proto is None else proto.batch["rollout_is_weights"], mask, metrics


@pytest.mark.parametrize("shape", [(54,), (2, 3, 9)])
def test_other_shapes(shape):
    """One sequence alone, and rows in more dimensions than one."""
    given = [x.reshape(shape) for x in batch()]
    weights, mask, metrics = correct(*given, **EVERYTHING)
    expected = correct(*(x.reshape(-1, shape[-1]) for x in given), **EVERYTHING)
    assert weights.shape == mask.shape == torch.Size(shape) and metrics == expected[2]
    assert torch.equal(weights.reshape(-1), expected[0].reshape(-1))


def test_parts_report_their_own_metrics():
    train, rollout, mask = batch()
    metrics = correct(train, rollout, mask, **EVERYTHING)[2]
    named = {key.removeprefix("rollout_corr/"): value for key, value in metrics.items()}
    _, found = dropin.compute_rollout_correction_weights(train - rollout, mask, "token", 1.2)
    assert found == {key: value for key, value in named.items() if key.startswith("rollout_is_")}
    _, found = dropin.compute_rollout_rejection_mask(train - rollout, mask, "token_k1,seq_mean_k3", "0.8_1.3,0.05")
    assert found == {key: value for key, value in named.items() if key.startswith("rollout_rs_")}
    both, alone = (dropin.compute_offpolicy_metrics(train, x, mask) for x in (rollout, None))
    assert alone == {key: both[key] for key in ("training_ppl", "training_log_ppl")}


def test_normalized_over_all_ranks(monkeypatch):
    """Each of two ranks gets the weights and the factor of all rows together."""
    given, here = batch(torch.float64), threading.local()
    options = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    expected, _, of_all = correct(*given, **options)
    monkeypatch.setattr(dropin, "world", lambda: here.group)

    def of_rank(rank):
        here.group = Rank(rank=rank, ranks=2)
        return correct(*(x[3 * rank : 3 * rank + 3] for x in given), **options)

    found = Ranks(2).run(of_rank)
    assert_near(torch.cat([weights for weights, _, _ in found]), expected, size=0.0)
    factor = "rollout_corr/rollout_is_batch_norm_factor"
    assert [metrics[factor] for _, _, metrics in found] == [near(of_all[factor])] * 2
    assert all(metrics.keys() == of_all.keys() for _, _, metrics in found)


def test_adds_to_batch():
    train, rollout, mask = batch()
    given = DataProto(batch={"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    config = dict(EVERYTHING)
    found, metrics = dropin.compute_rollout_correction_and_add_to_batch(given, config)
    weights, kept, expected = correct(train, rollout, mask, **EVERYTHING)
    assert torch.equal(found.batch["rollout_is_weights"], weights) and torch.equal(found.batch["response_mask"], kept)
    assert metrics == expected and config == EVERYTHING
    found, _ = dropin.compute_rollout_correction_and_add_to_batch(given, {})
    assert "rollout_is_weights" not in found.batch
    del given.batch["rollout_log_probs"]
    with pytest.raises(KeyError, match=r"rollout_log_probs: expected among .*calculate_log_probs=True"):
        dropin.compute_rollout_correction_and_add_to_batch(given, config)


def test_debug_metrics():
    train, rollout, mask = batch(torch.float64)
    given = {"old_log_probs": train, "rollout_log_probs": rollout, "responses": torch.zeros(6, 9)}

    def debug(**masks):
        return dropin.calculate_debug_metrics(DataProto(batch=given | masks))

    found = debug(response_mask=mask)
    # The mask of the whole text counts from its end.
    assert debug(attention_mask=torch.cat([torch.ones(6, 5, dtype=torch.int64), mask], dim=1)) == found
    nothing = debug(response_mask=torch.zeros_like(mask))
    assert nothing["training/rollout_probs_diff_valid"] == 0 and sum(math.isnan(x) for x in nothing.values()) == 4


# --- verl's mistakes, and the switches ---


def test_k1_bounds():
    """0.6_1.4: verl keeps ratios from 1/1.4 to 1/0.6, its documentation says from 0.6 to 1.4."""
    ratio = torch.tensor([[0.65, 0.7, 1.0, 1.5, 1.6]], dtype=torch.float64)
    mask = torch.ones(1, 5, dtype=torch.int64)
    as_verl, _ = dropin.compute_rollout_rejection_mask(ratio.log(), mask, "token_k1", "0.6_1.4")
    mended, _ = dropin.compute_rollout_rejection_mask(ratio.log(), mask, "token_k1", "0.6_1.4", k1_bounds="ratio")
    assert as_verl.tolist() == [[0, 0, 1, 1, 1]] and mended.tolist() == [[1, 1, 1, 0, 0]]


def test_empty_batch():
    train, rollout, mask = batch()
    nothing = torch.zeros_like(mask)
    weights, kept, metrics = correct(train, rollout, nothing, **EVERYTHING)
    assert not weights.any() and not kept.any() and set(metrics.values()) == {0.0}
    icepop = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"}
    nothing_left = correct(train, train + 1.0, mask, **icepop)[2]  # verl divides by zero
    assert nothing_left["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    with pytest.raises(ValueError, match="response_mask must contain at least one valid token"):
        correct(train, rollout, nothing, **EVERYTHING, empty_batch="raise")


@pytest.mark.parametrize("spec", [None, rc.spec("verl.decoupled_token_is")])
def test_a_spec_needs_a_verl_that_calls_its_correction(spec, caplog, monkeypatch):
    """Without algorithm.rollout_correction verl still compares the log-probs once a step, by which it is seen."""
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    old, rollout, mask = batch()
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "responses": mask, "response_mask": mask}
    try:
        dropin.install(spec=spec)
        for _ in range(2):
            dropin.calculate_debug_metrics(DataProto(batch=tensors))
            correct(*batch(), spec=spec)
        assert dropin.installed().active is (spec is not None)
        caplog.clear()
        for _ in range(2):
            dropin.calculate_debug_metrics(DataProto(batch=tensors))
        assert dropin.installed().active is False
    finally:
        dropin.uninstall()
    said = [words.partition("active: ")[2] for words in caplog.messages if "correction active" in words]
    expected = "no, your Spec is not used: verl did not call its correction in the last step: is algorithm."
    assert [words.startswith(expected) for words in said] == [True] * (spec is not None)
