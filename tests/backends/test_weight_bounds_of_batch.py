"""Bounds of weights that the batch decides: `correct` against loops, in every layout, by one call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out
from builders.coarse import coarse, rejects_nonfinite
from builders.rounding import all_near, near
from builders.weights import weight_of
from oracles.bounds_of_batch import kept

pytestmark = pytest.mark.usefixtures("one_thread")


def logs(batch, level):
    """The log of the ratio of each unit, by (sequence, token) or sequence."""
    d = [
        [x - y for x, y, m in zip(one.train, one.rollout, one.mask, strict=True) if m and math.isfinite(x)]
        for one in batch
    ]
    if level == "token":
        return {
            (s, t): x - y
            for s, one in enumerate(batch)
            for t, (x, y, m) in enumerate(zip(one.train, one.rollout, one.mask, strict=True))
            if m and math.isfinite(x)
        }
    return {s: sum(ds) if level == "product" else sum(ds) / len(ds) for s, ds in enumerate(d) if ds}


def bounded(rule, side, values, outside):
    """Weights by unit, after a Counting rule: those that it rejects get the value of the last that it keeps, or 0."""
    keeps = kept(rule, side, list(values.values()))
    good = [x for x, keep in zip(values.values(), keeps, strict=True) if keep]
    end = max(good) if side == "upper" else min(good)
    return {
        unit: math.exp(x if keep else end) if keep or outside == "clamp" else 0.0
        for (unit, x), keep in zip(values.items(), keeps, strict=True)
    }


def expected_weights(batch, level, by_unit):
    bad = rejects_nonfinite(batch)
    return [
        [
            by_unit[(s, t) if level == "token" else s] if m and s not in bad else 0.0
            for t, m in enumerate(one.mask)
        ]
        for s, one in enumerate(batch)
    ]  # fmt: skip


def close(found, expected):
    assert [len(row) for row in found] == [len(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == near(other, torch.float32)


RULES = [("upper", rc.Quantile(0.8)), ("lower", rc.Quantile(0.3)), ("upper", rc.Bottom(3)), ("lower", rc.TopK(4))]


@pytest.mark.parametrize(
    ("level", "side", "rule"),
    [(level, *rule) for level, rule in zip(("token", "product", "geometric", "token"), RULES, strict=True)],
    ids=str,
)
def test_weights_in_every_layout(level, side, rule, way):
    for seed, layout in enumerate(LAYOUTS[::3]):
        batch, outside = coarse(seed, broken=seed == 1), ("clamp", "zero")[seed % 2]
        spec = rc.Spec(weight_of(level, outside=outside, **{side: rule}))
        laid = lay_out(batch, layout, torch.float32)
        found = laid.correct(spec)
        by_unit = bounded(rule, side, logs(batch, level), outside)
        close(laid.read(found.weights), expected_weights(batch, level, by_unit))


@pytest.mark.parametrize("level", ["token", "product", "geometric", "prefix"])
@pytest.mark.parametrize("floor", [0.3, 0.95])
def test_the_sample_size_is_kept(level, floor, way):
    """The metric of the call says so; at the looser bound of a lower floor it would not be."""
    laid = lay_out(coarse(2), "packed", torch.float32)
    key = {"token": "weight_ess", "prefix": "weight_ess"}.get(level, "sequence_weight_ess")
    spec = rc.Spec(weight_of(level, upper=rc.KeepESS(floor)))
    found = laid.correct(spec).metrics()
    assert found[key] >= floor - 1e-6, found[key]
    if found["weight/upper_max"] < math.inf:
        assert found[key] == near(floor, torch.float32)
    looser = rc.Spec(weight_of(level, upper=found["weight/upper_max"] * 1.01))
    assert laid.correct(looser).metrics()[key] < floor or found["weight/upper_max"] == math.inf


def test_metrics_are_those_of_a_bound_that_is_the_number_found(way):
    """Every other metric, and the weights, as if the caller had known the bound."""
    for level, outside in itertools.product(("token", "product"), ("clamp", "zero")):
        laid = lay_out(coarse(2), "padded_left", torch.float32)
        spec = rc.Spec(weight_of(level, lower=rc.Quantile(0.2), upper=rc.Quantile(0.8), outside=outside))
        found = laid.correct(spec)
        of_found = found.metrics()
        low, high = of_found.pop("weight/lower_max"), of_found.pop("weight/upper_max")
        for key in ("weight/lower_min", "weight/upper_min"):
            of_found.pop(key)
        # A little apart, because exp and log of a bound do not meet again, and the mean of a sequence is rounded.
        known = laid.correct(
            rc.Spec(weight_of(level, lower=low * (1 - 3e-7), upper=high * (1 + 3e-7), outside=outside))
        )
        of_known = known.metrics()
        assert of_found.keys() == of_known.keys()
        assert of_found == near(of_known, torch.float32)
        assert all_near(found.weights, known.weights, torch.float32)


@pytest.mark.parametrize("over", ["sequence", "turn", "prefix"])
def test_units_without_a_survivor_are_values_of_the_batch(over, way):
    """Their ratio is 1: of 0.7, 0.8 and 1 the median is 0.8, without it 0.7."""
    ratios = torch.tensor([0.7, 0.8, 0.1])
    weight = rc.Weight(over=over, reduce="mean", upper=rc.Quantile(0.5))
    spec = rc.Spec(weight, (rc.Criterion("ratio", lower=0.5, drop="sequence"),), "both", sums_over="kept")
    x = ratios.log()[:, None].expand(3, 2)
    out = rc.correct(
        x, torch.zeros(3, 2), rc.Batch(turns="runs" if over == "turn" else None, mask=torch.ones(3, 2)), spec=spec
    )
    assert out.metrics()["weight/upper_max"] == near(0.8, torch.float32)


@pytest.mark.parametrize("rule", [rc.Quantile(0.99), rc.Bottom(50), rc.Bottom(share=0.999)], ids=str)
def test_a_rule_that_keeps_everything_leaves_a_number_on_the_other_side_alone(rule, way):
    """Its last value would cross that, and be the weight of all."""
    ratios = torch.linspace(0.25, 0.30, 50)
    spec = rc.Spec(rc.Weight.geometric(lower=0.5, upper=rule))
    out = rc.correct(ratios.log()[:, None].expand(50, 4), torch.zeros(50, 4), spec=spec)
    assert out.metrics()["weight/upper_max"] == math.inf
    assert out.weights.unique().tolist() == [0.5]


def test_no_token_and_one_token():
    spec = rc.Spec(rc.Weight.token(upper=rc.KeepESS(0.5)))
    x = torch.zeros(1, 2)
    nothing = rc.correct(x, x, mask=torch.zeros(1, 2), spec=spec)
    assert nothing.weights.tolist() == [[0.0, 0.0]] and nothing.metrics()["weight/upper_max"] == math.inf
    one = rc.correct(x + 3.0, x, mask=torch.tensor([[1, 0]]), spec=spec)
    assert one.weights.tolist() == [[pytest.approx(math.exp(3.0)), 0.0]]
    assert one.metrics()["weight/upper_max"] == math.inf


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("weight", [{}, {"token_clamp": 5.0}, {"over": "prefix", "reduce": "mean"}], ids=str)
def test_a_sequence_of_ratios_that_are_the_bound_is_not_beyond_it(weight, side, way):
    """Its mean is rounded, the bound is not: of many values some would fall on either side."""
    for k in range(1, 40, 2):
        x, y = torch.full((1, 1 + k % 3), -0.03 * k - 0.01), torch.full((1, 1 + k % 3), -0.021 * k - 0.02)
        spec = rc.Spec(rc.Weight(**{"over": "token", **weight, side: rc.Quantile(0.5)}))
        found = rc.correct(x, y, spec=spec).metrics()
        assert found[f"sequence_mean_weight_{'above' if side == 'upper' else 'below'}_{side}_fraction"] == 0.0
