"""Tables from the results of the CPU benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.contenders import BY_HAND, COMPILED, ORDER, OURS, VERL, VERL_METRICS
from benchmarks.tables import Table, mebibytes, met, number, times

# A round whose calibration took this much longer than the fastest one of the run was disturbed.
DISTURBED = 1.15

Case = Mapping[str, Any]
Results = Mapping[str, Any]


class Promise(NamedTuple):
    """A speed that was promised: padded, one thread, against verl's own function."""

    who: str
    shape: tuple[int, int]
    workload: str
    at_least: float


PROMISES = (
    Promise(OURS, (256, 2048), "metrics only", 3.5),
    Promise(OURS, (256, 2048), "weights + rejection", 6.0),
    Promise(OURS, (2048, 8192), "metrics only", 6.0),
    Promise(OURS, (2048, 8192), "weights + rejection", 10.0),
    Promise(COMPILED, (2048, 8192), "metrics only", 20.0),
    Promise(COMPILED, (2048, 8192), "weights + rejection", 20.0),
)
# Of verl's, at 2048 x 8192.
MOST_TEMPORARIES = 0.1
MOST_IMPORT_MS = 50.0


# --- reading ----------------------------------------------------------------------------------------------------------


def row_of(case: Case, name: str) -> Mapping[str, Any] | None:
    """A contender's row, None when it was absent."""
    found = [row for row in case["rows"] if row["name"] == name and "wall_ms" in row]
    return found[0] if found else None


def median(case: Case, name: str, what: str = "wall_ms") -> float | None:
    """A contender's median in milliseconds."""
    row = row_of(case, name)
    return None if row is None else statistics.median(row[what])


def speedup(case: Case, name: str, over: str, what: str = "wall_ms") -> float | None:
    """How many times as fast `name` is as `over`, by medians."""
    mine, theirs = median(case, name, what), median(case, over, what)
    return None if mine is None or theirs is None or not mine else theirs / mine


def usual(results: Results, threads: int | None = None) -> list[Case]:
    """The cases under the allocator as it is; None: with the fewest threads that were used."""
    found = [case for case in results["cases"] if case["pages"] == "default"]
    if threads is None:
        threads = min(case["threads"] for case in found)
    return [case for case in found if case["threads"] == threads]


def quiet_ms(results: Results, threads: int) -> float:
    """The fastest calibration with that many threads."""
    return min(value for case in results["cases"] if case["threads"] == threads for value in case["calibration_ms"])


def disturbed(results: Results, case: Case) -> float:
    """The fraction of a case's rounds that were disturbed."""
    limit = DISTURBED * quiet_ms(results, case["threads"])
    return sum(value > limit for value in case["calibration_ms"]) / len(case["calibration_ms"])


def present(results: Results) -> list[str]:
    """Contenders that ran at least once, in order."""
    return [name for name in ORDER if any(row_of(case, name) for case in results["cases"])]


def absent(results: Results) -> list[str]:
    """'who: why' of those that never ran."""
    notes = {row["name"]: row["note"] for case in results["cases"] for row in case["rows"]}
    return [f"{name}: {notes[name]}" for name in ORDER if name in notes and name not in present(results)]


def one_line(case: Case) -> str:
    """Progress."""
    times = [f"{name} {median(case, name):.2f}" for name in ORDER if median(case, name) is not None]
    pages = ", pages kept" if case["pages"] == "kept" else ""
    return f"{_title(case)}, {said_threads(case['threads'])}{pages}: {', '.join(times)} ms"


def _title(case: Case) -> str:
    return f"{case['shape'][0]} x {case['shape'][1]} {case['layout']}, {case['workload']}"


# --- tables -----------------------------------------------------------------------------------------------------------


def _of(cases: Sequence[Case]) -> list[list[str]]:
    return [[f"{case['shape'][0]} x {case['shape'][1]}", case["layout"], case["workload"]] for case in cases]


WHERE = ["size", "layout", "workload"]


def time_table(results: Results, threads: int) -> Table:
    cases = usual(results, threads)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        taken = [number(median(case, name)) for name in names]
        mine = median(case, OURS)
        speed = None if mine is None else case["required_bytes"] / mine / 1e6
        noise = [str(len(case["calibration_ms"])), f"{disturbed(results, case):.0%}"]
        rows.append([*where, *taken, number(speed), *noise])
    head = [*WHERE, *names, "ours, GB/s", "rounds", "disturbed"]
    return Table(f"Milliseconds a call, {said_threads(threads)}", head, rows, len(WHERE))


