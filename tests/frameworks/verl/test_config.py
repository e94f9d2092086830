"""rc.spec of every generation of verl's configuration: what it reads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders.config_cases import VERL, VETO, flat, k1, option, ratio, specs
from rollout_corr.api.correct import correct
from rollout_corr.specs.correction import Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

# nested

NESTED = """
the yaml of 0.9.1 as shipped |
    {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, rollout_rs_threshold: null, bypass_mode: false,
    loss_type: ppo_clip, rollout_is_batch_normalize: false} | Spec()
nothing | {} | Spec()
a threshold alone | {rollout_is_threshold: 2.0} | Spec()
token | {rollout_is: token} | Spec(Weight.token(upper=2))
sequence is the product | {rollout_is: sequence, rollout_is_threshold: 5} | Spec(Weight.product(upper=5))
icepop | {rollout_is: token, rollout_is_threshold: '0.5_5.0'} | Spec(Weight.token(lower=0.5, upper=5, outside="zero"))
icepop as yaml leaves it unquoted | {rollout_is: token, rollout_is_threshold: 0.5_5.0} |
    Spec(Weight.token(lower=0.5, upper=5, outside="zero"))
icepop as a list | {rollout_is: token, rollout_is_threshold: [0.5, 2]} |
    Spec(Weight.token(lower=0.5, upper=2, outside="zero"))
threshold as text | {rollout_is: token, rollout_is_threshold: '3'} | Spec(Weight.token(upper=3))
batch normalize | {rollout_is: sequence, rollout_is_batch_normalize: true} |
    Spec(Weight.product(upper=2, normalize="batch"))
geometric rejection | {rollout_rs: seq_mean_k1, rollout_rs_threshold: '0.999_1.001'} |
    Spec(None, (k1("seq_mean_k1", 0.999, 1.001),))
a single k1 bound | {rollout_rs: token_k1, rollout_rs_threshold: 2} | Spec(None, (k1("token_k1", 0.5, 2),))
several options, one threshold each |
    {rollout_rs: 'token_k1, seq_max_k2,seq_sum_k3', rollout_rs_threshold: '0.5_2.0, 2.5,0.1'} |
    Spec(None, (k1("token_k1", 0.5, 2), option("seq_max_k2", None, 2.5), option("seq_sum_k3", None, 0.1)))
several options, one threshold for all | {rollout_rs: 'token_k2,seq_mean_k3', rollout_rs_threshold: 0.01} |
    Spec(None, (option("token_k2", None, 0.01), option("seq_mean_k3", None, 0.01)))
the same option twice | {rollout_rs: 'token_k2,token_k2', rollout_rs_threshold: 0.01} |
    Spec(None, (option("token_k2", None, 0.01),))
weights, rejection and bypass |
    {rollout_is: token, rollout_rs: seq_sum_k1, rollout_rs_threshold: '0.5_2.0', bypass_mode: true,
    loss_type: reinforce} | Spec(Weight.token(upper=2), (k1("seq_sum_k1", 0.5, 2),))
hydra's own key | {_target_: verl.RolloutCorrectionConfig, rollout_is: token} | Spec(Weight.token(upper=2))
"""


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("config", "expected"), specs(NESTED, VERL))
def test_verl_nested(config, expected):
    assert rc.spec("verl", config) == expected


def test_verl_k1_bounds():
    config = {"rollout_rs": "seq_mean_k1,token_k2", "rollout_rs_threshold": "0.6_1.4,3"}
    assert rc.spec("verl", config).criteria == (
        k1("seq_mean_k1", 0.6, 1.4),
        option("token_k2", None, 3.0),
    )
    assert rc.spec("verl", config, k1_bounds="ratio").criteria == (
        ratio(0.6, 1.4, "mean", label="seq_mean_k1"),
        option("token_k2", None, 3.0),
    )


# The dapo recipe: recipe/dapo/run_dapo_qwen2.5_32b_rollout_corr.sh of 0.6.1.
OLD_NESTED = """
the yaml of 0.6.1 as shipped |
    {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, rollout_rs_threshold: null,
    rollout_rs_threshold_lower: null, rollout_token_veto_threshold: null, bypass_mode: false,
    use_policy_gradient: false, rollout_is_batch_normalize: false} | Spec()
