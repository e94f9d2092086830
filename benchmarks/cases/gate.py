"""The gate before the clock: results are compared with ours, and a wrong one is not timed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.cases.batches import Batch
from benchmarks.cases.contender import BY_HAND, COMPILED, OURS, OWN, VERL, VERL_METRICS, Outcome
from benchmarks.cases.operations import GEOMETRIC, Operation, log_bounds
from benchmarks.peers.by_hand import layout_of

# exp and the summation of fp32 differ between implementations; a sequence this near a bound may fall on either side.
NEAR_BOUND = 1e-6
# Of other criteria, which are decided in fp32 and on the other side of exp: tokens that may differ.
MOST_MASK_DIFFERENCES = 1e-3
WEIGHT_RTOL = 1e-5
# Means in fp32 over 10^7 tokens, and exp of sums of D that reach 10.
METRIC_RTOL, METRIC_ATOL = 2e-3, 2e-6
GRADIENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
VALUE_RTOL = 1e-3

# Native keys that are 0 for finite log-probs inside sequences; a hand-written version has no reason to compute them.
NOT_BY_HAND = {
    "tokens_outside",
    "sequences_padded",
    "sequences_without_survivors",
    "weight_below_lower_fraction",
    "sequence_mean_weight_below_lower_fraction",
}


class WrongResult(Exception):
    """Two contenders disagree."""


def check(batch: Batch, operation: Operation, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Compare every outcome with ours; return by contender what is wrong with those that must not be timed."""
    wrong: dict[str, str] = {}
    for name, other in outcomes.items():
        if name == OURS:
            continue
        try:
            _compare(name, batch, operation, outcomes, other)
        except WrongResult as problem:
            if name in OWN:
                raise
            wrong[name] = str(problem)
    if len(wrong) + 1 == len(outcomes):
        raise WrongResult("; ".join([f"{OURS}: nobody agrees", *wrong.values()]))
    return wrong


def _compare(name: str, batch: Batch, operation: Operation, outcomes: Mapping[str, Outcome], other: Outcome) -> None:
    ours = outcomes[OURS]
    _same_weights(name, batch, ours.weights, other.weights)
    _same_mask(name, batch, operation, ours.mask, other.mask)
    _same_loss(name, batch, operation, ours, other)
    if ours.metrics is not None and other.metrics is not None:
        theirs = outcomes[VERL].metrics if name == VERL_METRICS and VERL in outcomes else None
        _same_metrics(name, _pairs(name, operation, ours.metrics, other.metrics, theirs))


