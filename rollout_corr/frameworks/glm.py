"""GLM-5's IcePop, of its reasoning RL. The double-sided importance sampling of its agentic RL is a loss: a recipe."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.validate import positive


@recipe("GLM-5 (2026-02), arXiv 2602.15763")
def icepop(beta: float = 2.0) -> Spec:
    """w = exp(D) inside [1 / beta, beta], else 0."""
    upper = positive("beta", beta, finite=False)
    criterion = Criterion("ratio", lower=1.0 / upper, upper=upper)
    return Spec(weight=Weight("token"), criteria=(criterion,), rejected="zero")
