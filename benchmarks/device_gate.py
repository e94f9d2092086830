"""No time is taken of a wrong result: every outcome is compared with ours, and ours with the reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.batches import Batch
from benchmarks.contenders import BY_HAND, COMPILED, OURS, VERL
from benchmarks.device_contender import EAGER, SKYRL, TRACED, TRL, TRL_RESTATED, XTUNER, XTUNER_ONCE, Outcome
from benchmarks.gate import VERL_KEYS, VERL_REJECTION_KEYS, VERL_WEIGHT_KEYS, WrongResult, same_metrics
from benchmarks.operations import Operation

# Who computes by our definition: masks are equal to the bit.
OWN = (EAGER, TRACED, COMPILED)

# fp32 exp and sums of fp32, of fp16 and bf16 the rounding of what is handed back.
WEIGHT_RTOL = 1e-5
# TRL clamps no sum of D, so where ours stop at e^-20 its weights are smaller still.
WEIGHT_ATOL = {TRL_RESTATED: 2.1e-9}
GRADIENT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
VALUE_RTOL = 1e-3
# TRL's keys and ours.
TRL_KEYS = {
    "sampling/sampling_logp_difference/mean": "d_abs_mean",
    "sampling/sampling_logp_difference/max": "d_abs_max",
}
TRL_LOSS_KEYS = {"clip_ratio/low_mean": "clip_fraction_low", "clip_ratio/high_mean": "clip_fraction_high"}
# Others decide in fp32 and on the other side of exp: of a thousand sequences one may lie that near a bound.
MOST_MASK_DIFFERENCES = 1e-3


def check(batch: Batch, operation: Operation, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Compare every outcome with ours.

    Args:
        batch: What was computed on.
        operation: What was computed.
        outcomes: Ours, and at least one other that agrees: nobody is right by himself.

    Returns:
        {contender: what is wrong} of those that nobody may time.

    Raises:
        WrongResult: Nobody agrees with ours, or our own definition does not: then nothing may be timed.
    """
    wrong: dict[str, str] = {}
    for name in outcomes:
        if name == OURS:
            continue
        try:
            _compare(name, batch, operation, outcomes[OURS], outcomes[name])
        except WrongResult as problem:
            if name in OWN:
                raise
            wrong[name] = str(problem)
    if len(wrong) + 1 == len(outcomes):
        raise WrongResult("; ".join([f"{OURS}: nobody agrees", *wrong.values()]))
    return wrong


def _compare(name: str, batch: Batch, operation: Operation, ours: Outcome, other: Outcome) -> None:
    _same_mask(name, batch.valid, ours.mask, other.mask)
    _same_weights(name, batch.valid, ours, other)
    _same_loss(name, ours, other)
    if ours.metrics is not None and other.metrics is not None:
        same_metrics(name, _pairs(name, operation, ours.metrics, other.metrics))


def _same_mask(name: str, valid: Tensor, ours: Tensor | None, other: Tensor | None) -> None:
    if ours is None or other is None:
        return
    differ = ((ours != 0) != (other != 0)) & valid
    many, tokens = int(differ.sum()), int(valid.sum())
    if many > (0 if name in OWN else MOST_MASK_DIFFERENCES * tokens):
        raise WrongResult(f"{name}: the mask differs from ours at {many} of {tokens} tokens")
    for who, mask in ((OURS, ours), (name, other)):
        if bool(((mask != 0) & ~valid).any()):
            raise WrongResult(f"{who}: the mask is not 0 at invalid tokens")


def _same_weights(name: str, valid: Tensor, ours: Outcome, other: Outcome) -> None:
    if (ours.weights is None) != (other.weights is None):
        raise WrongResult(f"{name}: weights are on one side only")
    if ours.weights is None or other.weights is None:
        return
    a, b = (torch.where(valid, x.float(), 0.0) for x in (ours.weights, other.weights))
    if not torch.allclose(a, b, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL.get(name, 0.0)):
        worst = ((a - b).abs() / a.abs().clamp(min=1e-30)).max()
        raise WrongResult(f"{name}: weights differ from ours by up to {float(worst):.1e} relative")
    for who, weights in ((OURS, ours.weights), (name, other.weights)):
        if bool((weights[~valid] != 0).any()):
            raise WrongResult(f"{who}: weights are not 0 at invalid tokens")


def _same_loss(name: str, ours: Outcome, other: Outcome) -> None:
    if (ours.value is None) != (other.value is None) or (ours.gradient is None) != (other.gradient is None):
        raise WrongResult(f"{name}: a value or a gradient is on one side only")
    if ours.gradient is not None and other.gradient is not None:
        a, b = ours.gradient.double(), other.gradient.double()
        error, most = float((a - b).norm() / b.norm()), GRADIENT_ERROR[ours.gradient.dtype]
        # Without a gradient at all the error is NaN, and the case shows nothing.
        if not error <= most:
            raise WrongResult(f"{name}: the gradient differs from ours by {error:.1e}, more than {most:.0e}")
    if ours.value is not None and other.value is not None:
        # A sum of terms of both signs: compared with itself and with 1, the size of its terms.
        a, b = float(ours.value), float(other.value)
        if not abs(a - b) <= VALUE_RTOL * max(abs(b), 1e-3):
            raise WrongResult(f"{name}: the loss is {b!r}, ours says {a!r}")


def _pairs(
    name: str, operation: Operation, ours: Mapping[str, float], theirs: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """{key: (ours, theirs)} of the metrics that mean the same; there is one at least."""
    if name == VERL:
        keys = {f"rollout_corr/{key}": native for key, native in VERL_KEYS.items()}
        if operation.spec.weight is not None:
            keys |= {f"rollout_corr/{key}": native for key, native in VERL_WEIGHT_KEYS.items()}
        if operation.spec.criteria:
            keys |= {f"rollout_corr/{key}": native for key, native in VERL_REJECTION_KEYS.items()}
        if operation.part:
            keys = {"actor/ppo_kl": "ppo_kl"}
    elif name in (TRL, TRL_RESTATED):
        keys = TRL_LOSS_KEYS if operation.part else TRL_KEYS
    elif name in (BY_HAND, XTUNER, XTUNER_ONCE, SKYRL):
        # They compute fewer than we do, and SkyRL's loss one of its own.
        keys = {key: key for key in theirs if key in ours}
    else:
        missing = sorted(set(ours) ^ set(theirs))
        if missing:
            raise WrongResult(f"{name}: the metric {missing[0]!r} is on one side only")
        keys = {key: key for key in ours}
    if not keys:
        raise WrongResult(f"{name}: none of its metrics is one of ours")
    return {key: (float(ours[native]), float(theirs[key])) for key, native in keys.items()}
