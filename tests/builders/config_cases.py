"""Tables of cases for the tests of configurations and presets, and short words for the Specs that they expect."""

from __future__ import annotations

import math
import re
from typing import Any

from rollout_corr.specs.correction import Criterion, Spec, Weight

VERL = {"report": ("native", "verl")}
XTUNER = {"report": ("native", "xtuner")}


def ratio(
    lower: float | None = None, upper: float | None = None, reduce: str | None = None, **more: object
) -> Criterion:
    over = "token" if reduce is None else "sequence"
    return Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, **more)


def option(label: str, lower: float | None = None, upper: float | None = None) -> Criterion:
    """Make the criterion of a verl rejection option from its name, with bounds in the statistic's own space."""
    over, *reduce, stat = label.split("_")
    return Criterion(
        stat,
        over="token" if over == "token" else "sequence",
        reduce=reduce[0] if reduce else None,
        lower=lower,
        upper=upper,
        label=label,
        token_clamp=20.0,
    )


def k1(label: str, lower: float, upper: float) -> Criterion:
    """A k1 option of verl, its bounds given as ratios."""
    return option(label, math.log(lower), math.log(upper))


VETO = ratio(1e-4, drop="sequence", label="veto")

# The words of an expected Spec in a table.
WORDS = {"Spec": Spec, "Weight": Weight, "Criterion": Criterion, "VETO": VETO}
WORDS |= {"ratio": ratio, "option": option, "k1": k1}


def rows(table: str) -> list[list[str]]:
    """Split a table into rows, and rows at " | " into columns. A row may go on in indented lines."""
    return [row.split(" | ") for row in re.sub(r"\n +", " ", table.strip()).splitlines()]


def error(text: str) -> tuple[type[Exception] | None, str]:
    """Read `TypeError MESSAGE` or `MESSAGE`: the kind of error, and a regex; "..." is anything, "$" the end."""
    kind, _, rest = text.partition(" ")
    kinds = {"ValueError": ValueError, "TypeError": TypeError}
    text = (rest if kind in kinds else text).strip()
    return kinds.get(kind), ".*".join(map(re.escape, text.removesuffix("$").split("..."))) + "$" * text.endswith("$")


def call(text: str) -> tuple[str, dict[str, Any]]:
    """Read `name(argument=value)`: the name, and the arguments."""
    name, _, arguments = text.partition("(")
    return name, eval(f"dict({arguments}", {"nan": math.nan})
