"""Spec, Weight and Criterion: plain values that say in words what they do, and refuse what makes no sense."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import pickle
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
import yaml

from rollout_corr.specs.bounds_of_batch import KeepESS
from rollout_corr.specs.choices import DROP, POLICIES, PREFIX_REDUCTIONS, REDUCTIONS, REPORTS, STATS, STRETCHES, WHEN
from rollout_corr.specs.correction import Criterion, Spec, Weight

RICH = Spec(
    weight=Weight.product(lower=0.5, upper=2.0, outside="zero", normalize="batch", token_clamp=5.0),
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
SPECS = [RICH, Spec(), Spec(weight=Weight.token(upper=2.0)), Spec(criteria=RICH.criteria[:1])]
UNITS = [
    {"over": "token"},
    *({"over": o, "reduce": reduce} for o in ("turn", "sequence", "prefix") for reduce in REDUCTIONS),
]


def criterion(**arguments):
    """A valid criterion for these arguments: fills in what the named ones need."""
    if arguments.get("stat") == "external":
        arguments.setdefault("name", "entropy")
    return Criterion(**{"stat": "ratio", "upper": 2.0, **arguments})


# --- values ---


def test_defaults_measure_and_change_nothing():
    spec = Spec()
    assert (spec.weight, spec.criteria, spec.rejected, spec.nonfinite) == (None, (), "mask", "reject")
    assert (spec.clamp, spec.sums_over, spec.detail, spec.apply) == (20.0, "valid", "basic", True)
    assert spec.report == ("native",)
    assert Weight.token() == Weight.token(lower=None, upper=None, outside="clamp", normalize=None, token_clamp=None)
    assert Criterion("ratio", upper=2).eps == 1e-8


def test_every_combination_constructs_with_a_label_of_its_own():
    made = [
        criterion(stat=stat, when=when, drop=drop, of=of, **unit)
        for stat, when, drop, of, unit in itertools.product(STATS, WHEN, DROP, POLICIES, UNITS)
        if drop != "rest" or unit["over"] == "prefix"
    ]
    assert len({one.label for one in made}) == len(made) == len(STATS) * 4 * 3 * (3 * 13 + 4)
    for one in made:
        whole = {"unit": one.over == "sequence", "sequence": True}.get(one.drop, False)
        thins = one.over in ("turn", "sequence") and one.drop == "token"
        assert one.drops_sequences is whole and one.thins is thins, one
        assert "/" not in one.label
    assert criterion(over="sequence", reduce="min").label == "sequence_min_ratio"
    assert criterion(stat="external", name="entropy").label == "token_external_entropy"
    assert criterion(stat="external", name="score").label == "token_score"
    assert criterion(over="prefix", reduce="max", within="turn").label == "prefix_max_ratio_within_turn"


def test_values_are_frozen_hashable_and_comparable():
    for value, same, other in [
        (Weight.token(upper=2), Weight.token(upper=2.0), Weight.token(upper=3)),
        (criterion(), criterion(upper=2), criterion(upper=3)),
        (RICH, copy.deepcopy(RICH), Spec()),
    ]:
        assert value == same and hash(value) == hash(same)
        assert value != other and len({value, same, other}) == 2
    for value, field in [(Weight.token(), "over"), (criterion(), "upper"), (RICH, "clamp")]:
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 1)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_gives_an_equal_value(protocol):
    for value in (RICH, *RICH.criteria, RICH.weight, Spec()):
        kept = hash(value)
        again = pickle.loads(pickle.dumps(value, protocol))
        # Strings have other hashes in another process, so what was kept of them stays in this one.
        assert kept not in vars(again).values()
        assert again == value and hash(again) == kept


def test_criteria_and_report_become_tuples_in_one_order():
    one = criterion()
    assert Spec(criteria=[one]).criteria == Spec(criteria=(item for item in [one])).criteria == (one,)
    assert Spec(report=["skyrl", "verl"]).report == ("native", "verl", "skyrl")
    assert Spec(report=[]) == Spec(report=("native",)) == Spec()
    assert Spec(report=REPORTS).report == REPORTS


def test_numbers_of_other_types_become_floats():
    weight = Weight.token(lower=np.float32(0.5), upper=2, token_clamp=Fraction(5, 2))
    assert (weight.lower, weight.upper, weight.token_clamp) == (0.5, 2.0, 2.5)
    for number in (weight.lower, weight.upper, weight.token_clamp, Spec(clamp=np.int64(7)).clamp):
        assert type(number) is float
    assert criterion(lower=np.float64(1.5)).lower == 1.5


# --- as Python and as plain data ---


@pytest.mark.parametrize("spec", SPECS)
def test_repr_is_the_python_that_builds_it(spec):
    assert eval(repr(spec), {"Spec": Spec, "Weight": Weight, "Criterion": Criterion}) == spec


@pytest.mark.parametrize("over", ["token", "turn", "sequence", "prefix"])
@pytest.mark.parametrize("reduce", [None, *PREFIX_REDUCTIONS])
def test_the_repr_of_a_weight_is_its_short_form(over, reduce):
    """Every ratio that a weight can have, alone and with every other field."""
    others = {"lower": 0.5, "upper": 2, "normalize": "batch", "token_clamp": 5, "decay": 0.5}
    if over == "prefix":
        others |= {"growth": "sqrt", "within": "turn"}
    elif (reduce is None) != (over == "token") or reduce == "min":
        with pytest.raises(ValueError, match=r"Weight\.reduce"):
            Weight(over, reduce)
        return
    for weight in (Weight(over, reduce), Weight(over, reduce, **others)):
        assert eval(repr(weight), {"Weight": Weight}) == weight
        assert Spec.from_dict(Spec(weight).to_dict()).weight == weight
        start = {"token": "Weight.token(", "prefix": "Weight("}
        short = "Weight.product(" if reduce == "sum" else "Weight.geometric("
        assert repr(weight).startswith(start.get(over, short))
    assert repr(Weight("turn", "sum", upper=2)) == 'Weight.product(over="turn", upper=2.0)'
    assert repr(Weight("prefix", "sum")) == 'Weight("prefix")'
    assert repr(Weight("prefix", "min", within="turn")) == 'Weight("prefix", reduce="min", within="turn")'


def test_short_forms_take_what_every_weight_takes():
    """All fields but those of prefixes."""
    fields = {*inspect.signature(Weight).parameters} - {"over", "reduce", "growth", "within"}
    for made in (Weight.token, Weight.product, Weight.geometric):
        assert {*inspect.signature(made).parameters} - {"over"} == fields


def test_repr_leaves_defaults_out():
    assert repr(Spec()) == "Spec()"
    assert repr(Spec(Weight.token(upper=2))) == "Spec(weight=Weight.token(upper=2.0))"
    assert repr(criterion()) == 'Criterion("ratio", upper=2.0)'
    assert repr(criterion(label="mine")) == 'Criterion("ratio", upper=2.0, label="mine")'


@pytest.mark.parametrize(
    "dump_load", [lambda d: d, lambda d: json.loads(json.dumps(d)), lambda d: yaml.safe_load(yaml.safe_dump(d))]
)
@pytest.mark.parametrize("spec", SPECS)
def test_dict_round_trip(spec, dump_load):
    again = Spec.from_dict(dump_load(spec.to_dict()))
    assert again == spec and hash(again) == hash(spec)


def test_dict_holds_only_what_differs_from_the_defaults():
    assert Spec().to_dict() == {}
    # A label that was made from the other fields is made again, of those that somebody edits.
    made = Spec(criteria=(Criterion("k3", upper=0.1),)).to_dict()
    assert made == {"criteria": [{"stat": "k3", "upper": 0.1}]}
    made["criteria"][0]["stat"] = "k2"
    assert Spec.from_dict(made).criteria[0].label == "token_k2"
    plain = Spec(weight=Weight.product(upper=2), criteria=(criterion(lower=0.5, upper=None),)).to_dict()
    assert plain["weight"] == {"over": "sequence", "reduce": "sum", "upper": 2.0}
    assert {**plain["criteria"][0], "label": ""} == {"stat": "ratio", "lower": 0.5, "label": ""}
    assert sorted(plain) == ["criteria", "weight"]


def test_dict_takes_bounds_as_a_pair():
    made = Spec.from_dict(
        {"weight": {"over": "token", "bounds": [None, 2]}, "criteria": [{"stat": "k1", "bounds": [-1, None]}]}
    )
    assert made == Spec(weight=Weight.token(upper=2), criteria=(Criterion("k1", lower=-1),))
    assert Spec.from_dict({"weight": None}) == Spec()


@pytest.mark.parametrize(
    ("bounds", "moves"),
    [
        ({"upper": 0.5}, True),
        ({"lower": 1.5}, True),
        ({"lower": 0.2, "upper": 0.8, "outside": "zero"}, True),
        ({"upper": 1.0}, False),
        ({"lower": 1.0, "upper": 2.0}, False),
        ({"upper": KeepESS(0.5)}, False),
    ],
)
def test_explain_says_where_a_bound_moves_a_weight_of_one(bounds, moves):
    """Whoever writes 0.2 as the width of a clip has bounded the ratio by it."""
    said = Spec(weight=Weight.token(**bounds)).explain()
    assert ("So does a weight of 1, where the two policies agree: bounds are of the ratio." in said) is moves


def test_explain_tells_any_two_specs_apart():
    base = {"weight": Weight.token(upper=2), "criteria": (criterion(),)}
    changes = [{}, {"weight": None}, {"criteria": ()}, {"clamp": 10}, {"apply": False}, {"detail": "full"}]
    changes += [{"rejected": x} for x in ("zero", "both")] + [{"nonfinite": x} for x in ("neutral", "propagate")]
    changes += [{"report": ("verl",)}, {"criteria": (criterion(label="other"),)}]
    stretches = itertools.product((Weight.product, Weight.geometric), STRETCHES)
    changes += [{"weight": made(over, upper=2)} for made, over in stretches]
    bounds = [{"upper": 3}, {"lower": 0.5, "upper": 2}, {"upper": 2, "outside": "zero"}, {"upper": 2, "token_clamp": 5}]
    changes += [{"weight": Weight.token(**x)} for x in (*bounds, {"upper": 2, "normalize": "batch"})]
    one = [{"stat": stat} for stat in STATS] + [{"when": when} for when in WHEN[1:]] + [{"drop": "sequence"}]
    changes += [{"criteria": (criterion(**x, label="one"),)} for x in one]
    changes += [{"weight": Weight("prefix", upper=2, reduce=reduce)} for reduce in PREFIX_REDUCTIONS]
    changes += [{"weight": Weight("prefix", upper=2, growth="sqrt")}]
    changes += [{"criteria": (criterion(over="prefix", reduce="sum", growth="sqrt", label="one"),)}]
    for over, reduce, drop in itertools.product(("sequence", "prefix"), REDUCTIONS, DROP):
        # Of a prefix the unit is a token.
        if (drop == "rest" and over == "sequence") or (drop == "token" and over == "prefix"):
            continue
        many = (criterion(over=over, reduce=reduce, drop=drop, when="outward", label="one"),)
        changes += [{"criteria": many}, {"criteria": many, "sums_over": "kept"}]
    texts = [Spec(**{**base, **change}).explain() for change in changes]
    for i, text in enumerate(texts):
        assert text not in texts[:i], changes[i]


# --- what is refused ---

NAMES = {"Spec": Spec, "Weight": Weight, "Criterion": Criterion, "nan": math.nan, "inf": math.inf}


def refused(python, error, message):
    with pytest.raises(error) as raised:
        eval(python, NAMES)
    assert str(raised.value).startswith(message), str(raised.value)


CHOICES = {
    'Weight({})': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix']",
    'Weight("sequence", {})': "Weight.reduce: expected one of ['sum', 'mean']",
    'Weight.product(over={})': "Weight.over: expected one of ['turn', 'sequence']",
    'Weight.token(outside={})': "Weight.outside: expected one of ['clamp', 'zero']",
    'Weight("prefix", reduce={})': "Weight.reduce: expected one of ['sum', 'mean', 'min']",
    'Weight("prefix", growth={})': "Weight.growth: expected one of ['sqrt']",
    'Weight.token(normalize={})': "Weight.normalize: expected one of ['batch', 'group', 'sequence']",
    'Criterion({}, upper=2)': f"Criterion.stat: expected one of {list(STATS)}",
    'Criterion("k1", upper=2, over={})': "Criterion.over: expected one of ['token', 'turn', 'sequence', 'prefix']",
    'Criterion("k1", upper=2, over="sequence", reduce={})': f"Criterion.reduce: expected one of {list(REDUCTIONS)}",
    'Criterion("k1", upper=2, when={})': f"Criterion.when: expected one of {list(WHEN)}",
    'Criterion("k1", upper=2, drop={})': "Criterion.drop: expected one of ['unit', 'sequence', 'token', 'rest']",
    'Criterion("k1", upper=2, of={})': "Criterion.of: expected one of ['train/rollout', 'new/rollout', 'new/old']",
    'Spec(rejected={})': "Spec.rejected: expected one of ['mask', 'zero', 'both']",
    'Spec(nonfinite={})': "Spec.nonfinite: expected one of ['reject', 'neutral', 'propagate']",
    'Spec(sums_over={})': "Spec.sums_over: expected one of ['valid', 'kept']",
    'Spec(detail={})': "Spec.detail: expected one of ['basic', 'full']",
}  # fmt: skip


@pytest.mark.parametrize("python", CHOICES)
def test_unknown_name_is_answered_with_the_known_ones(python):
    refused(python.format("'nonsense'"), ValueError, f"{CHOICES[python]}, got 'nonsense'")
    refused(python.format(3), TypeError, f"{CHOICES[python]}, got int 3")


WRONG_TYPES = {
    "Spec(turns=1)": "Spec.turns: expected True or False, got int 1",
    'Weight.token(upper="2")': "Weight.upper: expected a number, got the string '2'",
    'Weight.token(upper="0.5_2")': "Weight.upper: expected a number, got the string '0.5_2' ('low_high' strings are "
    "a framework's grammar: use rc.spec)",
    'Weight.token(upper=True)': "Weight.upper: expected a number, got bool True",
    'Weight.token(lower=[1])': "Weight.lower: expected a number, got list [1]",
    'Weight.token(token_clamp="5")': "Weight.token_clamp: expected a number, got the string '5'",
    'Criterion("ratio", lower=False)': "Criterion.lower: expected a number, got bool False",
    'Criterion("ratio", upper="0.5_5.0")': "Criterion.upper: expected a number, got the string '0.5_5.0' ('low_high' "
    "strings are a",
    'Spec(weight="token")': "Spec.weight: expected a Weight or None, got str 'token'",
    'Spec(weight={"over": "token"})': "Spec.weight: expected a Weight or None, got dict",
    'Spec(criteria=Criterion("ratio", upper=2))': "Spec.criteria: expected a tuple of Criterion, got Criterion",
    "Spec(criteria=3)": "Spec.criteria: expected a tuple of Criterion, got int",
    'Spec(criteria=({"stat": "ratio"},))': "Spec.criteria: expected Criterion, got dict",
    "Spec(apply=1)": "Spec.apply: expected True or False, got int 1",
    'Spec(report="verl")': "Spec.report: expected a tuple of names, got str 'verl'",
    "Spec(clamp=True)": "Spec.clamp: expected a number, got bool True",
    'Spec.from_dict({"weight": "token"})': "Spec.weight: expected a mapping, got str 'token'",
    'Spec.from_dict({"criteria": {"stat": "ratio"}})': "Spec.criteria: expected a list of mappings, got dict",
    'Spec.from_dict({"criteria": "ratio"})': "Spec.criteria: expected a list of mappings, got str",
    'Spec.from_dict({"criteria": ["ratio"]})': "Spec.criteria[0]: expected a mapping, got str 'ratio'",
    "Spec.from_dict([])": "Spec: expected a mapping, got list",
}  # fmt: skip
WRONG_VALUES = {
    'Weight.token(upper=nan)': "Weight.upper: expected a number, got nan",
    'Weight.token(lower=nan)': "Weight.lower: expected a number, got nan",
    'Weight.token(lower=-1)': "Weight.lower: expected a number >= 0, got -1.0",
    'Weight.token(upper=0)': "Weight.upper: expected a number > 0, got 0.0",
    'Weight.token(lower=2, upper=1)': "Weight: expected lower <= upper, got lower=2.0, upper=1.0",
    'Weight.token(token_clamp=0)': "Weight.token_clamp: expected a finite number > 0, got 0.0",
    'Weight.token(token_clamp=inf)': "Weight.token_clamp: expected a finite number > 0, got inf",
    'Criterion("ratio", upper=2, reduce="mean")': "Criterion.reduce: expected None with over='token', got 'mean'",
    'Criterion("ratio", upper=2, over="sequence")': "Criterion.reduce: expected one of ['sum', 'mean', 'max', 'min'] "
    "with over='sequence', got None",
    'Criterion("ratio")': "Criterion: expected lower, upper or both, got neither",
    'Criterion("ratio", lower=2, upper=1)': "Criterion: expected lower <= upper, got lower=2.0",
    'Criterion("k1", lower=2, upper=-1)': "Criterion: expected lower <= upper, got lower=2.0",
    'Criterion("k2", lower=-0.1)': "Criterion.lower: expected a number >= 0, got -0.1",
    'Criterion("ratio", upper=nan)': "Criterion.upper: expected a number, got nan",
    'Criterion("external", upper=1)': "Criterion.name: expected the key of an external tensor, got None",
    'Criterion("external", upper=1, name="")': "Criterion.name: expected the key of an external tensor, got ''",
    'Criterion("ratio", upper=2, name="a")': "Criterion.name: expected None unless stat='external', got 'a'",
    'Criterion("ratio", upper=2, label="a/b")': "Criterion.label: expected a string without '/', got 'a/b'",
    'Criterion("ratio", upper=2, label=3)': "Criterion.label: expected a string without '/', got 3",
    'Criterion("ratio", upper=2, eps=0)': "Criterion.eps: expected a finite number > 0, got 0.0",
    'Criterion("ratio", upper=2, eps=nan)': "Criterion.eps: expected a number, got nan",
    'Criterion("ratio", upper=2, token_clamp=-5)': "Criterion.token_clamp: expected a finite number > 0, got -5.0",
    'Spec(criteria=(Criterion("ratio", upper=2), Criterion("ratio", upper=3)))': "Spec.criteria: expected different "
    "labels, got 'token_ratio' twice; set Criterion.label",
    'Criterion("ratio", upper=2, over="turn")': "Criterion.reduce: expected one of ['sum', 'mean', 'max', 'min'] ",
    'Weight("product")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'product'; "
    "write Weight.product(...)",
    'Weight("geometric")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'geometric'; "
    "write Weight.geometric(...)",
    'Weight("seq", "sum")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'seq'; write "
    "'sequence'",
    'Weight.product("sample")': "Weight.over: expected one of ['turn', 'sequence'], got 'sample'; write 'sequence'",
    'Weight("sequence", "geometric")': "Weight.reduce: expected one of ['sum', 'mean'], got 'geometric'; write 'mean'",
    'Weight("prefix", "product")': "Weight.reduce: expected one of ['sum', 'mean', 'min'], got 'product'; write 'sum'",
    'Criterion("ratio", over="seq", reduce="mean", upper=2)': "Criterion.over: expected one of ['token', 'turn', "
    "'sequence', 'prefix'], got 'seq'; write 'sequence'",
    'Criterion("ratio", over="geometric", upper=2)': "Criterion.over: expected one of ['token', 'turn', 'sequence', "
    "'prefix'], got 'geometric'; write stat='ratio', over='sequence', reduce='mean'",
    'Criterion("ratio", over="sequence", reduce="geometric", upper=2)': "Criterion.reduce: expected one of ['sum', "
    "'mean', 'max', 'min'], got 'geometric'; write stat='ratio', over='sequence', reduce='mean'",
    'Criterion("product", upper=2)': f"Criterion.stat: expected one of {list(STATS)}, got 'product'; write "
    "stat='ratio', over='sequence', reduce='sum'",
    'Criterion("kl", upper=2)': f"Criterion.stat: expected one of {list(STATS)}, got 'kl'; write 'k1', which is -D, or",
    'Criterion("k1", reduce="mean", upper=2)': "Criterion.reduce: expected None with over='token', got 'mean'; for a "
    "value of all the tokens of a sequence write over='sequence'",
    'Weight("token", "sum")': "Weight.reduce: expected None with over='token', got 'sum'",
    'Weight("token", 2.0)': "Weight.reduce: expected None with over='token', got 2.0; write bounds as ",
    'Weight("turn")': "Weight.reduce: expected 'sum', the product of the ratios, or 'mean', their geometric mean, with "
    "over='turn', got None",
    'Weight("sequence", "min")': "Weight.reduce: expected one of ['sum', 'mean'] unless over='prefix', got 'min'",
    'Weight("turn", "sum", within="turn")': "Weight.within: expected its default unless over='prefix', got 'turn'",
    'Weight.product("token")': "Weight.over: expected one of ['turn', 'sequence'], got 'token'",
    'Spec(Weight.product(over="turn"), report=("verl",))': "Spec.report: expected ('native',) with a weight or ",
    'Spec(report=("trl",))': "Spec.report: expected one of ['native', 'verl', 'xtuner', 'skyrl'], got 'trl'",
    "Spec(clamp=41)": "Spec.clamp: expected a finite number > 0 and <= 40, got 41.0",
    "Spec(clamp=0)": "Spec.clamp: expected a finite number > 0 and <= 40, got 0.0",
    "Spec(clamp=nan)": "Spec.clamp: expected a number, got nan",
    'Spec.from_dict({"wieght": None})': "Spec: unknown key 'wieght', expected some of ['weight', 'criteria'",
    'Spec.from_dict({"weight": {"over": "token", "uper": 2}})': "Spec.weight: unknown key 'uper', expected some of "
    "['over', 'reduce', 'lower', 'upper', 'outside', 'normalize', 'token_clamp', 'growth', 'within', 'decay', ",
    'Spec.from_dict({"weight": {"upper": 2}})': "Spec.weight: expected the key 'over', got ['upper']",
    'Spec.from_dict({"criteria": [{"stat": "k1", "upper": 2}, {"upper": 2}]})': "Spec.criteria[1]: expected the key "
    "'stat'",
    'Spec.from_dict({"criteria": [{"stat": "k1", "bounds": [1, 2], "upper": 2}]})': "Spec.criteria[0].bounds: expected "
    "either bounds or lower and upper, got both",
    'Spec.from_dict({"weight": {"over": "token", "bounds": [1, 2, 3]}})': "Spec.weight.bounds: expected a pair "
    "[lower, upper], got [1, 2, 3]",
    'Spec.from_dict({"weight": {"over": "token", "bounds": "ab"}})': "Spec.weight.bounds: expected a pair [lower, "
    "upper], got 'ab'",
    'Spec.from_dict({"weight": {"over": "token", "bounds": 2}})': "Spec.weight.bounds: expected a pair [lower, "
    "upper], got 2",
}  # fmt: skip


@pytest.mark.parametrize("python", [*WRONG_TYPES, *WRONG_VALUES])
def test_what_is_wrong_is_named_with_expected_and_got(python):
    of_types = python in WRONG_TYPES
    refused(python, TypeError if of_types else ValueError, (WRONG_TYPES if of_types else WRONG_VALUES)[python])
