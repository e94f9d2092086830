"""Statistics of tokens, of sequences and of their weights, as every Spec reports them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..gather import Units, UnitTotals, exact, plain
from ..partials import Partials, add, put_extrema
from ..sums import counts_probabilities, record, record_extrema
from ..tables import named, number, of_criterion
from ..tokens import (
    LARGEST_D,
    LARGEST_STATISTIC,
    constant,
    expm1,
    exponential,
    is_finite,
    limited,
    perplexity,
    probability,
    within,
)
from .steps import Pair

# Programs add their histograms to this many copies, so that they do not all wait for the same few bins.
COPIES = tl.constexpr(16)
BINS = tl.constexpr(512)
FIRST_BIN = tl.constexpr((127 - 24) << 3)
# The ends of what has bins of its own: the first bin takes what is smaller, the last what is larger.
SMALLEST_BINNED, LARGEST_BINNED = tl.constexpr(2.0**-24), tl.constexpr(240.0)


class Ratio(NamedTuple):
    """The ratio of a token, without cancellation where it is next to 1: [PARTS, LANES, VEC] each."""

    log_ratio: tl.tensor  # D, clamped
    e: tl.tensor  # e^D
    excess: tl.tensor  # e^D - 1
    k3: tl.tensor  # e^D - 1 - D


class TokenWeights(NamedTuple):
    """The weights of tokens, and 1 less without cancellation next to 1: [PARTS, LANES, VEC] each."""

    log_ratio: tl.tensor
    excess: tl.tensor  # ratio - 1
    ratio: tl.tensor
    weight_excess: tl.tensor  # weight - 1
    weight: tl.tensor


class SequenceWeights(NamedTuple):
    """The weights of sequences, at token level the means over their tokens: [SEQUENCES] float64 each."""

    log_ratio: tl.tensor
    excess: tl.tensor  # ratio - 1
    ratio: tl.tensor
    weight_excess: tl.tensor  # weight - 1
    weight: tl.tensor


# --- tokens ---


@triton.jit
def measure_tokens(found: tl.tuple, pair: Pair, ratio: Ratio, clamp, PLAN: tl.constexpr) -> tl.tuple:
    """Record the statistics of D and of its exponential."""
    d, excess = pair.d, ratio.excess
    saturated = limited(d, -LARGEST_D, LARGEST_D, PLAN)
    found = record(found, PLAN, "token_sums", "abs_d", tl.abs(saturated))
    found = record(found, PLAN, "token_sums", "d2", saturated * saturated)
    found = record(found, PLAN, "token_sums", "k3", ratio.k3)
    # Of slots too, where turns are distinguished by their place.
    found = record(found, PLAN, "floats", "abs_d", tl.abs(saturated))
    found = record(found, PLAN, "floats", "k3", ratio.k3)
    found = record(found, PLAN, "token_sums", "ratio", excess)
    found = record(found, PLAN, "token_sums", "ratio2", excess * excess)
    # NaN is not beyond the clamp.
    clamped = tl.where(tl.abs(d) > clamp, 1.0, 0.0).to(d.dtype)
    found = record(found, PLAN, "token_sums", "tokens_clamped", clamped)
    return record_extrema(found, PLAN, "-min_d", "max_d", d, pair.measured)


@triton.jit
def measure_ages(found: tl.tuple, age, valid, PLAN: tl.constexpr) -> tl.tuple:
    """Record the statistics of ages, those of tokens that are not measured too."""
    counted = tl.where(valid, age, 0.0)
    found = record(found, PLAN, "token_sums", "age", counted.to(tl.float64))
    found = record(found, PLAN, "token_sums", "tokens_stale", tl.where(counted > 0.0, 1.0, 0.0).to(age.dtype))
    found = record(found, PLAN, "token_sums", "tokens_newer", tl.where(counted < 0.0, 1.0, 0.0).to(age.dtype))
    return record_extrema(found, PLAN, "-min_age", "max_age", age, valid)


@triton.jit
def measure_probabilities(found: tl.tuple, pair: Pair, PLAN: tl.constexpr) -> tl.tuple:
    """Record the statistics of probabilities; plain torch takes the others of detail="full", but for the histogram."""
    measured = pair.measured
    # 0 at tokens that are not measured, whose log-probs are 0.
    p, q = probability(pair.base), probability(pair.logp)
    if counts_probabilities(PLAN):
        p, q = less_one(p), less_one(q)
        found = record(found, PLAN, "token_maxima", "max_abs_prob_diff", tl.abs(p - q))
    else:
        p, q = p - 1.0, q - 1.0
        found = record_extrema(found, PLAN, "", "max_abs_prob_diff", tl.abs(p - q), measured)
    found = record(found, PLAN, "token_sums", "abs_prob_diff", tl.abs(p - q))
    wide: tl.constexpr = tl.int64 if counts_probabilities(PLAN) else tl.float64
    p, q = p.to(wide), q.to(wide)
    found = record(found, PLAN, "token_sums", "p", p)
    found = record(found, PLAN, "token_sums", "q", q)
    found = record(found, PLAN, "token_sums", "p2", p * p)
    found = record(found, PLAN, "token_sums", "q2", q * q)
    return record(found, PLAN, "token_sums", "pq", p * q)


@triton.jit
def less_one(p):
    """Compute p - 1, rounded as float32 is, in units of 2^-24."""
    return tl.fma(p, constant(p, 16777216.0), constant(p, -16777216.0)).to(tl.int32)


@triton.jit
def count_bins(p_histogram, d, counted, PLAN: tl.constexpr) -> None:
    """Count the D of each bin, in one of the copies of the histogram."""
    add_each(p_histogram + (tl.program_id(0) % COPIES) * BINS, bin_of(d, PLAN), counted)


@triton.jit
def bin_of(x, PLAN: tl.constexpr):
    """Return the bin of each value, 0 to 511: see `metrics/histogram.py`."""
    x = limited(x, -LARGEST_D, LARGEST_D, PLAN).to(tl.float32)
    size = tl.minimum(tl.maximum(tl.abs(x), SMALLEST_BINNED), LARGEST_BINNED).to(tl.int32, bitcast=True)
    # The sign moves down to the bit above those that the bins of one sign have.
    return (size + ((x.to(tl.int32, bitcast=True) >> 3) & 0x10000000) - (FIRST_BIN << 20)) >> 20


@triton.jit
def count_weights(p_histogram, weights: SequenceWeights, counted, PLAN: tl.constexpr) -> None:
    """Count the logarithms of weights of turns or sequences, in the bins behind those of tokens."""
    if PLAN.bins_weights:
        one = tl.full(counted.shape, 1, tl.int64)
        place = COPIES * BINS + bin_of(weights.log_ratio, PLAN)
        tl.atomic_add(p_histogram + place, one, mask=counted & is_finite(weights.log_ratio), sem="relaxed")


@triton.jit
def add_each(p_table, place, among) -> None:
    """Add 1 to the entries of a table at places, for some tokens."""
    # One of a thread's neighbors at a time: all at once would be moved to other threads, through shared memory.
    for i in tl.static_range(place.shape[2]):
        here = tl.arange(0, place.shape[2])[None, None, :] == i
        place_of_one = tl.sum(tl.where(here, place, 0), 2)
        counted = tl.reduce(here & among, 2, either_of)
        one = tl.full(place_of_one.shape, 1, tl.int64)
        tl.atomic_add(p_table + place_of_one, one, mask=counted, sem="relaxed")


@triton.jit
def either_of(x, y):
    """Compute x or y."""
    return x | y


@triton.jit
def bounded_by(x, lower, upper, PLAN: tl.constexpr):
    """Clamp x to the bounds that a weight has."""
    if PLAN.has_lower:
        lower = lower.to(x.dtype)
        x = tl.where(x < lower, lower, x) if PLAN.nonfinite == "propagate" else tl.maximum(x, lower)
    if PLAN.has_upper:
        upper = upper.to(x.dtype)
        x = tl.where(x > upper, upper, x) if PLAN.nonfinite == "propagate" else tl.minimum(x, upper)
    return x


@triton.jit
def bound(log_ratio, excess, ratio, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Apply the bounds of a weight to ratio - 1 and to the ratio itself."""
    if PLAN.bounded:
        if PLAN.outside == "zero":
            inside = within(log_ratio, numbers, PLAN, "log")
            excess, ratio = tl.where(inside, excess, -1.0), tl.where(inside, ratio, 0.0)
        else:
            lower, upper = number(numbers, PLAN, "lower"), number(numbers, PLAN, "upper")
            excess = bounded_by(excess, lower - 1.0, upper - 1.0, PLAN)
            ratio = bounded_by(ratio, lower, upper, PLAN)
    return excess, ratio


