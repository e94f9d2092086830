"""The bounds that a batch decides, found before it is corrected, as one piece on every device.

Criteria of tokens come first where those of turns and sequences run over their survivors. Nothing of this runs for a
Spec whose bounds are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition.bounds import Bound
from ..definition.bounds_of_batch import SIGN, ordered_of
from ..definition.findings import decided
from ..definition.weights import ratios_of
from ..specs.bounds_of_batch import WEIGHT, Counting, OfBatch, Place
from ..specs.correction import Criterion, Spec, Weight, places_of, rules_of
from . import whole
from .batch import OpenBatch, SequenceGroups
from .layouts import name_of
from .search import KnownBounds, Search, Values, begin


class Progress(NamedTuple):
    """The bounds of a Spec that are known, and the searches under way for others."""

    bounds: dict[Place, Tensor]  # those known, 0-d each
    searches: dict[Place, Search]  # those under way; empty before the first round of a step and when all are known

    def after(self, searches: dict[Place, Search], tables: dict[Place, Tensor]) -> Progress:
        """The progress after a round, from the tables of searches that are not over, of the whole batch."""
        found = {place: one.narrowed(tables[place]) if place in tables else one for place, one in searches.items()}
        if not all(one.over() for one in found.values()):
            return Progress(self.bounds, found)
        return Progress(self.bounds | {place: one.bound() for place, one in found.items()}, {})


class Recording(KnownBounds):
    """Bounds known before, and the values of those criteria, and of the weight, whose bounds are `wanted`, by label."""

    def __init__(self, progress: Progress, wanted: set[str], groups: SequenceGroups | None) -> None:
        super().__init__(progress.bounds)
        self.searches = dict(progress.searches)
        self.wanted, self._groups = wanted, groups
        self._values: dict[Place, Values] = {}

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Note the values."""
        if criterion.label in self.wanted:
            for side, rule in criterion.rules.items():
                self.note(Place(criterion.label, side), rule, value, tested, groups if rule.by_group else None)
        return super().of(criterion, value, tested, groups)

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Note the logarithms of the ratios."""
        for side, rule in weight.rules.items():
            self.note(Place(WEIGHT, side), rule, ordered_of(weight, rule, log_ratio), among)
        return super().of_weight(weight, log_ratio, among)

    def note(
        self, place: Place, rule: OfBatch, value: Tensor, tested: Tensor | None, groups: Tensor | None = None
    ) -> None:
        """Note values that decide a bound."""
        search = self._search(place, rule, value.dtype, value.device, None if groups is None else self._groups)
        self._values[place] = search.left(search.values(value, tested, groups))

    def _search(
        self, place: Place, rule: OfBatch, dtype: torch.dtype, device: torch.device, groups: SequenceGroups | None
    ) -> Search:
        """The search for a bound; one that begins now, or one of the rounds before."""
        search = self.searches.get(place)
        if search is None:
            of_groups = () if groups is None else (groups.total, groups.whole)
            search = self.searches[place] = begin(rule, place.side, dtype, device, *of_groups)
        if search.dtype not in (None, dtype):
            # Their keys have other digits.
            raise ValueError(
                f"spec: expected log-probs whose values of {place.label!r} are {name_of(search.dtype)}, as in the "
                f"rounds before, got {name_of(dtype)}"
            )
        return search

    def tables(self) -> dict[Place, Tensor]:
        """The tables of this round, [1 + amounts, groups, digits] int64 each."""
        searches = {place: one for place, one in self.searches.items() if not one.over()}
        self._values |= {place: one.left(self._values[place]) for place, one in searches.items() if one.round}
        return {place: one.table(self._values[place]) for place, one in searches.items()}


def wanted(spec: Spec, progress: Progress) -> set[str]:
    """The labels of the criteria whose bounds come next, and WEIGHT with them; none when all are known."""
    steps: list[set[str]] = [set(), set()]
    for place in places_of(spec):
        if place not in progress.bounds:
            # torch 2.11's compiler takes no bool as an index.
            steps[int(_follows(spec, place.label))].add(place.label)
    return steps[0] or steps[1]


def _follows(spec: Spec, label: str) -> bool:
    """Whether values are those of survivors, and so a bound follows those of token criteria."""
    if spec.sums_over == "valid":
        return False
    if label == WEIGHT and spec.weight is not None and spec.weight.rules:
        return spec.weight.over != "token"
    return next(c.over for c in spec.criteria if c.label == label) != "token"


class Thresholds(KnownBounds):
    """The bounds of a Spec, as far as several calls have decided them: for the next round, or when complete to apply.

    Attributes:
        spec: The Spec.
        progress: What is known.
    """

    spec: Spec
    progress: Progress

    def __init__(self, spec: Spec, progress: Progress) -> None:
        super().__init__(progress.bounds)
        self.spec, self.progress = spec, progress

    @property
    def complete(self) -> bool:
        """True when all bounds are known. Nothing is read from the device."""
        return not wanted(self.spec, self.progress)

    @property
    def group_count(self) -> int | None:
        """The number of groups that decide bounds for themselves, as far as it is known; None: none, or not yet."""
        known = [x.shape[0] - 1 for x in self.bounds.values() if x.dim()]
        known += [one.groups for one in self.progress.searches.values() if one.groups is not None]
        return known[0] if known else None

    def check_groups(self, groups: SequenceGroups | None) -> None:
        """Refuse other groups than those that bounds of groups were decided for."""
        counted = self.group_count
        if counted is None or groups is None:
            return
        if groups.whole:
            raise ValueError(
                "groups: expected rc.Groups(index=..., count=...) with Thresholds of groups, whose numbers they are, "
                "got a size"
            )
        if groups.total != counted:
            raise ValueError(
                f"groups.count: expected {counted}, for which the thresholds were decided, got {groups.total} groups"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse log-probs that compute in another dtype than those which decided bounds of tokens.

        Such a bound is one of their values, and another dtype may not have it: where it lay would depend on a rounding.
        Bounds of turns and sequences are float64, bounds by sample size float32.
        """
        weight, rules = self.spec.weight, rules_of(self.spec)
        of_tokens = {c.label for c in self.spec.criteria if c.over == "token"}
        if weight is not None and weight.rules and weight.over == "token":
            of_tokens.add(WEIGHT)
        for place, bound in self.bounds.items():
            if place.label in of_tokens and isinstance(rules[place], Counting) and bound.dtype != dtype:
                raise ValueError(
                    f"spec: expected log-probs whose values of {place.label!r} are {name_of(bound.dtype)}, as "
                    f"those that decided them, got {name_of(dtype)}"
                )

    def __repr__(self) -> str:
        """How many are known; nothing is read from the device."""
        return f"Thresholds({len(self.bounds)} known, complete={self.complete})"


