"""Tables of the benchmark of a GPU, from its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.cases import operations as op
from benchmarks.cases.contender import BY_HAND, COMPILED, ORDER, OURS, VERL
from benchmarks.tables import Found, Table, commit_of, mebibytes, met, number, table, times

WHERE = ("case", "operation")
PEERS = (BY_HAND, VERL)

Column = Callable[[Found], str]


class Promise(NamedTuple):
    """A promise about a measurement of ours."""

    case: str
    operation: str
    what: str
    kind: str
    least: float | None = None
    most: float | None = None


PROMISES = (
    Promise("16M", op.TOKEN.name, ">= 90 % of the copy bandwidth", "share", least=0.9),
    Promise("64M", op.TOKEN.name, ">= 90 % of the copy bandwidth", "share", least=0.9),
    Promise("16M, bf16", op.TOKEN.name, ">= 75 % of the copy bandwidth", "share", least=0.75),
    Promise("16M", op.PRODUCT.name, ">= 80 % of the copy bandwidth", "share", least=0.8),
    Promise("16M in 100,000", op.TOKEN.name, "<= 1.5 x the time of long sequences", "over long", most=1.5),
    Promise("32k in 256", op.TOKEN.name, "GPU time <= 20 us", "microseconds", most=20.0),
    Promise("32k in 256", op.TOKEN.name, ">= 20 x the fastest peer, whole calls", "peers", least=20.0),
    Promise("32k in 256", op.TOKEN.name, "no slower than torch.compile by hand, no metrics", "compiled", least=1.0),
    Promise("16M", op.TOKEN.name, "extra memory <= 2 % of inputs and outputs", "memory", most=0.02),
    Promise("16M", op.BOTH.name, "<= 1.45 x the time of the required bytes", "over bytes", most=1.45),
    Promise("32k in 256", op.BOTH.name, "no slower than torch.compile by hand, no metrics", "compiled", least=1.0),
)


# --- reading ----------------------------------------------------------------------------------------------------------


def timed(found: Found) -> list[Found]:
    """The rows of those who were timed, in order."""
    rows = [row for row in found.get("rows", ()) if "device_ms" in row]
    return sorted(rows, key=lambda row: ORDER.index(row["name"]))


def row_of(found: Found, name: str) -> Found | None:
    """A contender's row, None when it was not timed."""
    return next((row for row in timed(found) if row["name"] == name), None)


def gigabytes(found: Found, row: Found) -> float:
    """GB/s of the required bytes, by the time of one call from cold caches."""
    return float(found["required_bytes"] / row["device_ms"]["median"] / 1e6)


def copied(found: Found) -> float:
    """GB/s of the copy that was timed in the same rounds, bytes read and bytes written."""
    return float(found["copy_bytes"] / found["copy_ms"]["median"] / 1e6)


def speedup(found: Found, over: str, what: str = "wall_ms") -> float | None:
    """Ratio of the medians of another contender and ours."""
    mine, theirs = row_of(found, OURS), row_of(found, over)
    return None if mine is None or theirs is None else float(theirs[what]["median"] / mine[what]["median"])


def one_line(found: Found) -> str:
    """Progress."""
    rows = ", ".join(f"{row['name']} {row['device_ms']['median']}" for row in timed(found))
    return f"{', '.join(_where(found))}: {found.get('problem', f'{rows} ms')}"


def facts(results: Found) -> list[str]:
    """Date, commit, versions and machine, for the head of a table."""
    about = results["machine"]
    versions = f"Python {about['python']}, torch {about['torch']}, Triton {about['triton']}"
    lines = [f"{commit_of(results)}; {versions}.", processor(about)]
    return [*lines, "Tiny sizes: they show that everything works, and nothing else."] if results["tiny"] else lines


def processor(about: Found) -> str:
    """The device in a sentence."""
    host = f"{about['cores']} cores of {about['cpu']}"
    return (
        f"{about['gpu']}, {about['multiprocessors']} multiprocessors, L2 {about['l2_bytes'] / 2**20:.0f} MiB, "
        f"memory {about['memory_bytes'] / 2**30:.0f} GiB, driver {about.get('driver', 'unknown')}, "
        f"CUDA {about['cuda']}; {host}."
    )


def measured(results: Found, which: str = "measured") -> list[Found]:
    """The entries of a list of the results that have times."""
    return [found for found in results[which] if timed(found)]


def problems(results: Found) -> list[Found]:
    """The entries of all lists that have a problem in place of times."""
    everything = [found for name in ("measured", "compiled") for found in results[name]]
    return [found for found in everything if "problem" in found]


def notes(results: Found) -> list[str]:
    """Lines about everything that was not timed, and why."""
    said = [f"{', '.join(_where(found))}: not timed: {found['problem']}" for found in problems(results)]
    said += [f"{case}, {operation}: no time was left" for case, operation in results["not_reached"]]
    for found in (*results["measured"], *results["compiled"]):
        for row in found.get("rows", ()):
            if "device_ms" not in row and row["note"] and "problem" not in found:
                said.append(f"{', '.join(_where(found))}: {row['name']} {row['note']}")
    return list(dict.fromkeys(said))


def _where(found: Found) -> tuple[str, str]:
    return found["case"], found["operation"]


# --- tables -----------------------------------------------------------------------------------------------------------


def _by_case(title: str, columns: dict[str, Column], found: Iterable[Found]) -> Table:
    return table(title, WHERE, _where, columns, found)


