"""The drop-in for xtuner: packs, pads, dtypes, merging."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders.rounding import near
from rollout_corr.frameworks.xtuner import dropin

LENGTHS = [7, 0, 5, 9, 4]
SHIPPED = {
    "rollout_is_level": "token",
    "rollout_is_mode": "both",
    "rollout_is_threshold": (1.5, 0.7),
    "rollout_is_mask_threshold": (1.3, 0.8),
    "rollout_is_veto_threshold": (1.9, 0.5),
}


class Configuration(SimpleNamespace):
    """As much of xtuner's pydantic model as is used of it."""

    def compute_rollout_importance_weights_and_metrics(self, old_log_prob, rollout_log_prob, num_tokens, response_mask):
        return "theirs"


@pytest.fixture
def theirs(monkeypatch):
    """xtuner's module, as far as something is replaced in it."""
    module = ModuleType(dropin.MODULE)
    module.RolloutImportanceSampling = type("RolloutImportanceSampling", (Configuration,), {})
    module.merge_rollout_is_metrics = lambda rollout_is_metrics, device="cuda": "theirs"
    root = ModuleType("xtuner")
    root.__version__ = "0.2.0"
    monkeypatch.setitem(sys.modules, "xtuner", root)
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)
    yield module
    dropin.uninstall()


def pack(seed=0, dtype=torch.float32, mask_dtype=torch.bool, pads=(4,)):
    made = torch.Generator().manual_seed(seed)
    rollout = torch.rand(1, sum(LENGTHS), generator=made, dtype=torch.float64).log()
    old = rollout + 0.25 * torch.randn(1, sum(LENGTHS), generator=made, dtype=torch.float64)
    mask = torch.rand(1, sum(LENGTHS), generator=made) < 0.8
    for i in pads:
        mask.split(LENGTHS, dim=1)[i].fill_(False)
    return old.to(dtype), rollout.to(dtype), torch.tensor(LENGTHS, dtype=torch.int32), mask.to(mask_dtype)


def run(given, **fields):
    switches = {name: fields.pop(name) for name in dropin.SWITCHES if name in fields}
    return dropin.compute_rollout_importance_weights_and_metrics(Configuration(**fields), *given, **switches)


def test_a_list_of_lengths_and_offsets_in_int64_are_the_same():
    old, rollout, num_tokens, valid = given = pack()
    weights = run(given, **SHIPPED)[0]
    for lengths in (num_tokens.tolist(), num_tokens.long()):
        assert torch.equal(run((old, rollout, lengths, valid), **SHIPPED)[0], weights)


def test_mismatch_over_sequences():
    """Each sequence's own perplexity, and the mean over those with a valid token; xtuner takes the pack as one."""
    given = old, _, _, mask = pack(dtype=torch.float64)
    found = run(given, **SHIPPED, mismatch_over="sequence")[2]
    parts = zip(old.split(LENGTHS, dim=1), mask.split(LENGTHS, dim=1), strict=True)
    means = [float((-x[valid].mean()).exp()) for x, valid in parts if valid.any()]
    assert len(means) == 3 and found["mismatch/mismatch_training_ppl"] == near(sum(means) / 3)
    as_pack = run(given, **SHIPPED)[2]
    assert found.keys() == as_pack.keys()
    assert found["mismatch/mismatch_log_ppl_diff_max"] > found["mismatch/mismatch_log_ppl_diff_min"]
    assert as_pack["mismatch/mismatch_log_ppl_diff_max"] == as_pack["mismatch/mismatch_log_ppl_diff_min"]


def test_a_geometric_mean_is_no_half_precision():
    given = pack(0, torch.bfloat16, torch.int64)
    assert run(given, **SHIPPED | {"rollout_is_level": "geometric"})[0].dtype == torch.float32
    assert run(given, **SHIPPED)[0].dtype == torch.bfloat16


def test_lengths_that_do_not_fit():
    old, rollout, _, mask = pack()
    with pytest.raises(ValueError, match=r"num_tokens: expected 25 tokens in total .*, got 21"):
        run((old, rollout, LENGTHS[:-1], mask), **SHIPPED)
    with pytest.raises(ValueError, match=r"old_log_prob: expected shape \[1, S\], packed, got \[2, 25\]"):
        run((torch.zeros(2, 25), rollout, LENGTHS, mask), **SHIPPED)


# --- merging ---


@pytest.fixture
def two_ranks(monkeypatch):
    """Collectives as if another rank had handed in `others`; what was reduced is counted."""
    calls, others = [], []

    def all_reduce(x, op=None, group=None):
        calls.append(op)
        if others:
            other = others[len(calls) - 1].to(x.dtype)
            x.copy_(torch.maximum(x, other) if op == torch.distributed.ReduceOp.MAX else x + other)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return SimpleNamespace(calls=calls, others=others)


