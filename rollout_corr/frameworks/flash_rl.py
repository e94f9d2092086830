"""Flash-RL's recipe: the cap of its patch to verl."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Spec, Weight


@recipe("Flash-RL 7c82823 (2025-11)")
def tis(imp_ratio_cap: float = 2.0) -> Spec:
    """w = min(exp(D), imp_ratio_cap); its int8 recipes use 8."""
    return Spec(weight=Weight("token", upper=imp_ratio_cap))
