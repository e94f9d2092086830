"""Tunix's recipe: `sampler_is="token"`."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Spec, Weight


@recipe("Tunix 0.1.7")
def tis(threshold: float = 2.0) -> Spec:
    """w = min(exp(D), threshold), D clamped to +-20."""
    return Spec(weight=Weight("token", upper=threshold, token_clamp=20.0))
