"""The Spec of every recipe, written out by hand from the peers' documents."""

from __future__ import annotations

import math
from typing import Any

import pytest

from builders.config_cases import SKYRL, VERL, VETO, WORDS, XTUNER, call, k1, option, ratio, rows
from rollout_corr.specs.bounds_of_batch import MeanBelow
from rollout_corr.specs.correction import Criterion, Spec, Weight

GEO = k1("seq_mean_k1", 0.999, 1.001)
K3 = option("seq_mean_k3", None, 0.01)
MOLT = Weight.token(token_clamp=30)
TOKEN_TIS, SEQ_TIS = Weight.token(upper=2), Weight.product(upper=2)
MASK_AND_VETO = ratio(0.5, 5, label="mask"), ratio(0, 20, drop="sequence", label="veto")
ICEPOP = Weight.token(lower=0.5, upper=5, outside="zero")


def opsm(delta: float, of: str, **more: object) -> Criterion:
    return Criterion("k1", "sequence", "mean", upper=delta, when="negative_advantage", of=of, **more)


def ctpo(weighed: str, tested: str, bounds: tuple[float, float, float], growth: str | None) -> Spec:
    of = {"over": "prefix", "reduce": tested, "of": "new/rollout", "token_clamp": 20, "growth": growth}
    criteria = (
        Criterion("ratio", upper=bounds[1], when="positive_advantage", label="clip_high", **of),
        Criterion("ratio", lower=bounds[0], when="negative_advantage", label="clip_low", **of),
        Criterion("ratio", upper=bounds[2], when="negative_advantage", label="clip_dual", **of),
    )
    return Spec(Weight("prefix", token_clamp=20, reduce=weighed), criteria, "zero")


def dppo(stat: str, lower: float | None, upper: float) -> Criterion:
    return Criterion(stat, lower=lower, upper=upper, when="outward", of="new/rollout", label="dppo")


