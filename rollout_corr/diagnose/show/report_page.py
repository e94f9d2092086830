"""The page of `report`: what is wrong, five numbers, distributions, the worst records; then everything else."""

from __future__ import annotations

from collections.abc import Sequence

from ..doctor.cause import counted, percent
from ..doctor.diagnosis import Diagnosed, is_healthy
from ..measure.measurement import Measurement
from ..measure.profiles import Row
from ..measure.worst_tokens import WorstToken
from . import charts
from .content import (
    ABOUT_D,
    AXES,
    KEYS,
    Named,
    fields_of,
    metrics_table,
    named,
    tiles,
    weights_table,
)
from .html import Child, Html, element
from .parts import (
    card,
    drawn,
    finding_cards,
    folded,
    page,
    problem_cards,
    section,
    table,
    tile_row,
    wide,
)
from .style import SHADES
from .visible import MOST_OF_TOKEN, visible

# Records that are shown, and tokens of each.
MOST_RECORDS, MOST_TOKENS = 5, 3


def report_page(diagnoses: Sequence[Diagnosed]) -> str:
    """Return the page of `report`: one dump, or two side by side."""
    dumps = named(diagnoses)
    several = len(diagnoses) > 1
    parts: list[Child] = []
    for (name, _), one in zip(dumps, diagnoses, strict=True):
        if several:
            parts.append(element("h2", name))
        parts += [tile_row(tiles(one.measured.metrics())), problem_cards(one.source), finding_cards(one.findings)]
        # Where something was found, it says the same and more.
        if is_healthy(one.findings):
            parts += map(card, one.measured.mismatch_warnings())
    parts.append(section("Distribution of D", drawn(charts.distributions(dumps))))
    for name, each in dumps:
        if each.worst:
            of = f": {name}" if several else ""
            parts.append(section(f"Worst records{of}", _worst_records(each)))
            parts.append(folded(f"The {len(each.worst)} worst tokens{of}", _worst_tokens(each.worst)))
    axes = _axes(dumps)
    parts += [
        section("Train against rollout", drawn(charts.densities(dumps))),
        section("Where it differs", drawn(axes)) if axes else (),
        section("Weights and rejection", table(weights_table(dumps)), drawn([charts.kept(dumps)]), _of_weights(dumps)),
        section(
            "More",
            folded("Tails of D", drawn(charts.tails(dumps))),
            folded("Mismatch in numbers", table(metrics_table(dumps, KEYS))),
            folded("All metrics", table(metrics_table(dumps, diagnoses[0].measured.metrics()))),
        ),
    ]
    title = " against ".join(name for name, _ in dumps) if several else dumps[0][0]
    paths = " against ".join(one.source.where for one in diagnoses)
    tokens = ", ".join(_size(each) for _, each in dumps)
    return page(title, f"{paths} ({fields_of(diagnoses[0].source)}): {tokens}. {ABOUT_D}", parts)


def _size(measured: Measurement) -> str:
    metrics = measured.metrics()
    return f"{counted(metrics['tokens'], 'token')} in {counted(metrics['sequences'], 'sequence')}"


def _of_weights(dumps: Named) -> Child:
    """Return the warnings of weights that nobody has chosen yet."""
    found = [
        card(f"{name}: {text}" if len(dumps) > 1 else text) for name, each in dumps for text in each.weight_warnings()
    ]
    return folded("Warnings for weights of each kind", found) if found else ()


def _axes(dumps: Named) -> list[Html]:
    """Draw D along every axis that one of the dumps has."""
    profiles = [(name, measured.profiles()) for name, measured in dumps]
    figures = []
    for axis in dict.fromkeys(axis for _, found in profiles for axis in found):
        series: list[tuple[str, Sequence[Row]]] = [(name, found[axis]) for name, found in profiles if axis in found]
        label = visible(AXES.get(axis, axis), MOST_OF_TOKEN)
        unit = "sequences" if axis == "length" else "tokens"
        if axis in ("position", "length"):
            figures.append(charts.axis_chart(f"by {label}", label, series, log=True, unit=unit))
        elif axis in ("steps", "turn") or max(len(rows) for _, rows in series) > 24:
            figures.append(charts.axis_chart(f"by {label}", label, series, log=False, unit=unit))
        else:
            figures.append(charts.category_chart(f"by {label}", label, series, unit))
    return figures


def _worst_records(measured: Measurement) -> list[Html]:
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
        lines = [
            element(
                "div",
                element("span", f"token {token.position}: D {token.d:+.3g}", class_="where"),
                element("span", f"train {token.train_logp:.3g}, rollout {token.rollout_logp:.3g}", class_="soft"),
                element("div", _context(token), class_="context"),
            )
            for token in measured.worst_of(one.file, one.record)[:MOST_TOKENS]
        ]
        title = f"record {one.record}{f' of {one.file}' if several else ''}"
        found.append(
            element("div", element("b", title), " ", element("span", says, class_="soft"), lines, class_="record")
        )
    return found


def _context(token: WorstToken) -> list[Child]:
    """Return a token among its neighbors, shaded by |D|."""
    shown = token.tokens or tuple("nan" if d is None else f"{d:+.2g}" for d in token.context)
    spans: list[Child] = []
    for i, (text, d) in enumerate(zip(shown, token.context, strict=True)):
        shade = SHADES if d is None else round(SHADES * min(1.0, abs(d) / 5.0))
        says = "not finite" if d is None else f"D {d:.4g}"
        kind = f"shade{shade} at" if i == token.at else f"shade{shade}"
        spans += [element("span", visible(text, MOST_OF_TOKEN), class_=kind, title=says), " "]
    return spans


def _worst_tokens(tokens: Sequence[WorstToken]) -> Html:
    """Return a table of the worst tokens among their neighbors, shaded by |D|."""
    rows = []
    for token in tokens:
        more = f", turn {token.turn}" if token.turn else ""
        more += f", version {token.version}" if token.version is not None else ""
        numbers = (f"{value:.4g}" for value in (token.d, token.train_logp, token.rollout_logp))
        rows.append(
            element(
                "tr",
                element("td", f"{token.record}:{token.position}{more}", class_="text"),
                [element("td", number) for number in numbers],
                element("td", _context(token), class_="text context"),
            )
        )
    shown_as = "tokens around it" if any(token.tokens for token in tokens) else "D around it"
    heads = [
        element("th", "record:position", class_="text"),
        *(element("th", head) for head in ("D", "train", "rollout")),
        element("th", shown_as, class_="text"),
    ]
    return wide(heads, rows)
