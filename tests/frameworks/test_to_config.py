"""Spec.to_config: what is written is read back as the same Spec, or the field that cannot be said is named."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_corr as rc
from builders.calls import bundled
from builders.strategies import specs
from rollout_corr.frameworks.shared.lookup import readable
from rollout_corr.specs.choices import WHEN
from rollout_corr.specs.correction import Criterion, Spec, Weight

FRAMEWORKS = readable("read")
NAMED = {name: rc.spec(name) for name in rc.spec_names()}

# The named specs that their framework's own configuration cannot say, with what it lacks.
UNSAID = {
    "nemo.icepop": r'.*weight\.outside="clamp" has no setting, there it is "zero"',
    "prime_rl.ref_kl": r'criteria\[0\]=Criterion\("prob_diff"',  # the loss of its distillation is no `loss.type`
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


def batch():
    """Padded log-probs near and far from each other, with a NaN and masked ends."""
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(24, 9, generator=generator) * 3.0
    train = rollout + torch.randn(24, 9, generator=generator) * torch.logspace(-4, 0.3, 24)[:, None]
    train[5, 2] = torch.nan
    return train, rollout, torch.rand(24, 9, generator=generator) < 0.8


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_another_framework_says_weighs_and_masks_the_same(framework):
    """Every named spec of all frameworks, where this one can say it."""
    train, rollout, mask = batch()
    others = 0
    for name, spec in NAMED.items():
        try:
            config = spec.to_config(framework)
        except ValueError:
            continue
        read = assert_read_back(spec, framework, config)
        others += not name.startswith(f"{framework}.")
        if any(c.of != "train/rollout" or c.stat == "age" for c in spec.criteria):
            continue
        more = {"advantages": torch.linspace(-1.0, 1.0, 24), "turns": "runs"}
        wanted, found = (rc.correct(train, rollout, **bundled(mask=mask, spec=one, **more)) for one in (spec, read))
        assert torch.equal(wanted.mask, found.mask), name
        assert (wanted.weights is None) == (found.weights is None), name
        if wanted.weights is not None:
            assert torch.equal(wanted.weights, found.weights), name
    assert others > 0, "no other spec can be said"


LEVELS, SWITCH, AT_LEAST = ("token", "sequence", "geometric"), st.booleans(), st.floats(0.01, 0.99)
AT_MOST, MAYBE_LOW, MAYBE_HIGH = (
    st.floats(1.01, 50.0),
    st.none() | st.floats(0.01, 0.99),
    st.none() | st.floats(1.01, 50.0),
)
PAIR, OPTIONAL_PAIR = st.tuples(AT_MOST, AT_LEAST), st.none() | st.tuples(AT_MOST, AT_LEAST)
RS = st.sampled_from(("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k2"))
MODES = [f"{unit}_{way}" for unit in LEVELS for way in ("mask", "truncate")]
TRL = {
    "vllm_importance_sampling_correction": SWITCH,
    "vllm_importance_sampling_mode": [
        f"{unit}_{way}" for unit in ("token", "sequence") for way in ("mask", "truncate")
    ],
    "vllm_importance_sampling_clip_max": MAYBE_HIGH,
    "vllm_importance_sampling_clip_min": MAYBE_LOW,
    "off_policy_mask_threshold": MAYBE_LOW,
}
SLIME = {
    "use_tis": SWITCH,
    "tis_clip": AT_MOST,
    "tis_clip_low": AT_LEAST,
    "custom_tis_function_path": [None, "x.icepop_function", "x.compute_mis_weights_with_cp"],
    "use_opsm": SWITCH,
    "opsm_delta": AT_LEAST,
    "use_rs": SWITCH,
    "tis_level": LEVELS,
    "rs_level": LEVELS,
    "tis_mode": ("truncate", "clip", "mask"),
    "tis_lower_bound": AT_LEAST,
    "tis_upper_bound": AT_MOST,
    "rs_lower_bound": MAYBE_LOW,
    "rs_upper_bound": MAYBE_HIGH,
    "rs_veto_threshold": MAYBE_LOW,
    "tis_batch_normalize": SWITCH,
}
FILTER = {
    "enabled": SWITCH,
    "agg_type": (*LEVELS, "segment"),
    **dict.fromkeys(("ratio_enabled", "diff_enabled"), SWITCH),
    "ratio_low": AT_LEAST,
    "ratio_high": MAYBE_HIGH,
    "diff_low": st.floats(-0.5, -0.01),
    "diff_high": AT_LEAST,
}


def block(settings):
    """Draws a block of settings: each has a strategy or its choices."""
    drawn = {name: st.sampled_from(at) if isinstance(at, (tuple, list)) else at for name, at in settings.items()}
    return st.fixed_dictionaries(drawn)


# Settings of each framework's correction, of its current generation.
SETTINGS = {
    "areal": block({
        "level": ("token", "sequence"),
        "action": ("mask", "clamp"),
        "metric": ("ratio", "kl_rollout_train_k1", "kl_rollout_train_k2", "kl_rollout_train_k3", "binary_kl"),
        "agg": ("sum", "mean", "max"),
        "upper": AT_MOST,
        "lower": MAYBE_LOW,
    }),
    "molt": block({
        "algo.advantage.is_correction_level": ("off", "token", "seq", "geo"),
        "algo.advantage.is_correction_mode": ("mask", "clip", "trunc"),
        "algo.advantage.is_correction_threshold": st.tuples(AT_LEAST, AT_MOST),
    }),
    "nemo": st.fixed_dictionaries({
        "loss_fn": block({
            "use_importance_sampling_correction": SWITCH,
            "sequence_level_importance_ratios": SWITCH,
            "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
            "truncated_importance_sampling_ratio": MAYBE_HIGH,
            "truncated_importance_sampling_ratio_min": MAYBE_LOW,
        }),
        "grpo": block({"seq_logprob_error_threshold": MAYBE_HIGH}),
    }),
    "open_instruct": block({
        **dict.fromkeys(("use_rho_correction", "rho_mask_sequence_level", "rho_mask_tv_divergence"), SWITCH),
        **dict.fromkeys(("rho_clamp_lower_bound", "rho_mask_lower_bound"), st.just(0.0) | AT_LEAST),
        **dict.fromkeys(("rho_clamp_upper_bound", "rho_mask_upper_bound"), st.just(0.0) | AT_MOST),
    }),
    "openrlhf": block({
        "algo.advantage.is_correction_level": ("off", "token", "seq"),
        "algo.advantage.is_correction_mode": ("mask", "clip"),
        "algo.advantage.is_correction_gating": ("ratio", "binary_kl", "tv"),
        "algo.advantage.is_correction_threshold": st.tuples(st.just(0.0) | AT_LEAST, AT_MOST),
    }),
    "prime_rl": st.one_of(
        block({"type": ("ipo",), "eps": AT_LEAST}),
        block({"type": ("icepop",), "ratio_low": AT_LEAST, "ratio_high": AT_MOST}),
        block({"type": ("kpop",), "kpop_threshold": AT_LEAST}),
        block({"type": ("default",), "dppo_mask_low": AT_LEAST, "dppo_mask_high": AT_LEAST}),
    ),
    "roll": block({
        "is_weight": block({"enabled": SWITCH, "weight_type": (*LEVELS, "segment"), "upper_bound": MAYBE_HIGH}),
        "filters": st.lists(block(FILTER), max_size=2),
    }),
    "skyrl": block({
        "tis_ratio_type": (None, "token", "sequence"),
        **dict.fromkeys(("token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high"), AT_MOST),
        "sequence_mask_metric": (None, "geometric", "product"),
        **dict.fromkeys(("geo_mask_high", "product_mask_high"), AT_MOST),
        **dict.fromkeys(("geo_mask_low", "product_mask_low"), AT_LEAST),
        "outlier_token_is_threshold_low": MAYBE_LOW,
        "outlier_token_is_threshold_high": MAYBE_HIGH,
    }) | block({"tis_ratio_type": ("token",)}).map(
        lambda one: {**one, "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
    ),
    "slime": block(SLIME),
    "miles": block(SLIME),
    "swift": block({
        "rollout_importance_sampling_mode": [None, *MODES[:4]],
        "rollout_importance_sampling_threshold": AT_MOST,
        "off_policy_sequence_mask_delta": MAYBE_LOW,
    }),
    "trl": block(TRL),
    "unsloth": block({
        **TRL,
        "vllm_importance_sampling_mode": MODES,
    }),
    "verl": block({
        "rollout_is": (None, "token", "sequence"),
        "rollout_is_threshold": AT_MOST | st.tuples(AT_LEAST, AT_MOST),
        "rollout_is_batch_normalize": SWITCH,
    }).flatmap(
        lambda one: st.lists(st.tuples(RS, AT_MOST), max_size=3, unique_by=lambda option: option[0]).map(
            lambda rs: {
                **one,
                "rollout_rs": ",".join(option for option, _ in rs) or None,
                "rollout_rs_threshold": ",".join(repr(bound) for _, bound in rs),
            }
        )
    ),
    "xtuner": block({
        "rollout_is_level": LEVELS,
        "rollout_is_mode": ("truncate", "mask", "both"),
        "rollout_is_threshold": PAIR,
        "rollout_is_mask_threshold": OPTIONAL_PAIR,
        "rollout_is_veto_threshold": OPTIONAL_PAIR,
        "rollout_is_veto_level": ("max", "geometric", "kl3"),
        "rollout_is_veto_negative_adv_only": SWITCH,
    }),
}  # fmt: skip


def test_settings_of_every_framework_are_drawn():
    assert sorted(SETTINGS) == FRAMEWORKS


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_was_read_can_be_written(framework, data):
    config = data.draw(SETTINGS[framework])
    try:
        spec = rc.spec(framework, config)
    except (TypeError, ValueError):
        return  # the framework refuses these together
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


@settings(max_examples=300, deadline=None)
@given(st.one_of(near(), near(), near(), specs(normalize=(None, "batch", "group"), prefixes=True)), st.data())
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


@settings(max_examples=200, deadline=None)
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
    train, rollout, mask = batch()
    kept = [rc.correct(train, rollout, mask=mask, spec=one).keep for one in (spec, as_verl)]
    assert torch.equal(*kept) and 0 < int(kept[0].sum()) < 24
    assert spec.to_config("verl", k1_bounds="ratio")["rollout_rs_threshold"] == "0.8_2.0"


# --- what the errors say ---

TIS = Weight.token(upper=2.0)
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
    ("prime_rl", Spec(), r"criteria=\(\) has no setting: every loss of prime-rl masks"),
    ("skyrl", Spec(TIS, rejected="zero"), r'rejected="zero" has no setting, there it is "mask"$'),
    ("xtuner", Spec(criteria=(Criterion("ratio", upper=2.0),)), r"criteria\[0\]=Criterion\(.*\) has no setting$"),
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
