"""Megatron-LM RL: `rl_inference_logprobs_is_correction`."""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, Named, clip, penalty, preset_with, recipe
from rollout_corr.specs.correction import Spec, Weight


@preset_of("Megatron-LM RL (2026-08)")
def tis(coef: float = 2.0) -> Spec:
    """w = min(exp(D), coef), coef being `rl_importance_sampling_truncation_coef`; Megatron itself has no default."""
    return Spec(weight=Weight.token(upper=coef))


# calculate_grpo_loss of d98e8a6 (2026-08-22).
_SURROGATE = Named(clip, grpo_clamp_eps_lower=0.01, grpo_clamp_eps_upper=0.01)
_KL = penalty(grpo_kl_beta=0.001)

RECIPES = {
    "grpo": recipe(_SURROGATE, ("old_logp", "ref_logp"), kl=_KL),
    "tis": recipe(
        _SURROGATE,
        (*BOTH, "ref_logp"),
        "the coefficient has no default in Megatron",
        spec=preset_with("megatron.tis", rl_importance_sampling_truncation_coef=("coef", 2.0)),
        kl=_KL,
    ),
}
