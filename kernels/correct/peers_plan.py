"""Columns of slots and numbers of a plan that the peers' naming schemes bring."""

from __future__ import annotations

from typing import NamedTuple

from rollout_corr.kernels.correct.plan import Plan


class SlotColumns(NamedTuple):
    """Columns of the slot tables."""

    counts: tuple[str, ...]
    floats: tuple[str, ...]


def slot_columns(plan: Plan) -> SlotColumns:
    """Name the columns that `read` stores for every slot for the schemes of a plan."""
    counts = [
        f"skyrl/{test.index}/{side}"
        for test in plan.tests
        if test.role == "outlier"
        for side in ("over_high", "under_low")
    ]
    if "skyrl" in plan.schemes and plan.level == "token" and plan.has_upper:
        counts.append("skyrl/clipped")
    floats = ["d_beyond"] if {"verl", "xtuner"} & {*plan.schemes} else []
    floats += [f"verl/{test.index}/row" for test in plan.tests if test.role == "option" and test.over == "token"]
    return SlotColumns(tuple(counts), tuple(floats))


def same_numbers(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Pair bounds of schemes with those of the Spec that they repeat, so that these are compared with once.

    They are the bounds of the weight, but for a side that only a scheme has, and those of ratios of tokens. None for
    rows, where ptxas has registers for all, and spilled 32 bytes of `skyrl.tldr` for sm_100 without these.
    """
    if not plan.packed:
        return ()
    log, found = "log/token" if plan.level == "token" else "log", []
    for side in [side for side, there in (("lower", plan.has_lower), ("upper", plan.has_upper)) if there]:
        found += [("xtuner/ratio/" + side, side), *((f"{name}/{log}/{side}", f"log/{side}") for name in plan.schemes)]
    for criterion in plan.tests:
        if criterion.over == "token" and criterion.stat == "ratio" and criterion.role in ("veto", "outlier"):
            for side in (f"{criterion.index}/lower", f"{criterion.index}/upper"):
                of, _, end = side.partition("/")
                found += [(f"{name}/{of}/token/{end}", side) for name in plan.schemes]
    return tuple(pair for pair in found if pair[0] in plan.numbers)
