"""TRL: `vllm_importance_sampling_mode` of GRPOTrainer, with its `..._clip_max` and `..._clip_min`.

TRL's "sequence" is the product of the ratios. A token whose log-prob is NaN gets ratio 1 there ("neutral"). Rejection
zeroes the weight, so no denominator changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, GLOBAL, SEQUENCES, Recipe, arguments
from rollout_corr.frameworks.shared.specs import off_policy
from rollout_corr.spec.correction import Criterion, Level, Nonfinite, Reduce, Spec, Unit, Weight
from rollout_corr.spec.loss import KL, LossReduction
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import GSPO, PPO, SAPO, Score
from rollout_corr.spec.validate import one_of


def truncate(level: Level, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """Clamp the ratio to [clip_min, clip_max]."""
    if clip_max is None and clip_min is None:
        raise ValueError("expected clip_max, clip_min or both, got neither (nothing would be truncated)")
    return Spec(weight=Weight(level, lower=clip_min, upper=clip_max), nonfinite=nonfinite)


def mask(level: Level, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """Keep the ratio inside [clip_min, clip_max] and make it 0 outside."""
    unit: tuple[Unit, Reduce | None] = ("token", None) if level == "token" else ("sequence", "sum")
    criterion = Criterion("ratio", *unit, lower=clip_min, upper=clip_max)
    return Spec(weight=Weight(level), criteria=(criterion,), rejected="zero", nonfinite=nonfinite)


@preset_of("TRL 1.16.0")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """GRPOTrainer's default, sequence_mask: w = exp(sum D) inside the bounds, else 0."""
    return mask("product", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return mask("product", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return truncate("product", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def token_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) inside the bounds, else 0."""
    return mask("token", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def token_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) clamped to the bounds."""
    return truncate("token", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def opsm(delta: float = 0.1, clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """sequence_mask, and 0 for a sequence with A < 0 whose mean(rollout - new) exceeds delta (off-policy mask).

    `off_policy_mask_threshold` has no default in TRL; 0.1 is Trinity's. For `policy_loss`.
    """
    spec = mask("product", clip_max, clip_min, "neutral")
    return replace(spec, criteria=(*spec.criteria, off_policy(delta)))


# loss_type: its reduction.
REDUCTIONS: dict[str, LossReduction] = {
    "grpo": SEQUENCES,
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "token_sum_norm",
    "luspo": "sequence_mean_token_sum",
    "sapo": SEQUENCES,
    "cispo": "token_mean",
}
IMPORTANCE_LEVELS = ("token", "sequence")
NOTES = {"dapo": GLOBAL, "cispo": GLOBAL, "dr_grpo": "max_completion_length is the trainer's"}


def loss(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    max_completion_length: float = 256.0,
    vllm_importance_sampling_mode: str = "sequence_mask",
    off_policy_mask_threshold: float | None = None,
    **bounds: Any,
) -> dict[str, Any]:
    """Return the arguments of a loss of GRPOTrainer; `bounds` are those of the preset that corrects it."""
    level = one_of("importance_sampling_level", importance_sampling_level, IMPORTANCE_LEVELS)
    sides = epsilon, epsilon if epsilon_high is None else epsilon_high
    surrogate: Surrogate = PPO(*sides, delta=delta)
    if loss_type == "cispo":
        surrogate = Score(upper=epsilon_high or 5.0)
    elif loss_type == "sapo":
        surrogate = SAPO()
    elif level == "sequence":
        surrogate = GSPO(*sides, delta=delta)
    preset = f"trl.{vllm_importance_sampling_mode}"
    if off_policy_mask_threshold is not None:
        preset, bounds = "trl.opsm", bounds | {"delta": off_policy_mask_threshold}
    return arguments(
        surrogate,
        lookup.preset(preset, **bounds),
        REDUCTIONS[loss_type],
        kl=KL("k3", beta, weight="ratio" if use_bias_correction_kl else None) if beta else None,
        max_length=max_completion_length if loss_type == "dr_grpo" else None,
    )


RECIPES = {name: Recipe(partial(loss, name), BOTH, NOTES.get(name, "")) for name in REDUCTIONS}
