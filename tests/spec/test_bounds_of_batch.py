"""Rules for bounds: checked when made, plain data, words, and the places where they may stand."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import yaml

import rollout_corr as rc
from rollout_corr.spec.bounds_of_batch import RULES
from rollout_corr.spec.encode import decode, encode

SPEC = rc.Spec(
    weight=rc.Weight("token", upper=2.0),
    criteria=(
        rc.Criterion("k2", upper=rc.MeanBelow(0.02)),
        rc.Criterion("ratio", lower=rc.Quantile(0.01), upper=rc.Quantile(0.99), label="middle"),
        rc.Criterion("external", name="entropy", lower=rc.TopK(share=0.2)),
        rc.Criterion("k3", over="sequence", reduce="mean", lower=1e-6, upper=rc.Bottom(64)),
    ),
)


def test_a_spec_survives_every_way_of_writing_it():
    plain = SPEC.to_dict()
    assert plain["criteria"][3]["upper"] == {"rule": "Bottom", "count": 64}
    for text in (json.loads(json.dumps(plain)), yaml.safe_load(yaml.safe_dump(plain))):
        assert rc.Spec.from_dict(text) == SPEC
    assert pickle.loads(pickle.dumps(SPEC)) == copy.deepcopy(SPEC) == SPEC
    assert hash(rc.Spec.from_dict(plain)) == hash(SPEC)
    assert eval(repr(SPEC), vars(rc)) == SPEC
    assert decode(*encode(SPEC)) == SPEC
    pair = {"criteria": [{"stat": "abs", "bounds": [None, {"rule": "Quantile", "q": 0.9}]}]}
    assert rc.Spec.from_dict(pair).criteria[0].upper == rc.Quantile(0.9)


def test_rules_of_other_numbers_are_other_rules():
    assert rc.Quantile(0.9) != rc.Quantile(0.8) and rc.Bottom(1) != rc.TopK(1)
    assert rc.Spec(criteria=(rc.Criterion("k2", upper=rc.MeanBelow(1)),)) != SPEC
    assert SPEC.asks_batch and not rc.Spec(criteria=(rc.Criterion("k2", upper=1.0),)).asks_batch


def test_explain_says_what_the_batch_decides():
    steps = SPEC.explain().splitlines()
    wanted = [
        "k2 = D^2 / 2 must be at most so small that the mean of what is kept is below 0.02",
        "between the quantile 0.01 of the batch and the quantile 0.99 of the batch",
        "at least the largest value that a share of 0.2 of the batch reaches",
        "between 1e-06 and number 64 from the batch's smallest value",
    ]
    for words in wanted:
        assert any(words in step for step in steps), words


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rc.Quantile(1.0), ValueError, "Quantile.q: expected a number above 0 and below 1, got 1.0"),
        (lambda: rc.Quantile("0.9"), TypeError, "Quantile.q: expected a number, got the string '0.9'"),
        (lambda: rc.MeanBelow(0.0), ValueError, "MeanBelow.below: expected a finite number > 0, got 0.0"),
        (lambda: rc.MeanBelow(mean=1.0), TypeError, "did you mean below="),
        (lambda: rc.Bottom(), ValueError, "Bottom: expected count or share, got count=None, share=None"),
        (lambda: rc.TopK(3, 0.5), ValueError, "TopK: expected count or share, got count=3, share=0.5"),
        (lambda: rc.TopK(0), ValueError, "TopK.count: expected a number >= 1, got 0"),
        (lambda: rc.TopK(2**63), ValueError, "TopK.count: expected a number >= 1 and <= 9223372036854775807, got 9223"),
        (lambda: rc.TopK(0.5), TypeError, "TopK.count: expected a whole number, got float 0.5"),
        (lambda: rc.TopK(True), TypeError, "TopK.count: expected a whole number, got bool True"),
        (lambda: rc.Bottom(share=math.nan), ValueError, "Bottom.share: expected a number, got nan"),
        (lambda: rc.Criterion("abs", upper=rc.TopK(3)), ValueError, r"Criterion.upper: .*lower=TopK\(...\)"),
        (lambda: rc.Criterion("abs", lower=rc.Bottom(3)), ValueError, r"Criterion.lower: .*upper=Bottom\(...\)"),
        (lambda: rc.Criterion("k2", lower=rc.MeanBelow(1)), ValueError, r"Criterion.lower: .*upper=MeanBelow\(...\)"),
        (
            lambda: rc.Criterion("abs", over="prefix", reduce="max", upper=rc.Quantile(0.5)),
            ValueError,
            r"Criterion.upper: expected a number with over='prefix', got Quantile\(0.5\)",
        ),
        (
            lambda: rc.Spec(criteria=SPEC.criteria, report=("verl",)),
            ValueError,
            r"Spec.report: expected \('native',\) beside bounds that the batch decides",
        ),
        (
            lambda: rc.Spec.from_dict({"criteria": [{"stat": "abs", "upper": {"rule": "Half"}}]}),
            ValueError,
            r"Spec.criteria\[0\].upper: expected a number or the key 'rule' with one of \['Quantile'",
        ),
        (
            lambda: rc.Spec.from_dict({"criteria": [{"stat": "abs", "upper": {"rule": "Quantile", "p": 0.5}}]}),
            ValueError,
            r"Spec.criteria\[0\].upper \(Quantile\): unknown key 'p', expected some of \['q'\]",
        ),
        (
            lambda: rc.Spec.from_dict({"criteria": [{"stat": "abs", "upper": {"rule": "Quantile"}}]}),
            ValueError,
            r"Spec.criteria\[0\].upper \(Quantile\): expected the key 'q', got \[\]",
        ),
    ],
)
def test_errors_name_what_was_expected(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_every_rule_is_exported():
    assert all(getattr(rc, name) is kind for name, kind in RULES.items())
