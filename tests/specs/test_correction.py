"""Spec, Weight and Criterion: plain values that say in words what they do, and refuse what makes no sense."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import pickle
from dataclasses import FrozenInstanceError

import pytest
import yaml

import rollout_corr as rc
from rollout_corr.specs.choices import DROP, POLICIES, PREFIX_REDUCTIONS, REDUCTIONS, REPORTS, STATS, STRETCHES, WHEN
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.encode import decode, encode

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
RULES = Spec(
    weight=Weight.product(lower=0.5, upper=rc.KeepESS(0.25)),
    criteria=(
        Criterion("k2", upper=rc.MeanBelow(0.02)),
        Criterion("ratio", lower=rc.Quantile(0.01), upper=rc.Quantile(0.99), label="middle"),
        Criterion("external", name="entropy", lower=rc.TopK(share=0.2)),
        Criterion("k3", over="sequence", reduce="mean", lower=1e-6, upper=rc.Bottom(64)),
    ),
)
SPECS = [RICH, RULES, Spec(), Spec(weight=Weight.token(upper=2.0)), Spec(criteria=RICH.criteria[:1])]
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
    assert len({each.label for each in made}) == len(made) == len(STATS) * 4 * 3 * (3 * 13 + 4)
    for each in made:
        whole = {"unit": each.over == "sequence", "sequence": True}.get(each.drop, False)
        thins = each.over in ("turn", "sequence") and each.drop == "token"
        assert each.drops_sequences is whole and each.thins is thins, each
        assert "/" not in each.label
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
    for value in (RICH, RULES, *RICH.criteria, RICH.weight, Spec()):
        kept = hash(value)
        again = pickle.loads(pickle.dumps(value, protocol))
        # Strings have other hashes in another process, so what was kept of them stays in this one.
        assert kept not in vars(again).values()
        assert again == value and hash(again) == kept


def test_criteria_and_report_become_tuples_in_one_order():
    test = criterion()
    assert Spec(criteria=[test]).criteria == Spec(criteria=(item for item in [test])).criteria == (test,)
    assert Spec(report=["skyrl", "verl"]).report == ("native", "verl", "skyrl")
    assert Spec(report=[]) == Spec(report=("native",)) == Spec()
    assert Spec(report=REPORTS).report == REPORTS


# --- as Python and as plain data ---


@pytest.mark.parametrize("spec", SPECS)
def test_repr_is_the_python_that_builds_it_and_an_operator_s_text_decodes_to_it(spec):
    assert eval(repr(spec), {name: getattr(rc, name) for name in rc.__all__}) == spec
    assert decode(*encode(spec)) == spec


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
    assert RULES.to_dict()["criteria"][3]["upper"] == {"rule": "Bottom", "count": 64}
    pair = {"criteria": [{"stat": "abs", "bounds": [None, {"rule": "Quantile", "q": 0.9}]}]}
    assert Spec.from_dict(pair).criteria[0].upper == rc.Quantile(0.9)


@pytest.mark.parametrize(
    ("bounds", "moves"),
    [
        ({"upper": 0.5}, True),
        ({"lower": 1.5}, True),
        ({"lower": 0.2, "upper": 0.8, "outside": "zero"}, True),
        ({"upper": 1.0}, False),
        ({"lower": 1.0, "upper": 2.0}, False),
        ({"upper": rc.KeepESS(0.5)}, False),
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
    fields = [{"stat": stat} for stat in STATS] + [{"when": when} for when in WHEN[1:]] + [{"drop": "sequence"}]
    changes += [{"criteria": (criterion(**x, label="one"),)} for x in fields]
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
