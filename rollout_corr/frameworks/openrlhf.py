"""OpenRLHF's recipes: level, mode and gating of `--algo.advantage.is_correction_*`, by the names it documents.

OpenRLHF's "seq" is the geometric mean, and it only gates: what survives keeps its token ratio. Rejection zeroes the
weight, so no denominator changes.
"""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.validate import one_of

GATINGS = ("binary_kl", "tv")
# OpenRLHF keeps probabilities in [1e-6, 1 - 1e-6].
EPS = 1e-6


def _gated(criterion: Criterion) -> Spec:
    return Spec(weight=Weight("token"), criteria=(criterion,), rejected="zero")


@recipe("OpenRLHF 0.11.2")
def tis(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D) clamped to [low, high]."""
    return Spec(weight=Weight("token", lower=low, upper=high))


@recipe("OpenRLHF 0.11.2")
def icepop(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D) inside [low, high], else 0."""
    return _gated(Criterion("ratio", lower=low, upper=high))


@recipe("OpenRLHF 0.11.2")
def seq_mask_tis(low: float | None = 0.5, high: float | None = 5.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high]."""
    return _gated(Criterion("ratio", over="sequence", reduce="mean", lower=low, upper=high))


@recipe("OpenRLHF 0.11.2")
def flash_reinforce(delta: float = 3e-3) -> Spec:
    """w = exp(D), and 0 for a sequence whose mean binary KL(rollout || train) is above delta."""
    return _gated(Criterion("binary_kl", over="sequence", reduce="mean", upper=delta, eps=EPS))


@recipe("OpenRLHF 0.11.2")
def dppo_like(delta: float = 0.05, gating: str = "binary_kl") -> Spec:
    """w = exp(D), and 0 for a token whose binary KL (or total variation, gating="tv") is above delta."""
    one_of("gating", gating, GATINGS)
    return _gated(
        Criterion("binary_kl", upper=delta, eps=EPS) if gating == "binary_kl" else Criterion("tv", upper=delta)
    )
