"""Each recipe against its framework's published formula, restated in published.py and here in plain Python.

Numbers are those of the frameworks' own defaults.
"""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import error
from builders.recipe_cases import PUBLISHED, RESTATED_ALONE, RESTATED_ALONE_TOO, backing
from oracles.published import (
    cispo,
    decoupled,
    gspo,
    k3,
    kept_mean,
    old,
    opsm,
    ppo,
    ratio,
    rows_mean,
    rows_sum,
    seq,
    token_mean,
    token_tis,
    trl_weight,
    with_kl,
    within,
)
from oracles.published_rows import Row, batch, clip, mean
from rollout_corr.frameworks.shared.lookup import every_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 1e-6


def padded(rows, values):
    width = max(r.n for r in rows)
    return torch.tensor([v + [math.nan] * (width - len(v)) for v in values], dtype=torch.float64)


def ours(rows, name, needs, **options):
    arguments = {
        "new_logp": padded(rows, [r.new for r in rows]).requires_grad_(),
        "advantages": torch.tensor([r.adv[0] for r in rows], dtype=torch.float64),
        "mask": ~padded(rows, [r.new for r in rows]).isnan(),
    }
    given = {"old_logp": "old", "rollout_logp": "mu", "ref_logp": "ref"}
    arguments |= {log_prob: padded(rows, [getattr(r, given[log_prob]) for r in rows]) for log_prob in needs}
    made = rc.recipe(name, **options)
    groups = {"groups": rc.Groups(size=len(rows))} if "groups" in made.batch else {}
    batch = rc.Batch(mask=arguments.pop("mask"), **made.batch | groups)
    out = rc.policy_loss(**arguments, batch=batch, loss=made.loss, spec=made.spec)
    (slope,) = torch.autograd.grad(out.value, arguments["new_logp"])
    return out.value.item(), slope


def assert_published(name, published, needs, **options):
    acted, backed = 0.0, backing(name) or "a restated formula alone"
    for seed in range(8):
        rows = batch(seed)
        value, slope = ours(rows, name, needs, **options)
        assert error(value, published(rows)) <= 1e-7, (name, seed, value, published(rows), backed)
        for i, row in enumerate(rows):
            for t in range(row.n):
                at, sides = row.new[t], []
                for step in (STEP, -STEP):
                    row.new[t] = at + step
                    sides.append(published(rows))
                row.new[t] = at
                wanted = (sides[0] - sides[1]) / (2 * STEP)
                assert error(slope[i, t].item(), wanted) <= 1e-7, (name, seed, i, t, backed)
                acted += abs(wanted)
    assert acted > 0.0, name


def test_every_recipe_is_restated():
    assert sorted(PUBLISHED) == rc.recipe_names()


def test_a_row_backs_every_formula_whose_framework_can_be_run():
    alone = {name for name in PUBLISHED if not backing(name)}
    assert alone == {name for name in PUBLISHED if name.partition(".")[0] in RESTATED_ALONE} | RESTATED_ALONE_TOO
    assert "loss_functions.py: ClippedPGLossFn, sequence level" in backing("nemo.gspo_is")


