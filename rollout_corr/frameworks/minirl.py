"""MiniRL (`ppo_recompute` of Stable-RL), for `policy_loss`: PPO's clip as a mask, beside a ratio new/rollout."""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BYPASS, Named, recipe
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.surrogates import Score


@preset_of("Stable-RL (2026-03)")
def mask(clip_low: float = 0.2, clip_high: float = 0.2) -> Spec:
    """0 for a token whose ratio new/old has left [1 - clip_low, 1 + clip_high] with its advantage."""
    criterion = Criterion(
        "ratio", lower=1.0 - clip_low, upper=1.0 + clip_high, when="outward", of="new/old", label="clip"
    )
    return Spec(criteria=(criterion,), rejected="zero")


RECIPES = {
    "default": recipe(
        Named(lambda upper: Score(upper=upper, of="new/rollout"), clip_ratio_c=20.0),
        ("old_logp", *BYPASS),
        "the ratio is new/rollout, the mask is of new/old",
        spec="minirl.mask",
    ),
}
