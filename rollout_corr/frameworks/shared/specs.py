"""Parts of Specs that several frameworks have."""

from __future__ import annotations

from rollout_corr.specs.choices import Drop, Level, Of, Reduce, Unit
from rollout_corr.specs.correction import Criterion, Spec, Weight

# A framework's level: the level of the weight, and unit and reduction of the criterion that tests the same ratio.
LEVELS: dict[str, tuple[Level, Unit, Reduce | None]] = {
    "token": ("token", "token", None),
    "sequence": ("product", "sequence", "sum"),
    "geometric": ("geometric", "sequence", "mean"),
}


def gated(criterion: Criterion) -> Spec:
    """Weigh each token by its ratio, and by 0 where it fails a criterion (IcePop and its kin)."""
    return Spec(weight=Weight.token(), criteria=(criterion,), rejected="zero")


def off_policy(
    delta: float,
    of: Of = "new/rollout",
    drop: Drop = "unit",
    token_clamp: float | None = None,
    label: str = "off_policy",
) -> Criterion:
    """Reject a sequence with A < 0 whose mean of -D, of the policy that trains, exceeds delta (OPSM)."""
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
