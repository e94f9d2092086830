"""Every operation on every case under pytest-benchmark: `pytest benchmarks/`; on a GPU `-m gpu` for the real sizes.

For comparing two commits (`--benchmark-save`, `--benchmark-compare`). Published figures come from
`python -m benchmarks.gpu`, which interleaves, empties caches and replays graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks.cases import gate, operations
from benchmarks.cases.batches import Batch, Case, make
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import contenders
from benchmarks.cases.operations import Operation

HAS_GPU = torch.cuda.is_available()


@lru_cache(maxsize=1)
def batch_of(case: Case) -> Batch:
    return make(case, "cuda" if HAS_GPU else "cpu")


def everybody(batch: Batch, operation: Operation) -> list[Contender]:
    """Return the contenders that can run here and do not compile for long."""
    return [who for who in contenders(batch, operation) if who.on_device is not None and not who.slow]


def parameters() -> Iterator[object]:
    """Yield (case, operation, contender) of all that is measured, tiny and real."""
    for (tiny, operation), (real, _) in zip(operations.planned(True), operations.planned(False), strict=True):
        for who in everybody(batch_of(tiny), operation):
            label = f"{real.name}-{operation.name}-{who.name}"
            yield pytest.param(tiny, operation, who.name, id=f"tiny-{label}")
            yield pytest.param(real, operation, who.name, id=label, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("case", "operation", "name"), list(parameters()))
def test_device(benchmark: Any, case: Case, operation: Operation, name: str) -> None:
    batch = batch_of(case)
    calls = {who.name: who for who in everybody(batch, operation)}
    outcomes: dict[str, Outcome] = {}
    for who in calls.values():
        assert who.whole is not None
        outcomes[who.name] = who.whole()
    if len(outcomes) > 1:
        wrong = gate.check(batch, operation, outcomes)
        assert OURS not in wrong and name not in wrong, wrong
    on_device = calls[name].on_device
    assert on_device is not None
    benchmark.group = f"{case.name}, {case.tokens} slots, {operation.name}"
    benchmark.extra_info["required_bytes"] = operations.required_bytes(batch, operation)

    def call() -> None:
        on_device()
        if HAS_GPU:
            torch.cuda.synchronize()

    benchmark(call)
