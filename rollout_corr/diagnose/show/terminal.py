"""Results as tables and sentences in a terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_corr.diagnose.doctor.cause import Finding, Severity, counted
from rollout_corr.diagnose.doctor.diagnosis import is_healthy
from rollout_corr.diagnose.measure.measurement import Measurement
from rollout_corr.diagnose.measure.profiles import Row
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.problems import extra
from rollout_corr.diagnose.show.content import (
    ABOUT_D,
    AXES,
    HEALTHY,
    KEYS,
    PARETO,
    Reported,
    Table,
    fields_of,
    levels_table,
    metrics_table,
    named,
    outcome_cells,
    problems_title,
)
from rollout_corr.diagnose.what_if import WhatIf, pareto

# Longer axes are thinned out in the terminal; the page and --json have all rows.
MOST_ROWS = 16
# Characters of the longest bar, and worst tokens in the terminal.
BAR, MOST_WORST = 16, 10
STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
SHORT_HEADS = ("setting", "tokens", "seqs", "mean", "ESS", "bias", "var", "TxKL")


def _rich(module: str) -> Any:
    return extra(f"rich.{module}", "report", "printing results")


def console(stderr: bool = False) -> Any:
    """Return a rich console.

    Raises:
        DumpError: rich is not installed.
    """
    return _rich("console").Console(stderr=stderr, highlight=False)


def _print_table(out: Any, title: str, content: Table) -> None:
    box = _rich("box").SIMPLE_HEAD
    made = _rich("table").Table(title=title, title_justify="left", title_style="bold", box=box, padding=(0, 1, 0, 0))
    for i, head in enumerate(content.heads):
        made.add_column(head, justify="left" if i < content.text else "right", overflow="fold")
    for row in content.rows:
        made.add_row(*map(_rich("markup").escape, row))
    out.print(made)


def _print_read(out: Any, dump: Dump) -> None:
    """Print what was read and the problems of the rest."""
    out.print(f"{dump.path}: {fields_of(dump)}", markup=False)
    if dump.problems.count:
        out.print(f"{problems_title(dump)}:", markup=False, style="bold red")
        for problem in dump.problems.shown:
            out.print(f"  {problem}", markup=False, style="red")


def print_report(out: Any, reported: Sequence[Reported]) -> None:
    """Print the report of a dump. Of two dumps only the metrics are printed, side by side; the page has the rest."""
    for dump, _, _ in reported:
        _print_read(out, dump)
    out.print(ABOUT_D)
    measured = reported[0][1]
    dumps = named(reported)
    _print_table(out, "Mismatch", metrics_table(dumps, KEYS))
    if len(reported) == 1:
        _print_table(out, "Importance weights", levels_table(dumps))
        for axis, rows in measured.profiles().items():
            title = AXES.get(axis, axis)
            _print_table(out, f"|D| by {title}", _axis_table(title, rows))
        if measured.worst:
            _print_table(out, "Worst tokens", _worst_table(measured))
        for warning in measured.warnings():
            out.print(f"! {warning}", markup=False, style="yellow")
    for dump, _, findings in reported:
        for finding in findings:
            _print_title(out, finding, f"{dump.path}: " if len(reported) == 2 else "")


def _print_title(out: Any, finding: Finding, before: str) -> None:
    title = f"{before}{finding.severity}: {finding.title} [{finding.name}]"
    out.print(title, markup=False, style=STYLES[finding.severity])


def _thinned(rows: Sequence[Row]) -> Sequence[Row]:
    """Return at most MOST_ROWS rows, evenly spread, with the first and the last."""
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def _axis_table(title: str, rows: Sequence[Row]) -> Table:
    most = max(row.d_abs_mean for row in rows)
    cells = []
    for row in _thinned(rows):
        bar = "#" * round(BAR * row.d_abs_mean / most) if most else ""
        values = (f"{value:.3g}" for value in (row.d_abs_mean, row.d_mean, row.d_abs_max))
        cells.append((row.label, bar, *values, str(row.count)))
    return Table((title, "mean |D|", "", "mean D", "max |D|", "count"), cells, text=2)


def _worst_table(measured: Measurement) -> Table:
    rows = []
    for token in measured.worst[:MOST_WORST]:
        shown = token.tokens or ["nan" if d is None else f"{d:.2g}" for d in token.context]
        context = " ".join(f"[{text}]" if i == token.at else text for i, text in enumerate(shown))
        values = (f"{value:.4g}" for value in (token.d, token.train_logp, token.rollout_logp))
        rows.append((f"{token.record}:{token.position}", context, *values))
    around = "tokens" if any(token.tokens for token in measured.worst) else "D around it"
    return Table(("record:position", around, "D", "train", "rollout"), rows, text=2)


def print_findings(out: Any, dump: Dump, measured: Measurement, findings: Sequence[Finding]) -> None:
    """Print the findings of the doctor, the gravest first."""
    _print_read(out, dump)
    metrics = measured.metrics()
    out.print(
        f"{counted(metrics['tokens'], 'token')} in {counted(metrics['sequences'], 'sequence')}. {ABOUT_D} Mean |D| "
        f"{metrics['d_abs_mean']:.3g}, 99th percentile of |D| {metrics['abs_logp_p99']:.3g}, k3 "
        f"{metrics['kl_k3']:.3g} nats per token",
        markup=False,
    )
    if is_healthy(findings):
        out.print(f"healthy: {HEALTHY}", style="bold green")
    for i, finding in enumerate(findings, 1):
        out.print()
        _print_title(out, finding, f"{i}. ")
        for line in finding.evidence:
            out.print(f"   - {line}", markup=False)
        out.print(f"   -> {finding.advice}", markup=False)


def print_what_if(out: Any, dump: Dump, tried: WhatIf) -> None:
    """Print the result of every setting."""
    outcomes = tried.outcomes()
    _print_read(out, dump)
    rows = [outcome_cells(*one) for one in outcomes]
    _print_table(out, "Kept tokens and sequences, weights, bias and variance", Table(SHORT_HEADS, rows))
    for setting, _ in outcomes:
        if setting.same:
            out.print(f"{setting.name} is also {', '.join(setting.same)}", markup=False)
    for note in dict.fromkeys(outcome.note for _, outcome in outcomes if outcome.note):
        out.print(f"! {note}", markup=False, style="yellow")
    out.print(f"{PARETO}: {', '.join(pareto(outcomes))}", markup=False)
    for reason in dict.fromkeys(tried.left_out.values()):
        names = [name for name, other in tried.left_out.items() if other == reason]
        out.print(f"not tried, because {reason}: {', '.join(names)}", markup=False)