token | {rollout_rs: token, rollout_rs_threshold: 2} | Spec(None, (ratio(0.5, 2, label="token_k1"),))
sequence with a lower bound |
    {rollout_is: token, rollout_rs: sequence, rollout_rs_threshold: 4, rollout_rs_threshold_lower: 0.1} |
    Spec(Weight.token(upper=2), (ratio(0.1, 4, "sum", label="seq_sum_k1"),))
sequence with an open lower side |
    {rollout_rs: sequence, rollout_rs_threshold: 2, rollout_rs_threshold_lower: 0} |
    Spec(None, (ratio(0, 2, "sum", label="seq_sum_k1"),))
the dapo recipe |
    {rollout_is: sequence, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true, rollout_rs: geometric,
    rollout_rs_threshold: 1.01, rollout_rs_threshold_lower: 0.99, rollout_token_veto_threshold: 1.0e-4} |
    Spec(Weight.product(upper=2, normalize="batch"), (ratio(0.99, 1.01, "mean", label="seq_mean_k1"), VETO))
veto alone | {rollout_token_veto_threshold: 1.0e-6} | Spec(None, (replace(VETO, lower=1e-6),))
veto beside a new option |
    {rollout_rs: token_k2, rollout_rs_threshold: 1, rollout_token_veto_threshold: 1.0e-4} |
    Spec(None, (option("token_k2", None, 1.0), VETO))
pure rollout correction |
    {rollout_is: sequence, bypass_old_logprob_for_rollout: true, use_pure_rollout_correction: true} |
    Spec(Weight.product(upper=2))
policy gradient | {rollout_is: sequence, bypass_mode: true, use_policy_gradient: true} |
    Spec(Weight.product(upper=2))
