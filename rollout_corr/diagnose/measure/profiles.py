"""D by position, probability, length, turn, weight version: tables of bins that merge by + and max."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..read.fields import name_of

# Values are clamped to +-CUT where one token must not decide an average.
CUT = 20.0

# Edges of the bins of a probability: narrow toward 0 and toward 1.
PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
PROBABILITY_LABELS = (
    "< 0.0001",
    *(f"{low:g} - {high:g}" for low, high in pairwise(PROBABILITY_EDGES)),
    "> 0.999",
)
PROBABILITY_BINS = len(PROBABILITY_LABELS)

# A column of more values than that is no column of labels, and is cut into ranges.
MOST_LABELS = 64

# Bins that are spread over a range of more than this many for each token are sorted instead of counted in a table.
MOST_SPREAD = 4


class Numbering(dict[Any, int]):
    """Numbers of values, from 0 in the order in which the values are first seen, up to `most` of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def of(self, value: float | str) -> int:
        """Return the number of a value; -1: it is one too many."""
        return self.setdefault(value, len(self)) if len(self) < self.most else self.get(value, -1)

    def of_each(self, values: Tensor) -> Tensor:
        """Return [M] int64, the number of each value."""
        unique, index = values.unique(return_inverse=True)
        return torch.tensor([self.of(value) for value in unique.tolist()], dtype=torch.int64)[index]


@dataclass(frozen=True)
class Row:
    """D of the tokens in one bin of an axis; on the axis of lengths, mean D of the sequences in it."""

    label: str  # its range of values
    at: float  # its place on the axis
    count: int  # number of tokens or sequences
    logratio_mean: float
    logratio_abs_mean: float
    logratio_std: float  # population standard deviation of D
    logratio_abs_max: float


