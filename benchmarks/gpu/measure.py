"""Measurements of one operation on one batch: times of interleaved rounds and memory; and, apart, profiler counts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.cases import gate
from benchmarks.cases.batches import Batch, Case, make
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import contenders
from benchmarks.cases.operations import Operation, bytes_per_slot, required_bytes
from benchmarks.cpu.turns import without_collector
from benchmarks.gpu.device import Call, Gpu, Seconds

FEWEST, MOST = 5, 51
# Calls that are put into one graph, each on a batch of its own, and the size up to which that is worth its memory.
IN_A_ROW, MOST_IN_A_ROW = 16, 1 << 21
# With fewer seconds left no contender begins to compile for long.
COMPILING = 30.0
# Lines that are kept of a traceback.
KEPT_LINES = 20

Everybody = Callable[[Batch, Operation], list[Contender]]


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, 0 at least."""
        return max(0.0, self._end - time.monotonic())


@dataclass
class Timed:
    """A contender that passed the gate, and its rounds.

    Attributes:
        contender: The contender.
        run: What is timed on the device: the call, or the replay of a graph that holds it.
        row: Replay of a graph that holds IN_A_ROW calls, None without one.
        device: Times of `run` from cold caches.
        in_a_row: Times of `row`.
        call: Seconds of the host's clock until the device is done, without metrics.
        wall: Seconds of the host's clock with metrics on the host.
    """

    contender: Contender
    run: Call
    row: Call | None = None
    device: list[Seconds] = field(default_factory=list)
    in_a_row: list[Seconds] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the summaries of all times, in milliseconds."""
        times = {"device_ms": [read() for read in self.device], "call_ms": self.call, "wall_ms": self.wall}
        times |= {"row_ms": [read() / IN_A_ROW for read in self.in_a_row]} if self.row is not None else {}
        return {name: summary(taken) for name, taken in times.items()}


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile, in milliseconds of four digits."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    picked = {"median": statistics.median(ordered), "low": ordered[last // 10], "high": ordered[last - last // 10]}
    return {name: float(f"{1e3 * value:.4g}") for name, value in picked.items()}


def first_line(problem: Exception) -> str:
    """Return an error as a note."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def measure(
    device: Gpu,
    case: Case,
    operation: Operation,
    *,
    seconds: float,
    budget: Budget,
    everybody: Everybody = contenders,
) -> dict[str, Any]:
    """Compare the results of all contenders for an operation, and measure their memory and times."""
    device.free()
    batch = make(case, "cuda")
    asked = everybody(batch, operation)
    rows: dict[str, dict[str, Any]] = {who.name: {"name": who.name, "note": who.note} for who in asked}
    found: dict[str, Any] = {
        "case": case.name,
        "operation": operation.name,
        "tokens": batch.tokens,
        "slots": batch.slots,
        "sequences": case.sequences,
        "layout": "packed" if case.packed else "padded",
        "logp": str(case.logp).removeprefix("torch."),
        "mask": str(case.mask).removeprefix("torch."),
        "bytes_per_slot": bytes_per_slot(batch, operation),
        "required_bytes": required_bytes(batch, operation),
        "rows": list(rows.values()),
    }

    def leave_out(who: Contender, why: str) -> None:
        rows[who.name]["note"] = why
        device.free()

    outcomes: dict[str, Outcome] = {}
    for who in asked:
        if who.whole is None:
            continue
        if who.slow and budget.left() < COMPILING:
            leave_out(who, f"not run: it compiles for long, and {budget.left():.0f} s were left")
            continue
        start = time.perf_counter()
        try:
            outcomes[who.name] = who.whole()
            device.synchronize()
        except Exception as problem:
            # An error of another contender becomes a note in its row, so that the rest is timed; ours ends the run.
            if who.name == OURS:
                raise
            leave_out(who, f"not run: {first_line(problem)}")
            continue
        rows[who.name]["first_s"] = float(f"{time.perf_counter() - start:.3g}")
    try:
        wrong = gate.check(batch, operation, outcomes)
    except gate.WrongResult as problem:
        return {**found, "problem": str(problem)}
    for name, complaint in wrong.items():
        rows[name]["note"] = f"not timed, wrong: {complaint}"
    right = [who for who in asked if who.name in outcomes and who.name not in wrong]
    del outcomes
    ready = []
    for who in right:
        try:
            one, about = prepare(device, case, operation, who, everybody)
        except torch.OutOfMemoryError as problem:
            leave_out(who, f"not timed: {first_line(problem)}")
            continue
        ready.append(one)
        rows[who.name] |= about
    copies = rounds(device, ready, seconds)
    for one in ready:
        rows[one.contender.name] |= one.summary()
    return {**found, "copy_bytes": device.copy_bytes, "rounds": len(copies), "copy_ms": summary(copies)}


