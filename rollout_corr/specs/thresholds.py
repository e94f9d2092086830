"""Thresholds: the bounds of a criterion taken to the quantity that is compared, once, on the host, in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .statistics import Compared
from .statistics import log_of as log_of
from .validate import LARGEST_FLOAT32 as LARGEST_FLOAT32

if TYPE_CHECKING:
    from .criterion import Criterion


class Threshold(NamedTuple):
    """Keep iff lower <= x <= upper and x is not inside the open interval `hole`; x is the quantity that `on` names."""

    on: Compared
    lower: float | None
    upper: float | None
    hole: tuple[float, float] | None = None


def log_bound(bound: float | None) -> float | None:
    """A bound of a ratio in log space; None, an open side, stays None."""
    return None if bound is None else log_of(bound)


def threshold_of(criterion: Criterion) -> Threshold:
    """The comparison that decides `criterion`.

    A token, or the extremum of a sequence, is compared as a log-ratio wherever the statistic can be inverted, so that
    the last bits of exp, which differ between backends, decide nothing. So are ratios at every level, because they
    aggregate in log space.
    """
    row, lower, upper = criterion.statistic, criterion.low, criterion.high
    summed = criterion.reduce in ("sum", "mean")
    # A bound that grows is multiplied as it is: its inverse would grow otherwise.
    if row.inverse is not None and (row.log_space or not (summed or criterion.growth)):
        low = None if lower is None else row.inverse(lower)
        return Threshold(row.compared, low, None if upper is None else row.inverse(upper))
    if row.branches is not None and criterion.over == "token":
        outer: tuple[float | None, float | None] = (None, None) if upper is None else row.branches(upper)
        return Threshold(row.compared, *outer, row.branches(lower) if lower else None)
    return Threshold("value", lower, upper)


def float32_at_most(x: float) -> float:
    """The largest float32 <= x, so that comparing a float32 with it is comparing with x itself."""
    if math.isinf(x):
        return x
    scale = 2.0 ** (24 - max(math.frexp(x)[1], -125))  # 24 bits of significand, fewer below 2^-126
    rounded = math.floor(x * scale) / scale
    return min(rounded, LARGEST_FLOAT32) if rounded >= -LARGEST_FLOAT32 else -math.inf


def float32_at_least(x: float) -> float:
    """The smallest float32 >= x."""
    return -float32_at_most(-x)