# From peers/verl.md section 1, peers/xtuner_skyrl.md 1.2 and 2.2, and peers/survey.md 4.2.
EXPECTED = {
    "verl.decoupled_token_is": Spec(TOKEN_TIS, **VERL),
    "verl.decoupled_seq_is": Spec(SEQ_TIS, **VERL),
    "verl.decoupled_token_icepop": Spec(ICEPOP, **VERL),
    "verl.decoupled_seq_is_rs": Spec(SEQ_TIS, (k1("seq_sum_k1", 0.5, 2),), **VERL),
    "verl.decoupled_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.decoupled_geo_rs_seq_tis": Spec(SEQ_TIS, (GEO,), **VERL),
    "verl.decoupled_geo_rs_token_tis": Spec(TOKEN_TIS, (GEO,), **VERL),
    "verl.decoupled_k3_rs": Spec(None, (K3,), **VERL),
    "verl.decoupled_k3_rs_seq_tis": Spec(SEQ_TIS, (K3,), **VERL),
    "verl.decoupled_k3_rs_token_tis": Spec(TOKEN_TIS, (K3,), **VERL),
    "verl.bypass_ppo_clip": Spec(**VERL),
    "verl.bypass_ppo_clip_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.bypass_ppo_clip_k3_rs": Spec(None, (K3,), **VERL),
    "verl.bypass_pg_is": Spec(SEQ_TIS, **VERL),
    "verl.bypass_pg_token_icepop": Spec(ICEPOP, **VERL),
    "verl.bypass_pg_geo_rs": Spec(None, (GEO,), **VERL),
    "verl.bypass_pg_geo_rs_seq_tis": Spec(SEQ_TIS, (GEO,), **VERL),
    "verl.bypass_pg_geo_rs_token_tis": Spec(TOKEN_TIS, (GEO,), **VERL),
    "verl.disabled": Spec(**VERL),
    "verl.staleness": Spec(criteria=(Criterion("age", "sequence", "max", upper=7),)),
    "xtuner.staleness": Spec(criteria=(Criterion("age", upper=1, drop="sequence"),)),
    "xtuner.reasoning": Spec(Weight.token(lower=0.5, upper=5), MASK_AND_VETO, **XTUNER),
    "xtuner.agentic": Spec(Weight.token(lower=0, upper=5), MASK_AND_VETO, **XTUNER),
    "skyrl.tldr": Spec(
        Weight.token(upper=2),
        (
            ratio(1e-4, 100, drop="sequence", label="outlier"),
            ratio(0.5, 2, label="token_mask"),
            ratio(0.99, 1.01, "mean", label="geo_sequence_mask"),
        ),
        sums_over="kept",
        **SKYRL,
    ),
    "skyrl.token_tis": Spec(Weight.token(upper=2), **SKYRL),
    "skyrl.sequence_tis": Spec(Weight.product(upper=5), **SKYRL),
    "skyrl.geometric_mask": Spec(None, (ratio(0.99, 1.01, "mean", label="geo_sequence_mask"),), **SKYRL),
    "skyrl.product_mask": Spec(None, (ratio(0.5, 2, "sum", label="product_sequence_mask"),), **SKYRL),
    "skyrl.token_mask": Spec(None, (ratio(0.5, 2, label="token_mask"),), sums_over="kept", **SKYRL),
    "skyrl.outlier_mask": Spec(None, (ratio(1e-4, 100, drop="sequence", label="outlier"),), sums_over="kept", **SKYRL),
    "openrlhf.tis": Spec(Weight.token(lower=0.5, upper=5)),
    "openrlhf.icepop": Spec(Weight.token(), (ratio(0.5, 5),), "zero"),
    "openrlhf.seq_mask_tis": Spec(Weight.token(), (ratio(0.5, 5, "mean"),), "zero"),
    "openrlhf.flash_reinforce": Spec(
        Weight.token(), (Criterion("binary_kl", over="sequence", reduce="mean", upper=0.003, eps=1e-6),), "zero"
    ),
    "openrlhf.dppo_like": Spec(Weight.token(), (Criterion("binary_kl", upper=0.05, eps=1e-6),), "zero"),
    "molt.token": Spec(MOLT, (ratio(0.5, 5, token_clamp=30),), "zero", clamp=30, nonfinite="neutral"),
    "molt.seq": Spec(MOLT, (ratio(0.5, 5, "sum", token_clamp=30),), "zero", clamp=30, nonfinite="neutral"),
    "molt.geo": Spec(MOLT, (ratio(0.99, 1.01, "mean", token_clamp=30),), "zero", clamp=30, nonfinite="neutral"),
    "areal.token_mask": Spec(Weight.token(), (ratio(0.5, 5),), "both", nonfinite="neutral"),
    "areal.seq": Spec(Weight.geometric(), (ratio(None, 5, "mean"),), "both", nonfinite="neutral"),
    "areal.kl": Spec(Weight.token(), (Criterion("k3_reverse", upper=5),), "both"),
    "areal.m2po": Spec(criteria=(Criterion("k2", upper=MeanBelow(0.02), label="m2po"),), nonfinite="propagate"),
    "areal.kpop": Spec(Weight.token(), (Criterion("binary_kl_symmetric", upper=2, eps=1e-8),), "both"),
    "axolotl.token_truncate": Spec(Weight.token(lower=1 / 3, upper=3), nonfinite="propagate"),
    "axolotl.token_mask": Spec(Weight.token(lower=1 / 3), (ratio(None, 3),), "zero", nonfinite="propagate"),
    "axolotl.sequence_truncate": Spec(Weight.product(lower=1 / 3, upper=3), nonfinite="propagate"),
    "axolotl.sequence_mask": Spec(Weight.product(lower=1 / 3), (ratio(None, 3, "sum"),), "zero", nonfinite="propagate"),
    "cosmos_rl.decoupled": Spec(Weight.token(), (ratio(None, 5),), "zero", nonfinite="propagate"),
    "torchtitan.finite": Spec(
        criteria=(Criterion("k1", lower=-1e30, upper=1e30, of="new/rollout", label="nonfinite"),), nonfinite="propagate"
    ),
    "slime.tis": Spec(Weight.token(lower=0, upper=2)),
    "slime.icepop": Spec(Weight.token(), (ratio(0, 2),), "zero"),
    "slime.mis": Spec(Weight.token(lower=0, upper=2, normalize="batch"), (ratio(0.5, 2), VETO), "mask"),
    "slime.mis_geo": Spec(Weight.token(lower=0, upper=2), (ratio(0.9999, 1.0001, "mean"), VETO), "mask"),
    "nemo.tis": Spec(Weight.token(upper=2)),
    "nemo.icepop": Spec(Weight.token(), (ratio(0.5, 5),), "zero"),
    "nemo.seq_mask_tis": Spec(Weight.token(), (ratio(0.999, 1.002, "mean"),), "zero"),
    "nemo.gspo_is": Spec(Weight.product()),
    "nemo.mult_err": Spec(None, (Criterion("ratio_error", over="sequence", reduce="mean", upper=2),)),
    "roll.default": Spec(Weight.token(lower=0, upper=1.2), (ratio(0.8, 1.2),), "mask"),
    "roll.segment": Spec(
        Weight.geometric(lower=0, upper=1.2, over="turn"),
        (Criterion("ratio", over="turn", reduce="mean", lower=0.8, upper=1.2),),
        "mask",
    ),
    "flash_rl.tis": Spec(Weight.token(upper=2)),
    "megatron.tis": Spec(Weight.token(upper=2)),
    "tunix.tis": Spec(Weight.token(upper=2, token_clamp=20)),
    "open_instruct.default": Spec(Weight.token(upper=2, token_clamp=10)),
    "open_instruct.icepop": Spec(Weight.token(upper=2, token_clamp=10), (ratio(0.5, 2, token_clamp=10),), "zero"),
    "open_instruct.seq": Spec(
        Weight.geometric(upper=2, token_clamp=10), (ratio(0.5, 2, "mean", token_clamp=10),), "zero"
    ),
    "open_instruct.vaco": Spec(
        Weight.token(upper=2, token_clamp=10),
        (
            Criterion(
                "ratio_deviation", over="sequence", reduce="mean", upper=2, when="outward", drop="token", token_clamp=10
            ),
        ),
        "zero",
    ),
    "unsloth.geometric_mask": Spec(Weight.geometric(), (ratio(None, 3, "mean"),), "zero", nonfinite="neutral"),
    "unsloth.geometric_truncate": Spec(Weight.geometric(upper=3), nonfinite="neutral"),
    "swift.token_truncate": Spec(Weight.token(upper=2, token_clamp=20)),
    "swift.token_mask": Spec(Weight.token(token_clamp=20), (ratio(None, 2, token_clamp=20),), "zero"),
    "swift.sequence_truncate": Spec(Weight.geometric(upper=2, token_clamp=20)),
    "swift.sequence_mask": Spec(Weight.token(token_clamp=20), (ratio(None, 2, "mean", token_clamp=20),), "zero"),
    "rlinf.decoupled": Spec(Weight.token(), (ratio(None, 2),), "mask"),
    "trl.opsm": Spec(
        Weight.product(),
        (ratio(None, 3, "sum"), opsm(0.1, "new/rollout", label="off_policy")),
        "zero",
        nonfinite="neutral",
    ),
    "slime.opsm": Spec(None, (opsm(1e-4, "new/old", drop="token", label="opsm"),), "zero"),
    "swift.opsm": Spec(Weight.token(upper=2, token_clamp=20), (opsm(0.1, "new/rollout", label="off_policy"),)),
    "prime_rl.dppo": Spec(None, (dppo("prob_diff", -0.2, 0.2),), "zero"),
    "prime_rl.ipo": Spec(None, (Criterion("tv", upper=0.3, of="new/rollout", label="ipo"),), "zero"),
    "prime_rl.icepop": Spec(None, (ratio(0.2, 5, of="new/rollout", label="icepop"),), "zero"),
    "prime_rl.kpop": Spec(
        None, (Criterion("binary_kl_symmetric", upper=0.1, of="new/rollout", label="kpop", eps=1e-6),), "zero"
    ),
    "prime_rl.ref_kl": Spec(None, (Criterion("prob_diff", lower=-0.2, of="new/rollout", label="ref_kl"),), "zero"),
    "kimi.interval": Spec(None, (ratio(0.5, 2, of="new/rollout", label="interval"),), "zero"),
    "dppo.tv": Spec(None, (dppo("prob_diff", -0.15, 0.15),), "zero"),
    "dppo.kl": Spec(None, (dppo("binary_kl", None, 0.05),), "zero"),
    "minirl.mask": Spec(None, (ratio(0.8, 1.2, when="outward", of="new/old", label="clip"),), "zero"),
    "glm.icepop": Spec(Weight.token(), (ratio(0.5, 2),), "zero"),
    "ctpo.cumprod": ctpo("sum", "sum", (0.8, 1.2, 3.0), None),
    "ctpo.geomean": ctpo("mean", "mean", (0.8, 1.2, 3.0), None),
    "ctpo.cumprod_la": ctpo("sum", "sum", (math.exp(-0.025), math.exp(0.05), math.exp(0.05)), "sqrt"),
    "ctpo.geomean_la": ctpo("mean", "sum", (math.exp(-0.025), math.exp(0.05), math.exp(0.05)), "sqrt"),
}
for framework, policy in (("trl", "neutral"), ("unsloth", "neutral")):
    product = Spec(Weight.product(), (ratio(None, 3, "sum"),), "zero", nonfinite=policy)
    EXPECTED |= {
        f"{framework}.default": product,
        f"{framework}.sequence_mask": product,
        f"{framework}.sequence_truncate": Spec(Weight.product(upper=3), nonfinite=policy),
        f"{framework}.token_mask": Spec(Weight.token(), (ratio(None, 3),), "zero", nonfinite=policy),
        f"{framework}.token_truncate": Spec(Weight.token(upper=3), nonfinite=policy),
    }

