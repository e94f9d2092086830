"""RLinf's recipe: `behave_weight_threshold` of its decoupled PPO."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec, Weight


@recipe("RLinf a3816b5 (2026-08-22)")
def decoupled(threshold: float = 2.0) -> Spec:
    """w = exp(D); tokens above threshold (2 or 5 in its recipes) masked, and out of the denominator."""
    return Spec(weight=Weight("token"), criteria=(Criterion("ratio", upper=threshold),), rejected="mask")
