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
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    BYPASS,
    GLOBAL,
    ROWS,
    TOKENS,
    Named,
    Recipe,
    RecipeEntry,
    clip,
    recipe,
)
from rollout_corr.frameworks.shared.specs import LEVELS, off_policy
from rollout_corr.specs.choices import Nonfinite
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GPG, GSPO, PPO, SAPO, VESPO, Score
from rollout_corr.specs.terms import KL, Mean
from rollout_corr.specs.validate import one_of


def truncate(level: str, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """Clamp the ratio of a level to [clip_min, clip_max]."""
    if clip_max is None and clip_min is None:
        raise ValueError("expected clip_max, clip_min or both, got neither (nothing would be truncated)")
    return Spec(weight=Weight(*LEVELS[level], lower=clip_min, upper=clip_max), nonfinite=nonfinite)


def mask(level: str, clip_max: float | None, clip_min: float | None, nonfinite: Nonfinite) -> Spec:
    """Keep the ratio of a level inside [clip_min, clip_max] and make it 0 outside."""
    criterion = Criterion("ratio", *LEVELS[level], lower=clip_min, upper=clip_max)
    return Spec(weight=Weight(*LEVELS[level]), criteria=(criterion,), rejected="zero", nonfinite=nonfinite)


@preset_of("TRL 1.16.0")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """GRPOTrainer's default, sequence_mask: w = exp(sum D) inside the bounds, else 0."""
    return mask("sequence", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return mask("sequence", clip_max, clip_min, "neutral")


@preset_of("TRL 1.16.0")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return truncate("sequence", clip_max, clip_min, "neutral")


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
    spec = mask("sequence", clip_max, clip_min, "neutral")
    return replace(spec, criteria=(*spec.criteria, off_policy(delta)))


TOKEN_MODES = ("token_truncate", "token_mask")
MODES = (*TOKEN_MODES, "sequence_truncate", "sequence_mask")

# loss_type: its mean. That of dr_grpo is divided by max_completion_length too.
MEANS: dict[str, Mean] = {
    "grpo": ROWS,
    "bnpo": TOKENS,
    "dapo": TOKENS,
    "dr_grpo": Mean("sequence_sum", over="rows"),
    "luspo": Mean("sequence_sum", over="rows"),
    "sapo": ROWS,
    "cispo": TOKENS,
    "vespo": TOKENS,
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
    max_completion_length: float = 512.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_importance_sampling_correction: bool = True,
    vllm_importance_sampling_mode: str = "sequence_mask",
    off_policy_mask_threshold: float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    **bounds: Any,
) -> Recipe:
    """Return a loss of GRPOTrainer; `bounds` are those of the preset that corrects it."""
    modes = TOKEN_MODES if loss_type == "vespo" and vllm_importance_sampling_correction else MODES
    mode = one_of("vllm_importance_sampling_mode", vllm_importance_sampling_mode, modes)
    spec: Spec | None = lookup.named(f"trl.{mode}", **bounds)
    if not vllm_importance_sampling_correction:
        spec = None
    mean = mean_of(loss_type, max_completion_length)
    taus = sapo_temperature_pos, sapo_temperature_neg
    soft = vespo(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    of_tokens = surrogate(loss_type, epsilon, epsilon_high, delta, importance_sampling_level, taus, soft)
    kl = KL("k3", beta, weight="ratio" if use_bias_correction_kl else None) if beta else None
    corrects = spec if off_policy_mask_threshold is None else masked(spec, off_policy_mask_threshold)
    return Recipe(corrects, Loss(of_tokens, mean, kl))


def mean_of(loss_type: str, max_completion_length: float) -> Mean:
    """Return the mean of a loss_type."""
    return replace(MEANS[loss_type], length=max_completion_length) if loss_type == "dr_grpo" else MEANS[loss_type]


def surrogate(
    loss_type: str,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
    importance_sampling_level: str,
    taus: tuple[float, float],
    soft: VESPO,
) -> Surrogate:
    """Return the loss of a token."""
    level = one_of("importance_sampling_level", importance_sampling_level, IMPORTANCE_LEVELS)
    if loss_type in ("cispo", "sapo", "vespo"):
        if level == "sequence":
            raise ValueError(
                f"importance_sampling_level: expected 'token' with loss_type {loss_type!r}, got 'sequence'"
            )
        if loss_type == "vespo":
            return soft
        return SAPO(*taus) if loss_type == "sapo" else Score(upper=5.0 if epsilon_high is None else epsilon_high)
    sides = epsilon, epsilon if epsilon_high is None else epsilon_high
    return GSPO(*sides, delta=delta) if level == "sequence" else PPO(*sides, delta=delta)


def vespo(k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> VESPO:
    """Return VESPO; its rates are at least 1e-4 in TRL."""
    return VESPO(k_pos, max(lambda_pos, 1e-4), k_neg, max(lambda_neg, 1e-4))


def masked(spec: Spec | None, threshold: float) -> Spec:
    """Add the off-policy mask to a correction. A masked sequence keeps its KL and is counted by the mean."""
    spec = Spec(nonfinite="neutral") if spec is None else spec
    return replace(spec, criteria=(*spec.criteria, off_policy(threshold)), rejected="zero")


# VESPO takes the ratios of tokens alone, so TRL refuses it with the default mode.
RECIPES = {name: RecipeEntry(partial(loss, name), BOTH, NOTES.get(name, "")) for name in MEANS if name != "vespo"}
RECIPES["vespo"] = RecipeEntry(
    partial(loss, "vespo", vllm_importance_sampling_mode="token_truncate"),
    BOTH,
    f"vllm_importance_sampling_mode token_truncate or token_mask; {GLOBAL}",
)
# AsyncGRPOTrainer clips the ratio of trainer to engine, and corrects nothing beside it.
RECIPES["iw_opd"] = recipe(
    GPG(), (), "advantages a * rc.early_token_weights(a, gamma=0.5), where a = ref_logp - rollout_logp"
)
RECIPES["async_grpo"] = recipe(Named(clip, epsilon=0.2, epsilon_high=None), BYPASS, GLOBAL)
