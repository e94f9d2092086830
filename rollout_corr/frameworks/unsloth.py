"""unsloth-zoo: TRL's four modes and its losses, without reading NaN as ratio 1 (it cleans masked positions only)."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.trl import presets
from rollout_corr.spec.correction import Spec


@preset_of("unsloth-zoo ce232d6 (2026-08-20)")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """unsloth-zoo's default, sequence_mask: w = exp(sum D) inside the bounds, else 0."""
    return presets.mask("product", clip_max, clip_min, "reject")


@preset_of("unsloth-zoo ce232d6 (2026-08-20)")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return presets.mask("product", clip_max, clip_min, "reject")


@preset_of("unsloth-zoo ce232d6 (2026-08-20)")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return presets.truncate("product", clip_max, clip_min, "reject")


@preset_of("unsloth-zoo ce232d6 (2026-08-20)")
def token_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) inside the bounds, else 0."""
    return presets.mask("token", clip_max, clip_min, "reject")


@preset_of("unsloth-zoo ce232d6 (2026-08-20)")
def token_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) clamped to the bounds."""
    return presets.truncate("token", clip_max, clip_min, "reject")


# TRL's losses but luspo, which is an average over padding in unsloth-zoo.
LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo")
NOTES = presets.NOTES | {"dapo": "epsilon_high is set to 0.28, whatever is given"}


def _loss(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.001,
    importance_sampling_level: str = "token",
    max_completion_length: float = 256.0,
    vllm_importance_sampling_correction: bool = False,
    vllm_importance_sampling_mode: str = "sequence_mask",
    **bounds: Any,
) -> dict[str, Any]:
    """Return the arguments of one of TRL's losses with unsloth's defaults and a KL that no ratio multiplies."""
    high = 0.28 if loss_type == "dapo" else epsilon_high
    made = presets.loss(
        loss_type,
        epsilon,
        high,
        delta,
        beta,
        False,
        importance_sampling_level,
        max_completion_length,
    )
    spec = lookup.preset(f"unsloth.{vllm_importance_sampling_mode}", **bounds)
    return made | {"spec": spec if vllm_importance_sampling_correction else None}


RECIPES = {name: Recipe(partial(_loss, name), ("old_logp", "ref_logp"), NOTES.get(name, "")) for name in LOSSES}
