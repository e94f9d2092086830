"""The page of `what-if`: the verdict, the best settings with a reason each, the Pareto-optimal ones, then the rest."""

from __future__ import annotations

from collections.abc import Sequence

from ..best_settings import BestSetting, verdict_of
from ..doctor.cause import counted
from ..read.dump import Source
from ..what_if import SettingResult, WhatIf, pareto
from . import charts
from .content import (
    ABOUT_D,
    ABOUT_OUTCOMES,
    ABOUT_PARETO,
    ABOUT_SUGGESTION,
    ABOUT_TOO_LONG,
    OUTCOME_HEADS,
    Table,
    about_best,
    bias_cells,
    outcome_cells,
    pasted_lines,
)
from .html import Child, Html, element
from .parts import folded, page, problem_cards, section, table

# The kind of card that shows a verdict.
CARDS = {"broken": "error", "healthy": "good", "equal": "note", "better": "note"}
# How many further settings are named with a best one.
MOST_ALIKE = 6
MEANING = (
    "Bias is what remains wrong in a weighted mean of any number of samples, in standard deviations of what is "
    "averaged, with an interval of 95 %; variance is how uneven the weights are."
)


def _pasted(lines: Sequence[str]) -> Child:
    """Return lines to paste."""
    return element("div", [element("div", element("span", line)) for line in lines], class_="context") if lines else ()


def _suggestion(what_if: WhatIf) -> Child:
    found = what_if.suggestion()
    if found is None:
        return ()
    items = element("ul", [element("li", sentence) for sentence in found.sentences])
    pasted = [] if what_if.framework is None else found.to_paste(what_if.framework).splitlines()
    about = element("p", f"{ABOUT_SUGGESTION}:", class_="of")
    return section("Bounds for these sequences", about, items, _pasted(pasted))


def what_if_page(source: Source, what_if: WhatIf, sequences: float | None = None) -> str:
    """Return the page of `what-if`: the verdict, the best settings, and the result of every setting.

    Args:
        source: The dump.
        what_if: The settings over it.
        sequences: Number of sequences of a batch; None: the dump's.
    """
    outcomes, count = what_if.outcomes(), what_if.sequences if sequences is None else sequences
    verdict = verdict_of(what_if, outcomes, count)
    best = pareto(outcomes)
    rows = [
        [" = ".join((setting.name, *setting.same)), *outcome_cells(setting, outcome, count)[1:]]
        for setting, outcome in outcomes
    ]
    marked = frozenset(i for i, (setting, _) in enumerate(outcomes) if setting.name in best)
    by_name = {setting.name: (setting, outcome) for setting, outcome in outcomes}
    named = [(str(i), name, *_numbers(by_name[name][1])) for i, name in enumerate(best, 1)]
    too_long = any(outcome.too_long for _, outcome in outcomes)
    left_out = table(Table(("spec", "not tried, because"), list(what_if.left_out.items()), text=2))
    return page(
        f"What if: {source.name}",
        f"{source.where}: {counted(what_if.sequences, 'sequence')}, {len(outcomes)} settings tried. {ABOUT_D}",
        [
            element(
                "div",
                element("b", verdict.title),
                [element("div", sentence) for sentence in verdict.sentences],
                class_=f"card {CARDS[verdict.state]}",
            ),
            problem_cards(source),
            section(
                "Settings on broken data" if verdict.state == "broken" else "Look at these first",
                element("p", f"{about_best(count)}.", class_="of"),
                [_card(i, one, one.setting.name in best, what_if.framework) for i, one in enumerate(verdict.best, 1)],
            ),
            _suggestion(what_if),
            section(
                "Bias and variance",
                element("p", MEANING, class_="of"),
                element(
                    "div",
                    charts.trade_off(outcomes, best),
                    element(
                        "div",
                        element("p", f"{ABOUT_PARETO}, by their numbers in the chart:", class_="of"),
                        table(Table(("", "setting", "kept", "ESS", "bias, %", "95 %"), named, text=2)),
                    ),
                    class_="beside",
                ),
            ),
            section(
                "The rest",
                folded(
                    f"All {len(outcomes)} settings: {ABOUT_OUTCOMES}",
                    element("p", f"{ABOUT_TOO_LONG}.", class_="of") if too_long else (),
                    table(Table(OUTCOME_HEADS, rows), best=marked),
                ),
                folded("Presets that were not tried", left_out),
            ),
        ],
    )


def _numbers(outcome: SettingResult) -> list[str]:
    return [f"{100.0 * outcome.tokens_kept:.3g} %", f"{outcome.ess:.2g}", *bias_cells(outcome)]


def _card(rank: int, best: BestSetting, optimal: bool, framework: str | None) -> Html:
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
            _pasted(pasted_lines(best.setting, framework)),
            element("div", f"Same result here: {', '.join(listed)}{more}", class_="soft alike") if listed else (),
        ),
        class_="best",
    )
