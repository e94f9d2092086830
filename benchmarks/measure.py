"""One operation on one batch: gate, memory and times of interleaved rounds; and, apart, what a profiler counts."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks import batches, device_contenders, device_gate
from benchmarks.batches import Batch, Case
from benchmarks.contenders import OURS
from benchmarks.device import Call, Host, Seconds
from benchmarks.device_contender import Contender, Outcome
from benchmarks.gate import WrongResult
from benchmarks.operations import Operation, bytes_per_slot, required_bytes

FEWEST, MOST = 5, 51
# How many calls, each on a batch of its own, are put into one graph, and up to which size that is worth its memory.
IN_A_ROW, MOST_IN_A_ROW = 16, 1 << 21
# With fewer seconds left than this nobody begins to compile for long.
COMPILING = 30.0


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds until it is spent; 0 from then on."""
        return max(0.0, self._end - self._clock())


@dataclass
class Samples:
    """One contender's rounds, in seconds.

    Attributes:
        device: One call on the device, from cold caches.
        row: IN_A_ROW calls on the device.
        call: By the host's clock until the device is done, without metrics.
        wall: The same with metrics on the host.
    """

    device: list[Seconds] = field(default_factory=list)
    row: list[Seconds] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


@dataclass
class Ready:
    """A contender that may be timed.

    Attributes:
        contender: Who.
        run: What is timed on the device: the call, or the replay of a graph that holds it.
        row: The replay of a graph that holds IN_A_ROW calls, None without one.
        about: What goes into the results beside the times.
    """

    contender: Contender
    run: Call
    row: Call | None
    about: dict[str, Any]


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, in milliseconds of four digits."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    picked = {"median": statistics.median(ordered), "low": ordered[last // 10], "high": ordered[last - last // 10]}
    return {name: float(f"{1e3 * value:.4g}") for name, value in picked.items()}


def measure(
    device: Host,
    case: Case,
    operation: Operation,
    *,
    seconds: float,
    budget: Budget,
    everybody: Callable[[Batch, Operation], list[Contender]] = device_contenders.contenders,
) -> dict[str, Any]:
    """Gate, counts, memory and times of everybody who knows the operation.

    Args:
        device: Where.
        case: The batch.
        operation: The call.
        seconds: To spend on rounds.
        budget: Of the whole run; what compiles for long is left out when too little is left.
        everybody: Who is asked.

    Returns:
        What the result file holds of it; with "problem" in place of times where the gate let nobody through.
    """
    device.free()
    batch = batches.make(case, device.name)
    found: dict[str, Any] = {
        "case": case.name,
        "whose": case.whose,
        "operation": operation.name,
        "tokens": batch.valid_tokens,
        "slots": batch.slots,
        "sequences": case.sequences,
        "layout": "packed" if case.packed else "padded",
        "logp": str(case.logp).removeprefix("torch."),
        "mask": str(case.mask).removeprefix("torch."),
        "bytes_per_slot": bytes_per_slot(batch, operation),
        "required_bytes": required_bytes(batch, operation),
    }
    asked = everybody(batch, operation)
    rows: dict[str, dict[str, Any]] = {who.name: {"name": who.name, "note": who.note} for who in asked}
    found["rows"] = list(rows.values())
    present = [who for who in asked if who.whole is not None]
    outcomes: dict[str, Outcome] = {}
    for who in present:
        assert who.whole is not None
        if who.slow and budget.left() < COMPILING:
            rows[who.name]["note"] = f"not run: it compiles for long, and {budget.left():.0f} s were left"
            continue
        start = time.perf_counter()
        try:
            outcomes[who.name] = who.whole()
            device.synchronize()
        except Exception as problem:
            # Whatever a contender's code raises is a note beside its row, so that the others are still timed; what
            # ours raises ends the run.
            if who.name == OURS:
                raise
            rows[who.name]["note"] = f"not run: {first_line(problem)}"
            device.free()
            continue
        rows[who.name]["first_s"] = float(f"{time.perf_counter() - start:.3g}")
    try:
        wrong = device_gate.check(batch, operation, outcomes)
    except WrongResult as problem:
        return {**found, "problem": str(problem)}
    for name, complaint in wrong.items():
        rows[name]["note"] = f"not timed, wrong: {complaint}"
    right = [who for who in present if who.name in outcomes and who.name not in wrong]
    del outcomes
    ready = []
    for who in right:
        try:
            ready.append(_ready(device, case, operation, who, everybody))
        except torch.OutOfMemoryError as problem:
            rows[who.name]["note"] = f"not timed: {first_line(problem)}"
            device.free()
            continue
        rows[who.name] |= ready[-1].about
    found["copy_bytes"] = device.copy_bytes
    samples, copies = rounds(device, ready, seconds)
    found["rounds"], found["copy_ms"] = len(copies), summary(copies)
    for one, taken in zip(ready, samples, strict=True):
        times = {"device_ms": [each() for each in taken.device], "call_ms": taken.call, "wall_ms": taken.wall}
        if one.row is not None:
            times["row_ms"] = [each() / IN_A_ROW for each in taken.row]
        rows[one.contender.name] |= {name: summary(values) for name, values in times.items()}
    return found


