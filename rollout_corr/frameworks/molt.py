"""labs-molt: `is_correction_level` seq and geo, which only gate; what survives keeps its token ratio.

molt's "seq" is the product. It reads NaN as D = 0 and clamps D to +-30, per token and again after summing. Rejection
zeroes the weight.
"""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, DECOUPLED, GLOBAL, Named, as_wide, of_presets, recipe
from rollout_corr.spec.correction import Criterion, Reduce, Spec, Weight
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import GSPO, PPO, Score

LIMIT = 30.0


def _gated(reduce: Reduce, low: float | None, high: float | None) -> Spec:
    criterion = Criterion("ratio", over="sequence", reduce=reduce, lower=low, upper=high, token_clamp=LIMIT)
    return Spec(
        weight=Weight("token", token_clamp=LIMIT),
        criteria=(criterion,),
        rejected="zero",
        clamp=LIMIT,
        nonfinite="neutral",
    )


@preset_of("labs-molt 2d62608 (2026-08-06)")
def seq(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(sum D) is outside [low, high]."""
    return _gated("sum", low, high)


@preset_of("labs-molt 2d62608 (2026-08-06)")
def geo(low: float | None = 0.99, high: float | None = 1.01) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]; the bounds are its quick start's."""
    return _gated("mean", low, high)


def _clip(sides: tuple[float, float], dual: float | None) -> Surrogate:
    return as_wide(partial(PPO, clamp=LIMIT))(*sides, dual)


_CLIP = Named(_clip, eps_clip_low_high=(0.2, 0.2), dual_clip=None)

# Of molt's bounds for CISPO the second bounds the ratio itself. molt refuses its own default there; 1.2 is the example
# of its help.
RECIPES = of_presets("molt", _CLIP, BOTH, GLOBAL) | {
    "ppo": recipe(_CLIP, DECOUPLED, GLOBAL),
    "gspo": recipe(
        Named(lambda sides: partial(GSPO, through="token", clamp=LIMIT)(*sides), eps_clip_low_high=(0.2, 0.2)),
        DECOUPLED,
        GLOBAL,
    ),
    "cispo": recipe(
        Named(lambda sides: Score(upper=sides[1], clamp=LIMIT), eps_clip_low_high=(0.2, 1.2)),
        DECOUPLED,
        "no default in molt: the ceiling is that of its help",
    ),
}
