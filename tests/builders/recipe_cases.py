"""Every recipe of a loss, restated from what its framework publishes; see published.py, and what backs it."""

from __future__ import annotations

import math
from functools import cache

from conformance import page
from oracles import ctpo
from oracles.bounds_of_batch import second_moment_masked
from oracles.published import (
    areal_stat,
    bkl,
    both_ways,
    bypass,
    bypass_pg,
    cispo,
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
    kept_rows_mean,
    kimi,
    megatron,
    minirl,
    nemo_kl,
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
from oracles.published_cov import clip_cov, kl_cov
from oracles.published_rows import clip, mean
from oracles.published_score import real, sapo_stopped, topr, vespo_loss

# Frameworks none of whose recipes has run beside its own code: papers, JAX, and what was not at hand.
RESTATED_ALONE = {
    *("dppo", "fast_llm", "flash_rl", "glm", "kimi", "megatron", "minirl", "rllm", "tinker"),
    *("torchforge", "tunix"),
}
# Losses of versions that prime-rl has left behind.
RESTATED_ALONE_TOO = {"prime_rl.icepop", "prime_rl.kpop"}


@cache
def _rows() -> dict[str, str]:
    """The rows of docs/conformance.md that compare recipes, in words."""
    compared = [line for line in page.lines(page.PAGE.read_text(encoding="utf-8")) if line.ours.startswith("recipe ")]
    return {x.name: f"beside {x.framework} {x.version}, {x.theirs}, {x.cases} cases" for x in compared}


def backing(name: str) -> str:
    """Say which row of docs/conformance.md backs the restated formula of a recipe; "" where none does."""
    return _rows().get(name, "")


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
    "verl.ppo": decoupled(),
    "verl.grpo": lambda rows: decoupled()(rows) + 0.001 * token_mean(rows, lambda r, t: k3(r, t, 10.0)),
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
    "verl.clip_cov": lambda rows: clip_cov(rows, 0.0002, 1.0, 5.0),
    "verl.kl_cov": lambda rows: kl_cov(rows, 0.0002, 0.1),
    "verl.gpg": lambda rows: token_mean(rows, lambda r, t: -r.new[t] * r.adv[t]),
    "verl.dro": lambda rows: token_mean(rows, dro),
    "skyrl.regular": lambda rows: token_mean(rows, ppo),
    "skyrl.ppo": lambda rows: token_mean(rows, ppo),
    "skyrl.grpo": lambda rows: token_mean(rows, ppo) + 0.001 * rows_mean(rows, lambda r, t: k3(r, t, 10.0)),
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
    "xtuner.ppo": plain(one, lambda r, t: ppo(r, t, c=3.0)),
    "xtuner.grpo": plain(one, lambda r, t: ppo(r, t, c=3.0)),
    "xtuner.reasoning": xtuner(0.5),
    "xtuner.agentic": xtuner(0.0),
    "trl.grpo": plain(trl_weight, agg=rows_mean),
    "trl.dapo": plain(trl_weight),
    "trl.bnpo": plain(trl_weight),
    "trl.luspo": plain(trl_weight, agg=rows_sum),
    "trl.dr_grpo": lambda rows: plain(trl_weight, agg=total)(rows) / (len(rows) * 512),
    "trl.sapo": plain(trl_weight, sapo, rows_mean),
    "trl.async_grpo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "trl.vespo": plain(one, vespo_loss(token_tis(old, 3.0))),
    "trl.cispo": plain(trl_weight, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "prime_rl.dppo": prime_rl(dppo_keep),
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
    "openrlhf.ppo": plain(one),
    "openrlhf.grpo": plain(one),
    "openrlhf.gspo": plain(one, gspo, rows_mean),
    "areal.ppo": plain(one),
    "areal.grpo": plain(one),
    "areal.a3po": plain(one),
    "areal.gspo": plain(one, gspo),
    "areal.sapo": plain(one, sapo),
    "areal.cispo": plain(one, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "areal.token_mask": plain(icepop(old, 0.5, 5.0)),
    "areal.seq": plain(lambda r, t: seq(r, r.old, mean) * (seq(r, r.old, mean) <= 5.0)),
    "areal.kl": plain(lambda r, t: ratio(r, t, r.old) * (areal_stat(r, t) <= 5.0)),
    "areal.m2po": lambda rows: kept_mean(
        rows, lambda r, t: ppo(r, t) if (r.old[t] - r.mu[t]) ** 2 <= second_moment_masked(rows, 0.04) else None
    ),
    "areal.kpop": plain(lambda r, t: ratio(r, t, r.old) * (both_ways(r, t, r.old) <= 2.0)),
    "slime.ppo": plain(one, agg=rows_mean),
    "slime.grpo": plain(one, agg=rows_mean),
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
    "nemo.ppo": plain(one),
    "nemo.grpo": plain(one, with_kl(ppo, nemo_kl, 0.01)),
    "nemo.tis": plain(token_tis(old)),
    "nemo.icepop": plain(icepop(old, 0.5, 5.0)),
    "nemo.seq_mask_tis": plain(geo_gate(old, 0.999, 1.002)),
    "nemo.gspo_is": plain(lambda r, t: seq(r, r.old, math.fsum), gspo, rows_mean),
    "nemo.cispo": plain(one, lambda r, t: cispo(r, t, 0.8, 1.2)),
    "nemo.mult_err": lambda rows: kept_mean(
        rows,
        lambda r, t: ppo(r, t) if mean(math.exp(abs(a - b)) for a, b in zip(r.old, r.mu, strict=True)) <= 2 else None,
    ),
    "roll.ppo": plain(one, agg=rows_mean),
    "roll.grpo": plain(one, with_kl(ppo, lambda r, t: k3(r, t, 10.0), 0.01), rows_mean),
    "roll.default": lambda rows: kept_rows_mean(
        rows,
        lambda r, t: min(ratio(r, t, r.old), 1.2) * ppo(r, t) if within(ratio(r, t, r.old), 0.8, 1.2) else None,
    ),
    # Rows without holes are a segment each; tests/frameworks/roll/test_segments.py has several.
    "roll.segment": lambda rows: kept_rows_mean(
        rows,
        lambda r, t: min(seq(r, r.old, mean), 1.2) * gspo(r, t) if within(seq(r, r.old, mean), 0.8, 1.2) else None,
    ),
    "open_instruct.ppo": plain(one, open_instruct_ppo),
    "open_instruct.grpo": plain(one, with_kl(open_instruct_ppo, k3, 0.05)),
    "open_instruct.default": plain(token_tis(old), open_instruct_ppo),
    "open_instruct.icepop": plain(
        lambda r, t: open_instruct(r, t, lambda r, t: within(ratio(r, t, r.old), 0.5, 2.0)), open_instruct_ppo
    ),
    "open_instruct.seq": plain(
        lambda r, t: min(seq(r, r.old, mean), 2.0) * within(seq(r, r.old, mean), 0.5, 2.0), open_instruct_ppo
    ),
    "open_instruct.cispo": plain(token_tis(old), lambda r, t: cispo(r, t, 0.0, 1.272)),
    "open_instruct.vaco": plain(lambda r, t: open_instruct(r, t, vaco), open_instruct_ppo),
    "swift.grpo": plain(one, with_kl(ppo, lambda r, t: k3(r, t, 10.0), 0.04), rows_mean),
    # Its weights, and the advantages of trl.iw_opd, are brought: tests/api/test_position_weights.py.
    "swift.fipo": plain(one),
    "swift.real": real,
    "trl.iw_opd": lambda rows: token_mean(rows, score),
    "swift.token_truncate": plain(token_tis(old), agg=rows_mean),
    "swift.token_mask": plain(icepop(old, 0.0, 2.0), agg=rows_mean),
    "swift.sequence_truncate": plain(lambda r, t: min(seq(r, r.old, mean), 2.0), agg=rows_mean),
    "swift.sequence_mask": plain(geo_gate(old, 0.0, 2.0), agg=rows_mean),
    "swift.opsm": plain(lambda r, t: min(ratio(r, t, r.old), 2.0) * (not opsm(r, r.mu, 0.1)), agg=rows_mean),
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
    "molt.token": plain(icepop(old, 0.5, 5.0)),
    "molt.seq": plain(lambda r, t: ratio(r, t, r.old) * within(seq(r, r.old, math.fsum), 0.5, 5.0)),
    "molt.geo": plain(geo_gate(old, 0.99, 1.01)),
    "molt.ppo": plain(one),
    "molt.grpo": plain(one),
    "molt.gspo": plain(one, gspo_token),
    "molt.cispo": plain(one, lambda r, t: cispo(r, t, 0.0, 1.2)),
    "flash_rl.tis": plain(token_tis(old), lambda r, t: ppo(r, t, c=3.0)),
    "roll.vanilla": plain(one, score, rows_mean),
    "roll.tis": plain(one, lambda r, t: cispo(r, t, 0.0, 1.0), rows_mean),
    "roll.cispo": plain(one, lambda r, t: cispo(r, t, 0.9, 1.1), rows_mean),
    "roll.topr": plain(one, topr, rows_mean),
    "roll.kimi15": plain(one, dro, rows_mean),
    "rlinf.actor": plain(one, lambda r, t: ppo(r, t, c=3.0)),
    "rlinf.ppo": plain(one, lambda r, t: ppo(r, t, c=3.0)),
    "rlinf.grpo": plain(one, lambda r, t: ppo(r, t, c=3.0)),
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
    "trinity.sapo": trinity(lambda r, t: sapo_stopped(r, t, r.mu)),
    "trinity.topr": trinity(lambda r, t: topr(r, t, r.mu)),
    "trinity.opmd": trinity(lambda r, t: score(r, t) / 2),
    "trinity.rec": trinity(score),
    "prime_rl.ref_kl": prime_rl(lambda r, t: prob_diff(r, t) >= -0.2),
    "unsloth.grpo": unsloth(ppo, rows_mean),
    "unsloth.bnpo": unsloth(ppo),
    "unsloth.luspo": unsloth(ppo, rows_sum),
    "unsloth.dapo": unsloth(lambda r, t: ppo(r, t, 0.2, 0.28)),
    "unsloth.dr_grpo": lambda rows: unsloth(ppo, rows_sum)(rows) / 512,
    "unsloth.sapo": unsloth(sapo, rows_mean),
    "unsloth.vespo": unsloth(vespo_loss()),
    "unsloth.cispo": unsloth(lambda r, t: cispo(r, t, 0.0, 5.0)),
    "glm.icepop": plain(icepop(old, 0.5, 2.0), lambda r, t: ppo(r, t, 0.2, 0.28), rows_mean),
    "glm.double_sided": plain(lambda r, t: ratio(r, t, r.sg) * (0.8 < ratio(r, t, r.sg) < 1.28), score),
    "kimi.k25": lambda rows: token_mean(rows, kimi),
    **ctpo.PUBLISHED,
}
