"""Presets: the Spec of every recipe written out by hand from the peers' documents, names, errors, the table."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout_corr import presets
from rollout_corr.ops import correct
from rollout_corr.presets import verl_options
from rollout_corr.presets.registry import OLD_NAMES, RECIPES, preset
from rollout_corr.presets.table import BEGIN, END, expression, table
from rollout_corr.spec import Criterion, Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

VERL = {"report": ("native", "verl")}
XTUNER = {"report": ("native", "xtuner")}
SKYRL = {"report": ("native", "skyrl")}
DOCS = Path(__file__).resolve().parent.parent / "docs"


def k1(label: str, reduce: str, lower: float, upper: float) -> Criterion:
    return Criterion(
        "k1", over="sequence", reduce=reduce, lower=math.log(lower), upper=math.log(upper), label=label, token_clamp=20
    )


GEO = k1("seq_mean_k1", "mean", 0.999, 1.001)
K3 = Criterion("k3", over="sequence", reduce="mean", upper=0.01, label="seq_mean_k3", token_clamp=20)
TOKEN_TIS, SEQ_TIS = Weight("token", upper=2), Weight("product", upper=2)
ICEPOP = Weight("token", lower=0.5, upper=5, outside="zero")
VETO = Criterion("ratio", lower=1e-4, drop="sequence", label="veto")


def ratio(lower: float | None = None, upper: float | None = None, over: str = "token", **more: object) -> Criterion:
    return Criterion("ratio", lower=lower, upper=upper, over=over, **more)


def mean_ratio(lower: float | None, upper: float | None, **more: object) -> Criterion:
    return ratio(lower, upper, "sequence", reduce="mean", **more)


def opsm(delta: float, of: str, **more: object) -> Criterion:
    return Criterion("k1", "sequence", "mean", upper=delta, when="negative_advantage", of=of, **more)


def dppo(stat: str, lower: float | None, upper: float) -> Criterion:
    return Criterion(stat, lower=lower, upper=upper, when="outward", of="new/rollout", label="dppo")


# From peers/verl.md section 1, peers/xtuner_skyrl.md 1.2 and 2.2, and peers/survey.md 4.2.
EXPECTED = {
    "verl.decoupled_token_is": Spec(TOKEN_TIS, **VERL),
    "verl.decoupled_seq_is": Spec(SEQ_TIS, **VERL),
    "verl.decoupled_token_icepop": Spec(ICEPOP, **VERL),
    "verl.decoupled_seq_is_rs": Spec(SEQ_TIS, (k1("seq_sum_k1", "sum", 0.5, 2),), **VERL),
    "verl.decoupled_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.decoupled_geo_rs_seq_tis": Spec(SEQ_TIS, (GEO,), **VERL),
    "verl.decoupled_geo_rs_token_tis": Spec(TOKEN_TIS, (GEO,), **VERL),
    "verl.decoupled_k3_rs": Spec(None, (K3,), **VERL),
    "verl.decoupled_k3_rs_seq_tis": Spec(SEQ_TIS, (K3,), **VERL),
    "verl.decoupled_k3_rs_token_tis": Spec(TOKEN_TIS, (K3,), **VERL),
    "verl.bypass_ppo_clip": Spec(**VERL),
    "verl.bypass_ppo_clip_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.bypass_ppo_clip_k3_rs": Spec(None, (K3,), **VERL),
    "verl.bypass_pg_is": Spec(SEQ_TIS, **VERL),
    "verl.bypass_pg_token_icepop": Spec(ICEPOP, **VERL),
    "verl.bypass_pg_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.bypass_pg_geo_rs_seq_tis": Spec(SEQ_TIS, (GEO,), **VERL),
    "verl.bypass_pg_geo_rs_token_tis": Spec(TOKEN_TIS, (GEO,), **VERL),
    "verl.disabled": Spec(**VERL),
    "xtuner.reasoning": Spec(
        Weight("token", lower=0.5, upper=5),
        (ratio(0.5, 5, label="mask"), ratio(0, 20, drop="sequence", label="veto")),
        **XTUNER,
    ),
    "xtuner.agentic": Spec(
        Weight("token", lower=0, upper=5),
        (ratio(0.5, 5, label="mask"), ratio(0, 20, drop="sequence", label="veto")),
        **XTUNER,
    ),
    "skyrl.tldr": Spec(
        Weight("token", upper=2),
        (
            ratio(1e-4, 100, drop="sequence", label="outlier"),
            ratio(0.5, 2, label="token_mask"),
            mean_ratio(0.99, 1.01, label="geo_sequence_mask"),
        ),
        sums_over="kept",
        **SKYRL,
    ),
    "skyrl.token_tis": Spec(Weight("token", upper=2), **SKYRL),
    "skyrl.sequence_tis": Spec(Weight("product", upper=5), **SKYRL),
    "skyrl.geometric_mask": Spec(None, (mean_ratio(0.99, 1.01, label="geo_sequence_mask"),), **SKYRL),
    "skyrl.product_mask": Spec(
        None, (ratio(0.5, 2, "sequence", reduce="sum", label="product_sequence_mask"),), **SKYRL
    ),
    "skyrl.token_mask": Spec(None, (ratio(0.5, 2, label="token_mask"),), sums_over="kept", **SKYRL),
    "skyrl.outlier_mask": Spec(None, (ratio(1e-4, 100, drop="sequence", label="outlier"),), sums_over="kept", **SKYRL),
    "openrlhf.tis": Spec(Weight("token", lower=0.5, upper=5)),
    "openrlhf.icepop": Spec(Weight("token"), (ratio(0.5, 5),), "zero"),
    "openrlhf.seq_mask_tis": Spec(Weight("token"), (mean_ratio(0.5, 5),), "zero"),
    "openrlhf.flash_reinforce": Spec(
        Weight("token"), (Criterion("binary_kl", over="sequence", reduce="mean", upper=0.003, eps=1e-6),), "zero"
    ),
    "openrlhf.dppo_like": Spec(Weight("token"), (Criterion("binary_kl", upper=0.05, eps=1e-6),), "zero"),
    "molt.seq": Spec(
        Weight("token", token_clamp=30),
        (ratio(0.5, 5, "sequence", reduce="sum", token_clamp=30),),
        "zero",
        clamp=30,
        nonfinite="neutral",
    ),
    "molt.geo": Spec(
        Weight("token", token_clamp=30),
        (mean_ratio(0.99, 1.01, token_clamp=30),),
        "zero",
        clamp=30,
        nonfinite="neutral",
    ),
    "areal.token_mask": Spec(Weight("token"), (ratio(0.5, 5),), "both", nonfinite="neutral"),
    "areal.seq": Spec(Weight("geometric"), (mean_ratio(None, 5),), "both", nonfinite="neutral"),
    "areal.kl": Spec(Weight("token"), (Criterion("k3_reverse", upper=5),), "both"),
    "areal.kpop": Spec(Weight("token"), (Criterion("binary_kl_symmetric", upper=2, eps=1e-8),), "both"),
    "slime.tis": Spec(Weight("token", lower=0, upper=2)),
    "slime.icepop": Spec(Weight("token"), (ratio(0, 2),), "zero"),
    "slime.mis": Spec(Weight("token", lower=0, upper=2, normalize="batch"), (ratio(0.5, 2), VETO), "mask"),
    "slime.mis_geo": Spec(Weight("token", lower=0, upper=2), (mean_ratio(0.9999, 1.0001), VETO), "mask"),
    "nemo.tis": Spec(Weight("token", upper=2)),
    "nemo.icepop": Spec(Weight("token"), (ratio(0.5, 5),), "zero"),
    "nemo.seq_mask_tis": Spec(Weight("token"), (mean_ratio(0.999, 1.002),), "zero"),
    "nemo.gspo_is": Spec(Weight("product")),
    "nemo.mult_err": Spec(None, (Criterion("ratio_error", over="sequence", reduce="mean", upper=2),)),
    "roll.default": Spec(Weight("token", lower=0, upper=1.2), (ratio(0.8, 1.2),), "mask"),
    "flash_rl.tis": Spec(Weight("token", upper=2)),
    "megatron.tis": Spec(Weight("token", upper=2)),
    "tunix.tis": Spec(Weight("token", upper=2, token_clamp=20)),
    "open_instruct.default": Spec(Weight("token", upper=2, token_clamp=10)),
    "open_instruct.icepop": Spec(Weight("token", upper=2, token_clamp=10), (ratio(0.5, 2, token_clamp=10),), "zero"),
    "open_instruct.seq": Spec(
        Weight("geometric", upper=2, token_clamp=10), (mean_ratio(0.5, 2, token_clamp=10),), "zero"
    ),
    "open_instruct.vaco": Spec(
        Weight("token", upper=2, token_clamp=10),
        (
            Criterion(
                "ratio_deviation",
                over="sequence",
                reduce="mean",
                upper=2,
                when="outward",
                drop="token",
                token_clamp=10,
            ),
        ),
        "zero",
    ),
    "swift.token_truncate": Spec(Weight("token", upper=2, token_clamp=20)),
    "swift.token_mask": Spec(Weight("token", token_clamp=20), (ratio(None, 2, token_clamp=20),), "zero"),
    "swift.sequence_truncate": Spec(Weight("geometric", upper=2, token_clamp=20)),
    "swift.sequence_mask": Spec(Weight("token", token_clamp=20), (mean_ratio(None, 2, token_clamp=20),), "zero"),
    "rlinf.decoupled": Spec(Weight("token"), (ratio(None, 2),), "mask"),
    "trl.opsm": Spec(
        Weight("product"),
        (ratio(None, 3, "sequence", reduce="sum"), opsm(0.1, "new/rollout", label="off_policy")),
        "zero",
        nonfinite="neutral",
    ),
    "slime.opsm": Spec(None, (opsm(1e-4, "new/old", drop="token", label="opsm"),), "zero"),
    "swift.opsm": Spec(
        Weight("token", upper=2, token_clamp=20), (opsm(0.1, "new/rollout", token_clamp=20, label="off_policy"),)
    ),
    "prime_rl.default": Spec(None, (dppo("prob_diff", -0.2, 0.2),), "zero"),
    "prime_rl.ipo": Spec(None, (Criterion("tv", upper=0.1, of="new/rollout", label="ipo"),), "zero"),
    "prime_rl.icepop": Spec(None, (ratio(0.2, 5, of="new/rollout", label="icepop"),), "zero"),
    "prime_rl.kpop": Spec(None, (Criterion("binary_kl_symmetric", upper=0.1, of="new/rollout", label="kpop"),), "zero"),
    "prime_rl.ref_kl": Spec(None, (Criterion("prob_diff", lower=-0.2, of="new/rollout", label="ref_kl"),), "zero"),
    "kimi.interval": Spec(None, (ratio(0.5, 2, of="new/rollout", label="interval"),), "zero"),
    "dppo.tv": Spec(None, (dppo("prob_diff", -0.15, 0.15),), "zero"),
    "dppo.kl": Spec(None, (dppo("binary_kl", None, 0.05),), "zero"),
    "minirl.mask": Spec(None, (ratio(0.8, 1.2, when="outward", of="new/old", label="clip"),), "zero"),
    "glm.icepop": Spec(Weight("token"), (ratio(0.5, 2),), "zero"),
}
for framework, policy in (("trl", "neutral"), ("unsloth", "reject")):
    product = Spec(Weight("product"), (ratio(None, 3, "sequence", reduce="sum"),), "zero", nonfinite=policy)
    EXPECTED |= {
        f"{framework}.default": product,
        f"{framework}.sequence_mask": product,
        f"{framework}.sequence_truncate": Spec(Weight("product", upper=3), nonfinite=policy),
        f"{framework}.token_mask": Spec(Weight("token"), (ratio(None, 3),), "zero", nonfinite=policy),
        f"{framework}.token_truncate": Spec(Weight("token", upper=3), nonfinite=policy),
    }

OLD = {
    "verl.token_is": Spec(TOKEN_TIS, **VERL),
    "verl.token_tis": Spec(TOKEN_TIS, **VERL),
    "verl.seq_is": Spec(SEQ_TIS, **VERL),
    "verl.seq_is_rs": Spec(SEQ_TIS, (k1("seq_sum_k1", "sum", 0.5, 2),), **VERL),
    "verl.seq_mis": Spec(SEQ_TIS, (ratio(0, 2, "sequence", reduce="sum", label="seq_sum_k1"),), **VERL),
    "verl.geo_rs": Spec(None, (mean_ratio(1 / 1.001, 1.001, label="seq_mean_k1"), VETO), **VERL),
    "verl.geo_mis": Spec(None, (mean_ratio(0.999, 1.001, label="seq_mean_k1"), VETO), **VERL),
    "verl.ppo_is_bypass": Spec(TOKEN_TIS, **VERL),
    "verl.pure_is": Spec(SEQ_TIS, **VERL),
    "verl.pg_is": Spec(SEQ_TIS, **VERL),
    "verl.pg_rs": Spec(None, (mean_ratio(1 / 1.001, 1.001, label="seq_mean_k1"), VETO), **VERL),
    "verl.bypass_pg_rs": Spec(None, (mean_ratio(1 / 1.001, 1.001, label="seq_mean_k1"), VETO), **VERL),
    "verl.geo_rs_seq_tis": Spec(SEQ_TIS, (mean_ratio(1 / 1.001, 1.001, label="seq_mean_k1"), VETO), **VERL),
}

# Arguments that change something, and what they change it into.
WITH_ARGUMENTS = [
    ("verl.decoupled_token_is", {"threshold": 3}, Spec(Weight("token", upper=3), **VERL)),
    ("verl.decoupled_token_is", {"threshold": "0.5_3"}, Spec(Weight("token", 0.5, 3, "zero"), **VERL)),
    ("verl.decoupled_seq_is", {"threshold": (0.5, 3)}, Spec(Weight("product", 0.5, 3, "zero"), **VERL)),
    (
        "verl.decoupled_token_icepop",
        {"threshold": 4, "threshold_lower": 0.25},
        Spec(Weight("token", 0.25, 4, "zero"), **VERL),
    ),
    (
        "verl.decoupled_seq_is_rs",
        {"is_threshold": 5, "rs_threshold": "0.6_1.6"},
        Spec(Weight("product", upper=5), (k1("seq_sum_k1", "sum", 0.6, 1.6),), **VERL),
    ),
    (
        "verl.decoupled_seq_is_rs",
        {"rs_threshold": "0.6_1.6", "k1_bounds": "ratio"},
        Spec(SEQ_TIS, (ratio(0.6, 1.6, "sequence", reduce="sum", label="seq_sum_k1"),), **VERL),
    ),
    (
        "verl.bypass_pg_geo_rs_token_tis",
        {"is_threshold": 3, "rs_threshold": 1.01},
        Spec(Weight("token", upper=3), (k1("seq_mean_k1", "mean", 1 / 1.01, 1.01),), **VERL),
    ),
    (
        "verl.decoupled_k3_rs",
        {"rs_threshold": "0.02"},
        Spec(
            None,
            (Criterion("k3", over="sequence", reduce="mean", upper=0.02, label="seq_mean_k3", token_clamp=20),),
            **VERL,
        ),
    ),
    (
        "xtuner.reasoning",
        {"threshold": (4, 0.25), "mask_threshold": None, "veto_threshold": None},
        Spec(Weight("token", 0.25, 4), (ratio(0.25, 4, label="mask"),), **XTUNER),
    ),
    (
        "skyrl.tldr",
        {"geo_mask_low": 0.9, "geo_mask_high": 1.1, "token_tis_ratio_clip_high": 4},
        Spec(
            Weight("token", upper=4),
            (
                ratio(1e-4, 100, drop="sequence", label="outlier"),
                ratio(0.5, 2, label="token_mask"),
                mean_ratio(0.9, 1.1, label="geo_sequence_mask"),
            ),
            sums_over="kept",
            **SKYRL,
        ),
    ),
    (
        "skyrl.outlier_mask",
        {"low": None},
        Spec(None, (ratio(None, 100, drop="sequence", label="outlier"),), sums_over="kept", **SKYRL),
    ),
    (
        "trl.token_truncate",
        {"clip_max": None, "clip_min": 0.5},
        Spec(Weight("token", lower=0.5), nonfinite="neutral"),
    ),
    (
        "trl.sequence_mask",
        {"clip_max": 5, "clip_min": 0.1},
        Spec(Weight("product"), (ratio(0.1, 5, "sequence", reduce="sum"),), "zero", nonfinite="neutral"),
    ),
    ("openrlhf.tis", {"low": None, "high": 2}, Spec(Weight("token", upper=2))),
    (
        "openrlhf.dppo_like",
        {"gating": "tv", "delta": 0.1},
        Spec(Weight("token"), (Criterion("tv", upper=0.1),), "zero"),
    ),
    (
        "areal.token_mask",
        {"lower": None},
        Spec(Weight("token"), (ratio(None, 5),), "both", nonfinite="neutral"),
    ),
    (
        "areal.seq",
        {"agg": "max", "upper": 2, "lower": 0.5},
        Spec(Weight("geometric"), (ratio(0.5, 2, "sequence", reduce="max"),), "both", nonfinite="neutral"),
    ),
    (
        "areal.kl",
        {"metric": "kl_k1", "upper": 0.5, "lower": -0.25},
        Spec(Weight("token"), (Criterion("k1", lower=-0.5, upper=0.25),), "both"),
    ),
    (
        "areal.kl",
        {"metric": "kl_k1", "level": "sequence", "agg": "max", "upper": 0.5},
        Spec(Weight("token"), (Criterion("k1", over="sequence", reduce="min", lower=-0.5),), "both"),
    ),
    (
        "areal.kl",
        {"metric": "kl_k1", "level": "sequence", "agg": "sum", "upper": 0.5},
        Spec(Weight("token"), (Criterion("k1", over="sequence", reduce="sum", lower=-0.5),), "both"),
    ),
    (
        "areal.kl",
        {"metric": "kl_k2", "level": "sequence", "agg": "max", "upper": 0.5},
        Spec(Weight("token"), (Criterion("k2", over="sequence", reduce="max", upper=0.5),), "both"),
    ),
    ("areal.kpop", {"upper": 0.1}, Spec(Weight("token"), (Criterion("binary_kl_symmetric", upper=0.1),), "both")),
    ("slime.tis", {"tis_clip_low": 0.1, "tis_clip": 5}, Spec(Weight("token", 0.1, 5))),
    (
        "slime.mis",
        {"tis_batch_normalize": False, "rs_veto_threshold": None, "rs_upper_bound": 3},
        Spec(Weight("token", lower=0, upper=2), (ratio(0.5, 3),), "mask"),
    ),
    ("nemo.tis", {"ratio": 5, "ratio_min": 0.2}, Spec(Weight("token", 0.2, 5))),
    ("roll.default", {"upper_bound": None}, Spec(Weight("token", lower=0), (ratio(0.8, 1.2),), "mask")),
    ("flash_rl.tis", {"imp_ratio_cap": 8}, Spec(Weight("token", upper=8))),
    ("open_instruct.default", {"clamp_upper": 5}, Spec(Weight("token", upper=5, token_clamp=10))),
    ("rlinf.decoupled", {"threshold": 5}, Spec(Weight("token"), (ratio(None, 5),), "mask")),
    ("verl.seq_is", {"threshold": 3}, Spec(Weight("product", upper=3), **VERL)),
    (
        "verl.seq_is_rs",
        {"rs_threshold_lower": 0.25},
        Spec(SEQ_TIS, (ratio(0.25, 2, "sequence", reduce="sum", label="seq_sum_k1"),), **VERL),
    ),
    ("verl.geo_rs", {"veto_threshold": None}, Spec(None, (mean_ratio(1 / 1.001, 1.001, label="seq_mean_k1"),), **VERL)),
]


def test_every_recipe_is_expected():
    assert presets.names() == sorted(EXPECTED)
    assert sorted(OLD_NAMES) == sorted(OLD)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_recipe_makes_the_spec_of_its_peer(name):
    framework, function = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert preset(name) == EXPECTED[name]
        assert getattr(getattr(presets, framework), function)() == EXPECTED[name]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", sorted(OLD))
def test_old_name_makes_the_spec_of_its_time(name):
    assert preset(name) == OLD[name]
    assert getattr(presets.verl, name.split(".")[1])() == OLD[name]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("name", "arguments", "expected"), WITH_ARGUMENTS)
def test_arguments(name, arguments, expected):
    assert preset(name, **arguments) == expected


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_specs_are_plain_values(name):
    spec = preset(name)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert len({spec, preset(name)}) == 1


@pytest.mark.parametrize("name", sorted({**RECIPES, **OLD_NAMES}))
def test_documented(name):
    entry = {**RECIPES, **OLD_NAMES}[name]
    assert entry.matches
    assert (entry.build.__doc__ or "").strip()


def test_names_are_sorted_strings_without_old_ones():
    names = presets.names()
    assert isinstance(names, list) and names == sorted(names)
    assert "verl.decoupled_token_is" in names and "verl.token_is" not in names


def test_old_name_warns_once_with_the_line_to_write():
    with pytest.warns(
        UserWarning, match=r"verl\.token_is .*write verl\.decoupled_token_is\(threshold=\.\.\.\)"
    ) as caught:
        preset("verl.token_is")
        presets.verl.token_is(threshold=3.0)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"verl\.seq_is "):
        preset("verl.seq_is")


@pytest.mark.usefixtures("quiet")
def test_old_name_that_moved_on_is_its_successor():
    assert presets.verl.token_is(3) == presets.verl.token_tis(3) == presets.verl.decoupled_token_is(3)
    assert presets.verl.seq_is(3) == presets.verl.decoupled_seq_is(3)
    assert presets.verl.seq_is_rs() == presets.verl.decoupled_seq_is_rs()
    assert presets.verl.pg_is(3) == presets.verl.pure_is(3) == presets.verl.bypass_pg_is(3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("verl.decoupled_token_iss", r"did you mean 'verl\.decoupled_token_is'"),
        ("decoupled_geo_rs", r"did you mean 'verl\.decoupled_geo_rs'"),
        ("icepop", r"did you mean 'glm\.icepop' or 'nemo\.icepop' or 'open_instruct\.icepop'"),
        ("qqqqqqqq", r"unknown name 'qqqqqqqq'; rollout_corr\.presets\.names\(\)"),
    ],
)
def test_unknown_name(name, hint):
    with pytest.raises(ValueError, match=hint):
        preset(name)


def test_name_that_is_no_text():
    with pytest.raises(TypeError, match=r"preset: expected a name .*got int 3"):
        preset(3)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        ("verl.decoupled_token_is", {"threshold": -1}, ValueError, r"\(threshold=-1\): threshold: "),
        ("verl.decoupled_token_is", {"threshold": True}, TypeError, r"threshold: expected a number, got bool True"),
        ("verl.decoupled_token_is", {"threshold": None}, TypeError, r"threshold: expected a number, got NoneType None"),
        ("verl.decoupled_token_is", {"treshold": 2}, TypeError, r"unexpected keyword argument 'treshold'"),
        ("verl.decoupled_token_icepop", {"threshold_lower": 6}, ValueError, r"threshold: expected lower <= upper"),
        (
            "verl.decoupled_seq_is_rs",
            {"k1_bounds": "right"},
            ValueError,
            r"k1_bounds: expected one of \['verl', 'ratio'\]",
        ),
        (
            "verl.decoupled_geo_rs",
            {"rs_threshold": 0.52},
            ValueError,
            r"rs_threshold of seq_mean_k1: .*quote it: '0.5_2'",
        ),
        ("verl.decoupled_geo_rs", {"rs_threshold": "2_0.5"}, ValueError, r"expected lower <= upper, got '2_0.5'"),
        ("verl.decoupled_k3_rs", {"rs_threshold": "0.1_0.2"}, ValueError, r"seq_mean_k3: expected one upper bound"),
        ("verl.decoupled_k3_rs", {"rs_threshold": (0.1, 0.2)}, ValueError, r"seq_mean_k3: expected one upper bound"),
        ("xtuner.reasoning", {"threshold": (0.5, 5)}, ValueError, r"rollout_is_threshold: .*xtuner begins with upper"),
        ("xtuner.reasoning", {"threshold": 5}, TypeError, r"rollout_is_threshold: expected a pair \(upper, lower\)"),
        (
            "skyrl.token_tis",
            {"clip_high": -1.0},
            ValueError,
            r"token_tis_ratio_clip_high: expected a number > 0, got -1",
        ),
        ("skyrl.token_mask", {"low": None}, ValueError, r"low: expected a number, got None; .*needs both"),
        ("skyrl.geometric_mask", {"high": "1.01"}, TypeError, r"geo_mask_high: expected a number, got str '1.01'"),
        ("trl.token_truncate", {"clip_max": None}, ValueError, r"\(clip_max=None\): .*got neither"),
        ("trl.token_mask", {"clip_max": None}, ValueError, r"got neither"),
        ("trl.token_mask", {"clip_max": 1, "clip_min": 2}, ValueError, r"lower <= upper"),
        ("openrlhf.dppo_like", {"gating": "ratio"}, ValueError, r"gating: expected one of \['binary_kl', 'tv'\]"),
        ("areal.kl", {"metric": "k3"}, ValueError, r"metric: expected one of \['kl_k1', 'kl_k2', 'kl_k3'\], got 'k3'"),
        ("areal.kl", {"level": "seq"}, ValueError, r"level: expected one of"),
        ("areal.kl", {"agg": "median"}, ValueError, r"agg: expected one of"),
        ("areal.kl", {"metric": "kl_k1", "upper": "5"}, TypeError, r"upper: expected a number, got str '5'"),
        ("areal.seq", {"agg": "median"}, ValueError, r"agg: expected one of"),
        ("slime.tis", {"tis_clip": math.nan}, ValueError, r"\(tis_clip=nan\): Weight\.upper: "),
        ("nemo.mult_err", {"threshold": 0}, ValueError, r"Criterion\.upper: expected a number > 0"),
    ],
)
def test_wrong_arguments_name_the_recipe_and_the_argument(name, arguments, kind, message):
    with pytest.raises(kind, match=f"^preset {re.escape(name)}.*{message}"):
        preset(name, **arguments)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, (None, 2.0)),
        ("2.0", (None, 2.0)),
        (" 0.5_2.0 ", (0.5, 2.0)),
        ("0.5 _ 2.0", (0.5, 2.0)),
        ((0.5, 2), (0.5, 2.0)),
        ([0.5, 2], (0.5, 2.0)),
        ("1e-1_1e1", (0.1, 10.0)),
        ("1_1", (1.0, 1.0)),
    ],
)
def test_threshold_grammar(value, expected):
    assert verl_options.bounds("t", value) == expected


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("", ValueError, "t: expected a number, got ''"),
        ("_", ValueError, "t: expected a number, got ''"),
        ("0.5_", ValueError, "t: expected a number, got ''"),
        ("two", ValueError, "t: expected a number, got 'two'"),
        ("1_2_3", ValueError, "t: expected 'upper' or 'lower_upper', got '1_2_3'"),
        ("nan", ValueError, "t: expected a finite number > 0, got 'nan'"),
        ("inf", ValueError, "t: expected a finite number > 0, got 'inf'"),
        ("0.5_inf", ValueError, "t: expected a finite number > 0, got 'inf'"),
        ("nan_2", ValueError, "t: expected a finite number > 0, got 'nan'"),
        (math.nan, ValueError, "t: expected a number, got nan"),
        (math.inf, ValueError, "t: expected a finite number > 0, got inf"),
        (0, ValueError, "t: expected a finite number > 0, got 0"),
        ("0", ValueError, "t: expected a finite number > 0, got '0'"),
        (-2, ValueError, "t: expected a finite number > 0, got -2"),
        ("-1_2", ValueError, "t: expected a finite number > 0, got '-1'"),
        ("2_0.5", ValueError, "t: expected lower <= upper, got '2_0.5'"),
        ((1, 2, 3), ValueError, r"t: expected a pair \(lower, upper\), got \(1, 2, 3\)"),
        (("1_2", 3), ValueError, "t: expected a finite number > 0, got '1_2'"),
        ((True, 2), TypeError, "t: expected a number, got bool True"),
        (True, TypeError, "t: expected a number, got bool True"),
        (None, TypeError, "t: expected a number, got NoneType None"),
        ({}, TypeError, "t: expected a number, got dict {}"),
    ],
)
def test_threshold_grammar_refuses(value, kind, message):
    with pytest.raises(kind, match=f"^{message}$"):
        verl_options.bounds("t", value)


def test_every_rejection_option_of_verl():
    options = {
        "token_k1": ("k1", "token", None),
        "token_k2": ("k2", "token", None),
        "token_k3": ("k3", "token", None),
        "seq_sum_k1": ("k1", "sequence", "sum"),
        "seq_sum_k2": ("k2", "sequence", "sum"),
        "seq_sum_k3": ("k3", "sequence", "sum"),
        "seq_mean_k1": ("k1", "sequence", "mean"),
        "seq_mean_k2": ("k2", "sequence", "mean"),
        "seq_mean_k3": ("k3", "sequence", "mean"),
        "seq_max_k2": ("k2", "sequence", "max"),
        "seq_max_k3": ("k3", "sequence", "max"),
    }
    assert sorted(verl_options.RS_OPTIONS) == sorted(options)
    for option, (stat, over, reduce) in options.items():
        (criterion,) = verl_options.criteria(option, 2.0)
        lower, upper = (math.log(0.5), math.log(2)) if stat == "k1" else (None, 2.0)
        assert criterion == Criterion(
            stat, over=over, reduce=reduce, lower=lower, upper=upper, label=option, token_clamp=20.0
        )


def verdicts(train: torch.Tensor, rollout: torch.Tensor, spec: Spec, **more: object):
    """`correct` without the peers' metrics, which are tested elsewhere."""
    return correct(train, rollout, spec=replace(spec, report=()), **more)


