"""The kinds of row that statistics and metrics are made of, and the formulas that metrics share.

A statistic is taken on the device and lies in `Statistics`. A metric is computed from merged statistics on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from ..definition.tokens import Number

if TYPE_CHECKING:
    from ..definition.findings import Findings
    from .sums import OfTokens

Values = Mapping[str, float]

# A column of `AllSequences`, or two whose product it holds.
Column = str | tuple[str, str]

# Where statistics are taken:
# "tokens": in every block, over its tokens. Each rank of `Ranks.sequence` adds those of the tokens that it holds.
# "blocks": in every block, over its turns or sequences, each counted by its tokens.
# "sequences": once a call, over all sequences; "measured": over those with a measured token alone.
# "turns", "measured turns": likewise over turns.
# "call": once a call.
# The first rank of `Ranks.sequence` alone adds what is taken over whole sequences.
At = Literal["tokens", "blocks", "sequences", "measured", "turns", "measured turns", "call"]

# Tells from a Spec if it needs a statistic.
When = Callable[[Any], bool]


def always(_: Any) -> bool:
    """Take a statistic whatever is asked for."""
    return True


class Aggregate(NamedTuple):
    """A sum or an extremum in `Statistics`, or several that share temporaries."""

    sums: tuple[str, ...]
    maxima: tuple[str, ...]  # a minimum travels as the maximum of the negated value, under "-min_..."
    at: At  # where they are taken
    when: When = always  # tells from a Spec if it needs them
    # Of a row over sequences or turns the same statistic for a label of tokens; None: a part of one has none.
    of_tokens: OfTokens | None = None
    each: Callable[[Any], Tensor] | None = None  # the value of each sequence or turn, from `AllSequences`, that it sums
    of_all: Callable[[Any], tuple[Number, ...]] | None = None  # over all sequences or turns, from `AllSequences`
    column: Column | None = None  # of `AllSequences`, whose sum or ends this is; None: of another value
    local: bool = False  # counted by every rank of `Ranks.sequence`, although it is taken over sequences


def over_tokens(
    name: str, how: Literal["sum", "squares", "count"], x: Callable[[Findings], Tensor], when: When = always
) -> Aggregate:
    """Make the row of a value of each token, 0 where not measured: its sum, the sum of its squares, or a count."""
    return Aggregate((name,), (), "tokens", when, lambda f, by: (getattr(by, how)(x(f)),))


def both_ends(name: str) -> tuple[str, str]:
    """Names of a maximum and a minimum."""
    return f"max_{name}", f"-min_{name}"


def total(
    name: str, at: At, each: Callable[[Any], Tensor], when: When = always, of_tokens: OfTokens | None = None
) -> Aggregate:
    """Make the row of the sum of a value of each sequence or turn."""
    return Aggregate((name,), (), at, when, of_tokens, each)


def of_column(name: str, column: Column, when: When = always, of_tokens: OfTokens | None = None) -> Aggregate:
    """Make the row of the sum of a column of sequences, over the measured ones."""
    return Aggregate((name,), (), "measured", when, of_tokens, lambda s: s.column(column), column=column)


def ends_of_column(name: str, column: str, when: When = always) -> Aggregate:
    """Make the row of the maximum and the minimum of a column of sequences, over the measured ones."""
    return Aggregate((), both_ends(name), "measured", when, of_all=lambda s: s.ends(column), column=column)


class Over(NamedTuple):
    """The units that a metric is taken over: words for the docs, and the name of the sum that counts them."""

    words: str
    units: str | None


# Of what counts or describes a whole batch.
EACH = Over("-", None)


class Metric(NamedTuple):
    """A metric, and its line in docs/metrics.md."""

    key: str  # its key in `metrics()`
    formula: str  # its definition in words
    unit: str  # of its value
    over: Over  # the units that it is taken over
    healthy: str  # its range in a healthy run
    value: Callable[[Values, float], float]  # gives it from the statistics by name and the count of those units

    def read(self, values: Values) -> float:
        """The metric from merged statistics by name."""
        return self.value(values, 0.0 if self.over.units is None else values[self.over.units])


# --- formulas of metrics ---

Formula = Callable[[Values, float], float]


def ratio_of(total: float, count: float) -> float:
    """total / count, and 0 for 0 of 0."""
    return total / count if count else 0.0


def fraction(x: float) -> float:
    """x within 0 and 1, which rounding may have left; NaN stays."""
    if isinstance(x, float):
        # The first argument is given back where the two do not compare.
        return max(min(x, 1.0), 0.0)
    return x.within(0.0, 1.0)


def larger(x: float, y: float) -> float:
    """The larger of two statistics."""
    if isinstance(x, float):
        return max(x, y)
    return x.or_larger(y)


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


def root(x: float) -> float:
    """The square root of a variance, which rounding may have left below 0."""
    if isinstance(x, float):
        return math.sqrt(max(x, 0.0))
    return x.root()


@dataclass(frozen=True)
class Plain:
    """A sum as it is."""

    name: str

    def __call__(self, v: Values, n: float) -> float:
        return v[self.name]


@dataclass(frozen=True)
class Mean:
    """The mean, from a sum."""

    name: str

    def __call__(self, v: Values, n: float) -> float:
        return ratio_of(v[self.name], n)


@dataclass(frozen=True)
class MeanAround:
    """The mean, from a sum of differences from a center."""

    center: float
    name: str

    def __call__(self, v: Values, n: float) -> float:
        return ratio_of(v[self.name] + self.center * n, n)


@dataclass(frozen=True)
class Std:
    """Population standard deviation, from the sums NAME and NAME2 around any center near the mean."""

    name: str

    def __call__(self, v: Values, n: float) -> float:
        average = ratio_of(v[self.name], n)
        return root(ratio_of(v[f"{self.name}2"], n) - average * average) if n else 0.0


def variance_of_weight(total: float, squares: float, around_one: float, n: float) -> float:
    """The variance of a weight, from its sum, that of its squares, and that of its squares around 1.

    Where policies drifted apart all weights may lie next to 0, and sums around 1 cancel, as plain ones do next to 1.
    Rounding may leave the variance below 0.
    """
    average = ratio_of(total, n)
    off = average - 1.0
    if_low, if_not = ratio_of(squares, n) - average * average, ratio_of(around_one, n) - off * off
    if isinstance(average, float):
        return if_low if average < 0.5 else if_not
    return average.chosen_below(0.5, if_low, if_not)


@dataclass(frozen=True)
class StdOfWeight:
    """Population standard deviation of a weight, from the sums NAME and NAME2, and squares around 1 by their name."""

    name: str
    around_one: str

    def __call__(self, v: Values, n: float) -> float:
        return root(variance_of_weight(v[self.name], v[f"{self.name}2"], v[self.around_one], n)) if n else 0.0


@dataclass(frozen=True)
class End:
    """A maximum, or a minimum as its negated value, from its difference from a center; 0 of nothing."""

    name: str
    sign: float
    center: float

    def __call__(self, v: Values, n: float) -> float:
        return self.sign * v[self.name] + self.center if n else 0.0


plain, mean, mean_around, std = Plain, Mean, MeanAround, Std


def minimum(name: str, center: float = 0.0) -> Formula:
    """The minimum, from its difference from a center; 0 of nothing."""
    return End(f"-min_{name}", -1.0, center)


def maximum(name: str, center: float = 0.0) -> Formula:
    """The maximum, from its difference from a center; 0 of nothing."""
    return End(f"max_{name}", 1.0, center)


# --- all metrics together ---


class Readers(NamedTuple):
    """Metrics that are read together, apart by their formulas: most are sums or means, which need no call."""

    keys: tuple[str, ...]  # of all, in order
    plain: tuple[tuple[str, ...], tuple[str, ...]]  # the keys of those that are sums, and the names of these
    means: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # keys, names of sums, and of counts of units
    others: tuple[tuple[str, Formula, str | None], ...]  # the last is the name of the count of its units

    @classmethod
    def of(cls, rows: Iterable[Metric]) -> Readers:
        """Sort rows."""
        rows = list(rows)
        sums = [(row.key, row.value.name) for row in rows if isinstance(row.value, Plain)]
        means = [
            (row.key, row.value.name, row.over.units)
            for row in rows
            if isinstance(row.value, Mean) and row.over.units is not None
        ]
        known = {key for key, *_ in (*sums, *means)}
        return cls(
            tuple(row.key for row in rows),
            (tuple(key for key, _ in sums), tuple(name for _, name in sums)),
            (tuple(key for key, *_ in means), tuple(name for _, name, _ in means), tuple(n for *_, n in means)),
            tuple((row.key, row.value, row.over.units) for row in rows if row.key not in known),
        )

    def read(self, values: Values) -> dict[str, float]:
        """The metrics by key, each as `Metric.read` gives it."""
        named, found = values.__getitem__, dict.fromkeys(self.keys, 0.0)
        keys, names = self.plain
        found.update(zip(keys, map(named, names), strict=True))
        keys, names, units = self.means
        found.update(zip(keys, map(ratio_of, map(named, names), map(named, units)), strict=True))
        for key, formula, unit in self.others:
            found[key] = formula(values, 0.0 if unit is None else values[unit])
        return found
