"""Statistics by label of token weights of which all but a few are near 1, from those of D."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.facts import Named
from rollout_corr.definition.few import FewBounded
from rollout_corr.definition.near import Near


class Taken(NamedTuple):
    """Sums and maxima of the tokens of each unit, a sequence or a label, by name."""

    sums: Named
    maxima: Named


class OfUnits(NamedTuple):
    """Known facts of the tokens of each unit.

    Attributes:
        raw2: Sums of the squares of ratio - 1.
        of_d: The ends of D.
        added: Adds numbers of the few, [k] float64, to totals of their units.
        excess2: Gives the sums of the squares of ratio - 1 where the few have another ratio - 1, [k] float64.
    """

    raw2: Tensor
    of_d: Named
    added: Callable[[Tensor, Tensor], Tensor]
    excess2: Callable[[Tensor], Tensor]


def near_weights(near: Near, few: FewBounded, units: OfUnits, ends: tuple[float, float]) -> Taken:
    """Give the sums and ends of token weights where all but a few tokens are within the bounds, which clamp the rest.

    Args:
        near: The sums of all tokens.
        few: Those of the weight.
        units: What is known of each unit.
        ends: The smallest and the largest clamped D of all tokens.
    """
    low, high = few.bounds.low, few.bounds.high
    smallest, largest = ends
    nothing = torch.zeros_like(units.raw2)
    # None where no D is beyond the bound.
    high, low = None if high is None or largest <= high else high, None if low is None or smallest >= low else low
    sums = {
        "raw2": units.raw2,
        "weight2": units.raw2 if low is None and high is None else units.excess2(few.few),
        "tokens_above": nothing if high is None else units.added(nothing, (near.few > high).double()),
        "tokens_below": nothing if low is None else units.added(nothing, (near.few < low).double()),
    }
    least, most = (None if bound is None else bound - 1.0 for bound in (few.lower, few.upper))
    maxima: Named = {}
    for name, sign in (("max", 1.0), ("-min", -1.0)):
        # Rounded as the value of a token is; infinite where a unit has none.
        d = sign * units.of_d[f"{name}_d"]
        raw = d.clamp(-near.clamp, near.clamp).expm1().to(near.d.dtype).double()
        bounded = raw if least is None and most is None else raw.clamp(least, most).to(near.d.dtype).double()
        maxima[f"{name}_raw"] = torch.where(d.isfinite(), sign * raw, -torch.inf)
        maxima[f"{name}_weight"] = torch.where(d.isfinite(), sign * bounded, -torch.inf)
    return Taken(sums, maxima)
