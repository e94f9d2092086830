"""The CPU benchmark: `python -m benchmarks.cpu` from the root of a checkout.

One process. For every size, layout, workload and number of threads, all contenders give their result once and the
results are compared; then they run in turns, each round in another order, and medians are taken. Every round also times
one `torch.exp`, which tells a quiet machine from a busy one.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, tables
from benchmarks.cases import gate
from benchmarks.cases.batches import LAYOUTS, SHAPES, Batch, both_layouts
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import on_cpu
from benchmarks.cases.operations import CPU_LOSS, WORKLOADS, Operation, required_bytes
from benchmarks.cpu import counts, memory
from benchmarks.cpu import tables as cpu_tables
from benchmarks.cpu.turns import FEWEST, MOST, Calibration, quiet, rounds_for, take_turns
from benchmarks.peers.installed import verl_function
from rollout_corr.backends import blocks

# The sizes whose counts are in the result: larger ones have no new count of operations.
COUNTED = SHAPES[:3]

# Blocks of the CPU backend to compare, in slots.
BLOCKS = (16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)

Found = dict[str, Any]


def first_results(there: Sequence[Contender]) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Return all results, and the seconds that the first call took (it compiles, or faults in its pages)."""
    outcomes, seconds = {}, {}
    for who in there:
        assert who.whole is not None
        start = time.perf_counter()
        outcomes[who.name] = who.whole()
        seconds[who.name] = time.perf_counter() - start
    return outcomes, seconds


def compare(batch: Batch, workload: Operation, outcomes: dict[str, Outcome]) -> None:
    """Raise WrongResult unless all agree and the case shows something."""
    wrong = gate.check(batch, workload, outcomes)
    if wrong:
        raise gate.WrongResult("; ".join(wrong.values()))
    metrics = outcomes[OURS].metrics
    kept = 0.5 if metrics is None else metrics.get("sequences_kept_fraction", 0.5)
    if workload.spec.criteria and not 0.0 < kept < 1.0:
        raise gate.WrongResult(f"{OURS}: everything or nothing is rejected, so the case shows nothing")


def one_case(
    batch: Batch,
    workload: Operation,
    threads: int,
    calibrate: Calibration,
    *,
    rounds: int | None,
    budget: float,
    memories: dict[str, memory.Memory],
) -> Found:
    """Compare the results of one batch, workload and number of threads, and measure memory and times.

    Args:
        batch: Padded or packed.
        workload: The call.
        threads: For torch.
        calibrate: The calibration.
        rounds: How many, or None for as many as the budget allows.
        budget: Seconds to spend on the rounds.
        memories: By contender, measured for the same call with another number of threads, which changes no temporary;
            added to.
    """
    torch.set_num_threads(threads)
    everybody = on_cpu(batch, workload)
    there = [who for who in everybody if who.whole is not None]
    outcomes, first = first_results(there)
    compare(batch, workload, outcomes)
    del outcomes
    second = first_results(there)[1]
    calls = [who.whole for who in there if who.whole is not None]
    every = take_turns(calls, rounds or rounds_for(sum(second.values()), budget), calibrate)
    kept = quiet(every)
    samples = [taken.only(kept) for taken in every]
    rows = {who.name: {"name": who.name, "note": who.note} for who in everybody}
    for who, call, taken in zip(there, calls, samples, strict=False):  # the last sample is the calibration
        if who.name not in memories:
            memories[who.name] = memory.measure(call)
        held = memories[who.name]
        rows[who.name] |= {
            "wall_ms": _milliseconds(taken.wall),
            "cpu_ms": _milliseconds(taken.cpu),
            "system_ms": _milliseconds([statistics.median(taken.system)])[0],
            "faults": round(statistics.median(taken.faults)),
            "first_ms": _milliseconds([first[who.name]])[0],
            "temporaries": held.temporaries,
            "outputs": held.outputs,
        }
    padded = batch.padded or batch
    return {
        "shape": list(padded.old.shape),
        "layout": "padded" if padded is batch else "packed",
        "workload": workload.name,
        "threads": threads,
        "slots": padded.slots,
        "tokens": batch.tokens,
        "required_bytes": required_bytes(batch, workload),
        "calibration_ms": _milliseconds(samples[-1].wall),
        "dropped": len(every[-1].wall) - len(kept),
        "rows": list(rows.values()),
    }


def block_sizes(batch: Batch, calibrate: Calibration, rounds: int | None, budget: float) -> Found:
    """Time ours with blocks of other sizes, one thread, padded."""
    torch.set_num_threads(1)
    found: Found = {"shape": list(batch.old.shape), "block": blocks.BLOCK, "slots": list(BLOCKS), "wall_ms": {}}
    for workload in WORKLOADS:
        ours = next(who.whole for who in on_cpu(batch, workload) if who.name == OURS)
        assert ours is not None
        calls = [_with_blocks(size, ours) for size in BLOCKS]
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


