"""Bounds of log-ratios and statistics: comparing with them, and ratios after them. They may grow along a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.spec.correction import Weight
from rollout_corr.spec.thresholds import float32_at_least, float32_at_most, log_bound

# One number, or one for each token; None for an open side.
Bound = float | Tensor | None


def limits(dtype: torch.dtype, lower: Bound, upper: Bound) -> tuple[Bound, Bound]:
    """The bounds, rounded so that comparing values of `dtype` with them is comparing with the bounds themselves."""
    # What differs from token to token is compared in float64.
    if dtype != torch.float32:
        return lower, upper
    return (
        float32_at_least(lower) if isinstance(lower, float) else lower,
        float32_at_most(upper) if isinstance(upper, float) else upper,
    )


def within(x: Tensor, lower: Bound, upper: Bound) -> Tensor:
    """lower <= x <= upper, both inclusive, either open. NaN is not within any bound."""
    lower, upper = limits(x.dtype, lower, upper)
    if lower is None:
        return torch.ones_like(x, dtype=torch.bool) if upper is None else x <= upper
    return x >= lower if upper is None else (x >= lower) & (x <= upper)


def grown(lower: float | None, upper: float | None, growth: Tensor | None) -> tuple[Bound, Bound]:
    """Multiply bounds, those of a ratio as logs; an open side stays open."""
    if growth is None:
        return lower, upper
    return None if lower is None else lower * growth, None if upper is None else upper * growth


def after_bounds(
    weight: Weight, ratio: Tensor, log_ratio: Tensor, centre: float, growth: Tensor | None = None
) -> Tensor:
    """Ratios after the bounds; `ratio` and the result less a centre."""
    lower, upper = weight.lower, weight.upper
    if not weight.bounded:
        return ratio
    low, high = grown(log_bound(lower), log_bound(upper), growth)
    if weight.outside == "clamp":
        if growth is not None:
            ends = (bound.exp() - centre if isinstance(bound, Tensor) else None for bound in (low, high))
            return ratio.clamp(*ends)
        return ratio.clamp(None if lower is None else lower - centre, None if upper is None else upper - centre)
    return torch.where(within(log_ratio, low, high), ratio, 0.0 - centre)
