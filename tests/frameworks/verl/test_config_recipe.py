"""rc.recipe of verl's configuration: its losses, averages, KL and bypass mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rollout_corr as rc

PPO = rc.recipe("verl.ppo")
TOKEN = {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}

WHOLE = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}


def whole(block, **actor):
    return {"actor_rollout_ref": {"actor": actor, "model": {}}, "algorithm": {"rollout_correction": block, "gamma": 1}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, PPO),
        ({"clip_ratio_low": 0.1, "strategy": "fsdp"}, rc.Recipe(None, rc.Loss(rc.PPO(0.1, 0.2, dual=3.0)))),
        (whole(TOKEN), rc.Recipe(rc.spec("verl", TOKEN), PPO.loss)),
        (whole({}, use_kl_loss=True), rc.recipe("verl.grpo")),
        (
            whole({}, use_kl_loss=True, kl_loss_type="k3+", kl_loss_coef=0.1),
            rc.Recipe(None, replace(PPO.loss, kl=rc.KL("k3", 0.1, gradient="k2", value_clamp=10.0))),
        ),
        (
            whole(TOKEN | {"bypass_mode": True}),
            rc.Recipe(rc.spec("verl", TOKEN | {"rollout_is": None}), PPO.loss),
        ),
        (
            whole(TOKEN | {"bypass_mode": True, "loss_type": "reinforce"}),
            rc.Recipe(rc.spec("verl", TOKEN), rc.Loss(rc.Score())),
        ),
        (
            whole({}, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=9, policy_loss={"loss_mode": "gpg"}),
            rc.Recipe(None, rc.Loss(rc.GPG(), rc.Mean("sequence_sum", over="rows", length=9))),
        ),
        (
            {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.2, "clip_cov_ratio": 0.1}},
            rc.Recipe(None, rc.Loss(rc.DRO(0.2))),
        ),
        (
            {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_ub": 3}, "clip_ratio_high": 0.3},
            rc.Recipe(None, rc.Loss(rc.ClipCov(0.2, 0.3, share=0.1, upper=3.0))),
        ),
        (
            {"policy_loss": {"loss_mode": "kl_cov", "ppo_kl_coef": 1.0}},
            rc.Recipe(None, rc.Loss(rc.KLCov(0.0002, 1.0))),
        ),
    ],
)
def test_recipe(config, expected):
    assert rc.recipe("verl", config) == expected


def test_gspo_by_version():
    config = {"policy_loss": {"loss_mode": "gspo"}}
    assert rc.recipe("verl", config).loss.mean.of == "token"
    assert rc.recipe("verl", config, version="0.9.0").loss.mean.of == "sequence"
    with pytest.raises(ValueError, match=r"version: expected None or '0\.9\.0'"):
        rc.recipe("verl", config, version="0.8")


def test_a_kl_loss_of_another_average():
    """sapo and geo_mean are means over sequences; `loss_agg_mode` is of their KL loss alone."""
    config = {"use_kl_loss": True, "policy_loss": {"loss_mode": "sapo"}}
    by_token = rc.recipe("verl", config)
    by_row = rc.recipe("verl", config | {"loss_agg_mode": "seq-mean-token-sum"})
    assert by_token.loss.mean.of == by_row.loss.mean.of == "sequence"
    assert by_token.loss.kl == rc.KL("k3", 0.001, value_clamp=10.0, mean=rc.Mean("token"))
    assert by_row.loss.kl == replace(by_token.loss.kl, mean=rc.Mean("sequence_sum", over="rows"))
    assert rc.recipe("verl", config | {"loss_agg_mode": "seq-mean-token-mean"}).loss.kl.mean is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip_ratio_hig": 0.2}, "unknown key 'clip_ratio_hig' .did you mean 'clip_ratio_high'"),
        ({"policy_loss": {"loss_mod": "gspo"}}, "unknown key 'loss_mod' .did you mean 'loss_mode'"),
        ({"policy_loss": {"loss_mode": "value_cov"}}, "loss_mode: expected one of"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode: expected one of"),
        (
            {"use_kl_loss": True, "policy_loss": {"loss_mode": "sapo"}, "loss_agg_mode": "seq-mean-token-sum-norm"},
            "use_kl_loss: the policy loss is a mean over sequences, the KL loss by seq-mean-token-sum-norm: two calls",
        ),
        (whole({"rollout_is": "token"}, policy_loss={"loss_mode": "geo_mean"}), "expected no rollout_is beside"),
        (whole(TOKEN, loss_agg_mode="seq-mean-token-mean"), "verl divides by a row's tokens after rejection"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("verl", config)
