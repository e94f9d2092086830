"""Spec.to_config: what is written is read back as the same Spec, or the field that cannot be said is named."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from frameworks.test_read import READ, cases
from frozen.generator import random_spec
from rollout_corr.frameworks.shared import writing
from rollout_corr.frameworks.shared.lookup import readable
from rollout_corr.frameworks.shared.nearest import nearest
from rollout_corr.specs.choices import WHEN
from rollout_corr.specs.correction import Criterion, Spec, Weight

FRAMEWORKS = readable("read")
NAMED = {name: rc.spec(name) for name in rc.spec_names()}

# The named specs that their framework's own configuration cannot say, with what it lacks.
UNSAID = {
    "nemo.icepop": r'criteria\[0\]=Criterion\("ratio", [^()]*\) has no setting',  # its icepop is a weight here
    "prime_rl.ref_kl": r"criteria\[0\]\.upper=None has no setting",  # the loss of its distillation is no `loss.type`
    "verl.staleness": r'criteria\[0\]=Criterion\("age"',  # settings of the sampler, as xtuner's
    "xtuner.staleness": r'criteria\[0\]=Criterion\("age"',
}


def said(spec):
    """What a Spec says as plain data, without labels and report, criteria in any order, k1's bounds rounded."""
    fields = {**spec.to_dict(), "report": None}
    criteria = [{**one, "label": None} for one in fields.pop("criteria", [])]
    bounded = [*criteria, fields["weight"]] if "weight" in fields else criteria
    for one in bounded:
        for side in ("lower", "upper"):
            if isinstance(one.get(side), float):
                one[side] = float(f"{one[side]:.11g}")
        if one.get("lower") == 0.0 and one.get("stat", "ratio") == "ratio":
            del one["lower"]
        if "lower" not in one and "upper" not in one:
            one.pop("outside", None)
    units = {one.get("over", "token") for one in criteria}
    weighed = fields.get("weight", {"over": "token"})["over"]
    if "token" not in units or (units == {"token"} and weighed == "token"):
        fields.pop("sums_over", None)
    return fields, sorted(criteria, key=repr)


def assert_read_back(spec, framework, config):
    read = rc.spec(framework, config)
    assert said(read) == said(spec)
    assert json.loads(json.dumps(config)) == config, "plain data"
    return read


def test_what_is_read_can_be_written():
    assert readable("write") == FRAMEWORKS


@pytest.mark.parametrize("name", [name for name in NAMED if name.partition(".")[0] in FRAMEWORKS])
def test_a_framework_says_its_own_specs(name):
    framework = name.partition(".")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if name in UNSAID:
            with pytest.raises(ValueError, match=rf"^to_config\('{framework}'\): {UNSAID[name]}"):
                NAMED[name].to_config(framework)
        else:
            assert_read_back(NAMED[name], framework, NAMED[name].to_config(framework))


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_specs_of_others_are_read_back_or_refused(framework):
    said_here, refused = 0, []
    for name, spec in NAMED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                config = spec.to_config(framework)
            except ValueError as error:
                refused.append(str(error))
                continue
        assert_read_back(spec, framework, config)
        said_here += not name.startswith(f"{framework}.")
    # In words of the Spec: the settings that were tried nobody has written.
    assert all(re.search("ha(s|ve) no setting|there the criteria have", said) and "{" not in said for said in refused)
    assert said_here > 0, "no other spec can be said"


@pytest.mark.parametrize(
    ("framework", "key", "low"),
    [
        ("molt", "algo.advantage.is_correction_threshold", [0.0, 3.0]),  # a pair of numbers on its command line
        ("slime", "tis_clip_low", 0.0),
        ("miles", "tis_clip_low", 0.0),
        ("areal", "lower", None),
    ],
)
def test_an_open_side_is_null_where_the_default_is(framework, key, low):
    of_molt = Spec(Weight.token(upper=3.0, token_clamp=30.0), clamp=30.0, nonfinite="neutral")
    of_areal = Spec(Weight.token(upper=3.0), nonfinite="neutral")
    spec = {"molt": of_molt, "areal": of_areal}.get(framework, Spec(Weight.token(upper=3.0)))
    config = spec.to_config(framework)
    assert config.get("rejection_sampling", config)[key] == low


def has_a_setting(framework, text, expected):
    """Tell whether a row has a Spec; verl has no veto and no test of the ratio any more."""
    old = framework == "verl" and ("VETO" in expected or "ratio(" in expected)
    return expected.startswith(("Spec", "named")) and not old


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("framework", "text", "expected"), [case for case in cases(READ) if has_a_setting(*case.values)]
)
def test_what_was_read_can_be_written(framework, text, expected):
    spec = rc.spec(framework, yaml.safe_load(text))
    assert_read_back(spec, framework, spec.to_config(framework))


