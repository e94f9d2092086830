"""The small sizes under pytest-benchmark: `pytest benchmarks/` (`-m slow` for the large ones).

Good for comparing two commits (`--benchmark-save`, `--benchmark-compare`). Claims come from `python -m benchmarks.cpu`,
which interleaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from benchmarks import cases, gate
from benchmarks.contenders import ORDER, OURS, Outcome, contenders


@lru_cache(maxsize=1)
def inputs_of(shape: tuple[int, int]) -> cases.Inputs:
    return cases.make_inputs(*shape)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def absent() -> dict[str, str]:
    """Who cannot run here, and why."""
    found = contenders(cases.make_inputs(2, 8), "padded", cases.METRICS_ONLY)
    return {contender.name: contender.note for contender in found if contender.call is None}


def size(shape: tuple[int, int]) -> object:
    """A parameter; a size that takes more than a moment is slow."""
    large = shape[0] * shape[1] > 256 * 2048
    return pytest.param(shape, marks=[pytest.mark.slow] if large else [], id=f"{shape[0]}x{shape[1]}")


@pytest.mark.parametrize("name", [name for name in ORDER if name not in absent()])
@pytest.mark.parametrize("workload", cases.WORKLOADS, ids=lambda workload: workload.name.replace(" ", "-"))
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("shape", [size(shape) for shape in cases.SHAPES])
def test_cpu(benchmark: Any, shape: tuple[int, int], layout: str, workload: cases.Workload, name: str) -> None:
    inputs = inputs_of(shape)
    calls = {who.name: who.call for who in contenders(inputs, layout, workload) if who.call is not None}
    chosen: dict[str, Outcome] = {who: calls[who]() for who in (OURS, name)}
    gate.check(inputs, workload, chosen)
    benchmark.group = f"{shape[0]} x {shape[1]} {layout}, {workload.name}"
    benchmark.extra_info["required_bytes"] = cases.required_bytes(inputs, layout, workload)
    benchmark(calls[name])
