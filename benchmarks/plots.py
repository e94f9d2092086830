"""Pictures of the committed GPU report, into docs/: `python -m benchmarks.plots`. Needs matplotlib."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import report
from benchmarks.gpu.tables import AXES, PICTURES, scaling, speedups
from benchmarks.gpu_report.page import benchmark_of
from benchmarks.tables import Found


def draw(results: Found, caption: str) -> dict[str, Any]:
    """Return {name of a picture: figure} of the pictures for which there are numbers."""
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    # Names instead of random identifiers, and text as text: the same numbers make the same small file.
    pyplot.rcParams.update({"svg.hashsalt": "rollout-corr", "svg.fonttype": "none", "font.size": 8})
    figures = {}
    panels = scaling(results)
    if panels:
        figure, axes = pyplot.subplots(1, len(panels), figsize=(3.4 * len(panels), 2.6), squeeze=False)
        for (axis, lines), ax in zip(panels.items(), axes[0], strict=True):
            for name, points in lines.items():
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            if axis != "skew":
                ax.set_xscale("log")
            ax.set(xlabel=AXES[axis])
            ax.set_ylim(bottom=0.0)
            ax.grid(alpha=0.3)
        axes[0][0].set_ylabel("part of a copy's bandwidth")
        axes[0][0].legend()
        figures["scaling"] = figure
    bars = speedups(results)
    if bars:
        figure, ax = pyplot.subplots(figsize=(7.0, 3.6))
        cases = list(dict.fromkeys(case for ratios in bars.values() for case, _ in ratios))
        width = 0.8 / len(bars)
        for i, (name, ratios) in enumerate(bars.items()):
            at = [cases.index(case) + i * width for case, _ in ratios]
            ax.bar(at, [ratio for _, ratio in ratios], width, label=name)
        ax.set_xticks([i + 0.4 - width / 2 for i in range(len(cases))], cases, rotation=20, ha="right")
        ax.set(yscale="log", ylabel="times as fast, whole call with metrics")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        figures["speedup"] = figure
    for figure in figures.values():
        figure.text(0.01, 0.005, caption, fontsize=6)
        figure.tight_layout(rect=(0.0, 0.03, 1.0, 1.0))
    return figures


def write(found: Found) -> list[str]:
    """Draw a report, and return the names of the files."""
    results = benchmark_of(found)
    if results is None:
        return []
    about = f"{results['machine']['gpu']}, {found['date']}, commit {found['commit'][:12]}"
    names = []
    for name, figure in draw(results, about).items():
        path = report.PAGE.parent / PICTURES[name]
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        names.append(path.name)
    return names


def main() -> None:
    """Write the pictures of the committed report."""
    found = report.load(report.GPU_RESULTS)
    if found is None:
        sys.exit(f"plots: there is no {report.GPU_RESULTS.relative_to(report.ROOT)} to draw")
    print("\n".join(write(found)))


if __name__ == "__main__":
    main()