BOUNDS = st.one_of(st.sampled_from((None, 0.0, 0.5, 1.0, 2.0)), st.floats(1e-6, 1e6), st.floats(-2.0, 2.0))


@st.composite
def near(draw):
    """A named spec with other bounds and now and then another field: what a framework can say, or nearly."""
    spec = NAMED[draw(st.sampled_from(sorted(NAMED)))]

    def changed(part):
        fields = {side: draw(BOUNDS) for side in ("lower", "upper") if draw(st.booleans())}
        if isinstance(part, Criterion):
            fields["when"] = draw(st.sampled_from((part.when, part.when, part.when, *WHEN)))
            fields["drop"] = draw(st.sampled_from((part.drop, part.drop, part.drop, "unit", "sequence", "token")))
        else:
            fields["outside"] = draw(st.sampled_from((part.outside, part.outside, "clamp", "zero")))
            fields["normalize"] = draw(st.sampled_from((part.normalize, part.normalize, "batch", "group")))
        try:
            return replace(part, **fields, **({"label": f"c{draw(st.integers())}"} if "when" in fields else {}))
        except ValueError:
            return part

    more = draw(st.sampled_from((*[{}] * 5, {"detail": "full"}, {"apply": False}, {"clamp": 30.0}, {"report": ()})))
    more |= draw(st.sampled_from((*[{}] * 5, {"rejected": "zero"}, {"nonfinite": "neutral"}, {"sums_over": "kept"})))
    weight = None if spec.weight is None or draw(st.integers(0, 5)) == 0 else changed(spec.weight)
    try:
        return replace(spec, weight=weight, criteria=tuple(map(changed, spec.criteria)), **more)
    except ValueError:
        return spec


@settings(max_examples=80, deadline=None)
@given(st.one_of(near(), near(), near(), st.randoms(use_true_random=False).map(random_spec)), st.data())
def test_it_is_read_back_or_refused(spec, data):
    frameworks = FRAMEWORKS if data.draw(st.booleans()) else [data.draw(st.sampled_from(FRAMEWORKS))]
    for framework in frameworks:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                config = spec.to_config(framework)
            except ValueError:
                continue
        assert_read_back(spec, framework, config)


# --- verl's k1 ---


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-4.0, 4.0), min_size=2, max_size=2).map(sorted))
def test_bounds_of_k1_are_written_as_ratios(bounds):
    spec = Spec(criteria=(Criterion("k1", "sequence", "mean", *bounds, token_clamp=20.0),))
    config = spec.to_config("verl")
    (read,) = rc.spec("verl", config).criteria
    assert (read.lower, read.upper) == pytest.approx(bounds, rel=1e-12, abs=1e-15)
    assert config["rollout_rs"] == "seq_mean_k1"


def test_bounds_of_k1_that_were_read_are_written_as_they_stood():
    config = {"rollout_is": None, "rollout_rs": "token_k1,seq_sum_k3", "rollout_rs_threshold": "0.6_1.4,0.1"}
    assert rc.spec("verl", config).to_config("verl") == config
    as_ratio = rc.spec("verl", config, k1_bounds="ratio")
    assert as_ratio.to_config("verl", k1_bounds="ratio") == config


def test_a_test_of_the_ratio_has_reciprocal_bounds_in_verl():
    """verl keeps -log r within the logs of its bounds: the ratio within their inverses, in the other order."""
    spec = Spec(criteria=(Criterion("ratio", "sequence", "mean", lower=0.8, upper=2.0),))
    with pytest.raises(ValueError, match=r'criteria\[0\]\.stat="ratio" has no setting: verl tests k1') as caught:
        spec.to_config("verl")
    line = re.search(r"rollout_rs: '(\w+)', rollout_rs_threshold: '([\d._]+)'", str(caught.value))
    assert line is not None and line.groups() == ("seq_mean_k1", "0.5_1.25")
    near = eval(re.search(r"the nearest is (Criterion\(.*\)), written", str(caught.value))[1], {"Criterion": Criterion})
    as_verl = rc.spec("verl", {"rollout_rs": line[1], "rollout_rs_threshold": line[2]})
    assert said(as_verl) == said(Spec(criteria=(near,)))
    assert spec.to_config("verl", k1_bounds="ratio")["rollout_rs_threshold"] == "0.8_2.0"


# --- what the errors say ---

