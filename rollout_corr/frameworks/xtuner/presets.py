"""xtuner: the values of `RolloutImportanceSampling` in the configurations that it ships.

Pairs of bounds are (upper, lower), as in xtuner.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, DECOUPLED, GLOBAL, Named, of_presets, penalty, recipe
from rollout_corr.frameworks.xtuner.config import Pair, spec
from rollout_corr.specs.choices import Drop
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.surrogates import PPO


@preset_of("xtuner b934f46 (2026-08-21)")
def reasoning(
    threshold: Pair = (5.0, 0.5), mask_threshold: Pair | None = (5.0, 0.5), veto_threshold: Pair | None = (20.0, 0.0)
) -> Spec:
    """Token weight clamped on both sides; tokens outside mask_threshold masked; one outside veto_threshold vetoes."""
    return spec("token", "both", threshold, mask_threshold, veto_threshold)


@preset_of("xtuner b934f46 (2026-08-21)")
def agentic(
    threshold: Pair = (5.0, 0.0), mask_threshold: Pair | None = (5.0, 0.5), veto_threshold: Pair | None = (20.0, 0.0)
) -> Spec:
    """Token weight clamped above; tokens outside mask_threshold masked; one outside veto_threshold vetoes."""
    return spec("token", "both", threshold, mask_threshold, veto_threshold)


_CLIP = Named(PPO, cliprange_low=0.2, cliprange_high=0.2, clip_ratio_c=3.0)
_KL = penalty(value_clamp=10.0, kl_loss_coef=0.0)

RECIPES = of_presets("xtuner", _CLIP, BOTH, GLOBAL + ", after rejection", over="kept", kl=_KL) | {
    "ppo": recipe(_CLIP, DECOUPLED, f"without rollout_is; {GLOBAL}"),
    "grpo": recipe(
        _CLIP,
        DECOUPLED,
        f"without rollout_is; a kl_loss_coef is that of kl_loss_type low_var_kl; {GLOBAL}",
        kl=_KL,
    ),
}


# Below RECIPES, which has one for each preset above: this one goes with the versions of tokens, and with any loss.
@preset_of("xtuner b934f46 (2026-08-21)")
def staleness(max_staleness: int = 0, max_token_staleness: int | None = None, sync_weights_interval: int = 1) -> Spec:
    """Drop sequences with a token older than max_staleness + 1 weight syncs, and tokens older than their own limit.

    `Versions.ids` are `response_model_steps`, `Versions.current` is the train step: xtuner counts from the step before.
    """
    limits: list[tuple[int | None, Drop]] = [(max_staleness, "sequence"), (max_token_staleness, "unit")]
    criteria = [
        Criterion("age", upper=(syncs + 1) * sync_weights_interval, drop=drop)
        for syncs, drop in limits
        if syncs is not None
    ]
    return Spec(criteria=tuple(criteria))