def completed(thresholds: Thresholds) -> Thresholds:
    """Refuse bounds that are not all known yet."""
    if not thresholds.complete:
        raise ValueError(f"spec: expected Thresholds that are complete, got {thresholds!r}; count another round")
    return thresholds


def record(batch: OpenBatch, spec: Spec, progress: Progress) -> Recording:
    """Run the criteria on a batch, so that they ask for the bounds that come next."""
    recording = Recording(progress, wanted(spec, progress), batch.groups)
    batch.bounds = recording
    found, weight = decided(whole.operands_of(batch, spec, *whole.sequences_of(batch))), spec.weight
    if WEIGHT in recording.wanted and weight is not None and weight.rules:
        ratios = ratios_of(weight, found.tokens, found.decision, spec)
        recording.of_weight(weight, ratios.log, ratios.among)
    return recording


def find_bounds(batch: OpenBatch, spec: Spec, add_up: Callable[[Tensor], Tensor]) -> KnownBounds:
    """Find the bounds that a batch decides; `add_up` adds int64 up over the ranks that share it."""
    progress = Progress({}, {})
    while wanted(spec, progress):
        recording = record(batch, spec, progress)
        while recording.searches:
            tables = recording.tables()
            # Those of groups that lie in this call need no other rank, and may take other numbers of rounds there.
            shared = {place: table for place, table in tables.items() if not recording.searches[place].local}
            progress = progress.after(recording.searches, tables | added_up(shared, add_up))
            recording.searches = progress.searches
    return KnownBounds(progress.bounds)


def added_up(tables: dict[Place, Tensor], add_up: Callable[[Tensor], Tensor]) -> dict[Place, Tensor]:
    """Add tables up over ranks, all of them at once."""
    if not tables:
        return {}
    every = add_up(torch.cat([table.reshape(-1) for table in tables.values()]))
    parts = every.split([table.numel() for table in tables.values()])
    return {place: part.view(tables[place].shape) for place, part in zip(tables, parts, strict=True)}


def bounds_by_place(spec: Spec, found: KnownBounds) -> tuple[tuple[Place, ...], Tensor]:
    """The places of a Spec's bounds, and the smallest and largest found, [2, K] float64; infinite on an open side."""
    places = places_of(spec)
    ends = [_ends(found.bounds[place].double(), SIGN[place.side] * math.inf) for place in places]
    return places, torch.stack(ends, 1)


def _ends(bounds: Tensor, is_open: float) -> Tensor:
    """The smallest and the largest bound, of those groups that have one, [2]."""
    if not bounds.dim():
        return bounds.expand(2)
    # The last one is of no group; without it there may be none, which have no ends.
    bounds = torch.cat([bounds[:-1], bounds.new_full((1,), math.nan)])
    nothing = bounds.isnan()
    ends = torch.stack([bounds.where(~nothing, math.inf).amin(), bounds.where(~nothing, -math.inf).amax()])
    return torch.where(nothing.all(), is_open, ends)
