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
from builders.batches import error
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
        assert error(value, published(rows)) <= 1e-7, (seed, value, published(rows))
        for i, row in enumerate(rows):
            for t in range(row.n):
                at, sides = row.new[t], []
                for step in (STEP, -STEP):
                    row.new[t] = at + step
                    sides.append(published(rows))
                row.new[t] = at
                wanted = (sides[0] - sides[1]) / (2 * STEP)
                assert error(slope[i, t].item(), wanted) <= 1e-7, (seed, i, t)
                acted += abs(wanted)
    assert acted > 0.0


def test_plain_ppo_and_grpo_by_these_names():
    # Those that lack one are named in docs/losses.md, with the reason.
    alone = {name.partition(".")[0] for name in PUBLISHED} - {"areal", "prime_rl"}
    compared = {name.partition(".")[0] for name in rc.recipe_names()} - alone - {"ctpo"}
    names = {f"{framework}.{name}" for framework in compared for name in ("ppo", "grpo")}
    absent = {"prime_rl.ppo", "prime_rl.grpo", "trl.ppo", "unsloth.ppo", "swift.ppo", "art.grpo", "trinity.grpo"}
    absent.add("pipeline_rl.grpo")
    assert names - set(rc.recipe_names()) == absent
    made = {name: rc.recipe(name) for name in names - absent}
    assert all(isinstance(recipe.loss.surrogate, rc.PPO) for recipe in made.values())
    assert {name for name, recipe in made.items() if recipe.spec is not None} == {"trl.grpo"}
    with_kl = {name for name, recipe in made.items() if recipe.loss.kl is not None}
    assert with_kl == {f"{x}.grpo" for x in ("verl", "nemo", "open_instruct", "roll", "swift", "unsloth", "skyrl")} | {
        "trinity.ppo"
    }


def test_clips_by_the_names_of_frameworks_that_are_not_recorded():
    named = {
        "flash_rl.tis": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0},
        "tunix.ppo": {"epsilon_low": 0.1, "epsilon_high": 0.3, "epsilon_c": 4.0},
    }
    for name, options in named.items():
        assert rc.recipe(name, **options).loss.surrogate == rc.PPO(0.1, 0.3, dual=4.0), name
    made = rc.recipe("megatron.tis", grpo_kl_beta=0.0, rl_importance_sampling_truncation_coef=8.0)
    assert made == rc.Recipe(rc.spec("megatron.tis", coef=8.0), rc.Loss(rc.PPO(0.01, 0.01)))


REFUSED = [
    ("verl.gsop", {}, ValueError, r"^recipe: unknown name 'verl\.gsop', did you mean 'verl\.gspo'"),
    (None, {}, TypeError, r"^recipe: expected a name"),
    ("verl.gspo", {"epsilon": 0.1}, TypeError, r"^recipe verl\.gspo\(epsilon=0\.1\): .*epsilon"),
    ("verl.gspo", {"clip_ratio_low": 2.0}, ValueError, r"^recipe verl\.gspo\(.*: GSPO\.low: expected a number"),
    ("verl.disabled", {"kl_loss_coef": torch.ones(2)}, TypeError, "kl_loss_coef: expected "),
    ("trl.cispo", {"importance_sampling_level": "sequence"}, ValueError, "expected 'token' with loss_type 'cispo'"),
    ("trl.grpo", {"vllm_importance_sampling_mode": "opsm"}, ValueError, "_sampling_mode: expected one of"),
    ("trl.grpo", {"importance_sampling_level": "sequnce"}, ValueError, "importance_sampling_level: expected "),
    ("trl.grpo", {"use_bias_correction_kl": "false"}, TypeError, "use_bias_correction_kl: expected "),
    ("trl.grpo", {"max_completion_length": "long"}, TypeError, "max_completion_length: expected "),
    ("trl.grpo", {"beta": torch.ones(2)}, TypeError, "beta: expected "),
    ("unsloth.grpo", {"vllm_importance_sampling_correction": "false"}, TypeError, "_correction: expected "),
    ("unsloth.dapo", {"epsilon_high": "wide"}, TypeError, "epsilon_high: expected "),
    ("art.ppo", {"importance_sampling_level": "row"}, ValueError, r"expected one of \['token', 'seq"),
    ("tunix.grpo", {"loss_agg_mode": "seq-mean-token-mean"}, ValueError, r"expected one of \['token-mean', "),
    ("tunix.tis", {"kl_loss_mode": "k3"}, ValueError, r"expected one of \['kl', 'mse_kl', 'low"),
    ("openrlhf.tis", {"loss_agg_mode": "seq-mean-token-sum"}, ValueError, "loss_agg_mode: expected one of"),
]


@pytest.mark.parametrize(("name", "settings", "kind", "message"), REFUSED)
def test_what_is_refused(name, settings, kind, message):
    with pytest.raises(kind, match=message):
        rc.recipe(name, **settings)


def test_what_a_recipe_asks_of_the_batch_is_kept():
    """It is no part of the pair, and travels with it to another process."""
    recipe = rc.recipe("roll.segment")
    assert tuple(recipe) == (recipe.spec, recipe.loss) and rc.recipe("roll.ppo").batch == {}
    for copied in (copy.copy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert copied == recipe and copied.batch == {"turns": "runs"}
