"""The reader of ms-swift's arguments; the conformance rows run its losses beside ms-swift's."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest

import rollout_corr as rc

GIVEN = {"rollout_importance_sampling_mode": "token_mask", "rollout_importance_sampling_threshold": 1.5, "beta": 0.01}
FLAGS = argparse.Namespace(**GIVEN, learning_rate=1.0)


@pytest.mark.parametrize("config", [GIVEN, SimpleNamespace(**GIVEN), FLAGS, GIVEN | {"rlhf_type": "grpo", "tuner": 1}])
def test_configurations(config):
    assert rc.spec("swift", config) == rc.spec("swift.token_mask", threshold=1.5)
    assert rc.recipe("swift", config) == rc.recipe("swift.token_mask", threshold=1.5, beta=0.01)


def test_defaults_are_swift_s():
    made = rc.recipe("swift", {})
    assert made.spec is None and made.loss.kl.coef == 0.04 and made.loss.mean.over == "rows"
    assert rc.spec("swift", {}) == rc.Spec()
    assert rc.recipe("swift", {"kl_in_reward": True}).loss.kl is None


def test_the_off_policy_mask_beside_a_mode():
    given = GIVEN | {"off_policy_sequence_mask_delta": 0.1}
    plain = rc.spec("swift.token_mask", threshold=1.5)
    test = rc.spec("swift.opsm").criteria[0]
    assert rc.spec("swift", given) == replace(plain, criteria=(*plain.criteria, test))
    assert rc.spec("swift", {"off_policy_sequence_mask_delta": 0.1}) == rc.Spec(criteria=(test,))
    with pytest.raises(ValueError, match="with bnpo and a mode that masks"):
        rc.recipe("swift", given | {"loss_type": "bnpo"})


def test_levels_and_losses():
    made = rc.recipe("swift", {"importance_sampling_level": "sequence_token", "loss_type": "dr_grpo"})
    assert made.loss.surrogate == rc.GSPO(0.2, 0.2, through="token") and made.loss.mean.length == 512
    assert rc.recipe("swift.opsm", loss_type="bnpo").loss.mean.over == "kept"
    assert rc.recipe("swift.token_mask", loss_type="cispo", epsilon_high=5.0).loss.surrogate == rc.Score(upper=5.0)


def test_real():
    """Its correction multiplies zeros there, so it has no part in the loss here."""
    given = {"loss_type": "real", "real_tau": 0.3, "num_generations": 4, "beta": 0.02} | {
        "rollout_importance_sampling_mode": "token_mask"
    }
    made = rc.recipe("swift", given)
    assert made == rc.recipe("swift.real", real_tau=0.3, num_generations=4, beta=0.02)
    assert made.loss.surrogate == rc.REAL(0.3) and made.spec is None and made.batch["groups"].size == 4
    assert rc.recipe("swift", {"loss_type": "real"}).batch["groups"].size == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epsilon_hi": 0.3}, r"unknown key 'epsilon_hi' \(did you mean 'epsilon_high'\?\)"),
        ({"loss_type": "reel"}, "loss_type: expected one of"),
        ({"loss_type": "real", "off_policy_sequence_mask_delta": 0.1}, "off_policy_sequence_mask_delta: with real"),
        ({"rollout_importance_sampling_mode": "geo"}, "rollout_importance_sampling_mode: expected null or one of"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "expected 'token' with loss_type 'sapo'"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile: needs"),
        ({"sdar_loss_coef": 0.1}, "sdar_loss_coef, chord_sft_dataset: add these losses"),
    ],
)
def test_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("swift", config)