# Arguments that change something, and what they change it into: CALL | SPEC.
WITH_ARGUMENTS = """
verl.decoupled_token_is(upper=3) | Spec(Weight.token(upper=3), **VERL)
verl.decoupled_token_is(upper="0.5_3") | Spec(Weight.token(lower=0.5, upper=3, outside="zero"), **VERL)
verl.decoupled_seq_is(upper=(0.5, 3)) | Spec(Weight.product(lower=0.5, upper=3, outside="zero"), **VERL)
verl.decoupled_token_icepop(upper=4, lower=0.25) |
    Spec(Weight.token(lower=0.25, upper=4, outside="zero"), **VERL)
verl.decoupled_seq_is_rs(is_threshold=5, rs_threshold="0.6_1.6") |
    Spec(Weight.product(upper=5), (k1("seq_sum_k1", 0.6, 1.6),), **VERL)
verl.decoupled_seq_is_rs(rs_threshold="0.6_1.6", k1_bounds="ratio") |
    Spec(SEQ_TIS, (ratio(0.6, 1.6, "sum", label="seq_sum_k1"),), **VERL)
verl.bypass_pg_geo_rs_token_tis(is_threshold=3, rs_threshold=1.01) |
    Spec(Weight.token(upper=3), (k1("seq_mean_k1", 1 / 1.01, 1.01),), **VERL)
verl.decoupled_k3_rs(rs_threshold="0.02") |
    Spec(None, (option("seq_mean_k3", None, 0.02),), **VERL)
xtuner.reasoning(threshold=(4, 0.25), mask_threshold=None, veto_threshold=None) |
    Spec(Weight.token(lower=0.25, upper=4), (ratio(0.25, 4, label="mask"),), **XTUNER)
skyrl.tldr(geo_mask_low=0.9, geo_mask_high=1.1, token_tis_ratio_clip_high=4) |
    Spec(Weight.token(upper=4), (ratio(1e-4, 100, drop="sequence", label="outlier"),
    ratio(0.5, 2, label="token_mask"), ratio(0.9, 1.1, "mean", label="geo_sequence_mask")), sums_over="kept", **SKYRL)
skyrl.outlier_mask(low=None) |
    Spec(None, (ratio(None, 100, drop="sequence", label="outlier"),), sums_over="kept", **SKYRL)
trl.token_truncate(clip_max=None, clip_min=0.5) | Spec(Weight.token(lower=0.5), nonfinite="neutral")
trl.sequence_mask(clip_max=5, clip_min=0.1) |
    Spec(Weight.product(), (ratio(0.1, 5, "sum"),), "zero", nonfinite="neutral")
openrlhf.tis(low=None, high=2) | Spec(Weight.token(upper=2))
openrlhf.dppo_like(gating="tv", delta=0.1) | Spec(Weight.token(), (Criterion("tv", upper=0.1),), "zero")
areal.token_mask(lower=None) | Spec(Weight.token(), (ratio(None, 5),), "both", nonfinite="neutral")
areal.seq(agg="max", upper=2, lower=0.5) |
    Spec(Weight.geometric(), (ratio(0.5, 2, "max"),), "both", nonfinite="neutral")
areal.kl(metric="kl_k1", upper=0.5, lower=-0.25) |
    Spec(Weight.token(), (Criterion("k1", lower=-0.5, upper=0.25),), "both")
areal.kl(metric="kl_k1", level="sequence", agg="max", upper=0.5) |
    Spec(Weight.token(), (Criterion("k1", over="sequence", reduce="min", lower=-0.5),), "both")
areal.kl(metric="kl_k1", level="sequence", agg="sum", upper=0.5) |
    Spec(Weight.token(), (Criterion("k1", over="sequence", reduce="sum", lower=-0.5),), "both")
areal.kl(metric="kl_k2", level="sequence", agg="max", upper=0.5) |
    Spec(Weight.token(), (Criterion("k2", over="sequence", reduce="max", upper=0.5),), "both")
areal.kpop(upper=0.1) | Spec(Weight.token(), (Criterion("binary_kl_symmetric", upper=0.1),), "both")
slime.tis(tis_clip_low=0.1, tis_clip=5) | Spec(Weight.token(lower=0.1, upper=5))
slime.mis(tis_batch_normalize=False, rs_veto_threshold=None, rs_upper_bound=3) |
    Spec(Weight.token(lower=0, upper=2), (ratio(0.5, 3),), "mask")
molt.token(mode="clip") | Spec(Weight.token(lower=0.5, upper=5, token_clamp=30), clamp=30, nonfinite="neutral")
molt.token(mode="trunc", high=2) | Spec(Weight.token(upper=2, token_clamp=30), clamp=30, nonfinite="neutral")
nemo.tis(ratio=5, ratio_min=0.2) | Spec(Weight.token(lower=0.2, upper=5))
nemo.gspo_is(level="geometric") | Spec(Weight.geometric())
roll.default(upper_bound=None) | Spec(Weight.token(lower=0), (ratio(0.8, 1.2),), "mask")
flash_rl.tis(imp_ratio_cap=8) | Spec(Weight.token(upper=8))
open_instruct.default(clamp_upper=5) | Spec(Weight.token(upper=5, token_clamp=10))
rlinf.decoupled(threshold=5) | Spec(Weight.token(), (ratio(None, 5),), "mask")
"""


def with_arguments() -> list[Any]:
    """The rows of WITH_ARGUMENTS as cases (name, arguments, Spec)."""
    words = WORDS | {"SEQ_TIS": SEQ_TIS, "VERL": VERL, "XTUNER": XTUNER, "SKYRL": SKYRL}
    return [pytest.param(*call(made), eval(spec, words), id=made) for made, spec in rows(WITH_ARGUMENTS)]