def _split(batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values at valid tokens, [N], and elsewhere; for a packed batch `x` may be in the padded layout."""
    given = batch if x.shape == batch.old.shape or batch.padded is None else batch.padded
    return x[given.valid], x[~given.valid]


def _same_weights(name: str, batch: Batch, ours: Tensor | None, other: Tensor | None) -> None:
    if (ours is None) != (other is None):
        raise WrongResult(f"{name}: weights are on one side only")
    if ours is None or other is None:
        return
    for who, weights in ((OURS, ours), (name, other)):
        if weights.dtype != torch.float32 or bool(_split(batch, weights)[1].any()):
            raise WrongResult(f"{who}: weights are {weights.dtype}, or not 0 at invalid tokens")
    a, b = _split(batch, ours)[0], _split(batch, other)[0]
    if not torch.allclose(a, b, rtol=WEIGHT_RTOL, atol=0.0):
        worst = ((a - b).abs() / a.abs().clamp(min=1e-30)).max()
        raise WrongResult(f"{name}: weights differ from ours by up to {float(worst):.1e} relative")


def _same_mask(name: str, batch: Batch, operation: Operation, ours: Tensor | None, other: Tensor | None) -> None:
    if ours is None or other is None:
        if ours is not other and operation.spec.criteria:
            raise WrongResult(f"{name}: a mask is on one side only")
        return
    for who, mask in ((OURS, ours), (name, other)):
        if bool(_split(batch, mask)[1].any()):
            raise WrongResult(f"{who}: the mask is not 0 at invalid tokens")
    differ = (_split(batch, ours)[0] != 0) != (_split(batch, other)[0] != 0)
    most = 0.0
    if name not in OWN and operation.spec.criteria == (GEOMETRIC,):
        differ &= ~_near_a_bound(batch)
    elif name not in OWN:
        most = MOST_MASK_DIFFERENCES * differ.numel()
    if differ.sum() > most:
        raise WrongResult(f"{name}: the mask differs from ours at {int(differ.sum())} of {differ.numel()} tokens")


def _near_a_bound(batch: Batch) -> Tensor:
    """[N] bool: valid tokens of sequences whose mean D is so near a bound of GEOMETRIC that either answer is right."""
    layout = layout_of(batch.mask, batch.cu_seqlens, batch.slots)
    d = layout.select(batch.old.double() - batch.rollout.double(), 0.0)
    mean = layout.sum(d) / layout.lengths().clamp(min=1)
    near = torch.zeros_like(mean, dtype=torch.bool)
    for bound in log_bounds(GEOMETRIC):
        near |= (mean - bound).abs() <= NEAR_BOUND
    return layout.spread(near).expand_as(batch.old)[batch.valid]


def _at_a_clip(batch: Batch, operation: Operation) -> Tensor:
    """Bool, shaped like `new`: tokens at a bound of PPO, where rounding decides and `torch.min` halves a gradient."""
    assert batch.new is not None
    low, high, dual = operation.clip
    x = batch.new.detach().double() - batch.old.double()
    at = torch.zeros_like(x, dtype=torch.bool)
    for bound in (1.0 - low, 1.0 + high, dual):
        at |= (x - math.log(bound)).abs() <= NEAR_BOUND
    return at


def _same_loss(name: str, batch: Batch, operation: Operation, ours: Outcome, other: Outcome) -> None:
    if (ours.value is None) != (other.value is None) or (ours.gradient is None) != (other.gradient is None):
        raise WrongResult(f"{name}: a value or a gradient is on one side only")
    if ours.gradient is not None and other.gradient is not None:
        a, b = ours.gradient.double(), other.gradient.double()
        if name not in OWN:
            away = ~_at_a_clip(batch, operation)
            a, b = a * away, b * away
        error, most = float((a - b).norm() / b.norm()), GRADIENT_ERROR[ours.gradient.dtype]
        # Negated, so that NaN, the error of a gradient of zeros, is refused too.
        if not error <= most:
            raise WrongResult(f"{name}: the gradient differs from ours by {error:.1e}, more than {most:.0e}")
    if ours.value is not None and other.value is not None:
        # A sum of terms of both signs: compared with itself and with 1e-3 of the size of its terms.
        a, b = float(ours.value), float(other.value)
        if not abs(a - b) <= VALUE_RTOL * max(abs(b), 1e-3):
            raise WrongResult(f"{name}: the loss is {b!r}, ours says {a!r}")


Pairs = dict[str, tuple[float, float]]


def _pairs(
    name: str,
    operation: Operation,
    ours: Mapping[str, float],
    other: Mapping[str, float],
    verls: Mapping[str, float] | None,
) -> Pairs:
    """Return {key: (ours, theirs)} of the metrics that mean the same, at least one."""
    if name == VERL_METRICS:
        if verls is None:
            return {}
        _all_keys(name, verls, other)
        return {key: (other[key], verls[key]) for key in verls}
    if name == VERL:
        return {}  # its keys are compared with ours of the same names
    hand = name in (BY_HAND, COMPILED)
    if not (hand and operation.is_loss):  # of a loss it computes fewer than we do
        _all_keys(name, set(ours) - NOT_BY_HAND if hand else ours, other)
    return {key: (float(ours[key]), float(value)) for key, value in other.items() if key in ours}


def _all_keys(name: str, expected: Mapping[str, float] | set[str], found: Mapping[str, float]) -> None:
    missing = sorted(set(expected) ^ set(found))
    if missing:
        raise WrongResult(f"{name}: the metric {missing[0]!r} is on one side only")


def _same_metrics(name: str, pairs: Pairs) -> None:
    for key, (mine, theirs) in pairs.items():
        if not math.isclose(mine, theirs, rel_tol=METRIC_RTOL, abs_tol=METRIC_ATOL):
            raise WrongResult(f"{name}: {key} is {theirs!r}, ours says {mine!r}")
