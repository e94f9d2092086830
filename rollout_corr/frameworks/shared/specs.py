"""Parts of Specs that several frameworks have."""

from __future__ import annotations

from collections.abc import Mapping

from ...specs.choices import Drop, Of, Reduce, Unit, WeightReduce
from ...specs.correction import Criterion, Spec, Weight

# A framework's level of a ratio: the `over` and `reduce` of the weight that it is, and of the criterion that tests it.
LEVELS: dict[str, tuple[Unit, WeightReduce | None]] = {
    "token": ("token", None),
    "sequence": ("sequence", "sum"),
    "geometric": ("sequence", "mean"),
}


def level_of(
    part: Weight | Criterion, levels: Mapping[str, tuple[Unit, Reduce | WeightReduce | None]] = LEVELS
) -> str | None:
    """The framework's name of the ratio that weighs or is tested; None: it has none."""
    return next((name for name, level in levels.items() if level == (part.over, part.reduce)), None)


def is_off_policy(criterion: Criterion) -> bool:
    """Tell whether a criterion is `off_policy`'s, with any settings."""
    asked = (criterion.stat, criterion.over, criterion.reduce, criterion.when)
    return asked == ("k1", "sequence", "mean", "negative_advantage")


def gated(criterion: Criterion) -> Spec:
    """Weigh each token by its ratio, and by 0 where it fails a criterion (IcePop and its kin)."""
    return Spec(weight=Weight.token(), criteria=(criterion,), rejected="zero")


def masked(*criteria: Criterion) -> Spec:
    """No weight, but 0 for a token that fails one of the criteria: masks of a loss with a ratio of its own."""
    return Spec(criteria=criteria, rejected="zero")


def truncated(upper: float | None, lower: float | None = None, token_clamp: float | None = None) -> Spec:
    """Weigh each token by its ratio, clamped to the bounds (TIS)."""
    return Spec(weight=Weight.token(lower=lower, upper=upper, token_clamp=token_clamp))


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
