"""Kimi K2.5's interval, for `policy_loss`: a token outside has no gradient, whatever the sign of its advantage."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec


@recipe("Kimi K2.5 (2026-02), arXiv 2602.02276")
def interval(lower: float = 0.5, upper: float = 2.0) -> Spec:
    """0 for a token whose ratio new/rollout is outside [lower, upper]; the report gives no bounds, these are ours."""
    criterion = Criterion("ratio", lower=lower, upper=upper, of="new/rollout", label="interval")
    return Spec(criteria=(criterion,), rejected="zero")
