"""rc.spec of SkyRL's configurations: what it reads, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rollout_corr as rc
from builders.config_cases import SKYRL, cases, specs
from rollout_corr.specs.correction import Spec, Weight

pytestmark = pytest.mark.usefixtures("nothing_said_yet")

SKYRL_BLOCKS = """
nothing | {} | Spec()
the defaults |
    {tis_ratio_type: null, token_tis_ratio_clip_high: 2.0, sequence_tis_ratio_clip_high: 5.0,
    sequence_mask_metric: null, geo_mask_high: 1.01, geo_mask_low: 0.99, product_mask_high: 2.0, product_mask_low: 0.5,
    outlier_token_is_threshold_low: null, outlier_token_is_threshold_high: null,
    token_mask_is_threshold_low: null, token_mask_is_threshold_high: null} | Spec()
token | {tis_ratio_type: token} | Spec(Weight.token(upper=2))
token cap | {tis_ratio_type: token, token_tis_ratio_clip_high: 4, sequence_tis_ratio_clip_high: 7} |
    Spec(Weight.token(upper=4))
sequence | {tis_ratio_type: sequence} | Spec(Weight.product(upper=5))
geometric | {sequence_mask_metric: geometric} |
    Spec(None, (ratio(0.99, 1.01, "mean", label="geo_sequence_mask"),))
product | {sequence_mask_metric: product, product_mask_high: 3, product_mask_low: 0} |
    Spec(None, (ratio(0, 3, "sum", label="product_sequence_mask"),))
one outlier threshold | {outlier_token_is_threshold_low: 1.0e-4} |
    Spec(None, (ratio(1e-4, None, drop="sequence", label="outlier"),), sums_over="kept")
the page's TLDR |
    {sequence_mask_metric: geometric, geo_mask_low: 0.99, geo_mask_high: 1.01, tis_ratio_type: token,
    token_tis_ratio_clip_high: 2.0, token_mask_is_threshold_low: 0.5, token_mask_is_threshold_high: 2.0,
    outlier_token_is_threshold_low: 1.0e-4, outlier_token_is_threshold_high: 100} |
    Spec(Weight.token(upper=2), (ratio(1e-4, 100, drop="sequence", label="outlier"),
    ratio(0.5, 2, label="token_mask"), ratio(0.99, 1.01, "mean", label="geo_sequence_mask")), sums_over="kept")
