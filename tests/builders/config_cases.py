"""What the tests of configurations share: the Specs that they expect, written short."""

from __future__ import annotations

from rollout_corr.spec.correction import Criterion

VERL = {"report": ("native", "verl")}
XTUNER = {"report": ("native", "xtuner")}
SKYRL = {"report": ("native", "skyrl")}


def ratio(lower: float | None, upper: float | None, reduce: str | None = None, **more: object) -> Criterion:
    over = "token" if reduce is None else "sequence"
    return Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, **more)


def flat(**changes: object) -> dict[str, object]:
    """The values that verl 0.6.0 shipped in its flat generation, its switch turned on."""
    return {
        "rollout_is": True,
        "rollout_is_threshold": 2.0,
        "rollout_is_threshold_lower": None,
        "rollout_is_level": "token",
        "rollout_is_mode": "truncate",
        "rollout_is_veto_threshold": 1e-4,
    } | changes
