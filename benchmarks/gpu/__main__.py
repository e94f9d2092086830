"""The benchmark of a GPU: `python -m benchmarks.gpu` from the root of a checkout.

For each operation of the plan all results are compared with ours, then all contenders run in turns. Results are written
after every operation, and `--resume` goes on behind the last one, so a run that dies loses at most one.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, tables
from benchmarks.cases import batches
from benchmarks.cases.batches import CASES, Batch, Case
from benchmarks.cases.contender import BY_HAND, OURS, TRACED, Contender
from benchmarks.cases.contenders import contenders, with_compiler
from benchmarks.cases.operations import TOKEN, Operation, planned
from benchmarks.cases.operations import TRACED as TRACED_PLAN
from benchmarks.gpu import tables as gpu_tables
from benchmarks.gpu.device import Cuda, Host
from benchmarks.gpu.measure import Budget, Everybody, first_line, measure, profiled

# Seconds of rounds for an operation, and for a point of a scaling curve.
ROUNDS, POINT = 3.0, 0.7
# Seconds that an operation may take: with less left none begins, so that a run ends in time.
ROOM = 8.0
# Tokens of the scaling curves: the most by tokens, those by sequences, those by skew.
SCALED = (1 << 26, 1 << 22, 1 << 20)

# Parts of the benchmark, and the list of the results that each fills.
PARTS = {"times": "measured", "traced": "traced", "scaling": "scaling", "profile": "profiled"}
# Lines that are kept of a traceback.
KEPT_LINES = 20
# Exit status: the results say that something is wrong, and running it again will not help.
INCOMPLETE = 3

Results = dict[str, Any]
Measure = Callable[..., dict[str, Any]]


def head(where: Host, tiny: bool) -> Results:
    """Return empty results."""
    return {
        "benchmark": "device",
        **machine.head(),
        "tiny": tiny,
        "machine": machine.describe() | {"triton": machine.version("triton")} | where.facts(),
        **{name: [] for name in PARTS.values()},
        "not_reached": [],
        "under_way": None,
    }


def scaling(tiny: bool) -> Iterator[tuple[str, Case]]:
    """Yield (axis, case) of the points of all scaling curves."""
    tokens, sequences, skew = (min(size, 1 << 12) if tiny else size for size in SCALED)
    yield from (("tokens", case) for case in batches.by_tokens(tokens))
    yield from (("sequences", case) for case in batches.by_sequences(sequences))
    yield from (("skew", case) for case in batches.by_skew(skew))


def ours_and_by_hand(batch: Batch, operation: Operation) -> list[Contender]:
    """Return the contenders of a scaling curve."""
    return [who for who in contenders(batch, operation) if who.name in (OURS, BY_HAND)]


EVERYBODY: dict[str, Everybody] = {"measured": contenders, "traced": with_compiler, "scaling": ours_and_by_hand}


def work(options: argparse.Namespace) -> Iterator[tuple[str, Case, Operation, str]]:
    """Yield (list of the results, case, operation, axis of a scaling curve or nothing), in order."""
    tiny, cases = options.tiny, options.cases
    todo = {
        "times": [("measured", case, operation, "") for case, operation in planned(tiny, cases)],
        "traced": [("traced", case, operation, "") for case, operation in planned(tiny, cases, TRACED_PLAN)],
        "scaling": [("scaling", case, TOKEN, axis) for axis, case in scaling(tiny)],
        # Last: see measure.profiled.
        "profile": [("profiled", case, operation, "") for case, operation in planned(tiny, cases)],
    }
    for part, items in todo.items():
        if part in options.parts:
            yield from items


def run(
    where: Host,
    results: Results,
    options: argparse.Namespace,
    budget: Budget,
    save: Callable[[Results], None],
    measured: Measure = measure,
    profile: Measure = profiled,
) -> None:
    """Measure what is not in the results yet, and add it; an error becomes a problem in the results.

    Args:
        where: The device.
        results: From `head`, or of an earlier run; an operation during which that run died is not tried again.
        options: The command line.
        budget: Of the whole run.
        save: Called after every operation.
        measured: Measures one operation.
        profile: Profiles one operation.

    Raises:
        RuntimeError: The device no longer answers, so only another process can go on.
    """
    if results["under_way"] is not None:
        into, case_name, name = results["under_way"]
        results[into].append({"case": case_name, "operation": name, "problem": "the run ended in it"})
    results |= {"under_way": None, "not_reached": []}
    done = {(into, *key(found)) for into in PARTS.values() for found in results[into]}
    for into, case, operation, axis in work(options):
        if (into, case.name, operation.name) in done:
            continue
        if budget.left() < ROOM:
            results["not_reached"].append([case.name, operation.name])
            continue
        results["under_way"] = [into, case.name, operation.name]
        save(results)
        try:
            if into == "profiled":
                found = profile(where, case, operation)
            else:
                seconds = min(options.rounds, POINT) if axis else options.rounds
                found = measured(where, case, operation, seconds=seconds, budget=budget, everybody=EVERYBODY[into])
        except Exception as problem:  # noqa: BLE001  (said below)
            # An operation that fails in whatever way must not lose those behind it: it is in the results as a problem
            # with the end of its traceback, and the exit status tells. An error that stays on the device raises again
            # below, because nothing after it could be trusted.
            traceback.print_exc()
            end = traceback.format_exc().splitlines()[-KEPT_LINES:]
            found = {"case": case.name, "operation": operation.name, "problem": first_line(problem), "traceback": end}
        results[into].append({"axis": axis, **found} if axis else found)
        results["under_way"] = None
        save(results)
        if into != "profiled" or "problem" in found:
            print(gpu_tables.one_line(found), file=sys.stderr, flush=True)
        if "problem" in found:
            where.free()
            where.synchronize()
    save(results)


def key(found: Results) -> tuple[str, str]:
    """Return what distinguishes measurements."""
    return found["case"], found["operation"]


def compile_part(part: int, parts: int, device: str) -> None:
    """Run once a part of all that has to be compiled, so that it is in the caches on disk.

    Several processes do this at the same time before the benchmark, which has to be alone on the GPU. Graphs of
    torch.compile take longest and stand first, so that they are spread over the parts; the curve over sequences has all
    shapes of the kernels.
    """
    tiny = device != "cuda"
    todo = [(*item, with_compiler) for item in planned(tiny, plan=TRACED_PLAN)]
    todo += [(*item, contenders) for item in planned(tiny)]
    todo += [(case, TOKEN, contenders) for axis, case in scaling(tiny) if axis == "sequences"]
    for case, operation, everybody in todo[part::parts]:
        for who in everybody(batches.make(case, device), operation):
            if who.whole is not None and who.name in (OURS, TRACED):
                who.whole()
        print(case.name, operation.name, flush=True)
        torch.cuda.empty_cache()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The benchmark of a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="the CPU shows only that it works")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that everything works")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["times"], help="default: times")
    parser.add_argument("--rounds", type=float, default=ROUNDS, help="seconds of rounds for each operation")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the whole run; what does not fit is left out")
    parser.add_argument("--json", type=Path, help="write the results, after every operation")
    parser.add_argument("--resume", action="store_true", help="go on where the file of --json ends")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--compile", metavar="I/N", help="only compile, the I-th of N parts")
    options = parser.parse_args(arguments)
    if options.resume and options.json is None:
        parser.error("--resume: expected --json beside it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit status, INCOMPLETE if something could not be measured."""
    options = parse(arguments)
    budget = Budget(options.seconds)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here; --device cpu tries the same on the CPU")
    if options.compile:
        part, _, parts = options.compile.partition("/")
        compile_part(int(part), int(parts), options.device)
        return 0
    where = Host() if options.device == "cpu" else Cuda()
    results = head(where, options.tiny)
    if options.resume and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))

    def save(found: Results) -> None:
        if options.json is not None:
            machine.write(options.json, found)

    run(where, results, options, budget, save)
    made = gpu_tables.all_tables(results)
    print("\n".join(gpu_tables.facts(results)), "\n")
    print("\n".join(tables.markdown(made)) if options.markdown else tables.drawn(made, gpu_tables.notes(results)))
    return INCOMPLETE if gpu_tables.problems(results) else 0


if __name__ == "__main__":
    sys.exit(main())
