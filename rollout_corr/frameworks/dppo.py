"""DPPO's masks (Stable-RL), for `policy_loss`: a token that has moved too far with its advantage does not train."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec


@recipe("Stable-RL (2026-03)")
def tv(delta: float = 0.15) -> Spec:
    """0 for a token whose probability has moved with its advantage by more than delta since it was sampled."""
    criterion = Criterion("prob_diff", lower=-delta, upper=delta, when="outward", of="new/rollout", label="dppo")
    return Spec(criteria=(criterion,), rejected="zero")


@recipe("Stable-RL (2026-03)")
def kl(delta: float = 0.05) -> Spec:
    """The same by the binary KL of rollout from new."""
    criterion = Criterion("binary_kl", upper=delta, when="outward", of="new/rollout", label="dppo")
    return Spec(criteria=(criterion,), rejected="zero")
