"""What was measured, for the terminal and for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rollout_corr.diagnose.doctor.verdict import Verdict
from rollout_corr.diagnose.measure.measuring import UPPER, Measured
from rollout_corr.diagnose.measure.profiles import Row
from rollout_corr.diagnose.read.problems import extra
from rollout_corr.diagnose.read.reading import Dump
from rollout_corr.diagnose.what_if import Outcome, Setting, WhatIf, pareto
from rollout_corr.spec.correction import LEVELS

KEYS = (
    *("tokens", "sequences", "tokens_nonfinite", "d_mean", "d_abs_mean", "abs_logp_p50", "abs_logp_p99"),
    *("abs_logp_p99.9", "d_abs_max", "kl_k1", "kl_k3", "ratio_mean", "chi2_token", "sum_d_abs_mean"),
    *("train_ppl", "rollout_ppl", "prob_abs_diff_mean", "prob_correlation"),
)
AXES = {
    "position": "position in the sequence",
    "probability": "rollout probability",
    "length": "sequence length (|mean D| of a sequence)",
    "turn": "turn",
    "versions": "weight version",
    "steps": "step",
}
# Longer axes are thinned out in the terminal; the page and --json have all of them.
MOST_ROWS = 16
BAR = 16


def plain(value: Any) -> Any:
    """Data as JSON knows it: no NaN, no infinity, no tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def as_data(dump: Dump, measured: Measured, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Everything that was measured, as plain data."""
    found = {
        **read_data(dump),
        "metrics": measured.metrics(),
        "warnings": measured.warnings(),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "profiles": {axis: [asdict(row) for row in rows] for axis, rows in measured.profiles().items()},
        "worst": [asdict(token) for token in measured.worst],
    }
    return dict(plain(found))


def read_data(dump: Dump) -> dict[str, Any]:
    """What was read and what could not be."""
    return {
        "file": str(dump.path),
        "fields": dump.fields,
        "problems": {"count": dump.problems.count, "shown": [problem._asdict() for problem in dump.problems.shown]},
    }


def console(stderr: bool = False) -> Any:
    """A rich console."""
    return extra("rich.console", "report", "printing a summary").Console(stderr=stderr, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Any:
    """A rich table.

    Args:
        title: Above it.
        columns: The heads.
        rows: The cells.
        left: How many columns are text; the rest are numbers.
    """
    escape = extra("rich.markup", "report", "printing a summary").escape
    box = extra("rich.box", "report", "printing a summary").SIMPLE_HEAD
    made = extra("rich.table", "report", "printing a summary").Table(
        title=title, title_justify="left", title_style="bold", box=box, padding=(0, 1, 0, 0)
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def print_read(out: Any, dump: Dump) -> None:
    """Say what was read and what could not be."""
    fields = ", ".join(role if role == name else f"{role} = {name}" for role, name in dump.fields.items())
    out.print(f"{dump.path}: {fields}", markup=False)
    if dump.problems.count:
        out.print(f"{dump.problems.count} problems; what else is there was read:", markup=False, style="bold red")
        for problem in dump.problems.shown:
            out.print(f"  {problem}", markup=False, style="red")


Reported = tuple[Dump, Measured, Sequence[Verdict]]


def print_report(out: Any, found: Sequence[Reported]) -> None:
    """Print the report of a dump; two as one table, for the page has the rest."""
    for dump, _, _ in found:
        print_read(out, dump)
    dump, measured, verdicts = found[0]
    metrics = measured.metrics()
    if len(found) == 2:
        other, after = found[1][0], found[1][1].metrics()
        cells = [(key, f"{metrics[key]:.5g}", f"{after[key]:.5g}", f"{after[key] - metrics[key]:+.3g}") for key in KEYS]
        out.print(table("Mismatch", ("metric", str(dump.path), str(other.path), "change"), cells))
    else:
        out.print(table("Mismatch", ("metric", "value"), [(key, f"{metrics[key]:.5g}") for key in KEYS]))
        out.print(levels_table(metrics))
        for axis, rows in measured.profiles().items():
            out.print(_axis_table(AXES.get(axis, axis), rows))
        if measured.worst:
            out.print(_worst_table(measured))
        for warning in measured.warnings():
            out.print(f"! {warning}", markup=False, style="yellow")
    for dump, _, verdicts in found:
        for verdict in verdicts:
            of = f"{dump.path}: " if len(found) == 2 else ""
            title = f"{of}{verdict.severity}: {verdict.title} [{verdict.name}]"
            out.print(title, markup=False, style=STYLES[verdict.severity])


LEVEL_KEYS = ("weight_raw_mean", "weight_raw_max", "weight_raw_ess", "weight_ess", "weight_above_fraction")


def level_key(level: str, key: str) -> str:
    """The metric of a level's own units: tokens, or sequences."""
    return f"{level}/{key}" if level == "token" else f"{level}/sequence_{key}"


def levels_table(metrics: dict[str, float]) -> Any:
    """Weights and effective sample size at each level."""
    heads = ("level", "mean weight", "largest", "ESS", f"ESS, truncated at {UPPER:g}", f"above {UPPER:g}")
    rows = [[level, *(f"{metrics[level_key(level, key)]:.4g}" for key in LEVEL_KEYS)] for level in LEVELS]
    return table("Importance weights", heads, rows)


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows, evenly spread, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _axis_table(title: str, rows: Sequence[Row]) -> Any:
    most = max(row.d_abs_mean for row in rows)
    cells = []
    for row in thinned(rows, MOST_ROWS):
        bar = "#" * round(BAR * row.d_abs_mean / most) if most else ""
        cells.append(
            (row.label, bar, f"{row.d_abs_mean:.3g}", f"{row.d_mean:.3g}", f"{row.d_abs_max:.3g}", str(row.count))
        )
    return table(f"|D| by {title}", (title, "mean |D|", "", "mean D", "max |D|", "count"), cells, left=2)


def _worst_table(measured: Measured) -> Any:
    rows = []
    for token in measured.worst[:10]:
        context = " ".join(
            f"[{text}]" if i == token.at else text for i, text in enumerate(token.tokens or _in_figures(token.context))
        )
        where = f"{token.record}:{token.position}"
        rows.append((where, context, f"{token.d:.4g}", f"{token.train_logp:.4g}", f"{token.rollout_logp:.4g}"))
    shown = "tokens" if any(token.tokens for token in measured.worst) else "D around it"
    return table("Worst tokens", ("record:position", shown, "D", "train", "rollout"), rows, left=2)


def _in_figures(context: Sequence[float | None]) -> list[str]:
    return ["nan" if d is None else f"{d:.2g}" for d in context]


HEALTHY = "no known signature of a bug, and the policies agree"
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def verdict_data(dump: Dump, measured: Measured, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Verdicts as plain data, with the metrics that conditions may name."""
    found = {
        **read_data(dump),
        "healthy": all(verdict.severity == "note" for verdict in verdicts),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "metrics": measured.metrics(),
    }
    return dict(plain(found))


def print_verdicts(out: Any, dump: Dump, measured: Measured, verdicts: Sequence[Verdict]) -> None:
    """Print what was recognised, the gravest first."""
    print_read(out, dump)
    metrics = measured.metrics()
    out.print(
        f"{metrics['tokens']:.0f} tokens in {metrics['sequences']:.0f} sequences: mean |D| "
        f"{metrics['d_abs_mean']:.3g}, percentile 99 {metrics['abs_logp_p99']:.3g}, k3 {metrics['kl_k3']:.3g} nats a "
        "token",
        markup=False,
    )
    if all(verdict.severity == "note" for verdict in verdicts):
        out.print(f"healthy: {HEALTHY}", style="bold green")
    for i, verdict in enumerate(verdicts, 1):
        out.print()
        out.print(
            f"{i}. {verdict.severity}: {verdict.title} [{verdict.name}]", markup=False, style=STYLES[verdict.severity]
        )
        for line in verdict.evidence:
            out.print(f"   - {line}", markup=False)
        out.print(f"   -> {verdict.advice}", markup=False)


OUTCOME_HEADS = ("setting", "tokens kept", "sequences kept", "mean weight", "ESS", "bias", "variance", "T x KL")
# A terminal has room for less.
SHORT_HEADS = ("setting", "tokens", "seqs", "mean", "ESS", "bias", "var", "TxKL")


def number(value: float) -> str:
    """A number as people read it."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def outcome_cells(setting: Setting, outcome: Outcome) -> list[str]:
    """A row of the table of settings."""
    values = (outcome.weight_mean, outcome.ess, outcome.bias, outcome.variance)
    kept = (f"{100 * outcome.tokens_kept:.3g} %", f"{100 * outcome.sequences_kept:.3g} %")
    shown = (f"{value:.3g}" if math.isfinite(value) else "-" for value in values)
    return [setting.name, *kept, *shown, "!" if outcome.note else ""]


def what_if_data(dump: Dump, tried: WhatIf) -> dict[str, Any]:
    """What every setting makes of a dump, as plain data."""
    outcomes = tried.outcomes()
    best = pareto(outcomes)
    settings = [
        {
            "name": setting.name,
            "same": setting.same,
            "family": setting.family,
            "threshold": setting.threshold,
            "spec": setting.spec.to_dict(),
            "best": setting.name in best,
            **asdict(outcome),
        }
        for setting, outcome in outcomes
    ]
    return dict(plain({**read_data(dump), "settings": settings, "left_out": tried.left_out}))


def print_what_if(out: Any, dump: Dump, tried: WhatIf) -> None:
    """Print what every setting makes of a dump."""
    outcomes = tried.outcomes()
    print_read(out, dump)
    out.print(table("What is kept, and what it costs", SHORT_HEADS, [outcome_cells(*pair) for pair in outcomes]))
    for setting, _ in outcomes:
        if setting.same:
            out.print(f"{setting.name} is also {', '.join(setting.same)}", markup=False)
    for note in dict.fromkeys(outcome.note for _, outcome in outcomes if outcome.note):
        out.print(f"! {note}", markup=False, style="yellow")
    out.print(f"no other is better in both bias and variance: {', '.join(pareto(outcomes))}", markup=False)
    if tried.left_out:
        out.print(f"{len(tried.left_out)} presets need more than the dump: {', '.join(tried.left_out)}", markup=False)
