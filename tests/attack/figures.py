"""The figures of a campaign: a table for the terminal, and one in docs/reliability.md."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import rollout_corr as rc
from attack.campaign import Figures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
START, END = "<!-- figures: make attack ARGS=--write -->", "<!-- end of figures -->"
HEAD = ("area", "seeds", "tried", "right", "refused", "wrong", "seconds")
# More than these are counted and not named.
SEEDS = 20


def _seeds(figures: Figures) -> str:
    """The seeds that were tried."""
    if not figures.tried:
        return "-"
    first = figures.seeds.start
    return f"{first} to {first + figures.tried - 1}"


def _cells(figures: Figures) -> tuple[str, ...]:
    tried = f"{figures.tried:,} {figures.area.unit}"
    counts = (f"{figures.right:,}", f"{figures.refused:,}", f"{len(figures.wrong):,}")
    return (figures.area.name, _seeds(figures), tried, *counts, f"{figures.seconds:,.0f}")


def table(found: Sequence[Figures]) -> str:
    """Lay out the figures for a terminal, and the seeds of what was wrong."""
    rows = [HEAD, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for one in found:
        if one.wrong:
            seeds = sorted(one.wrong)
            more = f" and {len(seeds) - SEEDS} more" if len(seeds) > SEEDS else ""
            lines.append(f"wrong in {one.area.name}: seeds {', '.join(map(str, seeds[:SEEDS]))}{more}")
        if one.tried < len(one.seeds):
            lines.append(f"{one.area.name}: the time was up after {one.tried:,} of {len(one.seeds):,}")
    return "\n".join(lines)


@cache
def commit() -> str:
    """Name the commit that is checked out, with a "+" if its code has been changed; nothing where there is no git."""
    try:
        head, changed = (
            subprocess.run(["git", *command], cwd=PAGE.parents[1], capture_output=True, text=True, check=True).stdout
            for command in (
                ("rev-parse", "--short", "HEAD"),
                ("diff", "--name-only", "HEAD", "--", "rollout_corr", "kernels", "tests"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" ({head.strip()}{'+' if changed else ''})"


def versions() -> str:
    """Name what was attacked, and with what."""
    found = []
    for name in ("torch", "triton", "numpy", "pyarrow"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([f"rollout-corr {rc.__version__}{commit()}", f"Python {platform.python_version()}", *found])


def write(found: Sequence[Figures], page: Path = PAGE, today: datetime.date | None = None) -> None:
    """Replace the rows of these areas in the page; rows of other areas stay."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    old, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{page}: expected the lines {START!r} and {END!r}")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", old, re.MULTILINE)}
    date = (today or datetime.date.today()).isoformat()
    for one in found:
        name, *cells = _cells(one)
        rows[name] = "| " + " | ".join([f"`{name}`", *cells, f"{date}, {sys.platform}, {versions()}"]) + " |"
    head = "| " + " | ".join([*HEAD, "when, with"]) + " |"
    ruler = "| --- | --- |" + " --- |" * (len(HEAD) - 1)
    lines = [head, ruler, *(rows[name] for name in sorted(rows))]
    page.write_text("\n".join([f"{before}{START}", "", *lines, "", f"{END}{after}"]), encoding="utf-8")
