"""DPPO's masks (Stable-RL): a token that has moved too far with its advantage does not train. For `policy_loss`."""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BYPASS, Named, recipe
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.score_losses import DPPO, Divergence


@preset_of("Stable-RL (2026-03)")
def tv(delta: float = 0.15) -> Spec:
    """0 for a token whose probability has moved with its advantage by more than delta since it was sampled."""
    criterion = Criterion("prob_diff", lower=-delta, upper=delta, when="outward", of="new/rollout", label="dppo")
    return Spec(criteria=(criterion,), rejected="zero")


@preset_of("Stable-RL (2026-03)")
def kl(delta: float = 0.05) -> Spec:
    """0 for a token that has moved with its advantage and whose binary KL(rollout || new) is above delta."""
    criterion = Criterion("binary_kl", upper=delta, when="outward", of="new/rollout", label="dppo")
    return Spec(criteria=(criterion,), rejected="zero")


def _surrogate(divergence: Divergence, delta: float, clip_ratio_c: float) -> DPPO:
    return DPPO(divergence, delta, delta, clip_ratio_c, of="new/rollout")


RECIPES = {
    "tv": recipe(Named(partial(_surrogate, "tv"), delta=0.15, clip_ratio_c=20.0), BYPASS),
    "kl": recipe(Named(partial(_surrogate, "kl"), delta=0.05, clip_ratio_c=20.0), BYPASS),
}
