"""What the kernels compute of one token: the same formulas as in rollout_corr/definition/tokens.py."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import CLASSES, Plan, Tables, Test

GRID_OF_D = tl.constexpr(2.0**28)
LARGEST_D = tl.constexpr(2.0**10)
GRID_OF_FRACTION = tl.constexpr(2.0**38)
LARGEST_STATISTIC = tl.constexpr(2.0**37)
LARGEST_LOG_PERPLEXITY = tl.constexpr(500.0)
LARGEST_SQUARED = tl.constexpr(2.0**60)
NAN_KEY_32 = tl.constexpr(0x7FC00000)
NAN_KEY_64 = tl.constexpr(0x7FF8000000000000)


# --- what is known when a kernel is compiled ---


@triton.constexpr_function
def has(plan: Tables, table: str, name: str) -> bool:
    """Whether a table of the plan has this column."""
    return name in getattr(plan, table)


@triton.constexpr_function
def at(plan: Tables, table: str, name: str) -> int:
    """The column of a table."""
    return getattr(plan, table).index(name)


@triton.constexpr_function
def size(plan: Tables, table: str) -> int:
    """How many columns a table has."""
    return len(getattr(plan, table))


@triton.constexpr_function
def test(plan: Plan, i: int) -> Test:
    """The i-th criterion."""
    return plan.tests[i]


@triton.constexpr_function
def named(prefix: object, name: str) -> str:
    """A column that belongs to a criterion or to another column."""
    return f"{prefix}/{name}"


@triton.constexpr_function
def of_pair(pair: int, name: str) -> str:
    """A column of a pair of policies."""
    return f"pair{pair}/{name}" if pair else name


@triton.constexpr_function
def pair_of(plan: Plan, i: int) -> int:
    """Which pair of policies the i-th criterion compares."""
    return plan.tests[i].pair


@triton.constexpr_function
def has_classes(plan: Plan, pair: int) -> bool:
    """Whether tokens of a pair of policies have to be counted by `when`."""
    return plan.classes_of(pair)


@triton.constexpr_function
def of_test(side: str, i: int) -> str:
    """The column of a criterion's largest or smallest value."""
    return f"{side}_{i}/value"


@triton.constexpr_function
def class_name(i: int) -> str:
    """The name of a class of tokens."""
    return CLASSES[i]


@triton.constexpr_function
def real(plan: Tables) -> tl.dtype:
    """The type that computes."""
    return tl.float64 if plan.double else tl.float32


@triton.constexpr_function
def over_factorial(k: int) -> float:
    """1 / k!."""
    return 1.0 / math.factorial(k)


@triton.jit
def thresholds(numbers, PLAN: tl.constexpr):
    """All thresholds, in float64. Once for a program: behind a store they would be loaded again."""
    found = ()
    for i in tl.static_range(size(PLAN, "numbers")):
        found = found + (tl.load(numbers + i),)
    return found


@triton.jit
def number(numbers, PLAN: tl.constexpr, name: tl.constexpr):
    """One of them."""
    return numbers[at(PLAN, "numbers", name)]


# --- elementary functions ---


@triton.jit
def limited(x, low, high, PLAN: tl.constexpr):
    """x clamped to [low, high]; a NaN, where it may pass, stays one."""
    if PLAN.nonfinite == "propagate":
        return tl.where(x > high, high, tl.where(x < low, low, x))
    else:
        return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def exponential(x, PLAN: tl.constexpr):
    """e^x, e^x - 1 and e^x - 1 - x for |x| <= 60, none of which cancels.

    The device's own exponential rounds x * log2(e), which costs a relative 1e-6 at |x| = 20. So x is taken to
    [-ln 2 / 2, ln 2 / 2] first, by a ln 2 in two parts whose first has few enough bits for exact products.
    """
    if PLAN.double:
        e = tl.exp(x)
        k3 = k3_of(x, e)
        return e, x + k3, k3
    else:
        # Adding 3 * 2^22 leaves a rounded integer in the last bits. Each fma is written out: where the compiler may
        # choose, a token could get other bits in a program that holds an outlier than in one that does not.
        shifted = tl.fma(x, constant(x, 1.4426950408889634), constant(x, 12582912.0))
        twos = shifted - 12582912.0
        rest = tl.fma(twos, constant(x, -0.693359375), x)
        rest = tl.fma(twos, constant(x, 2.12194440e-4), rest)
        power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
        factor, square = series(rest, 7), rest * rest
        grown = tl.fma(factor, square, rest)
        minus_one = tl.fma(power, grown, power - 1.0)
        return tl.fma(power, grown, power), minus_one, tl.where(twos == 0.0, factor * square, minus_one - x)


