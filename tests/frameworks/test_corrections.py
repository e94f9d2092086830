"""Dtypes, numbers that are not finite, empty rows and errors of all drop-ins; tests/conformance compares results."""

from __future__ import annotations

import math

import pytest
import torch

from builders.config_cases import error, rows
from builders.rounding import near
from frameworks.calls import CALLS, batch, drop_in_of

pytestmark = pytest.mark.usefixtures("frameworks_there")

# Settings with which tokens and sequences are weighed and rejected.
SETTINGS = {
    "verl": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_rs": "token_k1,seq_mean_k3"}
    | {"rollout_rs_threshold": "0.8_1.3,0.05"},
    "xtuner": {"rollout_is_mode": "both", "rollout_is_threshold": (1.5, 0.7), "rollout_is_mask_threshold": (1.3, 0.8)}
    | {"rollout_is_veto_threshold": (1.9, 0.5)},
    "skyrl": {"tis_ratio_type": "token", "token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
    "areal": {"metric": "kl_k3", "upper": 0.5},
}
OFF = {"verl": {}, "skyrl": {}, "xtuner": {"rollout_is_veto_threshold": (20.0, 0.0)}}


def corrected(name, train, rollout, mask, settings=None, **switches):
    given = SETTINGS[name] if settings is None else settings
    return CALLS[name](drop_in_of(name), train, given, rollout, mask, **switches)


@pytest.mark.parametrize(("name", "count"), [("verl", 13), ("skyrl", 0), ("xtuner", 13)])
def test_where_nothing_is_switched_on_only_metrics_are_made(name, count):
    train, rollout, mask = batch()
    weights, kept, metrics = corrected(name, train, rollout, mask, OFF[name])
    assert weights is None and torch.equal(kept, mask) and len(metrics) == count
    assert {type(value) for value in metrics.values()} <= {float, bool}


# NAME LOG_PROBS MASK | WEIGHTS MASK, where a rejection makes a mask.
DTYPES = """
verl bfloat16 int64 | bfloat16 int64
verl bfloat16 float32 | float32 float32
verl float64 bool | float64 bool
xtuner float32 bool | float32 float32
xtuner bfloat16 int64 | bfloat16 float32
xtuner bfloat16 float32 | float32 float32
xtuner float32 float64 | float64 float64
skyrl bfloat16 float32 | bfloat16 float32
skyrl float32 int64 | float32 float32
skyrl float64 float64 | float64 float64
areal bfloat16 float32 | float32 float32
"""


@pytest.mark.parametrize(("given", "expected"), rows(DTYPES))
def test_dtypes(given, expected):
    name, *dtypes = given.split()
    train, rollout, mask = batch(*(getattr(torch, dtype) for dtype in dtypes))
    weights, kept, _ = corrected(name, train.requires_grad_(), rollout, mask)
    assert [weights.dtype, kept.dtype] == [getattr(torch, dtype) for dtype in expected.split()]
    assert not weights.requires_grad and weights.shape == kept.shape == train.shape


@pytest.mark.parametrize("name", ["verl", "skyrl", "xtuner", "areal"])
def test_nonfinite(name):
    """Behind the mask it is nothing; in front of it the sequence goes, and no metric does."""
    train, rollout, mask = batch()
    mask[0] = 1.0
    expected = corrected(name, train, rollout, mask)
    for value in (math.nan, -math.inf):
        found = corrected(name, train.where(mask != 0, value), rollout, mask)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2] == expected[2]
    train[0, 3] = math.nan
    weights, kept, metrics = corrected(name, train, rollout, mask)
    assert not kept[0].any() and weights.isfinite().all() and all(map(math.isfinite, metrics.values()))
    if name in ("verl", "xtuner"):
        assert corrected(name, train, rollout, mask, nonfinite="propagate")[0].isnan().any()


@pytest.mark.parametrize("name", ["verl", "xtuner"])
def test_rows_without_a_token_can_be_left_out(name):
    """With empty_rows="skip" they change no metric, as they do in the framework."""
    given, some = batch(torch.float64), [0, 1, 2, 3, 5]
    expected = dict(corrected(name, *(x[some] for x in given))[2])
    assert dict(corrected(name, *given, empty_rows="skip")[2]) == near(expected)
    assert dict(corrected(name, *given)[2]) != near(expected)


WRONG = """
verl rollout [6, 8] | ValueError rollout_log_prob: expected shape [6, 9] (of old_log_prob), got
verl mask [5, 9] | ValueError response_mask: expected shape [6, 9] (of old_log_prob), got
verl rollout None | TypeError rollout_log_prob: expected a tensor, got None; ...calculate_log_probs=True
skyrl rollout [6, 8] | ValueError rollout_logp: expected shape [6, 9]
skyrl rollout None | TypeError rollout_logprobs: expected a tensor, got None; ...sampling_params.logprobs
xtuner rollout [6, 8] | ValueError rollout_logp: expected shape [1, 54]
xtuner rollout None | TypeError rollout_log_prob: expected a tensor, got None; set return_logprob=True
"""


@pytest.mark.parametrize(("given", "message"), rows(WRONG))
def test_errors(given, message):
    name, part, shape = given.split(" ", 2)
    kind, pattern = error(message)
    tensors = dict(zip(("train", "rollout", "mask"), batch(), strict=True))
    with pytest.raises(kind, match=f"^{pattern}"):
        corrected(name, **tensors | {part: None if shape == "None" else torch.ones(eval(shape))})
