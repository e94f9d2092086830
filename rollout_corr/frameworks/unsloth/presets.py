"""unsloth-zoo: TRL's modes and losses, with a geometric level. A NaN is ratio 1 ("neutral"), as since 2026.10.9."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import Recipe, RecipeEntry
from rollout_corr.frameworks.trl import presets
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.terms import KL, KLWeight
from rollout_corr.specs.validate import one_of


@preset_of("unsloth-zoo 2026.10.9")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """unsloth-zoo's default, sequence_mask: w = exp(sum D) inside the bounds, else 0."""
    return presets.mask("sequence", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return presets.mask("sequence", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return presets.truncate("sequence", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def token_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) inside the bounds, else 0."""
    return presets.mask("token", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def token_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) clamped to the bounds."""
    return presets.truncate("token", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def geometric_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(mean D) inside the bounds, else 0 for the whole sequence."""
    return presets.mask("geometric", clip_max, clip_min, "neutral")


@preset_of("unsloth-zoo 2026.10.9")
def geometric_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(mean D) clamped to the bounds."""
    return presets.truncate("geometric", clip_max, clip_min, "neutral")


MODES = (*presets.MODES, "geometric_truncate", "geometric_mask")


def loss(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.001,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    max_completion_length: float = 512.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_importance_sampling_correction: bool = False,
    vllm_importance_sampling_mode: str = "sequence_mask",
    off_policy_mask_threshold: float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    **bounds: Any,
) -> Recipe:
    """Return one of TRL's losses with unsloth's defaults; its KL is at most 10."""
    high = 0.28 if loss_type == "dapo" and epsilon_high is None else epsilon_high
    modes = presets.TOKEN_MODES if loss_type == "vespo" and vllm_importance_sampling_correction else MODES
    mode = one_of("vllm_importance_sampling_mode", vllm_importance_sampling_mode, modes)
    spec: Spec | None = lookup.named(f"unsloth.{mode}", **bounds)
    if not vllm_importance_sampling_correction:
        spec = None
    taus = sapo_temperature_pos, sapo_temperature_neg
    soft = presets.vespo(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    weight: KLWeight | None = "ratio" if use_bias_correction_kl else None
    of_tokens = presets.surrogate(loss_type, epsilon, high, delta, importance_sampling_level, taus, soft)
    kl = KL("k3", beta, value_clamp=10.0, weight=weight) if beta else None
    corrects = spec if off_policy_mask_threshold is None else presets.masked(spec, off_policy_mask_threshold)
    return Recipe(corrects, Loss(of_tokens, presets.mean_of(loss_type, max_completion_length), kl))


NOTES = presets.NOTES
NEEDS = ("old_logp", "ref_logp")
RECIPES = {name: RecipeEntry(partial(loss, name), NEEDS, NOTES.get(name, "")) for name in presets.MEANS}
