"""Bounds of log-ratios and statistics: comparing with them, and ratios after them. They may grow along a sequence."""

from __future__ import annotations

from math import exp
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.choices import Outside
from ..specs.correction import Criterion, Weight
from ..specs.statistics import float32_at_least, float32_at_most, log_bound

# One number, or one for each token; None for an open side.
Bound = float | Tensor | None


# A lower and an upper bound as numbers.
Sides = tuple[float | None, float | None]


class WeightBounds(NamedTuple):
    """The bounds of a weight, None for an open side: of the ratio's logarithm, where they cut, and of the ratio."""

    low: Bound
    high: Bound
    lower: Bound
    upper: Bound


OPEN = WeightBounds(None, None, None, None)


@cached(maxsize=256)
def bounds_in_numbers(lower: float | None, upper: float | None) -> WeightBounds:
    """The bounds of a ratio that are known from the start."""
    return WeightBounds(log_bound(lower), log_bound(upper), lower, upper)


def with_found(weight: Weight, low: Bound, high: Bound) -> WeightBounds:
    """The bounds of a weight; the batch may have decided some, whose logarithms are given as numbers or 0-d tensors."""
    known = bounds_in_numbers(weight.low, weight.high)
    return WeightBounds(
        known.low if low is None else low,
        known.high if high is None else high,
        known.lower if low is None else _exp(low),
        known.upper if high is None else _exp(high),
    )


def _exp(bound: Bound) -> Bound:
    if isinstance(bound, Tensor):
        return bound.double().exp()
    return None if bound is None else exp(bound)


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


def _clamped(ratio: Tensor, least: Bound, most: Bound) -> Tensor:
    """Clamp where an end is a tensor, in whose place clamp takes no number for the other."""
    for bound, clamp in ((least, torch.clamp_min), (most, torch.clamp_max)):
        if bound is not None:
            ratio = clamp(ratio, bound.to(ratio.dtype) if isinstance(bound, Tensor) else bound)
    return ratio


def grown(lower: Bound, upper: Bound, growth: Tensor | None) -> tuple[Bound, Bound]:
    """Multiply bounds; a ratio's are logs. An open side stays open."""
    if growth is None:
        return lower, upper
    return None if lower is None else lower * growth, None if upper is None else upper * growth


def after_bounds(
    bounds: WeightBounds,
    outside: Outside,
    ratio: Tensor,
    log_ratio: Tensor,
    center: float,
    growth: Tensor | None = None,
) -> Tensor:
    """Ratios after the bounds; `ratio` and the result less a center."""
    lower, upper = bounds.lower, bounds.upper
    if lower is None and upper is None:
        return ratio
    low, high = grown(bounds.low, bounds.high, growth)
    if outside == "clamp":
        if growth is not None:
            ends = (bound.exp() - center if isinstance(bound, Tensor) else None for bound in (low, high))
            return ratio.clamp(*ends)
        least, most = (None if bound is None else bound - center for bound in (lower, upper))
        if isinstance(least, Tensor) or isinstance(most, Tensor):
            return _clamped(ratio, least, most)
        return ratio.clamp(least, most)
    return torch.where(within(log_ratio, low, high), ratio, 0.0 - center)


def above(log_ratio: Tensor, bound: Bound) -> Tensor:
    """Bool per unit: beyond an upper bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~within(log_ratio, None, bound)


def below(log_ratio: Tensor, bound: Bound) -> Tensor:
    """Bool per unit: beyond a lower bound; nowhere where it is open. NaN is beyond any bound."""
    return _nowhere(log_ratio) if bound is None else ~within(log_ratio, bound, None)


def outside(log_ratio: Tensor, lower: float | None, upper: float | None) -> tuple[Tensor, Tensor]:
    """Bool per unit: beyond the upper bound, and beyond the lower one."""
    return above(log_ratio, upper), below(log_ratio, lower)


def _nowhere(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=x.device).expand(x.shape)


# --- bounds that the batch decides ---


class BoundsOfBatch(Protocol):
    """Gives the bounds that the batch decides."""

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """The lower and the upper bound of a criterion with a rule; None for a side that is a number or open.

        Values are per token or per unit, a ratio's as its logarithm; those that are `tested` are the batch, or all.
        `groups` is the group of each, where groups decide.
        """

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """The logarithms of the lower and the upper bound of a weight with a rule; None likewise."""


def beyond(value: Tensor, bounds: tuple[Bound, Bound]) -> Tensor:
    """Bool: a value beyond one of the bounds that the batch decided, 0-d or one for each; NaN is beyond any.

    They are of the dtype of the values, so nothing is rounded.
    """
    low, high = bounds
    if low is None:
        # No NaN passes a comparison.
        return value.isnan() if high is None else (value <= high).logical_not_()
    passed = value >= low
    return (passed if high is None else passed & (value <= high)).logical_not_()
