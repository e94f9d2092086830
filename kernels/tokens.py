"""Formulas of a token.

The formulas are those of rollout_corr/definition/tokens.py, written once more so that one error cannot be in both.
`x` is a block of tokens, [PARTS, LANES, VEC], of the dtype that computes, unless it says otherwise.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .tables import named, number

GRID_OF_D = tl.constexpr(2.0**28)
LARGEST_D = tl.constexpr(2.0**10)
GRID_OF_FRACTION = tl.constexpr(2.0**38)
LARGEST_STATISTIC = tl.constexpr(2.0**37)
LARGEST_LOG_PERPLEXITY = tl.constexpr(500.0)
LARGEST_SQUARED = tl.constexpr(2.0**60)
NAN_KEY_32 = tl.constexpr(0x7FC00000)
NAN_KEY_64 = tl.constexpr(0x7FF8000000000000)


# --- elementary functions ---


@triton.constexpr_function
def over_factorial(k: int) -> float:
    """1 / k!."""
    return 1.0 / math.factorial(k)


@triton.jit
def limited(x, low, high, PLAN: tl.constexpr):
    """Clamp x to [low, high]; a NaN stays one where it may pass."""
    if PLAN.nonfinite == "propagate":
        return tl.where(x > high, high, tl.where(x < low, low, x))
    else:
        return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def exponential(x) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Compute e^x, e^x - 1 and e^x - 1 - x for |x| <= 60, without cancellation.

    The device's own exponential rounds x * log2(e), which costs a relative 1e-6 at |x| = 20.
    """
    twos, power, rest, factor = powers(x)
    square = rest * rest
    grown = tl.fma(factor, square, rest)
    power = power.to(tl.float32, bitcast=True)
    minus_one = tl.fma(power, grown, power - 1.0)
    return tl.fma(power, grown, power), minus_one, tl.where(twos == 0.0, factor * square, minus_one - x)


@triton.jit
def k3_in_full(d, PLAN: tl.constexpr):
    """Compute k3 without any clamp: infinite where e^D is."""
    # The square of e^(D/2), because `exponential` ends where float32 does.
    root, _, _ = exponential(limited(0.5 * d, -60.0, 60.0, PLAN))
    _, _, of_small_d = exponential(limited(d, -1.0, 1.0, PLAN))
    return tl.where(tl.abs(d) <= 1.0, of_small_d, root * root - 1.0 - d)


@triton.jit
def powers(x) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Split float32 x into n ln 2 + r, |r| <= ln 2 / 2; give n, the bits of 2^n, r and (e^r - 1 - r) / r^2.

    ln 2 has two parts, the first of so few bits that products with it are exact.
    """
    # Adding 3 * 2^22 leaves a rounded integer in the last bits, and 127 makes it an exponent. Each fma is written out:
    # where the compiler may choose, a token could get other bits in a program with an outlier than in one without.
    shifted = tl.fma(x, constant(x, 1.4426950408889634), constant(x, 12582912.0 + 127.0))
    twos = shifted - (12582912.0 + 127.0)
    rest = tl.fma(twos, constant(x, -0.693359375), x)
    rest = tl.fma(twos, constant(x, 2.12194440e-4), rest)
    return twos, shifted.to(tl.int32, bitcast=True) << 23, rest, series(rest, 7)


@triton.jit
def constant(x, value: tl.constexpr):
    """A number in the shape and the dtype of x."""
    return tl.full(x.shape, value, x.dtype)


@triton.jit
def series(d, TERMS: tl.constexpr):
    """Sum the first terms of 1/2! + D/3! + D^2/4! + ..."""
    total = tl.fma(d, constant(d, over_factorial(TERMS + 1)), constant(d, over_factorial(TERMS)))
    for i in tl.static_range(TERMS - 2):
        total = tl.fma(total, d, constant(d, over_factorial(TERMS - 1 - i)))
    return total


@triton.jit
def k3_of(d, e):
    """Compute e^D - 1 - D in float64 without cancellation, where e is e^D."""
    small_d = tl.minimum(tl.maximum(d, -0.5), 0.5)
    return tl.where(tl.abs(d) <= 0.5, series(small_d, 14) * (small_d * small_d), e - 1.0 - d)


@triton.jit
def expm1(x):
    """Compute e^x - 1 in float64."""
    return x + k3_of(x, tl.exp(x))


@triton.jit
def perplexity(log_perplexity):
    """Compute exp of a log-perplexity, capped."""
    return tl.exp(tl.where(log_perplexity > LARGEST_LOG_PERPLEXITY, LARGEST_LOG_PERPLEXITY, log_perplexity))


@triton.jit
def probability(logp):
    """Compute exp of a log-prob; one above 0 is read as 0. A NaN stays one."""
    return tl.exp(tl.minimum(logp, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def complement(logp, PLAN: tl.constexpr):
    """Compute 1 - exp of a log-prob without cancellation."""
    _, minus_one, _ = exponential(limited(logp, -60.0, 0.0, PLAN))
    return -minus_one


@triton.jit
def binary_kl(log_p, log_q, d, eps, PLAN: tl.constexpr):
    """Compute KL(p || q) of the distributions {p, 1-p} and {q, 1-q}, where d = log q - log p."""
    not_p, not_q = complement(log_p, PLAN), complement(log_q, PLAN)
    not_p = tl.where(not_p < eps, eps, not_p)
    not_q = tl.where(not_q < eps, eps, not_q)
    return tl.fma(not_p, tl.log(not_p) - tl.log(not_q), -(probability(log_p) * d))


@triton.jit
def is_finite(x):
    """Select values that are neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def over_kept_set(logp, base, mass, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Subtract the log of the mass that truncated sampling kept from log-probs that are not over the kept set yet."""
    if PLAN.mass == "train":
        logp = logp - mass.to(tl.float32)
    elif PLAN.mass == "rollout":
        base = base - mass.to(tl.float32)
    return logp, base


@triton.jit
def within(x, numbers: tl.tuple, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Select values between a pair of thresholds, inclusive; never NaN."""
    lower = number(numbers, PLAN, named(prefix, "lower")).to(x.dtype)
    upper = number(numbers, PLAN, named(prefix, "upper")).to(x.dtype)
    return (x >= lower) & (x <= upper)


# --- sums over lanes ---


@triton.jit
def over_lanes(x):
    """Add up over the lanes; int64 in two halves, which a warp adds in one instruction each."""
    if x.dtype == tl.int64:
        # |x| is below 2^50 for up to 64 tokens of a lane, and there are at most 64 lanes.
        low, high = (x & 0xFFFFFF).to(tl.int32), (x >> 24).to(tl.int32)
        return (tl.sum(high, 0).to(tl.int64) << 24) + tl.sum(low, 0)
    else:
        return tl.sum(x, 0)


# --- maxima without order ---


@triton.jit
def key_of(x):
    """Encode floats as integers of the same order, NaN above everything: their maximum needs no order, loses no NaN."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return tl.where(x != x, NAN_KEY_64, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))
    else:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x != x, NAN_KEY_32, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def of_key(key):
    """Decode what `key_of` encoded."""
    if key.dtype == tl.int64:
        return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
