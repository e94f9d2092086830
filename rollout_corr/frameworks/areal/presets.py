"""AReaL: `rejection_sampling` with action "mask", by its metric.

AReaL edits the mask and zeroes the weight, but divides by the original token count: the mean of its loss is over
"original". With a ratio it reads non-finite D as 0; its KL metrics are not cleaned, so there a NaN fails.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    SAME_AS_PPO,
    Named,
    around_one,
    as_wide,
    clip,
    of_presets,
    recipe,
)
from rollout_corr.specs.bounds_of_batch import MeanBelow
from rollout_corr.specs.choices import Nonfinite, Reduce, Unit
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.statistics import Stat
from rollout_corr.specs.surrogates import GSPO, SAPO
from rollout_corr.specs.validate import number, one_of, positive

LEVELS = ("token", "sequence")
AGGREGATIONS: tuple[Reduce, ...] = ("sum", "mean", "max")
METRICS = ("kl_k1", "kl_k2", "kl_k3")


def unit(level: str, agg: Reduce) -> tuple[Unit, Reduce | None]:
    """`Criterion.over` and `Criterion.reduce` for a level and its aggregation."""
    return ("token", None) if level == "token" else ("sequence", agg)


def _spec(weight: Weight, criterion: Criterion, nonfinite: Nonfinite) -> Spec:
    return Spec(weight=weight, criteria=(criterion,), rejected="both", nonfinite=nonfinite)


@preset_of("AReaL 1.0.4")
def token_mask(lower: float | None = 0.5, upper: float | None = 5.0) -> Spec:
    """w = exp(D) inside [lower, upper], else dropped (IcePop); AReaL's own default leaves the lower side open."""
    return _spec(Weight.token(), Criterion("ratio", lower=lower, upper=upper), "neutral")


@preset_of("AReaL 1.0.4")
def seq(upper: float | None = 5.0, lower: float | None = None, agg: Reduce = "mean") -> Spec:
    """w = exp(mean D), dropped for a sequence whose exp(agg of D) is outside the bounds."""
    one_of("agg", agg, AGGREGATIONS)
    criterion = Criterion("ratio", over="sequence", reduce=agg, lower=lower, upper=upper)
    return _spec(Weight.geometric(), criterion, "neutral")


@preset_of("AReaL 1.0.4")
def kl(
    metric: str = "kl_k3", level: str = "token", agg: Reduce = "mean", upper: float = 5.0, lower: float | None = None
) -> Spec:
    """w = exp(D), dropped where D, D^2/2 or exp(-D) - 1 + D (kl_k1, kl_k2, kl_k3) is outside the bounds."""
    one_of("metric", metric, METRICS)
    one_of("level", level, LEVELS)
    one_of("agg", agg, AGGREGATIONS)
    over, reduce = unit(level, agg)
    if metric != "kl_k1":
        stat: Stat = "k2" if metric == "kl_k2" else "k3_reverse"
        return _spec(Weight.token(), Criterion(stat, over=over, reduce=reduce, lower=lower, upper=upper), "reject")
    # AReaL's k1 is D and ours is -D, so the bounds swap sides and a maximum becomes a minimum.
    if reduce == "max":
        reduce = "min"
    lowest, highest = -number("upper", upper), None if lower is None else -number("lower", lower)
    return _spec(Weight.token(), Criterion("k1", over=over, reduce=reduce, lower=lowest, upper=highest), "reject")


@preset_of("AReaL cbff54d (2026-08-22)")
def kpop(upper: float = 2.0) -> Spec:
    """w = exp(D), dropped for a token whose binary KL is above upper in either direction (KPop; its paper says 0.1)."""
    return _spec(Weight.token(), Criterion("binary_kl_symmetric", upper=upper), "reject")


@preset_of("AReaL 4aef98d (2026-05-21)")
def m2po(m2_threshold: float = 0.04) -> Spec:
    """No weight; drops the tokens with the largest D^2 until the mean of D^2 over the rest is below a threshold.

    AReaL drops tokens of equal D^2 one by one, here they go together. Its loss is a mean over "kept" tokens.
    """
    half = positive("m2_threshold", m2_threshold) / 2.0
    return Spec(criteria=(Criterion("k2", upper=MeanBelow(half), label="m2po"),), nonfinite="propagate")


CLIP = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None}
RECIPES = {
    "ppo": recipe(Named(clip, **CLIP), DECOUPLED, GLOBAL),
    "grpo": recipe(Named(clip, **CLIP), DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}"),
    "a3po": recipe(
        Named(clip, **CLIP),
        DECOUPLED,
        "prox_logp_method=loglinear: old_logp is rc.proximal(new_logp, rollout_logp, batch), of a Batch with versions; "
        + GLOBAL,
    ),
    "gspo": recipe(
        Named(as_wide(GSPO), **CLIP),
        DECOUPLED,
        f"{GLOBAL}; it averages the advantages of a sequence, which is not done here",
    ),
    "sapo": recipe(Named(SAPO, sapo_tau_pos=1.0, sapo_tau_neg=1.05), DECOUPLED, GLOBAL),
    "cispo": recipe(
        Named(around_one, eps_clip=1.0, eps_clip_higher=4.0),
        DECOUPLED,
        f"the bounds that its help recommends; {GLOBAL}",
    ),
    **of_presets("areal", Named(clip, **CLIP), BOTH, GLOBAL),
    "m2po": recipe(Named(clip, **CLIP), BOTH, GLOBAL, spec="areal.m2po", over="kept"),
}
