"""Spec, Weight and Criterion: what they accept, what they refuse how they say so, and that they are plain values."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
import yaml

from rollout_corr.spec.correction import DROP, REDUCTIONS, REPORTS, STATS, WHEN, Criterion, Spec, Weight

RICH = Spec(
    weight=Weight("product", lower=0.5, upper=2.0, outside="zero", normalize="batch", token_clamp=5.0),
    criteria=(
        Criterion("ratio", over="sequence", reduce="mean", lower=0.999, upper=1.001),
        Criterion("ratio", over="sequence", reduce="min", lower=1e-4, label="veto"),
        Criterion("k1", upper=math.log(2), when="negative_advantage", drop="sequence"),
        Criterion("external", over="sequence", reduce="max", name="entropy", lower=-3, upper=4),
        Criterion("binary_kl", upper=0.05, eps=1e-6, token_clamp=3),
    ),
    rejected="both",
    clamp=15.0,
    nonfinite="neutral",
    sums_over="kept",
    detail="full",
    apply=False,
    report=("verl", "skyrl"),
)


def criterion(**arguments):
    """A valid criterion for these arguments: fills in what the named ones need."""
    if arguments.get("stat") == "external":
        arguments.setdefault("name", "entropy")
    return Criterion(**{"stat": "ratio", "upper": 2.0, **arguments})


def test_defaults_measure_and_change_nothing():
    spec = Spec()
    assert (spec.weight, spec.criteria, spec.rejected, spec.nonfinite) == (None, (), "mask", "reject")
    assert (spec.clamp, spec.sums_over, spec.detail, spec.apply) == (20.0, "valid", "basic", True)
    assert spec.report == ("native",)
    assert Weight("token") == Weight("token", None, None, "clamp", None, None)
    assert Criterion("ratio", upper=2).eps == 1e-8


def test_every_combination_of_stat_reduce_when_drop_constructs():
    count = 0
    for stat in STATS:
        for when in WHEN:
            for drop in DROP:
                for reduce in (None, *REDUCTIONS):
                    over = "token" if reduce is None else "sequence"
                    made = criterion(stat=stat, over=over, reduce=reduce, when=when, drop=drop)
                    sequence_verdict = drop == "sequence" or (drop == "unit" and over == "sequence")
                    assert made.drops_sequences is sequence_verdict, made
                    assert made.label.replace("/", ""), made
                    count += 1
    assert count == len(STATS) * 4 * 3 * 5


def test_default_labels_tell_criteria_apart():
    labels = {
        criterion(stat=stat, over=over, reduce=reduce, when=when, drop=drop, of=of).label
        for stat in STATS
        for when in WHEN
        for drop in DROP
        for of in ("train/rollout", "new/rollout", "new/old")
        for over, reduce in [("token", None), *(("sequence", r) for r in REDUCTIONS)]
    }
    assert len(labels) == len(STATS) * 4 * 3 * 3 * 5
    assert criterion(over="sequence", reduce="min").label == "sequence_min_ratio"
    assert criterion(stat="external", name="entropy").label == "token_entropy"


def test_same_label_twice_is_refused():
    veto = criterion(over="sequence", reduce="min", lower=1e-4)
    with pytest.raises(ValueError, match=r"Spec\.criteria: expected different labels, got 'sequence_min_ratio' twice"):
        Spec(criteria=(veto, criterion(over="sequence", reduce="min", lower=1e-3)))
    Spec(criteria=(veto, criterion(over="sequence", reduce="min", lower=1e-3, label="other")))


def test_values_are_frozen_hashable_and_comparable():
    for value, same, other in [
        (Weight("token", upper=2), Weight("token", upper=2.0), Weight("token", upper=3)),
        (criterion(), criterion(upper=2), criterion(upper=3)),
        (RICH, copy.deepcopy(RICH), Spec()),
    ]:
        assert value == same
        assert hash(value) == hash(same)
        assert value != other
        assert len({value, same, other}) == 2
    for value, field in [(Weight("token"), "level"), (criterion(), "upper"), (RICH, "clamp")]:
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 1)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_value(protocol):
    for value in (RICH, *RICH.criteria, RICH.weight, Spec()):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert again == value
        assert hash(again) == hash(value)


def test_criteria_and_report_become_tuples_in_one_order():
    one = criterion()
    assert Spec(criteria=[one]).criteria == (one,)
    assert Spec(criteria=(item for item in [one])).criteria == (one,)
    assert Spec(report=["skyrl", "verl"]).report == ("native", "verl", "skyrl")
    assert Spec(report=[]) == Spec(report=("native",)) == Spec()
    assert Spec(report=REPORTS).report == REPORTS


def test_numbers_of_other_types_become_floats():
    weight = Weight("token", lower=np.float32(0.5), upper=2, token_clamp=Fraction(5, 2))
    assert (weight.lower, weight.upper, weight.token_clamp) == (0.5, 2.0, 2.5)
    for number in (weight.lower, weight.upper, weight.token_clamp, Spec(clamp=np.int64(7)).clamp):
        assert type(number) is float
    assert criterion(lower=np.float64(1.5)).lower == 1.5


@pytest.mark.parametrize(
    "dump_load", [lambda d: d, lambda d: json.loads(json.dumps(d)), lambda d: yaml.safe_load(yaml.safe_dump(d))]
)
@pytest.mark.parametrize(
    "spec", [RICH, Spec(), Spec(weight=Weight("token", upper=2.0)), Spec(criteria=RICH.criteria[:1])]
)
def test_dict_round_trip(spec, dump_load):
    again = Spec.from_dict(dump_load(spec.to_dict()))
    assert again == spec
    assert hash(again) == hash(spec)


def test_dict_holds_only_what_differs_from_the_defaults():
    assert Spec().to_dict() == {}
    spec = Spec(weight=Weight("product", upper=2), criteria=(criterion(lower=0.5, upper=None),))
    plain = spec.to_dict()
    assert plain["weight"] == {"level": "product", "upper": 2.0}
    assert {**plain["criteria"][0], "label": ""} == {"stat": "ratio", "lower": 0.5, "label": ""}
    assert sorted(plain) == ["criteria", "weight"]


def test_dict_takes_bounds_as_a_pair():
    made = Spec.from_dict(
        {"weight": {"level": "token", "bounds": [None, 2]}, "criteria": [{"stat": "k1", "bounds": [-1, None]}]}
    )
    assert made == Spec(weight=Weight("token", upper=2), criteria=(Criterion("k1", lower=-1),))
    assert Spec.from_dict({"weight": None}) == Spec()


@pytest.mark.parametrize(
    ("mapping", "error", "message"),
    [
        ({"wieght": None}, ValueError, r"Spec: unknown key 'wieght', expected some of \['weight', 'criteria'"),
        (
            {"weight": {"level": "token", "uper": 2}},
            ValueError,
            r"Spec\.weight: unknown key 'uper', expected some of .*'bounds'",
        ),
        ({"weight": {"upper": 2}}, ValueError, r"Spec\.weight: expected the key 'level', got \['upper'\]"),
        ({"weight": "token"}, TypeError, r"Spec\.weight: expected a mapping, got str 'token'"),
        (
            {"criteria": [{"stat": "ratio", "upper": 2}, {"upper": 2}]},
            ValueError,
            r"Spec\.criteria\[1\]: expected the key 'stat'",
        ),
        ({"criteria": {"stat": "ratio"}}, TypeError, r"Spec\.criteria: expected a list of mappings, got dict"),
        ({"criteria": "ratio"}, TypeError, r"Spec\.criteria: expected a list of mappings, got str"),
        ({"criteria": ["ratio"]}, TypeError, r"Spec\.criteria\[0\]: expected a mapping, got str 'ratio'"),
        (
            {"criteria": [{"stat": "ratio", "bounds": [1, 2], "upper": 2}]},
            ValueError,
            r"Spec\.criteria\[0\]\.bounds: expected either bounds or lower and upper, got both",
        ),
        (
            {"weight": {"level": "token", "bounds": [1, 2, 3]}},
            ValueError,
            r"Spec\.weight\.bounds: expected a pair \[lower, upper\], got \[1, 2, 3\]",
        ),
        (
            {"weight": {"level": "token", "bounds": "ab"}},
            ValueError,
            r"Spec\.weight\.bounds: expected a pair \[lower, upper\], got 'ab'",
        ),
        ({"weight": {"level": "token", "bounds": 2}}, ValueError, r"Spec\.weight\.bounds: expected a pair .*, got 2"),
        ([], TypeError, r"Spec: expected a mapping, got list"),
    ],
)
def test_bad_dict_is_named(mapping, error, message):
    with pytest.raises(error, match="^" + message):
        Spec.from_dict(mapping)


NAN = float("nan")
WEIGHT = {"level": "token"}
RATIO = {"stat": "ratio", "upper": 2.0}


@pytest.mark.parametrize(
    ("cls", "others", "field", "options"),
    [
        (Weight, {}, "level", "['token', 'product', 'geometric']"),
        (Weight, WEIGHT, "outside", "['clamp', 'zero']"),
        (Weight, WEIGHT, "normalize", "['batch']"),
        (Criterion, {"upper": 2}, "stat", str(list(STATS))),
        (Criterion, RATIO, "over", "['token', 'sequence']"),
        (Criterion, {**RATIO, "over": "sequence"}, "reduce", "['sum', 'mean', 'max', 'min']"),
        (Criterion, RATIO, "when", str(list(WHEN))),
        (Criterion, RATIO, "drop", "['unit', 'sequence', 'token']"),
        (Criterion, RATIO, "of", "['train/rollout', 'new/rollout', 'new/old']"),
        (Spec, {}, "rejected", "['mask', 'zero', 'both']"),
        (Spec, {}, "nonfinite", "['reject', 'neutral', 'propagate']"),
        (Spec, {}, "sums_over", "['valid', 'kept']"),
        (Spec, {}, "detail", "['basic', 'full']"),
    ],
)
def test_unknown_name_is_answered_with_the_known_ones(cls, others, field, options):
    owner = f"{cls.__name__}.{field}: expected one of {options}"
    with pytest.raises(ValueError, match=f"^{re.escape(owner)}, got 'nonsense'$"):
        cls(**others, **{field: "nonsense"})
    with pytest.raises(TypeError, match=f"^{re.escape(owner)}, got int 3$"):
        cls(**others, **{field: 3})


@pytest.mark.parametrize(
    ("cls", "arguments", "error", "message"),
    [
        (Weight, {"level": None}, TypeError, r"Weight\.level: .*, got NoneType None"),
        (Weight, {**WEIGHT, "upper": "2"}, TypeError, r"Weight\.upper: expected a number, got the string '2'$"),
        (
            Weight,
            {**WEIGHT, "upper": "0.5_2"},
            TypeError,
            r"Weight\.upper: expected a number, got the string '0.5_2' .*rc\.from_config",
        ),
        (Weight, {**WEIGHT, "upper": True}, TypeError, r"Weight\.upper: expected a number, got bool True"),
        (Weight, {**WEIGHT, "upper": NAN}, ValueError, r"Weight\.upper: expected a number, got nan"),
        (Weight, {**WEIGHT, "lower": NAN}, ValueError, r"Weight\.lower: expected a number, got nan"),
        (Weight, {**WEIGHT, "lower": [1]}, TypeError, r"Weight\.lower: expected a number, got list \[1\]"),
        (Weight, {**WEIGHT, "lower": -1}, ValueError, r"Weight\.lower: expected a number >= 0, got -1\.0"),
        (Weight, {**WEIGHT, "upper": 0}, ValueError, r"Weight\.upper: expected a number > 0, got 0\.0"),
        (
            Weight,
            {**WEIGHT, "lower": 2, "upper": 1},
            ValueError,
            r"Weight: expected lower <= upper, got lower=2\.0, upper=1\.0",
        ),
        (
            Weight,
            {**WEIGHT, "token_clamp": 0},
            ValueError,
            r"Weight\.token_clamp: expected a finite number > 0, got 0\.0",
        ),
        (
            Weight,
            {**WEIGHT, "token_clamp": math.inf},
            ValueError,
            r"Weight\.token_clamp: expected a finite number > 0, got inf",
        ),
        (
            Weight,
            {**WEIGHT, "token_clamp": "5"},
            TypeError,
            r"Weight\.token_clamp: expected a number, got the string '5'",
        ),
        (
            Criterion,
            {**RATIO, "reduce": "mean"},
            ValueError,
            r"Criterion\.reduce: expected None with over='token', got 'mean'",
        ),
        (
            Criterion,
            {**RATIO, "over": "sequence"},
            ValueError,
            r"Criterion\.reduce: expected one of \[.*\] with over='sequence', got None",
        ),
        (Criterion, {"stat": "ratio"}, ValueError, r"Criterion: expected lower, upper or both, got neither"),
        (
            Criterion,
            {"stat": "ratio", "lower": 2, "upper": 1},
            ValueError,
            r"Criterion: expected lower <= upper, got lower=2\.0",
        ),
        (
            Criterion,
            {"stat": "k1", "lower": 2, "upper": -1},
            ValueError,
            r"Criterion: expected lower <= upper, got lower=2\.0",
        ),
        (Criterion, {"stat": "k2", "lower": -0.1}, ValueError, r"Criterion\.lower: expected a number >= 0, got -0\.1"),
        (Criterion, {"stat": "ratio", "upper": NAN}, ValueError, r"Criterion\.upper: expected a number, got nan"),
        (
            Criterion,
            {"stat": "ratio", "lower": False},
            TypeError,
            r"Criterion\.lower: expected a number, got bool False",
        ),
        (
            Criterion,
            {"stat": "ratio", "upper": "0.5_5.0"},
            TypeError,
            r"Criterion\.upper: .*'0\.5_5\.0' .*rc\.from_config",
        ),
        (
            Criterion,
            {"stat": "external", "upper": 1},
            ValueError,
            r"Criterion\.name: expected the key of an external tensor, got None",
        ),
        (
            Criterion,
            {"stat": "external", "upper": 1, "name": ""},
            ValueError,
            r"Criterion\.name: expected the key .*, got ''",
        ),
        (
            Criterion,
            {**RATIO, "name": "entropy"},
            ValueError,
            r"Criterion\.name: expected None unless stat='external', got 'entropy'",
        ),
        (
            Criterion,
            {**RATIO, "label": "a/b"},
            ValueError,
            r"Criterion\.label: expected a string without '/', got 'a/b'",
        ),
        (Criterion, {**RATIO, "label": 3}, ValueError, r"Criterion\.label: expected a string without '/', got 3"),
        (Criterion, {**RATIO, "eps": 0}, ValueError, r"Criterion\.eps: expected a finite number > 0, got 0\.0"),
        (Criterion, {**RATIO, "eps": NAN}, ValueError, r"Criterion\.eps: expected a number, got nan"),
        (
            Criterion,
            {**RATIO, "token_clamp": -5},
            ValueError,
            r"Criterion\.token_clamp: expected a finite number > 0, got -5\.0",
        ),
        (Spec, {"weight": "token"}, TypeError, r"Spec\.weight: expected a Weight or None, got str 'token'"),
        (Spec, {"weight": {"level": "token"}}, TypeError, r"Spec\.weight: expected a Weight or None, got dict"),
        (
            Spec,
            {"criteria": Criterion(**RATIO)},
            TypeError,
            r"Spec\.criteria: expected a tuple of Criterion, got Criterion",
        ),
        (Spec, {"criteria": 3}, TypeError, r"Spec\.criteria: expected a tuple of Criterion, got int"),
        (Spec, {"criteria": ({"stat": "ratio"},)}, TypeError, r"Spec\.criteria: expected Criterion, got dict"),
        (Spec, {"apply": 1}, TypeError, r"Spec\.apply: expected True or False, got int 1"),
        (Spec, {"report": "verl"}, TypeError, r"Spec\.report: expected a tuple of names, got str 'verl'"),
        (Spec, {"report": ("trl",)}, ValueError, r"Spec\.report: expected one of \['native', .*\], got 'trl'"),
        (Spec, {"clamp": 41}, ValueError, r"Spec\.clamp: expected a finite number > 0 and <= 40, got 41\.0"),
        (Spec, {"clamp": 0}, ValueError, r"Spec\.clamp: expected a finite number > 0 and <= 40, got 0\.0"),
        (Spec, {"clamp": NAN}, ValueError, r"Spec\.clamp: expected a number, got nan"),
        (Spec, {"clamp": True}, TypeError, r"Spec\.clamp: expected a number, got bool True"),
    ],
)
def test_bad_argument_is_named_with_expected_and_got(cls, arguments, error, message):
    with pytest.raises(error, match="^" + message):
        cls(**arguments)


def test_bounds_that_look_odd_but_mean_something():
    assert Weight("token", lower=0, upper=math.inf).upper == math.inf
    assert Weight("token", lower=1, upper=1).lower == 1.0
    assert Criterion("k1", lower=-1, upper=-0.5).upper == -0.5
    assert Criterion("prob_diff", lower=-0.1, upper=0).upper == 0.0
    assert Criterion("external", name="x", lower=-3).lower == -3.0
    assert Spec(clamp=40).clamp == 40.0