def prepare(
    device: Gpu, case: Case, operation: Operation, who: Contender, everybody: Everybody
) -> tuple[Timed, dict[str, Any]]:
    """Measure memory, and capture the call where that is possible; return also what goes into the contender's row."""
    assert who.on_device is not None
    held = device.memory(who.on_device)
    about: dict[str, Any] = {"temporaries": held.temporaries, "outputs": held.outputs, "how": "events"}
    one = Timed(who, who.on_device)
    if who.capturable and not device.waits(who.on_device):
        try:
            one.run, about["how"] = device.graph([who.on_device]), "graph"
            one.row = calls_in_a_row(device, case, operation, who, everybody)
        except RuntimeError as problem:
            about["not_captured"] = first_line(problem)
    return one, about


def calls_in_a_row(device: Gpu, case: Case, operation: Operation, who: Contender, everybody: Everybody) -> Call | None:
    """Capture calls of ours one after the other, each on its own inputs; None for others and for large batches."""
    if who.name != OURS or case.tokens > MOST_IN_A_ROW:
        return None
    calls = []
    for seed in range(1, IN_A_ROW + 1):
        another = everybody(make(case, "cuda", seed), operation)
        call = next(one.on_device for one in another if one.name == OURS)
        assert call is not None
        calls.append(call)
    return device.graph(calls)


def rounds(device: Gpu, ready: Sequence[Timed], seconds: float) -> list[float]:
    """Run all and a copy once a round, in random order, as often as the seconds allow; return times of the copy."""
    copies: list[Seconds] = []
    shuffled, shuffle = list(ready), random.Random(0).shuffle
    with without_collector():
        spent = Budget(seconds)
        # Untimed: caches and clocks as an earlier case left them must not be part of the first sample.
        for one in ready:
            one.run()
        while len(copies) < FEWEST or (len(copies) < MOST and spent.left() > 0.0):
            copies.append(device.timed(device.copy))
            shuffle(shuffled)
            for one in shuffled:
                one.device.append(device.timed(one.run))
                if one.row is not None:
                    one.in_a_row.append(device.timed(one.row))
                for call, taken in ((one.contender.on_device, one.call), (one.contender.whole, one.wall)):
                    assert call is not None
                    device.evict()
                    taken.append(device.wall(call))
            device.synchronize()
    return [read() for read in copies]


def profiled(device: Gpu, case: Case, operation: Operation) -> dict[str, Any]:
    """Count launches, copies and waits of all who do not compile for long; of ours also with metrics on the host.

    Not together with the times, because a profiler that has run once may slow down whatever is launched after it.
    """
    device.free()
    batch = make(case, "cuda")
    rows = []
    for who in contenders(batch, operation):
        if who.on_device is None or who.whole is None or who.slow:
            continue
        calls = {"on_device": who.on_device} | ({"whole": who.whole} if who.name == OURS else {})
        row: dict[str, Any] = {"name": who.name}
        for name, call in calls.items():
            # Once before, so that nothing is compiled under the profiler.
            call()
            found = device.counts(call)
            if found is not None:
                row[name] = asdict(found)
        rows.append(row)
    return {"case": case.name, "operation": operation.name, "rows": rows}
