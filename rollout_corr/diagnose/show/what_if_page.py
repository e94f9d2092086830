"""The page of `what-if`: the result of every setting."""

from __future__ import annotations

from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.show import charts
from rollout_corr.diagnose.show.content import ABOUT_D, OUTCOME_HEADS, Table, outcome_cells
from rollout_corr.diagnose.show.parts import card, drawn, folded, page, problem_cards, section, table
from rollout_corr.diagnose.what_if import WhatIf, pareto


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
            problem_cards(dump),
            *map(card, notes),
            section("Bias and variance", drawn([charts.trade_off(outcomes, best)])),
            section("Thresholds", drawn(charts.thresholds(outcomes))),
            section("Every setting", table(Table(OUTCOME_HEADS, rows), best=marked)),
            folded("Presets that were not tried", left_out),
        ],
    )
