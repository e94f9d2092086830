"""The page of `what-if`: the best settings with a reason each, the Pareto-optimal ones; the rest is folded."""

from __future__ import annotations

from collections.abc import Sequence

from ..best_settings import BestSetting, best_settings
from ..doctor.cause import counted
from ..read.dump import Source
from ..what_if import SettingResult, WhatIf, pareto
from . import charts
from .content import (
    ABOUT_BEST,
    ABOUT_D,
    ABOUT_SUGGESTION,
    OUTCOME_HEADS,
    PARETO,
    Table,
    outcome_cells,
)
from .html import Child, Html, element
from .parts import card, drawn, folded, page, problem_cards, section, table

# Names of further settings that are listed beside a best one.
MOST_ALIKE = 6
MEANING = (
    "Bias is how far weights are from the exact ratios on average; variance is how uneven they are. No bound: no bias. "
    "Equal weights: no variance."
)


def _suggestion(what_if: WhatIf) -> Child:
    found = what_if.suggestion()
    if found is None:
        return ()
    items = element("ul", [element("li", sentence) for sentence in found.sentences])
    return section("Bounds for these sequences", element("p", f"{ABOUT_SUGGESTION}:", class_="of"), items)


def what_if_page(source: Source, what_if: WhatIf) -> str:
    """Return the page of `what-if`: the result of every setting."""
    outcomes = what_if.outcomes()
    best = pareto(outcomes)
    rows = [
        [" = ".join((setting.name, *setting.same)), *outcome_cells(setting, outcome)[1:]]
        for setting, outcome in outcomes
    ]
    marked = frozenset(i for i, (setting, _) in enumerate(outcomes) if setting.name in best)
    by_name = {setting.name: (setting, outcome) for setting, outcome in outcomes}
    named = [(str(i), name, *_numbers(by_name[name][1])) for i, name in enumerate(best, 1)]
    notes = dict.fromkeys(outcome.note for _, outcome in outcomes if outcome.note)
    left_out = table(Table(("spec", "not tried, because"), list(what_if.left_out.items()), text=2))
    first = best_settings(outcomes, what_if.sequences)
    return page(
        f"What if: {source.name}",
        f"{source.where}: {counted(what_if.sequences, 'sequence')}, {len(outcomes)} settings tried. {ABOUT_D} "
        f"{MEANING}",
        [
            problem_cards(source),
            section(
                "Look at these first",
                element("p", f"{ABOUT_BEST}.", class_="of"),
                [_card(i, one, one.setting.name in best) for i, one in enumerate(first, 1)],
                map(card, notes),
            ),
            _suggestion(what_if),
            section(
                "Bias and variance",
                element(
                    "div",
                    charts.trade_off(outcomes, best),
                    element(
                        "div",
                        element("p", f"{PARETO}, by their numbers in the chart:", class_="of"),
                        table(Table(("", "setting", "kept", "ESS", "bias", "variance"), named, text=2)),
                    ),
                    class_="beside",
                ),
            ),
            section(
                "The rest",
                folded("What each threshold keeps", drawn(charts.thresholds(outcomes))),
                folded(f"All {len(outcomes)} settings", table(Table(OUTCOME_HEADS, rows), best=marked)),
                folded("Presets that were not tried", left_out),
            ),
        ],
    )


def _numbers(outcome: SettingResult) -> list[str]:
    return [
        f"{100.0 * outcome.tokens_kept:.3g} %",
        *(f"{value:.2g}" for value in (outcome.ess, outcome.bias, outcome.variance)),
    ]


def _card(rank: int, best: BestSetting, optimal: bool) -> Html:
    """Return a card for one of the best settings."""
    others = dict.fromkeys((*best.setting.same, *best.alike))
    listed: Sequence[str] = list(others)[:MOST_ALIKE]
    more = f" and {len(others) - len(listed)} more" if len(others) > len(listed) else ""
    return element(
        "div",
        element("span", str(rank), class_="rank"),
        element(
            "div",
            element("b", best.setting.name),
            element("span", "Pareto-optimal", class_="chip") if optimal else (),
            element("div", best.does),
            element("div", best.reason, class_="soft"),
            element("div", f"Same result here: {', '.join(listed)}{more}", class_="soft alike") if listed else (),
        ),
        class_="best",
    )
