"""The bounds that a batch decides, found before it is corrected: on the CPU in its blocks, elsewhere as one piece.

Criteria of tokens come first where those of turns and sequences run over their survivors. Nothing of this runs for a
Spec whose bounds are numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends import blocks, whole
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.select import Search, Values, begin, values_of
from rollout_corr.definition.bounds import Bound
from rollout_corr.definition.findings import decided
from rollout_corr.spec.bounds_of_batch import Side
from rollout_corr.spec.correction import Criterion, Spec


class Place(NamedTuple):
    """A bound of a Spec: the label of its criterion, and its side."""

    label: str
    side: Side


class Found:
    """The bounds found, by place; a criterion whose bounds are not known yet rejects nothing by them."""

    def __init__(self) -> None:
        self.bounds: dict[Place, Tensor] = {}

    def of(self, criterion: Criterion, value: Tensor, tested: Tensor | None) -> tuple[Bound, Bound]:
        """Give the bounds of a criterion."""
        return self.bounds.get(Place(criterion.label, "lower")), self.bounds.get(Place(criterion.label, "upper"))


class Progress(NamedTuple):
    """The bounds of a Spec that are known, and the searches under way for others.

    Attributes:
        bounds: Those known, 0-d each.
        searches: Those under way; empty before the first round of a step and when all are known.
    """

    bounds: dict[Place, Tensor]
    searches: dict[Place, Search]

    def after(self, searches: dict[Place, Search], tables: dict[Place, Tensor]) -> Progress:
        """The progress after a round.

        Args:
            searches: Those of the round.
            tables: The table of each that is not over, added up over all that belongs to the batch.
        """
        found = {place: one.narrowed(tables[place]) if place in tables else one for place, one in searches.items()}
        if any(one.round < one.rounds for one in found.values()):
            return Progress(self.bounds, found)
        return Progress(self.bounds | {place: one.bound() for place, one in found.items()}, {})


class Recording(Found):
    """Bounds known before, and the values of those criteria whose bounds are looked for.

    Args:
        progress: What is known.
        wanted: The labels of these criteria.
        on_cpu: Values that take no part are left out.
    """

    def __init__(self, progress: Progress, wanted: set[str], on_cpu: bool) -> None:
        super().__init__()
        self.bounds, self.searches = progress.bounds, dict(progress.searches)
        self._wanted, self._on_cpu = wanted, on_cpu
        self._values: dict[Place, list[Values]] = {}

    def of(self, criterion: Criterion, value: Tensor, tested: Tensor | None) -> tuple[Bound, Bound]:
        """Note the values."""
        if criterion.label in self._wanted:
            for side, rule in criterion.rules.items():
                place = Place(criterion.label, side)
                search = self.searches.setdefault(place, begin(rule, side, value.dtype, value.device))
                if search.dtype != value.dtype:
                    # Their keys have other digits.
                    raise ValueError(
                        f"known: expected log-probs whose values of {criterion.label!r} are {_plain(search.dtype)}, as "
                        f"in the rounds before, got {_plain(value.dtype)}"
                    )
                values = values_of(side, value, tested)
                self._values.setdefault(place, []).append(search.left(values) if self._on_cpu else values)
        return super().of(criterion, value, tested)

    def tables(self) -> dict[Place, Tensor]:
        """The tables of this round, [1 or 3, digits] int64 each."""
        return {place: self._table(place, one) for place, one in self.searches.items() if one.round < one.rounds}

    def _table(self, place: Place, search: Search) -> Tensor:
        parts = self._values[place]
        if self._on_cpu and search.round:
            parts = self._values[place] = [search.left(values) for values in parts]
        total = search.table(parts[0])
        for values in parts[1:]:
            total = total + search.table(values)
        return total


def wanted(spec: Spec, progress: Progress) -> set[str]:
    """The labels of the criteria whose bounds come next; none when all are known."""
    asking = [criterion for criterion in spec.criteria if criterion.rules]
    steps = [asking]
    if spec.sums_over == "kept":
        steps = [[c for c in asking if (c.over == "token") == first] for first in (True, False)]
    for step in steps:
        if any(Place(c.label, side) not in progress.bounds for c in step for side in c.rules):
            return {c.label for c in step}
    return set()


class Thresholds(Found):
    """The bounds of a Spec, as far as several calls have decided them: for the next round, or when complete to apply.

    Attributes:
        spec: The Spec.
        progress: What is known.
    """

    def __init__(self, spec: Spec, progress: Progress) -> None:
        super().__init__()
        self.spec, self.progress, self.bounds = spec, progress, progress.bounds

    @property
    def complete(self) -> bool:
        """True when all bounds are known. Nothing is read from the device."""
        return not wanted(self.spec, self.progress)

    def __repr__(self) -> str:
        """Say how many are known; nothing is read from the device."""
        return f"Thresholds({len(self.bounds)} known, complete={self.complete})"


def record(batch: Batch, spec: Spec, progress: Progress) -> Recording:
    """Run the criteria on a batch, so that they ask for the bounds that come next."""
    on_cpu = in_blocks(batch)
    recording = Recording(progress, wanted(spec, progress), on_cpu)
    batch.bounds = recording
    if on_cpu:
        for block in blocks.blocks_under(batch, spec):
            decided(blocks.operands_of(block, spec))
    else:
        decided(whole.operands_of(batch, spec, *whole.sequences_of(batch)))
    return recording


def find_bounds(batch: Batch, spec: Spec, add_up: Callable[[Tensor], Tensor]) -> Found:
    """Find the bounds that a batch decides.

    Args:
        batch: The batch.
        spec: A Spec with such bounds.
        add_up: Adds int64 up over the ranks that share the batch.
    """
    progress, found = Progress({}, {}), Found()
    while wanted(spec, progress):
        recording = record(batch, spec, progress)
        while True:
            tables = recording.tables()
            progress = progress.after(recording.searches, added_up(tables, add_up))
            if not progress.searches:
                break
            recording.searches = progress.searches
    found.bounds = progress.bounds
    return found


def added_up(tables: dict[Place, Tensor], add_up: Callable[[Tensor], Tensor]) -> dict[Place, Tensor]:
    """Add tables up over ranks, all of them at once."""
    every = add_up(torch.cat([table.reshape(-1) for table in tables.values()]))
    parts = every.split([table.numel() for table in tables.values()])
    return {place: part.view(tables[place].shape) for place, part in zip(tables, parts, strict=True)}


def in_blocks(batch: Batch) -> bool:
    """Tell whether values may be read, and so a batch is run in blocks."""
    return batch.train.device.type == "cpu" and not torch.compiler.is_compiling()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bounds_by_place(spec: Spec, found: Found) -> tuple[tuple[Place, ...], Tensor]:
    """The places of a Spec's bounds, and the bounds found, [K] float64, infinite where a side is open."""
    places = tuple(chain.from_iterable((Place(c.label, side) for side in c.rules) for c in spec.criteria))
    return places, torch.stack([found.bounds[place].double() for place in places])
