"""The CPU benchmark's cases under pytest-benchmark: `pytest benchmarks/` (`-m slow` for the large sizes).

For comparing two commits (`--benchmark-save`, `--benchmark-compare`). Published figures come from
`python -m benchmarks.cpu`, which interleaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks.cases.batches import LAYOUTS, SHAPES, Batch, both_layouts
from benchmarks.cases.contender import OURS
from benchmarks.cases.contenders import on_cpu
from benchmarks.cases.operations import METRICS, WORKLOADS, Operation, required_bytes
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
