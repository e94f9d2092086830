"""Measurements on a GPU: `python -m benchmarks.gpu [kernels | checks NAME ...]` in a checkout.

Without a command the benchmark. For each operation of the plan all results are compared with ours, then all contenders
run in turns. Results are written after every operation, so a run that dies loses at most one.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, tables
from benchmarks.cases.batches import CASES, make
from benchmarks.cases.contenders import contenders, ours, with_compiler
from benchmarks.cases.operations import COMPILED as COMPILED_PLAN
from benchmarks.cases.operations import PLAN, planned
from benchmarks.gpu import checks, kernels
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.measure import KEPT_LINES, Budget, first_line, measure
from rollout_corr.kernels.launches import compiled_meanwhile

# Seconds of rounds for an operation.
ROUNDS = 3.0
# Seconds that an operation may take: with less left none begins, so that a run ends in time.
ROOM = 8.0
# Parts of the benchmark, and the list of the results that each fills.
PARTS = {"times": "measured", "compiled": "compiled"}

Results = dict[str, Any]


def compile_ours(options: argparse.Namespace) -> None:
    """Compile the kernels of all operations, on all cores."""
    try:
        with compiled_meanwhile(len(os.sched_getaffinity(0))):
            for case, operation in planned(options.tiny, options.cases):
                ours(make(case, "cuda"), operation)[0]()
    except Exception:  # noqa: BLE001  (said below)
        # The operation that raises does so again when it is measured; `measured` reports it as a problem.
        traceback.print_exc()


def save(results: Results, options: argparse.Namespace) -> None:
    """Write the results so far, if a file was asked for."""
    if options.json is not None:
        machine.write(options.json, results)


def measured(where: Gpu, results: Results, options: argparse.Namespace, budget: Budget) -> None:
    """Measure all that was asked for, and add it; an error becomes a problem in the results."""
    for part, into in PARTS.items():
        if part not in options.parts:
            continue
        everybody = with_compiler if part == "compiled" else contenders
        for case, operation in planned(options.tiny, options.cases, COMPILED_PLAN if part == "compiled" else PLAN):
            if budget.left() < ROOM:
                results["not_reached"].append([case.name, operation.name])
                continue
            try:
                how = {"seconds": options.rounds, "budget": budget, "everybody": everybody}
                found = measure(where, case, operation, **how)
            except Exception as problem:  # noqa: BLE001  (said below)
                # An operation that fails in whatever way must not lose those behind it: it is in the results as a
                # problem with the end of its traceback, and the exit status tells. An error that stays on the device
                # raises again below, because nothing after it could be trusted.
                traceback.print_exc()
                end = traceback.format_exc().splitlines()[-KEPT_LINES:]
                found = {"case": case.name, "operation": operation.name, "problem": first_line(problem)}
                found["traceback"] = end
            results[into].append(found)
            save(results, options)
            print(gpu_tables.one_line(found), file=sys.stderr, flush=True)
            if "problem" in found:
                where.free()
                where.synchronize()


def benchmark(where: Gpu, options: argparse.Namespace) -> int:
    """Run, print and write; return the exit status, 1 if something could not be measured."""
    budget = Budget(options.seconds)
    results: Results = {
        "benchmark": "device",
        **machine.head(),
        "tiny": options.tiny,
        "machine": machine.describe() | {"triton": machine.version("triton")} | where.facts(),
        **{name: [] for name in PARTS.values()},
        "not_reached": [],
    }
    save(results, options)  # what the device is, before anything may go wrong on it
    compile_ours(options)
    measured(where, results, options, budget)
    print("\n".join(gpu_tables.facts(results)), "\n")
    print(tables.drawn(gpu_tables.all_tables(results), gpu_tables.notes(results)))
    return 1 if gpu_tables.problems(results) else 0


COMMANDS = {"benchmark": benchmark, "kernels": kernels.run, "checks": checks.run}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a GPU is asked for.")
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="benchmark", help="default: benchmark")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"checks, of {', '.join(checks.CHECKS)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that everything works")
    parser.add_argument("--json", type=Path, help="write what is found, after each part of it")
    parser.add_argument("--once", action="store_true", help="kernels: run each once, for a profiler around the process")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["times"], help="default: times")
    parser.add_argument("--rounds", type=float, default=ROUNDS, help="seconds of rounds for each operation")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the whole run; what does not fit is left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; return the exit status."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here")
    return COMMANDS[options.command](Gpu(options.tiny), options)


if __name__ == "__main__":
    sys.exit(main())
