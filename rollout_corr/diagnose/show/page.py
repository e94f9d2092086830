"""HTML pages that load nothing: no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Sequence
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
from rollout_corr.diagnose.show.html import Child, Html, document, element
from rollout_corr.diagnose.show.style import SHADES, STYLE
from rollout_corr.diagnose.show.visible import MOST_OF_TOKEN, visible
from rollout_corr.diagnose.what_if import WhatIf, pareto


def page(title: str, of: str, parts: Sequence[Child]) -> str:
    """Return a whole page: a title, a line that says what it is about, and its parts."""
    return document(title, STYLE, element("h1", title), element("p", of, class_="of"), parts)


def section(title: str, *parts: Child) -> Html:
    """Return a heading and its content."""
    return element("section", element("h2", title), parts)


def drawn(figures: Sequence[Html]) -> Html:
    """Return charts, side by side where there is room."""
    return element("div", figures, class_="charts")


def table(content: Table, best: frozenset[int] = frozenset()) -> Html:
    """Return a table; `best` are the indices of rows to emphasise."""

    def cells(kind: Literal["th", "td"], row: Sequence[str]) -> list[Html]:
        return [element(kind, x, class_="text" if i < content.text else None) for i, x in enumerate(row)]

    rows = [element("tr", cells("td", row), class_="best" if i in best else None) for i, row in enumerate(content.rows)]
    return _wide(cells("th", content.heads), rows)


def _wide(heads: Sequence[Html], rows: Sequence[Html]) -> Html:
    """Return a table that scrolls sideways where the page is narrow."""
    return element(
        "div", element("table", element("thead", element("tr", heads)), element("tbody", rows)), class_="wide"
    )


def _problems(dump: Dump) -> Child:
    if not dump.problems.count:
        return ()
    items = [element("li", str(problem)) for problem in dump.problems.shown]
    return element("div", element("b", problems_title(dump)), element("ul", items), class_="card error")


def finding_cards(findings: Sequence[Finding], name: str = "") -> list[Html]:
    """Return a card for every finding of the doctor; `name` is the dump's, where the page has two."""
    of = f"{name}: " if name else ""
    cards = []
    if is_healthy(findings):
        cards.append(element("div", of, element("b", "healthy"), f": {HEALTHY}", class_="card good"))
    for finding in findings:
        cards.append(
            element(
                "div",
                *(of, element("b", f"{finding.severity}: {finding.title}"), " ", element("code", finding.name)),
                *(element("ul", [element("li", line) for line in finding.evidence]), finding.advice),
                class_=f"card {finding.severity}",
            )
        )
    return cards


def _card(warning: str) -> Html:
    return element("div", warning, class_="card warning")


def _axes(dumps: Named) -> list[Html]:
    """Draw D along every axis that one of the dumps has."""
    profiles = [(name, measured.profiles()) for name, measured in dumps]
    figures = []
    for axis in dict.fromkeys(axis for _, found in profiles for axis in found):
        series: list[tuple[str, Sequence[Row]]] = [(name, found[axis]) for name, found in profiles if axis in found]
        label = visible(AXES.get(axis, axis), MOST_OF_TOKEN)
        if axis in ("position", "length"):
            figures.append(charts.axis_chart(f"by {label}", label, series, log=True))
        elif axis in ("steps", "turn") or max(len(rows) for _, rows in series) > 24:
            figures.append(charts.axis_chart(f"by {label}", label, series, log=False))
        else:
            figures.append(charts.category_chart(f"by {label}", label, series))
    return figures


def _worst(tokens: Sequence[WorstToken]) -> Html:
    """Return a table of the worst tokens among their neighbours, shaded by |D|."""
    rows = []
    for token in tokens:
        shown = token.tokens or tuple("nan" if d is None else f"{d:+.2g}" for d in token.context)
        spans: list[Child] = []
        for i, (text, d) in enumerate(zip(shown, token.context, strict=True)):
            shade = SHADES if d is None else round(SHADES * min(1.0, abs(d) / 5.0))
            says = "not finite" if d is None else f"D {d:.4g}"
            kind = f"shade{shade} at" if i == token.at else f"shade{shade}"
            spans += [element("span", visible(text, MOST_OF_TOKEN), class_=kind, title=says), " "]
        more = f", turn {token.turn}" if token.turn else ""
        more += f", version {token.version}" if token.version is not None else ""
        numbers = (f"{value:.4g}" for value in (token.d, token.train_logp, token.rollout_logp))
        rows.append(
            element(
                "tr",
                element("td", f"{token.record}:{token.position}{more}", class_="text"),
                [element("td", number) for number in numbers],
                element("td", spans, class_="text context"),
            )
        )
    shown_as = "tokens around it" if any(token.tokens for token in tokens) else "D around it"
    heads = [
        element("th", "record:position", class_="text"),
        *(element("th", head) for head in ("D", "train", "rollout")),
        element("th", shown_as, class_="text"),
    ]
    return _wide(heads, rows)


def report_page(reported: Sequence[Reported]) -> str:
    """Return the page of `report`: one dump, or two side by side."""
    dump, measured, _ = reported[0]
    dumps = named(reported)
    parts: list[Child] = []
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
    parts.append(element("details", element("summary", "All metrics"), table(metrics_table(dumps, measured.metrics()))))
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
            element("details", element("summary", "Presets that were not tried"), left_out),
        ],
    )
