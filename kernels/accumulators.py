"""Accumulators of the columns of a plan's tables: place in a walk along a tile, dtype, start, and word of counts."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Tables

# Counts of slots share words of 32 bits: a thread has at most 64 tokens of a tile, so each fits into 8 bits.
COUNTS_OF_WORD, BITS, LARGEST_COUNT = tl.constexpr(4), tl.constexpr(8), tl.constexpr(0xFF)


@triton.constexpr_function
def first_of(plan: Tables, table: str) -> int:
    """Find the accumulator of a table's first column; anything for a table without columns."""
    return next((place for place, (kept, _) in enumerate(plan.recorded) if kept == table), -1)


@triton.constexpr_function
def place_of(plan: Tables, table: str, name: str) -> int:
    """Find the accumulator of a column."""
    return plan.recorded.index((table, name))


@triton.constexpr_function
def is_of_slots(plan: Tables, place: int) -> bool:
    """Test whether an accumulator is of slots and not of the batch."""
    return plan.recorded[place][0] not in ("token_sums", "token_maxima")


@triton.constexpr_function
def is_measured(plan: Tables, place: int) -> bool:
    """Test for an accumulator of slots that is filled token by token; without a mask, bounds tell the valid ones."""
    table, name = plan.recorded[place]
    return is_of_slots(plan, place) and (plan.masked or (table, name) != ("counts", "valid"))


@triton.constexpr_function
def first_of_word(plan: Tables, place: int) -> int:
    """Find the accumulator that has the word of a count of slots; -1 of all else and of rows, which end with a tile."""
    if not plan.packed or plan.recorded[place][0] != "counts":
        return -1
    return place - (place - first_of(plan, "counts")) % COUNTS_OF_WORD.value


@triton.constexpr_function
def bit_of(plan: Tables, place: int) -> int:
    """Find the lowest bit of a count in its word."""
    return (place - first_of_word(plan, place)) * BITS.value


@triton.constexpr_function
def one_of(plan: Tables, place: int) -> int:
    """Give a count of one as it stands in its word."""
    return 1 << bit_of(plan, place)


@triton.constexpr_function
def is_added(plan: Tables, place: int) -> bool:
    """Test whether steps add to an accumulator of slots: in a word to the first."""
    in_word = first_of_word(plan, place) >= 0
    return first_of_word(plan, place) == place if in_word else is_measured(plan, place)


@triton.constexpr_function
def is_of_finite(plan: Tables, i: int) -> bool:
    """Test whether a count of slots is of non-finite tokens; the accumulator counts the others, which are at hand."""
    return plan.counts[i].rpartition("/")[2] == "nonfinite"


@triton.constexpr_function
def is_extremum(plan: Tables, place: int) -> bool:
    """Test whether an accumulator keeps the largest and not the sum."""
    return plan.recorded[place][0] in ("peaks", "token_maxima")


@triton.constexpr_function
def is_wide(plan: Tables, place: int) -> bool:
    """Test for a sum over tokens in float64: of values that differ little from each other and far from the centre."""
    return plan.recorded[place][1].rpartition("/")[2] in ("p", "q", "p2", "q2", "pq", "clamped", "clamped2")


@triton.constexpr_function
def kind_of(plan: Tables, place: int) -> tl.dtype:
    """Choose the dtype of an accumulator."""
    table = plan.recorded[place][0]
    if table == "counts":
        return tl.int32
    if table == "integers":
        return tl.int64
    extrema = table == "token_maxima" or (table == "peaks" and plan.recorded[place][1].startswith("label/"))
    if plan.nonfinite == "propagate" if extrema else table == "peaks":
        return tl.int64 if plan.double else tl.int32
    wide = plan.double or (table == "token_sums" and is_wide(plan, place))
    return tl.float64 if wide else tl.float32


@triton.constexpr_function
def start_of(plan: Tables, place: int) -> float:
    """Choose the value from which an accumulator starts."""
    if not is_extremum(plan, place):
        return 0
    kind = kind_of(plan, place)
    return float("-inf") if kind.is_floating() else -0x80000000 if kind == tl.int32 else -0x8000000000000000
