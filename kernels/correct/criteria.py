"""Criteria at the tokens: the statistic of each, which tokens a criterion selects, which of them fail."""

from __future__ import annotations

import triton
import triton.language as tl

from ..sums import record, record_extrema, record_statistic, record_sum
from ..tables import has, named, number, of_criterion
from ..tokens import (
    LARGEST_SQUARED,
    LARGEST_STATISTIC,
    binary_kl,
    exponential,
    is_finite,
    key_of,
    limited,
    probability,
    within,
)
from .steps import Pair


@triton.jit
def passes(x, numbers: tl.tuple, CRITERION: tl.constexpr, PLAN: tl.constexpr):
    """Select values that pass, compared in the form of the thresholds (`PlannedCriterion.compared`)."""
    if CRITERION.compared == "abs_d" or CRITERION.compared == "clamped_abs_d":
        x = tl.abs(x)
    if CRITERION.compared == "clamped_d" or CRITERION.compared == "clamped_abs_d":
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        x = limited(x, -clamp, clamp, PLAN)
    passed = within(x, numbers, PLAN, CRITERION.index)
    if CRITERION.holed:
        hole_end = number(numbers, PLAN, named(named(CRITERION.index, "hole"), "lower")).to(x.dtype)
        hole_start = number(numbers, PLAN, named(named(CRITERION.index, "hole"), "upper")).to(x.dtype)
        passed = passed & ((x <= hole_start) | (x >= hole_end))
    return passed


@triton.jit
def log_ratio_of(d, numbers: tl.tuple, CRITERION: tl.constexpr, PLAN: tl.constexpr):
    """Apply the criterion's token clamp to D."""
    if CRITERION.token_clamp:
        most = number(numbers, PLAN, named(CRITERION.index, "token_clamp")).to(d.dtype)
        return limited(d, -most, most, PLAN)
    else:
        return d


@triton.jit
def statistic(pair: Pair, measured, external, numbers: tl.tuple, CRITERION: tl.constexpr, PLAN: tl.constexpr):
    """Compute a criterion's value per token; for "ratio" it is D, because ratios aggregate in log space.

    A new statistic gets its branch here, and one with an `inverse` in `statistic_of_extremum` too; its row in
    specs/statistics.py says the rest.
    """
    d, logp, base = pair.d, pair.logp, pair.base
    x = log_ratio_of(d, numbers, CRITERION, PLAN)
    if CRITERION.stat == "external":
        x = tl.where(measured, external, 0.0)
        if CRITERION.source == "entropy":
            x = tl.where(is_finite(x), x, float("nan"))
    elif CRITERION.stat == "k1":
        x = -x
    elif CRITERION.stat == "abs":
        x = tl.abs(x)
    elif CRITERION.stat == "k2":
        x = limited(x, -LARGEST_SQUARED, LARGEST_SQUARED, PLAN)
        x = 0.5 * (x * x)
    elif CRITERION.stat == "prob_diff":
        x = probability(logp) - probability(base)
    elif CRITERION.stat == "tv":
        x = tl.abs(probability(logp) - probability(base))
    elif CRITERION.stat == "ratio_error":
        clamp = number(numbers, PLAN, "clamp").to(d.dtype)
        x, _, _ = exponential(tl.abs(limited(x, -clamp, clamp, PLAN)))
    elif CRITERION.stat == "k3" or CRITERION.stat == "k3_reverse" or CRITERION.stat == "ratio_deviation":
        clamp = number(numbers, PLAN, "clamp").to(d.dtype)
        x = limited(x, -clamp, clamp, PLAN)
        if CRITERION.stat == "k3_reverse":
            x = -x
        _, excess, k3 = exponential(x)
        x = tl.abs(excess) if CRITERION.stat == "ratio_deviation" else k3
    elif CRITERION.stat != "ratio":
        eps = number(numbers, PLAN, named(CRITERION.index, "eps")).to(d.dtype)
        if CRITERION.stat == "binary_kl":
            x = binary_kl(base, logp, d, eps, PLAN)
        elif CRITERION.stat == "binary_kl_reverse":
            x = binary_kl(logp, base, -d, eps, PLAN)
        else:
            one = binary_kl(base, logp, d, eps, PLAN)
            other = binary_kl(logp, base, -d, eps, PLAN)
            x = tl.where((one > other) | (one != one), one, other)
        x = tl.where(measured, x, 0.0)
    return x