TIS = Weight.token(upper=2.0)
# By the engine's log-probs, next to which slime takes no weight.
OPSM = rc.spec("slime", {"use_opsm": True, "use_rollout_logprobs": True})
REFUSED = [
    ("verl", Spec(replace(TIS, normalize="group")), r'weight\.normalize="group" has no setting'),
    ("verl", Spec(replace(TIS, lower=0.5)), r"weight\.lower=0\.5 has no setting$"),
    ("verl", Spec(Weight.geometric(upper=2.0)), r"weight=.* has no setting$"),
    ("verl", Spec(Weight.token()), r"weight\.upper=None has no setting, there it is 2\.0$"),
    ("verl", Spec(TIS, apply=False), r"apply=False has no setting, there it is True$"),
    ("verl", Spec(TIS, (Criterion("k3", upper=1.0),)), r"criteria\[0\]\.token_clamp=None has no setting, .* 20\.0$"),
    ("verl", Spec(Weight.token(upper=rc.Quantile(0.99))), r"weight\.upper=Quantile\(0\.99\), decided by the batch"),
    ("verl", Spec(criteria=(Criterion("ratio", drop="sequence", lower=1e-4),)), r"criteria\[0\]=Criterion\("),
    ("trl", Spec(TIS), r'nonfinite="reject" has no setting, there it is "neutral"$'),
    ("prime_rl", Spec(), r"there the criteria have .* too"),
    ("skyrl", Spec(TIS, rejected="zero"), r'rejected="zero" has no setting, there it is "mask"$'),
    ("xtuner", Spec(criteria=(Criterion("ratio", upper=2.0),)), r"criteria\[0\]=Criterion\(.*\) has no setting$"),
    # A statistic, a level, and two settings that exclude each other.
    ("trl", NAMED["verl.decoupled_seq_is_rs"], r'criteria\[0\]=Criterion\("k1", [^()]*\) has no setting;'),
    ("areal", NAMED["roll.segment"], r"weight=Weight\.[^()]*\([^()]*\) has no setting;"),
    # A flag is no null.
    *(
        (flags, Spec(Weight.token(lower=0.5)), r"weight\.upper=None has no setting, there it is 2\.0$")
        for flags in ("slime", "miles")
    ),
    (
        "molt",
        replace(NAMED["molt.token"], weight=Weight.token(lower=0.5, token_clamp=30.0), criteria=(), rejected="mask"),
        r"weight\.upper=None has no setting",
    ),
    ("slime", replace(OPSM, weight=TIS), r'criteria\[0\]\.of="new/rollout" has no setting, there it is "new/old"$'),
    ("slime", NAMED["swift.opsm"], r"weight\.token_clamp=20\.0 has no setting; criteria\[0\]=Criterion\("),
    # Another ratio is one difference, whatever its fields say.
    (
        "openrlhf",
        Spec(Weight("prefix", token_clamp=20.0)),
        r'weight=Weight\("prefix", [^()]*\) has no setting$',
    ),
]


@pytest.mark.parametrize(("framework", "spec", "message"), REFUSED)
def test_the_error_names_what_cannot_be_said(framework, spec, message):
    with pytest.raises(ValueError, match=rf"^to_config\('{framework}'\): {message}"):
        spec.to_config(framework)


def test_a_framework_without_a_configuration_is_refused_with_the_others():
    with pytest.raises(ValueError, match=r"to_config: expected a framework whose .* one of \['areal', .*'megatron'$"):
        Spec().to_config("megatron")
    with pytest.raises(TypeError, match=r"^to_config\('trl'\): .*k1_bounds"):
        Spec().to_config("trl", k1_bounds="ratio")


def test_a_spec_in_the_manner_of_a_framework_costs_few_readings(monkeypatch):
    """Settings without a part of the Spec are read once in all, for the reason of a refusal."""
    veto = Criterion("ratio", "sequence", "min", lower=1e-4)
    suggested = Spec(criteria=(Criterion("ratio", "sequence", "mean", lower=0.99, upper=1.01), veto))
    read, readings = writing._read, []
    monkeypatch.setattr(writing, "_read", lambda *given: readings.append(given) or read(*given))
    for framework in ("areal", "open_instruct", "skyrl", "trl"):
        for _ in range(2):  # its table is read once in a process
            readings.clear()
            with contextlib.suppress(ValueError):
                nearest(suggested, framework)
        assert len(readings) <= 3, framework


def test_thresholds_are_numbers_that_yaml_reads():
    """A bound below 1 stands as text, because a number there looks like a mangled pair."""
    assert Spec(Weight.token(upper=0.52)).to_config("verl")["rollout_is_threshold"] == "0.52"
    assert Spec(TIS).to_config("verl") == {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
    }
    assert math.isclose(
        math.log(1.4), rc.spec("verl", {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.4}).criteria[0].high
    )
