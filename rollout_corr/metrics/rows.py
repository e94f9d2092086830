"""The kinds of row that statistics and metrics are made of.

A statistic is taken on the device and lies in `Statistics`. A metric is computed from merged statistics on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from ..definition.tokens import Number
from .formulas import Formula, Values, compiled, ratio_of

if TYPE_CHECKING:
    from ..definition.findings import Findings
    from .sums import OfTokens

# A column of `AllSequences`, or two whose product it holds.
Column = str | tuple[str, str]

# Where statistics are taken:
# "tokens": in every block, over its tokens. Each rank of `Ranks.sequence` adds what the tokens that it holds give.
# "diagnosis": likewise, by plain torch behind every backend.
# "blocks": in every block, over its turns or sequences, each counted by its tokens.
# "sequences": once a call, over all sequences; "measured": over those with a measured token alone.
# "turns", "measured turns": likewise over turns.
# "call": once a call.
# The first rank of `Ranks.sequence` alone adds what is taken over whole sequences.
At = Literal["tokens", "diagnosis", "blocks", "sequences", "measured", "turns", "measured turns", "call"]

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


def put(
    values: tuple[Number, ...],
    names: tuple[str, ...],
    ends: tuple[str, ...],
    sums: dict[str, Number],
    maxima: dict[str, Number],
) -> None:
    """Name sums and the maxima behind them."""
    sums.update(zip(names, values[: len(names)], strict=True))
    maxima.update(zip(ends, values[len(names) :], strict=True))


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
TURNS = Over("measured turns", "turns_measured")


class Metric(NamedTuple):
    """A metric, and its line in docs/metrics.md."""

    key: str  # its key in `metrics()`
    words: str  # its definition in words
    unit: str  # of its value
    over: Over  # the units that it is taken over
    healthy: str  # its range in a healthy run
    formula: str  # gives it from the statistics by name and the count of those units; see formulas.py

    def read(self, values: Values) -> float:
        """The metric from merged statistics by name."""
        formula, units = compiled(self.formula), self.over.units
        if units is None or formula.total is not None:
            return formula.value(values, 0.0)
        n = values[units]
        return formula.value(values, n) if n or formula.counts else 0.0


class Readers(NamedTuple):
    """Metrics that are read together, apart by their formulas: most are sums or means, which need no call."""

    keys: tuple[str, ...]  # of all, in order
    plain: tuple[tuple[str, ...], tuple[str, ...]]  # the keys of those that are sums, and the names of these
    means: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # keys, names of sums, and of counts of units
    others: tuple[tuple[str, Formula, str], ...]  # the last is the name of the count of its units

    @classmethod
    def of(cls, rows: Iterable[Metric]) -> Readers:
        """Sort rows."""
        keys, sums, means, others = [], [], [], []
        for row in rows:
            formula, units = compiled(row.formula), row.over.units
            keys.append(row.key)
            if formula.total is not None:
                sums.append((row.key, formula.total))
            elif units is None:
                raise ValueError(f"{row.key}: expected the name of a sum, of a metric over no units, got {row.formula}")
            elif formula.averaged is not None:
                means.append((row.key, formula.averaged, units))
            else:
                others.append((row.key, formula, units))
        return cls(
            tuple(keys),
            (tuple(key for key, _ in sums), tuple(name for _, name in sums)),
            (tuple(key for key, *_ in means), tuple(name for _, name, _ in means), tuple(n for *_, n in means)),
            tuple(others),
        )

    def read(self, values: Values) -> dict[str, float]:
        """The metrics by key, each as `Metric.read` gives it."""
        named, metrics = values.__getitem__, dict.fromkeys(self.keys, 0.0)
        keys, names = self.plain
        metrics.update(zip(keys, map(named, names), strict=True))
        keys, names, units = self.means
        metrics.update(zip(keys, map(ratio_of, map(named, names), map(named, units)), strict=True))
        for key, formula, unit in self.others:
            n = values[unit]
            metrics[key] = formula.value(values, n) if n or formula.counts else 0.0
        return metrics
