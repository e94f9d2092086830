"""Rules for bounds: checked when made, plain data, words, and the places where they may stand."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
import yaml

import rollout_corr as rc
from rollout_corr.specs.bounds_of_batch import RULES, Before
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


WRONG = [
    ('Quantile(1.0)', 'Quantile.q: expected a number above 0 and below 1, got 1.0'),
    ("Quantile('0.9')", "Quantile.q: expected a number, got the string '0.9'"),
    ('MeanBelow(0.0)', 'MeanBelow.below: expected a finite number > 0, got 0.0'),
    ('MeanBelow(mean=1.0)', 'did you mean below='),
    ('Bottom()', 'Bottom: expected count or share, got count=None, share=None'),
    ('TopK(3, 0.5)', 'TopK: expected count or share, got count=3, share=0.5'),
    ('TopK(0)', 'TopK.count: expected a number >= 1, got 0'),
    ('TopK(2 ** 63)', 'TopK.count: expected a number >= 1 and <= 9223372036854775807, got 9223'),
    ('TopK(0.5)', 'TopK.count: expected a whole number, got float 0.5'),
    ('TopK(True)', 'TopK.count: expected a whole number, got bool True'),
    ('Bottom(share=math.nan)', 'Bottom.share: expected a number, got nan'),
    ('TopK(k=3)', r"unknown argument 'k', .*did you mean count=\?"),
    ('Quantile(share=0.5)', r"unknown argument 'share', .*did you mean q=\?"),
    ('KeepESS(1.0)', 'KeepESS.floor: expected a finite number > 0 and <= 0.999999, got 1.0'),
    ('KeepESS(ess=0.5)', r"did you mean floor=\?"),
    ("Criterion('ratio', upper=KeepESS(0.5))",
     r"Criterion.upper: expected a number or another rule, got KeepESS\(0.5\), which bounds a Weight alone"),
    ('Weight.token(upper=MeanBelow(0.5))',
     r"Weight.upper: expected a number or another rule, got MeanBelow\(0.5\), which bounds a Criterion"),
    ('Weight.token(lower=KeepESS(0.5))', r"Weight.lower: .*upper=KeepESS\(...\)"),
    ("Weight.token(upper=KeepESS(0.5), outside='zero')",
     r"Weight.upper: expected outside='clamp' with KeepESS\(0.5\), got 'zero'"),
    ('Weight.token(lower=Quantile(0.1), upper=KeepESS(0.5))',
     r"Weight.lower: expected a number or None with upper=KeepESS\(0.5\), got Quantile\(0.1\)"),
    ("Weight('prefix', upper=Quantile(0.5), growth='sqrt')",
     r"Weight.upper: expected a number with growth='sqrt', got Quantile\(0.5\)"),
    ("Spec(Weight.token(upper=Quantile(0.5)), (Criterion('abs', upper=1.0, label='weight'),))",
     "Criterion.label: expected anything but 'weight' with a weight whose bounds the batch decides"),
    ("Spec.from_dict({'criteria': [{'stat': 'abs', 'bounds': {'rule': 'Quantile', 'q': 0.5}}]})",
     r"Spec.criteria\[0\].bounds: expected a pair \[lower, upper\], got the mapping .*as lower or upper"),
    ("Spec.from_dict({'weight': {'over': 'token', 'upper': {'rule': 'Half'}}})",
     r"Spec.weight.upper: expected a number or the key 'rule' with one of \['Quantile'"),
    ("Criterion('abs', upper=TopK(3))", r"Criterion.upper: .*lower=TopK\(...\)"),
    ("Criterion('abs', lower=Bottom(3))", r"Criterion.lower: .*upper=Bottom\(...\)"),
    ("Criterion('k2', lower=MeanBelow(1))", r"Criterion.lower: .*upper=MeanBelow\(...\)"),
    ("Criterion('abs', over='prefix', reduce='max', upper=Quantile(0.5))",
     r"Criterion.upper: expected a number with over='prefix', got Quantile\(0.5\)"),
    ("Spec(criteria=SPEC.criteria, report=('verl',))",
     r"Spec.report: expected \('native',\) with bounds that the batch decides"),
    ("Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Half'}}]})",
     r"Spec.criteria\[0\].upper: expected a number or the key 'rule' with one of \['Quantile'"),
    ("Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Quantile', 'p': 0.5}}]})",
     r"Spec.criteria\[0\].upper \(Quantile\): unknown key 'p', expected some of \['q', 'within'\]"),
    ("Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Quantile'}}]})",
     r"Spec.criteria\[0\].upper \(Quantile\): expected the key 'q', got \[\]"),
]  # fmt: skip


@pytest.mark.parametrize(("python", "words"), WRONG)
def test_errors_name_what_was_expected(python, words):
    with pytest.raises((ValueError, TypeError), match=words):
        eval(python, {**vars(rc), "SPEC": SPEC, "math": math})


def test_every_rule_is_exported():
    assert all(getattr(rc, name) is kind for name, kind in RULES.items())
