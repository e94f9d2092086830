"""The CPU benchmark: `python -m benchmarks.cpu` from the root of a checkout.

One process. For every size, layout, workload and number of threads, all contenders give their result once and the
results are compared; then they run in turns, each round beginning with another one, and medians are taken. Every round
also times one `torch.exp`, which tells a quiet machine from a busy one.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, cpu_tables, gate, machine, memory, tables
from benchmarks.contenders import OURS, Contender, Outcome, contenders, verl_function
from rollout_corr.backends import blocks

try:
    import resource
except ModuleNotFoundError:  # Windows has none
    resource = None  # type: ignore[assignment]  # a module, or None where the system has none

# Blocks of the CPU backend to compare, in slots.
BLOCKS = (16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
# A few rounds are better than none, and more than these change no median.
FEWEST, MOST = 5, 101


@dataclass
class Samples:
    """One contender's rounds."""

    wall: list[float] = field(default_factory=list)  # seconds
    cpu: list[float] = field(default_factory=list)  # seconds, of all threads
    system: list[float] = field(default_factory=list)  # seconds of `cpu` spent in the kernel
    faults: list[int] = field(default_factory=list)  # minor page faults

    def add(self, call: Callable[[], object]) -> None:
        """Time one call. What it returns is freed after the clocks have stopped."""
        before = _usage()
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        after = _usage()
        del result
        self.system.append(after[0] - before[0])
        self.faults.append(after[1] - before[1])


def _usage() -> tuple[float, int]:
    """(seconds in the kernel, minor page faults) of this process so far."""
    if resource is None:
        return 0.0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_stime, usage.ru_minflt


class Calibration:
    """exp of 4 MiB into a tensor that is there already: one core's arithmetic and cache, no allocation."""

    def __init__(self) -> None:
        self.given = -torch.rand(1 << 20)
        self.out = torch.empty_like(self.given)

    def __call__(self) -> None:
        torch.exp(self.given, out=self.out)


def rounds_for(seconds: float, budget: float) -> int:
    """How many rounds of this length fit."""
    return min(MOST, max(FEWEST, math.floor(budget / max(seconds, 1e-9))))


def take_turns(calls: Sequence[Callable[[], object]], rounds: int, calibrate: Callable[[], object]) -> list[Samples]:
    """Samples of every call, and of the calibration as the last entry; every round in another order.

    In a fixed order, turned or not, a call would always follow the same neighbour and find the heap as that left it.
    """
    order = list(range(len(calls)))
    shuffle = random.Random(0).shuffle
    samples = [Samples() for _ in range(len(calls) + 1)]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            samples[-1].add(calibrate)
            shuffle(order)
            for which in order:
                samples[which].add(calls[which])
    finally:
        if collecting:
            gc.enable()
    return samples


def first_results(present: Sequence[Contender]) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Everybody's result, and the seconds that the first call took (it compiles, or faults in its pages)."""
    outcomes, seconds = {}, {}
    for contender in present:
        assert contender.call is not None
        start = time.perf_counter()
        outcomes[contender.name] = contender.call()
        seconds[contender.name] = time.perf_counter() - start
    return outcomes, seconds


def one_case(
    inputs: cases.Inputs,
    layout: str,
    workload: cases.Workload,
    threads: int,
    calibrate: Calibration,
    *,
    rounds: int | None,
    budget: float,
    memories: dict[Any, memory.Memory],
) -> dict[str, Any]:
    """Gate, memory and times of one size, layout, workload and number of threads.

    Args:
        inputs: The batch.
        layout: "padded" or "packed".
        workload: What to compute.
        threads: For torch.
        calibrate: The calibration.
        rounds: How many, or None for as many as the budget allows.
        budget: Seconds to spend on the rounds.
        memories: What was measured at another number of threads; temporaries do not depend on it. Added to.
    """
    torch.set_num_threads(threads)
    everybody = contenders(inputs, layout, workload)
    present = [contender for contender in everybody if contender.call is not None]
    outcomes, first = first_results(present)
    gate.check(inputs, workload, outcomes)
    del outcomes
    second = first_results(present)[1]
    calls = [contender.call for contender in present if contender.call is not None]
    samples = take_turns(calls, rounds or rounds_for(sum(second.values()), budget), calibrate)
    for contender in present:
        key = inputs.shape, layout, workload.name, contender.name
        if key not in memories and contender.call is not None:
            memories[key] = memory.measure(contender.call)
    rows = []
    for contender in everybody:
        row: dict[str, Any] = {"name": contender.name, "note": contender.note}
        if contender.call is not None:
            taken = samples[present.index(contender)]
            held = memories[inputs.shape, layout, workload.name, contender.name]
            row |= {
                "wall_ms": _milliseconds(taken.wall),
                "cpu_ms": _milliseconds(taken.cpu),
                "system_ms": _milliseconds([statistics.median(taken.system)])[0],
                "faults": round(statistics.median(taken.faults)),
                "first_ms": _milliseconds([first[contender.name]])[0],
                "temporaries": held.temporaries,
                "outputs": held.outputs,
            }
        rows.append(row)
    return {
        "shape": list(inputs.shape),
        "layout": layout,
        "workload": workload.name,
        "threads": threads,
        "slots": inputs.train.numel(),
        "tokens": inputs.tokens,
        "required_bytes": cases.required_bytes(inputs, layout, workload),
        "calibration_ms": _milliseconds(samples[-1].wall),
        "rows": rows,
    }


