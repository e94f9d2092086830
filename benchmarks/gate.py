"""No time is taken of a wrong result: what contenders compute is compared first."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.cases import Inputs, Workload, log_bounds
from benchmarks.contenders import BY_HAND, OURS, VERL, VERL_METRICS, Outcome

# exp and the summation of fp32 differ between implementations; a sequence this near a bound may fall on either side.
NEAR_BOUND = 1e-6
WEIGHT_RTOL = 1e-5

# Means in fp32 over 10^7 tokens, and exp of sums of D that reach 10.
METRIC_RTOL, METRIC_ATOL = 2e-3, 2e-6

# verl's keys and ours, where both mean the same as long as no row is empty and nothing is clamped.
VERL_KEYS = {
    "training_ppl": "train_ppl",
    "training_log_ppl": "train_log_ppl",
    "rollout_ppl": "rollout_ppl",
    "rollout_log_ppl": "rollout_log_ppl",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min",
    "ppl_ratio": "ppl_ratio",
    "kl": "kl_k1",
    "k3_kl": "kl_k3",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
}
VERL_WEIGHT_KEYS = {
    "rollout_is_mean": "weight_mean",
    "rollout_is_min": "weight_min",
    "rollout_is_max": "weight_max",
    "rollout_is_std": "weight_std",
    "rollout_is_eff_sample_size": "weight_ess",
    "rollout_is_ratio_fraction_high": "weight_above_fraction",
    "rollout_is_seq_mean": "sequence_weight_mean",
    "rollout_is_seq_min": "sequence_weight_min",
    "rollout_is_seq_max": "sequence_weight_max",
}
VERL_REJECTION_KEYS = {
    "rollout_rs_masked_fraction": "seq_mean_k1/rejected_tokens_fraction",
    "rollout_rs_seq_masked_fraction": "seq_mean_k1/rejected_sequences_fraction",
}
# Native keys that are 0 for finite log-probs inside sequences; a hand-written version has no reason to compute them.
NOT_BY_HAND = {
    "tokens_outside",
    "sequences_without_survivors",
    "weight_below_fraction",
    "sequence_weight_below_fraction",
}


class WrongResult(Exception):
    """Two contenders disagree."""


def check(inputs: Inputs, workload: Workload, outcomes: Mapping[str, Outcome]) -> None:
    """Compare every outcome with ours.

    Raises:
        WrongResult: Says which contender, which output, and by how much.
    """
    ours = outcomes[OURS]
    for name, other in outcomes.items():
        if name == OURS:
            continue
        _same_weights(name, inputs, workload, ours, other)
        _same_mask(name, inputs, workload, ours, other)
        same_metrics(name, _pairs(name, workload, ours, other, outcomes))


def _at_tokens(inputs: Inputs, x: Tensor, layout: str) -> Tensor:
    """[N]: what stands at the valid tokens."""
    return x[inputs.mask != 0] if layout == "padded" else x


def _elsewhere(inputs: Inputs, x: Tensor, layout: str) -> Tensor:
    """What stands at invalid tokens."""
    return x[inputs.mask == 0] if layout == "padded" else x[:0]


def _same_weights(name: str, inputs: Inputs, workload: Workload, ours: Outcome, other: Outcome) -> None:
    expected = workload.spec.weight is not None
    for who, outcome in ((OURS, ours), (name, other)):
        if (outcome.weights is not None) != expected:
            raise WrongResult(f"{who}: weights are {'missing' if expected else 'there, and none were asked for'}")
    if ours.weights is None or other.weights is None:
        return
    for who, outcome in ((OURS, ours), (name, other)):
        assert outcome.weights is not None
        if outcome.weights.dtype != torch.float32 or _elsewhere(inputs, outcome.weights, outcome.layout).any():
            raise WrongResult(f"{who}: weights are {outcome.weights.dtype}, or not 0 at invalid tokens")
    a, b = _at_tokens(inputs, ours.weights, ours.layout), _at_tokens(inputs, other.weights, other.layout)
    if not torch.allclose(a, b, rtol=WEIGHT_RTOL, atol=0.0):
        worst = ((a - b).abs() / a.abs().clamp(min=1e-30)).max()
        raise WrongResult(f"{name}: weights differ from ours by up to {worst:.1e} relative")


def _same_mask(name: str, inputs: Inputs, workload: Workload, ours: Outcome, other: Outcome) -> None:
    decided = torch.ones(inputs.shape[0], dtype=torch.bool)
    if workload.spec.criteria:
        d = (inputs.packed_train - inputs.packed_rollout).double()
        mean = torch.segment_reduce(d, "sum", lengths=inputs.lengths) / inputs.lengths
        for bound in log_bounds(workload.spec.criteria[0]):
            decided &= (mean - bound).abs() > NEAR_BOUND
    counts = decided.repeat_interleave(inputs.lengths)
    masks = []
    for who, outcome in ((OURS, ours), (name, other)):
        # A packed batch is given no mask; who edits none then hands back none, or ones.
        mask = torch.ones(inputs.tokens) if outcome.mask is None else outcome.mask
        if _elsewhere(inputs, mask, outcome.layout).any():
            raise WrongResult(f"{who}: the mask is not 0 at invalid tokens")
        masks.append(_at_tokens(inputs, mask, outcome.layout) != 0)
    differ = (masks[0] != masks[1]) & counts
    if differ.any():
        raise WrongResult(f"{name}: the mask differs from ours at {int(differ.sum())} tokens away from the bounds")
    if workload.spec.criteria and (masks[0].all() or not masks[0].any()):
        raise WrongResult(f"{OURS}: everything or nothing is rejected, so the case shows nothing")


def _pairs(
    name: str, workload: Workload, ours: Outcome, other: Outcome, outcomes: Mapping[str, Outcome]
) -> dict[str, tuple[float, float]]:
    """{key: (ours, theirs)} of the metrics that mean the same."""
    if name == VERL_METRICS:
        if VERL not in outcomes:
            return {}
        theirs = outcomes[VERL].metrics
        missing = sorted(set(theirs) ^ set(other.metrics))
        if missing:
            raise WrongResult(f"{name}: not the keys of verl, {missing[0]!r} is on one side only")
        return {key: (other.metrics[key], theirs[key]) for key in theirs}
    if name == VERL:
        keys = dict(VERL_KEYS)
        keys |= VERL_WEIGHT_KEYS if workload.spec.weight is not None else {}
        keys |= VERL_REJECTION_KEYS if workload.spec.criteria else {}
        return {key: (ours.metrics[native], other.metrics[f"rollout_corr/{key}"]) for key, native in keys.items()}
    skipped = NOT_BY_HAND if name == BY_HAND else set()
    missing = sorted(set(ours.metrics) - set(other.metrics) - skipped)
    if missing:
        raise WrongResult(f"{name}: the metric {missing[0]!r} is missing")
    return {key: (value, other.metrics[key]) for key, value in ours.metrics.items() if key not in skipped}


def same_metrics(name: str, pairs: Mapping[str, tuple[float, float]]) -> None:
    """Raise WrongResult unless every pair (ours, theirs) is close."""
    for key, (mine, theirs) in pairs.items():
        if not math.isclose(mine, theirs, rel_tol=METRIC_RTOL, abs_tol=METRIC_ATOL):
            raise WrongResult(f"{name}: {key} is {theirs!r}, ours says {mine!r}")