def run(options: argparse.Namespace) -> Found:
    """Run the whole benchmark, and return the content of the result file."""
    # Before anything is timed: verl's imports start threads and take seconds.
    verl_function()
    results: Found = {
        "benchmark": "cpu",
        **machine.head(),
        "quick": options.quick,
        "machine": machine.describe(),
        "import_ms": _milliseconds(machine.import_seconds()),
        "load": machine.load(),
        "cases": [],
        "losses": [],
        "blocks": [],
        "counts": {"head": [], "rows": []},
    }
    calibrate = Calibration()
    memories: dict[tuple[object, ...], dict[str, memory.Memory]] = {}
    how = {"rounds": options.rounds, "budget": options.budget}

    # Last those with pages kept, because that cannot be undone.
    keeping = 0 if options.quick else len(options.shapes)
    layouts = len(options.layouts)
    total = len(WORKLOADS) * (len(options.shapes) * len(options.threads) * layouts + keeping)
    total += len(options.shapes) * layouts
    start = time.perf_counter()

    def add(shape: tuple[int, int], layout: str, batch: Batch, threads: int, pages: str, *workloads: Operation) -> None:
        for workload in workloads:
            held = memories.setdefault((shape, layout, workload.name), {})
            case = {"pages": pages, **one_case(batch, workload, threads, calibrate, memories=held, **how)}
            results["losses" if workload.part else "cases"].append(case)
            done = len(results["cases"]) + len(results["losses"])
            left = cpu_tables.said_left(done, total, time.perf_counter() - start)
            print(f"{left} {cpu_tables.one_line(case)}", file=sys.stderr, flush=True)

    for shape in options.shapes:
        both = both_layouts(*shape)
        for threads in options.threads:
            for layout in options.layouts:
                add(shape, layout, both[layout], threads, "default", *WORKLOADS)
        for layout in options.layouts:
            add(shape, layout, both[layout], min(options.threads), "default", CPU_LOSS)
        if shape in COUNTED:
            made = counts.table_of([shape], options.layouts)
            results["counts"] = {"head": made.head, "rows": [*results["counts"]["rows"], *made.rows]}
        if options.blocks:
            results["blocks"].append(block_sizes(both["padded"], calibrate, **how))
    if not options.quick and machine.keep_pages():
        for shape in options.shapes:
            add(shape, "padded", both_layouts(*shape)["padded"], 1, "kept", *WORKLOADS)
    return results


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected ROWSxWIDTH, got {text!r}")
    return int(found[1]), int(found[2])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="The CPU benchmark of rollout-corr.")
    parser.add_argument("--quick", action="store_true", help="two sizes, one thread, padded, 5 rounds")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="ROWSxWIDTH", help="default: all")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 2")
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", help="default: both")
    parser.add_argument("--rounds", type=int, help=f"default: as many as --budget allows, {FEWEST} to {MOST}")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to spend on the rounds of one case")
    parser.add_argument("--blocks", action="store_true", help="also compare block sizes of the CPU backend")
    parser.add_argument("--operations", action="store_true", help="only count operations, bytes and page faults")
    parser.add_argument(
        "--json",
        type=Path,
        help="write the results, for python -m benchmarks.report; with --operations the counts of a file of results",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.shapes = options.shapes or list(SHAPES[: 2 if quick else None])
    options.threads = options.threads or ([1] if quick else [1, 2])
    options.layouts = options.layouts or (["padded"] if quick else list(LAYOUTS))
    options.rounds = options.rounds or (FEWEST if quick else None)
    if min(options.threads) < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("--threads and --rounds: expected numbers >= 1")
    return options


def main() -> None:
    """Run, print and write."""
    options = parse()
    if options.operations:
        made = counts.table_of(options.shapes, options.layouts)
        if options.json is not None:
            old = json.loads(options.json.read_text(encoding="utf-8"))
            machine.write(options.json, old | {"counts": machine.head() | {"head": made.head, "rows": made.rows}})
        print("\n".join(tables.markdown([made])) if options.markdown else tables.drawn([made], []))
        return
    if asked := machine.ask_for_quiet():
        print(asked, file=sys.stderr, flush=True)
    results = run(options)
    if options.json is not None:
        machine.write(options.json, results)
    made = [*cpu_tables.all_tables(results), cpu_tables.block_table(results)]
    made += [cpu_tables.time_table(results, threads) for threads in sorted(options.threads)[1:]]
    print("\n".join(tables.markdown(made)) if options.markdown else tables.drawn(made, cpu_tables.absent(results)))


if __name__ == "__main__":
    main()