def rows(*log_ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Train and rollout log-probs whose differences are the given ones, all probabilities small enough."""
    d = torch.tensor(log_ratios, dtype=torch.float64)
    rollout = torch.full_like(d, -3.0)
    return rollout + d, rollout


def test_k1_bounds_as_verl_compares_them_and_as_its_documentation_says():
    # verl#6377: with 0.6_1.4 verl keeps a ratio of 1.5, and rejects one of 0.65.
    train, rollout = rows([math.log(1.5)], [math.log(0.65)], [math.log(1.0)], [math.log(1.7)])
    verl = presets.verl.decoupled_geo_rs("0.6_1.4")
    mended = presets.verl.decoupled_geo_rs("0.6_1.4", k1_bounds="ratio")
    assert verdicts(train, rollout, verl).keep.tolist() == [True, False, True, False]
    assert verdicts(train, rollout, mended).keep.tolist() == [False, True, True, False]


@pytest.mark.parametrize(("agg", "kept"), [("sum", [False, True]), ("mean", [True, True]), ("max", [False, True])])
def test_areal_k1_is_d(agg, kept):
    # AReaL: keep iff the aggregate of D is at most upper.
    train, rollout = rows([0.6, 0.1], [-0.6, -0.1])
    spec = presets.areal.kl("kl_k1", "sequence", agg, upper=0.5)
    assert verdicts(train, rollout, spec).keep.tolist() == kept


def test_skyrl_sums_run_over_what_is_left():
    # The second token goes by the token mask, so the product of the first alone is the weight and is tested.
    train, rollout = rows([0.1, 3.0])
    spec = presets.skyrl.tldr(geo_mask_low=0.5, geo_mask_high=1.2)
    out = verdicts(train, rollout, spec, mask=torch.ones(1, 2, dtype=torch.bool))
    assert out.keep.tolist() == [True] and out.mask.tolist() == [[True, False]]
    # SkyRL leaves the weight of a rejected token as it is.
    assert out.weights[0].tolist() == pytest.approx([math.exp(0.1), 2.0])


def test_vaco_drops_the_outward_tokens_only():
    train, rollout = rows([2.0, -2.0])
    out = verdicts(train, rollout, presets.open_instruct.vaco(mask_upper=0.5), advantages=torch.tensor([1.0]))
    assert out.weights[0].tolist() == pytest.approx([0.0, math.exp(-2.0)])
    assert out.keep.tolist() == [True]


def test_trl_reads_nan_as_one_and_unsloth_rejects():
    train, rollout = rows([math.nan, 0.5])
    assert verdicts(train, rollout, presets.trl.token_truncate()).weights[0].tolist() == pytest.approx(
        [1.0, math.exp(0.5)]
    )
    assert verdicts(train, rollout, presets.unsloth.token_truncate()).weights[0].tolist() == [0.0, 0.0]


@pytest.mark.peers
@pytest.mark.parametrize("name", [name for name in sorted(EXPECTED) if name.startswith("verl.")])
def test_verl_itself_makes_the_same_of_a_batch(name):
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    generator = torch.Generator().manual_seed(0)
    d = torch.randn(32, 16, generator=generator) * 0.2
    d[0, 0], d[1, 1], d[2, 2:] = 25.0, -30.0, 1e-4
    rollout = -torch.rand(32, 16, generator=generator) * 3
    mask = (torch.rand(32, 16, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    config = getattr(RolloutCorrectionConfig, name.split(".")[1])()
    theirs, their_mask, _ = compute_rollout_correction_and_rejection_mask(
        rollout + d,
        rollout,
        mask,
        config.rollout_is,
        config.rollout_is_threshold,
        config.rollout_is_batch_normalize,
        config.rollout_rs,
        config.rollout_rs_threshold,
    )
    out = verdicts(rollout + d, rollout, preset(name), mask=mask)
    assert torch.equal(out.mask, their_mask)
    if theirs is None:
        assert out.weights is None
    else:
        torch.testing.assert_close(out.weights, theirs.batch["rollout_is_weights"], rtol=1e-5, atol=1e-9)


def test_expression_builds_what_it_says():
    names = {"Spec": Spec, "Weight": Weight, "Criterion": Criterion}
    for spec in [*EXPECTED.values(), *OLD.values()]:
        assert eval(expression(spec), names) == spec
    assert expression(Spec(Weight("token", upper=2.0))) == 'Spec(weight=Weight("token", upper=2.0))'


def test_table_in_the_docs_is_up_to_date():
    text = (DOCS / "presets.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    written = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert written == table().rstrip("\n"), "run: python -m rollout_corr.presets, and put it into docs/presets.md"


def test_table_says_everything():
    text = table()
    for name in [*EXPECTED, *OLD]:
        assert f"| `{name}(" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5


def test_module_prints_the_table():
    command = [sys.executable, "-m", "rollout_corr.presets"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=DOCS.parent)
    assert done.stdout == table()


def test_recipes_need_no_tensors():
    code = (
        "import sys, types\n"
        "package = types.ModuleType('rollout_corr')\n"
        f"package.__path__ = [{str(DOCS.parent / 'rollout_corr')!r}]\n"
        "sys.modules['rollout_corr'] = package\n"
        "import rollout_corr.presets, rollout_corr.config\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_can_be_imported_one_by_one():
    for name in {name.split(".")[0] for name in EXPECTED}:
        assert importlib.import_module(f"rollout_corr.presets.{name}").__doc__
