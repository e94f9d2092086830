"""labs-molt: `is_correction_level` token, seq and geo; the last two only gate: what survives keeps its token ratio.

molt's "seq" is the product. It reads NaN as D = 0 and clamps D to +-30, per token and again after summing. Rejection
zeroes the weight.
"""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    SAME_AS_PPO,
    Named,
    as_wide,
    of_presets,
    recipe,
)
from rollout_corr.specs.choices import Reduce, Unit
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO, PPO, Score
from rollout_corr.specs.validate import number, one_of

LIMIT = 30.0


MODES = ("mask", "clip", "trunc")


def _spec(lower: float | None, upper: float | None, criteria: tuple[Criterion, ...] = ()) -> Spec:
    return Spec(
        weight=Weight.token(lower=lower, upper=upper, token_clamp=LIMIT),
        criteria=criteria,
        rejected="zero" if criteria else "mask",
        clamp=LIMIT,
        nonfinite="neutral",
    )


def _gated(reduce: Reduce | None, low: float | None, high: float | None) -> Spec:
    unit: Unit = "token" if reduce is None else "sequence"
    return _spec(None, None, (Criterion("ratio", unit, reduce, lower=low, upper=high, token_clamp=LIMIT),))


@preset_of("labs-molt 2d62608 (2026-08-06)")
def token(low: float | None = 0.5, high: float | None = 5.0, mode: str = "mask") -> Spec:
    """w = exp(D) inside [low, high], else 0; mode "clip": clamped to [low, high]; "trunc": at most high."""
    if one_of("mode", mode, MODES) == "mask":
        return _gated(None, low, high)
    return _spec(low if mode == "clip" else None, high)


@preset_of("labs-molt 2d62608 (2026-08-06)")
def seq(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(sum D) is outside [low, high]."""
    return _gated("sum", low, high)


@preset_of("labs-molt 2d62608 (2026-08-06)")
def geo(low: float | None = 0.99, high: float | None = 1.01) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]; the bounds are its quick start's."""
    return _gated("mean", low, high)


def ppo(sides: tuple[float, float], dual: float | None) -> Surrogate:
    """Return PPO's clip."""
    return as_wide(partial(PPO, clamp=LIMIT))(*sides, dual)


def gspo(sides: tuple[float, float]) -> Surrogate:
    """Return GSPO-token's clip."""
    return GSPO(*sides, through="token", clamp=LIMIT)


def cispo(sides: tuple[float, float]) -> Surrogate:
    """Return the score function: the second bound is that of the ratio itself, and at least 1, as molt demands."""
    high = number("eps_clip_low_high", sides[1])
    if high < 1.0:
        raise ValueError(f"eps_clip_low_high: expected the highest ratio, at least 1, with cispo, got {high!r}")
    return Score(upper=high, clamp=LIMIT)


_CLIP = Named(ppo, eps_clip_low_high=(0.2, 0.2), dual_clip=None)

# molt refuses its own default of the bounds for CISPO; 1.2 is the example of its help.
RECIPES = of_presets("molt", _CLIP, BOTH, GLOBAL) | {
    "ppo": recipe(_CLIP, DECOUPLED, GLOBAL),
    "grpo": recipe(_CLIP, DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}"),
    "gspo": recipe(Named(gspo, eps_clip_low_high=(0.2, 0.2)), DECOUPLED, GLOBAL),
    "cispo": recipe(
        Named(cispo, eps_clip_low_high=(0.2, 1.2)),
        DECOUPLED,
        "no default in molt: the ceiling is that of its help",
    ),
}
