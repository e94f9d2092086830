"""Taking statistics: from each block of whole sequences, then once from the facts of all of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..definition.bounds import OPEN
from ..definition.facts import Named, SequenceFacts, concatenate
from ..definition.findings import Findings, Numbers
from ..definition.tokens import Number, select
from ..specs.caches import cached
from ..specs.correction import Spec
from . import peers, schema
from .aggregates import Rows, rows_at
from .all_sequences import AllSequences
from .histogram import HISTOGRAM, HISTOGRAM_OF_WEIGHTS, histogram
from .rows import At, put
from .sums import OfBatch

if TYPE_CHECKING:
    from .by_label import LabelCollector
    from .labels import Labeled

# Sums and maxima by name.
Numbered = tuple[Numbers, Numbers]
NOTHING: Numbered = ({}, {})


class Plan(NamedTuple):
    """All that statistics under a Spec are taken by."""

    of_blocks: Rows  # the rows at "tokens", "diagnosis" and "blocks"
    of_units: dict[At, Rows]  # those at other places
    sums: tuple[str, ...]
    maxima: tuple[str, ...]


@cached(maxsize=256)
def plan_of(spec: Spec) -> Plan:
    """Make the plan of a Spec, which every call fetches once."""
    units: tuple[At, ...] = ("sequences", "measured", "turns", "measured turns", "call")
    return Plan(
        Rows.of(rows_at(spec, "tokens", "diagnosis", "blocks")),
        {place: Rows.of(rows_at(spec, place)) for place in units},
        *schema.layout(spec),
    )


def of_block(findings: Findings, rows: Rows, ready: Numbered) -> Numbered:
    """Sums and maxima of some whole sequences by the rows of blocks, 0-d each; "histogram" is [512].

    Rows whose statistics are ready are not taken.
    """
    spec = findings.spec
    sums, maxima = _several(rows, ready, findings, OfBatch(findings.tokens.d))
    if spec.detail == "full":
        sums["histogram"] = histogram(findings.tokens.d, findings.tokens.measured)
    if len(spec.report) > 1:
        more_sums, more_maxima = peers.collect(findings, spec)
        sums.update(more_sums)
        maxima.update(more_maxima)
    return sums, maxima


def _several(rows: Rows, ready: Numbered, *inputs: object) -> Numbered:
    """Take the rows that give several numbers, apart from those that are ready."""
    sums: Numbers = {}
    maxima: Numbers = {}
    ready_sums, ready_maxima = ready
    for value, names, ends in rows.several:
        if names and names[0] in ready_sums:
            sums.update((name, ready_sums[name]) for name in names)
        elif not names and ends[0] in ready_maxima:
            maxima.update((name, ready_maxima[name]) for name in ends)
        else:
            put(value(*inputs), names, ends, sums, maxima)
    return sums, maxima


def of_sequences(view: AllSequences, plan: Plan, on_host: bool = False) -> Numbered:
    """Sums and maxima over all sequences of a batch, each counting once."""
    sums: Numbers = {}
    maxima: Numbers = {}
    ready = view.read(plan.of_units["measured"].columns) if on_host else NOTHING
    everywhere: list[tuple[At, Tensor | None]] = [("sequences", None), ("measured", view.counted), ("call", None)]
    if view.turns is not None:
        everywhere += [("turns", None), ("measured turns", view.turns_measured)]
    for place, counted in everywhere:
        rows = plan.of_units[place]
        more_sums, more_maxima = _several(rows, ready, view)
        sums.update(more_sums)
        maxima.update(more_maxima)
        sums.update((name, ready[0][name]) for name, _ in rows.each if name in ready[0])
        each = {name: value(view) for name, value in rows.each if name not in ready[0]}
        if each:
            sums.update(_read(each, counted) if on_host else totals(each, counted))
    return sums, maxima


def _read(per_sequence: Named, counted: Tensor | None) -> dict[str, float]:
    """Read the sum of each [S] tensor over the chosen sequences.

    Tensors of one dtype are joined in one operation, which is slow for several, and each of them once.
    """
    distinct: dict[torch.dtype, dict[int, Tensor]] = {}
    for x in per_sequence.values():
        distinct.setdefault(x.dtype, {})[id(x)] = x
    sums: dict[int, float] = {}
    for same in distinct.values():
        joined = torch.stack(list(same.values()))
        if counted is not None or joined.is_floating_point():
            joined = select(counted, joined.double())
        sums.update(zip(same, joined.sum(1).tolist(), strict=True))
    return {name: sums[id(x)] for name, x in per_sequence.items()}


def totals(per_sequence: Named, counted: Tensor | None) -> Named:
    """The sum of each [S] tensor over the chosen sequences, in float64."""
    # One operation joins numbers of different dtypes. float64 holds the sums of integers.
    joined = torch.cat(list(per_sequence.values()))
    if joined.is_floating_point():
        joined = joined.double()
    summed = select(counted, joined.view(len(per_sequence), -1)).sum(1)
    return dict(zip(per_sequence, summed.double().unbind(), strict=True))


def _stack(values: Iterable[Number], on_host: bool) -> Tensor:
    """Stack numbers of any dtypes in float64."""
    if on_host:
        # A third of the time of making a tensor of a list.
        return torch.frombuffer(array("d", map(float, values)), dtype=torch.float64)
    return torch.stack([x.double() for x in values if isinstance(x, Tensor)])


def _number(x: Number, device: torch.device) -> Tensor:
    """A number on the device: filled there, since a copy from the host waits."""
    return x.double() if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=device)


class Collector:
    """The statistics of consecutive blocks, added up.

    With `on_host` every number is read at once, which on a CPU takes less time than an operation on it.
    """

    def __init__(self, spec: Spec, on_host: bool = False, labeled: tuple[Labeled, ...] = ()) -> None:
        self._spec, self._on_host, self._plan = spec, on_host, plan_of(spec)
        self._labels: LabelCollector | None = None
        if labeled:
            from .by_label import LabelCollector

            self._labels = LabelCollector(spec, labeled)
        self._facts: list[SequenceFacts] = []
        self._sums: list[Numbers] = []
        self._maxima: list[Numbers] = []
        self._histograms: list[Tensor] = []
        self._bounds = OPEN

    def take(
        self, findings: Findings, choose: Callable[[Tensor], Tensor] | None = None, ready: Numbered = ({}, {})
    ) -> None:
        """Take the statistics of the next block.

        `choose` gives its tokens of a tensor in the shape of the batch; `ready` are statistics that its backend has.
        """
        sums, maxima = of_block(findings, self._plan.of_blocks, ready)
        if isinstance(bins := sums.pop("histogram", None), Tensor):
            self._histograms.append(bins)
        self._facts.append(findings.facts)
        self._sums.append(sums)
        self._maxima.append(maxima)
        if findings.weighing is not None:
            self._bounds = findings.weighing.bounds
        if self._labels is not None:
            self._labels.take(findings, choose)

    def vector(self, tokens_outside: Number, rows: int, slots: int) -> Tensor:
        """Sums and maxima of the batch, of so many valid tokens in no sequence, sequences and tokens, valid or not."""
        spec, plan, facts = self._spec, self._plan, concatenate(self._facts)
        sums, maxima = self._sums[0], self._maxima[0]
        if self._sums[1:]:
            sums = self._named(sums, self._stacked(self._sums).sum(0))
            maxima = self._named(maxima, self._stacked(self._maxima).amax(0))
        view = AllSequences(facts, tokens_outside, spec, self._on_host, self._bounds)
        more_sums, more_maxima = of_sequences(view, plan, self._on_host)
        sums, maxima = sums | more_sums, maxima | more_maxima
        if len(spec.report) > 1:
            device = facts.keep.device
            named_sums, named_maxima = (
                {name: _number(x, device) for name, x in numbers.items()}
                for numbers in (sums | {"rows": rows, "slots": slots}, maxima)
            )
            for numbers, more in zip((sums, maxima), peers.per_call(named_sums, named_maxima, spec), strict=True):
                numbers.update(more)
        if self._histograms:
            sums |= self._named(HISTOGRAM, torch.stack(self._histograms).sum(0))
        if schema.bins_weights(spec):
            weighed, counted = facts.log_weight, view.counted
            if facts.turns is not None and spec.weight is not None and spec.weight.per_turn:
                weighed, counted = facts.turns.log_weight, view.turns_measured
            sums |= self._named(HISTOGRAM_OF_WEIGHTS, histogram(weighed, counted))
        every = [*map(sums.__getitem__, plan.sums), *map(maxima.__getitem__, plan.maxima)]
        whole = _stack(every, self._on_host)
        return whole if self._labels is None else self._labels.joined(whole, len(plan.sums), view)

    def _stacked(self, blocks: Sequence[Numbers]) -> Tensor:
        return torch.stack([_stack(numbers.values(), self._on_host) for numbers in blocks])

    def _named(self, names: Iterable[str], values: Tensor) -> Numbers:
        return dict(zip(names, values.tolist() if self._on_host else values.unbind(), strict=True))
