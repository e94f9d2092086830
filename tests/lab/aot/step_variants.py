"""The variants of a whole step, correction and loss in one pass, that are compiled ahead of time and compared."""

from __future__ import annotations

import torch

from lab.aot.variant import MEDIUM, SHORT, StepVariant
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.surrogates import GSPO, PPO, Reinforce, Score
from rollout_corr.specs.terms import KL, Mean, Objective, SquaredLogRatio
from rollout_corr.specs.weight import Weight

BF16, FP32, I64 = torch.bfloat16, torch.float32, torch.int64

TIS = Spec(Weight.token(upper=2.0))
REJECTION = Criterion("ratio", over="token", lower=0.5, upper=2.0)
GEOMETRIC = Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01)
VETO = Criterion("ratio", over="sequence", reduce="min", lower=1e-4)

_DECLARED = (
    # What most people run, as the goals of docs/kernels.md are counted.
    StepVariant("tis_packed", TIS, Objective(PPO(0.2, 0.28))),
    StepVariant("tis_padded", TIS, Objective(PPO(0.2, 0.28)), packed=False, mask=I64),
    StepVariant("tis_unmasked", TIS, Objective(PPO(0.2, 0.28)), mask=None, advantages="token"),
    StepVariant("tis_rejection", Spec(Weight.token(upper=2.0), (REJECTION,)), Objective(PPO(0.2, 0.28))),
    StepVariant("geometric_veto", Spec(Weight.token(upper=2.0), (GEOMETRIC, VETO)), Objective(PPO(0.2, 0.28))),
    StepVariant(
        "geometric_veto_padded", Spec(Weight.token(upper=2.0), (GEOMETRIC, VETO)), Objective(PPO(0.2, 0.28)),
        packed=False, mask=I64,
    ),
    StepVariant("cispo", TIS, Objective(Score(upper=5.0), mean=Mean("sequence_sum")), counted=True),
    StepVariant("tis_kl", TIS, Objective(PPO(dual=3.0), KL("k3", 0.01, gradient="k2")), ref=FP32),
    # Other layouts, dtypes, means and modes.
    StepVariant("tis_bf16", TIS, Objective(PPO()), new=BF16, old=BF16, rollout=BF16, length=MEDIUM),
    StepVariant(
        "tis_short", Spec(Weight.token(upper=2.0, outside="zero")), Objective(PPO(), mean=Mean("sequence")),
        length=SHORT,
    ),
    StepVariant(
        "bypass", Spec(criteria=(REJECTION, GEOMETRIC)), Objective(PPO(), regularizer=SquaredLogRatio(0.1, "kept")),
        old=None, packed=False, aligned=False, length=MEDIUM,
    ),
    StepVariant("bypass_score", TIS, Objective(Score(), weights_are_the_ratio=True), old=None, unit=False),
    StepVariant(
        "of_new", Spec(Weight.token(upper=2.0), (
            Criterion("k1", over="token", lower=-0.3, of="new/rollout", when="negative_advantage"),
            Criterion("k3", over="sequence", reduce="mean", upper=0.02, of="new/old", drop="sequence"),
        ), nonfinite="neutral"), Objective(Reinforce(), nonfinite="neutral", mean=Mean(over="kept")),
    ),
    StepVariant(
        "zeroed", Spec(Weight.token(lower=0.5, upper=2.0), (REJECTION, VETO), rejected="zero"), Objective(PPO()),
        advantages="token", mass="train",
    ),
    # NaN of both signs: the interpreter of PTX takes threads that write either for a race.
    StepVariant("tis_propagate", Spec(Weight.token(upper=2.0), (VETO,), nonfinite="propagate"),
                Objective(PPO(), nonfinite="propagate"), advantages="token"),
)  # fmt: skip

_SETTLED = (
    # Sequences are decided about first.
    StepVariant("product", Spec(Weight.product(upper=2.0), (REJECTION,)), Objective(PPO()), advantages="token"),
    StepVariant(
        "geometric_zeroed", Spec(Weight.geometric(lower=0.9, upper=1.1), (GEOMETRIC, REJECTION), rejected="both"),
        Objective(PPO(), mean=Mean("sequence")), packed=False, mask=I64, length=MEDIUM,
    ),
    StepVariant("tis_gspo", Spec(Weight.token(upper=2.0), (VETO,)), Objective(GSPO(), mean=Mean(over="kept"))),
    StepVariant(
        "tis_kl_of_all", Spec(Weight.token(upper=2.0), (GEOMETRIC,)), Objective(PPO(), KL("k2", 0.1, scope="all")),
        ref=FP32, mask=None, counted=True,
    ),
    StepVariant(
        "bypass_product", Spec(Weight.product(upper=2.0), (VETO,), rejected="both"),
        Objective(PPO(), regularizer=SquaredLogRatio(0.1)), old=None, mass="rollout",
    ),
)  # fmt: skip

STEP_VARIANTS = {variant.name: variant for variant in (*_DECLARED, *_SETTLED)}
