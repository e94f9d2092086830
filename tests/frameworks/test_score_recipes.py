"""Settings of the recipes whose ratio is stopped and masked, tapered, softened or taken between token and sequence."""

from __future__ import annotations

from functools import partial

import pytest

import rollout_corr as rc
from frameworks.test_recipes import assert_published
from oracles.published import plain, rows_mean, token_mean, trinity
from oracles.published_score import art, art_ppo, rec, topr, vespo_loss
from rollout_corr.frameworks.shared.lookup import every_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("level", ["sequence", "average", "geometric_average"])
def test_art_between_token_and_sequence(level):
    settings = {"importance_sampling_level": level, "epsilon": 0.1, "epsilon_high": 0.2}
    wanted = partial(art, level=level, low=0.9, high=1.2)
    assert_published("art.default", lambda rows: token_mean(rows, wanted), ("rollout_logp",), **settings)


@pytest.mark.parametrize("level", ["average", "geometric_average"])
def test_art_s_clip_between_token_and_sequence(level):
    settings = {"importance_sampling_level": level, "epsilon": 0.1, "epsilon_high": 0.2}
    wanted = partial(art_ppo, level=level, low=0.9, high=1.2)
    assert_published("art.ppo", lambda rows: token_mean(rows, wanted), ("rollout_logp",), **settings)


@pytest.mark.parametrize(("mode", "mask"), [("one-side", "one"), ("two-side", "two"), ("ring", "ring")])
def test_trinity_s_masks(mode, mask):
    needs = every_recipe()["trinity.rec"].needs
    for weight, weigh in (("none", False), ("importance_sampling", True)):
        wanted = trinity(partial(rec, mask=mask, weigh=weigh))
        assert_published("trinity.rec", wanted, needs, clip_mode=mode, weight=weight)


def test_trinity_s_rec_of_sequences():
    def wanted(rows):
        def loss(r, t):
            return rec(r, t, "one", weigh=True, whole=True) + 0.5 * (r.new[t] - r.mu[t]) ** 2

        return rows_mean(rows, loss)

    settings = {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling", "kl_coef": 0.0}
    assert_published("trinity.rec", wanted, ("rollout_logp",), **settings, regularizer="k2", regularizer_coef=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_mode": "gspo-one-side"}, "kl_coef: expected 0 with clip_mode"),
        ({"weight": "advantage"}, "weight: expected one of"),
        ({"clip_mode": "ring", "weight": "gspo_importance_sampling"}, "weight: expected one of"),
        ({"regularizer": "forward-kl"}, "regularizer: expected one of"),
    ],
)
def test_trinity_s_rec_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        rc.recipe("trinity.rec", **settings)


def test_weights_of_roll_s_topr():
    wanted = plain(lambda r, t: 1.0, partial(topr, good=0.5, bad=2.0), rows_mean)
    settings = {"topr_positive_weight": 0.5, "topr_negative_weight": 2.0}
    assert_published("roll.topr", wanted, ("old_logp",), **settings)


def test_trl_s_vespo_without_correction():
    settings = {"vllm_importance_sampling_correction": False, "vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0}
    wanted = plain(lambda r, t: 1.0, vespo_loss())
    assert_published("trl.vespo", wanted, ("old_logp", "rollout_logp"), **settings)
    made = rc.recipe("trl", {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"})
    assert made.loss.surrogate == rc.VESPO() and made.spec == rc.spec("trl.token_mask")
