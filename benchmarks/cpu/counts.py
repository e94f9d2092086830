"""Counts of a call that other work on the machine cannot change: operations of torch, bytes allocated, page faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rollout_corr as rc
from benchmarks.cases.batches import Batch, both_layouts
from benchmarks.cases.contenders import whole_batches
from benchmarks.cases.operations import BOTH, WORKLOADS, Operation
from benchmarks.cpu.memory import measure
from benchmarks.cpu.turns import page_faults
from benchmarks.host.__main__ import bytecodes
from benchmarks.peers import by_hand
from benchmarks.tables import Table, mebibytes

# Calls before one is counted: the first ones fill caches, and tell the heap what to keep.
WARM = 5


# Operations that make room and write nothing to it.
NO_PASS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


class Counts(NamedTuple):
    """The cost of a call.

    Attributes:
        operations: Operations of torch that compute or copy, views left out.
        views: Those that only look at memory in another way.
        passes: The elements of the largest tensor of each operation, all together, over the number of valid tokens.
        bytecodes: What Python executes.
        allocated: Bytes of all allocations, outputs included.
        temporaries: The most bytes at a time beyond the outputs.
        faults: Minor page faults.
    """

    operations: int
    views: int
    passes: int
    bytecodes: int
    allocated: int
    temporaries: int
    faults: int


# How fields are written down: ours, and in brackets by hand and the definition.
SHOWN: dict[str, Callable[[Any], str]] = {
    "passes": str, "bytecodes": "{:,}".format, "allocated": mebibytes, "temporaries": mebibytes, "faults": str,
}  # fmt: skip


class _Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher, and the elements of the largest tensor of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), named: Any = None) -> Any:
        self.found[function] += 1
        result = function(*arguments, **(named or {}))
        tensors = [x for x in tree_leaves((arguments, named, result)) if isinstance(x, torch.Tensor)]
        if not (function.is_view or function in NO_PASS):
            self.elements += max((x.numel() for x in tensors), default=0)
        return result


def operations(call: Callable[[], object]) -> tuple[int, int]:
    """Count the operations of a call that compute or copy, and the views."""
    with _Operations() as counting:
        call()
    views = sum(times for function, times in counting.found.items() if function.is_view)
    return sum(counting.found.values()) - views, views


def passes(call: Callable[[], object], tokens: int) -> int:
    """Add up the elements of the largest tensor of each operation, as a multiple of the number of tokens."""
    with _Operations() as counting:
        call()
    return round(counting.elements / tokens)


def count(call: Callable[[], object], tokens: int) -> Counts:
    """Count everything about a call that has run a few times before, on so many valid tokens."""
    for _ in range(WARM):
        call()
    before = page_faults()
    result = call()
    faults = page_faults() - before
    del result
    memory = measure(call)
    executed = passes(call, tokens), bytecodes(call)[0]
    return Counts(*operations(call), *executed, memory.allocated, memory.temporaries, faults)


def calls_of(batch: Batch, operation: Operation) -> dict[str, Callable[[], object]]:
    """Give the calls that are counted, by name: ours, its equal by hand, and the definition run plainly."""
    given = batch.old, batch.rollout
    layout = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    if not operation.part:
        spec = operation.spec

        def correct() -> object:
            return rc.correct(*given, **layout, spec=spec)

        return {
            "correct": correct,
            "by hand": lambda: by_hand.correct(*given, batch.mask, batch.cu_seqlens, spec),
            "definition": whole_batches()(correct),
        }
    old, advantages = batch.old, batch.rollout
    new = (old + 0.1 * torch.sin(1e3 * old)).requires_grad_()
    weights = torch.ones_like(old)

    def loss() -> object:
        out = rc.policy_loss(
            new,
            advantages,
            loss=rc.Loss(operation.surrogate, mean=rc.Mean(over="kept")),
            old_logp=old,
            correction=rc.Factors(weights=weights),
            **layout,
        )
        return torch.autograd.grad(out.value, new)

    def hand() -> object:
        mask = torch.ones_like(old) if batch.mask is None else batch.mask
        value, found = by_hand.policy_loss(new, old, advantages, mask, weights, operation.clip)
        return torch.autograd.grad(value, new), found

    return {"policy_loss and backward": loss, "by hand": hand, "definition": whole_batches()(loss)}


def of_metrics(batch: Batch, operation: Operation) -> int:
    """Count the operations of `metrics()` on a result."""
    out = rc.correct(batch.old, batch.rollout, mask=batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec)
    return operations(out.metrics)[0]


def table_of(shapes: Sequence[tuple[int, int]], layouts: Sequence[str]) -> Table:
    """Count for every size, layout and workload, one thread."""
    torch.set_num_threads(1)
    rows = []
    for shape in shapes:
        both = both_layouts(*shape)
        for layout in layouts:
            for operation in (*WORKLOADS, BOTH):
                batch = both[layout]
                calls = calls_of(batch, operation)
                found = {name: count(call, batch.tokens) for name, call in calls.items()}
                ours, hand, plain = found.values()
                metrics = "-" if operation.part else str(of_metrics(batch, operation))
                rows.append(
                    [
                        f"{shape[0]} x {shape[1]}",
                        layout,
                        operation.name,
                        f"{ours.operations} + {ours.views}",
                        metrics,
                        f"{hand.operations} + {hand.views}",
                        f"{plain.operations} + {plain.views}",
                        *(
                            f"{show(getattr(ours, name))} ({show(getattr(hand, name))}; {show(getattr(plain, name))})"
                            for name, show in SHOWN.items()
                        ),
                    ]
                )
    head = ["size", "layout", "workload", "operations + views", "of metrics()", "by hand", "the definition"]
    head += ["passes over tokens", "bytecodes", "MiB allocated", "MiB of temporaries", "page faults"]
    return Table("Counts of a call, 1 thread", head, rows, 3)
