"""RLinf: `behave_weight_threshold` of its decoupled PPO."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, DECOUPLED, Named, clip, mean, penalty, preset_with, recipe
from rollout_corr.specs.correction import Criterion, Spec, Weight


@preset_of("RLinf a3816b5 (2026-08-22)")
def decoupled(threshold: float = 2.0) -> Spec:
    """w = exp(D); tokens above threshold (2 or 5 in its configurations) masked, and not counted by the mean."""
    return Spec(weight=Weight.token(), criteria=(Criterion("ratio", upper=threshold),), rejected="mask")


# Of a3816b5: `loss_type=actor`; `importance_sampling_fix`, which multiplies the advantages: a weight.
_CLIP = Named(clip, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
_ACTOR: dict[str, Any] = {
    "mean": mean(loss_agg_func="token-mean"),
    "kl": penalty(value_clamp=10.0, kl_beta=0.0),
}

_WHICH_KL = "the KL of its Megatron actor; that of the FSDP actor has `swapped=True`"

RECIPES = {
    "actor": recipe(_CLIP, DECOUPLED, _WHICH_KL, **_ACTOR),
    "ppo": recipe(_CLIP, DECOUPLED, f"loss_type actor_critic without its critic; {_WHICH_KL}", **_ACTOR),
    "grpo": recipe(_CLIP, DECOUPLED, f"loss_type actor; {_WHICH_KL}", **_ACTOR),
    "importance_sampling_fix": recipe(
        _CLIP,
        BOTH,
        "the clip has no default in RLinf, its examples say 1 or 2",
        spec=preset_with("megatron.tis", importance_sampling_clip=("coef", 2.0)),
        **_ACTOR,
    ),
    "decoupled": recipe(_CLIP, BOTH, spec="rlinf.decoupled", over="kept"),
}
