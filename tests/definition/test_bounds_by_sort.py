"""Bounds by a sort keep what loops keep, whatever the order of the values and whatever lies between them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from oracles.correction import kept, sample_size
from rollout_corr.definition.bounds import beyond
from rollout_corr.definition.bounds_of_batch import by_sample_size, by_sort, float32_above

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


def keeps(bound, side, numbers):
    """The values that a bound keeps."""
    bounds = (bound, None) if side == "lower" else (None, bound)
    return (~beyond(numbers, bounds)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "side"), RULES, ids=str)
def test_hard_values(rule, side, dtype):
    for case, numbers in HARD.items():
        values = torch.tensor(numbers, dtype=dtype)
        bound = by_sort(rule, side, values)
        wanted = kept(rule, side, numbers)
        assert bound.dtype == dtype and bound.shape == () and keeps(bound, side, values) == wanted, case
        # A side is open where nothing lies beyond its bound, unless infinity is a value, and nowhere else.
        everything = all(good or math.isnan(x) for good, x in zip(wanted, numbers, strict=True))
        at_end = (math.inf if side == "upper" else -math.inf) in numbers
        assert at_end or bound.isinf().item() == everything, case


# Far within the range in which a rule adds values up exactly.
NUMBERS = st.floats(-(2.0**20), 2.0**20, width=32) | st.just(math.nan)


@settings(max_examples=80)
@given(
    st.lists(NUMBERS, max_size=60),
    st.sampled_from(RULES),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_any_values_in_any_order_and_between_anything(numbers, which, dtype, others, shuffle):
    rule, side = which
    values = torch.tensor(numbers, dtype=dtype)
    bound = by_sort(rule, side, values)
    assert keeps(bound, side, values) == kept(rule, side, numbers)
    moved = numbers + [math.nan] * others
    shuffle.shuffle(moved)
    assert torch.equal(by_sort(rule, side, torch.tensor(moved, dtype=dtype)), bound)


def test_many_values():
    rng = random.Random(0)
    for rule, side in RULES:
        numbers = [round(rng.expovariate(1.0) * 32) / 32 for _ in range(700)]
        values = torch.tensor(numbers)
        assert keeps(by_sort(rule, side, values), side, values) == kept(rule, side, numbers)
        # In four groups, whose sums do not begin at 0.
        found = by_sort(rule, side, values, torch.arange(700) % 4, 4)
        assert all(torch.equal(found[group], by_sort(rule, side, values[group::4])) for group in range(4))


@settings(max_examples=80)
@given(st.lists(st.tuples(st.floats(width=32), st.integers(0, 4)), max_size=40), st.sampled_from(RULES))
def test_every_group_has_the_bound_of_its_own_values(drawn, which):
    rule, side = which
    values = torch.tensor([x for x, _ in drawn], dtype=torch.float32)
    groups = torch.tensor([group for _, group in drawn], dtype=torch.int64)
    found = by_sort(rule, side, values, groups, 4)
    # The last is of no group.
    assert found.shape == (5,) and found[4] == (math.inf if side == "upper" else -math.inf)
    for group in range(4):
        own = values[(groups == group) & ~values.isnan()]
        assert bool(found[group].isnan()) if not len(own) else torch.equal(found[group], by_sort(rule, side, own))


# --- the bound that keeps a sample size ---

WEIGHTS = {
    "nothing": [],
    "one": [3.0],
    "one NaN": [math.nan],
    "all equal": [0.25] * 9,
    "at the ends": [-40.0, 40.0, 40.0, -40.0],
    "both zeros": [0.0, -0.0, 0.0, 5.0],
    "ties": [0.5, 0.25, 0.5, 0.0, 2.5, 2.5, 2.5, 0.0],
    "one far above": [0.0] * 30 + [8.0],
    "NaN among them": [1.0, math.nan, 0.5, math.nan, 4.0],
    "neighbors": [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 3.0],
    "tiny": [2.0**-149, 0.0, -(2.0**-149), 2.0**-126],
}


def check_sample_size(values, floor):
    """The bound, by its definition: the sample size is reached there, and not a little beyond."""
    bound = by_sample_size(rc.KeepESS(floor), float32_above(values))
    weights = [math.exp(x) for x in values.tolist() if not math.isnan(x)]
    if bound == math.inf:
        assert not weights or sample_size(weights, math.inf) >= floor - 1e-6
        return bound
    # Weights are float32: 2^-24 of each, twice in a square, and the bound itself; so are their logarithms, rounded up.
    within = 4e-7 + 2.0**-22 * max(abs(math.log(w)) for w in weights)
    assert sample_size(weights, math.exp(bound)) >= floor - within
    assert sample_size(weights, math.exp(bound + 1e-4)) < floor + within
    return bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("floor", [0.01, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("case", WEIGHTS)
def test_hard_weights(case, floor, dtype):
    check_sample_size(torch.tensor(WEIGHTS[case], dtype=dtype), floor)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-40.0, 40.0, width=32) | st.sampled_from([0.0, 0.5, 0.5, math.nan]), max_size=50),
    st.sampled_from([0.02, 0.3, 0.5, 0.75, 0.98, 0.9999]),
    st.sampled_from([1.0, 1.0000001]),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_any_weights_in_any_order_and_between_anything(numbers, floor, factor, others, shuffle):
    """With a factor in float64 no log-ratio is a float32."""
    values = torch.tensor(numbers, dtype=torch.float64).mul(factor).clamp(-40.0, 40.0)
    values = values if factor != 1.0 else values.float()
    bound = check_sample_size(values, floor)
    order = [*range(len(numbers)), *[-1] * others]
    shuffle.shuffle(order)
    moved = torch.cat([values, values.new_full((1,), math.nan)])[order]
    assert torch.equal(by_sample_size(rc.KeepESS(floor), float32_above(moved)), bound)
