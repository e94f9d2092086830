"""Tables of text, and how they and results are written: JSON, Markdown, a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Cells are text already; the first `left` columns are words."""

    title: str
    head: list[str]
    rows: list[list[str]]
    left: int = 1


def to_json(results: Mapping[str, object]) -> str:
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


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, never in scientific notation."""
    if value is None:
        return "-"
    if value == 0.0:
        return "0"
    if value >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}"


def met(is_so: bool) -> str:
    return "yes" if is_so else "no"


def markdown(tables: Sequence[Table]) -> list[str]:
    """Lines of Markdown."""
    lines: list[str] = []
    for table in tables:
        rule = [":--"] * table.left + ["--:"] * (len(table.head) - table.left)
        lines += [f"## {table.title}", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (table.head, rule, *table.rows)]
        lines.append("")
    return lines


def drawn(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """For a terminal: with rich where it is installed, else columns of plain text."""
    said = "\n".join(notes)
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ModuleNotFoundError:
        return "\n".join([*(_plain(table) for table in tables), said])
    console = Console(file=io.StringIO(), width=200)
    for table in tables:
        lines = RichTable(*table.head, title=table.title, title_justify="left")
        for row in table.rows:
            lines.add_row(*row)
        console.print(lines)
    console.print(said)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _plain(table: Table) -> str:
    lines = [table.head, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([table.title, *text, ""])
