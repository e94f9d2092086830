"""Tables from the results of `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import operations as op
from benchmarks.contenders import BY_HAND, OURS, VERL
from benchmarks.device_contender import ORDER, SKYRL, TRACED, TRL, TRL_RESTATED, XTUNER, XTUNER_ONCE
from benchmarks.tables import Table, mebibytes, met, number, times

Found = Mapping[str, Any]
Row = Mapping[str, Any]
Results = Mapping[str, Any]

WHERE = ["case", "operation"]


class Promise(NamedTuple):
    """Something that was promised of a measurement.

    Args:
        case: Of which.
        operation: Of which.
        what: What is promised, in words.
        kind: Which value: see `value_of`.
        least: The value has to be this at least; None: there is no such side.
        most: The value may be this at most, or None.
    """

    case: str
    operation: str
    what: str
    kind: str
    least: float | None = None
    most: float | None = None


PEERS = (BY_HAND, VERL, XTUNER, XTUNER_ONCE, SKYRL, TRL, TRL_RESTATED)

PROMISES = (
    Promise("16M", op.TOKEN.name, ">= 90 % of the copy bandwidth", "share", least=0.9),
    Promise("64M", op.TOKEN.name, ">= 90 % of the copy bandwidth", "share", least=0.9),
    Promise("16M, bf16", op.TOKEN.name, ">= 75 % of the copy bandwidth", "share", least=0.75),
    Promise("16M", op.PRODUCT.name, ">= 80 % of the copy bandwidth", "share", least=0.8),
    Promise("16M in 100,000", op.TOKEN.name, "<= 1.5 x the time of long sequences", "over long", most=1.5),
    Promise("32k in 256", op.TOKEN.name, "GPU time <= 20 us", "microseconds", most=20.0),
    Promise("32k in 256", op.TOKEN.name, ">= 20 x the fastest peer, whole calls", "peers", least=20.0),
    Promise("32k in 256", op.XTUNER.name, ">= 20 x the fastest peer, whole calls", "peers", least=20.0),
    Promise("32k in 256", op.TOKEN.name, ">= 3 x torch.compile of our reference, no metrics", "traced", least=3.0),
    Promise("16M", op.TOKEN.name, "extra memory <= 2 % of inputs and outputs", "memory", most=0.02),
    Promise("16M", op.BOTH.name, "<= 1.45 x the time of the required bytes", "over bytes", most=1.45),
    Promise("32k in 256", op.BOTH.name, ">= 5 x torch.compile of our reference, no metrics", "traced", least=5.0),
)


# --- reading ---


def timed(found: Found) -> list[Row]:
    """The rows of those who were timed, in order."""
    rows = [row for row in found.get("rows", ()) if "device_ms" in row]
    return sorted(rows, key=lambda row: ORDER.index(row["name"]))


def row_of(found: Found, name: str) -> Row | None:
    """A contender's row, None when it was not timed."""
    return next((row for row in timed(found) if row["name"] == name), None)


def device_ms(row: Row) -> float:
    """Time on the device: of calls in a row where that is known, whose gaps no host can fill, else of one call."""
    return float(row.get("row_ms", row["device_ms"])["median"])


def gigabytes(found: Found, row: Row) -> float:
    """GB/s of the required bytes, by the time of one call from cold caches."""
    return float(found["required_bytes"]) / float(row["device_ms"]["median"]) / 1e6


def copied(found: Found) -> float:
    """GB/s of the copy that was timed in the same rounds, bytes read and bytes written."""
    return float(found["copy_bytes"]) / float(found["copy_ms"]["median"]) / 1e6


def speedup(found: Found, over: str, what: str = "wall_ms") -> float | None:
    """How many times as fast ours is, by medians."""
    mine, theirs = row_of(found, OURS), row_of(found, over)
    return None if mine is None or theirs is None else float(theirs[what]["median"] / mine[what]["median"])


def one_line(found: Found) -> str:
    """Progress."""
    where = f"{found['case']}, {found['operation']}"
    if "problem" in found:
        return f"{where}: {found['problem']}"
    return f"{where}: " + ", ".join(f"{row['name']} {row['device_ms']['median']}" for row in timed(found)) + " ms"


def facts(results: Results) -> list[str]:
    """Where and when: what a table is headed by."""
    about = results["machine"]
    state = " with uncommitted changes" if results["dirty"] else ""
    versions = f"Python {about['python']}, torch {about['torch']}, Triton {about['triton']}"
    lines = [f"{results['date']}, commit {results['commit'][:12]}{state}; {versions}.", processor(about)]
    return [*lines, "Tiny sizes: they show that everything works, and nothing else."] if results["tiny"] else lines


def processor(about: Mapping[str, Any]) -> str:
    """The device in a sentence."""
    host = f"{about['cores']} cores of {about['cpu']}"
    if "gpu" not in about:
        return f"No GPU; {host}, {about['threads']} threads."
    return (
        f"{about['gpu']}, {about['multiprocessors']} multiprocessors, L2 {about['l2_bytes'] / 2**20:.0f} MiB, "
        f"memory {about['memory_bytes'] / 2**30:.0f} GiB, driver {about.get('driver', 'unknown')}, "
        f"CUDA {about['cuda']}; {host}."
    )


