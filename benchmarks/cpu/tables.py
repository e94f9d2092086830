"""Tables of the CPU benchmark, from its results."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.cases.contender import BY_HAND, ORDER, OURS, VERL, VERL_METRICS
from benchmarks.tables import Found, Table, commit_of, grid, mebibytes, met, number, table, times

# A round whose calibration took this much longer than the fastest one of the run was disturbed.
DISTURBED = 1.15

# Promised speeds, padded, one thread: (who, shape, workload, at least so many times as fast as verl's own function).
SMALL, LARGE = (256, 2048), (2048, 8192)
PROMISES = (
    (OURS, SMALL, "metrics only", 4.0),
    (OURS, SMALL, "weights + rejection", 7.0),
    (OURS, LARGE, "metrics only", 9.0),
    (OURS, LARGE, "weights + rejection", 12.0),
)
# Temporaries at 2048 x 8192 as a part of verl's, and the time of an import.
MOST_TEMPORARIES = 0.1
MOST_IMPORT_MS = 50.0

# README's table.
IN_README = (VERL, BY_HAND, OURS, VERL_METRICS)


# --- reading ----------------------------------------------------------------------------------------------------------


def row_of(case: Found, name: str) -> Found | None:
    """A contender's row, None when it was absent."""
    return next((row for row in case["rows"] if row["name"] == name and "wall_ms" in row), None)


def median(case: Found, name: str, what: str = "wall_ms") -> float | None:
    """A contender's median in milliseconds."""
    row = row_of(case, name)
    return None if row is None else statistics.median(row[what])


def speedup(case: Found, name: str, over: str, what: str = "wall_ms") -> float | None:
    """Ratio of the medians of `over` and `name`."""
    mine, theirs = median(case, name, what), median(case, over, what)
    return None if mine is None or theirs is None or not mine else theirs / mine


def usual(results: Found) -> list[Found]:
    """The cases under the allocator as it is."""
    return [case for case in results["cases"] if case["pages"] == "default"]


def disturbed(results: Found, case: Found) -> float:
    """The fraction of a case's rounds that were disturbed."""
    limit = DISTURBED * min(value for other in results["cases"] for value in other["calibration_ms"])
    return sum(value > limit for value in case["calibration_ms"]) / len(case["calibration_ms"])


def present(results: Found) -> list[str]:
    """Contenders that ran at least once, in order."""
    return [name for name in ORDER if any(row_of(case, name) for case in results["cases"])]


def absent(results: Found) -> list[str]:
    """'who: why' of those that never ran."""
    notes = {row["name"]: row["note"] for case in results["cases"] for row in case["rows"]}
    return [f"{name}: {notes[name]}" for name in ORDER if name in notes and name not in present(results)]


def size(case: Found) -> str:
    return f"{case['shape'][0]} x {case['shape'][1]}"


def rounds_of(case: Found) -> str:
    """The rounds that count, and of how many, where disturbed ones were dropped."""
    rounds, dropped = len(case["calibration_ms"]), case.get("dropped", 0)
    return f"{rounds} of {rounds + dropped}" if dropped else str(rounds)


def one_line(case: Found) -> str:
    """Progress."""
    taken = [f"{name} {median(case, name):.2f}" for name in ORDER if median(case, name) is not None]
    pages = ", pages kept" if case["pages"] == "kept" else ""
    where = f"{size(case)} {case['layout']}, {case['workload']}{pages}"
    return f"{where}: {', '.join(taken)} ms"


# --- tables -----------------------------------------------------------------------------------------------------------


def _by_case(title: str, columns: dict[str, Callable[[Found], str]], cases: Sequence[Found]) -> Table:
    def where(case: Found) -> list[str]:
        return [size(case), case["layout"], case["workload"]]

    return table(title, ["size", "layout", "workload"], where, columns, cases)


def time_table(results: Found) -> Table:
    columns: dict[str, Callable[[Found], str]] = {
        name: lambda case, name=name: number(median(case, name)) for name in present(results)
    }
    columns |= {
        "ours over verl": lambda case: times(speedup(case, OURS, VERL)),
        "ours over torch by hand": lambda case: times(speedup(case, OURS, BY_HAND)),
        "ours, GB/s": lambda case: number((mine := median(case, OURS)) and case["required_bytes"] / mine / 1e6),
        "rounds": rounds_of,
        "disturbed": lambda case: f"{disturbed(results, case):.0%}",
    }
    return _by_case("Milliseconds a call, 1 thread", columns, usual(results))