@triton.jit
def weight_of(ratio: Ratio, numbers: tl.tuple, PLAN: tl.constexpr) -> TokenWeights:
    """Compute the weights of tokens."""
    log_ratio, e, excess = ratio.log_ratio, ratio.e, ratio.excess
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(log_ratio.dtype)
        log_ratio = limited(log_ratio, -most, most, PLAN)
        e, excess, _ = exponential(log_ratio)
    weight_excess, weight = bound(log_ratio, excess, e, numbers, PLAN)
    return TokenWeights(log_ratio, excess, e, weight_excess, weight)


@triton.jit
def measure_weights(found: tl.tuple, measured, weights: TokenWeights, numbers: tl.tuple,
                    PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record the statistics of token weights."""
    log_ratio, excess = weights.log_ratio, weights.excess
    ratio, weight = tl.where(measured, weights.ratio, 0.0), tl.where(measured, weights.weight, 0.0)
    weight_excess = tl.where(measured, weights.weight_excess, 0.0)
    found = record(found, PLAN, "floats", "ratio_of_tokens", ratio)
    found = record(found, PLAN, "floats", "weight_of_tokens", weight)
    found = record(found, PLAN, "token_sums", "raw2", ratio * ratio)
    # Without a token clamp these are the squares of e^D - 1, which every Spec has.
    found = record(found, PLAN, "token_sums", "raw_around_one2", excess * excess)
    found = record(found, PLAN, "token_sums", "weight2", weight * weight)
    found = record(found, PLAN, "token_sums", "weight_around_one2", weight_excess * weight_excess)
    # Zeros of no shape: a tensor of them would be moved between threads to be added up.
    above, below = tl.full((), 0.0, excess.dtype), tl.full((), 0.0, excess.dtype)
    if PLAN.has_upper:
        inside = log_ratio <= number(numbers, PLAN, "log/upper").to(excess.dtype)
        above = tl.where(measured & (inside == 0), 1.0, 0.0).to(excess.dtype)
    if PLAN.has_lower:
        inside = log_ratio >= number(numbers, PLAN, "log/lower").to(excess.dtype)
        below = tl.where(measured & (inside == 0), 1.0, 0.0).to(excess.dtype)
    found = record(found, PLAN, "token_sums", "tokens_above", above)
    found = record(found, PLAN, "token_sums", "tokens_below", below)
    if PLAN.outside == "zero":
        found = record_extrema(found, PLAN, "-min_weight", "max_weight", weights.weight, measured)
    return found


@triton.jit
def beyond_bounds(log_ratio, among, numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Select the units above and below the bounds of the weight, as far as there are bounds."""
    above, below = tl.zeros_like(among), tl.zeros_like(among)
    if PLAN.has_upper:
        above = among & ((log_ratio <= number(numbers, PLAN, "log/upper")) == 0)
    if PLAN.has_lower:
        below = among & ((log_ratio >= number(numbers, PLAN, "log/lower")) == 0)
    return above, below


# What statistics add up of the weights of units: each of `weight_terms` and its squares, or the squares alone.
WEIGHT_TERMS = ("raw", "weight", "raw_around_one", "weight_around_one")
ADDED_TERMS = tl.constexpr(2)


@triton.constexpr_function
def term_name(unit: str, i: int, power: str = "") -> str:
    """Name the sum of a term of the weights of units, or of its squares."""
    return f"{unit}{WEIGHT_TERMS[i]}{power}"


@triton.jit
def weight_terms(weights: SequenceWeights, some) -> tl.tuple:
    """Return the ratio, the weight, ratio - 1 and weight - 1, each 0 where no token is measured."""
    excess, weight_excess = tl.where(some, weights.excess, 0.0), tl.where(some, weights.weight_excess, 0.0)
    return tl.where(some, weights.ratio, 0.0), tl.where(some, weights.weight, 0.0), excess, weight_excess


# --- sequences ---


@triton.jit
def measure_sequences(units: Units, out: Partials, numbers: tl.tuple, PLAN: tl.constexpr) -> None:
    """Report the perplexities and the sums of D of sequences."""
    sum_d, some, each = units.sum_d, units.n > 0, tl.maximum(units.n, 1).to(tl.float64)
    train, rollout, gap = -units.train / each, -units.rollout / each, -sum_d / each
    clamp = number(numbers, PLAN, "clamp")
    size_of_sum = tl.abs(sum_d)
    chi2 = expm1(2.0 * limited(sum_d, -clamp, clamp, PLAN))
    add(out.sums, PLAN, "d", tl.where(some, sum_d, 0.0))
    add(out.sums, PLAN, "train_ppl", tl.where(some, perplexity(train), 0.0))
    add(out.sums, PLAN, "rollout_ppl", tl.where(some, perplexity(rollout), 0.0))
    add(out.sums, PLAN, "train_log_ppl", tl.where(some, train, 0.0))
    add(out.sums, PLAN, "rollout_log_ppl", tl.where(some, rollout, 0.0))
    add(out.sums, PLAN, "log_ppl_diff", tl.where(some, gap, 0.0))
    add(out.sums, PLAN, "log_ppl_abs_diff", tl.where(some, tl.abs(gap), 0.0))
    add(out.sums, PLAN, "ppl_ratio", tl.where(some, perplexity(gap), 0.0))
    add(out.sums, PLAN, "chi2_sequence", tl.where(some, chi2, 0.0))
    add(out.sums, PLAN, "abs_sum_d", tl.where(some, size_of_sum, 0.0))
    add(out.sums, PLAN, "sequences_clamped", some & (size_of_sum > clamp))
    put_extrema(out.maxima, PLAN, "-min_log_ppl_diff", "max_log_ppl_diff", gap, some)
    put_extrema(out.maxima, PLAN, "", "max_abs_sum_d", size_of_sum, some)


@triton.jit
def counted_of(value, among, numbers: tl.tuple, CRITERION: tl.constexpr,
               PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return values as statistics take them (a ratio less 1), which of them count, and what is added up."""
    if CRITERION.stat == "ratio":
        clamp = number(numbers, PLAN, "clamp")
        value = expm1(limited(value, -clamp, clamp, PLAN))
    if CRITERION.may_be_nan:
        among = among & is_finite(value)
    return value, among, limited(tl.where(among, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)


@triton.jit
def measure_criterion(value, among, out: Partials, numbers: tl.tuple, CRITERION: tl.constexpr,
                      PLAN: tl.constexpr) -> None:  # fmt: skip
    """Report a criterion over sequences: the units that it has a value of, and these values."""
    value, among, counted = counted_of(value, among, numbers, CRITERION, PLAN)
    add(out.sums, PLAN, named(CRITERION.index, "units"), among)
    add(out.sums, PLAN, named(CRITERION.index, "value"), counted)
    add(out.sums, PLAN, named(CRITERION.index, "value2"), counted * counted)
    put_extrema(
        out.maxima, PLAN, of_criterion("-min", CRITERION.index), of_criterion("max", CRITERION.index), value, among
    )


@triton.jit
def mean_weights(ratio, weight, units: Units) -> SequenceWeights:
    """Compute the mean weights of sequences from sums over tokens; 1 where there is none."""
    each, some = tl.maximum(units.n, 1).to(tl.float64), units.n > 0
    ratio, weight = tl.where(some, ratio / each, 1.0), tl.where(some, weight / each, 1.0)
    return SequenceWeights(tl.log(ratio), ratio - 1.0, ratio, weight - 1.0, weight)


@triton.jit
def weigh_sequences(totals: UnitTotals, units: Units, numbers: tl.tuple, PLAN: tl.constexpr) -> SequenceWeights:
    """Compute the weight of every unit; of weights of tokens, the mean of its tokens'."""
    n_among = units.n_among
    if PLAN.weighs == "token":
        return mean_weights(plain(totals, PLAN, "ratio_of_tokens"), plain(totals, PLAN, "weight_of_tokens"), units)
    else:
        if PLAN.token_clamp:
            log_ratio = exact(totals, PLAN, "weight", True)
        elif PLAN.kept:
            log_ratio = exact(totals, PLAN, "d_kept", True)
        else:
            log_ratio = units.sum_d
        if PLAN.kept:
            log_ratio = tl.where(n_among > 0, log_ratio, 0.0)
        if PLAN.geometric:
            log_ratio = log_ratio / tl.maximum(n_among, 1).to(tl.float64)
        clamp = number(numbers, PLAN, "clamp")
        log_ratio = limited(log_ratio, -clamp, clamp, PLAN)
        excess, ratio = expm1(log_ratio), tl.exp(log_ratio)
        weight_excess, weight = bound(log_ratio, excess, ratio, numbers, PLAN)
        return SequenceWeights(log_ratio, excess, ratio, weight_excess, weight)


@triton.jit
def measure_sequence_weights(units: Units, weights: SequenceWeights, out: Partials, numbers: tl.tuple,
                             PLAN: tl.constexpr) -> None:  # fmt: skip
    """Report the weights of sequences, of turns by turns, and the sums of token weights; `read` reports their rest."""
    n, some = units.n, units.n > 0
    above, below = beyond_bounds(weights.log_ratio, some, numbers, PLAN)
    tokens, terms = tl.where(some, n, 0).to(tl.float64), weight_terms(weights, some)
    by_sequences: tl.constexpr = PLAN.weighs != "token" and not PLAN.weighs_turns
    for i in tl.static_range(len(terms)):
        if i < ADDED_TERMS:
            add(out.sums, PLAN, term_name("sequence_", i), terms[i])
            add(out.sums, PLAN, term_name("", i), tokens * terms[i])
        add(out.sums, PLAN, term_name("sequence_", i, "2"), terms[i] * terms[i])
        if by_sequences:
            add(out.sums, PLAN, term_name("", i, "2"), tokens * terms[i] * terms[i])
    add(out.sums, PLAN, "sequences_above", above)
    add(out.sums, PLAN, "sequences_below", below)
    put_extrema(out.maxima, PLAN, "-min_sequence_raw", "max_sequence_raw", weights.ratio, some)
    put_extrema(out.maxima, PLAN, "-min_sequence_weight", "max_sequence_weight", weights.weight, some)
    if by_sequences:
        add(out.sums, PLAN, "tokens_above", tl.where(above, n, 0))
        add(out.sums, PLAN, "tokens_below", tl.where(below, n, 0))
        put_extrema(out.maxima, PLAN, "-min_raw", "max_raw", weights.ratio, some)
        put_extrema(out.maxima, PLAN, "-min_weight", "max_weight", weights.weight, some)