@triton.jit
def constant(x, value: tl.constexpr):
    """A number in the shape and the dtype of x."""
    return tl.full(x.shape, value, x.dtype)


@triton.jit
def series(d, TERMS: tl.constexpr):
    """The first terms of 1/2! + D/3! + D^2/4! + ..."""
    total = tl.fma(d, constant(d, over_factorial(TERMS + 1)), constant(d, over_factorial(TERMS)))
    for i in tl.static_range(TERMS - 2):
        total = tl.fma(total, d, constant(d, over_factorial(TERMS - 1 - i)))
    return total


@triton.jit
def k3_of(d, e):
    """e^D - 1 - D in float64 without cancellation, where e is e^D."""
    near = tl.minimum(tl.maximum(d, -0.5), 0.5)
    return tl.where(tl.abs(d) <= 0.5, series(near, 14) * (near * near), e - 1.0 - d)


@triton.jit
def expm1(x):
    """e^x - 1 in float64."""
    return x + k3_of(x, tl.exp(x))


@triton.jit
def perplexity(log_perplexity):
    """exp, capped."""
    return tl.exp(tl.where(log_perplexity > LARGEST_LOG_PERPLEXITY, LARGEST_LOG_PERPLEXITY, log_perplexity))


@triton.jit
def probability(logp):
    """exp of a log-prob; one above 0 is read as 0. A NaN stays one."""
    return tl.exp(tl.where(logp > 0.0, 0.0, logp))


@triton.jit
def complement(logp, PLAN: tl.constexpr):
    """1 - exp of a log-prob, without cancellation."""
    _, minus_one, _ = exponential(limited(logp, -60.0, 0.0, PLAN), PLAN)
    return -minus_one


@triton.jit
def binary_kl(log_p, log_q, d, eps, PLAN: tl.constexpr):
    """KL(p || q) of the distributions {p, 1-p} and {q, 1-q}, where d = log q - log p."""
    not_p, not_q = complement(log_p, PLAN), complement(log_q, PLAN)
    not_p = tl.where(not_p < eps, eps, not_p)
    not_q = tl.where(not_q < eps, eps, not_q)
    return tl.fma(not_p, tl.log(not_p) - tl.log(not_q), -(probability(log_p) * d))


@triton.jit
def is_finite(x):
    """Neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def within(x, numbers, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Between a pair of thresholds, inclusive; NaN is not."""
    lower = number(numbers, PLAN, named(prefix, "lower")).to(x.dtype)
    upper = number(numbers, PLAN, named(prefix, "upper")).to(x.dtype)
    return (x >= lower) & (x <= upper)


# --- comparing and storing ---


@triton.jit
def key_of(x):
    """An integer that orders like x, with NaN above everything: its maximum needs no order and loses no NaN."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        return tl.where(x != x, NAN_KEY_64, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))
    else:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x != x, NAN_KEY_32, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def of_key(key):
    """The float that `key_of` took."""
    if key.dtype == tl.int64:
        return (key ^ ((key >> 63) & 0x7FFFFFFFFFFFFFFF)).to(tl.float64, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def put(table, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, stride, where, x):
    """Store x into a column, if the plan has it."""
    if has(PLAN, TABLE, name):
        column = at(PLAN, TABLE, name)
        tl.store(table + (stride * column + where), x.to(table.dtype.element_ty))