def speed_table(results: Results, title: str, cases: Sequence[Case]) -> Table:
    pairs = [
        (OURS, VERL, "ours over verl", "wall_ms"),
        (OURS, VERL, "in CPU time", "cpu_ms"),
        (VERL_METRICS, VERL, "with verl's metrics over verl", "wall_ms"),
        (COMPILED, VERL, "compiled over verl", "wall_ms"),
        (OURS, BY_HAND, "ours over torch by hand", "wall_ms"),
        (COMPILED, BY_HAND, "compiled over torch by hand", "wall_ms"),
    ]
    names = present(results)
    pairs = [pair for pair in pairs if pair[0] in names and pair[1] in names]
    rows = [
        [*where, *(times(speedup(case, who, over, what)) for who, over, _, what in pairs)]
        for case, where in zip(cases, _of(cases), strict=True)
    ]
    return Table(title, [*WHERE, *(pair[2] for pair in pairs)], rows, len(WHERE))


def memory_table(results: Results) -> Table:
    cases = usual(results)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        found = [row_of(case, name) for name in names]
        cells = [
            "-" if row is None else f"{mebibytes(row['temporaries'])} + {mebibytes(row['outputs'])}" for row in found
        ]
        rows.append([*where, *cells])
    return Table("Peak temporaries + outputs, MiB", [*WHERE, *names], rows, len(WHERE))


def kernel_table(results: Results) -> Table:
    cases = usual(results)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        found = [row_of(case, name) for name in names]
        cells = ["-" if row is None else f"{row['faults']} ({number(row['system_ms'])})" for row in found]
        rows.append([*where, *cells])
    return Table(
        f"Page faults a call (ms in the kernel), {said_threads(cases[0]['threads'])}",
        [*WHERE, *names],
        rows,
        len(WHERE),
    )


def block_table(results: Results) -> Table:
    rows, sizes = [], results["blocks"][0]["slots"] if results["blocks"] else []
    for found in results["blocks"]:
        for workload, taken in found["wall_ms"].items():
            where = [f"{found['shape'][0]} x {found['shape'][1]}", workload]
            rows.append([*where, *(number(value) for value in taken)])
    chosen = results["blocks"][0]["block"] if results["blocks"] else None
    head = [f"{size // 1024}k{' (default)' if size == chosen else ''}" for size in sizes]
    title = "Milliseconds by slots in a block (twice as many without weights), ours, padded, 1 thread"
    return Table(title, ["size", "workload", *head], rows, 2)


def promise_table(results: Results) -> Table:
    rows = []
    one = [case for case in usual(results, 1) if case["layout"] == "padded"]
    for promise in PROMISES:
        for case in one:
            if tuple(case["shape"]) == promise.shape and case["workload"] == promise.workload:
                reached = speedup(case, promise.who, VERL)
                what = f"{promise.who}, {promise.workload}, {promise.shape[0]} x {promise.shape[1]}"
                if reached is not None:
                    wanted = f">= {promise.at_least:g} x verl"
                    rows.append([what, wanted, times(reached), met(reached >= promise.at_least)])
    for case in one:
        ours, verl = row_of(case, OURS), row_of(case, VERL)
        if tuple(case["shape"]) == (2048, 8192) and ours is not None and verl is not None:
            share = ours["temporaries"] / verl["temporaries"]
            what = f"peak temporaries, {case['workload']}, 2048 x 8192"
            wanted = f"<= {MOST_TEMPORARIES:g} of verl's"
            rows.append([what, wanted, f"{share:.3f}", met(share <= MOST_TEMPORARIES)])
    taken = statistics.median(results["import_ms"])
    wanted = f"<= {MOST_IMPORT_MS:g} ms"
    rows.append(["import rollout_corr, after torch", wanted, f"{taken:.0f} ms", met(taken <= MOST_IMPORT_MS)])
    return Table("Promised and reached (padded, 1 thread)", ["what", "promised", "reached", "met"], rows)


def said_threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def all_tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    found = [promise_table(results)]
    for threads in sorted({case["threads"] for case in results["cases"]}):
        speeds = speed_table(results, f"How many times as fast, {said_threads(threads)}", usual(results, threads))
        found += [time_table(results, threads), speeds]
    kept = [case for case in results["cases"] if case["pages"] == "kept"]
    found += [speed_table(results, "How many times as fast, 1 thread, pages kept", kept)]
    found += [memory_table(results), kernel_table(results), block_table(results)]
    return [table for table in found if table.rows]
