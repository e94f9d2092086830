"""Recipes: their names, settings and errors, and the losses of frameworks whose functions cannot be run here.

The others are compared with what their frameworks' own functions return: tests/conformance/test_replay.py.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import rollout_corr as rc
from builders.config_cases import call, error
from builders.config_cases import rows as rows_of
from oracles.published import PUBLISHED, batch
from rollout_corr.frameworks.shared.lookup import every_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 1e-6


def padded(rows, values):
    width = max(r.n for r in rows)
    return torch.tensor([v + [math.nan] * (width - len(v)) for v in values], dtype=torch.float64)


def ours(rows, name):
    new = padded(rows, [r.new for r in rows]).requires_grad_()
    given = {"old_logp": "old", "rollout_logp": "mu", "ref_logp": "ref"}
    policies = {
        needed: padded(rows, [getattr(r, given[needed]) for r in rows]) for needed in every_recipe()[name].needs
    }
    made = rc.recipe(name)
    batch = rc.Batch(mask=~new.isnan(), **made.batch)
    advantages = torch.tensor([r.adv[0] for r in rows], dtype=torch.float64)
    out = rc.policy_loss(new, advantages, batch, made.loss, spec=made.spec, **policies)
    return out.value.item(), torch.autograd.grad(out.value, new)[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_is_what_is_published(name):
    published, acted = PUBLISHED[name], 0.0
    for seed in range(3):
        rows = batch(seed)
        value, slope = ours(rows, name)
        assert value == pytest.approx(published(rows), rel=1e-7, abs=1e-7), seed
        for i, row in enumerate(rows):
            for t in range(row.n):
                at, sides = row.new[t], []
                for step in (STEP, -STEP):
                    row.new[t] = at + step
                    sides.append(published(rows))
                row.new[t] = at
                wanted = (sides[0] - sides[1]) / (2 * STEP)
                assert slope[i, t].item() == pytest.approx(wanted, rel=1e-7, abs=1e-7), (seed, i, t)
                acted += abs(wanted)
    assert acted > 0.0


# Settings that no recording draws, and what they change the recipe or a part of its loss into: CALL | EXPECTED.
WITH_SETTINGS = """
verl.decoupled_token_is(upper=3.0, kl_loss_coef=0.5) |
    Recipe(rc.spec("verl.decoupled_token_is", upper=3.0), Loss(PPO(0.2, 0.2, 3.0), kl=KL("k3", 0.5, value_clamp=10.0)))
trl.cispo(epsilon_high=None) | Score(upper=5.0)
tunix.grpo(epsilon=0.1, epsilon_high=0.3, epsilon_c=1.5, beta=0.2, kl_loss_mode="low_var_kl",
    loss_agg_mode="sequence-mean-token-scale", max_tokens_to_generate=9) |
    Recipe(None, Loss(PPO(0.1, 0.3, 1.5), Mean("sequence_sum", length=9), KL("k3", 0.2)))
tunix.ppo(epsilon_low=0.1, epsilon_high=0.3, epsilon_c=4.0) | PPO(0.1, 0.3, 4.0)
art.ppo(epsilon=0.1, epsilon_high=0.3, importance_sampling_level="sequence") | GSPO(0.1, 0.3)
trinity.ppo(clip_range_low=0.1, clip_range_high=0.3, clip_ratio_c=4.0) | PPO(0.1, 0.3, 4.0)
megatron.tis(grpo_kl_beta=0.0, rl_importance_sampling_truncation_coef=8.0) |
    Recipe(rc.spec("megatron.tis", coef=8.0), Loss(PPO(0.01, 0.01)))
"""


@pytest.mark.parametrize(("made", "expected"), rows_of(WITH_SETTINGS))
def test_settings_by_the_frameworks_names(made, expected):
    name, settings = call(made)
    found = rc.recipe(name, **settings)
    words = {name: getattr(rc, name) for name in rc.__all__} | {"rc": rc, "ROWS": rc.Mean("sequence", over="rows")}
    wanted = eval(expected, words)
    assert wanted == found or wanted in (found.loss.surrogate, found.loss.mean, found.loss.kl)


REFUSED = """
trl.grpo(importance_sampling_level="sequnce") | importance_sampling_level: expected one of
trl.grpo(use_bias_correction_kl="false") | TypeError use_bias_correction_kl: expected true or false
trl.grpo(max_completion_length="long") | TypeError max_completion_length: expected a number
trl.grpo(vllm_importance_sampling_mode="opsm") | vllm_importance_sampling_mode: expected one of
trl.cispo(importance_sampling_level="sequence") | importance_sampling_level: expected 'token' with loss_type 'cispo'
unsloth.dapo(epsilon_high="wide") | TypeError epsilon_high: expected a number
verl.disabled(kl_loss_coef="k3") | TypeError kl_loss_coef: expected a number
verl.gspo(epsilon=0.1) | TypeError got an unexpected keyword argument 'epsilon'
verl.gspo(clip_ratio_low=2.0) | GSPO.low: expected a number
openrlhf.tis(loss_agg_mode="seq-mean-token-sum") | loss_agg_mode: expected one of
art.ppo(importance_sampling_level="row") | importance_sampling_level: expected one of ['token', 'seq
tunix.grpo(loss_agg_mode="seq-mean-token-mean") | loss_agg_mode: expected one of ['token-mean',
tunix.tis(kl_loss_mode="k3") | kl_loss_mode: expected one of ['kl', 'mse_kl', 'low
trinity.rec(clip_mode="gspo-one-side") | kl_coef: expected 0 with clip_mode
trinity.rec(weight="advantage") | weight: expected one of
trinity.rec(clip_mode="ring", weight="gspo_importance_sampling") | weight: expected one of
trinity.rec(regularizer="forward-kl") | regularizer: expected one of
"""


@pytest.mark.parametrize(("made", "message"), rows_of(REFUSED))
def test_refused(made, message):
    name, settings = call(made)
    kind, pattern = error(message)
    with pytest.raises(kind or ValueError, match=rf"^recipe {name}\(.*{pattern}"):
        rc.recipe(name, **settings)


def test_what_a_recipe_asks_of_the_batch_is_kept():
    """It is no part of the pair, and travels with it to another process."""
    recipe = rc.recipe("roll.segment")
    assert tuple(recipe) == (recipe.spec, recipe.loss) and rc.recipe("roll.ppo").batch == {}
    for copied in (copy.copy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert copied == recipe and copied.batch == {"turns": "runs"}
