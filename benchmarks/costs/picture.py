"""A picture of a step, launch by launch: `python -m benchmarks.costs.picture` draws docs/step.svg from steps.json.

Above: which tensors the launches of one pass and of two calls read and write. Below: how many bytes, next to verl's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.costs.steps import RESULTS
from benchmarks.costs.tables import ONE_PASS, TWO_CALLS, moved
from benchmarks.machine import ROOT, write_text
from benchmarks.tables import Found

PICTURE = ROOT / "docs" / "step.svg"
LAYOUT = "padded"
WIDTH, LEFT, ROW, CELL = 900, 130, 18, 64
HIGHEST = 36

# Colors of text and lines in a light and in a dark page, and of what is read and written in both.
STYLE = """
text { font: 12px sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.head { font-weight: bold }
.line { stroke: #d1d9e0 }
.read { fill: #2f81f7 }
.written { fill: #d9822b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .small { fill: #9198a1 }
  .line { stroke: #3d444d }
}
"""


class Touched(NamedTuple):
    """The tensors that a launch reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


POLICIES, FACTORS = ("new_logp", "old_logp"), ("weights", "training mask")
TENSORS = (*POLICIES, "rollout_logp", "mask", "advantages", *FACTORS, "gradient", "sums")
# By our way to run a step: launches by their kernels, in order.
TOUCHED = {
    ONE_PASS: {
        "gradient": Touched((*POLICIES, "rollout_logp", "mask", "advantages"), ("gradient", "sums")),
        "close": Touched(("sums",), ()),
        "scale": Touched(("gradient",), ("gradient",)),
    },
    TWO_CALLS: {
        "read": Touched(("old_logp", "rollout_logp", "mask"), (*FACTORS, "sums")),
        "decide": Touched(("sums",), ()),
        "gradient": Touched((*POLICIES, "mask", "advantages", *FACTORS), ("gradient", "sums")),
        "sequences": Touched(("sums",), ()),
        "scale": Touched(("gradient",), ("gradient",)),
    },
}


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" class="{kind}"/>'


def title(row: Found) -> str:
    who = row["who"].removeprefix("rollout-corr, ") if row["instructions"] else f"{row['who']} {row['version']}"
    return f"{who}: {row['launches']} launches, {moved(row)} bytes a token"


def roll(row: Found, left: float, top: float) -> Iterator[str]:
    """Draw which tensors each launch of ours touches."""
    yield text(left, top - 24, title(row), "head")
    for i, (launch, touched) in enumerate(zip(row["by_launch"], TOUCHED[row["who"]].items(), strict=True)):
        kernel, (reads, writes) = touched
        if launch["kernel"] != kernel:
            raise ValueError(f"{row['who']}: expected the kernel {kernel}, got {launch['kernel']}")
        x = left + i * CELL
        yield text(x + CELL / 2, top - 6, kernel, "small", "middle")
        for tensor in reads:
            yield box(x + 4, top + TENSORS.index(tensor) * ROW + 2, CELL / 2 - 5, ROW - 4, "read")
        for tensor in writes:
            yield box(x + CELL / 2 + 1, top + TENSORS.index(tensor) * ROW + 2, CELL / 2 - 5, ROW - 4, "written")
        for below, name in enumerate(("read", "written")):
            amount = f"{launch[name] / row['tokens']:.1f}"
            yield text(x + CELL / 2, top + (len(TENSORS) + below) * ROW + 16, amount, "small", "middle")


def bars(moves: Sequence[tuple[float, float]], row: Found, top: float, pitch: float, scale: float) -> Iterator[str]:
    """Draw the bytes of each launch: what it reads above the line, what it writes below."""
    yield text(0, top - HIGHEST - 8, title(row), "head")
    for kind, amounts, sign in zip(("read", "written"), zip(*moves, strict=True), (-1, 1), strict=True):
        drawn = [f"M{i * pitch:.1f} {top:g}h1.4v{sign * x * scale:.1f}h-1.4z" for i, x in enumerate(amounts)]
        yield f'<path class="{kind}" d="{"".join(drawn)}"/>'
    yield f'<line x1="0" x2="{WIDTH}" y1="{top:g}" y2="{top:g}" class="line"/>'


def moves_of(row: Found) -> list[tuple[float, float]]:
    """Bytes a token that each launch reads and writes."""
    if "moves" in row:
        pairs = zip(row["moves"]["read"], row["moves"]["written"], strict=True)
    else:
        pairs = ((launch["read"], launch["written"]) for launch in row["by_launch"])
    return [(read / row["tokens"], written / row["tokens"]) for read, written in pairs]


def picture(results: Found) -> str:
    """Return the picture, SVG."""
    rows = {row["who"]: row for row in results["rows"] if row["layout"] == LAYOUT}
    one, two, verl = rows[ONE_PASS], rows[TWO_CALLS], rows["verl"]
    top, parts = 60, []
    for i, tensor in enumerate((*TENSORS, "bytes read", "bytes written")):
        words = "sums of slots" if tensor == "sums" else tensor
        parts.append(text(LEFT - 8, top + i * ROW + (13 if i < len(TENSORS) else 16), words, "small", "end"))
    for i in range(len(TENSORS) + 1):
        y = top + i * ROW
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}" class="line"/>')
    parts += [*roll(one, LEFT, top), *roll(two, LEFT + 5 * CELL, top)]
    parts += [box(WIDTH - 120, top - 34, 10, 10, "read"), text(WIDTH - 106, top - 25, "read", "small")]
    parts += [box(WIDTH - 66, top - 34, 10, 10, "written"), text(WIDTH - 52, top - 25, "written", "small")]
    strips = [(row, moves_of(row)) for row in (one, two, verl)]
    highest = max(max(pair) for _, moves in strips for pair in moves)
    pitch, top = WIDTH / verl["launches"], 340
    parts.append(text(0, top - HIGHEST - 28, "One bar a launch, all to one scale. Padded rows, 56 % full.", "small"))
    for row, moves in strips:
        parts += bars(moves, row, top, pitch, HIGHEST / highest)
        top += 86
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top - 56}" width="{WIDTH}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    write_text(PICTURE, picture(json.loads(RESULTS.read_text(encoding="utf-8"))))
