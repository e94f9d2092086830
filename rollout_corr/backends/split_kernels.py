"""The kernels of `correct` where sequences lie on several ranks: one launch more, and an all-reduce between them.

`read` and `gather` leave sums by sequence or turn; ranks add these up, and with them which sequence a turn belongs to;
for `decide` and `apply` they are a batch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..kernels.correct.launch import prepare
from ..kernels.grid import current
from ..specs.correction import Spec
from ..specs.operands import CorrectResult
from . import whole
from .batch import OpenBatch
from .operators import for_kernels
from .registration import offsets_near_tokens
from .split import ExchangedTables


def start_kernels(batch: OpenBatch, spec: Spec, group: Any) -> tuple[Callable[[], bool], Callable[[], CorrectResult]]:
    """Start to correct parts of sequences by the kernels; the sums of sequences travel to the other ranks of the group.

    Returns whether all sums are there, and what waits for them, decides and applies.
    """
    given = offsets_near_tokens(for_kernels(batch, spec))
    # The first and last column of a packed batch count tokens outside every sequence, which stay on this rank. With
    # turns every batch is packed.
    packed = given.offsets is not None or given.turns is not None
    inner = slice(1, -1) if packed else slice(None)
    with current(given.train):
        found, launches = prepare(given, spec, split=True)
        for launch in launches[:2]:
            launch.run()
    tables = found.by_owner
    assert tables is not None
    integers = [x[:, inner] for x in (tables.counts, tables.integers) if x is not None]
    floats, peaks = tables.floats[:, inner], None if tables.peaks is None else tables.peaks[:, inner]
    if found.parts_of_turns is not None:
        integers.append(found.parts_of_turns.owners)
    exchanged = ExchangedTables(integers, floats, peaks, group)

    def complete() -> CorrectResult:
        exchanged.complete()
        with current(batch.train):
            if found.parts_of_turns is not None:
                found.parts_of_turns.settle()
            for launch in launches[2:]:
                launch.run()
        # Over ranks its mean is another one.
        found.statistics, found.mean = whole.diagnosed(found.statistics, batch, spec), None
        return found

    return exchanged.done, complete
