"""Radix selection finds what a sort finds, to the bit, from tables that add up in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from oracles.bounds_of_batch import kept
from rollout_corr.backends.search import begin, from_keys, values_of
from rollout_corr.definition.bounds_of_batch import beyond, by_sort

RULES = [
    (rc.Quantile(0.9), "upper"),
    (rc.Quantile(0.07), "upper"),
    (rc.Quantile(0.5), "lower"),
    (rc.Quantile(0.07), "lower"),
    (rc.Bottom(3), "upper"),
    (rc.Bottom(share=0.3), "upper"),
    (rc.TopK(3), "lower"),
    (rc.TopK(share=0.3), "lower"),
    (rc.MeanBelow(0.25), "upper"),
    (rc.MeanBelow(3.0), "upper"),
]
HARD = {
    "nothing": [],
    "one": [0.5],
    "one NaN": [math.nan],
    "all equal": [0.25] * 9,
    "all 0, of both signs": [0.0, -0.0] * 4,
    "ties": [0.5, 0.25, 0.5, 0.0, 0.25, 0.5, 1.0, 1.0, 0.25, 4.0, 0.0],
    "NaN among them": [1.0, math.nan, 0.5, math.nan, 0.25, -1.0],
    "infinite": [math.inf, 1.0, -math.inf, 0.0, math.inf, 0.5],
    "neighbors": [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0, 1.0 + 2.0**-22],
    "denormal": [2.0**-149, 0.0, -(2.0**-149), 2.0**-148, 2.0**-126],
    "both signs": [-3.0, -0.5, -0.5, 0.125, 2.0, -8.0, 8.0],
    "the mean is the bound": [0.25, 0.25, 0.0, 0.5, 0.25],
    "the smallest is too large": [7.0, 7.0, 9.0],
}


def searched(rule, side, parts):
    """The bound from the tables of several parts."""
    search = begin(rule, side, parts[0].dtype, parts[0].device)
    made = [values_of(side, part, None) for part in parts]
    while not search.over():
        search = search.narrowed(sum(search.table(values) for values in made))
    return search.bound()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "side"), RULES, ids=str)
def test_hard_values(rule, side, dtype):
    for case, numbers in HARD.items():
        values = torch.tensor(numbers, dtype=dtype)
        bound = by_sort(rule, side, values)
        assert torch.equal(searched(rule, side, [values]), bound), case
        bounds = (bound, None) if side == "lower" else (None, bound)
        wanted = kept(rule, side, numbers)
        assert (~beyond(values, bounds)).tolist() == wanted, case
        # A side is open where nothing lies beyond its bound, unless infinity is a value, and nowhere else.
        everything = all(good or math.isnan(x) for good, x in zip(wanted, numbers, strict=True))
        at_end = (math.inf if side == "upper" else -math.inf) in numbers
        assert at_end or bound.isinf().item() == everything, case


@settings(max_examples=80)
@given(
    st.lists(st.floats(width=32), max_size=60),
    st.sampled_from(RULES),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 60),
    st.randoms(use_true_random=False),
)
def test_any_values_in_any_order_and_parts(numbers, which, dtype, cut, shuffle):
    rule, side = which
    values = torch.tensor(numbers, dtype=dtype)
    bound = by_sort(rule, side, values)
    order = list(range(len(numbers)))
    shuffle.shuffle(order)
    moved = values[order]
    assert torch.equal(searched(rule, side, [moved[:cut], moved[cut:], moved[:0]]), bound)


def test_many_values_by_the_oracle():
    rng = random.Random(0)
    for rule, side in RULES:
        numbers = [round(rng.expovariate(1.0) * 32) / 32 for _ in range(700)]
        bound = by_sort(rule, side, torch.tensor(numbers))
        bounds = (bound, None) if side == "lower" else (None, bound)
        assert (~beyond(torch.tensor(numbers), bounds)).tolist() == kept(rule, side, numbers)
        assert torch.equal(searched(rule, side, [torch.tensor(numbers)]), bound)


def test_keys_are_in_the_order_of_the_floats():
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([-math.inf, -2.0, -1.0, -(2.0**-149), 0.0, 2.0**-149, 1.0, 1.5, math.inf], dtype=dtype)
        for side in ("upper", "lower"):
            keys = values_of(side, x, None).keys
            assert torch.equal(from_keys(side, keys), x)
            # As unsigned integers, from the end that the side keeps.
            unsigned = keys ^ torch.iinfo(keys.dtype).min
            steps = unsigned.diff() > 0
            assert bool(steps.all() if side == "upper" else (~steps).all())


def test_values_that_are_not_tested_count_in_nothing():
    values, tested = torch.tensor([9.0, 1.0, 2.0, 9.0]), torch.tensor([False, True, True, False])
    search = begin(rc.Quantile(0.5), "upper", values.dtype, values.device)
    while not search.over():
        search = search.narrowed(search.table(values_of("upper", values, tested)))
    assert search.bound() == 1.0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(width=32), st.integers(0, 4), st.booleans()), max_size=40), st.sampled_from(RULES))
def test_every_group_has_the_bound_of_its_own_values(drawn, which):
    rule, side = which
    values, groups, tested = (torch.tensor(x) for x in (list(zip(*drawn, strict=True)) or ((), (), ())))
    values, groups, tested = values.float(), groups.long(), tested.bool()
    search = begin(rule, side, values.dtype, values.device, 4)
    while not search.over():
        search = search.narrowed(search.table(search.values(values, tested, groups)))
    found = search.bound()
    # The last is of no group.
    assert found[4] == (math.inf if side == "upper" else -math.inf)
    for group in range(4):
        own = values[tested & (groups == group)]
        own = own[~own.isnan()]
        assert bool(found[group].isnan()) if not len(own) else torch.equal(found[group], by_sort(rule, side, own))
