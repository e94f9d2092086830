"""What the checks of a GPU have in common: their cases, and when two results are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import batches, operations
from benchmarks.batches import Batch, Case
from benchmarks.device import Host
from benchmarks.device_contender import Contender
from benchmarks.device_contenders import contenders
from benchmarks.operations import Operation


class Broken(Exception):
    """A check found that something does not hold."""


def hold(so: bool, otherwise: str) -> None:
    """Raise unless it is so."""
    if not so:
        raise Broken(otherwise)


def named(batch: Batch, operation: Operation, name: str) -> Contender:
    """A contender that is there."""
    found = next((who for who in contenders(batch, operation) if who.name == name), None)
    hold(found is not None and found.on_device is not None, f"{name} does not run {operation.name} here")
    assert found is not None
    return found


def case_of(where: Host, name: str) -> Case:
    """A case by its name."""
    case = batches.named(name)
    return case if where.name == "cuda" else case.tiny()


def wanted(where: Host, case: str) -> list[tuple[Batch, Operation]]:
    """The operations that the plan has for a case."""
    batch = batches.make(case_of(where, case), where.name)
    return [(batch, operation) for name, some in operations.PLAN if name == case for operation in some]


def tensors(out: object) -> list[Tensor]:
    """Every tensor in what a contender's call on the device gives."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, rc.Correction):
        parts = (out.weights, out.mask, out.keep, out.statistics.sums, out.statistics.maxima)
        return [x for x in parts if isinstance(x, Tensor)]
    if isinstance(out, tuple):
        return [x for part in out for x in tensors(part)]
    return []


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit by bit; a NaN equals the same NaN."""

    def bits(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).view(torch.uint8)

    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