def test_merges_in_two_collectives(two_ranks):
    """The mean, the maximum or the minimum over the packs with a token; a pack of padding has xtuner's sentinels."""
    empty = run(pack(9, pads=range(5)), **SHIPPED)
    assert not empty[0].any() and not empty[1].any() and empty[2]["mismatch/valid"] is False
    assert (empty[3]["mismatch/rollout_is_max"], empty[3]["mismatch/rollout_is_min"]) == (-math.inf, math.inf)
    packs = [run(pack(seed), **SHIPPED)[3] for seed in range(3)]
    merged = dropin.merge_rollout_is_metrics([*packs, empty[3]], "cpu")
    assert len(two_ranks.calls) == 2 and list(merged) == [key for key in packs[0] if key != "mismatch/valid"]
    for key, value in merged.items():
        of_packs = [metrics[key] for metrics in packs]
        expected = max(of_packs) if "max" in key else min(of_packs) if "min" in key else sum(of_packs) / 3
        assert value == near(expected, torch.float32), key
    for merge in (dropin.merge_rollout_is_metrics, dropin.pool_rollout_is_metrics):
        assert set(merge([empty[3]], "cpu").values()) == {0.0}
        assert merge([{}, {}], "cpu") == {}


def test_merges_with_another_rank(two_ranks):
    mine, other = {"a": 1.0, "a_max": 2.0, "a_min": 3.0}, {"a": 4.0, "a_max": 7.0, "a_min": 2.0}
    two_ranks.others[:] = [torch.tensor([1.0, other["a"]]), torch.tensor([other["a_max"], -other["a_min"]])]
    assert dropin.merge_rollout_is_metrics([mine, mine], "cpu") == {"a": 2.0, "a_max": 7.0, "a_min": 2.0}


def test_pools(two_ranks):
    """The packs' tokens and sequences together: the number of one pack that holds them all."""
    given = [pack(seed, torch.float64) for seed in range(3)]
    together = tuple(torch.cat(parts, dim=-1) for parts in zip(*given, strict=True))
    of_packs = [run(x, **SHIPPED, mismatch_over="sequence") for x in given]
    whole = run(together, **SHIPPED, mismatch_over="sequence")
    for which in (2, 3):
        pooled = dropin.pool_rollout_is_metrics([found[which] for found in of_packs], "cpu")
        expected = {key: value for key, value in whole[which].items() if key != "mismatch/valid"}
        assert pooled == near(expected)
    assert len(two_ranks.calls) == 4
    with pytest.raises(TypeError, match="rollout_is_metrics: expected what the replaced method returned"):
        dropin.pool_rollout_is_metrics([of_packs[0][3], dict(of_packs[1][3])], "cpu")


# --- in xtuner ---


def test_install(theirs):
    given, made = pack(), theirs.RolloutImportanceSampling(**SHIPPED)
    assert dropin.install().in_place
    before = dict(vars(made))
    found = made.compute_rollout_importance_weights_and_metrics(
        old_log_prob=given[0], rollout_log_prob=given[1], num_tokens=given[2], response_mask=given[3]
    )
    assert torch.equal(found[0], run(given, **SHIPPED)[0]) and vars(made) == before
    assert theirs.merge_rollout_is_metrics([{}], "cpu") == {}
    dropin.install(merge="pooled", mismatch_over="sequence")
    found = made.compute_rollout_importance_weights_and_metrics(*given)
    assert found[2] == run(given, **SHIPPED, mismatch_over="sequence")[2]
    with pytest.raises(TypeError, match="expected what the replaced method returned"):
        theirs.merge_rollout_is_metrics([{"a": 1.0}], "cpu")
    dropin.uninstall()
    assert made.compute_rollout_importance_weights_and_metrics(*given) == "theirs"


@pytest.mark.parametrize("level", ["max", "geometric", "kl3"])
def test_vetoes_of_the_pull_request(level):
    """Only of sequences whose mean advantage is negative."""
    given = pack(3, torch.float64)
    bounds = {"max": (1.4, 0.7), "geometric": (1.02, 0.98), "kl3": (0.02, 0.0)}[level]
    fields = {"rollout_is_threshold": (5.0, 0.1), "rollout_is_veto_threshold": bounds, "rollout_is_veto_level": level}
    everyone = run(given, **fields)[1]
    for sign in (1.0, -1.0):
        mask = run((*given, torch.full((5,), sign)), **fields, rollout_is_veto_negative_adv_only=True)[1]
        assert torch.equal(mask, given[3].float() if sign > 0 else everyone) and everyone.sum() < given[3].sum()
