"""unsloth-zoo's recipes: TRL's four modes, without reading NaN as ratio 1 (it cleans masked positions only)."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.frameworks.trl import presets
from rollout_corr.spec.correction import Spec


@recipe("unsloth-zoo ce232d6 (2026-08-20)")
def default(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """What it does unasked: sequence_mask."""
    return presets.mask("product", clip_max, clip_min, "reject")


@recipe("unsloth-zoo ce232d6 (2026-08-20)")
def sequence_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) inside the bounds, else 0 for the whole sequence."""
    return presets.mask("product", clip_max, clip_min, "reject")


@recipe("unsloth-zoo ce232d6 (2026-08-20)")
def sequence_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(sum D) clamped to the bounds."""
    return presets.truncate("product", clip_max, clip_min, "reject")


@recipe("unsloth-zoo ce232d6 (2026-08-20)")
def token_mask(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) inside the bounds, else 0."""
    return presets.mask("token", clip_max, clip_min, "reject")


@recipe("unsloth-zoo ce232d6 (2026-08-20)")
def token_truncate(clip_max: float | None = 3.0, clip_min: float | None = None) -> Spec:
    """w = exp(D) clamped to the bounds."""
    return presets.truncate("token", clip_max, clip_min, "reject")
