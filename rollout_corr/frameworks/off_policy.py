"""The off-policy sequence mask (OPSM), which several frameworks have."""

from __future__ import annotations

from rollout_corr.spec.correction import Criterion, Drop, Of


def off_policy(
    delta: float,
    of: Of = "new/rollout",
    drop: Drop = "unit",
    token_clamp: float | None = None,
    label: str = "off_policy",
) -> Criterion:
    """A sequence with A < 0 fails where the mean of -D, of the policy that trains, exceeds delta."""
    return Criterion(
        "k1",
        over="sequence",
        reduce="mean",
        upper=delta,
        when="negative_advantage",
        drop=drop,
        of=of,
        token_clamp=token_clamp,
        label=label,
    )
