"""The benchmark of a device: `python -m benchmarks.gpu` from the root of a checkout.

Each operation of `operations.PLAN` on its case: everybody's result is compared with ours, then all run in turns.
Results are written after every operation, so that whatever happens later loses nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import batches, device, gpu_tables, machine, operations, tables
from benchmarks.batches import Batch, Case
from benchmarks.contenders import BY_HAND, OURS
from benchmarks.device import Host
from benchmarks.device_contender import Contender
from benchmarks.device_contenders import contenders, with_compiler
from benchmarks.measure import Budget, first_line, measure, profiled
from benchmarks.operations import Operation

# Seconds of rounds that an operation gets, and that one point of a scaling curve gets.
ROUNDS, POINT = 3.0, 0.7
# Seconds that one operation may take: with less left none begins, so that a run ends before its time does.
ROOM = 8.0
# What is scaled: tokens up to the first, at the second for sequences, at the third for skew.
SCALED = (1 << 26, 1 << 22, 1 << 20)

# Times of the plan; times beside torch.compile; times against tokens, sequences and skew; launches, copies and waits of
# the plan. Each fills a list of the results.
PARTS = {"times": "measured", "traced": "traced", "scaling": "scaling", "profile": "profiled"}
# Lines that are kept of a traceback.
KEPT_LINES = 20
# Something could not be measured, and the results say what and why.
INCOMPLETE = 3

Measure = Callable[..., dict[str, Any]]


def head(where: Host, tiny: bool) -> dict[str, Any]:
    """What stands above a table."""
    commit, dirty = machine.commit()
    return {
        "benchmark": "device",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "tiny": tiny,
        "machine": machine.describe() | {"triton": machine.version("triton")} | where.facts(),
        **{name: [] for name in PARTS.values()},
        "not_reached": [],
        "under_way": None,
    }


def plan(
    tiny: bool, cases: Sequence[str] | None, wanted_of: operations.Plan = operations.PLAN
) -> Iterator[tuple[Case, Operation]]:
    """What is measured, in order."""
    for name, wanted in wanted_of:
        if cases is None or name in cases:
            case = batches.named(name)
            yield from ((case.tiny() if tiny else case, operation) for operation in wanted)


def scaling(tiny: bool) -> Iterator[tuple[str, Case]]:
    """(what is scaled, the case)."""
    tokens, sequences, skew = (min(size, 1 << 12) if tiny else size for size in SCALED)
    yield from (("tokens", case) for case in batches.by_tokens(tokens))
    yield from (("sequences", case) for case in batches.by_sequences(sequences))
    yield from (("skew", case) for case in batches.by_skew(skew))


def ours_and_by_hand(batch: Batch, operation: Operation) -> list[Contender]:
    """Who is timed on a scaling curve."""
    return [who for who in contenders(batch, operation) if who.name in (OURS, BY_HAND)]


# Who is asked for each list of times.
EVERYBODY: dict[str, Callable[[Batch, Operation], list[Contender]]] = {
    "measured": contenders,
    "traced": with_compiler,
    "scaling": ours_and_by_hand,
}


def work(options: argparse.Namespace) -> Iterator[tuple[str, Case, Operation, str]]:
    """(list of the results, case, operation, axis of a scaling curve or nothing), in order."""
    if "times" in options.parts:
        yield from (("measured", case, operation, "") for case, operation in plan(options.tiny, options.cases))
    if "traced" in options.parts:
        chosen = plan(options.tiny, options.cases, operations.TRACED)
        yield from (("traced", case, operation, "") for case, operation in chosen)
    if "scaling" in options.parts:
        yield from (("scaling", case, operations.TOKEN, axis) for axis, case in scaling(options.tiny))
    # Last: see measure.profiled.
    if "profile" in options.parts:
        yield from (("profiled", case, operation, "") for case, operation in plan(options.tiny, options.cases))


def run(
    where: Host,
    results: dict[str, Any],
    options: argparse.Namespace,
    budget: Budget,
    save: Callable[[dict[str, Any]], None],
    measured: Measure = measure,
    profile: Measure = profiled,
) -> None:
    """Measure what is not in the results yet, and add it. What breaks becomes a problem in the results.

    Args:
        where: The device.
        results: What `head` made, or what an earlier run left. What was under way when that one ended is not tried
            again.
        options: The command line.
        budget: Of the whole run.
        save: Called after every operation.
        measured: How one is measured.
        profile: How one is profiled.

    Raises:
        RuntimeError: The device does not answer any more, so only another process can go on.
    """
    if results["under_way"] is not None:
        into, case_name, name = results["under_way"]
        results[into].append({"case": case_name, "operation": name, "problem": "the run ended in it"})
        results["under_way"] = None
    done = {(into, *key(found)) for into in PARTS.values() for found in results[into]}
    results["not_reached"] = []
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
            # An operation that breaks in whatever way must not lose those behind it: it stands in the results as a
            # problem with the end of its traceback, and a problem makes the exit status tell. An error that stays on
            # the device raises again below, because after it nothing could be trusted.
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
            # Raises again where an error of the device is there to stay.
            where.synchronize()
    save(results)


def key(found: dict[str, Any]) -> tuple[str, str]:
    """What tells measurements apart."""
    return found["case"], found["operation"]


def write(path: Path, results: dict[str, Any]) -> None:
    """All at once: whoever reads finds the old file or the new one, and in it no folder of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(machine.without_places(tables.to_json(results)), encoding="utf-8")
    beside.replace(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="The benchmark of a device.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, which has to be there")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that everything works")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in batches.CASES], metavar="CASE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["times"], help="default: times")
    parser.add_argument("--rounds", type=float, default=ROUNDS, help="seconds of rounds for each operation")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the whole run; what does not fit is left out")
    parser.add_argument("--json", type=Path, help="write the results, after every operation")
    parser.add_argument("--resume", action="store_true", help="go on where the file of --json ends")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    if options.resume and options.json is None:
        parser.error("--resume: expected --json beside it")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes, and gives the exit status: INCOMPLETE if something could not be measured."""
    options = parse(arguments)
    budget = Budget(options.seconds)
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no GPU here; --device cpu tries the same on the CPU")
    where = device.Host() if options.device == "cpu" else device.Cuda()
    results = head(where, options.tiny)
    if options.resume and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))

    def save(found: dict[str, Any]) -> None:
        if options.json is not None:
            write(options.json, found)

    run(where, results, options, budget, save)
    made = gpu_tables.all_tables(results)
    print("\n".join(gpu_tables.facts(results)), "\n")
    print("\n".join(tables.markdown(made)) if options.markdown else tables.drawn(made, gpu_tables.notes(results)))
    return INCOMPLETE if gpu_tables.problems(results) else 0


if __name__ == "__main__":
    sys.exit(main())