"""


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("block", "expected"), specs(SKYRL_BLOCKS, SKYRL))
def test_skyrl(block, expected):
    assert rc.spec("skyrl", block) == expected
    assert rc.spec("skyrl", {"off_policy_correction": block}) == expected
    algorithm = {
        "advantage_estimator": "grpo",
        "use_tis": False,
        "tis_imp_ratio_cap": -1.0,
        "off_policy_correction": block,
    }
    assert rc.spec("skyrl", algorithm) == expected
    assert rc.spec("skyrl", {"trainer": {"epochs": 1, "algorithm": algorithm}, "generator": {}}) == expected
    assert rc.spec("skyrl", {"algorithm": {"anything": 1, "off_policy_correction": block}}) == expected


def test_skyrl_use_tis():
    with pytest.warns(UserWarning, match=r"^skyrl: use_tis, .*token_tis_ratio_clip_high: 3\.0\}") as caught:
        spec = rc.spec("skyrl", {"use_tis": True, "tis_imp_ratio_cap": 3.0})
        again = rc.spec(
            "skyrl",
            {
                "use_tis": True,
                "tis_imp_ratio_cap": 3.0,
                "off_policy_correction": {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric"},
            },
        )
    assert len(caught) == 1 and caught[0].filename == __file__
    assert spec == Spec(Weight.token(upper=3), **SKYRL)
    # In SkyRL use_tis overrules tis_ratio_type.
    assert again.weight == Weight.token(upper=3) and again.criteria[0].label == "geo_sequence_mask"


@pytest.mark.usefixtures("strict")
def test_skyrl_cap_without_use_tis_does_nothing():
    assert rc.spec("skyrl", {"use_tis": False, "tis_imp_ratio_cap": 3.0}) == Spec(**SKYRL)
    assert rc.spec("skyrl", {"tis_imp_ratio_cap": 3.0}) == Spec(**SKYRL)


def test_skyrl_token_mask_needs_both_bounds_and_says_so():
    with pytest.warns(UserWarning, match=r"work only together") as caught:
        assert rc.spec("skyrl", {"token_mask_is_threshold_low": 0.5}) == Spec(**SKYRL)
        assert rc.spec("skyrl", {"token_mask_is_threshold_high": 2}) == Spec(**SKYRL)
    assert len(caught) == 1


SKYRL_REFUSED = """
{tis_type: token} | ValueError unknown key 'tis_type' (did you mean 'tis_ratio_type'?), expected some of
{use_tis: true, typo: 1} | ValueError unknown key 'typo', expected some of ['off_policy_correction', 'use_tis'
{off_policy_correction: {typo: 1}} | ValueError unknown key 'typo'
{off_policy_correction: token} | TypeError off_policy_correction: expected a mapping or a config object, got str
{tis_ratio_type: geometric} | ValueError tis_ratio_type: expected null or one of ['token', 'sequence']
{sequence_mask_metric: geo} | ValueError sequence_mask_metric: expected null or one of ['geometric', 'product']
{tis_ratio_type: token, token_tis_ratio_clip_high: -1.0} |
    ValueError token_tis_ratio_clip_high: expected a number > 0, got -1.0
{tis_ratio_type: sequence, sequence_tis_ratio_clip_high: null} |
    TypeError sequence_tis_ratio_clip_high: expected a number, got NoneType None
{use_tis: true} | ValueError tis_imp_ratio_cap, which use_tis needs: expected a number > 0, got -1.0
{use_tis: true, tis_imp_ratio_cap: null} | TypeError tis_imp_ratio_cap, which use_tis needs: expected a number
{use_tis: 1} | TypeError use_tis: expected true or false, got int 1
{sequence_mask_metric: geometric, geo_mask_high: '1.01'} | TypeError geo_mask_high: expected a number, got the string
{sequence_mask_metric: geometric, geo_mask_low: 2.0} |
    ValueError geo_mask_low: expected a number <= geo_mask_high, which is 1.01, got 2.0
{outlier_token_is_threshold_high: 0} | ValueError outlier_token_is_threshold_high: expected a number > 0, got 0.0
{outlier_token_is_threshold_low: -1} | ValueError outlier_token_is_threshold_low: expected a number >= 0, got -1
"""


@pytest.mark.parametrize(("config", "kind", "message"), cases(SKYRL_REFUSED))
def test_skyrl_refuses(config, kind, message):
    with pytest.raises(kind, match=r"^spec\('skyrl'\): " + message):
        rc.spec("skyrl", config)


TOKEN = {"tis_ratio_type": "token"}
MASKED = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
WHOLE_LOSSES = [
    ({"use_kl_loss": False}, rc.Recipe(None, rc.Loss(rc.PPO(0.2, 0.2)))),
    ({"policy_loss_type": "dual_clip", "kl_loss_coef": 0}, rc.Recipe(None, rc.Loss(rc.PPO(0.2, 0.2, dual=3.0)))),
    (
        {
            "loss_reduction": "sequence_mean",
            "off_policy_correction": TOKEN,
            "eps_clip_high": 0.3,
            "advantage_estimator": "grpo",
            "gamma": 1.0,
        },
        rc.Recipe(
            rc.spec("skyrl", TOKEN),
            rc.Loss(
                rc.PPO(0.2, 0.3),
                rc.Mean("sequence", over="rows"),
                rc.KL("k3", 0.001, value_clamp=10.0, scope="all"),
            ),
        ),
    ),
    (
        {"loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 64, "use_kl_loss": False},
        rc.Recipe(None, rc.Loss(rc.PPO(0.2, 0.2), rc.Mean("sequence_sum", over="rows", length=64))),
    ),
    (
        {"trainer": {"algorithm": {"policy_loss_type": "sapo", "sapo": {"tau_pos": 2.0}, "use_kl_loss": False}}},
        rc.Recipe(None, rc.Loss(rc.SAPO(2.0, 1.05))),
    ),
    (
        {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}, "use_kl_loss": False},
        rc.Recipe(None, rc.Loss(rc.Score(0.0, 5.0, of="new/rollout"))),
    ),
    (
        {"policy_loss_type": "dppo", "dppo": {"delta_low": 0.1}, "use_kl_loss": False},
        rc.recipe("skyrl.dppo", delta_low=0.1),
    ),
    (
        {"policy_loss_type": "gspo", "off_policy_correction": MASKED, "use_kl_loss": False},
        rc.Recipe(
            replace(rc.spec("skyrl", MASKED), rejected="zero"),
            rc.Loss(rc.GSPO(0.2, 0.2, through="token", clamp=10.0)),
        ),
    ),
]


@pytest.mark.parametrize(("config", "expected"), WHOLE_LOSSES)
def test_recipe(config, expected):
    assert rc.recipe("skyrl", config) == expected


def test_a_kl_loss_of_another_average():
    """It is on in SkyRL's defaults, and a mean over rows beside a mean over tokens."""
    assert rc.recipe("skyrl", {}) == rc.recipe("skyrl.grpo")
    assert rc.recipe("skyrl.grpo").loss.kl.mean == rc.Mean("sequence", over="rows")
    assert rc.recipe("skyrl", {}, kl_loss=False) == rc.recipe("skyrl.ppo")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy_loss_typ": "gspo"}, "unknown key 'policy_loss_typ' .did you mean 'policy_loss_type'"),
        ({"policy_loss_type": "kl_cov"}, "policy_loss_type: expected one of"),
        ({"loss_reduction": "prompt_mean"}, "loss_reduction: expected one of"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len, which seq_mean_token_sum_norm needs"),
        ({"policy_loss_type": "sapo", "sapo": {"tau_po": 1.0}}, "unknown key 'tau_po' .did you mean 'tau_pos'"),
        ({"policy_loss_type": "dppo", "off_policy_correction": TOKEN}, "expected no off_policy_correction beside"),
        ({"policy_loss_type": "rollout_is", "off_policy_correction": TOKEN}, "expected no tis_ratio_type beside it"),
        (
            {"policy_loss_type": "dppo", "dppo": {"dppo_type": "binary_kl", "delta_low": 0.1}},
            "delta_low: expected the same as delta_high",
        ),
    ],
)
def test_what_a_recipe_refuses(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        rc.recipe("skyrl", config, kl_loss=False)
