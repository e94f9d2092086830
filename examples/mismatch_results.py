"""The numbers, tables and pictures of mismatch_rl.py and engine_rl.py; not run by itself.

    pip install /path/to/rollout-corr matplotlib rich
    python mismatch_rl.py            # with mismatch_results.py next to it

Nothing here trains. Curves are `{arm: [points of a run, one run per seed]}`, and a point is a dict of measures.
"""

from __future__ import annotations

import itertools
import json
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.table import Table

import rollout_corr as rc
from rollout_corr.whole_files import write_whole

Run = list[dict[str, float]]
Curves = dict[str, list[Run]]

CPUS = Path("/proc/cpuinfo")
MEASURES = {
    "reward": "reward, fresh lists",
    "kl": "mismatch KL (k3) per token",
    "ess": "ESS of the token ratios",
    "kept": "tokens kept",
}


def at_end(run: Sequence[Mapping[str, float]], measure: str) -> float:
    """Return a measure at the end of a run: its mean over the last quarter of the points."""
    return fmean(point[measure] for point in run[-max(1, len(run) // 4) :])


def p_value(differences: Sequence[float]) -> float:
    """Return the p-value of a sign-flip test: the fraction of all 2^n sign patterns with a mean as far from 0."""
    size = abs(sum(differences)) - 1e-12
    signs = itertools.product((1, -1), repeat=len(differences))
    return fmean(abs(sum(s * x for s, x in zip(row, differences, strict=True))) >= size for row in signs)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def rows_of(curves: Curves) -> list[list[str]]:
    """Return the rows of the table, one per arm; `table_of` has the heads."""
    rows = []
    for arm, runs in curves.items():
        reward = [at_end(run, "reward") for run in runs]
        against = "-"
        if arm != "uncorrected" and "uncorrected" in curves:
            gains = [x - at_end(other, "reward") for x, other in zip(reward, curves["uncorrected"], strict=True)]
            p = p_value(gains)
            wins = f"{sum(x > 0 for x in gains)} of {len(gains)} seeds"
            against = f"{fmean(gains):+.3f} ({'within noise, ' if p > 0.05 else ''}p = {p:.3f}, better in {wins})"
        rest = [f"{fmean(at_end(run, name) for run in runs):.3f}" for name in ("kl", "ess", "kept")]
        rows.append([arm, f"{fmean(reward):.3f} +- {standard_error(reward):.3f}", against, *rest])
    return rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a Markdown table with its caption."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", caption]) + "\n"


def about(setting: Any, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return where, when and how the numbers were made; `setting` is a dataclass."""
    root = Path(__file__).resolve().parent.parent
    asks = ("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    # If this file was copied into another repository, that one's commit says nothing.
    ours = shutil.which("git") and Path(rc.__file__).resolve().parent.parent == root
    commit = ours and subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip()
    lines = CPUS.read_text().splitlines() if CPUS.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    made = {"version": f"commit {commit}" if commit else f"rollout-corr {rc.__version__}", "torch": torch.__version__}
    made |= {"cpu": named[0] if named else platform.machine(), "date": time.strftime("%Y-%m-%d")}
    return made | {"minutes": round(seconds / 60, 1), "seeds": list(seeds), "setting": asdict(setting)}


def caption_of(found: Mapping[str, Any]) -> str:
    """Return the caption of table and picture: the setting, the machine and the date."""
    made, x = found["about"], found["about"]["setting"]
    what = f"{len(made['seeds'])} seeds, {x['steps']} steps; rollouts: int{x['bits']}, {x['stale']} steps old"
    engine = f"{made['engine']}, " if "engine" in made else ""
    return f"{what}; {made['cpu']}, one thread, {engine}torch {made['torch']}, {made['date']}, {made['version']}."


def picture(found: Mapping[str, Any], path: Path) -> None:
    """Draw the four measures over the steps, as SVG: the mean over seeds, and one standard error to each side."""
    # Fixed identifiers and real text: equal numbers give the same small file.
    with rc_context({"svg.hashsalt": "rollout-corr", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7.2, 4.8))
        axes = figure.subplots(2, 2)
        for (measure, title), ax in zip(MEASURES.items(), axes.flat, strict=True):
            for name, runs in found["curves"].items():
                steps = [point["step"] for point in runs[0]]
                columns = [[run[i][measure] for run in runs] for i in range(len(steps))]
                mean, band = [fmean(x) for x in columns], [standard_error(x) for x in columns]
                ax.plot(steps, mean, label=name, linewidth=1.2)
                edges = ([m + sign * b for m, b in zip(mean, band, strict=True)] for sign in (-1, 1))
                ax.fill_between(steps, *edges, alpha=0.2, linewidth=0)
            ax.set_title(title, fontsize=8)
            ax.set_ylim(bottom=0.0)
            ax.grid(alpha=0.3)
            ax.set_xlabel("steps")
        axes[0][0].axhline(fmean(found["start"]), color="black", linewidth=0.8, linestyle=":", label="before RL")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        figure.text(0.01, 0.005, caption_of(found), fontsize=5)
        figure.tight_layout(rect=(0.0, 0.02, 1.0, 0.92))
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def live_table(curves: Curves) -> Table:
    """Return the table that a terminal shows during training: the latest points, averaged over seeds."""
    table = Table()
    for column in ("run", "seeds", "step", *MEASURES):
        table.add_column(column, justify="left" if column == "run" else "right")
    for arm, runs in curves.items():
        last = [run[-1] for run in runs if run]
        means = [f"{fmean(point[name] for point in last):.3f}" if last else "-" for name in MEASURES]
        table.add_row(arm, str(len(last)), str(last[-1]["step"]) if last else "-", *means)
    return table


def write(out: Path, name: str, found: Mapping[str, Any], table: str) -> None:
    """Write the numbers and their table as files, and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{name}.json", json.dumps(found, separators=(",", ":")) + "\n")
    write_whole(out / f"{name}.md", table)
    print(f"\n{table}\n{out / name}.json and .md written")


def table_of(found: Mapping[str, Any]) -> str:
    """Return results.md from results.json."""
    head = ["run", "reward at the end", "against uncorrected", "mismatch KL", "ESS", "tokens kept"]
    before = ["before RL", f"{fmean(found['start']):.3f} +- {standard_error(found['start']):.3f}", *"----"]
    return markdown(head, [before, *rows_of(found["curves"])], caption_of(found))


def over_time(found: Mapping[str, Any]) -> str:
    """Return the second table of a run with an engine: k3 at the first, middle and last point, and what doctor says."""
    curves: dict[str, list[list[dict[str, Any]]]] = found["curves"]
    first = next(iter(curves.values()))
    last = len(first[0]) - 1
    points, rows = (0, last // 2, last), []
    for arm, runs in curves.items():
        k3 = [f"{fmean(run[i]['kl'] for run in runs):.4f}" for i in points]
        said = Counter(name for run in runs for point in run for name in point["doctor"] or ["healthy"])
        rows.append([arm, *k3, ", ".join(f"{name} {count}" for name, count in said.most_common())])
    head = ["k3", *(f"step {first[0][i]['step']}" for i in points), "findings of doctor"]
    every, batches = found["about"]["setting"]["every"], len(first) * (last + 1)
    return markdown(head, rows, f"k3 is the mean of {every} steps. doctor was shown {batches} batches of each run.")
