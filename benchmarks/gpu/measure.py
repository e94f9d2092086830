"""Measurements of one operation on one batch: times of interleaved rounds, and memory."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import gate
from benchmarks.cases.batches import Batch, Case, make
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import contenders, ours
from benchmarks.cases.operations import Operation, bytes_per_slot, required_bytes
from benchmarks.cpu.turns import without_collector
from benchmarks.gpu.device import IN_A_ROW, MOST_IN_A_ROW, Call, Gpu, Seconds
from rollout_corr.kernels.launches import Launch

FEWEST, MOST = 5, 51
# Replays of a graph of several calls.
REPLAYS = 15
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
        device: Times of `run` from cold caches.
        call: Seconds of the host's clock until the device is done, without metrics.
        wall: Seconds of the host's clock with metrics on the host.
    """

    contender: Contender
    run: Call
    device: list[Seconds] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the summaries of all times, in milliseconds."""
        times = {"device_ms": [read() for read in self.device], "call_ms": self.call, "wall_ms": self.wall}
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
            one, about = prepare(device, who)
        except torch.OutOfMemoryError as problem:
            leave_out(who, f"not timed: {first_line(problem)}")
            continue
        ready.append(one)
        rows[who.name] |= about
    copies = rounds(device, ready, seconds)
    for one in ready:
        rows[one.contender.name] |= one.summary()
        if one.contender.name == OURS:
            rows[OURS] |= of_ours(device, one.contender.on_device)
            if rows[OURS]["how"] == "graph" and case.tokens <= MOST_IN_A_ROW:
                rows[OURS]["in_a_row_us"] = in_a_row(device, case, operation)
    return {**found, "copy_bytes": device.copy_bytes, "rounds": len(copies), "copy_ms": summary(copies)}


def prepare(device: Gpu, who: Contender) -> tuple[Timed, dict[str, Any]]:
    """Measure memory, and capture the call where that is possible; return also what goes into the contender's row."""
    assert who.on_device is not None
    held = device.memory(who.on_device)
    about: dict[str, Any] = {"temporaries": held.temporaries, "outputs": held.outputs, "how": "events"}
    one = Timed(who, who.on_device)
    if who.capturable and not device.waits(who.on_device):
        try:
            one.run, about["how"] = device.graph([who.on_device]), "graph"
        except RuntimeError as problem:
            about["not_captured"] = first_line(problem)
    return one, about


def of_ours(device: Gpu, call: Call | None) -> dict[str, Any]:
    """Return the clock right after the rounds, and count the launches of a call."""
    clock, run, seen = device.megahertz(), Launch.run, []
    assert call is not None
    with mock.patch.object(Launch, "run", lambda launch: (seen.append(launch), run(launch))):
        call()
    return {"launches": len(seen), "MHz": clock}


def in_a_row(device: Gpu, case: Case, operation: Operation) -> float:
    """Measure microseconds of our call in a graph of several, each on a batch of its own, started together."""
    count = 1 if device.tiny else IN_A_ROW
    replay = device.graph([ours(make(case, "cuda", seed), operation)[0] for seed in range(count)])
    taken = [device.timed(replay) for _ in range(REPLAYS)]
    device.synchronize()
    return round(1e6 * statistics.median(read() for read in taken) / count, 2)


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
                for call, taken in ((one.contender.on_device, one.call), (one.contender.whole, one.wall)):
                    assert call is not None
                    device.evict()
                    taken.append(device.wall(call))
            device.synchronize()
    return [read() for read in copies]
