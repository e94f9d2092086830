"""Bounds that each group of sequences decides by its own values: one sort of all, which a device does not wait for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollout_corr.definition.bounds_of_batch import SIGN
from rollout_corr.spec.bounds_of_batch import Before, Counting, Side


def in_groups(rule: Counting, side: Side, values: Tensor, tested: Tensor | None, groups: Tensor, count: int) -> Tensor:
    """The bounds of groups, [count + 1]: infinite where a side is open, NaN of a group without a value.

    Args:
        rule: One that counts alone and keeps the value at which it stops.
        side: The side that it bounds.
        values: [n] float32 or float64.
        tested: [n] bool: takes part; None: all do.
        groups: [n] int64, from 0 to `count`, which is of no group and has no bound.
        count: The number of groups.
    """
    counted = ~values.isnan() if tested is None else tested & ~values.isnan()
    ordered = SIGN[side] * values
    # Those that take no part go behind all groups; a stable sort by group leaves the values in order.
    group = torch.where(counted, groups, count)
    by_value = ordered.argsort(stable=True)
    places = by_value[group[by_value].argsort(stable=True)]
    x, group = ordered[places], group[places]
    n = torch.zeros(count + 1, dtype=torch.int64, device=values.device).index_add_(0, group, torch.ones_like(group))
    start = n.cumsum(0) - n
    kept = torch.arange(1, x.shape[0] + 1, device=values.device) - start[group]
    # Of equal values any may be the place where the rule stops: the bound is their value.
    goes_on = rule.goes_on(Before(kept, None, n[group]), side)
    place = torch.zeros_like(n).index_add_(0, group, goes_on.long())
    found = torch.cat([x, x.new_full((1,), math.inf)])[torch.where(place < n, start + place, x.shape[0])]
    found = torch.where(n > 0, found, math.nan)
    found[-1] = math.inf
    return SIGN[side] * found
