"""The statistics of labels: of the tokens or the sequences of each, by the rows that a batch has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..definition.findings import Findings, Numbers
from ..definition.sequences import Packed, Sequences
from ..definition.tokens import select, tensor_of
from ..specs.caches import cached
from ..specs.correction import Spec
from .aggregates import aggregates_of
from .all_sequences import AllSequences
from .labels import SEQUENCES, Labeled, LabelSet, places_of
from .rows import Aggregate, put

if TYPE_CHECKING:
    from .extra import Extra

# --- names ---


class OfLabel(NamedTuple):
    """The statistics of a label, in order."""

    of_tokens: tuple[Aggregate, ...]  # rows that are taken over its tokens
    of_sequences: tuple[Aggregate, ...]  # behind them, rows that are taken over its sequences
    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    token_sums: int  # how many of these are of tokens
    token_maxima: int


@cached(maxsize=256)
def of_label(spec: Spec, units: str) -> OfLabel:
    """The statistics of a label of sequences, or of tokens.

    A label of tokens may have a part of a sequence: it has what is defined over tokens alone.
    """
    rows, whole = aggregates_of(spec), ("sequences", "measured") if units == SEQUENCES else ()
    of_sequences = tuple(row for row in rows if row.at in whole)
    of_tokens = tuple(row for row in rows if row.of_tokens is not None and row.at not in whole)
    sums, more_sums = (tuple(name for row in part for name in row.sums) for part in (of_tokens, of_sequences))
    maxima, more_maxima = (tuple(name for row in part for name in row.maxima) for part in (of_tokens, of_sequences))
    return OfLabel(of_tokens, of_sequences, sums + more_sums, maxima + more_maxima, len(sums), len(maxima))


def of_every_label(labels: LabelSet, names: tuple[str, ...]) -> tuple[str, ...]:
    """Each name of all labels before the next."""
    return tuple(f"{labels.name}={value}/{name}" for name in names for value in labels.every)


def layout_of_labels(spec: Spec, extra: Extra) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sums and of the maxima of all labels, one set of labels after the other."""
    sums: list[str] = []
    maxima: list[str] = []
    for labels in extra.labels:
        statistics = of_label(spec, labels.units)
        sums += of_every_label(labels, statistics.sums)
        maxima += of_every_label(labels, statistics.maxima)
    return tuple(sums), tuple(maxima)


# --- sums ---

# On the CPU a label has a sum of every so many-th token, since an addition to the one before would wait for that, and
# tokens are taken by as many as stay in cache.
LANES, PART = 8, 65_536


