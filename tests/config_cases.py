"""What the tests of configurations share: the Specs that they expect, written short."""

from __future__ import annotations

from rollout_corr.spec import Criterion

VERL = {"report": ("native", "verl")}
XTUNER = {"report": ("native", "xtuner")}
SKYRL = {"report": ("native", "skyrl")}


def ratio(lower: float | None, upper: float | None, reduce: str | None = None, **more: object) -> Criterion:
    over = "token" if reduce is None else "sequence"
    return Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, **more)
