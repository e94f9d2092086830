"""Bounds that the batch decides, by a sort: what each rule of specs/rules.py means.

The values of the units that a criterion tests are put in order from the end that the bound keeps. Equal values are one
place of this order. Of a rule that counts the bound is the value at the first place where the rule does not go on, or,
for a rule that does not keep that, the number next to it on the side of those before. Where nothing lies beyond the
bound the side is open.
NaN has no place in the order: it counts in nothing and is beyond every bound. Where groups decide, each is a batch.

Its counts and sums are integers, so neither the order of equal values nor what lies between them changes a bit.
`by_sample_size` finds the bound of the rule that keeps an effective sample size. No value is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..specs.bounds_of_batch import WEIGHT, OfBatch, Place, Side
from ..specs.correction import Criterion, Weight
from ..specs.rules import Before, Counting, KeepESS
from ..specs.statistics import log_bound
from .bounds import Bound
from .tokens import GRID_OF_FRACTION

# Beyond every log-ratio, which LARGEST_CLAMP bounds.
BEYOND_CLAMP = 42.0

# From the end that a side keeps: what turns its order into an ascending one.
SIGN: dict[Side, float] = {"upper": 1.0, "lower": -1.0}


# Adds to values, and to the group of each, those that other ranks have of the batch.
Gather = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class Sorted:
    """The bounds of a batch, each found where a criterion or the weight asks for it.

    Args:
        groups: How many groups of sequences there are; a larger number is of no group, and open.
        gather: Adds values that other ranks have; None: all are here.

    Attributes:
        bounds: Those found so far: 0-d each, or [groups + 1] of each group, and the last of none.
    """

    def __init__(self, groups: int = 0, gather: Gather | None = None) -> None:
        self._groups, self._gather = groups, gather
        self.bounds: dict[Place, Tensor] = {}

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Sort the values."""
        found: dict[Side, Tensor] = {}
        for side, rule in criterion.rules.items():
            own = None if groups is None or not rule.by_group else groups.expand(value.shape)
            bound = self._bound(Place(criterion.label, side), rule, _numbers(value, tested), own)
            found[side] = bound if own is None else bound[own]
        return found.get("lower"), found.get("upper")

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Sort the ratios; a sample size is taken after the lower bound."""
        low, found = log_bound(weight.low), {}
        for side, rule in weight.rules.items():
            values = _numbers(log_ratio, among)
            if isinstance(rule, KeepESS):
                values = float32_above(values if low is None else values.clamp(min=low))
            found[side] = self._bound(Place(WEIGHT, side), rule, values, None)
        return found.get("lower"), found.get("upper")

    def _bound(self, place: Place, rule: OfBatch, values: Tensor, groups: Tensor | None) -> Tensor:
        groups = None if groups is None else groups.reshape(-1)
        if self._gather is not None:
            values, groups = self._gather(values, groups)
        if isinstance(rule, KeepESS):
            found = by_sample_size(rule, values)
        else:
            assert isinstance(rule, Counting)
            found = by_sort(rule, place.side, values, groups, self._groups)
        self.bounds[place] = found
        return found


def _numbers(x: Tensor, among: Tensor | None) -> Tensor:
    """[n]: the values among some, and NaN for all others, which has no place in the order."""
    return (x if among is None else torch.where(among, x, torch.nan)).reshape(-1)


def by_sort(rule: Counting, side: Side, values: Tensor, groups: Tensor | None = None, count: int = 0) -> Tensor:
    """The bound in the dtype of the values, infinite where the side is open: 0-d, or [count + 1] of each group.

    Args:
        rule: The rule.
        side: The side that it bounds.
        values: [n], where NaN counts in nothing.
        groups: [n] int64, the group of each value, `count` for a value of no group; None: the batch decides.
        count: How many groups there are. One without a value has the bound NaN; the last bound is of no group.
    """
    columns = max(count, 1)
    # With 0.0 for -0.0, which is equal and another bound to look at.
    x, order = (SIGN[side] * values + 0.0).sort()
    of = torch.where(x.isnan(), columns, 0 if groups is None else groups[order])
    if groups is not None:
        # Stable, so that the order within each group stays. What counts in nothing comes last.
        of, order = of.sort(stable=True)
        x = x[order]
    start = torch.searchsorted(of, torch.arange(columns + 1, device=of.device))
    total, start = start.diff(), start[:-1]
    if not x.shape[0]:
        x, of = x.new_full((1,), torch.nan), of.new_full((1,), columns)
    own = of.clamp(max=columns - 1)
    begins = torch.ones_like(of)
    begins[1:] = (x[1:] != x[:-1]) | (of[1:] != of[:-1])
    run = begins.cumsum(0)
    ends = torch.searchsorted(run, run, right=True)
    kept = ends - start[own]
    before = Before(kept, _sums(rule, SIGN[side] * x, of < columns, start[own], ends), total[own])
    goes_on = rule.goes_on(before, side) & (of < columns)
    place = torch.zeros_like(total).index_add_(0, own, goes_on.long())
    last = (start + place.minimum((total - 1).clamp(min=0))).clamp(max=x.shape[0] - 1)
    bound, passes = x[last], kept[last] < total
    if not rule.KEEPS_LAST:
        bound = torch.where(place > 0, bound.nextafter(bound.new_full((), -math.inf)), bound)
        passes = passes | ((place > 0) & (place < total))
    bound = torch.where(passes, bound, math.inf)
    if groups is None:
        return SIGN[side] * bound[0]
    return SIGN[side] * torch.cat([torch.where(total > 0, bound, math.nan), bound.new_full((1,), math.inf)])


def _sums(rule: Counting, x: Tensor, some: Tensor, start: Tensor, ends: Tensor) -> Tensor | None:
    """[n] int64: the sum of the amounts from where a group starts to where equal values end, rounded down."""
    amount = rule.amount(torch.where(some, x, 0.0))
    if amount is None:
        return None
    whole = amount.floor()
    parts = torch.stack((whole.long(), ((amount - whole) * GRID_OF_FRACTION).round().long()))
    running = torch.nn.functional.pad(parts.cumsum(1), (1, 0))
    whole, fraction = running[:, ends] - running[:, start]
    return whole + fraction // GRID_OF_FRACTION


def float32_above(x: Tensor) -> Tensor:
    """The smallest float32 that is not below x."""
    found = x.float()
    return found if x.dtype == torch.float32 else torch.where(found < x, found.nextafter(found + torch.inf), found)


def weights_of(log_ratio: Tensor) -> Tensor:
    """Weights, float32 numbers in float64: neither a device nor a place in memory shows in them."""
    return log_ratio.double().exp().float().double()


def by_sample_size(rule: KeepESS, log_ratio: Tensor) -> Tensor:
    """The largest float32 c for which weights clamped at exp(c) have the sample size that a rule keeps, 0-d.

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
        log_ratio: [n] float32, within +-LARGEST_CLAMP; NaN counts in nothing.
    """
    x = log_ratio.sort().values
    n = x.isnan().logical_not_().sum()
    weights = weights_of(x).nan_to_num(0.0)
    # Behind all numbers, as a search expects it.
    x = torch.where(x.isnan(), math.inf, x)
    # Of two rows a device takes each sum in one order, of one it may not.
    first, second = torch.nn.functional.pad(torch.stack((weights, weights * weights)).cumsum(1), (1, 0))

    def reaches(bound: Tensor) -> Tensor:
        below, clamped = torch.searchsorted(x, bound, right=True).minimum(n), weights_of(bound)
        above = n - below
        return rule.reached(first[below] + above * clamped, second[below] + above * (clamped * clamped), n.double())

    # Integers in the order of the float32 numbers that they name; the stretch between two is halved until none is left.
    end = _number(log_ratio.new_full((1,), BEYOND_CLAMP))
    low, high = -end, end
    is_open = reaches(_float32(high))
    for _ in range(32):
        middle = (low + high + 1) // 2
        reached = reaches(_float32(middle)) & (middle < high)
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return torch.where(is_open, math.inf, _float32(low))[0]


def _number(x: Tensor) -> Tensor:
    """Int64 in the order of float32 numbers, 0 of both zeros."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _float32(number: Tensor) -> Tensor:
    """The float32 numbers that `_number` counts."""
    size = number.abs().int().view(torch.float32)
    return torch.where(number < 0, -size, size)
