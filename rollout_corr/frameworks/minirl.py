"""MiniRL (`ppo_recompute` of Stable-RL), for `policy_loss`: PPO's clip as a mask, beside a ratio new/rollout."""

from __future__ import annotations

from rollout_corr.frameworks.registry import recipe
from rollout_corr.spec.correction import Criterion, Spec


@recipe("Stable-RL (2026-03)")
def mask(clip_low: float = 0.2, clip_high: float = 0.2) -> Spec:
    """0 for a token whose ratio new/old has left [1 - clip_low, 1 + clip_high] with its advantage."""
    criterion = Criterion(
        "ratio", lower=1.0 - clip_low, upper=1.0 + clip_high, when="outward", of="new/old", label="clip"
    )
    return Spec(criteria=(criterion,), rejected="zero")
