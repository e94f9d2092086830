"""Bounds that the batch decides, by a sort: what each rule of spec/bounds_of_batch.py means.

The values of the units that a criterion tests are put in order from the end that the bound keeps. Equal values are one
place of this order. The bound is the value at the first place where the rule does not go on, or, for a rule that does
not keep that, the number next to it on the side of those before. Where the rule goes on to the end the side is open.
NaN has no place in the order: it counts in nothing and is beyond every bound.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from rollout_corr.definition.bounds import Bound
from rollout_corr.spec.bounds_of_batch import Before, OfBatch, Side
from rollout_corr.spec.correction import Criterion

# From the end that a side keeps: what turns its order into an ascending one.
SIGN: dict[Side, float] = {"upper": 1.0, "lower": -1.0}


class BoundsOfBatch(Protocol):
    """Gives the bounds that the batch decides."""

    def of(self, criterion: Criterion, value: Tensor, tested: Tensor | None) -> tuple[Bound, Bound]:
        """Give the lower and the upper bound of a criterion; None for a side that is a number or open.

        Args:
            criterion: One with a rule.
            value: Its value per token or per unit, a ratio as its logarithm.
            tested: Bool of the same shape: whose values are the batch; None: all.
        """


class Sorted:
    """The bounds of a batch of which all values are at hand."""

    def of(self, criterion: Criterion, value: Tensor, tested: Tensor | None) -> tuple[Bound, Bound]:
        """Sort the values."""
        values = value.reshape(-1) if tested is None else value.expand(tested.shape)[tested]
        found = {side: by_sort(rule, side, values) for side, rule in criterion.rules.items()}
        return found.get("lower"), found.get("upper")


def by_sort(rule: OfBatch, side: Side, values: Tensor) -> Tensor:
    """The bound, 0-d in the dtype of the values; infinite where the side is open.

    Args:
        rule: The rule.
        side: The side that it bounds.
        values: [n] float32 or float64.
    """
    x = (SIGN[side] * values[~values.isnan()]).sort().values
    kept = torch.searchsorted(x, x, right=True)
    amount = rule.amount(SIGN[side] * x)
    if amount is not None and x.shape[0]:
        amount = amount.cumsum(0)[kept - 1].floor().long()
    goes_on = rule.goes_on(Before(kept, amount, torch.full_like(kept, x.shape[0])), side)
    place = int(goes_on.sum())
    if place == x.shape[0]:
        return SIGN[side] * x.new_full((), math.inf)
    bound = x[place]
    if not rule.KEEPS_LAST and place > 0:
        bound = bound.nextafter(bound.new_full((), -math.inf))
    return SIGN[side] * bound


def beyond(value: Tensor, bounds: tuple[Bound, Bound]) -> Tensor:
    """Bool: a value beyond one of the bounds that the batch decided, 0-d tensors; NaN is beyond any.

    They are of the dtype of the values, so nothing is rounded.
    """
    low, high = bounds
    passed = ~value.isnan()
    if low is not None:
        passed = passed & (value >= low)
    return ~(passed if high is None else passed & (value <= high))
