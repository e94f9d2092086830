"""Each recipe against its framework's published formula, restated in published.py and here in plain Python.

Numbers are those of the frameworks' own defaults.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from batches import error, one_thread
from published import (
    areal_stat,
    batch,
    bkl,
    both_ways,
    bypass,
    bypass_pg,
    cispo,
    clip,
    decoupled,
    dppo_keep,
    dppo_verl,
    dro,
    geo_gate,
    geo_mean,
    gspo,
    gspo_token,
    icepop,
    k3,
    kept_mean,
    kimi,
    mean,
    megatron,
    minirl,
    new,
    old,
    one,
    open_instruct,
    open_instruct_ppo,
    opsm,
    plain,
    ppo,
    prime_rl,
    prob_diff,
    ratio,
    reinforce,
    rllm_kl,
    rllm_tv,
    rows_mean,
    rows_sum,
    sapo,
    score,
    seq,
    seq_tis,
    skyrl,
    slime_mis,
    stable_rl,
    token_mean,
    token_tis,
    total,
    trinity,
    trl_weight,
    tunix,
    unsloth,
    vaco,
    verl_rs,
    with_kl,
    within,
    xtuner,
)
from rollout_corr import recipes
from rollout_corr.recipes.table import table

STEP = 1e-6


@pytest.fixture(autouse=True, scope="module")
def quick():
    with one_thread():
        yield


GEO_OLD, GEO_NEW = verl_rs("geo", old, 0.999, 1.001), verl_rs("geo", new, 0.999, 1.001)
K3_OLD, K3_NEW = verl_rs("k3", old, high=0.01), verl_rs("k3", new, high=0.01)

PUBLISHED = {
    "verl.decoupled_token_is": decoupled(token_tis(old)),
    "verl.decoupled_seq_is": decoupled(seq_tis(old)),
    "verl.decoupled_token_icepop": decoupled(icepop(old, 0.5, 5.0)),
    "verl.decoupled_seq_is_rs": decoupled(seq_tis(old), verl_rs("sum", old, 0.5, 2.0)),
    "verl.decoupled_geo_rs": decoupled(keep=GEO_OLD),
    "verl.decoupled_geo_rs_seq_tis": decoupled(seq_tis(old), GEO_OLD),
    "verl.decoupled_geo_rs_token_tis": decoupled(token_tis(old), GEO_OLD),
    "verl.decoupled_k3_rs": decoupled(keep=K3_OLD),
    "verl.decoupled_k3_rs_seq_tis": decoupled(seq_tis(old), K3_OLD),
    "verl.decoupled_k3_rs_token_tis": decoupled(token_tis(old), K3_OLD),
    "verl.disabled": decoupled(),
    "verl.bypass_ppo_clip": bypass(),
    "verl.bypass_ppo_clip_geo_rs": bypass(GEO_NEW),
    "verl.bypass_ppo_clip_k3_rs": bypass(K3_NEW),
    "verl.bypass_pg_is": bypass_pg(seq_tis(new)),
    "verl.bypass_pg_token_icepop": bypass_pg(icepop(new, 0.5, 5.0)),
    "verl.bypass_pg_geo_rs": bypass_pg(keep=GEO_NEW),
    "verl.bypass_pg_geo_rs_seq_tis": bypass_pg(seq_tis(new), GEO_NEW),
    "verl.bypass_pg_geo_rs_token_tis": bypass_pg(token_tis(new), GEO_NEW),
    "verl.cispo": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.8, 1.2)),
    "verl.gspo": lambda rows: rows_mean(rows, gspo_token),
    "verl.sapo": lambda rows: rows_mean(rows, sapo),
    "verl.geo_mean": lambda rows: mean(geo_mean(r, 0) for r in rows),
    "verl.dppo_tv": lambda rows: token_mean(rows, lambda r, t: dppo_verl(r, t, "tv")),
    "verl.dppo_kl": lambda rows: token_mean(rows, lambda r, t: dppo_verl(r, t, "kl")),
    "verl.gpg": lambda rows: token_mean(rows, lambda r, t: -r.new[t] * r.adv[t]),
    "verl.dro": lambda rows: token_mean(rows, dro),
    "skyrl.regular": lambda rows: token_mean(rows, ppo),
    "skyrl.dual_clip": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, c=3.0)),
    "skyrl.gspo": lambda rows: token_mean(rows, gspo_token),
    "skyrl.sapo": lambda rows: token_mean(rows, sapo),
    "skyrl.cispo": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "skyrl.rollout_is": lambda rows: token_mean(
        rows, lambda r, t: -ratio(r, t, r.sg) * (0.8 < ratio(r, t, r.sg) < 1.2) * r.adv[t] * r.new[t]
    ),
    "skyrl.dppo": lambda rows: token_mean(rows, lambda r, t: reinforce(r, t, r.mu) * dppo_keep(r, t)),
    "skyrl.tldr": skyrl("token", outlier=True, token=True, sequence="geo", low=0.99, high=1.01),
    "skyrl.token_tis": skyrl("token"),
    "skyrl.sequence_tis": skyrl("sequence"),
    "skyrl.geometric_mask": skyrl(sequence="geo", low=0.99, high=1.01),
    "skyrl.product_mask": skyrl(sequence="product", low=0.5, high=2.0),
    "skyrl.token_mask": skyrl(token=True),
    "skyrl.outlier_mask": skyrl(outlier=True),
    "xtuner.reasoning": xtuner(0.5),
    "xtuner.agentic": xtuner(0.0),
    "trl.grpo": plain(trl_weight, agg=rows_mean),
    "trl.dapo": plain(trl_weight),
    "trl.bnpo": plain(trl_weight),
    "trl.luspo": plain(trl_weight, agg=rows_sum),
    "trl.dr_grpo": lambda rows: plain(trl_weight, agg=total)(rows) / (len(rows) * 256),
    "trl.sapo": plain(trl_weight, sapo, rows_mean),
    "trl.cispo": plain(trl_weight, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "prime_rl.default": prime_rl(dppo_keep),
    "prime_rl.ipo": prime_rl(lambda r, t: abs(prob_diff(r, t)) <= 0.1),
    "prime_rl.icepop": lambda rows: token_mean(
        rows, lambda r, t: reinforce(r, t, r.mu) * within(ratio(r, t, r.sg), 0.2, 5.0)
    ),
    "prime_rl.kpop": prime_rl(lambda r, t: both_ways(r, t, r.sg) <= 0.1),
    "tinker.importance_sampling": lambda rows: total(rows, lambda r, t: reinforce(r, t, r.mu)),
    "tinker.ppo": lambda rows: total(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "tinker.cispo": lambda rows: total(rows, lambda r, t: cispo(r, t, 0.0, 4.0, r.mu)),
    "torchforge.default": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.1, 10.0, r.mu)),
    "art.default": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.0, 5.0, r.mu)),
    "dppo.tv": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "tv", 0.15)),
    "dppo.kl": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "kl", 0.05)),
    "minirl.default": lambda rows: token_mean(rows, minirl),
    "openrlhf.tis": plain(lambda r, t: clip(ratio(r, t, r.old), 0.5, 5.0)),
    "openrlhf.icepop": plain(icepop(old, 0.5, 5.0)),
    "openrlhf.seq_mask_tis": plain(geo_gate(old, 0.5, 5.0)),
    "openrlhf.flash_reinforce": plain(
        lambda r, t: ratio(r, t, r.old) * (mean(bkl(r, u, r.old, 1e-6) for u in range(r.n)) <= 3e-3)
    ),
    "openrlhf.dppo_like": plain(lambda r, t: ratio(r, t, r.old) * (bkl(r, t, r.old, 1e-6) <= 0.05)),
    "areal.token_mask": plain(icepop(old, 0.5, 5.0)),
    "areal.seq": plain(lambda r, t: seq(r, r.old, mean) * (seq(r, r.old, mean) <= 5.0)),
    "areal.kl": plain(lambda r, t: ratio(r, t, r.old) * (areal_stat(r, t) <= 5.0)),
    "areal.kpop": plain(lambda r, t: ratio(r, t, r.old) * (both_ways(r, t, r.old) <= 2.0)),
    "slime.tis": plain(lambda r, t: clip(ratio(r, t, r.old), 0.0, 2.0), agg=rows_mean),
    "slime.icepop": plain(icepop(old, 0.0, 2.0), agg=rows_mean),
    "slime.mis": slime_mis,
    "slime.mis_geo": plain(
        lambda r, t: (
            min(ratio(r, t, r.old), 2.0)
            * within(seq(r, r.old, mean), 0.9999, 1.0001)
            * (min(ratio(r, u, r.old) for u in range(r.n)) >= 1e-4)
        ),
        agg=rows_mean,
    ),
    "slime.opsm": plain(lambda r, t: float(not opsm(r, r.old, 1e-4)), agg=rows_mean),
    "nemo.tis": plain(token_tis(old)),
    "nemo.icepop": plain(icepop(old, 0.5, 5.0)),
    "nemo.seq_mask_tis": plain(geo_gate(old, 0.999, 1.002)),
    "nemo.gspo_is": plain(lambda r, t: seq(r, r.old, math.fsum), gspo),
    "nemo.mult_err": lambda rows: kept_mean(
        rows,
        lambda r, t: ppo(r, t) if mean(math.exp(abs(a - b)) for a, b in zip(r.old, r.mu, strict=True)) <= 2 else None,
    ),
    "roll.default": plain(
        lambda r, t: clip(ratio(r, t, r.old), 0, 1.2) * within(ratio(r, t, r.old), 0.8, 1.2), agg=rows_mean
    ),
    "open_instruct.default": plain(token_tis(old), open_instruct_ppo),
    "open_instruct.icepop": plain(
        lambda r, t: open_instruct(r, t, lambda r, t: within(ratio(r, t, r.old), 0.5, 2.0)), open_instruct_ppo
    ),
    "open_instruct.seq": plain(
        lambda r, t: min(seq(r, r.old, mean), 2.0) * within(seq(r, r.old, mean), 0.5, 2.0), open_instruct_ppo
    ),
    "open_instruct.vaco": plain(lambda r, t: open_instruct(r, t, vaco), open_instruct_ppo),
    "swift.token_truncate": plain(token_tis(old), agg=rows_mean),
    "swift.token_mask": plain(icepop(old, 0.0, 2.0), agg=rows_mean),
    "swift.sequence_truncate": plain(lambda r, t: min(seq(r, r.old, mean), 2.0), agg=rows_mean),
    "swift.sequence_mask": plain(geo_gate(old, 0.0, 2.0), agg=rows_mean),
    "swift.opsm": lambda rows: mean(
        mean(min(ratio(r, t, r.old), 2.0) * ppo(r, t) for t in range(r.n)) for r in rows if not opsm(r, r.mu, 0.1)
    ),
    "rlinf.decoupled": lambda rows: kept_mean(
        rows, lambda r, t: ratio(r, t, r.old) * ppo(r, t, c=3.0) if ratio(r, t, r.old) <= 2.0 else None
    ),
    "megatron.grpo": megatron(one),
    "megatron.tis": megatron(token_tis(old)),
    "tunix.grpo": tunix(lambda r, t: ppo(r, t, base=r.mu)),
    "tunix.gspo_token": tunix(lambda r, t: gspo_token(r, t, base=r.mu)),
    "tunix.dapo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, 0.2, 0.28, base=r.mu)),
    "tunix.drgrpo": lambda rows: tunix(lambda r, t: ppo(r, t, base=r.mu), rows_sum)(rows) / 64,
    "tunix.tis": tunix(lambda r, t: min(ratio(r, t, r.old), 2.0) * ppo(r, t)),
    "tunix.ppo": plain(one),
    "pipeline_rl.ppo": lambda rows: rows_sum(rows, lambda r, t: ppo(r, t, 0.02, 0.02, base=r.mu)),
    "pipeline_rl.reinforce": lambda rows: rows_sum(rows, lambda r, t: cispo(r, t, 0.0, 1.02, r.mu)),
    "pipeline_rl.gspo": lambda rows: rows_sum(rows, lambda r, t: gspo(r, t, 0.02, 0.02, r.mu)),
    "fast_llm.grpo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "fast_llm.gspo": lambda rows: rows_sum(rows, lambda r, t: gspo(r, t, base=r.mu)),
    "molt.seq": plain(lambda r, t: ratio(r, t, r.old) * within(seq(r, r.old, math.fsum), 0.5, 5.0)),
    "molt.geo": plain(geo_gate(old, 0.99, 1.01)),
    "molt.ppo": plain(one),
    "molt.gspo": plain(one, gspo_token),
    "molt.cispo": plain(one, lambda r, t: cispo(r, t, 0.0, 1.2)),
    "flash_rl.tis": plain(token_tis(old), lambda r, t: ppo(r, t, c=3.0)),
    "roll.vanilla": plain(one, score, rows_mean),
    "roll.tis": plain(one, lambda r, t: cispo(r, t, 0.0, 1.0), rows_mean),
    "roll.cispo": plain(one, lambda r, t: cispo(r, t, 0.9, 1.1), rows_mean),
    "roll.kimi15": plain(one, dro, rows_mean),
    "rlinf.actor": plain(one, lambda r, t: ppo(r, t, c=3.0)),
    "rlinf.importance_sampling_fix": plain(token_tis(old), lambda r, t: ppo(r, t, c=3.0)),
    "art.ppo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "rllm.ppo_clip": plain(one),
    "rllm.cispo": plain(one, lambda r, t: cispo(r, t, 0.8, 1.2)),
    "rllm.gspo": plain(one, gspo_token, rows_mean),
    "rllm.dppo_tv": plain(one, rllm_tv),
    "rllm.dppo_kl": plain(one, rllm_kl),
    "rllm.icepop": plain(icepop(new, 0.5, 5.0), score),
    "rllm.reinforce": plain(one, score),
    "rllm.reinforce_kl": plain(lambda r, t: ratio(r, t, r.sg), score),
    "trinity.ppo": trinity(lambda r, t: ppo(r, t, c=3.0, base=r.mu)),
    "trinity.gspo": trinity(lambda r, t: gspo_token(r, t, 3e-4, 4e-4, r.mu)),
    "trinity.cispo": trinity(lambda r, t: cispo(r, t, 0.0, 1.28, r.mu)),
    "trinity.importance_sampling": lambda rows: token_mean(rows, lambda r, t: reinforce(r, t, r.mu)),
    "prime_rl.ref_kl": prime_rl(lambda r, t: prob_diff(r, t) >= -0.2),
    "unsloth.grpo": unsloth(ppo, rows_mean),
    "unsloth.bnpo": unsloth(ppo),
    "unsloth.dapo": unsloth(lambda r, t: ppo(r, t, 0.2, 0.28)),
    "unsloth.dr_grpo": lambda rows: unsloth(ppo, rows_sum)(rows) / 256,
    "unsloth.sapo": unsloth(sapo, rows_mean),
    "unsloth.cispo": unsloth(lambda r, t: cispo(r, t, 0.0, 5.0)),
    "glm.icepop": plain(icepop(old, 0.5, 2.0), lambda r, t: ppo(r, t, 0.2, 0.28), rows_mean),
    "glm.double_sided": plain(lambda r, t: ratio(r, t, r.sg) * (0.8 < ratio(r, t, r.sg) < 1.28), score),
    "kimi.k25": lambda rows: token_mean(rows, kimi),
}


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
    out = rc.policy_loss(**arguments, **rc.recipe(name, **options))
    (slope,) = torch.autograd.grad(out.value, arguments["new_logp"])
    return out.value.item(), slope


def assert_published(name, published, needs, **options):
    acted = 0.0
    for seed in range(8):
        rows = batch(seed)
        value, slope = ours(rows, name, needs, **options)
        assert error(value, published(rows)) <= 1e-7, (name, seed, value, published(rows))
        for i, row in enumerate(rows):
            for t in range(row.n):
                at, sides = row.new[t], []
                for step in (STEP, -STEP):
                    row.new[t] = at + step
                    sides.append(published(rows))
                row.new[t] = at
                wanted = (sides[0] - sides[1]) / (2 * STEP)
                assert error(slope[i, t].item(), wanted) <= 1e-7, (name, seed, i, t)
                acted += abs(wanted)
    assert acted > 0.0, name


def test_every_recipe_is_restated():
    assert sorted(PUBLISHED) == rc.recipe_names()


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_is_what_is_published(name):
    assert_published(name, PUBLISHED[name], recipes.calls()[name].needs)


def test_options_by_the_frameworks_names():
    needs = ("old_logp", "rollout_logp")

    def verl_kl(rows):
        return decoupled(token_tis(old, 3.0))(rows) + 0.5 * token_mean(rows, lambda r, t: k3(r, t, 10.0))

    options = {"threshold": 3.0, "kl_loss_coef": 0.5}
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
    options |= {"vllm_importance_sampling_mode": "token_truncate", "clip_max": 2.0}
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
        return plain(
            lambda r, t: clip(ratio(r, t, r.old), 0, 1.2) * within(ratio(r, t, r.old), 0.8, 1.2),
            lambda r, t: ppo(r, t, 0.3, 0.3, c=1.6),
        )(rows)

    options = {"pg_clip": 0.3, "dual_clip_loss": True, "loss_agg_mode": "token-mean"}
    assert_published("roll.default", roll, ("old_logp", "rollout_logp"), **options)

    def art(rows):
        return token_mean(rows, lambda r, t: gspo(r, t, 0.1, 0.3, r.mu))

    options = {"epsilon": 0.1, "epsilon_high": 0.3, "importance_sampling_level": "sequence"}
    assert_published("art.ppo", art, ("rollout_logp",), **options)

    with pytest.raises(
        ValueError, match=r"^recipe art\.ppo\(.*importance_sampling_level: expected one of \['token', 'seq"
    ):
        rc.recipe("art.ppo", importance_sampling_level="average")
    with pytest.raises(ValueError, match=r"^recipe tunix\.grpo\(.*loss_agg_mode: expected one of \['token-mean', "):
        rc.recipe("tunix.grpo", loss_agg_mode="seq-mean-token-mean")
    with pytest.raises(ValueError, match=r"^recipe tunix\.tis\(.*kl_loss_mode: expected one of \['kl', 'mse_kl', 'low"):
        rc.recipe("tunix.tis", kl_loss_mode="k3")


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
        assert rc.recipe(name, **options)["surrogate"] == rc.PPO(0.1, 0.3, dual=4.0), name
    assert rc.recipe("open_instruct.seq", clip_lower=0.1, clip_higher=0.3)["surrogate"] == rc.PPO(0.1, 0.3)
    assert rc.recipe("roll.default", pg_clip_low=0.1, pg_clip_high=0.3)["surrogate"] == rc.PPO(0.1, 0.3)
    molt = rc.recipe("molt.geo", eps_clip_low_high=(0.1, 0.3), dual_clip=4.0)["surrogate"]
    assert molt == rc.PPO(0.1, 0.3, dual=4.0, clamp=30.0)
    assert rc.recipe("megatron.tis", grpo_kl_beta=0.0, rl_importance_sampling_truncation_coef=8.0) == {
        "surrogate": rc.PPO(0.01, 0.01),
        "spec": rc.preset("megatron.tis", coef=8.0),
        "reduction": "token_mean",
        "denominator": "original",
    }


def test_module_prints_the_tables():
    command = [sys.executable, "-m", "rollout_corr.recipes"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert done.stdout == table()


def test_wrong_names_and_options():
    with pytest.raises(ValueError, match=r"^recipe: unknown name 'verl\.gsop', did you mean 'verl\.gspo'"):
        rc.recipe("verl.gsop")
    with pytest.raises(TypeError, match=r"^recipe verl\.gspo\(epsilon=0\.1\): .*epsilon"):
        rc.recipe("verl.gspo", epsilon=0.1)
    with pytest.raises(ValueError, match=r"^recipe verl\.gspo\(clip_ratio_low=2\.0\): GSPO\.low: expected a number"):
        rc.recipe("verl.gspo", clip_ratio_low=2.0)
    with pytest.raises(TypeError, match=r"^recipe: expected a name"):
        rc.recipe(None)
