"""The variants of the policy loss that are compiled ahead of time and compared with the reference.

Together they take every branch: each surrogate, KL, regularizer, mean, each tensor given and not.
"""

from __future__ import annotations

import torch

from lab.aot.variant import HUGE, LONGEST, MEDIUM, SHORT, LossVariant
from rollout_corr.specs.batch_losses import ClipCov, KLCov
from rollout_corr.specs.surrogates import DPPO, DRO, GMPO, GPG, GSPO, PPO, REC, SAPO, TOPR, VESPO, Reinforce, Score
from rollout_corr.specs.terms import KL, Mean, Objective, SquaredLogRatio

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BOOL, U8, I32, I64 = torch.bool, torch.uint8, torch.int32, torch.int64

_MEAN = Mean("sequence")
_K3 = KL("k3", 0.01, gradient="k2", value_clamp=10.0, weight="ratio")

_DECLARED = (
    # What frameworks run most, in the layouts and dtypes in which it comes.
    LossVariant("ppo_packed", Objective(PPO(0.2, 0.28), mean=Mean(over="kept")), trains=BOOL),
    LossVariant("ppo_padded", Objective(PPO(0.2, 0.28)), packed=False, mask=I64, length=MEDIUM),
    LossVariant("ppo_short", Objective(PPO(0.2, 0.28, dual=3.0), mean=_MEAN), weights=None, length=SHORT, mask=U8),
    LossVariant("ppo_huge", Objective(PPO()), tokens=HUGE, length=LONGEST, weights=None, mask=None),
    LossVariant(
        "ppo_bf16",
        Objective(PPO(0.2, 0.3, delta=2.0), kl=KL("k3", 0.001), mean=Mean("sequence_sum", length=4096.0)),
        new=BF16,
        base=BF16,
        ref=BF16,
        mask=I64,
        packed=False,
        unit=False,
    ),
    LossVariant(
        "ppo_dual",
        Objective(PPO(dual=3.0), _K3, SquaredLogRatio(0.1), Mean("sequence", "kept")),
        ref=FP32,
        weights=FP64,
        trains=FP64,
        packed=False,
        aligned=False,
        length=SHORT,
    ),
    LossVariant("ppo_on_policy", Objective(PPO()), base=None, weights=None, advantages="sequence", counted=True),
    LossVariant(
        "ppo_value", Objective(PPO(), nonfinite="neutral"), differentiable=False, trains=I64, offsets=I64, aligned=False
    ),
    # The other surrogates.
    LossVariant("reinforce", Objective(Reinforce(), KL("abs", 0.1, weight="weights")), ref=FP32),
    LossVariant("cispo", Objective(Score(upper=5.0), mean=Mean("sequence_sum")), advantages="sequence", mask=None),
    LossVariant(
        "icepop",
        Objective(Score(0.5, 5.0, "zero"), regularizer=SquaredLogRatio(0.1, "all")),
        trains=I32,
        packed=False,
        length=MEDIUM,
    ),
    LossVariant("score_by_weights", Objective(Score(), mean=Mean("sum"), weights_are_the_ratio=True), trains=U8),
    LossVariant("dppo_tv", Objective(DPPO(upper=None)), weights=None, new=FP16, base=FP16),
    LossVariant("dppo_kl", Objective(DPPO("kl", 0.05, 0.05), KL("k1", 0.1, scope="all")), ref=BF16, packed=False),
    LossVariant("sapo", Objective(SAPO(), KL("k2", 0.1)), ref=FP32, length=SHORT),
    LossVariant("gpg", Objective(GPG(), nonfinite="propagate"), trains=FP32, base=FP16),
    LossVariant("dro", Objective(DRO(0.5), mean=_MEAN), packed=False, mask=I32),
    # Those whose gradient depends on whole sequences.
    LossVariant("gspo", Objective(GSPO(), mean=_MEAN), trains=BOOL, advantages="sequence"),
    LossVariant(
        "gspo_padded",
        Objective(GSPO(dual=2.0), _K3, SquaredLogRatio(0.1, "kept"), nonfinite="propagate"),
        packed=False,
        ref=FP32,
        mask=I64,
        length=MEDIUM,
    ),
    LossVariant("gspo_token", Objective(GSPO(through="token"), mean=Mean(over="kept")), weights=None, length=SHORT),
    LossVariant("gmpo", Objective(GMPO(), mean=_MEAN), trains=BOOL),
    # The mass that truncated sampling kept, from either side.
    LossVariant("ppo_kept_set", Objective(PPO(), KL("k3", 0.1)), ref=FP32, weights=None, mass="train"),
    LossVariant("dppo_replayed", Objective(DPPO(), nonfinite="neutral"), packed=False, length=MEDIUM, mass="rollout"),
    LossVariant("gmpo_padded", Objective(GMPO(), KL("k3", 0.1)), weights=None, ref=FP32, packed=False),
    # Score functions with the advantage's sign, and with a ratio between the token's and the sequence's.
    LossVariant("topr", Objective(TOPR(coef=0.5), KL("k3", 0.1, bound=0.05, swapped=True)), ref=FP32),
    LossVariant("rec", Objective(REC(), regularizer=SquaredLogRatio(0.1, "all")), trains=BOOL, weights=None),
    LossVariant("rec_ring", Objective(REC("ring", 0.1, 0.1, 0.3, 0.4, weight="ratio")), packed=False, length=MEDIUM),
    LossVariant("rec_sequence", Objective(REC("two_side", 0.1, 0.1, level="sequence")), weights=None, length=SHORT),
    LossVariant("sapo_stopped", Objective(SAPO(1.0, 1.5, gate="stopped")), packed=False, mask=I32),
    # Whole sequences, summed.
    LossVariant("vespo", Objective(VESPO()), advantages="sequence", mask=U8),
    # Factors of all that a token adds: of sequences whose gradient is one, too.
    LossVariant("reinforce_scaled", Objective(Reinforce(), regularizer=SquaredLogRatio(0.1, "all")), scales=True),
    LossVariant("gspo_scaled", Objective(GSPO(), KL("k3", 0.1), mean=_MEAN), ref=FP32, packed=False, scales=True),
    # Tokens that a look at the batch chose.
    LossVariant("clip_cov", Objective(ClipCov(dual=3.0), KL("k3", 0.1, weight="weights")), ref=FP32, trains=BOOL),
    LossVariant("kl_cov", Objective(KLCov(), mean=_MEAN), packed=False, mask=I32, length=MEDIUM),
    LossVariant("dro_sequence", Objective(DRO(0.5, "sequence"), mean=_MEAN), packed=False, length=SHORT),
)

LOSS_VARIANTS = {variant.name: variant for variant in _DECLARED}

# A small selection where there is no time for all.
LOSS_FEW = ("ppo_packed", "ppo_short", "gspo_padded")