class OfLabels:
    """The tokens of each label, or its sequences: [labels] float64. `place` has the label of each token.

    On the CPU each number is added where it lies. On a device, where atomics would add in another order every time,
    they are sorted by label first.
    """

    def __init__(self, place: Tensor, many: int) -> None:
        self._shape, self._many, self._size = place.shape, many, place.numel()
        flat = place.reshape(-1).long()
        self._order: Tensor | None = None
        if flat.device.type != "cpu" or torch.compiler.is_compiling():
            ordered, self._order = flat.sort(stable=True)
            starts = torch.searchsorted(ordered, torch.arange(many, device=flat.device))
            self._runs = Packed(torch.cat([starts, starts.new_full((1,), self._size)]), self._size)
        else:
            self._place = flat
            lanes = torch.arange(LANES, device="cpu").repeat(-(-self._size // LANES))
            self._lanes = (flat * LANES).add_(lanes[: self._size])

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """[labels] float64: the sums."""
        return self._added(select(counted, x).reshape(-1))

    def squares(self, x: Tensor, counted: Tensor | None = None, dot: bool = False) -> Tensor:
        """[labels] float64: the sums of squares."""
        return self._added(select(counted, x).reshape(-1), squared=True)

    def count(self, which: Tensor | None, counted: Tensor | None = None) -> Tensor:
        """[labels] float64: how many are True."""
        which = counted if which is None else which if counted is None else which & counted
        if which is not None:
            return self._added(which.reshape(-1))
        if self._order is not None:
            return self._runs.offsets.diff().double()
        return torch.bincount(self._place, minlength=self._many).double()

    def none(self) -> Tensor:
        """[labels] float64: 0."""
        device = "cpu" if self._order is None else self._order.device
        return torch.zeros(self._many, dtype=torch.float64, device=device)

    def ends(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[labels] float64 each: the largest x and the largest -x."""
        sides = (x, -x) if counted is None else [torch.where(counted, side, -torch.inf) for side in (x, -x)]
        largest, negated = (self._largest(side.reshape(-1)).double() for side in sides)
        return largest, negated

    def over(self, units: Sequences, counts: Tensor, counted: Tensor | None) -> _UnitsByLabel:
        """Values of units, at each of their tokens."""
        return _UnitsByLabel(self, units, counted, self._shape)

    def rows(self, table: Tensor) -> Tensor:
        """[rows, labels] float64: the sums of each row of a table, [rows, S] float64."""
        count = table.shape[0]
        if self._order is None:
            totals = torch.zeros(count, self._many, dtype=torch.float64, device="cpu")
            return totals.index_add_(1, self._place, table)
        starts = torch.arange(count, device=table.device)[:, None] * self._size
        offsets = torch.cat([(starts + self._runs.offsets[:-1]).view(-1), self._runs.offsets[-1:] * count])
        flat = table.index_select(1, self._order).view(-1)
        return Packed(offsets, flat.shape[0]).sum(flat).view(count, self._many)

    def _added(self, x: Tensor, squared: bool = False) -> Tensor:
        if self._order is not None:
            wide = x.index_select(0, self._order).double()
            return self._runs.sum(wide * wide if squared else wide)
        totals = torch.zeros(self._many * LANES, dtype=torch.float64, device="cpu")
        for part, lanes in zip(x.split(PART), self._lanes.split(PART), strict=True):
            wide = part.double()
            totals.scatter_add_(0, lanes, wide * wide if squared else wide)
        return totals.view(self._many, LANES).sum(1)

    def _largest(self, x: Tensor) -> Tensor:
        if self._order is not None:
            return self._runs.max(x.index_select(0, self._order))
        return x.new_full((self._many,), -torch.inf).scatter_reduce_(0, self._place, x, "amax")


class _UnitsByLabel:
    """Values of turns or sequences, spread over their tokens, those in `counted` or all, by the label of each token."""

    def __init__(self, by: OfLabels, units: Sequences, counted: Tensor | None, shape: torch.Size) -> None:
        self._by, self._units, self._counted, self._shape = by, units, counted, shape
        self.none = by.none

    def _spread(self, x: Tensor) -> Tensor:
        return self._units.spread(x).expand(self._shape)

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        return self._by.sum(self._spread(x), self._counted)

    def squares(self, x: Tensor, counted: Tensor | None = None, dot: bool = False) -> Tensor:
        return self._by.squares(self._spread(x), self._counted)

    def count(self, which: Tensor | None, counted: Tensor | None = None) -> Tensor:
        return self._by.count(None if which is None else self._spread(which), self._counted)

    def ends(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._by.ends(self._spread(x), self._counted)


# --- taking them ---


class LabelCollector:
    """The statistics of labels from consecutive blocks."""

    def __init__(self, spec: Spec, labeled: tuple[Labeled, ...]) -> None:
        self._labels = [(each.labels, places_of(each), of_label(spec, each.labels.units)) for each in labeled]
        self._blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in labeled]
        self._sequences = 0

    def take(self, findings: Findings, choose: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take the next block, as `Collector.take` does."""
        tokens, first = findings.tokens, self._sequences
        self._sequences += findings.facts.keep.shape[0]
        for (labels, place, columns), blocks in zip(self._labels, self._blocks, strict=True):
            if labels.units == SEQUENCES:
                here = tokens.sequences.spread(place[first : self._sequences]).expand(tokens.d.shape)
            else:
                here = place if choose is None else choose(place)
            by = OfLabels(here, len(labels.every))
            sums: Numbers = {}
            maxima: Numbers = {}
            for row in columns.of_tokens:
                if row.of_tokens is not None:
                    put(row.of_tokens(findings, by), row.sums, row.maxima, sums, maxima)
            blocks.append(
                (
                    _table(sums, columns.sums[: columns.token_sums]),
                    _table(maxima, columns.maxima[: columns.token_maxima]),
                )
            )

    def of_labels(self, view: AllSequences) -> list[tuple[Tensor, Tensor]]:
        """The sums and maxima of each of the labels, in the order of `of_label`."""
        every = []
        for (labels, place, columns), blocks in zip(self._labels, self._blocks, strict=True):
            sums, maxima = blocks[0]
            for more_sums, more_maxima in blocks[1:]:
                sums, maxima = sums + more_sums, torch.maximum(maxima, more_maxima)
            if columns.of_sequences:
                of_label = _of_sequences(columns, place, len(labels.every), view)
                sums, maxima = (torch.cat(pair) for pair in zip((sums, maxima), of_label, strict=True))
            every.append((sums.view(-1), maxima.view(-1)))
        return every

    def joined(self, vector: Tensor, sums: int, view: AllSequences) -> Tensor:
        """Put the statistics of all labels behind the sums and behind the maxima of the batch."""
        return joined(vector, sums, self.of_labels(view))


def joined(vector: Tensor, sums: int, labels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Put sums and maxima of labels behind the sums, the first `sums` of a vector, and behind the maxima of a batch."""
    of_sums, of_maxima = zip(*labels, strict=True)
    return torch.cat([vector[:sums], *of_sums, vector[sums:], *of_maxima])


def _of_sequences(columns: OfLabel, place: Tensor, many: int, view: AllSequences) -> tuple[Tensor, Tensor]:
    """Sums and maxima over the sequences of each label, [names, labels] float64 each."""
    by = OfLabels(place, many)
    view.reduce_by(by)
    sums: Numbers = {}
    maxima: Numbers = {}
    for at, counted in (("sequences", None), ("measured", view.counted)):
        each = {row.sums[0]: row.each(view) for row in columns.of_sequences if row.at == at and row.each is not None}
        # One operation joins numbers of different dtypes.
        table = torch.cat([tensor_of(x) for x in each.values()]).double().view(len(each), -1)
        sums.update(zip(each, by.rows(select(counted, table)).unbind(), strict=True))
    for row in columns.of_sequences:
        if row.of_all is not None:
            put(row.of_all(view), row.sums, row.maxima, sums, maxima)
    return _table(sums, columns.sums[columns.token_sums :]), _table(maxima, columns.maxima[columns.token_maxima :])


def _table(numbers: Numbers, names: tuple[str, ...]) -> Tensor:
    return torch.stack([tensor_of(numbers[name]) for name in names])
