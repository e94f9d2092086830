"""Thresholds of verl's options."""

from __future__ import annotations

import math

import pytest

import rollout_corr as rc


@pytest.mark.parametrize(
    ("option", "threshold", "ratios"),
    [
        ("token_k1", 2.0, (0.5, 2.0)),
        ("seq_mean_k1", "1.25", (0.8, 1.25)),
        ("seq_sum_k1", "0.9_1.25", (0.9, 1.25)),
    ],
)
def test_a_single_bound_of_k1_has_its_inverse_below(option, threshold, ratios):
    (criterion,) = rc.spec("verl", {"rollout_rs": option, "rollout_rs_threshold": threshold}).criteria
    assert (criterion.lower, criterion.upper) == pytest.approx(tuple(map(math.log, ratios)))
