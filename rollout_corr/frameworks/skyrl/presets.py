"""SkyRL: the corrections of its page on off-policy correction, by the names of its options.

SkyRL masks sequences with an outlier first, then tokens, then computes sequence weights and the sequence mask from what
is left. SkyRL counts rejected tokens: the mean of its loss is over "original".
"""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    NO_LOWER_CLAMP,
    SAME_AS_PPO,
    WITH_REFERENCE,
    Named,
    around_one,
    of_presets,
    preset_with,
    recipe,
)
from rollout_corr.frameworks.skyrl.config import penalty_over_rows, spec
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.surrogates import GSPO, PPO, SAPO, Reinforce
from rollout_corr.specs.terms import KL


@preset_of("SkyRL a956457 (2026-08-21)")
def tldr(geo_mask_low: float = 0.99, geo_mask_high: float = 1.01, token_tis_ratio_clip_high: float = 2.0) -> Spec:
    """All recommendations: geometric sequence mask, token TIS, token mask [0.5, 2], outlier mask [1e-4, 100]."""
    return spec(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=token_tis_ratio_clip_high,
        sequence_mask_metric="geometric",
        geo_mask_low=geo_mask_low,
        geo_mask_high=geo_mask_high,
        token_mask_is_threshold_low=0.5,
        token_mask_is_threshold_high=2.0,
        outlier_token_is_threshold_low=1e-4,
        outlier_token_is_threshold_high=100.0,
    )


@preset_of("SkyRL a956457 (2026-08-21)")
def token_tis(clip_high: float = 2.0) -> Spec:
    """Token TIS: w = min(exp(D), clip_high)."""
    return spec(tis_ratio_type="token", token_tis_ratio_clip_high=clip_high)


@preset_of("SkyRL a956457 (2026-08-21)")
def sequence_tis(clip_high: float = 5.0) -> Spec:
    """Sequence TIS: w = min(exp(sum D), clip_high)."""
    return spec(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=clip_high)


@preset_of("SkyRL a956457 (2026-08-21)")
def geometric_mask(low: float = 0.99, high: float = 1.01) -> Spec:
    """Keep a sequence iff exp(mean D) lies within [low, high]."""
    return spec(sequence_mask_metric="geometric", geo_mask_low=low, geo_mask_high=high)


@preset_of("SkyRL a956457 (2026-08-21)")
def product_mask(low: float = 0.5, high: float = 2.0) -> Spec:
    """Keep a sequence iff exp(sum D) lies within [low, high]."""
    return spec(sequence_mask_metric="product", product_mask_low=low, product_mask_high=high)


@preset_of("SkyRL a956457 (2026-08-21)")
def token_mask(low: float = 0.5, high: float = 2.0) -> Spec:
    """Keep a token iff exp(D) lies within [low, high]."""
    return spec(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high)


@preset_of("SkyRL a956457 (2026-08-21)")
def outlier_mask(low: float | None = 1e-4, high: float | None = 100.0) -> Spec:
    """A token outside [low, high] rejects its whole sequence."""
    return spec(outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high)


_CLIP = Named(PPO, eps_clip_low=0.2, eps_clip_high=0.2)


def _kl(coefficient: float | None) -> KL | None:
    return None if not coefficient else penalty_over_rows("k3", coefficient)


_KL = Named(_kl, kl_loss_coef=None)

RECIPES = of_presets("skyrl", _CLIP, BOTH, kl=_KL) | {
    "regular": recipe(_CLIP, DECOUPLED, kl=_KL),
    "ppo": recipe(_CLIP, DECOUPLED, "policy_loss_type regular"),
    "grpo": recipe(
        _CLIP, WITH_REFERENCE, f"{SAME_AS_PPO}; the KL loss of its defaults", kl=Named(_kl, kl_loss_coef=0.001)
    ),
    "dual_clip": recipe(Named(PPO, eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0), DECOUPLED),
    "cispo": recipe(
        Named(around_one, cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
        DECOUPLED,
        'cispo_anchor: Score(of="new/rollout")',
    ),
    "gspo": recipe(
        Named(partial(GSPO, through="token", clamp=10.0), eps_clip_low=0.2, eps_clip_high=0.2),
        DECOUPLED,
        NO_LOWER_CLAMP,
    ),
    "sapo": recipe(SAPO(), DECOUPLED),
    "rollout_is": recipe(
        Named(partial(around_one, outside="zero", of="new/rollout"), eps_clip_low=0.2, eps_clip_high=0.2),
        BYPASS,
        "its bounds exclude their ends, those of this package include them",
    ),
    "dppo": recipe(
        Reinforce(of="new/rollout"),
        BYPASS,
        spec=preset_with("prime_rl.dppo", delta_low=("dppo_mask_low", 0.2), delta_high=("dppo_mask_high", 0.2)),
    ),
}
