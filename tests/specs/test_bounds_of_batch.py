"""Rules for bounds: checked when made, plain data, words, and the places where they may stand."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import yaml

import rollout_corr as rc
from rollout_corr.specs.bounds_of_batch import RULES
from rollout_corr.specs.encode import decode, encode

SPEC = rc.Spec(
    weight=rc.Weight.token(upper=2.0),
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
    weight = rc.Spec(rc.Weight.product(lower=0.5, upper=rc.KeepESS(0.25)))
    assert weight.to_dict()["weight"]["upper"] == {"rule": "KeepESS", "floor": 0.25}
    assert rc.Spec.from_dict(weight.to_dict()) == decode(*encode(weight)) == eval(repr(weight), vars(rc)) == weight
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
        "between 1e-06 and number 64 from the smallest value of the batch",
    ]
    bounded = rc.Spec(rc.Weight.token(lower=0.5, upper=rc.KeepESS(0.25))).explain()
    loosest = "the loosest bound at which the effective sample size is still 0.25 of the batch"
    assert f"A weight below 0.5 becomes 0.5 and one above {loosest} becomes that." in bounded
    zeroed = rc.Spec(rc.Weight.token(upper=rc.Quantile(0.9), outside="zero")).explain()
    assert "A weight above the quantile 0.9 of the batch becomes 0." in zeroed
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
        (lambda: rc.TopK(k=3), TypeError, r"unknown argument 'k', .*did you mean count=\?"),
        (lambda: rc.Quantile(share=0.5), TypeError, r"unknown argument 'share', .*did you mean q=\?"),
        (lambda: rc.KeepESS(1.0), ValueError, "KeepESS.floor: expected a finite number > 0 and <= 0.999999, got 1.0"),
        (lambda: rc.KeepESS(ess=0.5), TypeError, r"did you mean floor=\?"),
        (
            lambda: rc.Criterion("ratio", upper=rc.KeepESS(0.5)),
            ValueError,
            r"Criterion.upper: expected a number or another rule, got KeepESS\(0.5\), which bounds a Weight alone",
        ),
        (
            lambda: rc.Weight.token(upper=rc.MeanBelow(0.5)),
            ValueError,
            r"Weight.upper: expected a number or another rule, got MeanBelow\(0.5\), which bounds a Criterion alone",
        ),
        (lambda: rc.Weight.token(lower=rc.KeepESS(0.5)), ValueError, r"Weight.lower: .*upper=KeepESS\(...\)"),
        (
            lambda: rc.Weight.token(upper=rc.KeepESS(0.5), outside="zero"),
            ValueError,
            r"Weight.upper: expected outside='clamp' with KeepESS\(0.5\), got 'zero'",
        ),
        (
            lambda: rc.Weight.token(lower=rc.Quantile(0.1), upper=rc.KeepESS(0.5)),
            ValueError,
            r"Weight.lower: expected a number or None beside upper=KeepESS\(0.5\), got Quantile\(0.1\)",
        ),
        (
            lambda: rc.Weight("prefix", upper=rc.Quantile(0.5), growth="sqrt"),
            ValueError,
            r"Weight.upper: expected a number beside growth='sqrt', got Quantile\(0.5\)",
        ),
        (
            lambda: rc.Spec(rc.Weight.token(upper=rc.Quantile(0.5)), (rc.Criterion("abs", upper=1.0, label="weight"),)),
            ValueError,
            "Criterion.label: expected anything but 'weight' beside a weight whose bounds the batch decides",
        ),
        (
            lambda: rc.Spec.from_dict({"criteria": [{"stat": "abs", "bounds": {"rule": "Quantile", "q": 0.5}}]}),
            ValueError,
            r"Spec.criteria\[0\].bounds: expected a pair \[lower, upper\], got the mapping .*as lower or upper",
        ),
        (
            lambda: rc.Spec.from_dict({"weight": {"over": "token", "upper": {"rule": "Half"}}}),
            ValueError,
            r"Spec.weight.upper: expected a number or the key 'rule' with one of \['Quantile'",
        ),
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
            r"Spec.criteria\[0\].upper \(Quantile\): unknown key 'p', expected some of \['q', 'within'\]",
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