def measured(results: Results, which: str = "measured") -> list[Found]:
    """What has times, of a list of the results."""
    return [found for found in results[which] if timed(found)]


def counted(results: Results, found: Found, name: str) -> Row:
    """What the profiler counted of a contender, {} where it did not."""
    for other in results["profiled"]:
        if _where(other) == _where(found):
            return next((row for row in other.get("rows", ()) if row["name"] == name), {})
    return {}


def without_problem(some: Iterable[Found]) -> list[Found]:
    """Those that went well."""
    return [found for found in some if "problem" not in found]


def problems(results: Results) -> list[Found]:
    """Those that did not."""
    everything = [found for name in ("measured", "traced", "scaling", "profiled") for found in results[name]]
    return [found for found in everything if "problem" in found]


def notes(results: Results) -> list[str]:
    """What was not timed, and why."""
    said = [f"{found['case']}, {found['operation']}: not timed: {found['problem']}" for found in problems(results)]
    said += [f"{case}, {operation}: no time was left" for case, operation in results["not_reached"]]
    for found in (*results["measured"], *results["traced"]):
        for row in found.get("rows", ()):
            if "device_ms" not in row and row["note"] and "problem" not in found:
                said.append(f"{found['case']}, {found['operation']}: {row['name']} {row['note']}")
    return list(dict.fromkeys(said))


# --- tables ---


def _where(found: Found) -> list[str]:
    return [found["case"], found["operation"]]


def case_table(results: Results) -> Table:
    """What the cases are, and their bytes."""
    head = ["case", "operation", "layout", "log-probs", "mask", "valid tokens", "slots", "sequences", "B/slot", "MB"]
    rows = [
        [
            *_where(found),
            *(found[name] for name in ("layout", "logp", "mask")),
            *(f"{found[name]:,}" for name in ("tokens", "slots", "sequences", "bytes_per_slot")),
            f"{found['required_bytes'] / 1e6:,.2f}",
        ]
        for found in measured(results)
    ]
    return Table("Cases and the bytes that they require", head, rows, 5)


def our_table(results: Results) -> Table:
    """Everything about ours."""
    head = [
        *WHERE,
        "GPU ms",
        "in a row ms",
        "call ms",
        "whole ms",
        "launches",
        "waits",
        "waits, whole",
        "extra MiB",
        "GB/s",
        "of a copy",
    ]
    rows = []
    for found in measured(results):
        row = row_of(found, OURS)
        if row is None:
            continue
        seen = counted(results, found, OURS)
        counts = ["-", "-", "-"]
        if "on_device" in seen and "whole" in seen:
            alone, whole = seen["on_device"], seen["whole"]
            counts = [str(alone["kernels"] + alone["fills"]), str(alone["syncs"]), str(whole["syncs"])]
        speed, most = gigabytes(found, row), copied(found)
        rows.append(
            [
                *_where(found),
                number(row["device_ms"]["median"]),
                number(row["row_ms"]["median"] if "row_ms" in row else None),
                number(row["call_ms"]["median"]),
                number(row["wall_ms"]["median"]),
                *counts,
                mebibytes(row["temporaries"]),
                number(speed),
                f"{speed / most:.0%}",
            ]
        )
    return Table("rollout-corr", head, rows, 2)


def time_table(results: Results, what: str, title: str) -> Table:
    """Milliseconds of everybody."""
    names = [name for name in ORDER if any(row_of(found, name) for found in measured(results))]
    rows = []
    for found in measured(results):
        by_name = {row["name"]: row for row in timed(found)}
        rows.append([*_where(found), *(_spread(by_name.get(name), what) for name in names)])
    return Table(title, [*WHERE, *names], rows, 2)


def _spread(row: Row | None, what: str) -> str:
    if row is None:
        return "-"
    found = row[what]
    mark = {"events": " e", "clock": " c"}.get(row["how"], "") if what == "device_ms" else ""
    return f"{number(found['median'])} ({number(found['low'])}-{number(found['high'])}){mark}"


def speed_table(results: Results, what: str, title: str) -> Table:
    """How many times as fast ours is."""
    names = [name for name in ORDER if name != OURS and any(row_of(found, name) for found in measured(results))]
    rows = [[*_where(found), *(times(speedup(found, name, what)) for name in names)] for found in measured(results)]
    return Table(title, [*WHERE, *(f"over {name}" for name in names)], rows, 2)


def evidence_table(results: Results) -> Table:
    """What the profiler counted, of everybody."""
    head = [*WHERE, "who", "kernels", "fills", "copies", "waits", "busy ms"]
    rows = []
    for found in results["profiled"]:
        for row in sorted(found.get("rows", ()), key=lambda row: ORDER.index(row["name"])):
            if "on_device" in row:
                seen = row["on_device"]
                cells = [str(seen[name]) for name in ("kernels", "fills", "copies", "syncs")]
                rows.append([*_where(found), row["name"], *cells, number(seen["busy_ms"])])
    return Table("What the profiler counted in a call", head, rows, 3)


