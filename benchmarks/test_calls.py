"""The cases of both benchmarks under pytest-benchmark: `pytest benchmarks/`, `-m slow` for large sizes, `-m gpu`.

For comparing two commits (`--benchmark-save`, `--benchmark-compare`). Published figures come from
`python -m benchmarks.cpu` and `python -m benchmarks.gpu`, which interleave.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks.cases import gate
from benchmarks.cases.batches import LAYOUTS, SHAPES, Batch, Case, both_layouts, make
from benchmarks.cases.contender import BY_HAND, EAGER, OURS, VERL
from benchmarks.cases.contenders import contenders, on_cpu
from benchmarks.cases.operations import METRICS, WORKLOADS, Operation, planned, required_bytes
from benchmarks.cpu.__main__ import compare


@lru_cache(maxsize=1)
def inputs_of(shape: tuple[int, int]) -> dict[str, Batch]:
    return both_layouts(*shape)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def present() -> list[str]:
    """Names of the contenders that can run here."""
    return [who.name for who in on_cpu(both_layouts(2, 8)["padded"], METRICS) if who.whole is not None]


def size(shape: tuple[int, int]) -> object:
    """Return a parameter; a size that takes more than a moment is slow."""
    large = shape[0] * shape[1] > 256 * 2048
    return pytest.param(shape, marks=[pytest.mark.slow] if large else [], id=f"{shape[0]}x{shape[1]}")


@pytest.mark.parametrize("name", present())
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name.replace(" ", "-"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [size(shape) for shape in SHAPES])
def test_cpu(benchmark: Any, shape: tuple[int, int], layout: str, workload: Operation, name: str) -> None:
    batch = inputs_of(shape)[layout]
    calls = {who.name: who.whole for who in on_cpu(batch, workload) if who.whole is not None}
    if name != OURS:
        compare(batch, workload, {who: calls[who]() for who in (OURS, name)})
    benchmark.group = f"{shape[0]} x {shape[1]} {layout}, {workload.name}"
    benchmark.extra_info["required_bytes"] = required_bytes(batch, workload)
    benchmark(calls[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [OURS, EAGER, BY_HAND, VERL])
@pytest.mark.parametrize(("case", "operation"), list(planned(tiny=False)), ids=lambda x: x.name)
def test_gpu(benchmark: Any, case: Case, operation: Operation, name: str) -> None:
    batch = make(case, "cuda")
    calls = {who.name: who.whole for who in contenders(batch, operation) if who.whole is not None}
    # Its contenders say so of a batch, which is made on the GPU: verl may be missing, and its loss has no packed form.
    if name not in calls:
        pytest.skip(f"{name} does not run here")
    wrong = gate.check(batch, operation, {who: calls[who]() for who in dict.fromkeys((OURS, EAGER, name))})
    assert not wrong
    benchmark.group = f"{case.name}, {operation.name}"
    benchmark.extra_info["required_bytes"] = required_bytes(batch, operation)

    def call() -> None:
        calls[name]()
        torch.cuda.synchronize()

    benchmark(call)
