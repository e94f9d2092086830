"""OpenRLHF: level, mode and gating of `--algo.advantage.is_correction_*`, by the names it documents.

OpenRLHF's "seq" is the geometric mean, and it only gates: what survives keeps its token ratio. Rejection zeroes the
weight, so no denominator changes.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    AGGREGATIONS,
    BOTH,
    DECOUPLED,
    GLOBAL,
    SAME_AS_PPO,
    SEQUENCES,
    Named,
    clip,
    mean,
    of_presets,
    recipe,
)
from rollout_corr.frameworks.shared.specs import gated
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.surrogate import RatioOf, Surrogate
from rollout_corr.specs.surrogates import GSPO
from rollout_corr.specs.validate import one_of

GATINGS = ("binary_kl", "tv")
# OpenRLHF keeps probabilities in [1e-6, 1 - 1e-6].
EPS = 1e-6


@preset_of("OpenRLHF 0.11.2")
def tis(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D) clamped to [low, high]."""
    return Spec(weight=Weight.token(lower=low, upper=high))


@preset_of("OpenRLHF 0.11.2")
def icepop(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D) inside [low, high], else 0."""
    return gated(Criterion("ratio", lower=low, upper=high))


@preset_of("OpenRLHF 0.11.2")
def seq_mask_tis(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]."""
    return gated(Criterion("ratio", over="sequence", reduce="mean", lower=low, upper=high))


@preset_of("OpenRLHF 0.11.2")
def flash_reinforce(delta: float = 3e-3) -> Spec:
    """w = exp(D), and 0 for a sequence whose mean binary KL(rollout || train) is above delta."""
    return gated(Criterion("binary_kl", over="sequence", reduce="mean", upper=delta, eps=EPS))


@preset_of("OpenRLHF 0.11.2")
def dppo_like(delta: float = 0.05, gating: str = "binary_kl") -> Spec:
    """w = exp(D), and 0 for a token whose binary KL (or total variation, gating="tv") is above delta."""
    one_of("gating", gating, GATINGS)
    return gated(
        Criterion("binary_kl", upper=delta, eps=EPS) if gating == "binary_kl" else Criterion("tv", upper=delta)
    )


def sides(both: float, low_high: tuple[float, float] | None) -> tuple[float, float]:
    """Return the sides of the clip from eps_clip and eps_clip_low_high."""
    low, high = low_high or (both, both)
    return low, high


def clipped(both: float, low_high: tuple[float, float] | None, dual: float | None) -> Surrogate:
    """Return PPO's clip."""
    return clip(*sides(both, low_high), dual)


def gspo(both: float, low_high: tuple[float, float] | None, dual: float | None, of: RatioOf | None = None) -> Surrogate:
    """Return GSPO's clip. With a correction its ratio is new/rollout, and there is no weight beside it."""
    return GSPO(*sides(both, low_high), dual, of=of)


AGGREGATED = {mode: AGGREGATIONS[mode] for mode in ("token-mean", "seq-mean-token-mean")}

_SETTINGS = {"eps_clip": 0.2, "eps_clip_low_high": None, "dual_clip": None}
_CLIP = Named(clipped, **_SETTINGS)
_MEAN = mean(AGGREGATED, loss_agg_mode="token-mean")

RECIPES = of_presets("openrlhf", _CLIP, BOTH, GLOBAL, mean=_MEAN) | {
    "ppo": recipe(_CLIP, DECOUPLED, GLOBAL, mean=_MEAN),
    "grpo": recipe(_CLIP, DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}", mean=_MEAN),
    "gspo": recipe(Named(gspo, **_SETTINGS), DECOUPLED, "pass the sequences of all ranks as the total", mean=SEQUENCES),
}
