"""A chart of what counts alone allow: the least time of a correction on an H200, by the assumptions below. No result.

python -m benchmarks.costs.bounds   # draw docs/bounds.svg from benchmarks/results/costs.json
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks import machine
from benchmarks.tables import Found

# Assumed, not measured: what a launch and a wait take the host, and what an H200 copies in a second.
LAUNCH, WAIT, BANDWIDTH = 5e-6, 20e-6, 4.3e12
WHAT = "correction"
CHART = machine.ROOT / "docs" / "bounds.svg"


def bound(row: Found) -> float:
    """Return the least seconds of a call: the host launches and waits while the device moves bytes."""
    host = LAUNCH * row["launches"] + WAIT * row["waits"]
    return max(host, (row["read"] + row["written"]) / BANDWIDTH)


def lines(results: Found) -> dict[str, list[tuple[int, float]]]:
    """Return tokens and microseconds of everybody whose correction is counted, in the order of the largest size."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in results["rows"]:
        if row["what"] == WHAT:
            who = f"{row['who']}, packed" if row["layout"] == "packed" else row["who"]
            found.setdefault(who, []).append((row["tokens"], round(1e6 * bound(row), 1)))
    return dict(sorted(found.items(), key=lambda one: -one[1][-1][1]))


def digest(results: Found) -> str:
    """Name what the chart shows: it stands in its file."""
    return hashlib.sha256(json.dumps(lines(results)).encode()).hexdigest()[:16]


def draw(results: Found, path: Path = CHART) -> None:
    """Draw the chart."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "bounds"
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=mpl.color_sequences["tab20"])
    for who, points in lines(results).items():
        ours = who.startswith("rollout-corr, kernels")
        axes.loglog(*zip(*points, strict=True), marker="o", label=who, linewidth=3 if ours else 1)
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds, at least")
    axes.set_title(
        "A correction with its metrics: bounds from counts, nothing measured\n"
        f"{1e6 * LAUNCH:g} us a launch, {1e6 * WAIT:g} us a wait, or bytes at {BANDWIDTH / 1e12:g} TB/s",
        fontsize=10,
    )
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Description": digest(results)})


if __name__ == "__main__":
    draw(json.loads((machine.RESULTS / "costs.json").read_text(encoding="utf-8")))
