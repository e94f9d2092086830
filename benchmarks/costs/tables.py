"""Tables of costs, from results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from benchmarks.tables import Found, Table, number, table

OURS = "rollout-corr, kernels"
BY_HAND = "torch.compile by hand"
# The code by hand that is shown next to ours: with what a loop logs, the least that is compared.
SHORT = {"correction": f"{BY_HAND}, ten metrics", "loss": f"{BY_HAND}, three metrics"}
# Our ways to run a step.
ONE_PASS, TWO_PASSES, TWO_CALLS, READY = (
    f"rollout-corr, {how}" for how in ("one pass", "two passes", "two calls", "ready weights")
)
WITH_VETO, PRODUCT = ", rejection and veto", ", product weights"
# The tables show the counts of this size; launches and waits of every size where sizes differ.
SHAPE = [256, 2048]
HEADS = {
    "correction": "A correction with its metrics",
    "loss": "A loss, forward and backward, weights ready",
    "correction in the loss": "A loss with its correction inside, forward and backward",
}
# What is compared.
AMOUNTS = ("launches", "waits", "bytes moved", "temporaries", "host")


Column = Callable[[Found], str]


def all_tables(results: Found) -> list[Table]:
    """Make the table of every call, and of who is better."""
    return [*(table_of(results, what) for what in HEADS), better(results)]


def named(row: Found) -> list[str]:
    """The name and version of who is counted, and the layout."""
    return [f"{row['who']} {row['version']}".strip(), row["layout"]]


def per_token(row: Found, amount: int | None) -> float | None:
    """An amount of a row for each valid token; None: it was not counted."""
    return None if amount is None else amount / row["tokens"]


def bytes_of(row: Found) -> int:
    """Bytes that a call reads and writes."""
    return row["read"] + row["written"]


def moved(row: Found) -> str:
    """Bytes that a call reads and writes for each valid token."""
    return number(per_token(row, bytes_of(row)))


def table_of(results: Found, what: str) -> Table:
    """Make the table of one call: ours first, then the frameworks by their waits and launches."""
    rows = [row for row in results["rows"] if row["what"] == what]
    shown = [row for row in rows if row["shape"] == SHAPE]
    known = [row["who"] for row in shown if not row["version"]]
    shown.sort(key=lambda row: (1, row["waits"], row["launches"]) if row["version"] else (0, known.index(row["who"])))

    def of_sizes(name: str) -> Column:
        return lambda row: sizes(
            one[name] for one in rows if (one["who"], one["layout"]) == (row["who"], row["layout"])
        )

    columns: dict[str, Column] = {
        "launches": of_sizes("launches"),
        "waits": of_sizes("waits"),
        "bytes moved a token": moved,
        "temporaries a token": lambda row: number(per_token(row, row["temporaries"])),
        "host": lambda row: over_ours(results["host"], row["who"], what),
    }
    return table(HEADS[what], ["who", "layout"], named, columns, shown)


def over_ours(host: Found, who: str, what: str) -> str:
    """How many times as long as ours the host takes; "-": it was not timed."""
    spent = host.get(who, {}).get(what)
    if spent is None:
        return "-"
    ratio = spent / host[OURS][what]
    return f"{ratio:,.0f} x" if ratio >= 10.0 else f"{ratio:.1f} x"


def better(results: Found) -> Table:
    """Say who takes less than our kernels, in the same layout."""
    lines = []
    for what, head in HEADS.items():
        rows = [row for row in results["rows"] if row["what"] == what and row["shape"] == SHAPE]
        mine = {row["layout"]: amounts(results, row) for row in rows if row["who"] == OURS}
        theirs = [(row["who"], amounts(results, row), mine[row["layout"]]) for row in rows if row["version"]]
        less = [[who for who, one, other in theirs if one[name] < other[name]] for name in AMOUNTS]
        lines.append([head, *(", ".join(who) or "-" for who in less)])
    return Table("Frameworks that take less than our kernels", ["call", *AMOUNTS], lines, 1 + len(AMOUNTS))


def amounts(results: Found, row: Found) -> dict[str, float]:
    """The amounts of a row by their names: bytes and temporaries for each token, so that sizes compare.

    One that was not counted is no less than another.
    """
    found = [row["launches"], row["waits"], per_token(row, bytes_of(row)), per_token(row, row["temporaries"])]
    found.append(results["host"].get(row["who"], {}).get(row["what"]))
    return {name: math.inf if x is None else x for name, x in zip(AMOUNTS, found, strict=True)}


def sizes(counts: Iterable[int]) -> str:
    """One number where all sizes have it, else one for each size."""
    found = list(counts)
    return f"{found[0]:,}" if len(set(found)) == 1 else "; ".join(f"{count:,}" for count in found)


def counts(*names: str) -> dict[str, Column]:
    """Columns of whole numbers."""
    return {name: lambda row, name=name: f"{row[name]:,}" for name in names}


def headline(results: Found) -> Table:
    """Make the table of ours, verl's, TRL's and by hand, in rows with padding."""
    rows = {
        (row["what"], row["who"]): row for row in results["rows"] if (row["shape"], row["layout"]) == (SHAPE, "padded")
    }
    shown = [rows[what, who] for what in ("correction", "loss") for who in (OURS, "verl", "TRL", SHORT[what])]
    columns = counts("launches", "waits") | {"bytes moved a token": moved}
    return table("", ["call", "who"], lambda row: [HEADS[row["what"]], row["who"]], columns, shown)


def steps(results: Found) -> Table:
    """Make the table of a whole step, per valid token."""
    columns: dict[str, Column] = counts("launches", "waits") | {"bytes": moved}
    for head, name in {"of sectors": "sectors", "instructions": "instructions", "peak memory": "peak"}.items():
        columns[head] = lambda row, name=name: number(per_token(row, row[name]))
    # Ours with rejection and with product weights are on the page of the kernels.
    shown = (row for row in results["rows"] if row["who"].count(",") < 2 and "product" not in row["who"])
    return table("A whole step, forward and backward", ["who", "layout"], named, columns, shown)


def steps_of_ours(results: Found) -> Table:
    """Make the table of our ways to run a step: launches, then bytes and instructions in both layouts."""
    rows = {(row["who"], row["layout"]): row for row in results["rows"] if row["instructions"] is not None}
    columns: dict[str, Column] = {"launches": lambda both: sizes(row["launches"] for row in both.values())}
    for layout in ("packed", "padded"):
        columns[f"{layout}: bytes"] = lambda both, layout=layout: moved(both[layout])
        columns[f"{layout}: instructions"] = lambda both, layout=layout: number(
            per_token(both[layout], both[layout]["instructions"])
        )
    ways = [{layout: rows[who, layout] for layout in ("packed", "padded")} for who in dict.fromkeys(x for x, _ in rows)]
    return table("", [""], lambda both: [both["packed"]["who"].removeprefix("rollout-corr, ")], columns, ways)


def steps_in_short(results: Found) -> Table:
    """Make the table of a step in padded rows: in one pass, as two calls, by hand, TRL's and verl's."""
    rows = {row["who"]: row for row in results["rows"] if row["layout"] == "padded"}
    shown = [rows[who] for who in (ONE_PASS, TWO_CALLS, f"{BY_HAND}, six metrics", "TRL", "verl")]
    columns = counts("launches", "waits") | {"bytes a token": moved}
    return table("", ["a whole step, counted without a GPU"], lambda row: [row["who"]], columns, shown)
