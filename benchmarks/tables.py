"""Tables of text, and how they and results are written: JSON, Markdown, a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Found = Mapping[str, Any]


class Table(NamedTuple):
    """Cells are text already; the first `left` columns are words."""

    title: str
    head: list[str]
    rows: list[list[str]]
    left: int = 1


def table(
    title: str,
    words: Sequence[str],
    where: Callable[[Any], Sequence[str]],
    columns: Mapping[str, Callable[[Any], str]],
    found: Iterable[Any],
) -> Table:
    """Make a table with a row for each thing found: columns of words from `where`, then a function for each column."""
    rows = [[*where(one), *(cell(one) for cell in columns.values())] for one in found]
    return Table(title, [*words, *columns], rows, len(words))


def of_rows(title: str, rows: Sequence[Found], left: int) -> Table:
    """Make a table of rows that have the same keys, which are its head."""
    head = list(rows[0]) if rows else []
    return Table(title, head, [[str(row[name]).replace("|", "/") for name in head] for row in rows], left)


def to_json(results: Found) -> str:
    """Write results indented, with every list of numbers on one line, and so every mapping in a list that is flat."""
    return _write(results, 0) + "\n"


def _write(value: object, depth: int, in_list: bool = False) -> str:
    inner, end = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, Mapping) and value and not (in_list and _is_flat(value)):
        parts = [f"{json.dumps(key)}: {_write(item, depth + 1)}" for key, item in value.items()]
        return "{" + inner + ("," + inner).join(parts) + end + "}"
    if _is_nested(value):
        return "[" + inner + ("," + inner).join(_write(item, depth + 1, True) for item in value) + end + "]"
    return json.dumps(value)


def _is_flat(value: Mapping[str, object]) -> bool:
    return not any(isinstance(item, Mapping) or _is_nested(item) for item in value.values())


def _is_nested(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value)


def number(value: float | None) -> str:
    """Three significant digits, never in scientific notation."""
    if value is None or value == 0.0:
        return "-" if value is None else "0"
    return f"{value:.0f}" if value >= 100.0 else f"{value:#.3g}".rstrip(".")


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} x"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}"


def commit_of(results: Found) -> str:
    """The date and the commit of a run, in words."""
    state = {True: " with uncommitted changes", False: "", None: " (of a copy without git, as its caller says)"}
    return f"{results['date']}, commit {results['commit'][:12]}{state[results['dirty']]}"


def met(reached: bool) -> str:
    return "yes" if reached else "no"


def grid(one: Table) -> list[str]:
    """Lines of Markdown, without the title."""
    rule = [":--"] * one.left + ["--:"] * (len(one.head) - one.left)
    return ["| " + " | ".join(line) + " |" for line in (one.head, rule, *one.rows)]


def markdown(tables: Iterable[Table]) -> list[str]:
    """Lines of Markdown, each table below its title."""
    return [line for one in tables for line in (f"## {one.title}", "", *grid(one), "")]


def drawn(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Draw tables and notes for a terminal, in columns of plain text."""
    return "\n".join([*(plain(one) for one in tables), *notes])


def plain(one: Table) -> str:
    """Draw a table in columns of plain text."""
    lines = [one.head, *one.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(one.head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([one.title, *text, ""])
