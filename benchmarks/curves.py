"""What pictures show, as numbers: from the results of `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import gpu_tables
from benchmarks.contenders import OURS
from benchmarks.operations import TOKEN

# The files that benchmarks.plots writes, beside docs/benchmarks.md.
PICTURES = {"scaling": "gpu-scaling.svg", "speedup": "gpu-speedup.svg"}

AXES = (
    ("tokens", "tokens, in sequences of 512 on average", "slots"),
    ("sequences", "sequences, tokens unchanged", "sequences"),
    ("skew", "skew of lengths: standard deviation of their logarithm", "skew"),
)


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Args:
        x: What is along the axis.
        logarithmic: Whether that axis is.
        lines: {name: [(x, y)]}.
    """

    x: str
    logarithmic: bool
    lines: Mapping[str, Sequence[tuple[float, float]]]


def scaling(results: Mapping[str, Any]) -> list[Panel]:
    """Share of the copy bandwidth along each axis, of one call and of calls in a row."""
    panels = []
    for axis, label, field in AXES:
        alone, row = [], []
        for found in results["scaling"]:
            ours = gpu_tables.row_of(found, OURS)
            if found["axis"] != axis or ours is None:
                continue
            x = float(found["case"].removeprefix("skew ")) if axis == "skew" else float(found[field])
            most = gpu_tables.copied(found)
            alone.append((x, gpu_tables.gigabytes(found, ours) / most))
            if "row_ms" in ours:
                row.append((x, found["required_bytes"] / ours["row_ms"]["median"] / 1e6 / most))
        lines = {"one call, cold caches": alone, "calls in a row": row}
        panels.append(Panel(label, axis != "skew", {name: points for name, points in lines.items() if points}))
    return [panel for panel in panels if panel.lines]


def speedups(results: Mapping[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """{who: [(case, how many times as fast ours is)]} of token weights, whole calls."""
    bars: dict[str, list[tuple[str, float]]] = {}
    for found in gpu_tables.measured(results):
        if found["operation"] == TOKEN.name:
            for row in gpu_tables.timed(found):
                ratio = gpu_tables.speedup(found, row["name"])
                if row["name"] != OURS and ratio is not None:
                    bars.setdefault(row["name"], []).append((found["case"], ratio))
    return bars
