"""The bounds that a batch decides, found before it is corrected: on the CPU in its blocks, elsewhere as one piece.

Criteria of tokens come first where those of turns and sequences run over their survivors. Nothing of this runs for a
Spec whose bounds are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollout_corr.backends import blocks, select, select_ess, select_groups, whole
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.layouts import name_of
from rollout_corr.backends.select import Search, Values
from rollout_corr.backends.select_ess import EssSearch
from rollout_corr.backends.select_groups import GroupSearch
from rollout_corr.backends.sequence_groups import SequenceGroups
from rollout_corr.definition.bounds import Bound, Sides
from rollout_corr.definition.bounds_of_batch import SIGN, ordered_of
from rollout_corr.definition.findings import Operands, decided
from rollout_corr.definition.weights import ratios_of
from rollout_corr.spec.bounds_of_batch import WEIGHT, Counting, KeepESS, OfBatch, Place, Side
from rollout_corr.spec.correction import Criterion, Spec, Weight, places_of, rules_of

AnySearch = Search | EssSearch | GroupSearch


class Found:
    """The bounds found, by place; what has bounds that are not known yet is not bounded by them.

    Args:
        bounds: Of criteria, and of the logarithms of weights; 0-d each, or [groups + 1] of each group, and the last of
            none; infinite where a side is open.
    """

    def __init__(self, bounds: dict[Place, Tensor]) -> None:
        self.bounds = bounds
        self._numbers: Sides | None = None

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Give the bounds of a criterion."""
        low, high = (
            x if x is None or not x.dim() or groups is None else x[groups] for x in self._sides(criterion.label)
        )
        return low, high

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Give the bounds of the weight: as numbers, None for an open side, where values may be read."""
        low, high = self.known_of_weight()
        if low is None and high is None:
            return self._sides(WEIGHT)
        return None if low == -math.inf else low, None if high == math.inf else high

    def known_of_weight(self) -> Sides:
        """Read the bounds of the weight once, where values may be read."""
        sides = self._sides(WEIGHT)
        if torch.compiler.is_compiling() or any(x is not None and x.device.type != "cpu" for x in sides):
            return None, None
        if self._numbers is None:
            low, high = (None if x is None else x.item() for x in sides)
            self._numbers = low, high
        return self._numbers

    def _sides(self, label: str) -> tuple[Tensor | None, Tensor | None]:
        return self.bounds.get(Place(label, "lower")), self.bounds.get(Place(label, "upper"))


class Progress(NamedTuple):
    """The bounds of a Spec that are known, and the searches under way for others.

    Attributes:
        bounds: Those known, 0-d each.
        searches: Those under way; empty before the first round of a step and when all are known.
    """

    bounds: dict[Place, Tensor]
    searches: dict[Place, AnySearch]

    def after(self, searches: dict[Place, AnySearch], tables: dict[Place, Tensor]) -> Progress:
        """The progress after a round.

        Args:
            searches: Those of the round.
            tables: The table of each that is not over, added up over all that belongs to the batch.
        """
        found = {place: one.narrowed(tables[place]) if place in tables else one for place, one in searches.items()}
        if any(one.round < one.rounds() for one in found.values()):
            return Progress(self.bounds, found)
        return Progress(self.bounds | {place: one.bound() for place, one in found.items()}, {})


class Counter(Protocol):
    """Counts the tokens of a batch for some bounds, without their values, and gives those of sequences for others.

    Attributes:
        rules: The bounds of tokens.
        units: The bounds of sequences.
        dtype: Of the values of tokens.
        device: Of the tables.
    """

    rules: dict[Place, OfBatch]
    units: dict[Place, OfBatch]
    dtype: torch.dtype
    device: torch.device

    def values(self, known: Mapping[Place, Tensor]) -> dict[Place, tuple[Tensor, Tensor]]:
        """The values of sequences, [S] float64, under the bounds that are known, and which of them decide, [S] bool."""

    def tables(self, searches: Mapping[Place, AnySearch]) -> dict[Place, Tensor]:
        """The tables of a round, for those of the searches that it counts for."""


# From the labels whose bounds are looked for.
Counters = Callable[[set[str]], Counter]


class Recording(Found):
    """Bounds known before, and the values of those criteria, and of the weight, whose bounds are looked for.

    Args:
        progress: What is known.
        wanted: Their labels.
        on_cpu: Values that take no part are left out.
        groups: The groups of sequences, where some decide.
        counter: Counts the tokens for some of the bounds.
    """

    def __init__(
        self,
        progress: Progress,
        wanted: set[str],
        on_cpu: bool,
        groups: SequenceGroups | None,
        counter: Counter | None = None,
    ) -> None:
        super().__init__(progress.bounds)
        self.searches = dict(progress.searches)
        self.wanted, self._on_cpu, self._groups = wanted, on_cpu, groups
        self._counter = counter
        # The bounds whose values are not noted when criteria ask for them.
        self.counted: set[Place] = set() if counter is None else {*counter.rules}
        if counter is not None:
            for place, rule in counter.rules.items():
                self._search(place, rule, counter.dtype, counter.device)
        self._values: dict[Place, list[Values]] = {}

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
        """Note values that decide a bound, unless they are counted elsewhere."""
        if place in self.counted:
            return
        search = self._search(place, rule, value.dtype, value.device, None if groups is None else self._groups)
        values = search.values(value, tested, groups, self._on_cpu)
        self._values.setdefault(place, []).append(search.left(values) if self._on_cpu else values)

    def note_sequences(self) -> None:
        """Note the values of sequences that the counter gives, under the bounds that are known, and no others."""
        if self._counter is not None:
            for place, (value, tested) in self._counter.values(self.bounds).items():
                self.note(place, self._counter.units[place], value, tested)
            self.counted |= self._counter.units.keys()

    def _search(
        self,
        place: Place,
        rule: OfBatch,
        dtype: torch.dtype,
        device: torch.device,
        groups: SequenceGroups | None = None,
    ) -> AnySearch:
        """The search for a bound; one that begins now, or one of the rounds before."""
        search = self.searches.get(place)
        if search is None:
            search = self.searches[place] = begin(rule, place.side, dtype, device, groups)
        if search.dtype not in (None, dtype):
            # Their keys have other digits.
            raise ValueError(
                f"known: expected log-probs whose values of {place.label!r} are {name_of(search.dtype)}, as in the "
                f"rounds before, got {name_of(dtype)}"
            )
        return search

    def tables(self) -> dict[Place, Tensor]:
        """The tables of this round, [1 or 3, digits] int64 each."""
        under_way = {place: one for place, one in self.searches.items() if one.round < one.rounds()}
        counted = {} if self._counter is None else self._counter.tables(under_way)
        return {
            place: counted[place] if place in counted else self._table(place, one) for place, one in under_way.items()
        }

    def _table(self, place: Place, search: AnySearch) -> Tensor:
        parts = self._values[place]
        if self._on_cpu and search.round:
            parts = self._values[place] = [search.left(values) for values in parts]
        total = search.table(parts[0])
        for values in parts[1:]:
            total = total + search.table(values)
        return total


def begin(
    rule: OfBatch, side: Side, dtype: torch.dtype, device: torch.device, groups: SequenceGroups | None = None
) -> AnySearch:
    """A search before its first round, for a bound of values of a dtype; with groups, of each of them."""
    if isinstance(rule, KeepESS):
        return select_ess.begin(rule, device)
    assert isinstance(rule, Counting)
    if groups is not None:
        return select_groups.begin(rule, side, dtype, device, groups.total, groups.whole)
    return select.begin(rule, side, dtype, device)


def wanted(spec: Spec, progress: Progress) -> set[str]:
    """The labels of the criteria whose bounds come next, and WEIGHT with them; none when all are known."""
    steps: list[set[str]] = [set(), set()]
    for place in places_of(spec):
        if place not in progress.bounds:
            # torch 2.11's compiler takes no bool as an index.
            steps[int(_follows(spec, place.label))].add(place.label)
    return steps[0] or steps[1]


def _follows(spec: Spec, label: str) -> bool:
    """Tell whether values are those of survivors, and so a bound follows those of token criteria."""
    if spec.sums_over == "valid":
        return False
    if label == WEIGHT and spec.weight is not None and spec.weight.rules:
        return spec.weight.level != "token"
    return next(c.over for c in spec.criteria if c.label == label) != "token"


class Thresholds(Found):
    """The bounds of a Spec, as far as several calls have decided them: for the next round, or when complete to apply.

    Attributes:
        spec: The Spec.
        progress: What is known.
    """

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
        known += [one.groups for one in self.progress.searches.values() if isinstance(one, GroupSearch)]
        return known[0] if known else None

    def __repr__(self) -> str:
        """Say how many are known; nothing is read from the device."""
        return f"Thresholds({len(self.bounds)} known, complete={self.complete})"


def dtypes_of_tokens(thresholds: Thresholds) -> dict[Place, torch.dtype]:
    """The dtypes of the bounds that are values of tokens: those of units are float64, of sample sizes float32."""
    rules = rules_of_tokens(thresholds.spec)
    return {place: x.dtype for place, x in thresholds.bounds.items() if isinstance(rules.get(place), Counting)}


def rules_of_tokens(spec: Spec) -> dict[Place, OfBatch]:
    """The rules of a Spec that look at tokens."""
    return _rules_over(spec, "token")


def rules_of_sequences(spec: Spec) -> dict[Place, OfBatch]:
    """The rules of a Spec that look at sequences."""
    return _rules_over(spec, "sequence")


def _rules_over(spec: Spec, over: str) -> dict[Place, OfBatch]:
    labels, weight = {c.label for c in spec.criteria if c.over == over}, spec.weight
    if weight is not None and weight.rules and ("token" if weight.level == "token" else weight.over) == over:
        labels.add(WEIGHT)
    return {place: rule for place, rule in rules_of(spec).items() if place.label in labels}


def record(batch: Batch, spec: Spec, progress: Progress, counters: Counters | None = None) -> Recording:
    """Run the criteria on a batch, so that they ask for the bounds that come next.

    Args:
        batch: The batch.
        spec: The Spec.
        progress: What is known.
        counters: Give what counts tokens without their values; None: nothing does.
    """
    on_cpu, labels = in_blocks(batch), wanted(spec, progress)
    counter = None if counters is None else counters(labels)
    recording = Recording(progress, labels, on_cpu, batch.groups, counter)
    batch.bounds = recording
    recording.note_sequences()
    if recording.counted.issuperset(place for place in places_of(spec) if place.label in labels):
        return recording
    if on_cpu:
        for block in blocks.blocks_under(batch, spec):
            _ask(blocks.operands_of(block, spec), recording)
    else:
        _ask(whole.operands_of(batch, spec, *whole.sequences_of(batch)), recording)
    return recording


def _ask(given: Operands, recording: Recording) -> None:
    weight = given.spec.weight
    found = decided(given)
    if WEIGHT in recording.wanted and weight is not None and weight.rules:
        ratios = ratios_of(weight, found.tokens, found.decision, given.spec)
        recording.of_weight(weight, ratios.log, ratios.among)


def find_bounds(
    batch: Batch, spec: Spec, add_up: Callable[[Tensor], Tensor], counters: Counters | None = None
) -> Found:
    """Find the bounds that a batch decides.

    Args:
        batch: The batch.
        spec: A Spec with such bounds.
        add_up: Adds int64 up over the ranks that share the batch.
        counters: As of `record`.
    """
    progress = Progress({}, {})
    while wanted(spec, progress):
        recording = record(batch, spec, progress, counters)
        while recording.searches:
            tables = recording.tables()
            shared = {place: table for place, table in tables.items() if not _is_local(recording.searches[place])}
            progress = progress.after(recording.searches, tables | added_up(shared, add_up))
            recording.searches = progress.searches
    return Found(progress.bounds)


def _is_local(search: AnySearch) -> bool:
    """Tell whether a search needs no other rank; how many rounds it takes may then differ between ranks."""
    return isinstance(search, GroupSearch) and search.local


def added_up(tables: dict[Place, Tensor], add_up: Callable[[Tensor], Tensor]) -> dict[Place, Tensor]:
    """Add tables up over ranks, all of them at once."""
    if not tables:
        return {}
    every = add_up(torch.cat([table.reshape(-1) for table in tables.values()]))
    parts = every.split([table.numel() for table in tables.values()])
    return {place: part.view(tables[place].shape) for place, part in zip(tables, parts, strict=True)}


def in_order(bounds: Mapping[Place, Tensor], spec: Spec, device: torch.device) -> Tensor:
    """The bounds of a Spec in the order of its places, [K] float64; each of the whole batch, open if not known yet."""
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([bounds.get(place, nothing + SIGN[place.side] * math.inf).double() for place in places_of(spec)])


def in_blocks(batch: Batch) -> bool:
    """Tell whether values may be read, and so a batch is run in blocks."""
    return batch.train.device.type == "cpu" and not torch.compiler.is_compiling()


def bounds_by_place(spec: Spec, found: Found) -> tuple[tuple[Place, ...], Tensor]:
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
