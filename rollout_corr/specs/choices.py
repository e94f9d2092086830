"""The choices of a correction: each a `Literal`, and the tuple of its values."""

from __future__ import annotations

from typing import Literal, get_args

from .statistics import Stat

Outside = Literal["clamp", "zero"]
Normalize = Literal["batch", "group", "sequence"]
Unit = Literal["token", "turn", "sequence", "prefix"]
# The units that hold tokens, in which a prefix can begin.
Stretch = Literal["turn", "sequence"]
Reduce = Literal["sum", "mean", "max", "min"]
WeightReduce = Literal["sum", "mean", "min"]
Growth = Literal["sqrt"]
When = Literal["any", "negative_advantage", "positive_advantage", "outward"]
Drop = Literal["unit", "sequence", "token", "rest"]
Of = Literal["train/rollout", "new/rollout", "new/old"]
Rejected = Literal["mask", "zero", "both"]
Nonfinite = Literal["reject", "neutral", "propagate"]
SumsOver = Literal["valid", "kept"]
Detail = Literal["basic", "full"]
# Frameworks whose metrics can be reported with the native ones; metrics/peers.py loads them.
Scheme = Literal["native", "verl", "xtuner", "skyrl"]
# What `metrics` may be asked for: a scheme of names, or the few native ones that a dashboard shows.
MetricNames = Literal[Scheme, "dashboard"]

OUTSIDE: tuple[Outside, ...] = get_args(Outside)
NORMALIZE: tuple[Normalize, ...] = get_args(Normalize)
STATS: tuple[Stat, ...] = get_args(Stat)
UNITS: tuple[Unit, ...] = get_args(Unit)
STRETCHES: tuple[Stretch, ...] = get_args(Stretch)
# What other words for a unit mean, as an error says it.
STRETCHES_MEANT = {
    **dict.fromkeys(("seq", "sequences", "sample", "response", "trajectory", "row"), "'sequence'"),
    "turns": "'turn'",
}
UNITS_MEANT = STRETCHES_MEANT | dict.fromkeys(("tok", "tokens"), "'token'")
REDUCTIONS: tuple[Reduce, ...] = get_args(Reduce)
PREFIX_REDUCTIONS: tuple[WeightReduce, ...] = get_args(WeightReduce)
# Of the ratios of a turn or a sequence: their product and their geometric mean.
STRETCH_REDUCTIONS = PREFIX_REDUCTIONS[:2]
GROWTH: tuple[Growth, ...] = get_args(Growth)
WHEN: tuple[When, ...] = get_args(When)
DROP: tuple[Drop, ...] = get_args(Drop)
POLICIES: tuple[Of, ...] = get_args(Of)
REJECTED: tuple[Rejected, ...] = get_args(Rejected)
NONFINITE: tuple[Nonfinite, ...] = get_args(Nonfinite)
SUMS_OVER: tuple[SumsOver, ...] = get_args(SumsOver)
DETAIL: tuple[Detail, ...] = get_args(Detail)
REPORTS: tuple[Scheme, ...] = get_args(Scheme)