def test_plain_ppo_and_grpo_by_these_names():
    # Those that lack one are named in docs/losses.md, with the reason.
    # CTPO is a loss, and no framework that has others.
    compared = {name.partition(".")[0] for name in PUBLISHED} - RESTATED_ALONE - {"ctpo"}
    names = {f"{framework}.{name}" for framework in compared for name in ("ppo", "grpo")}
    absent = {"prime_rl.ppo", "prime_rl.grpo", "trl.ppo", "unsloth.ppo", "swift.ppo", "art.grpo", "trinity.grpo"}
    absent.add("pipeline_rl.grpo")
    assert names - set(PUBLISHED) == absent
    made = {name: rc.recipe(name) for name in names & set(PUBLISHED)}
    assert all(isinstance(recipe.loss.surrogate, rc.PPO) for recipe in made.values())
    assert {name for name, recipe in made.items() if recipe.spec is not None} == {"trl.grpo"}
    assert rc.recipe("trl.grpo", vllm_importance_sampling_correction=False).spec is None
    with_kl = {name for name, recipe in made.items() if recipe.loss.kl is not None}
    assert with_kl == {f"{x}.grpo" for x in ("verl", "nemo", "open_instruct", "roll", "swift", "unsloth", "skyrl")} | {
        "trinity.ppo"
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_is_what_is_published(name):
    assert_published(name, PUBLISHED[name], every_recipe()[name].needs)


@pytest.mark.parametrize(
    "name",
    [n for n in PUBLISHED if n.startswith(("swift", "trl", "unsloth")) and rc.recipe(n).loss.mean.over == "rows"],
)
def test_rows_without_a_token_count_where_they_do_there(name):
    empty = Row(random.Random(0), 0, 1.0)
    empty.adv = [1.0]
    rows = [*batch(0), empty]
    value, _ = ours(rows, name, every_recipe()[name].needs)
    assert error(value, PUBLISHED[name](rows)) <= 1e-7
    assert abs(value / ours(rows[:-1], name, every_recipe()[name].needs)[0] - 5 / 6) < 1e-12


def test_options_by_the_frameworks_names():
    needs = ("old_logp", "rollout_logp")

    def verl_kl(rows):
        return decoupled(token_tis(old, 3.0))(rows) + 0.5 * token_mean(rows, lambda r, t: k3(r, t, 10.0))

    options = {"upper": 3.0, "kl_loss_coef": 0.5}
    assert_published("verl.decoupled_token_is", verl_kl, (*needs, "ref_logp"), **options)

    def trl_kl(rows):
        def loss(r, t):
            r_t = math.exp(r.new[t] - r.old[t])
            w = 0.0 if opsm(r, r.mu, 0.05) else trl_weight(r, t)
            return w * ppo(r, t, 0.1, 0.3, delta=1.5) + 0.2 * k3(r, t) * r_t

        return rows_mean(rows, loss)

    options = {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.2, "off_policy_mask_threshold": 0.05}
    assert_published("trl.grpo", trl_kl, (*needs, "ref_logp"), **options)

    def trl_gspo(rows):
        return token_mean(rows, lambda r, t: min(ratio(r, t, r.old), 3.0) * gspo(r, t, 0.1, 0.1))

    options = {"importance_sampling_level": "sequence", "epsilon": 0.1}
    assert_published("trl.dapo", trl_gspo, needs, vllm_importance_sampling_mode="token_truncate", **options)

    def swift_kl(rows):
        return rows_mean(rows, lambda r, t: min(ratio(r, t, r.old), 2.0) * (ppo(r, t) + 0.3 * k3(r, t)))

    assert_published("swift.token_truncate", swift_kl, (*needs, "ref_logp"), beta=0.3)


def test_trl_s_options_together():
    needs = ("old_logp", "rollout_logp")

    def masked(rows):
        def loss(r, t):
            return 0.0 if opsm(r, r.mu, 0.05) else min(ratio(r, t, r.old), 3.0) * ppo(r, t)

        return token_mean(rows, loss)

    options = {"off_policy_mask_threshold": 0.05, "vllm_importance_sampling_mode": "token_truncate"}
    assert_published("trl.dapo", masked, needs, **options)
    assert_published("trl.dapo", lambda rows: token_mean(rows, ppo), needs, vllm_importance_sampling_correction=False)
    with pytest.raises(ValueError, match="importance_sampling_level: expected 'token' with loss_type 'cispo'"):
        rc.recipe("trl.cispo", importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode: expected one of"):
        rc.recipe("trl.grpo", vllm_importance_sampling_mode="opsm")


def test_options_of_those_with_a_reduction_or_a_kl_of_their_own():
    def scaled(rows):
        loss = with_kl(lambda r, t: ppo(r, t, 0.1, 0.3, c=1.5, base=r.mu), lambda r, t: k3(r, t), 0.2)
        return rows_sum(rows, loss) / 9

    options = {"epsilon": 0.1, "epsilon_high": 0.3, "epsilon_c": 1.5, "beta": 0.2, "kl_loss_mode": "low_var_kl"}
    options |= {"loss_agg_mode": "sequence-mean-token-scale", "max_tokens_to_generate": 9}
    assert_published("tunix.grpo", scaled, ("rollout_logp", "ref_logp"), **options)

    def corrected(rows):
        loss = with_kl(lambda r, t: min(ratio(r, t, r.old), 2.0) * gspo(r, t), k3, 0.001)
        return rows_mean(rows, loss)

    options = {"importance_sampling_level": "sequence", "vllm_importance_sampling_correction": True}
    options |= {"vllm_importance_sampling_mode": "token_truncate", "clip_max": 2.0, "use_bias_correction_kl": False}
    assert_published("unsloth.grpo", corrected, ("old_logp", "rollout_logp", "ref_logp"), **options)

    def clamped(r, t):
        d = clip(r.ref[t] - r.new[t], -0.3, 0.3)
        return math.exp(d) - d - 1

    def pipeline_rl(rows):
        return rows_sum(rows, with_kl(lambda r, t: cispo(r, t, 0.0, 1.1, r.mu), clamped, 0.4))

    options = {"epsilon_high": 0.1, "kl_coef": 0.4, "clamp_log_ratio_ref_new_value": 0.3}
    assert_published("pipeline_rl.reinforce", pipeline_rl, ("rollout_logp", "ref_logp"), **options)

    def rlinf(rows):
        loss = with_kl(lambda r, t: ppo(r, t, 0.2, 0.28), lambda r, t: k3(r, t, 10.0), 0.1)
        return rows_sum(rows, loss)

    options = {"clip_ratio_high": 0.28, "clip_ratio_c": None, "loss_agg_func": "seq-mean-token-sum", "kl_beta": 0.1}
    assert_published("rlinf.actor", rlinf, ("old_logp", "ref_logp"), **options)

    def roll(rows):
        def loss(r, t):
            w = ratio(r, t, r.old)
            return min(w, 1.2) * ppo(r, t, 0.3, 0.3, c=1.6) if within(w, 0.8, 1.2) else None

        return kept_mean(rows, loss)

    options = {"pg_clip": 0.3, "dual_clip_loss": True, "loss_agg_mode": "token-mean"}
    assert_published("roll.default", roll, ("old_logp", "rollout_logp"), **options)

    def art(rows):
        return token_mean(rows, lambda r, t: gspo(r, t, 0.1, 0.3, r.mu))

    options = {"epsilon": 0.1, "epsilon_high": 0.3, "importance_sampling_level": "sequence"}
    assert_published("art.ppo", art, ("rollout_logp",), **options)

    with pytest.raises(
        ValueError, match=r"^recipe art\.ppo\(.*importance_sampling_level: expected one of \['token', 'seq"
    ):
        rc.recipe("art.ppo", importance_sampling_level="row")
    with pytest.raises(ValueError, match=r"^recipe tunix\.grpo\(.*loss_agg_mode: expected one of \['token-mean', "):
        rc.recipe("tunix.grpo", loss_agg_mode="seq-mean-token-mean")
    with pytest.raises(ValueError, match=r"^recipe tunix\.tis\(.*kl_loss_mode: expected one of \['kl', 'mse_kl', 'low"):
        rc.recipe("tunix.tis", kl_loss_mode="k3")


def test_nemo_s_options():
    """The mean over sequences without GSPO, a geometric weight beside GSPO, and the KL's gradient."""

    def by_rows(rows):
        return rows_mean(rows, lambda r, t: min(ratio(r, t, r.old), 2.0) * ppo(r, t))

    assert_published("nemo.tis", by_rows, ("old_logp", "rollout_logp"), token_level_loss=False)

    def geometric(rows):
        return rows_mean(rows, lambda r, t: seq(r, r.old, mean) * gspo(r, t))

    assert_published("nemo.gspo_is", geometric, ("old_logp", "rollout_logp"), level="geometric")

    def with_score(rows):
        def loss(r, t):
            # exp(new - sg(new)) is 1 and has the log-prob's gradient.
            return cispo(r, t, 0.8, 1.2) + 0.5 * math.exp(r.new[t] - r.sg[t]) * k3(r, t)

        return token_mean(rows, loss)

    assert_published("nemo.cispo", with_score, ("old_logp", "ref_logp"), reference_policy_kl_penalty=0.5)


def test_openrlhf_s_mean_over_sequences():
    def by_rows(rows):
        return rows_mean(rows, lambda r, t: clip(ratio(r, t, r.old), 0.5, 5.0) * ppo(r, t))

    needs = ("old_logp", "rollout_logp")
    assert_published("openrlhf.tis", by_rows, needs, loss_agg_mode="seq-mean-token-mean")
    with pytest.raises(ValueError, match="loss_agg_mode: expected one of"):
        rc.recipe("openrlhf.tis", loss_agg_mode="seq-mean-token-sum")


def test_open_instruct_s_kl():
    """Estimator 3 is k1 times the ratio that takes the gradient."""

    def with_kl(rows):
        def loss(r, t):
            moved = math.exp(r.new[t] - r.old[t])
            return min(ratio(r, t, r.old), 2.0) * ppo(r, t, 0.2, 0.272) + 0.05 * moved * (r.new[t] - r.ref[t])

        return token_mean(rows, loss)

    needs = ("old_logp", "rollout_logp", "ref_logp")
    assert_published("open_instruct.default", with_kl, needs, beta=0.05, kl_estimator=3)


def test_clips_by_the_frameworks_names():
    named = {
        "openrlhf.tis": {"eps_clip_low_high": (0.1, 0.3), "dual_clip": 4.0},
        "areal.seq": {"eps_clip": 0.1, "eps_clip_higher": 0.3, "c_clip": 4.0},
        "nemo.tis": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3, "ratio_clip_c": 4.0},
        "slime.tis": {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 4.0},
        "rlinf.decoupled": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0},
        "flash_rl.tis": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0},
        "trinity.ppo": {"clip_range_low": 0.1, "clip_range_high": 0.3, "clip_ratio_c": 4.0},
        "tunix.ppo": {"epsilon_low": 0.1, "epsilon_high": 0.3, "epsilon_c": 4.0},
    }
    for name, options in named.items():
        assert rc.recipe(name, **options).loss.surrogate == rc.PPO(0.1, 0.3, dual=4.0), name
    assert rc.recipe("open_instruct.seq", clip_lower=0.1, clip_higher=0.3).loss.surrogate == rc.PPO(0.1, 0.3)
    assert rc.recipe("roll.default", pg_clip_low=0.1, pg_clip_high=0.3).loss.surrogate == rc.PPO(0.1, 0.3)
    molt = rc.recipe("molt.geo", eps_clip_low_high=(0.1, 0.3), dual_clip=4.0).loss.surrogate
    assert molt == rc.PPO(0.1, 0.3, dual=4.0, clamp=30.0)
    made = rc.recipe("megatron.tis", grpo_kl_beta=0.0, rl_importance_sampling_truncation_coef=8.0)
    assert made == rc.Recipe(rc.spec("megatron.tis", coef=8.0), rc.Loss(rc.PPO(0.01, 0.01)))


