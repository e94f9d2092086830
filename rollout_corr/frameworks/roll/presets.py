"""ROLL: `train_infer_correction` with the defaults of its weight and of its filter, both switched on.

Its filter narrows the mask before tokens and sequences are counted.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    SEQUENCES,
    WITH_REFERENCE,
    Named,
    around_one,
    mean,
    penalty,
    recipe,
)
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogates import DRO, GPG, GSPO, PPO, TOPR, Score


@preset_of("ROLL 8eb27cc (2026-08-18)")
def default(upper_bound: float | None = 1.2, ratio_low: float | None = 0.8, ratio_high: float | None = 1.2) -> Spec:
    """w = exp(D) clamped to [0, upper_bound]; tokens outside [ratio_low, ratio_high] masked."""
    criterion = Criterion("ratio", lower=ratio_low, upper=ratio_high)
    return Spec(weight=Weight.token(lower=0.0, upper=upper_bound), criteria=(criterion,), rejected="mask")


@preset_of("ROLL 8eb27cc (2026-08-18)")
def segment(upper_bound: float | None = 1.2, ratio_low: float | None = 0.8, ratio_high: float | None = 1.2) -> Spec:
    """w = exp(mean D of the segment) clamped to [0, upper_bound]; segments outside [ratio_low, ratio_high] masked."""
    # A segment is a run of the mask: turns="runs".
    criterion = Criterion("ratio", over="turn", reduce="mean", lower=ratio_low, upper=ratio_high)
    weight = Weight.geometric(lower=None if upper_bound is None else 0.0, upper=upper_bound, over="turn")
    return Spec(weight=weight, criteria=(criterion,), rejected="mask")


def clip(both: float, low: float | None, high: float | None, dual: bool) -> PPO:
    """PPO's clip, whose sides are `pg_clip` where they are not given."""
    # The dual clip has no setting of its own.
    return PPO(both if low is None else low, both if high is None else high, 1.0 + 2.0 * both if dual else None)


def clip_of_segments(both: float, low: float | None, high: float | None, dual: bool) -> GSPO:
    """PPO's clip, as `clip` has it, of the ratio of a segment (`ratio_type: segment` of agentic pipelines)."""
    made = clip(both, low, high, dual)
    return GSPO(made.low, made.high, made.dual, over="turn")


_CLIP = Named(clip, pg_clip=0.2, pg_clip_low=None, pg_clip_high=None, dual_clip_loss=False)
_MEAN = mean(loss_agg_mode="seq-mean-token-mean")

# Beside PPO, the variants of `actor_train.pg_variant`.
RECIPES = {
    "default": recipe(_CLIP, BOTH, spec="roll.default", mean=_MEAN, over="kept"),
    "segment": recipe(
        Named(clip_of_segments, **_CLIP.settings),
        BOTH,
        "an agentic pipeline's ratio_type, weight_type and agg_type: segment, a run of the mask",
        spec="roll.segment",
        mean=_MEAN,
        over="kept",
        turns="runs",
    ),
    "ppo": recipe(_CLIP, DECOUPLED, "without train_infer_correction", mean=_MEAN),
    "grpo": recipe(
        _CLIP,
        WITH_REFERENCE,
        "without train_infer_correction, with use_kl_loss, as most of ROLL's examples of GRPO have it",
        mean=_MEAN,
        kl=penalty(value_clamp=10.0, kl_loss_coef=0.01),
    ),
    "vanilla": recipe(GPG(), (), mean=SEQUENCES),
    "tis": recipe(Named(Score, tis_lower_bound=0.0, tis_upper_bound=1.0), DECOUPLED, mean=SEQUENCES),
    "cispo": recipe(Named(around_one, cispo_epsilon_low=0.1, cispo_epsilon_high=0.1), DECOUPLED, mean=SEQUENCES),
    "kimi15": recipe(Named(DRO, kimi15_tau=0.1), DECOUPLED, "Kimi K1.5's regularizer, token by token", mean=SEQUENCES),
    "topr": recipe(
        Named(lambda good, bad: TOPR(positive=good, negative=bad), topr_positive_weight=1.0, topr_negative_weight=1.0),
        DECOUPLED,
        "ROLL asks for the sign of the reward, this package for that of the advantage",
        mean=SEQUENCES,
    ),
}
