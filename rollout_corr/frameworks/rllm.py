"""rLLM: the losses of its own since PR #741 (2026-07)."""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.recipe import (
    BYPASS,
    DECOUPLED,
    NO_LOWER_CLAMP,
    SEQUENCES,
    Named,
    around_one,
    as_wide,
    clip,
    recipe,
)
from rollout_corr.specs.surrogates import DPPO, GPG, GSPO, Score

RECIPES = {
    "ppo_clip": recipe(Named(clip, eps_clip=0.2, eps_clip_high=None), DECOUPLED),
    "cispo": recipe(Named(as_wide(around_one), eps_clip=0.2, eps_clip_high=None), DECOUPLED),
    "gspo": recipe(
        Named(as_wide(partial(GSPO, through="token", clamp=10.0)), eps_clip=0.2, eps_clip_high=None),
        DECOUPLED,
        NO_LOWER_CLAMP,
        mean=SEQUENCES,
    ),
    "dppo_tv": recipe(Named(lambda low, high: DPPO("tv", low, high, None), delta_low=0.2, delta_high=0.2), DECOUPLED),
    "dppo_kl": recipe(
        Named(lambda delta: DPPO("kl", delta, delta, None, eps=1e-6), delta=0.2),
        DECOUPLED,
        "it floors p and q too, this package 1 - p and 1 - q",
    ),
    "icepop": recipe(
        Named(partial(Score, outside="zero", of="new/rollout"), icepop_alpha=0.5, icepop_beta=5.0), BYPASS
    ),
    "reinforce": recipe(GPG(), ()),
    "reinforce_kl": recipe(
        Named(partial(Score, of="new/rollout"), ratio_clamp_min=None, ratio_clamp_max=None),
        BYPASS,
        "its KLs to the sampler are off by default",
    ),
}
