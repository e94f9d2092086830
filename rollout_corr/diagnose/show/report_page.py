"""The page of `report`: the cause and its picture, five numbers, then all views, with the cause's unfolded."""

from __future__ import annotations

from collections.abc import Sequence

from ..doctor.cause import DISTRIBUTION, TRAIN, WORST, Finding, counted, percent
from ..doctor.diagnosis import Diagnosed, first_views, is_healthy, views_of
from ..measure.measurement import Measurement
from ..measure.profiles import Row
from ..measure.worst_tokens import WorstToken
from . import charts
from .content import (
    AXES,
    KEYS,
    Named,
    around,
    command_of,
    made_by,
    metrics_table,
    named,
    provenance,
    tiles,
    unit_of,
    weights_table,
)
from .html import Child, Html, element
from .parts import card, drawn, finding_card, folded, healthy_card, page, problem_cards, strip, table, tile_row
from .style import SHADES
from .visible import MOST_OF_TOKEN, visible

# Records that are shown, of these unfolded, and tokens of each.
MOST_RECORDS, UNFOLDED, MOST_TOKENS = 5, 2, 3
SECTIONS = {
    TRAIN: "Train against rollout",
    "axes": "Where it differs",
    WORST: "Worst records",
    DISTRIBUTION: "Distribution of D",
    "weights": "Importance weights",
    "numbers": "All numbers",
}


def report_page(diagnoses: Sequence[Diagnosed]) -> str:
    """Return the page of `report`: one dump, or two side by side."""
    dumps, several = named(diagnoses), len(diagnoses) > 1
    findings = [finding for one in diagnoses for finding in one.findings]
    axes, densities = (
        _axes(dumps, findings),
        charts.densities(dumps, [any(f.name == "temperature" for f in one.findings) for one in diagnoses]),
    )
    distributions = charts.distributions(dumps)
    pictures = dict(axes)
    if any(each.evidence.finite for _, each in dumps):
        pictures |= {TRAIN: densities[0], DISTRIBUTION: distributions[0]}
    if several:
        tops: Child = [
            element("div", element("h2", name), _top(one, {})) for (name, _), one in zip(dumps, diagnoses, strict=True)
        ]
    else:
        tops = _top(diagnoses[0], pictures)
        if TRAIN not in pictures:
            densities = [*densities[1:], distributions[0]]
        axes = {axis: figure for axis, figure in axes.items() if axis in pictures}
    worst = [_worst_records(each) for _, each in dumps if each.worst]
    content: dict[str, Child] = {
        TRAIN: drawn(densities),
        "axes": drawn([*axes.values()]) if axes else (),
        WORST: element("div", worst, class_="columns") if several else worst,
        DISTRIBUTION: drawn(distributions),
        "weights": table(weights_table(dumps)),
        "numbers": (
            table(metrics_table(dumps, KEYS)),
            folded("All metrics", table(metrics_table(dumps, diagnoses[0].measured.metrics()))),
        ),
    }
    wanted = [view if view in content else "axes" for view in first_views(findings) if view in (*axes, *content)]
    # Without a finding all pictures are open.
    opened = dict.fromkeys(wanted if findings else (TRAIN, "axes", DISTRIBUTION))
    order = [view for view in dict.fromkeys((*opened, *content)) if content[view]]
    parts: list[Child] = [
        element("div", tops, class_="columns") if several else tops,
        tile_row(*map(tiles, diagnoses)),
        [folded(element("h2", SECTIONS[view]), content[view], opened=view in opened) for view in order],
    ]
    of = [strip(provenance(one)) for one in diagnoses]
    return page(" against ".join(name for name, _ in dumps), [*of, strip(made_by(command_of(diagnoses)))], parts)


def _top(one: Diagnosed, pictures: dict[str, Html]) -> list[Child]:
    """Return what was found, each with the picture that shows it, which is taken; and what could not be read."""
    parts: list[Child] = [healthy_card(one.source)] if is_healthy(one.findings) else []
    for finding in one.findings:
        view = next((view for view in views_of(finding) if view in pictures), None)
        parts.append(finding_card(finding, () if view is None or finding.severity == "note" else pictures.pop(view)))
    # Where something was found, it says the same and more.
    parts += map(card, one.measured.mismatch_warnings() if is_healthy(one.findings) else ())
    return [*parts, problem_cards(one.source)]


def _axes(dumps: Named, findings: Sequence[Finding]) -> dict[str, Html]:
    """Draw D along every axis that one of the dumps has, those of the findings first."""
    profiles = [(name, measured.profiles()) for name, measured in dumps]
    first = first_views(findings)
    start = next((one.numbers["from_position"] for one in findings if "from_position" in one.numbers), None)
    figures = {}
    for axis in sorted(
        dict.fromkeys(axis for _, found in profiles for axis in found), key=lambda axis: axis not in first
    ):
        series: list[tuple[str, Sequence[Row]]] = [(name, found[axis]) for name, found in profiles if axis in found]
        label = visible(AXES.get(axis, axis), MOST_OF_TOKEN)
        log = axis in ("position", "length")
        bars = not log and axis not in ("steps", "turn") and max(len(rows) for _, rows in series) <= 24
        mark = (start, f"from {start:,.0f}") if axis == "position" and start is not None else None
        figures[axis] = charts.axis_chart(f"by {label}", label, series, unit_of(axis), log=log, named=bars, mark=mark)
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
            element(
                "div",
                element("span", f"token {token.position}: D {token.d:+.3g}", class_="where"),
                element("span", f"train {token.train_logp:.3g}, rollout {token.rollout_logp:.3g}", class_="soft"),
                element("div", _context(token), class_="context"),
            )
            for token in tokens
        ]
        if tokens and not any(token.tokens for token in tokens):
            lines.append(element("div", f"In the lines: {around(tokens)}", class_="soft"))
        title = f"record {one.record}{f' of {one.file}' if several else ''}"
        found.append(
            element("div", element("b", title), " ", element("span", says, class_="soft"), lines, class_="record")
        )
    rest = found[UNFOLDED:]
    return element(
        "div",
        found[:UNFOLDED],
        folded(f"{counted(len(rest), 'more record')}", rest) if rest else (),
    )


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
