"""Tables from results: for the terminal, and docs/benchmarks.md from the committed result file.

`python -m benchmarks.report` writes the page; nobody edits it.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contenders import BY_HAND, COMPILED, ORDER, OURS, VERL, VERL_METRICS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"

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


def to_json(results: Results) -> str:
    """Indented, but every list of numbers on one line."""
    return _write(results, 0) + "\n"


def _write(value: object, depth: int) -> str:
    inner, end = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, Mapping) and value:
        parts = [f"{json.dumps(key)}: {_write(item, depth + 1)}" for key, item in value.items()]
        return "{" + inner + ("," + inner).join(parts) + end + "}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        return "[" + inner + ("," + inner).join(_write(item, depth + 1) for item in value) + end + "]"
    return json.dumps(value)


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
    return f"{_title(case)}, {_threads(case['threads'])}{pages}: {', '.join(times)} ms"


def _title(case: Case) -> str:
    return f"{case['shape'][0]} x {case['shape'][1]} {case['layout']}, {case['workload']}"


# --- tables -----------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Cells are text already."""

    title: str
    head: list[str]
    rows: list[list[str]]


def _number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, never in scientific notation."""
    if value is None:
        return "-"
    if value == 0.0:
        return "0"
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"


def _of(cases: Sequence[Case]) -> list[list[str]]:
    return [[f"{case['shape'][0]} x {case['shape'][1]}", case["layout"], case["workload"]] for case in cases]


WHERE = ["size", "layout", "workload"]


def time_table(results: Results, threads: int) -> Table:
    cases = usual(results, threads)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        times = [_number(median(case, name)) for name in names]
        mine = median(case, OURS)
        speed = None if mine is None else case["required_bytes"] / mine / 1e6
        noise = [str(len(case["calibration_ms"])), f"{disturbed(results, case):.0%}"]
        rows.append([*where, *times, _number(speed), *noise])
    head = [*WHERE, *names, "ours, GB/s", "rounds", "disturbed"]
    return Table(f"Milliseconds a call, {_threads(threads)}", head, rows)


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
        [*where, *(_times(speedup(case, who, over, what)) for who, over, _, what in pairs)]
        for case, where in zip(cases, _of(cases), strict=True)
    ]
    return Table(title, [*WHERE, *(pair[2] for pair in pairs)], rows)


def memory_table(results: Results) -> Table:
    cases = usual(results)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        found = [row_of(case, name) for name in names]
        cells = [
            "-" if row is None else f"{_mebibytes(row['temporaries'])} + {_mebibytes(row['outputs'])}" for row in found
        ]
        rows.append([*where, *cells])
    return Table("Peak temporaries + outputs, MiB", [*WHERE, *names], rows)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}"


def kernel_table(results: Results) -> Table:
    cases = usual(results)
    names = present(results)
    rows = []
    for case, where in zip(cases, _of(cases), strict=True):
        found = [row_of(case, name) for name in names]
        cells = ["-" if row is None else f"{row['faults']} ({_number(row['system_ms'])})" for row in found]
        rows.append([*where, *cells])
    return Table(f"Page faults a call (ms in the kernel), {_threads(cases[0]['threads'])}", [*WHERE, *names], rows)


def block_table(results: Results) -> Table:
    rows, sizes = [], results["blocks"][0]["slots"] if results["blocks"] else []
    for found in results["blocks"]:
        for workload, times in found["wall_ms"].items():
            where = [f"{found['shape'][0]} x {found['shape'][1]}", workload]
            rows.append([*where, *(_number(value) for value in times)])
    chosen = results["blocks"][0]["block"] if results["blocks"] else None
    head = [f"{size // 1024}k{' (default)' if size == chosen else ''}" for size in sizes]
    return Table("Milliseconds by slots in a block, ours, padded, 1 thread", ["size", "workload", *head], rows)


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
                    rows.append([what, wanted, _times(reached), _met(reached >= promise.at_least)])
    for case in one:
        ours, verl = row_of(case, OURS), row_of(case, VERL)
        if tuple(case["shape"]) == (2048, 8192) and ours is not None and verl is not None:
            share = ours["temporaries"] / verl["temporaries"]
            what = f"peak temporaries, {case['workload']}, 2048 x 8192"
            wanted = f"<= {MOST_TEMPORARIES:g} of verl's"
            rows.append([what, wanted, f"{share:.3f}", _met(share <= MOST_TEMPORARIES)])
    taken = statistics.median(results["import_ms"])
    wanted = f"<= {MOST_IMPORT_MS:g} ms"
    rows.append(["import rollout_corr, after torch", wanted, f"{taken:.0f} ms", _met(taken <= MOST_IMPORT_MS)])
    return Table("Promised and reached (padded, 1 thread)", ["what", "promised", "reached", "met"], rows)


def _met(met: bool) -> str:
    return "yes" if met else "no"


def _threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def all_tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    found = [promise_table(results)]
    for threads in sorted({case["threads"] for case in results["cases"]}):
        speeds = speed_table(results, f"How many times as fast, {_threads(threads)}", usual(results, threads))
        found += [time_table(results, threads), speeds]
    kept = [case for case in results["cases"] if case["pages"] == "kept"]
    found += [speed_table(results, "How many times as fast, 1 thread, pages kept", kept)]
    found += [memory_table(results), kernel_table(results), block_table(results)]
    return [table for table in found if table.rows]


def tables(results: Results) -> list[str]:
    """Markdown."""
    lines: list[str] = []
    for table in all_tables(results):
        columns = len(table.head)
        left = len(WHERE) if table.head[:3] == WHERE else 2 if table.head[0] == "size" else 1
        rule = [":--"] * left + ["--:"] * (columns - left)
        lines += [f"## {table.title}", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (table.head, rule, *table.rows)]
        lines.append("")
    return lines


def to_terminal(results: Results) -> str:
    """With rich where it is installed, else columns of plain text."""
    notes = "\n".join(absent(results))
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ModuleNotFoundError:
        return "\n".join([*(_plain(table) for table in all_tables(results)), notes])
    console = Console(file=io.StringIO(), width=200)
    for table in all_tables(results):
        drawn = RichTable(*table.head, title=table.title, title_justify="left")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    console.print(notes)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _plain(table: Table) -> str:
    lines = [table.head, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([table.title, *text, ""])


# --- the page ---------------------------------------------------------------------------------------------------------

METHOD = """\
# Benchmarks

