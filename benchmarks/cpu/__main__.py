"""The CPU benchmark: `python -m benchmarks.cpu` from the root of a checkout.

One process, one thread. For every size, layout and workload, all contenders give their result once and the results are
compared; then they run in turns, each round in another order, and medians are taken. Every round also times one
`torch.exp`, which tells a quiet machine from a busy one.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, tables
from benchmarks.cases import gate
from benchmarks.cases.batches import LAYOUTS, SHAPES, Batch, both_layouts
from benchmarks.cases.contender import OURS, Contender, Outcome
from benchmarks.cases.contenders import on_cpu
from benchmarks.cases.operations import WORKLOADS, Operation, required_bytes
from benchmarks.cpu import memory
from benchmarks.cpu import tables as cpu_tables
from benchmarks.cpu.turns import FEWEST, MOST, Calibration, quiet, rounds_for, take_turns
from benchmarks.peers.installed import verl_function

Found = dict[str, Any]


def results_of(there: Sequence[Contender]) -> dict[str, Outcome]:
    """Return the result of every contender that is there."""
    return {who.name: who.whole() for who in there if who.whole is not None}


def compare(batch: Batch, workload: Operation, outcomes: dict[str, Outcome]) -> None:
    """Raise WrongResult unless all agree and the case shows something."""
    wrong = gate.check(batch, workload, outcomes)
    if wrong:
        raise gate.WrongResult("; ".join(wrong.values()))
    metrics = outcomes[OURS].metrics
    kept = 0.5 if metrics is None else metrics.get("sequences_kept_fraction", 0.5)
    if workload.spec.criteria and not 0.0 < kept < 1.0:
        raise gate.WrongResult(f"{OURS}: everything or nothing is rejected, so the case shows nothing")


def one_case(batch: Batch, workload: Operation, calibrate: Calibration, budget: float) -> Found:
    """Compare the results of one batch and workload, and measure memory and times."""
    everybody = on_cpu(batch, workload)
    there = [who for who in everybody if who.whole is not None]
    compare(batch, workload, results_of(there))
    start = time.perf_counter()
    results_of(there)
    rounds = rounds_for(time.perf_counter() - start, budget)
    calls = [who.whole for who in there if who.whole is not None]
    every = take_turns(calls, rounds, calibrate)
    kept = quiet(every)
    samples = [taken.only(kept) for taken in every]
    rows: dict[str, Found] = {who.name: {"name": who.name, "note": who.note} for who in everybody}
    for who, call, taken in zip(there, calls, samples, strict=False):  # the last sample is the calibration
        held = memory.measure(call)
        rows[who.name] |= {
            "wall_ms": _milliseconds(taken.wall),
            "cpu_ms": _milliseconds(taken.cpu),
            "temporaries": held.temporaries,
            "outputs": held.outputs,
        }
    padded = batch.padded or batch
    return {
        "shape": list(padded.old.shape),
        "layout": "padded" if padded is batch else "packed",
        "workload": workload.name,
        "slots": padded.slots,
        "tokens": batch.tokens,
        "required_bytes": required_bytes(batch, workload),
        "calibration_ms": _milliseconds(samples[-1].wall),
        "dropped": len(every[-1].wall) - len(kept),
        "rows": list(rows.values()),
    }


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    """Four significant digits: more would be noise in the result file."""
    return [float(f"{1e3 * value:.4g}") for value in seconds]


def run(options: argparse.Namespace) -> Found:
    """Run the whole benchmark, and return the content of the result file."""
    # Before anything is timed: verl's imports start threads and take seconds.
    verl_function()
    torch.set_num_threads(1)
    results: Found = {
        "benchmark": "cpu",
        **machine.head(),
        "quick": options.quick,
        "machine": machine.describe(),
        "import_ms": _milliseconds(machine.import_seconds()),
        "cases": [],
    }
    calibrate = Calibration()

    # Last those with pages kept, because that cannot be undone.
    keeping = 0 if options.quick else len(options.shapes)
    layouts = LAYOUTS[:1] if options.quick else LAYOUTS
    total = len(WORKLOADS) * (len(options.shapes) * len(layouts) + keeping)

    def add(batch: Batch, pages: str, *workloads: Operation) -> None:
        for workload in workloads:
            case = {"pages": pages, **one_case(batch, workload, calibrate, options.budget)}
            results["cases"].append(case)
            print(f"[{len(results['cases'])} of {total}] {cpu_tables.one_line(case)}", file=sys.stderr, flush=True)

    for shape in options.shapes:
        both = both_layouts(*shape)
        for layout in layouts:
            add(both[layout], "default", *WORKLOADS)
    if not options.quick and machine.keep_pages():
        for shape in options.shapes:
            add(both_layouts(*shape)["padded"], "kept", *WORKLOADS)
    return results


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or not int(found[1]) or not int(found[2]):
        raise argparse.ArgumentTypeError(f"expected ROWSxWIDTH, got {text!r}")
    return int(found[1]), int(found[2])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="The CPU benchmark of rollout-corr.")
    parser.add_argument("--quick", action="store_true", help="two sizes, padded, 5 rounds")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="ROWSxWIDTH", help="default: all")
    parser.add_argument(
        "--budget",
        type=float,
        default=10.0,
        help=f"seconds of the {FEWEST} to {MOST} rounds of a case; 0 with --quick",
    )
    parser.add_argument("--json", type=Path, help="write the results, for python -m benchmarks.report")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes or list(SHAPES[: 2 if options.quick else None])
    options.budget = 0.0 if options.quick else options.budget
    return options


def main() -> None:
    """Run, print and write."""
    options = parse()
    results = run(options)
    if options.json is not None:
        machine.write(options.json, results)
    print(tables.drawn(cpu_tables.all_tables(results), cpu_tables.absent(results)))


if __name__ == "__main__":
    main()
