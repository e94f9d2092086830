"""What a metric is made of, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from .formulas import compiled
from .native import is_around_one
from .rows import Metric

T = TypeVar("T")


class Recorded(dict[str, float]):
    """Statistics by name that note which of them a formula reads."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> float:
        if name not in self.names:
            self.names.append(name)
        return super().__getitem__(name)


def row_of(key: str, rows: Mapping[str, T]) -> T:
    """Look a metric up."""
    if key not in rows:
        from difflib import get_close_matches

        near = get_close_matches(str(key), rows, n=3, cutoff=0.0)
        raise ValueError(f"key: expected a metric of these statistics, got {key!r}; the nearest are {near}")
    return rows[key]


def explained(row: Metric, key: str, values: Mapping[str, float]) -> str:
    """Explain a metric, in lines of text, from merged statistics by name; `key` is its full key."""
    units, formula = row.over.units, compiled(row.formula)
    recorded = Recorded(values)
    lines = [f"{key} = {row.read(recorded):.6g} {row.unit}".rstrip(" -"), f"  meaning: {row.words}"]
    lines.append(f"  formula: {row.formula}")
    if units is not None:
        lines.append(f"  n: {values[units]:.15g} {row.over.words}, the sum {units!r}")
    bins = [name for name in recorded.names if name.startswith("histogram_")]
    if bins:
        lines.append(f"  made of: {len(bins)} bins of the histogram of {'weights' if 'weights' in bins[0] else 'D'}")
    for name in dict.fromkeys((*formula.names, *recorded.names)):
        if name in formula.names or name not in (*bins, units):
            words = _in_words(name, formula.around_one or is_around_one(name), name[:-1] in values)
            lines.append(f"  made of: {words} = {values[name]:.15g}")
    return "\n".join([*lines, f"  healthy: {'any' if row.healthy == '-' else row.healthy}"])


def _in_words(name: str, around_one: bool, has_root: bool) -> str:
    kind = "a negated minimum" if name.startswith("-min_") else "a maximum" if name.startswith("max_") else "a sum"
    squared = name.endswith("2") and (around_one or has_root)
    x = "(x - 1)" if around_one and squared else "x - 1" if around_one else "x"
    return f"{name!r}, {kind}{f' of {x}^2' if squared else f' of {x}' if around_one else ''}"
