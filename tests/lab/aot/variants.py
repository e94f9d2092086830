"""Variants of the kernels that are compiled and tested by name: every option at least once, and common presets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lab.aot.variant import HUGE, LONGEST, MEDIUM, SHORT, Variant
from rollout_corr.frameworks.shared.lookup import named
from rollout_corr.specs.choices import Reduce, Scheme
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.statistics import Stat

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
U8, I8, I16, I32, I64 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64

TOKEN = Weight.token(upper=2.0)
BOUNDED = Weight.token(lower=0.5, upper=2.0)
PRODUCT = Weight.product(upper=2.0)
VETO = Criterion("ratio", over="sequence", reduce="min", lower=1e-4, label="veto")
GEOMETRIC = Criterion("ratio", over="sequence", reduce="mean", lower=0.999, upper=1.001)


# Each cuts through a batch whose D is spread by a few tenths, so that tests see tokens on both sides.
UPPER = {
    "ratio": 1.3, "k1": 0.3, "k2": 0.05, "abs": 0.3, "ratio_error": 1.3, "ratio_deviation": 0.3, "k3": 0.05,
    "k3_reverse": 0.05, "prob_diff": 0.05, "tv": 0.1, "binary_kl": 0.02, "binary_kl_reverse": 0.02,
    "binary_kl_symmetric": 0.02,
}  # fmt: skip


def _tokens(*stats: Stat, **fields: Any) -> tuple[Criterion, ...]:
    """Make a criterion over tokens for each statistic."""
    return tuple(Criterion(stat, upper=UPPER[stat], label=stat, **fields) for stat in stats)


def _sequences(reduce: Reduce, *stats: Stat, **fields: Any) -> tuple[Criterion, ...]:
    """Make a criterion over sequences for each statistic."""
    return tuple(
        Criterion(stat, "sequence", reduce, upper=UPPER[stat], label=f"{reduce}_{stat}", **fields) for stat in stats
    )


def _clamped(*criteria: Criterion) -> tuple[Criterion, ...]:
    """Clamp D at tokens first."""
    return tuple(replace(criterion, token_clamp=0.55, label=f"clamped_{criterion.label}") for criterion in criteria)


def _bands(*criteria: Criterion) -> tuple[Criterion, ...]:
    """Give criteria a lower bound too, which makes a hole in what |D| may be."""
    return tuple(replace(criterion, lower=0.005, label=f"band_{criterion.label}") for criterion in criteria)


_OF_D: tuple[Stat, ...] = ("ratio", "k1", "k2", "abs", "ratio_error", "ratio_deviation")
_OF_EXP: tuple[Stat, ...] = ("k3", "k3_reverse", "prob_diff", "tv")
_OF_PROBABILITIES: tuple[Stat, ...] = ("binary_kl", "binary_kl_reverse", "binary_kl_symmetric")
_EXTERNAL = Criterion("external", lower=-1.0, upper=1.0, name="entropy", label="external")
_EXTERNAL_MEAN = Criterion(
    "external", "sequence", "mean", lower=-0.3, upper=0.7, name="surprise", label="mean_external"
)
_EXTERNAL_MAX = Criterion("external", "sequence", "max", upper=1.5, name="surprise", label="max_external")
_EXTERNAL_MIN = Criterion("external", "sequence", "min", lower=-0.5, name="entropy", label="min_external")
# Criteria of sequences that drop some of their tokens, by each of what can be asked for.
_LATE = (
    *_sequences("mean", "k2", when="negative_advantage", drop="token"),
    *_sequences("sum", "abs", when="outward", drop="token"),
    *_sequences("max", "abs", when="positive_advantage", drop="token"),
)
_LATE_ANY = _sequences("mean", "k3", drop="token")
_REPORTS: tuple[Scheme, ...] = ("verl", "xtuner", "skyrl")

_DECLARED = (
    # Measured only, in both layouts and for every length.
    Variant("metrics_packed", mask=None),
    Variant("metrics_short", mask=U8, length=SHORT, offsets=I64),
    Variant("metrics_padded", Spec(clamp=0.25), packed=False, mask=I64, length=MEDIUM),
    Variant("metrics_huge", tokens=HUGE, length=LONGEST),
    Variant("full_packed", Spec(detail="full"), train=BF16, rollout=BF16),
    Variant("full_padded", Spec(TOKEN, (GEOMETRIC,), detail="full", report=_REPORTS), packed=False, mask=I64),
    # Weights by level.
    Variant("token_bf16", Spec(BOUNDED), train=BF16, rollout=BF16),
    Variant("token_bf16_rollout", Spec(TOKEN, (GEOMETRIC,)), rollout=BF16, mask=I32),
    Variant("token_fp16", Spec(TOKEN), packed=False, train=FP16, rollout=FP16, mask=FP16),
    Variant("token_wide_mask", Spec(BOUNDED, (GEOMETRIC,)), mask=FP64),
    Variant("token_unaligned", Spec(TOKEN, (GEOMETRIC, VETO)), packed=False, mask=I64, aligned=False),
    Variant(
        "token_strided",
        Spec(
            Weight.token(lower=0.9, token_clamp=0.3, normalize="batch"),
            (Criterion("k1", lower=-0.3, upper=0.3),),
            rejected="zero",
            clamp=0.25,
        ),
        packed=False,
        mask=I8,
        unit=False,
    ),
    Variant(
        "token_icepop_short",
        Spec(Weight.token(lower=0.8, upper=1.2, outside="zero"), (GEOMETRIC, VETO), rejected="both", detail="full"),
        length=SHORT,
    ),
    Variant("token_propagate", Spec(BOUNDED, (VETO,), nonfinite="propagate"), mask=I16, unit=False),
    Variant("product_geometric_padded", Spec(PRODUCT, (GEOMETRIC,)), packed=False, mask=I64),
    Variant(
        "product_kept",
        Spec(
            Weight.product(lower=0.2, upper=5.0, outside="zero", normalize="batch"),
            (
                Criterion("ratio", lower=0.5, when="negative_advantage", drop="sequence"),
                *_tokens("tv"),
                GEOMETRIC,
                *_sequences("sum", "k2"),
                *_sequences("max", "abs"),
            ),
            rejected="both",
            sums_over="kept",
        ),
        packed=False,
        advantages="sequence",
        mask=FP32,
        length=MEDIUM,
    ),
    Variant(
        "product_propagate",
        Spec(
            Weight.product(upper=2.0, token_clamp=0.3),
            (*_sequences("sum", "ratio", "k3"), *_sequences("max", "k1"), *_LATE[:1]),
            nonfinite="propagate",
        ),
        packed=False,
        advantages="token",
        aligned=False,
    ),
    Variant(
        "geometric_clamped",
        Spec(
            Weight.geometric(lower=0.97, upper=1.03, token_clamp=0.3),
            (*_tokens("abs"), *_clamped(*_sequences("mean", "k1"))),
            rejected="zero",
            nonfinite="neutral",
        ),
        mask=BF16,
        length=MEDIUM,
    ),
    Variant(
        "geometric_mixed",
        Spec(Weight.geometric(), (_EXTERNAL, *_LATE, *_LATE_ANY), rejected="both", sums_over="kept"),
        advantages="token",
        train=BF16,
        rollout=FP16,
    ),
    Variant(
        "dry_run",
        Spec(BOUNDED, (GEOMETRIC, *_tokens("abs", when="outward")), apply=False),
        packed=False,
        advantages="token",
    ),
    # Every statistic over tokens and over sequences.
    Variant(
        "tokens_of_d",
        Spec(criteria=(*_tokens(*_OF_D), *_clamped(*_tokens("abs")), *_bands(*_tokens("ratio_deviation")))),
    ),
    Variant(
        "tokens_of_exp", Spec(criteria=(*_tokens(*_OF_EXP), *_bands(*_tokens("k3"))), rejected="zero"), packed=False
    ),
    Variant(
        "tokens_of_probabilities",
        Spec(
            criteria=(*(replace(criterion, eps=0.1) for criterion in _tokens(*_OF_PROBABILITIES)), _EXTERNAL),
            rejected="both",
        ),
    ),
    Variant(
        "sequences_of_d",
        Spec(criteria=(*_sequences("sum", *_OF_D), *_sequences("mean", "abs"), *_clamped(*_sequences("sum", "k1")))),
    ),
    Variant(
        "sequences_of_exp",
        Spec(criteria=(*_sequences("mean", *_OF_EXP, "ratio_error"), *_sequences("sum", "prob_diff"))),
        packed=False,
    ),
    Variant(
        "sequences_of_probabilities",
        Spec(
            criteria=(
                *_sequences("mean", *_OF_PROBABILITIES[:2]),
                *(replace(criterion, eps=0.1) for criterion in _sequences("sum", *_OF_PROBABILITIES[2:])),
                _EXTERNAL_MEAN,
            )
        ),
    ),
    Variant(
        "extrema_of_d",
        Spec(
            criteria=(
                *_sequences("max", "ratio", "abs", "k2", "ratio_deviation"),
                *_sequences("min", "k1", "abs", "ratio_error"),
                *_clamped(*_sequences("max", "k2")),
            )
        ),
        length=SHORT,
    ),
    Variant(
        "extrema_by_value",
        Spec(
            criteria=(
                *_sequences("max", "ratio_error", "k3", "tv", "binary_kl_reverse"),
                *_sequences("min", "prob_diff"),
                _EXTERNAL_MAX,
                _EXTERNAL_MIN,
            ),
            clamp=0.25,
        ),
        length=SHORT,
    ),
    # Which units a criterion tests, and what it drops.
    Variant(
        "when_tokens",
        Spec(
            TOKEN,
            (
                *_tokens("ratio", when="negative_advantage"),
                *_tokens("k2", when="positive_advantage"),
                *_tokens("abs", when="outward", drop="sequence"),
                *_LATE[:1],
                *_sequences("max", "k3"),
            ),
            rejected="zero",
        ),
        advantages="token",
    ),
    Variant(
        "when_sequences",
        Spec(
            criteria=(
                *_sequences("mean", "ratio", when="negative_advantage"),
                *_sequences("sum", "k2", when="positive_advantage"),
                *_sequences("max", "ratio", when="outward", drop="sequence"),
                *_sequences("mean", "k3", when="outward", drop="token"),
                *_sequences("sum", "abs", drop="token"),
            )
        ),
        packed=False,
        advantages="sequence",
    ),
    Variant("late", Spec(TOKEN, _LATE), advantages="token"),
    Variant(
        "late_zeroed",
        Spec(Weight.product(lower=0.5, upper=2.0, token_clamp=0.3), _LATE, rejected="zero", nonfinite="neutral"),
        packed=False,
        advantages="sequence",
    ),
    Variant(
        "late_after_tokens",
        Spec(criteria=(*_tokens("k1", when="outward", drop="token"), *_LATE), rejected="both", sums_over="kept"),
        advantages="sequence",
        length=MEDIUM,
    ),
    # Recipes of the frameworks, in the layouts and dtypes in which they come.
    Variant("verl.decoupled_seq_is_rs", named("verl.decoupled_seq_is_rs"), packed=False, mask=I64, aligned=False),
    Variant("verl.decoupled_k3_rs_token_tis", named("verl.decoupled_k3_rs_token_tis"), packed=False, mask=I64),
    Variant("xtuner.agentic", named("xtuner.agentic")),
    Variant("skyrl.tldr", named("skyrl.tldr"), packed=False, mask=FP32, rollout=BF16),
    Variant("slime.mis", named("slime.mis"), aligned=False),
    Variant("areal.kpop", named("areal.kpop"), mask=I32, length=MEDIUM),
    Variant("open_instruct.vaco", named("open_instruct.vaco"), packed=False, advantages="token"),
    # The mass that truncated sampling kept, from either side; the second finds dropped tokens again in `apply`.
    Variant("kept_set", Spec(TOKEN, (GEOMETRIC,)), mass="train"),
    Variant(
        "kept_set_replayed",
        Spec(PRODUCT, (*_sequences("max", "tv"), *_sequences("mean", "k1", drop="token"))),
        packed=False,
        length=SHORT,
        train=BF16,
        mass="rollout",
    ),
)

VARIANTS = {variant.name: variant for variant in _DECLARED}

# Criteria that compare the policy being trained, which `correct` refuses and a loss brings along.
_OF_NEW = (
    *_tokens("ratio", of="new/old"),
    *_tokens("tv", of="new/rollout", when="outward", drop="sequence"),
    *_sequences("mean", "k1", of="new/old", when="negative_advantage"),
    *_sequences("max", "abs", of="new/rollout"),
)
OF_NEW_VARIANTS = {
    "of_new": Variant("of_new", Spec(TOKEN, _OF_NEW), advantages="token"),
    "of_new_kept": Variant(
        "of_new_kept", Spec(PRODUCT, _OF_NEW, sums_over="kept"), packed=False, advantages="sequence", mask=I64
    ),
}

# Sequences that lie on several ranks: every table, both layouts.
SPLIT_VARIANTS = {
    "split_packed": Variant("split_packed", Spec(PRODUCT, (VETO, GEOMETRIC)), split=True),
    "split_padded": Variant(
        "split_padded", Spec(BOUNDED, _sequences("mean", "k3")), packed=False, length=MEDIUM, split=True
    ),
}

# Turns, measured or more, whose offsets stand in the place of those of sequences.
_TURN_MEAN = Criterion("ratio", "turn", "mean", lower=0.9, upper=1.1, label="turn_mean")
_TURN_REST: tuple[Criterion, ...] = (
    Criterion("k3", "turn", "max", upper=0.3, drop="sequence", when="negative_advantage", label="turn_max"),
    Criterion("abs", "turn", "sum", upper=0.9, drop="token", when="outward", label="turn_sum"),
)
TURN_VARIANTS = {
    "turns_measured": Variant("turns_measured", Spec(TOKEN, turns=True), length=SHORT, turns=True),
    "turns_product": Variant(
        "turns_product", Spec(Weight.product(lower=0.8, upper=1.25, over="turn"), (_TURN_MEAN,)), turns=True
    ),
    "turns_mixed": Variant(
        "turns_mixed",
        Spec(
            Weight.geometric(lower=0.9, upper=1.1, token_clamp=0.3, over="turn"),
            (_TURN_MEAN, *_TURN_REST, *_tokens("abs"), *_LATE[:1], VETO),
            rejected="both",
            sums_over="kept",
        ),
        packed=False,
        advantages="sequence",
        length=MEDIUM,
        turns=True,
    ),
    "turns_split": Variant(
        "turns_split",
        Spec(Weight.product(lower=0.8, upper=1.25, over="turn"), (_TURN_MEAN, *_TURN_REST[:1])),
        advantages="sequence",
        length=MEDIUM,
        turns=True,
        split=True,
    ),
}

# A small selection where there is no time for all: every level and layout, low precision, a slice, thinned sequences.
FEW = (
    "metrics_short",
    "full_padded",
    "token_bf16",
    "product_geometric_padded",
    "verl.decoupled_seq_is_rs",
    "when_sequences",
)
