"""The variants of `correct` with prefixes, which take a pass more over the tokens.

Together they have all that runs along sequences: sums on both grids, sums that may be poisoned, maxima, maxima of what
is before, and the place of a token.
"""

from __future__ import annotations

from rollout_corr.aot.variant import MEDIUM, SHORT, Variant
from rollout_corr.aot.variants import BF16, FP64, I64, TOKEN, UPPER
from rollout_corr.spec.correction import Criterion, Spec, Weight

PREFIX_VARIANTS = {
    "prefix_weights": Variant("prefix_weights", Spec(Weight("prefix", 0.8, 1.25, growth="sqrt"))),
    "prefix_budget": Variant(
        "prefix_budget",
        Spec(
            Weight("prefix", upper=2.0, reduce="mean"),
            (
                Criterion("tv", "prefix", "mean", upper=0.05, label="budget"),
                Criterion("abs", "prefix", "max", upper=0.6, drop="rest", label="divergence"),
            ),
        ),
        packed=False,
        mask=I64,
        length=MEDIUM,
    ),
    "prefix_mixed": Variant(
        "prefix_mixed",
        Spec(
            Weight("prefix", 0.8, 1.25, outside="zero", token_clamp=0.3, reduce="min", growth="sqrt"),
            (
                Criterion("ratio", "prefix", "sum", 0.5, 1.7, "outward", growth="sqrt", label="sum"),
                Criterion("k3", "prefix", "min", upper=0.2, drop="rest", when="negative_advantage", label="min"),
            ),
            rejected="both",
        ),
        advantages="token",
        train=BF16,
        rollout=BF16,
    ),
    "prefix_kept": Variant(
        "prefix_kept",
        Spec(
            TOKEN,
            (
                Criterion("abs", upper=UPPER["abs"], label="abs"),
                Criterion("k3", "prefix", "sum", upper=0.4, drop="rest", label="sum"),
                Criterion("k2", "prefix", "max", upper=0.4, drop="sequence", label="max"),
                Criterion(
                    "k2",
                    "sequence",
                    "mean",
                    upper=UPPER["k2"],
                    when="negative_advantage",
                    drop="token",
                    label="mean_k2",
                ),
            ),
            rejected="both",
            sums_over="kept",
        ),
        packed=False,
        advantages="sequence",
        length=SHORT,
    ),
    "prefix_rejected": Variant(
        "prefix_rejected",
        Spec(
            Weight("prefix", 0.8, 1.25, growth="sqrt"),
            (
                Criterion("abs", upper=UPPER["abs"], drop="sequence", label="abs"),
                Criterion("k1", upper=UPPER["k1"], label="k1"),
                Criterion("ratio", "prefix", "mean", 0.9, 1.1, drop="rest", label="mean"),
            ),
            rejected="mask",
            sums_over="kept",
        ),
        length=SHORT,
    ),
    "prefix_poisoned": Variant(
        "prefix_poisoned",
        Spec(
            Weight("prefix", 0.8, 1.25),
            (
                Criterion("external", "prefix", "mean", upper=0.8, name="entropy", drop="rest", label="external"),
                Criterion("abs", "prefix", "max", upper=0.7, drop="rest", label="divergence"),
            ),
            nonfinite="propagate",
        ),
        length=SHORT,
    ),
    # Along turns, and along sequences past their turns.
    "prefix_turns": Variant(
        "prefix_turns",
        Spec(
            Weight("prefix", 0.8, 1.25, over="turn", growth="sqrt"),
            (Criterion("ratio", "prefix", "sum", 0.5, 1.7, label="sum"),),
            rejected="both",
        ),
        length=MEDIUM,
        turns=True,
    ),
    "prefix_turns_rest": Variant(
        "prefix_turns_rest",
        Spec(
            criteria=(
                Criterion("abs", "prefix", "max", upper=0.6, drop="rest", within="turn", label="turn"),
                Criterion("k3", "prefix", "sum", upper=0.4, drop="rest", within="turn", label="k3"),
                Criterion("k1", "prefix", "sum", upper=0.8, drop="rest", label="sequence"),
            ),
            rejected="both",
        ),
        packed=False,
        length=SHORT,
        turns=True,
    ),
    "prefix_fp64": Variant(
        "prefix_fp64",
        Spec(criteria=(Criterion("k1", "prefix", "sum", upper=0.5, drop="rest", label="k1"),)),
        packed=False,
        train=FP64,
        rollout=FP64,
    ),
}

# Sequences that lie on several ranks: one stretch of each on a rank, or two.
SPLIT_PREFIX_VARIANTS = {
    "prefix_split": Variant(
        "prefix_split",
        Spec(
            Weight("prefix", 0.8, 1.25, growth="sqrt"),
            (
                Criterion("tv", "prefix", "mean", upper=0.05, label="budget"),
                Criterion("ratio", "prefix", "mean", 0.93, 1.07, drop="rest", label="rest"),
            ),
            rejected="both",
        ),
        split=True,
    ),
    "prefix_split_padded": Variant(
        "prefix_split_padded",
        Spec(
            Weight("prefix", upper=1.25), (Criterion("k2", "prefix", "min", upper=0.4, drop="sequence", label="min"),)
        ),
        packed=False,
        length=MEDIUM,
        split=True,
    ),
    "prefix_split_zigzag": Variant(
        "prefix_split_zigzag",
        Spec(
            Weight("prefix", 0.8, 1.25, reduce="min"),
            (
                Criterion("k1", upper=UPPER["k1"], label="k1"),
                Criterion("k3", "prefix", "sum", upper=0.4, drop="rest", when="negative_advantage", label="sum"),
            ),
            rejected="both",
            sums_over="kept",
        ),
        advantages="sequence",
        length=MEDIUM,
        split=True,
        halves=True,
    ),
    "prefix_split_product": Variant(
        "prefix_split_product",
        Spec(Weight("product", 0.5, 2.0), (Criterion("k1", "prefix", "sum", upper=0.5, drop="rest"),), rejected="both"),
        split=True,
        halves=True,
    ),
    "prefix_split_turns": Variant(
        "prefix_split_turns",
        Spec(
            Weight("prefix", 0.8, 1.25, over="turn"),
            (
                Criterion("abs", "prefix", "max", upper=UPPER["abs"], drop="rest", within="turn", label="turn"),
                Criterion("k1", "prefix", "sum", upper=0.8, drop="rest", label="sequence"),
            ),
            rejected="both",
        ),
        length=SHORT,
        turns=True,
        split=True,
        halves=True,
    ),
}