Made from `benchmarks/results/cpu.json` by `python -m benchmarks.report`; do not edit.

In verl's default mode rollout correction runs on the driver, on CPU tensors, with one thread, every step, even when
only metrics are wanted. So this page is about the CPU. Run it yourself from the root of a checkout:

```
make bench ARGS=--quick                                                   # a minute, and an environment with verl
make bench ARGS="--blocks --json benchmarks/results/cpu.json"             # all of it
python -m benchmarks.report                                               # this page
pytest benchmarks/                                                        # the small sizes under pytest-benchmark
```

`make bench` is `python -m benchmarks.cpu` in an environment that has verl. Where verl is not installed, its column is
missing and the rest runs.

**What runs.** *metrics only* is `Spec()` against verl's function with importance sampling and rejection off: verl
computes its 13 metrics in every step of every run. *weights + rejection* is a token weight truncated at 2 and
rejection of sequences by the geometric mean of their ratios within 0.999 to 1.001, which is verl's
`decoupled_geo_rs_token_tis`. Everybody's time holds all outputs, and the metrics as Python floats.

- *rollout-corr*: `correct(...)` and `.metrics()`, default backend.
- *rollout-corr, compiled*: the same with `backend="compiled"`. Compilation happens in the first call and is not in
  the time.
- *rollout-corr, verl's metrics*: the same as the first, with verl's own keys by verl's own formulas, on top of ours.
- *torch by hand*: the same weights, mask and native metrics by one torch op after the other over the whole batch
  (`benchmarks/baseline.py`).
- *verl*: `compute_rollout_correction_and_rejection_mask` of verl 0.9.1. It has no packed form: beside packed rows
  stands its time for the same tokens padded.

**Data.** Lengths uniform from 10 % to 100 % of the width, fp32 log-probs, int64 mask. *packed* is the same tokens in
one row with `cu_seqlens` and no mask. D has a standard deviation of 0.02, and of 1 at one token in 1000.

**How.** One process. First all results are compared with ours: weights to 1e-5, masks equal except for sequences
within 1e-6 of a bound, metrics to 2e-3. A wrong result is not timed. Then everybody runs once a round,
in an order that changes at random. Times are medians of all rounds; what a call returns is freed after the clock has
stopped, and the garbage collector is off. Sizes run in ascending order, so the C library's allocator has been warmed by
smaller ones. Each round also times `torch.exp` of 4 MiB: *disturbed* is the share of rounds in which that took over
{disturbed:.2f} times its fastest, so something else was running. *In CPU time* compares the processor time of the
process instead of the clock.

**Pages.** A good part of verl's time is page faults. glibc takes fresh pages for every temporary above 32 MiB, which is
every full-size one at 2048 x 8192; below that, what the process did before decides whether pages are kept. The table
of page faults says how many there were. *pages kept* is the other extreme: the same again in the same process, with
glibc told to give nothing back, so that nobody has page faults; some other allocators come close to that.

**Bytes.** *GB/s* is what cannot be avoided over the time: each input read once, each output written once. A padded
slot has 8 bytes of log-probs and 8 of mask to read, and 4 of weight and 8 of mask to write.

**Temporaries** are the peak of what a call holds beyond the inputs and the outputs that it hands back, from every
event of torch's CPU allocator, as its profiler reports them, in a call of its own. What is still there when the call
returns is an output from its first moment on.
"""


def page(results: Results | None) -> str:
    """docs/benchmarks.md."""
    text = METHOD.format(disturbed=DISTURBED)
    if results is None:
        return text + "\nNo result is committed yet.\n"
    about = results["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in about["caches"].items()) or "unknown"
    state = " with uncommitted changes" if results["dirty"] else ""
    verl = "without verl" if about["verl"] is None else f"verl {about['verl']}"
    setting = ", ".join(f"{name}={value}" for name, value in about["allocator"].items()) or "the defaults"
    facts = [
        f"**This run:** {results['date']}, commit {results['commit'][:12]}{state}.",
        f"{about['cpu']}, {about['cores']} cores, caches {caches}, {about['vectors']}; {about['system']}, Python "
        f"{about['python']}, torch {about['torch']}, {verl}; allocator settings: {setting}.",
        "",
        *(f"{line}." for line in absent(results)),
        *([""] if absent(results) else []),
    ]
    return "\n".join([text, *facts, *tables(results)]).rstrip() + "\n"


def load(path: Path = RESULTS) -> Results | None:
    """The committed results, None before there are any."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> None:
    """Writes the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