@pytest.mark.parametrize(
    ("name", "setting", "value", "kind"),
    [
        ("trl.grpo", "importance_sampling_level", "sequnce", ValueError),
        ("trl.grpo", "use_bias_correction_kl", "false", TypeError),
        ("trl.grpo", "max_completion_length", "long", TypeError),
        ("trl.grpo", "beta", torch.ones(2), TypeError),
        ("unsloth.grpo", "vllm_importance_sampling_correction", "false", TypeError),
        ("unsloth.dapo", "epsilon_high", "wide", TypeError),
        ("verl.disabled", "kl_loss_coef", torch.ones(2), TypeError),
    ],
)
def test_what_is_no_setting_is_refused_also_where_it_would_count_as_true(name, setting, value, kind):
    with pytest.raises(kind, match=rf"^(?s:recipe {name}\(.*): {setting}: expected "):
        rc.recipe(name, **{setting: value})


def test_wrong_names_and_options():
    with pytest.raises(ValueError, match=r"^recipe: unknown name 'verl\.gsop', did you mean 'verl\.gspo'"):
        rc.recipe("verl.gsop")
    with pytest.raises(TypeError, match=r"^recipe verl\.gspo\(epsilon=0\.1\): .*epsilon"):
        rc.recipe("verl.gspo", epsilon=0.1)
    with pytest.raises(ValueError, match=r"^recipe verl\.gspo\(clip_ratio_low=2\.0\): GSPO\.low: expected a number"):
        rc.recipe("verl.gspo", clip_ratio_low=2.0)
    with pytest.raises(TypeError, match=r"^recipe: expected a name"):
        rc.recipe(None)


def test_what_a_recipe_asks_of_the_batch_is_kept():
    """It is no part of the pair, and travels with it to another process."""
    recipe = rc.recipe("roll.segment")
    assert tuple(recipe) == (recipe.spec, recipe.loss) and rc.recipe("roll.ppo").batch == {}
    for copied in (copy.copy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert copied == recipe and copied.batch == {"turns": "runs"}
