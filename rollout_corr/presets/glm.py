"""GLM-5's double-sided IcePop, for `policy_loss`."""

from __future__ import annotations

from rollout_corr.presets.checks import positive
from rollout_corr.presets.registry import recipe
from rollout_corr.spec import Criterion, Spec, Weight


@recipe("GLM-5 (2026)")
def icepop(beta: float = 2.0) -> Spec:
    """w = exp(D), and 0 for a token whose old/rollout or new/rollout is outside [1 / beta, beta]; beta is ours."""
    upper = positive("beta", beta)
    lower = 1.0 / upper
    criteria = (
        Criterion("ratio", lower=lower, upper=upper, label="old"),
        Criterion("ratio", lower=lower, upper=upper, of="new/rollout", label="new"),
    )
    return Spec(weight=Weight("token"), criteria=criteria, rejected="zero")
