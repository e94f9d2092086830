"""One row of the tables of metrics, and the formulas that rows share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

Values = Mapping[str, float]


class Metric(NamedTuple):
    """One row of a table."""

    key: str
    formula: str
    unit: str
    denominator: str
    healthy: str
    value: Callable[[Values], float]


def ratio_of(total: float, count: float) -> float:
    """total / count, and 0 for 0 of 0."""
    return total / count if count else 0.0


def std_of(total: float, squares: float, count: float) -> float:
    """Population standard deviation from sums around a centre near the mean."""
    mean = ratio_of(total, count)
    return math.sqrt(max(ratio_of(squares, count) - mean * mean, 0.0)) if count else 0.0


def ess_of(v: Values, name: str, units: str) -> float:
    """(sum w)^2 / (n sum w^2), from plain sums or, at token level, from sums of w - 1 and (w - 1)^2."""
    n = v[units]
    if f"{name}_plain" in v:
        total, squares = v[f"{name}_plain"], v[f"{name}_plain2"]
    else:
        total, squares = n + v[name], n + 2.0 * v[name] + v[f"{name}2"]
    return max(0.0, min(1.0, ratio_of(total * total, n * squares)))


def extremum_of(value: float, count: float, centre: float = 0.0) -> float:
    """A minimum or maximum from its distance to a centre; 0 of nothing."""
    return value + centre if count else 0.0


def correlation_of(v: Values) -> float:
    """Pearson correlation of the two probabilities; 0 where either is constant."""
    n = v["tokens_measured"]
    mean_p, mean_q = ratio_of(v["p"], n), ratio_of(v["q"], n)
    square_p, square_q = ratio_of(v["p2"], n), ratio_of(v["q2"], n)
    variance_p, variance_q = square_p - mean_p**2, square_q - mean_q**2
    # The variance of a constant is rounding noise, and its correlation would say nothing.
    if variance_p <= 1e-12 * square_p or variance_q <= 1e-12 * square_q:
        return 0.0
    covariance = ratio_of(v["pq"], n) - mean_p * mean_q
    return max(-1.0, min(1.0, covariance / math.sqrt(variance_p * variance_q)))