def joined(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """Join neighboring bins, as many each time, until at most so many are left."""
    size = -(-len(rows) // most)
    return rows if size <= 1 else [_join(rows[i : i + size]) for i in range(0, len(rows), size)]


def _join(rows: Sequence[Row]) -> Row:
    """Return the bin that holds all tokens of some."""
    if len(rows) == 1:
        return rows[0]
    count = sum(row.count for row in rows)

    def mean(value: Callable[[Row], float]) -> float:
        return math.fsum(row.count * value(row) for row in rows) / count

    middle, first, last = mean(lambda row: row.logratio_mean), rows[0].label, rows[-1].label
    square = mean(lambda row: row.logratio_std**2 + row.logratio_mean**2)
    return Row(
        label=f"{first.partition(' - ')[0]} - {last.rpartition(' - ')[2]}",
        at=rows[0].at,
        count=count,
        logratio_mean=middle,
        logratio_abs_mean=mean(lambda row: row.logratio_abs_mean),
        logratio_std=math.sqrt(max(0.0, square - middle * middle)),
        logratio_abs_max=max(row.logratio_abs_max for row in rows),
    )


class Profile:
    """Sums over the bins of one axis; bins are added when they are first seen.

    Adding tokens costs time by their number and never by the number of bins seen before: a long run has a bin per step.
    """

    def __init__(self) -> None:
        self._size = 0
        # Memory is doubled, so that a bin is copied once on average however many come later.
        self._sums = torch.zeros(0, 4, dtype=torch.float64)
        self._largest = torch.zeros(0, dtype=torch.float64)

    @property
    def sums(self) -> Tensor:
        """[bins, 4] float64, sums of 1, D, |D| and D^2."""
        return self._sums[: self._size]

    @property
    def largest(self) -> Tensor:
        """[bins] float64, largest |D|."""
        return self._largest[: self._size]

    def add(self, bins: Tensor, d: Tensor) -> None:
        """Add tokens.

        Args:
            bins: [M] int64, the bin of each.
            d: [M] floating, finite.
        """
        if not bins.numel():
            return
        low, high = int(bins.min()), int(bins.max())
        self._reserve(high + 1)
        rows: Tensor | slice = slice(low, high + 1)
        bins, count = bins - low, high - low + 1
        if count > MOST_SPREAD * bins.numel():
            found, bins = bins.unique(return_inverse=True)
            rows, count = found + low, found.numel()
        d = d.double()
        magnitude = d.abs()
        self._sums[rows, 0] += torch.bincount(bins, minlength=count)
        for column, values in enumerate((d, magnitude, d * d), 1):
            self._sums[rows, column] += torch.bincount(bins, values, minlength=count)
        largest = magnitude.new_zeros(count).scatter_reduce_(0, bins, magnitude, "amax")
        self._largest[rows] = torch.maximum(self._largest[rows], largest)

    def _reserve(self, size: int) -> None:
        """Make room for bins, which are 0 at first."""
        self._size = max(self._size, size)
        more = self._size - self._sums.shape[0]
        if more > 0:
            more = max(more, self._sums.shape[0])
            self._sums = torch.cat([self._sums, self._sums.new_zeros(more, 4)])
            self._largest = torch.cat([self._largest, self._largest.new_zeros(more)])

    def rows(self, labels: Sequence[str], places: Sequence[float]) -> list[Row]:
        """Return the bins that are not empty, with the label and the place of each."""
        found = []
        for i, (sums, largest) in enumerate(zip(self.sums.tolist(), self.largest.tolist(), strict=True)):
            count, d, magnitude, squares = sums
            if not count:
                continue
            mean = d / count
            std = math.sqrt(max(squares / count - mean * mean, 0.0))
            found.append(Row(labels[i], places[i], int(count), mean, magnitude / count, std, largest))
        return found


class ByValue:
    """A profile by the values of a column: a bin per value, or ten bins cut at the quantiles of the first chunk.

    Args:
        discrete: Always use a bin per value. Otherwise a first chunk of more than MOST_LABELS values is cut into
            tenths.
    """

    MOST_VALUES = 4096

    def __init__(self, discrete: bool) -> None:
        self.profile = Profile()
        self.discrete = discrete
        self.values = Numbering(self.MOST_VALUES)
        self.edges: Tensor | None = None

    def add(self, values: Tensor, d: Tensor) -> None:
        """Add tokens by their values; those whose value is NaN, or -1 in an integer column, are left out."""
        known = values >= 0 if not values.is_floating_point() else values.isfinite()
        values, d = values[known], d[known]
        if not values.numel():
            return
        if not self.discrete and self.edges is None and not self.values:
            unique = values.unique()
            if unique.numel() > MOST_LABELS:
                sample = values.double()[:: max(1, values.numel() // 100_000)]
                self.edges = sample.quantile(torch.linspace(0.1, 0.9, 9, dtype=torch.float64)).unique()
        if self.edges is not None:
            self.profile.add(torch.bucketize(values.double(), self.edges), d)
            return
        bins = self.values.of_each(values)
        self.profile.add(bins.where(bins >= 0, self.MOST_VALUES), d)

    def rows(self, names: Sequence[str] = ()) -> list[Row]:
        """Return the bins in the order of their values; beyond MOST_VALUES values, the rest is one bin at the end.

        Args:
            names: Those of whole numbers from 0 on.
        """
        if self.edges is not None:
            edges = self.edges.tolist()
            labels = [f"<= {edges[0]:g}", *(f"{a:g} - {b:g}" for a, b in pairwise(edges))]
            return self.profile.rows([*labels, f"> {edges[-1]:g}"], [float(i) for i in range(len(edges) + 1)])
        values = [*self.values, math.inf]
        labels = [*(name_of(names, value) for value in self.values), "others"]
        return sorted(self.profile.rows(labels, values), key=lambda row: row.at)


def add_up(sums: Tensor, rows: Tensor, columns: Iterable[Tensor | None]) -> None:
    """Add values, [M] for each column, to the rows of a table, [M] int64; None: count them."""
    for column, values in enumerate(columns):
        sums[:, column] += torch.bincount(rows, values, minlength=sums.shape[0])


def geometric_bins(values: Tensor, per_octave: int) -> Tensor:
    """Return the bin of each integer >= 0 on a logarithmic axis."""
    return ((values + 1).double().log2() * per_octave + 1e-9).long()


def geometric_rows(profile: Profile, per_octave: int, offset: int) -> list[Row]:
    """Return the rows of a profile by `geometric_bins`, whose numbers were reduced by `offset` before."""
    size = profile.sums.shape[0]
    lows = [math.ceil(2.0 ** (i / per_octave) - 1e-9) - 1 + offset for i in range(size + 1)]
    labels = [f"{a}" if b - a <= 1 else f"{a} - {b - 1}" for a, b in pairwise(lows)]
    return profile.rows(labels, [float(low) for low in lows[:-1]])


def probability_bins(logp: Tensor) -> Tensor:
    """Return the bin of each log-prob by its probability."""
    edges = torch.tensor(PROBABILITY_EDGES, dtype=torch.float64).log().to(logp.dtype)
    return torch.bucketize(logp, edges, right=True)


class Excess:
    """Mean |D| of groups of tokens, compared at equal probability.

    Unlikely tokens differ more than likely ones in every group, so groups are only comparable at equal probability.
    """

    def __init__(self) -> None:
        self.profile = Profile()

    def add(self, groups: Tensor, rollout: Tensor, d: Tensor) -> None:
        """Add tokens: [M] int64 groups >= 0, [M] log-probs, [M] D."""
        self.profile.add(groups * PROBABILITY_BINS + probability_bins(rollout), d.clamp(-CUT, CUT))

    def groups(self) -> Tensor:
        """Return [groups, probability bins, 4] float64, the sums of the profile."""
        sums = self.profile.sums
        groups = -(-sums.shape[0] // PROBABILITY_BINS)
        whole = torch.cat([sums, sums.new_zeros(groups * PROBABILITY_BINS - sums.shape[0], sums.shape[1])])
        return whole.view(groups, PROBABILITY_BINS, sums.shape[1])

    def table(self) -> tuple[Tensor, Tensor]:
        """Return counts of tokens and sums of |D|, both [groups, probability bins]."""
        whole = self.groups()
        return whole[:, :, 0], whole[:, :, 2]

    def over(self, groups: list[int], base: list[int]) -> float:
        """Divide the mean |D| of some groups by the others' at equal probability; 1 if they cannot be compared."""
        return self.each_over([groups], base)[0]

    def each_over(self, many: Iterable[list[int]], base: list[int]) -> list[float]:
        """Compare each of many lists of groups with the same base, as `over` does; the base is summed up once."""
        count, magnitude = self.table()
        base = [i for i in base if i < count.shape[0]]
        usual = magnitude[base].sum(0) / count[base].sum(0)
        found = []
        for groups in many:
            some = [i for i in groups if i < count.shape[0]]
            here, tokens = magnitude[some].sum(0), count[some].sum(0)
            known = usual.isfinite() & (tokens > 0)
            expected = float((usual * tokens)[known].sum())
            found.append(float(here[known].sum()) / expected if expected > 0 else 1.0)
        return found

    def tokens(self, groups: list[int]) -> int:
        """Count the tokens of some groups."""
        count, _ = self.table()
        return int(count[[i for i in groups if i < count.shape[0]]].sum())

    def tokens_of_each(self) -> list[int]:
        """Count the tokens of every group."""
        return [int(tokens) for tokens in self.table()[0].sum(1).tolist()]
