"""The bound that keeps an effective sample size: the search finds what bisection finds, from tables that add up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from oracles.bounds_of_batch import sample_size
from rollout_corr.backends import search as searches
from rollout_corr.definition.bounds_of_batch import by_bisection

HARD = {
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


def searched(rule, parts, look):
    """The bound from the tables of several parts."""
    search = searches.begin(rule, "upper", parts[0].dtype, parts[0].device)
    made = [search.values(part, None, None) for part in parts]
    while not search.over():
        search = search.narrowed(sum(search.table(search.left(x) if look else x) for x in made))
    return search.bound()


def check(values, floor):
    """The bound, by its definition: the sample size is reached there, and not a little beyond."""
    bound = by_bisection(rc.KeepESS(floor), values)
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
@pytest.mark.parametrize("case", HARD)
def test_hard_weights(case, floor, dtype):
    values = torch.tensor(HARD[case], dtype=dtype)
    bound = check(values, floor)
    for look in (True, False):
        assert torch.equal(searched(rc.KeepESS(floor), [values], look), bound)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-40.0, 40.0, width=32) | st.sampled_from([0.0, 0.5, 0.5, math.nan]), max_size=50),
    st.sampled_from([0.02, 0.3, 0.5, 0.75, 0.98, 0.9999]),
    st.sampled_from([1.0, 1.0000001]),
    st.integers(0, 50),
    st.randoms(use_true_random=False),
)
def test_any_weights_in_any_order_and_parts(numbers, floor, factor, cut, shuffle):
    """With a factor in float64 no log-ratio is a float32."""
    values = torch.tensor(numbers, dtype=torch.float64).mul(factor).clamp(-40.0, 40.0)
    values = values if factor != 1.0 else values.float()
    bound = check(values, floor)
    order = list(range(len(numbers)))
    shuffle.shuffle(order)
    moved = values[order]
    for look in (True, False):
        assert torch.equal(searched(rc.KeepESS(floor), [moved[:cut], moved[cut:], moved[:0]], look), bound)
