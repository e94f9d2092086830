"""Where a threshold cuts: bounds taken to the quantity that is compared, once, on the host, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

from rollout_corr.spec.correction import Criterion

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


class Cut(NamedTuple):
    """Keep iff lower <= x <= upper and x is not inside the open interval `hole`; x is what `on` says.

    on: "d" the log-ratio, "clamped_d" the log-ratio clamped to +-Spec.clamp, "abs_d" and "clamped_abs_d" their
    magnitudes, "value" the statistic itself.
    """

    on: str
    lower: float | None
    upper: float | None
    hole: tuple[float, float] | None = None


def log_bound(bound: float | None) -> float | None:
    """A bound of a ratio in log space, where there is one."""
    return None if bound is None else log_of(bound)


def log_of(bound: float) -> float:
    """log 0 is -inf."""
    return math.log(bound) if bound > 0.0 else -math.inf


def cut_of(criterion: Criterion, clamp: float) -> Cut:
    """The comparison that decides `criterion`.

    A token, or the extremum of a sequence, is compared as a log-ratio wherever the statistic can be inverted, so that
    no backend's exp has a say; so are ratios at every level, because they aggregate in log space.
    """
    lower, upper = criterion.lower, criterion.upper
    if criterion.stat == "ratio":
        return Cut("d", log_bound(lower), log_bound(upper))
    if criterion.reduce in ("sum", "mean"):
        return Cut("value", lower, upper)
    if criterion.stat == "k2":
        low, high = (None if bound is None else math.sqrt(2.0 * bound) for bound in (lower, upper))
        return Cut("abs_d", low, high)
    if criterion.stat == "ratio_error":
        return Cut("clamped_abs_d", log_bound(lower), log_bound(upper))
    if criterion.over == "token" and criterion.stat in _INVERSES:
        inverse = _INVERSES[criterion.stat]
        outer: tuple[float | None, float | None] = (None, None) if upper is None else inverse(upper)
        return Cut("clamped_d", *outer, inverse(lower) if lower else None)
    return Cut("value", lower, upper)


def _where_deviation_is(value: float) -> tuple[float, float]:
    """The two D with |e^D - 1| = value."""
    return (math.log1p(-value) if value < 1.0 else -math.inf), math.log1p(value)


def _where_k3_is(value: float) -> tuple[float, float]:
    """The two D with e^D - 1 - D = value."""
    if value == math.inf:
        return -math.inf, math.inf

    def root(outer: float) -> float:
        inner = 0.0
        for _ in range(200):
            middle = 0.5 * (inner + outer)
            if _k3(middle) <= value:
                inner = middle
            else:
                outer = middle
        return inner

    return root(-value - 1.0), root(min(math.sqrt(2.0 * value), math.log1p(value) + 1.0))


def _k3(d: float) -> float:
    if abs(d) >= 0.5:
        return math.exp(d) - 1.0 - d
    term = total = 0.5 * d * d
    for k in range(3, 24):
        term *= d / k
        total += term
    return total


def _where_k3_reverse_is(value: float) -> tuple[float, float]:
    low, high = _where_k3_is(value)
    return -high, -low


_INVERSES = {
    "ratio_deviation": _where_deviation_is,
    "k3": _where_k3_is,
    "k3_reverse": _where_k3_reverse_is,
}


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
