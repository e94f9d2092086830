"""rc.recipe of xtuner's GRPOLossConfig."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import rollout_corr as rc

CLIP = {"cliprange_low": 0.2, "cliprange_high": 0.28}
SAMPLING = {"rollout_is_threshold": (5.0, 0.5), "rollout_is_mode": "both"}
LOSS = rc.Loss(rc.PPO(0.2, 0.28, dual=3.0), rc.Mean(over="kept"))


@pytest.mark.parametrize(
    ("config", "spec", "loss"),
    [
        ({"policy_loss_cfg": CLIP}, None, LOSS),
        ({"loss_cfg": SimpleNamespace(policy_loss_cfg=CLIP, chunk_size=1)}, None, LOSS),
        ({"policy_loss_cfg": CLIP, "rollout_is": SAMPLING}, rc.spec("xtuner", SAMPLING), LOSS),
        (
            {"policy_loss_cfg": CLIP, "use_kl_loss": True, "kl_loss_type": "low_var_kl", "ignore_idx": -100},
            None,
            replace(LOSS, kl=rc.KL("k3", 0.001, value_clamp=10.0)),
        ),
    ],
)
def test_recipe(config, spec, loss):
    assert rc.recipe("xtuner", config) == rc.Recipe(spec, loss)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy_loss_cfg": CLIP, "use_kl_los": True}, "unknown key 'use_kl_los' .did you mean 'use_kl_loss'"),
        ({"policy_loss_cfg": CLIP | {"cliprange": 0.2}}, "unknown key 'cliprange' .did you mean 'cliprange_"),
        ({}, "cliprange_low: expected a number"),
        ({"policy_loss_cfg": CLIP | {"log_prob_diff_max": 5.0}}, "log_prob_diff_max: expected 20.0"),
        ({"policy_loss_cfg": CLIP, "positive_loss_factor": 1.0}, "OREAL's loss has no recipe"),
        ({"policy_loss_cfg": CLIP, "use_kl_loss": True}, "kl_loss_type: expected one of"),
    ],
)
def test_refused(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        rc.recipe("xtuner", config)
