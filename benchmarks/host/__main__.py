"""The benchmark of the host: `python -m benchmarks.host` from the root of a checkout.

Microseconds of Python, torch and Triton before a GPU has anything to do, over a driver that does nothing (driver.py).
The least of many rounds in which all calls take turns, in CPU time of this thread: what others leave in the caches
makes a round longer and none shorter.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, tables
from benchmarks.host import driver

# Set in the process that measures: it gives itself to a driver of its own, so nothing else may run there.
MEASURES = "ROLLOUT_CORR_HOST_BENCHMARK"
CALLS_IN_A_ROW = 20


def microseconds(runs: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return of each call the least over some rounds of its mean CPU time; in a round all take their turn."""
    found = [math.inf] * len(runs)
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for place, run in enumerate(runs):
            run()  # caches hold what the call before needs
            start = time.thread_time_ns()
            for _ in range(CALLS_IN_A_ROW):
                run()
            found[place] = min(found[place], (time.thread_time_ns() - start) / CALLS_IN_A_ROW / 1000)
        gc.collect()
    gc.enable()
    return found


def measure(rounds: int) -> dict[str, Any]:
    """Time every call over the driver that does nothing; for a process of its own."""
    driver.install()
    import torch

    from benchmarks.host.calls import calls

    torch.set_num_threads(1)
    all_calls = list(calls())
    times = microseconds([call.run for call in all_calls], rounds)
    found = [
        {"name": call.name, "part": call.part, "microseconds": took}
        for call, took in zip(all_calls, times, strict=True)
    ]
    return {**machine.head(), **machine.describe(), "triton": machine.version("triton"), "calls": found}


def table_of(results: dict[str, Any]) -> tables.Table:
    """Make the table, with the machine and the versions as its title."""
    title = (
        f"Host time of a call over a driver that does nothing: {results['cpu']}, Python {results['python']}, torch "
        f"{results['torch']}, Triton {results['triton']}, commit {results['commit'][:7]}"
    )
    columns = {"us": lambda call: tables.number(call["microseconds"])}
    return tables.table(title, ["call"], lambda call: ["- " * call["part"] + call["name"]], columns, results["calls"])


def main() -> int:
    """Run in a process of its own; there, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of 20 calls each (60)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if MEASURES not in os.environ:
        environment = os.environ | {MEASURES: "1", "TRITON_INTERPRET": "0"}
        return subprocess.run([sys.executable, "-m", "benchmarks.host", *sys.argv[1:]], env=environment).returncode
    try:
        results = measure(options.rounds)
    except driver.NoCompiler as missing:
        print(missing, file=sys.stderr)
        return 1
    if options.json is not None:
        machine.write(options.json, results)
    print(tables.plain(table_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