@triton.jit
def statistic_of_extremum(x, numbers: tl.tuple, CRITERION: tl.constexpr, PLAN: tl.constexpr):
    """Compute the value from a sequence's extreme |D|, for a statistic that grows with |D|; else x is the value."""
    if CRITERION.stat == "k2":
        x = tl.where(x > LARGEST_SQUARED, LARGEST_SQUARED, x)
        x = 0.5 * (x * x)
    elif CRITERION.stat == "ratio_error":
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        x, _, _ = exponential(tl.where(x > clamp, clamp, x))
    return x


@triton.jit
def class_of(pair: Pair, advantage, WHICH: tl.constexpr):
    """Select the measured tokens of one class; see tokens.CLASSES."""
    d, measured = pair.d, pair.measured
    if WHICH == "negative_outward":
        return measured & (advantage < 0) & (d < 0)
    elif WHICH == "negative_inward":
        return measured & (advantage < 0) & ((d < 0) == 0)
    elif WHICH == "positive_outward":
        return measured & (advantage > 0) & (d > 0)
    else:
        return measured & (advantage > 0) & ((d > 0) == 0)


@triton.jit
def selected(d, advantage, measured, CRITERION: tl.constexpr):
    """Select the measured tokens that `when` asks for. A NaN advantage is not selected, nor is 0."""
    if CRITERION.when == "any":
        return measured
    elif CRITERION.when == "negative_advantage":
        return measured & (advantage < 0)
    elif CRITERION.when == "positive_advantage":
        return measured & (advantage > 0)
    else:
        return measured & (((advantage < 0) & (d < 0)) | ((advantage > 0) & (d > 0)))


@triton.jit
def test_tokens(found: tl.tuple, pair: Pair, advantage, external, dropped, numbers: tl.tuple, CRITERION: tl.constexpr,
                PLAN: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Test every measured token that `when` selects; return the accumulators and all tokens dropped so far."""
    d, measured = pair.d, pair.measured
    value = statistic(pair, measured, external, numbers, CRITERION, PLAN)
    if CRITERION.compared == "value":
        tested = value
    else:
        tested = log_ratio_of(d, numbers, CRITERION, PLAN)
    fails = selected(d, advantage, measured, CRITERION) & (passes(tested, numbers, CRITERION, PLAN) == 0)
    found = record(found, PLAN, "counts", named(CRITERION.index, "lost"), fails)
    among, end = measured, value
    if CRITERION.stat == "ratio":
        clamp = number(numbers, PLAN, "clamp").to(d.dtype)
        # Sums are around 1, ends are not.
        end, value, _ = exponential(limited(value, -clamp, clamp, PLAN))
    if CRITERION.may_be_nan:
        among = among & is_finite(value)
        found = record(found, PLAN, "counts", named(CRITERION.index, "counted"), among)
    counted = limited(tl.where(among, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)
    found = record(found, PLAN, "token_sums", named(CRITERION.index, "value"), counted)
    found = record(found, PLAN, "token_sums", named(CRITERION.index, "value2"), counted * counted)
    found = record_extrema(
        found, PLAN, of_criterion("-min", CRITERION.index), of_criterion("max", CRITERION.index), end, among
    )
    if CRITERION.drop != "sequence":
        dropped = dropped | fails
    return found, dropped


@triton.jit
def aggregate_tokens(found: tl.tuple, pair: Pair, among, external, numbers: tl.tuple, CRITERION: tl.constexpr,
                     PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record the sum or the extremum of a slot, among some tokens, that a criterion over sequences needs."""
    if has(PLAN, "peaks", named(CRITERION.index, "peak")):
        if CRITERION.compared == "abs_d" or CRITERION.compared == "clamped_abs_d":
            # These statistics grow with |D|, so its extremum decides, and gives theirs.
            x = tl.abs(log_ratio_of(pair.d, numbers, CRITERION, PLAN))
        else:
            x = statistic(pair, among, external, numbers, CRITERION, PLAN)
        x = x if CRITERION.reduce == "max" else -x
        found = record(found, PLAN, "peaks", named(CRITERION.index, "peak"), key_of(tl.where(among, x, float("-inf"))))
    elif CRITERION.sum != "d":
        x = tl.where(among, statistic(pair, among, external, numbers, CRITERION, PLAN), 0.0)
        if CRITERION.one_limb:
            found = record_sum(found, PLAN, named(CRITERION.index, "sum"), x)
        else:
            found = record_statistic(found, PLAN, named(CRITERION.index, "sum"), x)
    return found
