"""TRL's recipes: `vllm_importance_sampling_mode` of GRPOTrainer, with its `..._clip_max` and `..._clip_min`.

TRL's "sequence" is the product of the ratios. A token whose log-prob is NaN gets ratio 1 there ("neutral"). Rejection
zeroes the weight, so no denominator changes.
"""

from __future__ import annotations

from dataclasses import replace

from rollout_corr.frameworks.off_policy import off_policy
from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Level, Nonfinite, Reduce, Spec, Unit, Weight


def truncate(level: Level, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """The ratio clamped to [clip_min, clip_max]."""
    if clip_max is None and clip_min is None:
        raise ValueError("expected clip_max, clip_min or both, got neither (nothing would be truncated)")
    return Spec(weight=Weight(level, lower=clip_min, upper=clip_max), nonfinite=nonfinite)


def mask(level: Level, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """The ratio itself inside [clip_min, clip_max], 0 outside."""
    unit: tuple[Unit, Reduce | None] = ("token", None) if level == "token" else ("sequence", "sum")
    criterion = Criterion("ratio", *unit, lower=clip_min, upper=clip_max)
    return Spec(weight=Weight(level), criteria=(criterion,), rejected="zero", nonfinite=nonfinite)


@recipe("TRL 1.16.0")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """What GRPOTrainer does unasked: sequence_mask."""
    return mask("product", clip_max, clip_min, "neutral")


@recipe("TRL 1.16.0")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return mask("product", clip_max, clip_min, "neutral")


@recipe("TRL 1.16.0")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return truncate("product", clip_max, clip_min, "neutral")


@recipe("TRL 1.16.0")
def token_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) inside the bounds, else 0."""
    return mask("token", clip_max, clip_min, "neutral")


@recipe("TRL 1.16.0")
def token_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) clamped to the bounds."""
    return truncate("token", clip_max, clip_min, "neutral")


@recipe("TRL 1.16.0")
def opsm(delta: float = 0.1, clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """sequence_mask, and 0 for a sequence with A < 0 whose mean(rollout - new) exceeds delta (off-policy mask).

    `off_policy_mask_threshold` has no default in TRL; 0.1 is Trinity's. For `policy_loss`.
    """
    spec = mask("product", clip_max, clip_min, "neutral")
    return replace(spec, criteria=(*spec.criteria, off_policy(delta)))