def _ready(
    device: Host,
    case: Case,
    operation: Operation,
    who: Contender,
    everybody: Callable[[Batch, Operation], list[Contender]],
) -> Ready:
    """Weigh and capture."""
    assert who.on_device is not None
    held = device.memory(who.on_device)
    about: dict[str, Any] = {"temporaries": held.temporaries, "outputs": held.outputs, "how": device.by}
    run, row = who.on_device, None
    if who.capturable and not device.waits(who.on_device):
        try:
            captured = device.graph([who.on_device])
            if captured is not None:
                run, about["how"] = captured, "graph"
                row = _row(device, case, operation, who, everybody)
        except RuntimeError as problem:
            about["not_captured"] = first_line(problem)
    return Ready(who, run, row, about)


def first_line(problem: Exception) -> str:
    """What went wrong, as a note."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def _row(
    device: Host,
    case: Case,
    operation: Operation,
    who: Contender,
    everybody: Callable[[Batch, Operation], list[Contender]],
) -> Call | None:
    """Calls of ours one after the other in one graph, each on its own inputs."""
    if who.name != OURS or case.tokens > MOST_IN_A_ROW:
        return None
    calls = []
    for seed in range(1, IN_A_ROW + 1):
        another = everybody(batches.make(case, device.name, seed), operation)
        call = next(one.on_device for one in another if one.name == OURS)
        assert call is not None
        calls.append(call)
    return device.graph(calls)


def rounds(device: Host, ready: Sequence[Ready], seconds: float) -> tuple[list[Samples], list[float]]:
    """Everybody once a round, in an order that changes at random, and a copy; as many rounds as the seconds allow.

    Returns:
        Samples in the order of `ready`, and the seconds of the copies.
    """
    samples = [Samples() for _ in ready]
    copies: list[Seconds] = []
    shuffle = random.Random(0).shuffle
    order = list(range(len(ready)))
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    spent = Budget(seconds)
    try:
        # Once for nothing: what an earlier case left in caches and clocks shall not stand in the first sample.
        for one in ready:
            one.run()
        while len(copies) < FEWEST or (len(copies) < MOST and spent.left() > 0.0):
            copies.append(device.timed(device.copy))
            shuffle(order)
            for which in order:
                one, taken = ready[which], samples[which]
                taken.device.append(device.timed(one.run))
                if one.row is not None:
                    taken.row.append(device.timed(one.row))
                for call, into in ((one.contender.on_device, taken.call), (one.contender.whole, taken.wall)):
                    assert call is not None
                    device.evict()
                    into.append(device.wall(call))
            device.synchronize()
    finally:
        if collecting:
            gc.enable()
    return samples, [each() for each in copies]


def profiled(
    device: Host,
    case: Case,
    operation: Operation,
    *,
    everybody: Callable[[Batch, Operation], list[Contender]] = device_contenders.contenders,
) -> dict[str, Any]:
    """What the profiler counts of everybody who does not compile for long; of ours also with metrics on the host.

    Not beside the times: a profiler that has run once may slow down whatever is launched after it.
    """
    device.free()
    batch = batches.make(case, device.name)
    rows = []
    for who in everybody(batch, operation):
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
