"""The kernels of `correct` where sequences lie on several ranks: one launch more, and an all-reduce between them.

`read` and `gather` leave sums by sequence or turn; ranks add these up, and with them which sequence a turn belongs to;
for `decide` and `apply` they are a batch's own.
"""

from __future__ import annotations

from typing import Any

from rollout_corr.backends.batch import Batch, Result
from rollout_corr.backends.operators import given_of, operands_of, statistics_of
from rollout_corr.backends.split import PendingTables
from rollout_corr.kernels.correct.launch import prepare
from rollout_corr.kernels.grid import current
from rollout_corr.spec.correction import Spec


class PendingKernels:
    """A correction of parts of sequences by the kernels, awaiting the sequence group's all-reduce."""

    def __init__(self, batch: Batch, spec: Spec, group: Any) -> None:
        self._batch, self._spec = batch, spec
        given = given_of(operands_of(batch, spec))
        # The first and last column of a packed batch count tokens outside every sequence, which stay on this rank. With
        # turns every batch is packed.
        packed = given.offsets is not None or given.turns is not None
        inner = slice(1, -1) if packed else slice(None)
        with current(given.train):
            self._found, launches = prepare(given, spec, split=True)
            for launch in launches[:2]:
                launch.run()
            self._later = launches[2:]
        tables = self._found.by_owner
        assert tables is not None
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
            for launch in self._later:
                launch.run()
        found = self._found
        statistics = statistics_of(found.statistics, self._spec)
        return Result(found.weights, found.mask, found.keep, statistics, found.keep_turns)
