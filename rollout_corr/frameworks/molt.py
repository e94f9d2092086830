"""labs-molt's recipes: `is_correction_level` seq and geo, which only gate; what survives keeps its token ratio.

molt's "seq" is the product. It reads NaN as D = 0 and clamps D to +-30, per token and again after summing. Rejection
zeroes the weight.
"""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Reduce, Spec, Weight

LIMIT = 30.0


def _gated(reduce: Reduce, low: float | None, high: float | None) -> Spec:
    criterion = Criterion("ratio", over="sequence", reduce=reduce, lower=low, upper=high, token_clamp=LIMIT)
    return Spec(
        weight=Weight("token", token_clamp=LIMIT),
        criteria=(criterion,),
        rejected="zero",
        clamp=LIMIT,
        nonfinite="neutral",
    )


@recipe("labs-molt 2d62608 (2026-08-06)")
def seq(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(sum D) is outside [low, high]."""
    return _gated("sum", low, high)


@recipe("labs-molt 2d62608 (2026-08-06)")
def geo(low: float | None = 0.99, high: float | None = 1.01) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]; the bounds are its quick start's."""
    return _gated("mean", low, high)
