"""OpenRLHF: level, mode and gating of `--algo.advantage.is_correction_*`, by the names it documents.

OpenRLHF's "seq" is the geometric mean, and it only gates: what survives keeps its token ratio. Rejection zeroes the
weight, so no denominator changes.
"""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, GLOBAL, Named, clip, of_presets
from rollout_corr.frameworks.shared.specs import gated
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.validate import one_of

GATINGS = ("binary_kl", "tv")
# OpenRLHF keeps probabilities in [1e-6, 1 - 1e-6].
EPS = 1e-6


@preset_of("OpenRLHF 0.11.2")
def tis(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D) clamped to [low, high]."""
    return Spec(weight=Weight("token", lower=low, upper=high))


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


def _clip(both: float, sides: tuple[float, float] | None, dual: float | None) -> Surrogate:
    low, high = sides or (both, both)
    return clip(low, high, dual)


RECIPES = of_presets("openrlhf", Named(_clip, eps_clip=0.2, eps_clip_low_high=None, dual_clip=None), BOTH, GLOBAL)
