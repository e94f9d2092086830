"""The kernels of `correct` where sequences lie on several ranks: one launch more, and an all-reduce between them.

`read` and `gather` leave sums by sequence or turn; ranks add these up, and with them which sequence a turn belongs to;
for `decide` and `apply` they are a batch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout_corr.backends.batch import Batch, Result
from rollout_corr.backends.labelled import kept_of, with_labels
from rollout_corr.backends.operators import given_of, operands_of, statistics_of
from rollout_corr.backends.split import PendingTables, rank_in, ranks_in
from rollout_corr.backends.split_prefixes import Shares, Stretches, carry
from rollout_corr.kernels.correct.launch import prepare
from rollout_corr.kernels.grid import current
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.spec.choices import SequenceOrder


class PendingKernels:
    """A correction of parts of sequences by the kernels, awaiting the sequence group's all-reduce.

    With prefixes there are a launch and a gather before, and an all-reduce that is waited for here.
    """

    def __init__(self, batch: Batch, spec: Spec, group: Any, order: SequenceOrder | None = None) -> None:
        self._batch, self._spec = batch, spec
        given = given_of(operands_of(batch, spec))
        given.labelled = bool(batch.labels)
        stretches = None
        if spec.has_prefixes:
            stretches = Stretches(rank_in(group), ranks_in(group), order)
        halves = stretches is not None and stretches.halves
        # The first and last column of a packed batch count tokens outside every sequence, which stay on this rank. With
        # turns or halves every batch is packed.
        packed = given.offsets is not None or given.turns is not None or halves
        inner = slice(1, -1) if packed else slice(None)
        with current(given.train):
            self._found, launches = prepare(given, spec, split=True, halves=halves)
            joins = self._found.joins
            if joins is not None and stretches is not None:
                for launch in launches[:2]:
                    launch.run()
                carry(joins, inner, stretches, group)
                launches = launches[2:]
            for launch in launches[:2]:
                launch.run()
            self._later = launches[2:]
        tables = self._found.by_owner
        assert tables is not None
        self._shares = None
        if joins is not None and stretches is not None:
            self._shares = Shares(tables, joins, inner, stretches)
            integers, floats, peaks = self._shares.integers, self._shares.floats, self._shares.peaks
        else:
            integers = [x[:, inner] for x in (tables.counts, tables.integers) if x is not None]
            floats, peaks = tables.floats[:, inner], None if tables.peaks is None else tables.peaks[:, inner]
        if self._found.parts_of_turns is not None:
            integers.append(self._found.parts_of_turns.owners)
        self._tables = PendingTables(integers, floats, peaks, group)
        self.done = self._tables.done

    def result(self) -> Result:
        """Wait for the other ranks and complete the correction: decide, then apply."""
        self._tables.complete()
        with current(self._batch.train):
            if self._found.parts_of_turns is not None:
                self._found.parts_of_turns.settle()
            if self._shares is not None:
                self._shares.settle()
            for launch in self._later:
                launch.run()
        found = self._found
        statistics = statistics_of(found.statistics, self._spec)
        if self._batch.labels:
            statistics = with_labels(statistics, self._batch, self._spec, kept_of(found))
        return Result(found.weights, found.mask, found.keep, statistics, found.keep_turns)
