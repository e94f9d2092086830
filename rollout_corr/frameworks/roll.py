"""ROLL's recipe: `train_infer_correction` with the defaults of its weight and of its filter, both switched on."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec, Weight


@recipe("ROLL 8eb27cc (2026-08-18)")
def default(upper_bound: float | None = 1.2, ratio_low: float | None = 0.8, ratio_high: float | None = 1.2) -> Spec:
    """w = exp(D) clamped to [0, upper_bound]; tokens outside [ratio_low, ratio_high] masked."""
    criterion = Criterion("ratio", lower=ratio_low, upper=ratio_high)
    return Spec(weight=Weight("token", lower=0.0, upper=upper_bound), criteria=(criterion,), rejected="mask")