def kernel_table(results: Results) -> Table:
    """Our own kernels by name."""
    rows = []
    for found in results["profiled"]:
        for row in found.get("rows", ()):
            if row["name"] == OURS and "on_device" in row:
                for kernel, (many, taken) in row["on_device"]["longest"].items():
                    rows.append([*_where(found), kernel.partition("<")[0][:60], str(many), number(1e3 * taken)])
    return Table("Kernels of a call of ours, as the profiler saw them", [*WHERE, "kernel", "times", "us"], rows, 3)


def traced_table(results: Results) -> Table:
    """Ours beside our reference compiled, which is measured apart: compiling takes long."""
    head = [*WHERE, "first call s", "GPU ms", "ours", "times as fast", "call ms", "ours", "times as fast"]
    rows = []
    for found in measured(results, "traced"):
        mine, theirs = row_of(found, OURS), row_of(found, TRACED)
        if mine is not None and theirs is not None:
            cells = [number(theirs["first_s"])]
            for what in ("device_ms", "call_ms"):
                cells += [number(theirs[what]["median"]), number(mine[what]["median"])]
                cells += [times(speedup(found, TRACED, what))]
            rows.append([*_where(found), *cells])
    return Table("torch.compile of our reference, without metrics", head, rows, 2)


def memory_table(results: Results) -> Table:
    """Peak beyond inputs and outputs, of everybody."""
    names = [name for name in ORDER if any(row_of(found, name) for found in measured(results))]
    rows = []
    for found in measured(results):
        held = [row_of(found, name) for name in names]
        rows.append([*_where(found), *("-" if row is None else mebibytes(row["temporaries"]) for row in held)])
    return Table("Peak extra memory, MiB", [*WHERE, *names], rows, 2)


def scaling_table(results: Results) -> Table:
    """Points of the scaling curves."""
    head = ["axis", "case", "tokens", "sequences", "GPU ms", "in a row ms", "GB/s", "of a copy", "over torch by hand"]
    rows = []
    for found in results["scaling"]:
        row = row_of(found, OURS)
        if row is not None:
            in_a_row = number(row["row_ms"]["median"] if "row_ms" in row else None)
            speed = gigabytes(found, row)
            rows.append(
                [
                    *(found["axis"], found["case"], f"{found['slots']:,}", f"{found['sequences']:,}"),
                    *(number(row["device_ms"]["median"]), in_a_row, number(speed), f"{speed / copied(found):.0%}"),
                    times(speedup(found, BY_HAND, "device_ms")),
                ]
            )
    return Table("Scaling: token weights, rejection, packed", head, rows, 2)


def value_of(promise: Promise, found: Found, everything: Iterable[Found]) -> float | None:
    """What a promise is about; None where it was not measured."""
    row = row_of(found, OURS)
    if row is None:
        return None
    if promise.kind == "share":
        return gigabytes(found, row) / copied(found)
    if promise.kind == "over bytes":
        return copied(found) / gigabytes(found, row)
    if promise.kind == "microseconds":
        return 1e3 * device_ms(row)
    if promise.kind == "memory":
        # Inputs and outputs are what has to be moved.
        return float(row["temporaries"]) / float(found["required_bytes"])
    if promise.kind == "traced":
        return speedup(found, TRACED, "call_ms")
    if promise.kind == "peers":
        ratios = [ratio for ratio in (speedup(found, name) for name in PEERS) if ratio is not None]
        return min(ratios, default=None)
    long = next((x for x in everything if (x["case"], x["operation"]) == ("16M", promise.operation)), None)
    row_long = None if long is None else row_of(long, OURS)
    return None if row_long is None else float(row["device_ms"]["median"] / row_long["device_ms"]["median"])


def promise_table(results: Results) -> Table:
    """What was promised, and what was reached; a tiny run reaches nothing."""
    rows: list[list[str]] = []
    for promise in () if results["tiny"] else PROMISES:
        for found in measured(results, "traced" if promise.kind == "traced" else "measured"):
            if (found["case"], found["operation"]) == (promise.case, promise.operation):
                value = value_of(promise, found, measured(results))
                if value is None:
                    continue
                good = (promise.least is None or value >= promise.least) and (
                    promise.most is None or value <= promise.most
                )
                rows.append([promise.case, promise.operation, promise.what, f"{value:.3g}", met(good)])
    return Table("Promised and reached", [*WHERE, "promised", "reached", "met"], rows, 3)


def all_tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    found: Sequence[Table] = [
        promise_table(results),
        our_table(results),
        speed_table(results, "wall_ms", "How many times as fast: whole calls, metrics on the host"),
        speed_table(results, "device_ms", "How many times as fast: on the GPU"),
        traced_table(results),
        time_table(results, "wall_ms", "Milliseconds of a whole call, metrics on the host: median (10 % - 90 %)"),
        time_table(results, "device_ms", "Milliseconds on the GPU: median (10 % - 90 %)"),
        memory_table(results),
        evidence_table(results),
        kernel_table(results),
        case_table(results),
        scaling_table(results),
    ]
    return [table for table in found if table.rows]
