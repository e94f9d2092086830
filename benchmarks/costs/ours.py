"""Our calls: on the kernels, whose compiled code an interpreter of PTX runs, and on plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases.batches import Batch
from benchmarks.cases.operations import SURROGATE, TOKEN_SPEC
from benchmarks.costs import tables
from benchmarks.costs.counting import Cost, cost_of
from benchmarks.costs.peers import BOTH, CORRECTION, LOSS
from rollout_corr.backends import batch as reading
from rollout_corr.backends import loss_operators, operators, step
from rollout_corr.kernels.launches import Launch

OURS = Path(rc.__file__).parent
KERNELS, PLAIN, COMPILED = tables.OURS, "rollout-corr, plain torch", "rollout-corr, torch.compile"
PPO = rc.Loss(SURROGATE, mean=rc.Mean("token"))
# Of a large launch so many programs run, and their bytes stand for those of all.
PROGRAMS, SECTOR = 128, 32

# Runs a launch, and gives the bytes that it reads and writes.
Runs = Callable[[Launch], tuple[int, int]]


def calls_of(given: Batch, backend: str, metrics: bool = True) -> dict[str, Callable[[], Any]]:
    """Our calls by CORRECTION, LOSS and BOTH; of a loss with its backward."""
    assert given.new is not None
    mask = torch.ones_like(given.old, dtype=torch.bool) if given.mask is None else given.mask.bool()
    batch, how = rc.Batch(mask=mask, cu_seqlens=given.cu_seqlens), {"backend": backend}
    ready = rc.correct(given.old, given.rollout, batch, spec=TOKEN_SPEC, **how)

    def backward(loss: rc.PolicyLoss) -> object:
        (gradient,) = torch.autograd.grad(loss.value, given.new)
        return loss, gradient, metrics and loss.metrics()

    def correction() -> object:
        out = rc.correct(given.old, given.rollout, batch, spec=TOKEN_SPEC, **how)
        return out, metrics and out.metrics()

    def loss() -> object:
        return backward(
            rc.policy_loss(given.new, given.advantages, batch, PPO, old_logp=given.old, correction=ready, **how)
        )

    def both() -> object:
        return backward(
            rc.policy_loss(given.new, given.advantages, batch, PPO, rollout_logp=given.rollout, spec=TOKEN_SPEC, **how)
        )

    return {CORRECTION: correction, LOSS: loss, BOTH: both}


class Machine:
    """Runs launches as compiled code while it is `on`, and keeps what each has done.

    With `some`, PROGRAMS of a large launch run, spread evenly, and stand for all.
    """

    def __init__(self, some: bool = False) -> None:
        from lab.ptx.session import Session

        self.some, self.session = some, Session(checked=False, programs=some_programs if some else None)
        self.on, self.launches = True, list[dict[str, Any]]()

    def run(self, launch: Launch) -> tuple[int, int]:
        """Run a launch, and give the bytes that it reads and writes."""
        if not self.on:
            return 0, 0
        self.session.run(launch)
        _, done = self.session.executed.pop()
        times = launch.programs / len(some_programs(launch)) if self.some else 1
        read, written = (round(done.bytes[f"global {what}"] * times) for what in ("read", "write"))
        self.launches.append(
            {
                "kernel": launch.kernel.__name__.removesuffix("_kernel"),
                "read": read,
                "written": written,
                "sectors": SECTOR * (done.bytes["sectors read"] + done.bytes["sectors write"]),
                "instructions": int(done.threads.sum()),
            }
        )
        return read, written


@contextmanager
def as_on_a_device(runs: Runs) -> Iterator[Cost]:
    """Let tensors of the CPU stand in for tensors of a device; yield the cost of all launches."""
    found, empty = Cost(), torch.empty

    def run(launch: Launch) -> None:
        read, written = runs(launch)
        found.launches += 1
        found.read += read
        found.written += written

    def allocate(*size: Any, **others: Any) -> Tensor:
        """Clear memory, which programs that do not run leave unwritten, past everything that counts.

        What torch imports meanwhile keeps this function, and may call it for tensors without memory.
        """
        made = empty(*size, **others)
        if type(made) is Tensor and not made.is_meta:
            ctypes.memset(made.data_ptr(), 0, made.nbytes)
        return made

    with ExitStack() as stack:
        for target, name, value in (
            (torch, "empty", allocate),
            (Launch, "run", run),
            (operators, "interprets", lambda: True),
            (reading, "checked_offsets", lambda offsets, *_: offsets),
            # What counts shall not change what runs.
            *((module, "seen_by_others", lambda tensors: False) for module in (operators, loss_operators, step)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield found


def some_programs(launch: Launch) -> Any:
    """Programs of a launch that run, spread evenly: all of a small one."""
    count = min(launch.programs, PROGRAMS)
    return (np.arange(count) * launch.programs + launch.programs // 2) // count


def on_kernels(given: Batch, runs: Runs | None = None) -> dict[str, Cost]:
    """Count our calls on the kernels; `runs` is by default the machine that runs their compiled code."""
    with as_on_a_device(runs or Machine(some=True).run) as launched:
        return {what: cost_on_kernels(call, launched) for what, call in calls_of(given, "triton").items()}


def cost_on_kernels(call: Callable[[], object], launched: Cost) -> Cost:
    """Count a call within `as_on_a_device`, when it has run once: a first call does more."""
    call()
    return cost_again(call, launched)


def cost_again(call: Callable[[], object], launched: Cost) -> Cost:
    """Count a call that has run before."""
    before = replace(launched)
    cost = cost_of(call, OURS)
    cost.launches += launched.launches - before.launches
    cost.read += launched.read - before.read
    cost.written += launched.written - before.written
    return cost


def on_plain_torch(given: Batch) -> dict[str, Cost]:
    """Count our calls on plain torch, as on a device: on tensors without memory, whose values cannot be read."""

    def there(x: Any) -> Any:
        return None if x is None else x.detach().to("meta").requires_grad_(x.requires_grad)

    names = ("old", "rollout", "mask", "cu_seqlens", "new", "advantages")
    meta = Batch(lengths=given.lengths, **{name: there(getattr(given, name)) for name in names})
    return {what: cost_of(call, OURS) for what, call in calls_of(meta, "torch").items()}
