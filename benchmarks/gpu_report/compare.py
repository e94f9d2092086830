"""Shared parts of the checks on a GPU: their cases, and the comparison of results bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases import operations
from benchmarks.cases.batches import CASES, Batch, Case, make
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import contenders
from benchmarks.cases.operations import Operation
from benchmarks.gpu.device import Gpu


class Broken(Exception):
    """A check found that something does not hold."""


def hold(so: bool, otherwise: str) -> None:
    """Raise Broken unless a condition is true."""
    if not so:
        raise Broken(otherwise)


def ours(batch: Batch, operation: Operation) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    """Return our call on the device, and the whole one with metrics."""
    who: Contender = next(one for one in contenders(batch, operation) if one.name == OURS)
    assert who.on_device is not None and who.whole is not None
    return who.on_device, who.whole


def case_of(where: Gpu, name: str) -> Case:
    """Return a case by its name."""
    return CASES[name].tiny() if where.tiny else CASES[name]


def planned(where: Gpu, names: Sequence[str]) -> Iterator[tuple[str, Batch, Operation]]:
    """Yield (words for a message, batch, operation) of everything that the plan has for some cases."""
    for name in names:
        batch = make(case_of(where, name), "cuda")
        for case, some in operations.PLAN:
            if case == name:
                yield from ((f"{name}, {operation.name}", batch, operation) for operation in some)


def tensors(out: object) -> list[Tensor]:
    """Return every tensor in the result of a call on the device."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, rc.Correction):
        return tensors((out.weights, out.mask, out.keep, out.statistics.sums, out.statistics.maxima))
    return [x for part in out for x in tensors(part)] if isinstance(out, (tuple, list)) else []


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Compare bit by bit, so that a NaN equals the same NaN."""

    def bits(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).view(torch.uint8)

    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
