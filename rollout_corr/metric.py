"""One row of the tables of metrics, and the divisions that rows share."""

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
