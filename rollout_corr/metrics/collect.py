"""Taking statistics: from each block of whole sequences, then once from the facts of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from rollout_corr.definition.findings import Findings, Named, SequenceFacts, concatenate
from rollout_corr.definition.tokens import select
from rollout_corr.metrics import peers, schema
from rollout_corr.metrics.aggregates import AllSequences, aggregates_of
from rollout_corr.metrics.histogram import HISTOGRAM, histogram
from rollout_corr.metrics.rows import Aggregate, At
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.correction import Spec


@lru_cache(maxsize=1024)
def rows_at(spec: Spec, *places: At) -> list[Aggregate]:
    """The rows of a Spec that are taken at some places. Not for compiled regions, which cannot see the cache."""
    return [row for row in aggregates_of(spec) if row.at in places]


def of_block(found: Findings, rows: list[Aggregate]) -> tuple[Named, Named]:
    """Sums and maxima of some whole sequences, 0-d each by name; "histogram" is [512].

    Args:
        found: The sequences.
        rows: Those at "tokens" and "blocks".
    """
    spec = found.spec
    sums, maxima = _taken(rows, found)
    if spec.detail == "full":
        sums["histogram"] = histogram(found.tokens.d, found.tokens.measured)
    if len(spec.report) > 1:
        more_sums, more_maxima = peers.collect(found, spec)
        sums.update(more_sums)
        maxima.update(more_maxima)
    return sums, maxima


def of_sequences(facts: SequenceFacts, tokens_outside: Tensor, spec: Spec) -> tuple[Named, Named]:
    """Sums and maxima over all sequences of a batch, each counting once."""
    view = AllSequences(facts, tokens_outside, spec)
    sums, maxima = _taken(rows_at(spec, "call"), view)
    sums |= totals({row.sums[0]: row.value(view)[0] for row in rows_at(spec, "sequences")}, None)
    sums |= totals({row.sums[0]: row.value(view)[0] for row in rows_at(spec, "measured")}, view.measured)
    return sums, maxima


def _taken(rows: list[Aggregate], view: Findings | AllSequences) -> tuple[Named, Named]:
    """Sums and maxima by name, 0-d each."""
    sums: Named = {}
    maxima: Named = {}
    for row in rows:
        values, first = row.value(view), len(row.sums)
        # torch 2.6 compiles zip(strict=False) as a strict one, so both have their part of the values.
        sums.update(zip(row.sums, values[:first], strict=True))
        maxima.update(zip(row.maxima, values[first:], strict=True))
    return sums, maxima


def totals(per_sequence: Named, among: Tensor | None) -> Named:
    """The sum of each [S] tensor over the chosen sequences, in float64."""
    stacked = select(among, _stack(per_sequence.values()))
    return dict(zip(per_sequence, stacked.sum(1).unbind(), strict=True))


def _stack(values: Iterable[Tensor]) -> Tensor:
    """Stack tensors of any dtypes in float64."""
    return torch.stack([x.double() for x in values])


class Collector:
    """The statistics of consecutive blocks, added up."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._rows = rows_at(spec, "tokens", "blocks")
        self._facts: list[SequenceFacts] = []
        self._names: tuple[list[str], list[str]] = [], []
        self._sums: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._histograms: list[Tensor] = []

    def take(self, found: Findings) -> None:
        """Take the statistics of the next block."""
        self.add(found.facts, *of_block(found, self._rows))

    def add(self, facts: SequenceFacts, sums: Named, maxima: Named) -> None:
        """Add the next block's facts, and the sums and maxima of `of_block`."""
        self._facts.append(facts)
        if "histogram" in sums:
            self._histograms.append(sums.pop("histogram"))
        self._names = list(sums), list(maxima)
        self._sums.append(_stack(sums.values()))
        self._maxima.append(_stack(maxima.values()))

    def statistics(self, tokens_outside: Tensor, rows: int, slots: int) -> Statistics:
        """Give the statistics of the batch.

        Args:
            tokens_outside: 0-d, valid tokens in no sequence.
            rows: The sequences of the batch, empty ones included.
            slots: Its tokens, invalid ones included.
        """
        spec = self._spec
        sums = dict(zip(self._names[0], torch.stack(self._sums).sum(0).unbind(), strict=True))
        maxima = dict(zip(self._names[1], torch.stack(self._maxima).amax(0).unbind(), strict=True))
        more_sums, more_maxima = of_sequences(concatenate(self._facts), tokens_outside, spec)
        sums, maxima = sums | more_sums, maxima | more_maxima
        if len(spec.report) > 1:
            sizes = {"rows": rows, "slots": slots}
            counts = {name: torch.full((), size, device=tokens_outside.device) for name, size in sizes.items()}
            more_sums, more_maxima = peers.per_call(sums | counts, maxima, spec)
            sums, maxima = sums | more_sums, maxima | more_maxima
        if self._histograms:
            sums |= zip(HISTOGRAM, torch.stack(self._histograms).sum(0).unbind(), strict=True)
        sum_names, max_names = schema.layout(spec)
        return Statistics(
            spec=spec,
            sums=_stack(sums[name] for name in sum_names),
            maxima=_stack(maxima[name] for name in max_names),
        )
