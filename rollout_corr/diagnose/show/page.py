"""HTML pages that load nothing: no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

from rollout_corr.diagnose.doctor.cause import Finding
from rollout_corr.diagnose.doctor.diagnosis import is_healthy
from rollout_corr.diagnose.measure.profiles import Row
from rollout_corr.diagnose.measure.worst_tokens import WorstToken
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.show import charts
from rollout_corr.diagnose.show.content import (
    ABOUT_D,
    AXES,
    HEALTHY,
    KEYS,
    OUTCOME_HEADS,
    Named,
    Reported,
    Table,
    fields_of,
    levels_table,
    metrics_table,
    named,
    outcome_cells,
    problems_title,
)
from rollout_corr.diagnose.show.style import STYLE
from rollout_corr.diagnose.what_if import WhatIf, pareto


def page(title: str, of: str, parts: Iterable[str]) -> str:
    """Return a whole page: a title, a line that says what it is about, and its parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="of">{escape(of)}</p>\n' + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and its content."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def drawn(figures: Iterable[str]) -> str:
    """Return charts, side by side where there is room."""
    return '<div class="charts">' + "\n".join(figures) + "</div>"


def table(content: Table, best: frozenset[int] = frozenset()) -> str:
    """Return a table; `best` are the indices of rows to emphasise."""

    def cells(kind: Literal["th", "td"], row: Sequence[str]) -> str:
        mark = ' class="text"'
        return "".join(f"<{kind}{mark if i < content.text else ''}>{escape(x)}</{kind}>" for i, x in enumerate(row))

    rows = (f"<tr{' class=best' if i in best else ''}>{cells('td', row)}</tr>\n" for i, row in enumerate(content.rows))
    return _wide(cells("th", content.heads), "".join(rows))


def _wide(heads: str, body: str) -> str:
    """Return a table that scrolls sideways where the page is narrow."""
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def _problems(dump: Dump) -> str:
    if not dump.problems.count:
        return ""
    items = "".join(f"<li>{escape(str(problem))}</li>" for problem in dump.problems.shown)
    return f'<div class="card error"><b>{problems_title(dump)}</b><ul>{items}</ul></div>'


def finding_cards(findings: Sequence[Finding], name: str = "") -> str:
    """Return a card for every finding of the doctor; `name` is the dump's, where the page has two."""
    of = f"{escape(name)}: " if name else ""
    cards = []
    if is_healthy(findings):
        cards.append(f'<div class="card good">{of}<b>healthy</b>: {HEALTHY}</div>')
    for finding in findings:
        evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
        cards.append(
            f'<div class="card {finding.severity}">{of}<b>{finding.severity}: {escape(finding.title)}</b> '
            f"<code>{finding.name}</code><ul>{evidence}</ul>{escape(finding.advice)}</div>"
        )
    return "\n".join(cards)


def _card(text: str) -> str:
    return f'<div class="card warning">{escape(text)}</div>'


def _axes(dumps: Named) -> list[str]:
    """Draw D along every axis that one of the dumps has."""
    profiles = [(name, measured.profiles()) for name, measured in dumps]
    figures = []
    for axis in dict.fromkeys(axis for _, found in profiles for axis in found):
        series: list[tuple[str, Sequence[Row]]] = [(name, found[axis]) for name, found in profiles if axis in found]
        label = AXES.get(axis, axis)
        if axis in ("position", "length"):
            figures.append(charts.axis_chart(f"by {label}", label, series, log=True))
        elif axis in ("steps", "turn") or max(len(rows) for _, rows in series) > 24:
            figures.append(charts.axis_chart(f"by {label}", label, series, log=False))
        else:
            figures.append(charts.category_chart(f"by {label}", label, series))
    return figures


def _worst(tokens: Sequence[WorstToken]) -> str:
    """Return a table of the worst tokens among their neighbours, shaded by |D|."""
    rows = []
    for token in tokens:
        shown = token.tokens or tuple("nan" if d is None else f"{d:+.2g}" for d in token.context)
        spans = []
        for i, (text, d) in enumerate(zip(shown, token.context, strict=True)):
            shade = 100 if d is None else round(100 * min(1.0, abs(d) / 5.0))
            at = ' class="at"' if i == token.at else ""
            says = "not finite" if d is None else f"D {d:.4g}"
            colour = f"background:color-mix(in srgb, var(--error) {shade // 2}%, transparent)"
            spans.append(f'<span{at} title="{says}" style="{colour}">{escape(text)}</span>')
        more = f", turn {token.turn}" if token.turn else ""
        more += f", version {token.version}" if token.version is not None else ""
        rows.append(
            f'<tr><td class="text">{token.record}:{token.position}{more}</td><td>{token.d:.4g}</td>'
            f"<td>{token.train_logp:.4g}</td><td>{token.rollout_logp:.4g}</td>"
            f'<td class="text context">{" ".join(spans)}</td></tr>'
        )
    shown_as = "tokens around it" if any(token.tokens for token in tokens) else "D around it"
    heads = (
        f'<th class="text">record:position</th><th>D</th><th>train</th><th>rollout</th><th class="text">{shown_as}</th>'
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def report_page(reported: Sequence[Reported]) -> str:
    """Return the page of `report`: one dump, or two side by side."""
    dump, measured, _ = reported[0]
    dumps = named(reported)
    parts = []
    for (name, each), (one, _, findings) in zip(dumps, reported, strict=True):
        parts += [_problems(one), finding_cards(findings, name if len(reported) > 1 else "")]
        parts += map(_card, each.warnings())
    parts += [
        section("Mismatch", table(metrics_table(dumps, KEYS))),
        section("Distribution of D", drawn(charts.histograms(dumps))),
        section("Train against rollout", drawn(charts.densities(dumps))),
        section("Where it differs", drawn(_axes(dumps))),
        section("Weights and rejection", table(levels_table(dumps)), drawn([charts.kept(dumps)])),
    ]
    for name, each in dumps:
        if each.worst:
            parts.append(section(f"Worst tokens{f': {name}' if len(dumps) > 1 else ''}", _worst(each.worst)))
    parts.append(f"<details><summary>All metrics</summary>{table(metrics_table(dumps, measured.metrics()))}</details>")
    paths = " against ".join(str(one.path) for one, _, _ in reported)
    return page("Train against rollout", f"{paths} ({fields_of(dump)}). {ABOUT_D}", parts)


def what_if_page(dump: Dump, what_if: WhatIf) -> str:
    """Return the page of `what-if`: the result of every setting."""
    outcomes = what_if.outcomes()
    best = pareto(outcomes)
    rows = [
        [" = ".join((setting.name, *setting.same)), *outcome_cells(setting, outcome)[1:]]
        for setting, outcome in outcomes
    ]
    marked = frozenset(i for i, (setting, _) in enumerate(outcomes) if setting.name in best)
    notes = dict.fromkeys(outcome.note for _, outcome in outcomes if outcome.note)
    left_out = table(Table(("preset", "not tried, because"), list(what_if.left_out.items()), text=2))
    return page(
        "What if",
        f"{dump.path}. {ABOUT_D}",
        [
            _problems(dump),
            *map(_card, notes),
            section("Bias and variance", drawn([charts.trade_off(outcomes, best)])),
            section("Thresholds", drawn(charts.thresholds(outcomes))),
            section("Every setting", table(Table(OUTCOME_HEADS, rows), best=marked)),
            f"<details><summary>Presets that were not tried</summary>{left_out}</details>",
        ],
    )
