"""What every Spec reports of its tokens and of their weights."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.sums import record, record_extrema
from rollout_corr.kernels.tokens import LARGEST_D, exponential, is_finite, limited, number, probability, within

# Programs add their histograms into this many copies, so that they do not all wait for the same few bins.
COPIES = tl.constexpr(16)
BINS = tl.constexpr(512)
FIRST_BIN = tl.constexpr((127 - 24) << 3)


@triton.jit
def measure_tokens(found, d, excess, k3, measured, clamp, PLAN: tl.constexpr, TAME: tl.constexpr):
    """What every Spec reports of its tokens."""
    saturated = d if TAME else limited(d, -LARGEST_D, LARGEST_D, PLAN)
    found = record(found, PLAN, "token_sums", "abs_d", tl.abs(saturated))
    found = record(found, PLAN, "token_sums", "d2", saturated * saturated)
    found = record(found, PLAN, "token_sums", "k3", k3)
    found = record(found, PLAN, "token_sums", "ratio", excess)
    found = record(found, PLAN, "token_sums", "ratio2", excess * excess)
    clamped = tl.zeros_like(d)
    if not TAME:
        clamped = tl.where(tl.abs(d) <= clamp, clamped, 1.0)
    found = record(found, PLAN, "token_sums", "tokens_clamped", clamped)
    return record_extrema(found, PLAN, "-min_d", "max_d", d, measured)


@triton.jit
def measure_probabilities(found, train, rollout, measured, PLAN: tl.constexpr):
    """What only detail="full" reports, but for the histogram."""
    p = tl.where(measured, probability(rollout) - 1.0, 0.0)
    q = tl.where(measured, probability(train) - 1.0, 0.0)
    gap = tl.abs(p - q)
    found = record(found, PLAN, "token_sums", "abs_prob_diff", gap)
    found = record_extrema(found, PLAN, "", "max_abs_prob_diff", gap, measured)
    p, q = p.to(tl.float64), q.to(tl.float64)
    found = record(found, PLAN, "token_sums", "p", p)
    found = record(found, PLAN, "token_sums", "q", q)
    found = record(found, PLAN, "token_sums", "p2", p * p)
    found = record(found, PLAN, "token_sums", "q2", q * q)
    return record(found, PLAN, "token_sums", "pq", p * q)


@triton.jit
def histogram_of(d, measured):
    """[BINS], how many D are in each bin."""
    bits = d.to(tl.float32).to(tl.int32, bitcast=True)
    bins = tl.minimum(tl.maximum(((bits & 0x7FFFFFFF) >> 20) - FIRST_BIN, 0), 255) + tl.where(bits < 0, 256, 0)
    return tl.histogram(tl.ravel(bins), BINS, mask=tl.ravel(measured & is_finite(d)))


@triton.jit
def between(x, lower, upper, PLAN: tl.constexpr):
    """x clamped to the bounds that a weight has."""
    if PLAN.has_lower:
        lower = lower.to(x.dtype)
        x = tl.where(x < lower, lower, x) if PLAN.nonfinite == "propagate" else tl.maximum(x, lower)
    if PLAN.has_upper:
        upper = upper.to(x.dtype)
        x = tl.where(x > upper, upper, x) if PLAN.nonfinite == "propagate" else tl.minimum(x, upper)
    return x


@triton.jit
def bound(log_ratio, raw, ratio, numbers, PLAN: tl.constexpr):
    """Ratio - 1 and the ratio itself, after the bounds that a weight has."""
    if PLAN.bounded:
        if PLAN.outside == "zero":
            inside = within(log_ratio, numbers, PLAN, "log")
            raw, ratio = tl.where(inside, raw, -1.0), tl.where(inside, ratio, 0.0)
        else:
            lower, upper = number(numbers, PLAN, "lower"), number(numbers, PLAN, "upper")
            raw = between(raw, lower - 1.0, upper - 1.0, PLAN)
            ratio = between(ratio, lower, upper, PLAN)
    return raw, ratio


@triton.jit
def weight_of(d, log_ratio, e, excess, numbers, PLAN: tl.constexpr):
    """The log-ratio of a weight, ratio - 1 before and after the bounds, and the weight."""
    raw = excess
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(d.dtype)
        log_ratio = limited(log_ratio, -most, most, PLAN)
        e, raw, _ = exponential(log_ratio, PLAN)
    bounded, weight = bound(log_ratio, raw, e, numbers, PLAN)
    return log_ratio, raw, bounded, weight


@triton.jit
def measure_weights(found, measured, log_ratio, raw, bounded, numbers, PLAN: tl.constexpr):
    """What a token weight reports."""
    bounded = tl.where(measured, bounded, 0.0)
    found = record(found, PLAN, "floats", "raw", raw)
    found = record(found, PLAN, "floats", "bounded", bounded)
    found = record(found, PLAN, "token_sums", "raw2", raw * raw)
    found = record(found, PLAN, "token_sums", "weight2", bounded * bounded)
    above, below = tl.zeros_like(raw), tl.zeros_like(raw)
    if PLAN.has_upper:
        inside = log_ratio <= number(numbers, PLAN, "log/upper").to(raw.dtype)
        above = tl.where(measured & (inside == 0), 1.0, 0.0).to(raw.dtype)
    if PLAN.has_lower:
        inside = log_ratio >= number(numbers, PLAN, "log/lower").to(raw.dtype)
        below = tl.where(measured & (inside == 0), 1.0, 0.0).to(raw.dtype)
    found = record(found, PLAN, "token_sums", "tokens_above", above)
    found = record(found, PLAN, "token_sums", "tokens_below", below)
    if PLAN.outside == "zero":
        found = record_extrema(found, PLAN, "-min_weight", "max_weight", bounded, measured)
    return found