"""


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("config", "expected"), specs(OLD_NESTED, VERL, replace=replace))
def test_verl_old_nested(config, expected):
    assert rc.spec("verl", config) == expected


# flat


LEVELS = {"token": (Weight.token, None, "token_k1"), "sequence": (Weight.product, "sum", "seq_sum_k1")}
LEVELS["geometric"] = (Weight.geometric, "mean", "seq_mean_k1")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("level", LEVELS)
def test_verl_flat_levels_and_modes(level):
    made, reduce, label = LEVELS[level]
    truncated = rc.spec("verl", flat(rollout_is_level=level))
    assert truncated == Spec(made(upper=2), (VETO,), "mask", **VERL)
    masked = rc.spec("verl", flat(rollout_is_level=level, rollout_is_mode="mask"))
    assert masked == Spec(made(), (ratio(0.5, 2, reduce, label=label), VETO), "mask", **VERL)
    clipped = rc.spec("verl", flat(rollout_is_level=level, rollout_is_mode="clip"))
    assert clipped == Spec(made(lower=0.5, upper=2, outside="zero"), (VETO,), "zero", **VERL)


@pytest.mark.usefixtures("quiet")
def test_verl_flat_as_released():
    masked = rc.spec("verl", flat(rollout_is_mode="mask"), version="0.6.0")
    assert masked == Spec(Weight.token(lower=0.5, upper=2, outside="zero"), (VETO,), "zero", **VERL)
    truncated = rc.spec("verl", flat(), version="0.6.0")
    assert truncated == Spec(Weight.token(upper=2), (VETO,), "zero", **VERL)
    assert rc.spec("verl", flat(rollout_is_mode="clip"), version="0.6.0") == masked


@pytest.mark.usefixtures("quiet")
def test_verl_flat_defaults():
    assert rc.spec("verl", {"rollout_is": True, "rollout_is_threshold": 2.0}) == rc.spec("verl", flat())
    no_veto = rc.spec("verl", flat(rollout_is_veto_threshold=None))
    assert no_veto == Spec(Weight.token(upper=2), **VERL)
    assert rc.spec("verl", flat(rollout_is_threshold=None)) == Spec(**VERL)
    assert rc.spec("verl", {"rollout_is": True}) == Spec(**VERL)
    assert rc.spec("verl", flat(rollout_is_mode="clip", rollout_is_veto_threshold=None)) == Spec(
        Weight.token(lower=0.5, upper=2, outside="zero"), **VERL
    )


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("off", [False, None])
def test_verl_flat_without_applying(off):
    spec = rc.spec("verl", flat(rollout_is=off, rollout_is_mode="mask"))
    assert spec == replace(rc.spec("verl", flat(rollout_is_mode="mask")), apply=False)
    absent = flat(rollout_is_mode="mask")
    del absent["rollout_is"]
    assert rc.spec("verl", absent) == spec


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("lower", "expected"), [(None, 0.2), (0.8, 0.8), (0, 0.0)])
def test_verl_flat_lower(lower, expected):
    spec = rc.spec("verl", flat(rollout_is_threshold=5.0, rollout_is_threshold_lower=lower, rollout_is_mode="mask"))
    assert spec.criteria[0] == ratio(expected, 5, label="token_k1")


@pytest.mark.usefixtures("quiet")
def test_verl_flat_zeroes_and_masks_what_it_should():
    d = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(1e-5)]], dtype=torch.float64)
    rollout = torch.full_like(d, -1.0)
    mask = torch.ones(2, 2, dtype=torch.bool)

    def run(**options: object):
        spec = replace(rc.spec("verl", flat(**options)), report=())
        out = correct(rollout + d, rollout, mask=mask, spec=spec)
        return (None if out.weights is None else out.weights.tolist()), out.mask.tolist()

    assert run() == ([[2.0, 1.0], [1.0, pytest.approx(1e-5)]], [[True, True], [False, False]])
    assert run(rollout_is_mode="clip") == ([[0.0, 1.0], [0.0, 0.0]], [[True, True], [True, True]])
    assert run(rollout_is_mode="mask") == (
        [[pytest.approx(3.0), 1.0], [1.0, pytest.approx(1e-5)]],
        [[False, True], [False, False]],
    )
    assert run(rollout_is=False) == (None, [[True, True], [True, True]])


# cap


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("key", ["tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap"])
@pytest.mark.parametrize(
    ("cap", "weight"),
    [
        (2.0, Weight.token(upper=2)),
        (10, Weight.token(upper=10)),
        (-1, None),
        (-1.0, None),
        (0, None),
        (None, None),
    ],
)
def test_verl_cap(key, cap, weight):
    assert rc.spec("verl", {key: cap}) == Spec(weight, **VERL)


# surroundings


@pytest.mark.usefixtures("quiet")
def test_verl_inside_a_whole_configuration():
    block = {"rollout_is": "token", "rollout_is_threshold": 3.0}
    expected = Spec(Weight.token(upper=3), **VERL)
    algorithm = {"adv_estimator": "grpo", "gamma": 1.0, "kl_ctrl": {"type": "fixed"}, "rollout_correction": block}
    assert rc.spec("verl", {"rollout_correction": block}) == expected
    assert rc.spec("verl", algorithm) == expected
    whole = {"algorithm": algorithm, "trainer": {}, "actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": -1, "lr": 1}}}
    assert rc.spec("verl", whole) == expected
    assert rc.spec("verl", {"algorithm": {"rollout_correction": block}}) == expected
    assert rc.spec("verl", {"algorithm": algorithm | {"rollout_correction": None}}) == Spec(**VERL)
    assert rc.spec("verl", {"adv_estimator": "grpo", **flat()}) == rc.spec("verl", flat())
    assert rc.spec("verl", {"algorithm": {"adv_estimator": "gae", **flat()}}) == rc.spec("verl", flat())
    old = {"algorithm": {"gamma": 1.0}, "actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": 2.0, "lr": 1}}}
    assert rc.spec("verl", old) == Spec(Weight.token(upper=2), **VERL)
    assert rc.spec("verl", {"actor_rollout_ref": {"actor": {"imp_ratio_cap": 8}}}).weight == Weight.token(upper=8)


def test_a_name_is_no_configuration():
    with pytest.raises(
        TypeError, match=r"^spec\('verl'\): .*the string 'disabled'; by name it is rc\.spec\('verl\.disabled'\)"
    ):
        rc.spec("verl", "disabled")


@pytest.mark.peers
def test_verl_itself():
    from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig

    recipes = [name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)]
    assert sorted(f"verl.{name}" for name in recipes) == [name for name in rc.spec_names() if name.startswith("verl.")]
    for name in recipes:
        config = getattr(RolloutCorrectionConfig, name)()
        assert rc.spec("verl", config) == rc.spec(f"verl.{name}")
        assert rc.spec("verl", AlgoConfig(rollout_correction=config)) == rc.spec(f"verl.{name}")
