"""The page of `report`: the cause and its picture, five numbers, then all views, with the cause's unfolded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import chain

import torch

from ..._version import __version__
from ...metrics.limits import BY_KEY, largest_state, ratio_state
from ..doctor.cause import DISTRIBUTION, TRAIN, WORST, Finding, counted, percent
from ..doctor.diagnosis import Diagnosed, first_views, is_healthy, views_of
from ..measure.measurement import UPPER, Measurement
from ..measure.worst_tokens import WorstToken
from ..read.dump import Dump
from . import charts
from .content import (
    AXES,
    HEALTHY,
    KEYS,
    MEANING_D,
    UNSEEN,
    Named,
    Table,
    around,
    fields_of,
    healthy_range,
    metrics_table,
    more_of,
    named,
    problems_title,
    weights_table,
)
from .html import Child, Html, document, element
from .style import SHADES, STYLE
from .visible import MOST_OF_TOKEN, visible

# Records that are shown, of these unfolded, and tokens of each.
MOST_RECORDS, UNFOLDED, MOST_TOKENS = 5, 2, 3
# Columns of a table that fits a phone.
NARROW = 4
SECTIONS = {
    TRAIN: "Train against rollout",
    "axes": "Where it differs",
    WORST: "Worst records",
    DISTRIBUTION: "Distribution of D",
    "weights": "Importance weights",
    "numbers": "All numbers",
}


# The numbers that a page begins with: metrics with a limit, or the mean ratio, and what a reader calls them.
TILES = {
    "kl_rollout_train_k3": "KL of a token (k3), nats",
    "logratio_abs_mean": "mean |D|, nats",
    "logratio_abs_max": "largest |D|, nats",
    "ratio_mean": "mean ratio exp(D)",
    "token/weight_ess": f"effective sample, token weights <= {UPPER:g}",
}
# Where a number lies: `State`, and two more.
WORDS = {"healthy": "healthy", "watch": "watch", "alarm": "alarm", "blind": "cannot see this", "none": "not measured"}


def report_page(diagnoses: Sequence[Diagnosed]) -> str:
    """Return the page of `report`: one dump, or two side by side."""
    dumps, several = named(diagnoses), len(diagnoses) > 1
    findings = [finding for one in diagnoses for finding in one.findings]
    axes = _axes(dumps, findings)
    fitted = [any(finding.name == "temperature" for finding in one.findings) for one in diagnoses]
    densities, distributions = charts.densities(dumps, fitted), charts.distributions(dumps)
    tops: Child
    if several:
        tops = [_div("", element("h2", name), _top(one, {})) for (name, _), one in zip(dumps, diagnoses, strict=True)]
    else:
        pictures = dict(axes)
        if dumps[0][1].evidence.finite:
            pictures |= {TRAIN: densities[0], DISTRIBUTION: distributions[0]}
        tops = _top(diagnoses[0], pictures)
        if TRAIN not in pictures:
            densities = [*densities[1:], distributions[0]]
        axes = {axis: figure for axis, figure in axes.items() if axis in pictures}
    worst = [_worst_records(each) for _, each in dumps if each.worst]
    metrics = metrics_table(dumps, diagnoses[0].measured.metrics())
    content: dict[str, Child] = {
        TRAIN: _div("charts", densities),
        "axes": _div("charts", axes.values()) if axes else (),
        WORST: _div("columns", worst) if several else worst,
        DISTRIBUTION: _div("charts", distributions),
        "weights": _table(weights_table(dumps)),
        "numbers": (_table(metrics_table(dumps, KEYS)), _folded("All metrics", _table(metrics))),
    }
    wanted = [view if view in content else "axes" for view in first_views(findings) if view in (*axes, *content)]
    # Without a finding all pictures are open.
    opened = dict.fromkeys(wanted if findings else (TRAIN, "axes", DISTRIBUTION))
    order = [view for view in dict.fromkeys((*opened, *content)) if content[view]]
    title = " against ".join(name for name, _ in dumps)
    return document(
        title,
        STYLE,
        element("h1", title),
        _div("of", *map(_strip, (*map(_provenance, diagnoses), _made_by(_command_of(diagnoses))))),
        _div("columns", tops) if several else tops,
        _tiles(diagnoses),
        [_folded(element("h2", SECTIONS[view]), content[view], opened=view in opened) for view in order],
    )


def _div(kind: str, *children: Child) -> Html:
    return element("div", *children, class_=kind)


def _folded(summary: Child, *parts: Child, opened: bool = False) -> Html:
    """Return parts that the reader folds and unfolds."""
    return element("details", element("summary", summary), parts, open="open" if opened else None)


def _strip(said: Iterable[tuple[str, str]]) -> Html:
    """Return terms and what they are; on a phone each is a line, and whole when it is touched."""
    return _div("strip", [element("span", element("b", term), text, tabindex="-1") for term, text in said])


def _table(content: Table) -> Html:
    """Return a table; on a phone a wide one has a block for each row."""
    kinds = ["text" if i < content.text else None for i in range(len(content.heads))]
    heads = [element("th", head, class_=kind) for head, kind in zip(content.heads, kinds, strict=True)]
    rows = [
        element(
            "tr",
            [
                element("td", shown, class_=kind, data_head=head)
                for shown, kind, head in zip(row, kinds, content.heads, strict=True)
            ],
        )
        for row in content.rows
    ]
    made = element("table", element("thead", element("tr", heads)), element("tbody", rows))
    return _div("wide stacked" if len(heads) > NARROW else "wide", made)


def _tiles(diagnoses: Sequence[Diagnosed]) -> Html:
    """Return numbers with their healthy ranges, in the color of where they lie; of two dumps, before and after."""
    found = []
    for key, name in TILES.items():
        numbers: list[Child] = []
        for one in diagnoses:
            value, state = _number(one, key)
            numbers += [" \u2192 "] if numbers else []
            numbers.append(element("b", value, class_=state))
        lies = element("span", WORDS[state], class_="state")
        healthy = element("span", f"healthy: {healthy_range(key, [one.measured.metrics()])}")
        found.append(
            _div(
                f"tile {state}",
                element("span", name, class_="name"),
                element("span", numbers, class_="values"),
                element("span", lies, healthy, class_="range"),
                element("code", key),
            )
        )
    return _div("tiles", found)


def _number(one: Diagnosed, key: str) -> tuple[str, str]:
    """Return a number of a dump, and where it lies."""
    metrics = one.measured.metrics()
    value, measured = metrics[key], metrics["tokens"] - metrics["tokens_nonfinite"]
    if measured <= 0:
        return "-", "none"
    state: str | None
    if key == "ratio_mean":
        state = ratio_state(value, metrics["ratio_std"], measured)
    elif key == "logratio_abs_max":
        state = largest_state(metrics, measured)
    else:
        state = BY_KEY[key.rpartition("/")[2]].state(value)
    # No number is green next to a finding: what lies in its healthy range there has not seen it.
    seen = state is not None and (state != "healthy" or is_healthy(one.findings))
    shown = f"{value:.3f}" if key == "ratio_mean" and value < 100.0 else f"{value:.3g}"
    return shown, state if seen and state else "blind"


def _top(one: Diagnosed, pictures: dict[str, Html]) -> list[Child]:
    """Return what was found, each with the pictures that show it, which are taken; and what could not be read."""
    parts: list[Child] = []
    if is_healthy(one.findings):
        unseen = () if "entropy" in one.source.fields else element("p", UNSEEN, class_="soft")
        parts.append(_div("card good", element("b", "healthy"), f": {HEALTHY}", unseen))
    for finding in one.findings:
        views = [] if finding.severity == "note" else [view for view in views_of(finding) if view in pictures]
        parts.append(_finding_card(finding, [pictures.pop(view) for view in views[:2]]))
    # Where something was found, it says the same and more.
    warnings = one.measured.mismatch_warnings() if is_healthy(one.findings) else []
    parts += [_div("card warning", warning) for warning in warnings]
    if one.source.problems.count:
        items = [element("li", str(problem)) for problem in one.source.problems.shown]
        parts.append(_div("card error", element("b", problems_title(one.source)), element("ul", items)))
    return parts


def _finding_card(finding: Finding, pictures: Sequence[Html]) -> Html:
    """Return a card for a finding of the doctor, with a picture next to its words, or two below them."""
    says = _div(
        "",
        *(element("b", f"{finding.severity}: {finding.title}"), " ", element("code", finding.name)),
        element("ul", [element("li", line) for line in finding.evidence]),
        element("p", finding.advice),
    )
    kind = f"card {finding.severity}"
    if len(pictures) == 1:
        return _div(f"{kind} found", says, pictures)
    return _div(kind, says, _div("charts", pictures) if pictures else ())


def _axes(dumps: Named, findings: Sequence[Finding]) -> dict[str, Html]:
    """Draw D along every axis that one of the dumps has, those of the findings first."""
    profiles = [(name, measured.profiles()) for name, measured in dumps]
    first = first_views(findings)
    start = next((one.numbers["from_position"] for one in findings if "from_position" in one.numbers), None)
    figures = {}
    every = dict.fromkeys(chain.from_iterable(found for _, found in profiles))
    for axis in sorted(every, key=lambda axis: axis not in first):
        series = [(name, found[axis]) for name, found in profiles if axis in found]
        label = visible(AXES.get(axis, axis), MOST_OF_TOKEN)
        log = axis in ("position", "length")
        unit: charts.Unit = "sequences" if axis == "length" else "tokens"
        bars = not log and axis not in ("steps", "turn") and max(len(rows) for _, rows in series) <= 24
        mark = (start, f"from {start:,.0f}") if axis == "position" and start is not None else None
        figures[axis] = charts.axis_chart(f"by {label}", label, series, unit, log=log, named=bars, mark=mark)
    return figures


def _worst_records(measured: Measurement) -> Html:
    """Return the records with the largest sums of k3, each with its worst tokens among their neighbors."""
    by_sequence = measured.evidence.by_sequence
    worst = by_sequence.worst[:MOST_RECORDS]
    several = len({one.file for one in worst}) > 1
    found = []
    for one in worst:
        says = (
            f"{percent(one.k3 / by_sequence.k3)} of k3, {counted(one.tokens, 'token')}, mean |D| "
            f"{one.logratio_abs_mean:.3g}, largest |D| {one.logratio_abs_max:.3g}"
        )
        tokens = measured.worst_of(one.file, one.record)[:MOST_TOKENS]
        lines = [
            _div(
                "",
                element("span", f"token {token.position}: D {token.d:+.3g}", class_="where"),
                element("span", f"train {token.train_logp:.3g}, rollout {token.rollout_logp:.3g}", class_="soft"),
                _div("context", _context(token)),
            )
            for token in tokens
        ]
        if tokens and not any(token.tokens for token in tokens):
            lines.append(_div("soft", f"In the lines: {around(tokens)}"))
        title = f"record {one.record}{f' of {one.file}' if several else ''}"
        found.append(_div("record", element("b", title), " ", element("span", says, class_="soft"), lines))
    rest = found[UNFOLDED:]
    return _div("", found[:UNFOLDED], _folded(f"{counted(len(rest), 'more record')}", rest) if rest else ())


def _context(token: WorstToken) -> list[Child]:
    """Return a token among its neighbors, shaded by |D|."""
    shown = token.tokens or tuple("nan" if d is None else f"{d:+.2g}" for d in token.context)
    spans: list[Child] = []
    for i, (text, d) in enumerate(zip(shown, token.context, strict=True)):
        shade = SHADES if d is None else round(SHADES * min(1.0, abs(d) / 5.0))
        says = "not finite" if d is None else f"D {d:.4g}"
        kind = f"shade{shade} at" if i == token.at else f"shade{shade}"
        spans += [element("span", visible(text, MOST_OF_TOKEN), class_=kind, data_says=says, tabindex="-1"), " "]
    return spans


# --- where it comes from


def _command_of(diagnoses: Sequence[Diagnosed]) -> str:
    """Return the command that makes a report again."""
    source = diagnoses[0].source
    if not isinstance(source, Dump):
        return "rc.report(train_logp, rollout_logp, ...)"
    words = ["rollout-corr", "report", *map(str, source.paths)]
    words += [word for other in diagnoses[1:] for word in ("--compare", other.source.where)]
    words += [word for name in source.wanted.by for word in ("--by", name)]
    words += [word for pair in source.wanted.roles.items() for word in ("--field", "=".join(pair))]
    return shlex.join(words + ([] if source.limit is None else ["--limit", str(source.limit)]))


def _provenance(diagnosis: Diagnosed) -> list[tuple[str, str]]:
    """Say where numbers come from: what was read, when it was written, which steps and versions are in it."""
    source, measured = diagnosis.source, diagnosis.measured
    metrics = measured.metrics()
    said = [("read", f"{source.where} ({fields_of(source)})"), *more_of(source)]
    with suppress(OSError):
        written = [file.stat().st_mtime for file in source.files]
        if written:
            said.append(("written", f"{datetime.fromtimestamp(max(written), timezone.utc):%Y-%m-%d %H:%M} UTC"))
    tokens, sequences = counted(metrics["tokens"], "token"), counted(metrics["sequences"], "sequence")
    said.append(("size", f"{tokens} in {sequences}"))
    for name in ("steps", "versions"):
        values = sorted(measured.columns[name].values)
        if values:
            more = f" to {values[-1]:.10g} ({len(values)} of them)" if len(values) > 1 else ""
            said.append((AXES[name] + "s" * (len(values) > 1), f"{values[0]:.10g}{more}"))
    return said


def _made_by(command: str) -> list[tuple[str, str]]:
    """Say what made a page."""
    return [
        ("made by", f"rollout-corr {__version__}, torch {torch.__version__}"),
        ("command", command),
        ("D", MEANING_D),
    ]
