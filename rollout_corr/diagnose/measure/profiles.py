"""D along an axis: by position, probability, length, turn, weight version. Tables that merge by + and max."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# |D| beyond this is a ratio beyond 2.
LARGE = math.log(2.0)

# Where the bins of a probability begin and end: narrow towards 0 and towards 1.
PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
PROBABILITY_LABELS = (
    "< 0.0001",
    *(f"{low:g} - {high:g}" for low, high in pairwise(PROBABILITY_EDGES)),
    "> 0.999",
)
PROBABILITY_BINS = len(PROBABILITY_LABELS)


@dataclass(frozen=True)
class Row:
    """One bin of an axis.

    Attributes:
        label: What is in it.
        at: Its place on the axis.
        count: Tokens in it (sequences, on the axis of lengths).
        d_mean: Mean D.
        d_abs_mean: Mean |D|.
        d_std: Population standard deviation of D.
        d_abs_max: Largest |D|.
        large_fraction: Part whose ratio is beyond 2 or below 1/2.
    """

    label: str
    at: float
    count: int
    d_mean: float
    d_abs_mean: float
    d_std: float
    d_abs_max: float
    large_fraction: float


class Profile:
    """Sums of D over the bins of one axis, which grow as further bins are seen."""

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 5, dtype=torch.float64)
        self.largest = torch.zeros(0, dtype=torch.float64)

    def add(self, bins: Tensor, d: Tensor) -> None:
        """Add tokens.

        Args:
            bins: [M] int64, the bin of each.
            d: [M] floating, finite.
        """
        if not bins.numel():
            return
        d = d.double()
        size = max(self.sums.shape[0], int(bins.max()) + 1)
        self._grow(size)
        magnitude = d.abs()
        self.sums[:, 0] += torch.bincount(bins, minlength=size)
        for column, values in enumerate((d, magnitude, d * d, (magnitude > LARGE).double()), 1):
            self.sums[:, column] += torch.bincount(bins, values, minlength=size)
        self.largest.scatter_reduce_(0, bins, magnitude, "amax")

    def _grow(self, size: int) -> None:
        more = size - self.sums.shape[0]
        if more > 0:
            self.sums = torch.cat([self.sums, self.sums.new_zeros(more, 5)])
            self.largest = torch.cat([self.largest, self.largest.new_zeros(more)])

    def rows(self, labels: Sequence[str], places: Sequence[float]) -> list[Row]:
        """The bins that hold something."""
        found = []
        for i, (sums, largest) in enumerate(zip(self.sums.tolist(), self.largest.tolist(), strict=True)):
            count, d, magnitude, squares, large = sums
            if not count:
                continue
            mean = d / count
            std = math.sqrt(max(squares / count - mean * mean, 0.0))
            found.append(Row(labels[i], places[i], int(count), mean, magnitude / count, std, largest, large / count))
        return found


class ByValue:
    """A profile over the values of a column, whatever they are; made of few different values, or cut into tenths.

    Numbers that are not whole, or of which a block has too many, are cut at the quantiles of the first block.
    """

    MOST_VALUES = 4096

    def __init__(self, discrete: bool) -> None:
        self.profile = Profile()
        self.discrete = discrete
        self.values: dict[float, int] = {}
        self.edges: Tensor | None = None

    def add(self, values: Tensor, d: Tensor) -> None:
        """Add tokens by the value that each has; NaN and -1 in integers say that it has none."""
        known = values >= 0 if not values.is_floating_point() else values.isfinite()
        values, d = values[known], d[known]
        if not values.numel():
            return
        if not self.discrete and self.edges is None and not self.values:
            unique = values.unique()
            if unique.numel() > 32:
                sample = values.double()[:: max(1, values.numel() // 100_000)]
                self.edges = sample.quantile(torch.linspace(0.1, 0.9, 9, dtype=torch.float64)).unique()
        if self.edges is not None:
            self.profile.add(torch.bucketize(values.double(), self.edges), d)
            return
        unique, index = values.unique(return_inverse=True)
        bins = []
        for value in unique.tolist():
            if len(self.values) < self.MOST_VALUES:
                self.values.setdefault(value, len(self.values))
            bins.append(self.values.get(value, self.MOST_VALUES))
        self.profile.add(torch.tensor(bins)[index], d)

    def rows(self) -> list[Row]:
        """The bins in the order of their values; what came after too many different ones is one bin at the end."""
        if self.edges is not None:
            edges = self.edges.tolist()
            labels = [f"<= {edges[0]:g}", *(f"{a:g} - {b:g}" for a, b in pairwise(edges))]
            return self.profile.rows([*labels, f"> {edges[-1]:g}"], [float(i) for i in range(len(edges) + 1)])
        values = [*self.values, math.inf]
        labels = [*(f"{value:g}" for value in self.values), "others"]
        return sorted(self.profile.rows(labels, values), key=lambda row: row.at)


def geometric_bins(values: Tensor, per_octave: int) -> Tensor:
    """The bin of each whole number >= 0 on a logarithmic axis."""
    return ((values + 1).double().log2() * per_octave + 1e-9).long()


def geometric_rows(profile: Profile, per_octave: int, offset: int) -> list[Row]:
    """The rows of such an axis; `offset` is what the numbers have been made smaller by."""
    size = profile.sums.shape[0]
    lows = [math.ceil(2.0 ** (i / per_octave) - 1e-9) - 1 + offset for i in range(size + 1)]
    labels = [f"{a}" if b - a <= 1 else f"{a} - {b - 1}" for a, b in pairwise(lows)]
    return profile.rows(labels, [float(low) for low in lows[:-1]])


def probability_bins(logp: Tensor) -> Tensor:
    """The bin of each log-prob by its probability."""
    edges = torch.tensor(PROBABILITY_EDGES, dtype=torch.float64).log().to(logp.dtype)
    return torch.bucketize(logp, edges, right=True)
