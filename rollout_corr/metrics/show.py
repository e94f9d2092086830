"""Metrics shown: as a table of HTML in notebooks, and what one of them is made of as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from . import loss
from .limits import BY_KEY
from .native import DASHBOARD, is_around_one
from .rows import Metric

T = TypeVar("T")

# Rows that are seen at once; the rest is folded.
FIRST = ("tokens", "sequences", *DASHBOARD, *loss.DASHBOARD)


def table(about: str, metrics: Mapping[str, float], warnings: Sequence[str]) -> str:
    """Return a heading, the warnings, and the metrics with their healthy ranges, most of them folded."""
    import html  # which reads the names of all characters

    first = [key for key in FIRST if key in metrics]
    rest = [key for key in metrics if key not in FIRST]
    said = "".join(f"<li>{html.escape(text)}</li>" for text in warnings)
    folded = f"<details><summary>{len(rest)} more</summary>{_table(metrics, rest)}</details>" if rest else ""
    return (
        f"<p><code>{html.escape(about)}</code></p>{f'<ul>{said}</ul>' if said else ''}{_table(metrics, first)}{folded}"
    )


def _table(metrics: Mapping[str, float], keys: Sequence[str]) -> str:
    import html

    rows = []
    for key in keys:
        limit = BY_KEY.get(key)
        value = f"{metrics[key]:,.6g}"
        if limit is not None and limit.state(metrics[key]) == "alarm":
            value = f"<b style='color:#c00'>{value}</b>"
        healthy = "" if limit is None else f"healthy: {html.escape(limit.range)}"
        rows.append(f"<tr><td><code>{html.escape(key)}</code></td><td>{value}</td><td>{healthy}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


class Recorded(dict[str, float]):
    """Statistics by name that note which of them a formula reads."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> float:
        if name not in self.names:
            self.names.append(name)
        return super().__getitem__(name)


def found(key: str, rows: Mapping[str, T]) -> T:
    """Look a metric up."""
    if key not in rows:
        from difflib import get_close_matches

        near = get_close_matches(str(key), rows, n=3, cutoff=0.0)
        raise ValueError(f"key: expected a native metric of these statistics, got {key!r}; the nearest are {near}")
    return rows[key]


def explained(row: Metric, key: str, values: Mapping[str, float]) -> str:
    """Explain a metric, in lines of text, from merged statistics by name; `key` is its full key."""
    recorded = Recorded(values)
    units = row.over.units
    count = 0.0 if units is None else values[units]
    lines = [f"{key} = {row.value(recorded, count):.6g} {row.unit}".rstrip(" -"), f"  formula: {row.formula}"]
    if units is not None:
        lines.append(f"  n: {count:.15g} {row.over.words}, the sum {units!r}")
    bins = [name for name in recorded.names if name.startswith("histogram_")]
    if bins:
        lines.append(f"  made of: {len(bins)} bins of the histogram of {'weights' if 'weights' in bins[0] else 'D'}")
    around_one = getattr(row.value, "center", 0.0) == 1.0
    for name in recorded.names:
        if name not in bins:
            words = _in_words(name, (around_one and name != units) or is_around_one(name))
            lines.append(f"  made of: {words} = {values[name]:.15g}")
    return "\n".join([*lines, f"  healthy: {'any' if row.healthy == '-' else row.healthy}"])


def _in_words(name: str, around_one: bool) -> str:
    kind = "a negated minimum" if name.startswith("-min_") else "a maximum" if name.startswith("max_") else "a sum"
    squared = around_one and name.endswith("2")
    return f"{name!r}, {kind}{' of (x - 1)^2' if squared else ' of x - 1' if around_one else ''}"
