"""Rules for bounds: checked when made, plain data, words, and the places where they may stand."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from rollout_corr.specs.rules import Before

SPEC = rc.Spec(
    weight=rc.Weight.token(upper=2.0),
    criteria=(
        rc.Criterion("k2", upper=rc.MeanBelow(0.02)),
        rc.Criterion("ratio", lower=rc.Quantile(0.01), upper=rc.Quantile(0.99), label="middle"),
        rc.Criterion("external", name="entropy", lower=rc.TopK(share=0.2)),
        rc.Criterion("k3", over="sequence", reduce="mean", lower=1e-6, upper=rc.Bottom(64)),
    ),
)


def test_rules_of_other_numbers_are_other_rules():
    assert rc.Quantile(0.9) != rc.Quantile(0.8) and rc.Bottom(1) != rc.TopK(1)
    assert rc.Spec(criteria=(rc.Criterion("k2", upper=rc.MeanBelow(1)),)) != SPEC
    assert SPEC.asks_batch and not rc.Spec(criteria=(rc.Criterion("k2", upper=1.0),)).asks_batch


@pytest.mark.parametrize(
    ("rule", "side", "kept"),
    [
        (rc.Quantile(0.5), "upper", 2),
        (rc.Quantile(0.5), "lower", 2),
        (rc.Quantile(0.7), "upper", 3),
        (rc.Quantile(0.7), "lower", 2),
        (rc.Quantile(0.3), "lower", 3),
        (rc.TopK(3), "lower", 3),
        (rc.Bottom(1), "upper", 1),
        (rc.TopK(share=0.5), "lower", 2),
    ],
    ids=repr,
)
def test_how_many_of_four_values_a_rule_keeps(rule, side, kept):
    """It goes on at every place where fewer are kept than it asks for."""
    places = Before(torch.arange(5), None, torch.tensor(4))
    assert rule.goes_on(places, side).tolist() == [place < kept for place in range(5)]


def test_explain_says_what_the_batch_decides():
    steps = SPEC.explain()
    for words in ("the mean of what is kept is below 0.02", "the quantile 0.99 of the batch", "number 64 from the"):
        assert words in steps
    bounded = rc.Spec(rc.Weight.token(lower=0.5, upper=rc.KeepESS(0.25))).explain()
    assert "at which the effective sample size is still 0.25 of the batch" in bounded
