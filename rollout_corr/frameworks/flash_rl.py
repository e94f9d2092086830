"""Flash-RL: the cap of its patch to verl."""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, Named, clip, of_presets
from rollout_corr.specs.correction import Spec, Weight


@preset_of("Flash-RL 7c82823 (2025-11)")
def tis(imp_ratio_cap: float = 2.0) -> Spec:
    """w = min(exp(D), imp_ratio_cap); its int8 configurations use 8."""
    return Spec(weight=Weight.token(upper=imp_ratio_cap))


RECIPES = of_presets(
    "flash_rl",
    Named(clip, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0),
    BOTH,
    "the loss of the verl that it patches",
)
