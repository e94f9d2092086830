"""The kinds of row that statistics and metrics are made of, and the formulas that metrics share.

A statistic is taken on the device and lies in `Statistics`. A metric is computed from merged statistics on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from rollout_corr.definition.tokens import Number

Values = Mapping[str, float]

# Where statistics are taken:
# "tokens": in every block, over its tokens. Each rank of a sequence group adds those of the tokens that it holds.
# "blocks": in every block, over its whole sequences.
# "sequences": once a call, as the sum of a value per sequence; "measured": over sequences with a measured token alone.
# "turns", "measured turns": likewise of a value per turn.
# "call": once a call, over all sequences.
# The first rank of a sequence group alone adds what is taken over whole sequences.
At = Literal["tokens", "blocks", "sequences", "measured", "turns", "measured turns", "call"]


def always(_: Any) -> bool:
    """Take a statistic whatever is asked for."""
    return True


class Aggregate(NamedTuple):
    """A sum or an extremum in `Statistics`, or several that share temporaries.

    Attributes:
        sums: Names of the sums.
        maxima: Names of the maxima. A minimum travels as the maximum of the negated value, under "-min_...".
        at: Where they are taken.
        value: Gives the sums and then the maxima, from the `Findings` of a block or from `AllSequences`: each 0-d or
            read, or per sequence or turn, [S] or [U], where they are added up ("sequences" and what follows it, of one
            name each).
        when: Tells from a Spec if it needs them.
        local: Counted by every rank of a sequence group, although it is taken over sequences.
        one: Gives the one sum of a row that has no more; None for others.
    """

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    at: At
    value: Callable[[Any], tuple[Number, ...]]
    when: Callable[[Any], bool] = always
    local: bool = False
    one: Callable[[Any], Number] | None = None


def total(
    name: str, at: At, value: Callable[[Any], Number], when: Callable[[Any], bool] = always, local: bool = False
) -> Aggregate:
    """Make the row of a sum."""
    return Aggregate((name,), (), at, lambda view: (value(view),), when, local, value)


def extremes(
    name: str, at: At, value: Callable[[Any], tuple[Number, Number]], when: Callable[[Any], bool] = always
) -> Aggregate:
    """Make the row of a maximum and a minimum; `value` gives (-minimum, maximum)."""
    return Aggregate((), (f"max_{name}", f"-min_{name}"), at, lambda view: value(view)[::-1], when)


class Over(NamedTuple):
    """The units that a metric is taken over: words for the docs, and the name of the sum that counts them."""

    words: str
    units: str | None


class Metric(NamedTuple):
    """A metric, and its line in docs/metrics.md.

    Attributes:
        key: Its key in `metrics()`.
        formula: Its definition in words.
        unit: The unit of its value.
        over: The units that it is taken over.
        healthy: Its range in a healthy run.
        value: Gives it from the statistics by name and the count of those units.
    """

    key: str
    formula: str
    unit: str
    over: Over
    healthy: str
    value: Callable[[Values, float], float]

    def read(self, values: Values) -> float:
        """The metric from merged statistics by name."""
        return self.value(values, 0.0 if self.over.units is None else values[self.over.units])


def read_all(rows: Iterable[Metric], values: Values) -> dict[str, float]:
    """Read metrics by key, as `Metric.read` does one; a call for each of them would be a third of the time."""
    return {row.key: row.value(values, 0.0 if (units := row.over.units) is None else values[units]) for row in rows}


# --- formulas of metrics ---

Formula = Callable[[Values, float], float]


def ratio_of(total: float, count: float) -> float:
    """total / count, and 0 for 0 of 0."""
    return total / count if count else 0.0


def fraction(x: float) -> float:
    """x within 0 and 1, which rounding may have left."""
    if isinstance(x, float):
        return max(0.0, min(1.0, x))
    return x.within(0.0, 1.0)


def exp(x: float) -> float:
    """e^x as tensors have it: infinite where it overflows, and NaN of NaN."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: float) -> float:
    """log x as tensors have it: -inf of 0, and NaN below."""
    if x > 0.0:
        return math.log(x)
    return -math.inf if x == 0.0 else math.nan


def squared(x: float) -> float:
    """x times x, infinite where it overflows; `x**2` raises there."""
    return x * x


def plain(name: str) -> Formula:
    """A sum as it is."""
    return lambda v, n: v[name]


def mean(name: str) -> Formula:
    """The mean, from a sum."""
    return lambda v, n: ratio_of(v[name], n)


def mean_around(centre: float, name: str) -> Formula:
    """The mean, from a sum of differences from a centre."""
    return lambda v, n: ratio_of(v[name] + centre * n, n)


def std(name: str) -> Formula:
    """Population standard deviation, from the sums NAME and NAME2 around any centre near the mean."""

    def formula(v: Values, n: float) -> float:
        average = ratio_of(v[name], n)
        return math.sqrt(max(ratio_of(v[f"{name}2"], n) - average * average, 0.0)) if n else 0.0

    return formula


def minimum(name: str, centre: float = 0.0) -> Formula:
    """The minimum, from its difference from a centre; 0 of nothing."""
    return lambda v, n: -v[f"-min_{name}"] + centre if n else 0.0


def maximum(name: str, centre: float = 0.0) -> Formula:
    """The maximum, from its difference from a centre; 0 of nothing."""
    return lambda v, n: v[f"max_{name}"] + centre if n else 0.0