def speed_table(results: Found, title: str, cases: Sequence[Found]) -> Table:
    pairs = [
        (OURS, VERL, "ours over verl", "wall_ms"),
        (OURS, VERL, "in CPU time", "cpu_ms"),
        (VERL_METRICS, VERL, "with verl's metrics over verl", "wall_ms"),
        (OURS, BY_HAND, "ours over torch by hand", "wall_ms"),
        (OURS, BY_HAND, "by hand in CPU time", "cpu_ms"),
    ]
    there = present(results)
    columns = {
        head: lambda case, who=who, over=over, what=what: times(speedup(case, who, over, what))
        for who, over, head, what in pairs
        if who in there and over in there
    }
    return _by_case(title, columns, cases)


def memory_table(results: Found) -> Table:
    def of(case: Found, name: str) -> str:
        row = row_of(case, name)
        return "-" if row is None else f"{mebibytes(row['temporaries'])} + {mebibytes(row['outputs'])}"

    columns: dict[str, Callable[[Found], str]] = {name: partial(of, name=name) for name in present(results)}
    return _by_case("Peak temporaries + outputs, MiB", columns, usual(results))


def promise_table(results: Found) -> Table:
    rows = []
    one = [case for case in usual(results) if case["layout"] == "padded"]
    for who, shape, workload, least in PROMISES:
        for case in one:
            reached = speedup(case, who, VERL)
            if tuple(case["shape"]) == shape and case["workload"] == workload and reached is not None:
                what = f"{who}, {workload}, {size(case)}"
                rows.append([what, f">= {least:g} x verl", times(reached), met(reached >= least)])
    for case in one:
        ours, verl = row_of(case, OURS), row_of(case, VERL)
        if tuple(case["shape"]) == LARGE and ours is not None and verl is not None:
            share = ours["temporaries"] / verl["temporaries"]
            what, wanted = f"peak temporaries, {case['workload']}, {size(case)}", f"<= {MOST_TEMPORARIES:g} of verl's"
            rows.append([what, wanted, f"{share:.3f}", met(share <= MOST_TEMPORARIES)])
    taken = statistics.median(results["import_ms"])
    wanted = f"<= {MOST_IMPORT_MS:g} ms"
    what = "import rollout_corr, after torch, no garbage collected"
    rows.append([what, wanted, f"{taken:.0f} ms", met(taken <= MOST_IMPORT_MS)])
    return Table("Promised and reached (padded, 1 thread)", ["what", "promised", "reached", "met"], rows)


def all_tables(results: Found) -> list[Table]:
    """Every table of the page that has rows."""
    kept = [case for case in results["cases"] if case["pages"] == "kept"]
    found = [
        promise_table(results),
        time_table(results),
        speed_table(results, "How many times as fast, 1 thread, pages kept", kept),
        memory_table(results),
    ]
    return [one for one in found if one.rows]


def in_short(results: Found) -> list[str]:
    """Lay out the table of README, milliseconds on one thread, and where they were taken."""
    lines = []
    for case in usual(results):
        shape = tuple(case["shape"])
        # The packed one is that in which the others do best.
        weights = case["workload"] != "metrics only"
        if shape in (SMALL, LARGE) and (weights or (case["layout"] == "padded" and shape == LARGE)):
            taken = [number(median(case, name)) for name in IN_README]
            lines.append([f"{size(case)}, {case['layout']}, {case['workload']}", *taken])
    about: dict[str, Any] = results["machine"]
    where = f"{about['cpu']}, torch {about['torch']}, {commit_of(results)}."
    faults = "At 2048 x 8192 verl and torch by hand spend much of it on page faults."
    shown = grid(Table("", ["milliseconds a call, 1 thread", *IN_README], lines))
    return [*shown, "", textwrap.fill(f"Times: {where} {faults}", 130, break_on_hyphens=False)]
