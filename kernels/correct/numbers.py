"""The thresholds of a Spec as the kernels read them: numbers in memory, found by name when a kernel is compiled."""

from __future__ import annotations

import math

from rollout_corr.metrics import peers
from rollout_corr.spec.correction import Criterion, Spec
from rollout_corr.spec.thresholds import float32_at_least, float32_at_most, log_bound, threshold_of


def indices(spec: Spec) -> list[str]:
    """Name the criteria by their index: a label in a name would be part of a compile key."""
    return [str(i) for i in range(len(spec.criteria))]


def numbers_of(spec: Spec, double: bool) -> dict[str, float]:
    """The thresholds by name, rounded so that a float32 compared with one is compared with the threshold itself."""
    numbers = {"clamp": spec.clamp}
    if spec.weight is not None:
        weight = spec.weight
        rounds = weight.level == "token" and not double
        numbers |= {"lower": _low(weight.low), "upper": _high(weight.high)}
        numbers |= _interval("log", log_bound(weight.low), log_bound(weight.high), rounds)
        if weight.token_clamp is not None:
            numbers["token_clamp"] = weight.token_clamp
    for i, criterion in enumerate(spec.criteria):
        cut, rounds = threshold_of(criterion), criterion.over == "token" and not double
        numbers |= _interval(f"{i}", cut.lower, cut.upper, rounds)
        if cut.hole is not None:
            hole = _interval(f"{i}/hole", cut.hole[1], cut.hole[0], rounds)
            numbers |= hole
        numbers |= _settings(f"{i}", criterion)
    for name, sides in peers.intervals(spec, indices(spec)).items():
        numbers |= _closed_sides(name, *sides, False) | _closed_sides(f"{name}/token", *sides, not double)
    return numbers


def _settings(prefix: str, criterion: Criterion) -> dict[str, float]:
    found = {}
    if criterion.token_clamp is not None:
        found[f"{prefix}/token_clamp"] = criterion.token_clamp
    if criterion.statistic.has_eps:
        found[f"{prefix}/eps"] = criterion.eps
    return found


def _interval(prefix: str, lower: float | None, upper: float | None, rounds: bool) -> dict[str, float]:
    low, high = _low(lower), _high(upper)
    if rounds:
        low, high = float32_at_least(low), float32_at_most(high)
    return {f"{prefix}/lower": low, f"{prefix}/upper": high}


def _closed_sides(prefix: str, lower: float | None, upper: float | None, rounds: bool) -> dict[str, float]:
    """An interval without its open sides: not even a NaN lies beyond those."""
    found = {}
    if lower is not None:
        found[f"{prefix}/lower"] = float32_at_least(lower) if rounds else lower
    if upper is not None:
        found[f"{prefix}/upper"] = float32_at_most(upper) if rounds else upper
    return found


def _low(bound: float | None) -> float:
    return -math.inf if bound is None else bound


def _high(bound: float | None) -> float:
    return math.inf if bound is None else bound