def block_sizes(inputs: cases.Inputs, calibrate: Calibration, rounds: int | None, budget: float) -> dict[str, Any]:
    """How long we take with blocks of other sizes, one thread, padded."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"shape": list(inputs.shape), "block": blocks.BLOCK, "slots": list(BLOCKS), "wall_ms": {}}
    for workload in cases.WORKLOADS:
        ours = next(c for c in contenders(inputs, "padded", workload) if c.name == OURS)
        assert ours.call is not None
        calls = [_with_blocks(size, ours.call) for size in BLOCKS]
        start = time.perf_counter()
        for call in calls:
            call()
        enough = rounds or rounds_for(time.perf_counter() - start, budget)
        samples = take_turns(calls, enough, calibrate)[:-1]
        found["wall_ms"][workload.name] = _milliseconds([statistics.median(taken.wall) for taken in samples])
    return found


def _with_blocks(size: int, call: Callable[[], Outcome]) -> Callable[[], Outcome]:
    def resized() -> Outcome:
        before = blocks.BLOCK
        blocks.BLOCK = size
        try:
            return call()
        finally:
            blocks.BLOCK = before

    return resized


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    """Four significant digits: more would be noise in the result file."""
    return [float(f"{1e3 * value:.4g}") for value in seconds]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark, as it goes into the result file."""
    # Before anything is timed: verl's imports start threads and take seconds.
    verl_function()
    commit, dirty = machine.commit()
    results: dict[str, Any] = {
        "benchmark": "cpu",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "quick": options.quick,
        "machine": machine.describe(),
        "import_ms": _milliseconds(machine.import_seconds()),
        "cases": [],
        "blocks": [],
    }
    calibrate = Calibration()
    memories: dict[Any, memory.Memory] = {}

    def add(inputs: cases.Inputs, layout: str, threads: int, pages: str) -> None:
        for workload in cases.WORKLOADS:
            case = one_case(
                inputs,
                layout,
                workload,
                threads,
                calibrate,
                rounds=options.rounds,
                budget=options.budget,
                memories=memories,
            )
            results["cases"].append({"pages": pages, **case})
            print(cpu_tables.one_line(results["cases"][-1]), file=sys.stderr, flush=True)

    for shape in options.shapes:
        inputs = cases.make_inputs(*shape)
        for threads in options.threads:
            for layout in options.layouts:
                add(inputs, layout, threads, "default")
        if options.blocks:
            results["blocks"].append(block_sizes(inputs, calibrate, options.rounds, options.budget))
    # Last, because it cannot be undone.
    if not options.quick and machine.keep_pages():
        for shape in options.shapes:
            add(cases.make_inputs(*shape), "padded", 1, "kept")
    return results


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected ROWSxWIDTH, got {text!r}")
    return int(found[1]), int(found[2])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="The CPU benchmark of rollout-corr.")
    parser.add_argument("--quick", action="store_true", help="two sizes, one thread, padded, 5 rounds")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="ROWSxWIDTH", help="default: all")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 2")
    parser.add_argument("--layouts", choices=cases.LAYOUTS, nargs="+", help="default: both")
    parser.add_argument("--rounds", type=int, help=f"default: as many as --budget allows, {FEWEST} to {MOST}")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to spend on the rounds of one case")
    parser.add_argument("--blocks", action="store_true", help="also compare block sizes of the CPU backend")
    parser.add_argument("--json", type=Path, help="write the results, for python -m benchmarks.report")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.shapes = options.shapes or list(cases.SHAPES[: 2 if quick else None])
    options.threads = options.threads or ([1] if quick else [1, 2])
    options.layouts = options.layouts or (["padded"] if quick else list(cases.LAYOUTS))
    options.rounds = options.rounds or (FEWEST if quick else None)
    if min(options.threads) < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("--threads and --rounds: expected numbers >= 1")
    return options


def main() -> None:
    """Runs, prints, writes."""
    options = parse()
    results = run(options)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(tables.to_json(results), encoding="utf-8")
    made = cpu_tables.all_tables(results)
    print("\n".join(tables.markdown(made)) if options.markdown else tables.drawn(made, cpu_tables.absent(results)))


if __name__ == "__main__":
    main()
