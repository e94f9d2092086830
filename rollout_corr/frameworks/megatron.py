"""Megatron-LM RL's recipe: `rl_inference_logprobs_is_correction`."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Spec, Weight


@recipe("Megatron-LM RL (2026-08)")
def tis(coef: float = 2.0) -> Spec:
    """w = min(exp(D), coef), coef being `rl_importance_sampling_truncation_coef`; Megatron itself has no default."""
    return Spec(weight=Weight("token", upper=coef))
