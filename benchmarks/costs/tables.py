"""Tables of costs, from results."""

from __future__ import annotations

import math
from collections.abc import Iterable

from benchmarks.tables import Found, Table, number

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


def all_tables(results: Found) -> list[Table]:
    """Make the table of every call, and of who is better."""
    return [*(table_of(results, what) for what in HEADS), better(results)]


def table_of(results: Found, what: str) -> Table:
    """Make the table of one call: ours first, then the frameworks by their waits and launches."""
    rows = [row for row in results["rows"] if row["what"] == what]
    shown = [row for row in rows if row["shape"] == SHAPE]
    known = [row["who"] for row in shown if not row["version"]]
    shown.sort(key=lambda row: (1, row["waits"], row["launches"]) if row["version"] else (0, known.index(row["who"])))
    lines = []
    for row in shown:
        same = [one for one in rows if (one["who"], one["layout"]) == (row["who"], row["layout"])]
        lines.append(
            [
                f"{row['who']} {row['version']}".strip(),
                row["layout"],
                sizes(one["launches"] for one in same),
                sizes(one["waits"] for one in same),
                moved(row),
                "-" if row["temporaries"] is None else number(row["temporaries"] / row["tokens"]),
                over_ours(results["host"], row["who"], what),
            ]
        )
    head = ["who", "layout", "launches", "waits", "bytes moved a token", "temporaries a token", "host"]
    return Table(HEADS[what], head, lines, 2)


def moved(row: Found) -> str:
    """Bytes that a call reads and writes for each valid token."""
    return number((row["read"] + row["written"]) / row["tokens"])


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
    host = results["host"].get(row["who"], {}).get(row["what"], math.inf)
    temporaries = math.inf if row["temporaries"] is None else row["temporaries"] / row["tokens"]
    per_token = (row["read"] + row["written"]) / row["tokens"]
    return dict(zip(AMOUNTS, [row["launches"], row["waits"], per_token, temporaries, host], strict=True))


def sizes(counts: Iterable[int]) -> str:
    """One number where all sizes have it, else one for each size."""
    found = list(counts)
    return f"{found[0]:,}" if len(set(found)) == 1 else "; ".join(f"{count:,}" for count in found)


def headline(results: Found) -> list[list[str]]:
    """Rows of launches, waits and bytes a token, in rows with padding: ours, verl's, TRL's and by hand."""
    rows = {
        (row["who"], row["what"]): row for row in results["rows"] if (row["shape"], row["layout"]) == (SHAPE, "padded")
    }
    found = []
    for what in ("correction", "loss"):
        for who in (OURS, "verl", "TRL", SHORT[what]):
            row = rows[who, what]
            found.append([HEADS[what], who, f"{row['launches']}", f"{row['waits']}", moved(row)])
    return found


def steps(results: Found) -> Table:
    """Make the table of a whole step, per valid token."""
    head = ["who", "layout", "launches", "waits", "bytes", "of sectors", "instructions", "peak memory"]
    lines = []
    # Ours with rejection and with product weights are on the page of the kernels.
    for row in (row for row in results["rows"] if row["who"].count(",") < 2 and "product" not in row["who"]):
        tokens = row["tokens"]
        amounts = (row["read"] + row["written"], row["sectors"], row["instructions"], row["peak"])
        lines.append(
            [
                f"{row['who']} {row['version']}".strip(),
                row["layout"],
                f"{row['launches']:,}",
                f"{row['waits']:,}",
                *("-" if amount is None else number(amount / tokens) for amount in amounts),
            ]
        )
    return Table("A whole step, forward and backward", head, lines, 2)


def steps_of_ours(results: Found) -> list[list[str]]:
    """Rows of our ways to run a step: launches, then bytes and instructions in both layouts."""
    layouts = ("packed", "padded")
    amounts = ("bytes", "instructions")
    lines = [["", "launches", *(f"{layout}: {amount}" for layout in layouts for amount in amounts)]]
    lines.append([":--", *["--:"] * (len(lines[0]) - 1)])
    rows = {(row["who"], row["layout"]): row for row in results["rows"] if row["instructions"] is not None}
    for who in dict.fromkeys(who for who, _ in rows):
        both = [rows[who, layout] for layout in layouts]
        cells = [
            number(amount / row["tokens"])
            for row in both
            for amount in (row["read"] + row["written"], row["instructions"])
        ]
        lines.append([who.removeprefix("rollout-corr, "), sizes(row["launches"] for row in both), *cells])
    return lines


def steps_in_short(results: Found) -> list[list[str]]:
    """Rows of launches, waits and bytes a token of a step in padded rows: in one pass, verl's, TRL's and by hand."""
    rows = {row["who"]: row for row in results["rows"] if row["layout"] == "padded"}
    lines = [["a whole step, counted without a GPU", "launches", "waits", "bytes a token"], [":--", *["--:"] * 3]]
    for who in (ONE_PASS, TWO_CALLS, f"{BY_HAND}, six metrics", "TRL", "verl"):
        row = rows[who]
        lines.append([who, f"{row['launches']}", f"{row['waits']}", moved(row)])
    return lines
