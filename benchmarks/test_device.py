"""Every operation on every case under pytest-benchmark: `pytest benchmarks/`; on a GPU `-m gpu` for the real sizes.

Good for comparing two commits (`--benchmark-save`, `--benchmark-compare`). Claims come from `python -m benchmarks`,
which interleaves, empties caches and replays graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from benchmarks import batches, device_gate, operations
from benchmarks.batches import Batch, Case
from benchmarks.contenders import OURS
from benchmarks.device import Host, present
from benchmarks.device_contender import Contender, Outcome
from benchmarks.device_contenders import contenders
from benchmarks.operations import Operation


@lru_cache(maxsize=1)
def where() -> Host:
    return present()


@lru_cache(maxsize=1)
def batch_of(case: Case) -> Batch:
    return batches.make(case, where().name)


def everybody(batch: Batch, operation: Operation) -> list[Contender]:
    """Who is there and does not compile for long."""
    return [who for who in contenders(batch, operation) if who.on_device is not None and not who.slow]


def parameters() -> Iterator[object]:
    """(case, operation, who) of all that is measured, tiny and real."""
    for name, wanted in operations.PLAN:
        tiny = batches.make(batches.named(name).tiny(), where().name)
        for operation in wanted:
            for who in everybody(tiny, operation):
                label = f"{name}-{operation.name}-{who.name}"
                yield pytest.param(tiny.case, operation, who.name, id=f"tiny-{label}")
                yield pytest.param(batches.named(name), operation, who.name, id=label, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("case", "operation", "name"), list(parameters()))
def test_device(benchmark: Any, case: Case, operation: Operation, name: str) -> None:
    batch = batch_of(case)
    calls = {who.name: who for who in everybody(batch, operation)}
    outcomes: dict[str, Outcome] = {}
    for who in calls.values():
        assert who.whole is not None
        outcomes[who.name] = who.whole()
    if len(outcomes) > 1:
        wrong = device_gate.check(batch, operation, outcomes)
        assert OURS not in wrong and name not in wrong, wrong
    on_device = calls[name].on_device
    assert on_device is not None
    benchmark.group = f"{case.name}, {case.tokens} slots, {operation.name}"
    benchmark.extra_info["required_bytes"] = operations.required_bytes(batch, operation)

    def call() -> None:
        on_device()
        where().synchronize()

    benchmark(call)