def _median(row: Found | None, what: str) -> str:
    return number(None if row is None or what not in row else row[what]["median"])


def case_table(results: Found) -> Table:
    """Make the table of cases, their bytes, and how fast ours moves them."""

    def grouped(name: str) -> Column:
        return lambda found: f"{found[name]:,}"

    def speed(found: Found) -> float | None:
        row = row_of(found, OURS)
        return None if row is None else gigabytes(found, row)

    def of_ours(name: str) -> Column:
        return lambda found: "-" if (x := (row_of(found, OURS) or {}).get(name)) is None else str(x)

    columns: dict[str, Column] = {
        "valid tokens": grouped("tokens"),
        "slots": grouped("slots"),
        "sequences": grouped("sequences"),
        "B/slot": grouped("bytes_per_slot"),
        "MB": lambda found: f"{found['required_bytes'] / 1e6:,.2f}",
        "ours, GB/s": lambda found: number(speed(found)),
        "of a copy": lambda found: "-" if (reached := speed(found)) is None else f"{reached / copied(found):.0%}",
        "launches": of_ours("launches"),
        "in a row, us": of_ours("in_a_row_us"),
        "MHz": of_ours("MHz"),
    }
    words = (*WHERE, "layout", "log-probs", "mask")
    what = ("case", "operation", "layout", "logp", "mask")
    title = "Cases, the bytes that they require, and how fast ours moves them"
    return table(title, words, lambda found: [found[name] for name in what], columns, measured(results))


def everybody_table(results: Found, title: str, cell: Column) -> Table:
    """Make a table with a cell for the row of each contender."""
    names = [name for name in ORDER if any(row_of(found, name) for found in measured(results))]

    def of(found: Found, name: str) -> str:
        row = row_of(found, name)
        return "-" if row is None else cell(row)

    return _by_case(title, {name: partial(of, name=name) for name in names}, measured(results))


def _spread(row: Found, what: str) -> str:
    taken = row[what]
    mark = " e" if what == "device_ms" and row["how"] == "events" else ""
    return f"{number(taken['median'])} ({number(taken['low'])}-{number(taken['high'])}){mark}"


def compiled_table(results: Found) -> Table:
    """Ours next to torch.compile by hand, which is measured apart because compiling takes long."""
    head = [*WHERE, "first call s", "GPU ms", "ours", "times as fast", "call ms", "ours", "times as fast"]
    rows = []
    for found in measured(results, "compiled"):
        mine, theirs = row_of(found, OURS), row_of(found, COMPILED)
        if mine is not None and theirs is not None:
            cells = [number(theirs["first_s"])]
            for what in ("device_ms", "call_ms"):
                cells += [_median(theirs, what), _median(mine, what), times(speedup(found, COMPILED, what))]
            rows.append([*_where(found), *cells])
    return Table("torch.compile by hand, without metrics", head, rows, 2)


def value_of(promise: Promise, found: Found, everything: Iterable[Found]) -> float | None:
    """Return the value that a promise is about; None where it was not measured."""
    row = row_of(found, OURS)
    if row is None:
        return None
    if promise.kind in ("share", "over bytes"):
        share = gigabytes(found, row) / copied(found)
        return share if promise.kind == "share" else 1.0 / share
    if promise.kind == "microseconds":
        # Of calls in a row, where they were measured: they start together. Else of one call.
        return float(row.get("in_a_row_us", 1e3 * row["device_ms"]["median"]))
    if promise.kind == "memory":
        # The required bytes are the inputs and outputs.
        return float(row["temporaries"] / found["required_bytes"])
    if promise.kind == "compiled":
        return speedup(found, COMPILED, "call_ms")
    if promise.kind == "peers":
        ratios = [ratio for ratio in (speedup(found, name) for name in PEERS) if ratio is not None]
        return min(ratios, default=None)
    assert promise.kind == "over long"
    long = next((row_of(one, OURS) for one in everything if _where(one) == ("16M", promise.operation)), None)
    return None if long is None else float(row["device_ms"]["median"] / long["device_ms"]["median"])


def promise_table(results: Found) -> Table:
    """Promised and reached; a tiny run reaches nothing."""
    rows: list[list[str]] = []
    for promise in () if results["tiny"] else PROMISES:
        for found in measured(results, "compiled" if promise.kind == "compiled" else "measured"):
            if _where(found) != (promise.case, promise.operation):
                continue
            value = value_of(promise, found, measured(results))
            if value is not None:
                good = (promise.least is None or value >= promise.least) and (
                    promise.most is None or value <= promise.most
                )
                rows.append([promise.case, promise.operation, promise.what, f"{value:.3g}", met(good)])
    return Table("Promised and reached", [*WHERE, "promised", "reached", "met"], rows, 3)


def all_tables(results: Found) -> list[Table]:
    """Every table that has rows."""
    clocks = {
        "wall_ms": "of a whole call, metrics on the host",
        "device_ms": "on the GPU",
        "call_ms": "of a call alone",
    }
    found: Sequence[Table] = [
        promise_table(results),
        compiled_table(results),
        *(
            everybody_table(results, f"Milliseconds {words}: median (10 % - 90 %)", partial(_spread, what=what))
            for what, words in clocks.items()
        ),
        everybody_table(results, "Peak extra memory, MiB", lambda row: mebibytes(row["temporaries"])),
        case_table(results),
    ]
    return [one for one in found if one.rows]
