"""Bounds that the batch decides, by a sort: what each rule of specs/bounds_of_batch.py means.

The values of the units that a criterion tests are put in order from the end that the bound keeps. Equal values are one
place of this order. The bound is the value at the first place where the rule does not go on, or, for a rule that does
not keep that, the number next to it on the side of those before. Where nothing lies beyond the bound the side is open.
NaN has no place in the order: it counts in nothing and is beyond every bound. Where groups decide, each is a batch.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ..specs.bounds_of_batch import Before, Counting, KeepESS, OfBatch, Side
from ..specs.correction import Criterion, Weight
from ..specs.thresholds import log_bound
from .bounds import Bound

# Beyond every log-ratio, which LARGEST_CLAMP bounds.
BEYOND_CLAMP = 42.0

# So often the stretch between its negative and itself is halved until its ends are neighbors in float32, wherever.
HALVINGS = 160

# From the end that a side keeps: what turns its order into an ascending one.
SIGN: dict[Side, float] = {"upper": 1.0, "lower": -1.0}


class BoundsOfBatch(Protocol):
    """Gives the bounds that the batch decides."""

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """The lower and the upper bound of a criterion with a rule; None for a side that is a number or open.

        Values are per token or per unit, a ratio's as its logarithm; those that are `tested` are the batch, or all.
        `groups` is the group of each, where groups decide.
        """

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """The logarithms of the lower and the upper bound of a weight with a rule; None likewise."""


class Sorted:
    """The bounds of a batch whose values are all at hand."""

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Sort the ratios."""
        values = numbers_of(log_ratio, among)
        found = {side: bound_of(rule, side, ordered_of(weight, rule, values)) for side, rule in weight.rules.items()}
        return found.get("lower"), found.get("upper")

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Sort the values."""
        found: dict[Side, Tensor] = {}
        for side, rule in criterion.rules.items():
            if not rule.by_group or groups is None:
                found[side] = bound_of(rule, side, numbers_of(value, tested))
                continue
            found[side] = torch.full_like(value, torch.nan)
            for group in groups.unique():
                here = groups == group
                among = here if tested is None else tested & here
                found[side] = torch.where(here, bound_of(rule, side, numbers_of(value, among)), found[side])
        return found.get("lower"), found.get("upper")


def numbers_of(x: Tensor, among: Tensor | None) -> Tensor:
    """[n]: the values among some, and NaN for all others, which has no place in the order."""
    return (x if among is None else torch.where(among, x, torch.nan)).reshape(-1)


def bound_of(rule: OfBatch, side: Side, values: Tensor) -> Tensor:
    """The bound of any rule, 0-d; infinite where the side is open."""
    if isinstance(rule, KeepESS):
        return by_bisection(rule, values)
    assert isinstance(rule, Counting)
    return by_sort(rule, side, values)


def by_sort(rule: Counting, side: Side, values: Tensor) -> Tensor:
    """The bound, 0-d in the dtype of the values, [n], where NaN counts in nothing; infinite where the side is open."""
    if not values.shape[0]:
        return SIGN[side] * values.new_full((), math.inf)
    places = torch.arange(values.shape[0], device=values.device)
    count = values.isnan().logical_not_().sum()
    # Behind all numbers, infinite ones among them, whatever is NaN.
    x = (SIGN[side] * values).sort().values.nan_to_num(math.inf, math.inf, -math.inf)
    kept = torch.searchsorted(x, x, right=True).minimum(count)
    amount = rule.amount(SIGN[side] * x)
    if amount is not None:
        amount = amount.cumsum(0).gather(0, (kept - 1).clamp(min=0)).floor().long()
    goes_on = rule.goes_on(Before(kept, amount, count.expand_as(kept)), side)
    place = (goes_on & (places < count)).sum()
    last = place.clamp(max=values.shape[0] - 1)[None]
    bound, passes = x.gather(0, last)[0], kept.gather(0, last)[0] < count
    if not rule.KEEPS_LAST:
        bound = torch.where(place > 0, bound.nextafter(bound.new_full((), -math.inf)), bound)
        passes = passes | ((place > 0) & (place < count))
    return SIGN[side] * torch.where(passes, bound, math.inf)


def ordered_of(weight: Weight, rule: OfBatch, log_ratio: Tensor) -> Tensor:
    """The values that a rule of a weight reads: a sample size is taken after the lower bound."""
    low = log_bound(weight.low)
    return log_ratio if low is None or not isinstance(rule, KeepESS) else log_ratio.clamp(min=low)


def float32_above(x: Tensor) -> Tensor:
    """The smallest float32 that is not below x."""
    found = x.float()
    return found if x.dtype == torch.float32 else torch.where(found < x, found.nextafter(found + torch.inf), found)


def weights_of(log_ratio: Tensor) -> Tensor:
    """Weights, float32 numbers in float64: neither a device nor a place in memory shows in them."""
    return log_ratio.double().exp().float().double()


def by_bisection(rule: KeepESS, log_ratio: Tensor) -> Tensor:
    """The largest float32 c for which weights clamped at exp(c) have the sample size that a rule keeps.

    Let u_i = min(w_i, b) be n weights clamped at b, m of them above b, S and Q the sums of u_i and u_i^2, and
    E = S^2 / (n Q) the sample size. Where no w_i equals b, dS/db = m and dQ/db = 2 m b, so

        d(log E)/db = 2 m / S - 2 m b / Q = 2 m (Q - b S) / (S Q), and Q - b S = sum of u_i (u_i - b) <= 0:

    E is continuous and never rises with b. Below the smallest weight all u_i are b, and E is 1, so any floor below 1 is
    reached, up to one bound and nowhere beyond it; it need not be one of the weights. Where it is reached without a
    bound, and where there is no weight, the side is open. Equal weights are clamped together. A ratio takes part as
    the smallest float32 that is not below its logarithm, a weight as the float32 nearest to the exp of that.

    Where weights above b become 0 instead, E is no such function: of the weights 1, 10, 10 it is 1/3, then 0.69. Such
    weights are refused.

    Args:
        rule: The rule.
        log_ratio: [n] float32 or float64, within +-LARGEST_CLAMP; NaN counts in nothing.
    """
    x = float32_above(log_ratio)
    n = x.isnan().logical_not_().sum().double()

    def reaches(bound: Tensor) -> Tensor:
        weights = weights_of(torch.minimum(x, bound)).nan_to_num(0.0)
        return rule.reached(weights.sum(), weights.square().sum(), n)

    low, high = (x.new_full((), end) for end in (-BEYOND_CLAMP, BEYOND_CLAMP))
    is_open = reaches(high)
    for _ in range(HALVINGS):
        middle = ((low.double() + high.double()) / 2.0).float()
        # Two neighbors of different size may have no float32 halfway. Between neighbors this is `high`, as it was.
        middle = torch.where((middle > low) & (middle < high), middle, low.nextafter(high))
        reached = reaches(middle)
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return torch.where(is_open, math.inf, low)


def beyond(value: Tensor, bounds: tuple[Bound, Bound]) -> Tensor:
    """Bool: a value beyond one of the bounds that the batch decided, 0-d or one for each; NaN is beyond any.

    They are of the dtype of the values, so nothing is rounded.
    """
    low, high = bounds
    if low is None:
        # No NaN passes a comparison.
        return value.isnan() if high is None else (value <= high).logical_not_()
    passed = value >= low
    return (passed if high is None else passed & (value <= high)).logical_not_()
