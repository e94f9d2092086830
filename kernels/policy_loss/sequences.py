"""The policy loss over sequences, and its end: counts and means of whole sequences, the value, the statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.gather import Gathered, exact, gathered, integer, plain, slot_tables, slots_of
from rollout_corr.kernels.partials import add, add_up, add_up_rows, largest
from rollout_corr.kernels.policy_loss.formulas import clipped
from rollout_corr.kernels.policy_loss.plan import LossPlan
from rollout_corr.kernels.slots import Extents
from rollout_corr.kernels.tokens import at, exponential, has, limited, number, real, size, thresholds


@triton.constexpr_function
def name_of(plan: LossPlan, table: str, i: int) -> str:
    """Name the i-th column of a table."""
    return getattr(plan, table)[i]


@triton.constexpr_function
def counted_as(plan: LossPlan) -> str:
    """Name the count that the sum is divided by."""
    unit = "tokens" if plan.reduction == "token_mean" else "sequences"
    return f"loss_{unit}" if plan.denominator == "kept" else f"loss_valid_{unit}"


@triton.jit
def pull_of(
    found: Gathered, level: tl.tensor, n: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Compute the derivative of a sequence's loss by each of its log-probs: [SEQUENCES]. GMPO's is the loss too."""
    many = tl.maximum(n, 1).to(tl.float64)
    if PLAN.surrogate == "GMPO":
        exponent = level
        if PLAN.weighted:
            exponent += exact(found, PLAN, "log_weight", True) / many
        return -exact(found, PLAN, "advantage", False) / many * tl.exp(exponent)
    else:
        mean = level.to(real(PLAN))
        clamp = number(numbers, PLAN, "clamp").to(mean.dtype)
        clamped = limited(mean, -clamp, clamp, PLAN)
        ratio, _, _ = exponential(clamped, PLAN)
        of_up = clipped(ratio, clamped, tl.full(mean.shape, 1.0, mean.dtype), numbers, PLAN)
        of_down = clipped(ratio, clamped, tl.full(mean.shape, -1.0, mean.dtype), numbers, PLAN)
        up = tl.where(of_up.held, 0.0, exact(found, PLAN, "up", False))
        down = tl.where(of_down.held, 0.0, exact(found, PLAN, "down", False))
        return tl.where(tl.abs(mean) <= clamp, -(up + down) * ratio.to(tl.float64) / many, 0.0)


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "slots"])
def sequences_kernel(
    numbers, offsets, counts, integers, floats, levels, pulls, inners, sequence_sums,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, slots: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Compute for SHAPE.sequences sequences the values that their tokens need, and their share of the statistics."""
    numbers = thresholds(numbers, PLAN)
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first, many = slots_of(offsets, owner, Extents(tokens, sequences, 0, tiles), PLAN, SHAPE.tile)
    known = (sequence >= 0) & (sequence < sequences)
    found = gathered(slot_tables(counts, integers, floats, None), first, many, slots, PLAN, SHAPE)
    valid = tl.where(known, integer(found, PLAN, "valid"), 0)
    n = tl.where(known, integer(found, PLAN, "counted"), 0)
    add(sequence_sums, PLAN, "loss_valid_tokens", valid)
    add(sequence_sums, PLAN, "loss_valid_sequences", valid > 0)
    add(sequence_sums, PLAN, "loss_tokens", n)
    add(sequence_sums, PLAN, "loss_sequences", n > 0)
    if PLAN.averages:
        length = n if PLAN.denominator == "kept" else valid
        inner = 1.0 / tl.maximum(length, 1).to(tl.float64)
        tl.store(inners + sequence, inner.to(inners.dtype.element_ty), mask=known)
        if has(PLAN, "floats", "total"):
            add(sequence_sums, PLAN, "total", tl.where(known, plain(found, PLAN, "total") * inner, 0.0))
    if PLAN.levels or PLAN.pulls:
        level = exact(found, PLAN, "level", True) / tl.maximum(n, 1).to(tl.float64)
        if PLAN.levels:
            tl.store(levels + sequence, level.to(levels.dtype.element_ty), mask=known)
        if PLAN.pulls:
            pull = pull_of(found, level, n, numbers, PLAN)
            tl.store(pulls + sequence, pull.to(pulls.dtype.element_ty), mask=known)


@triton.jit
def sum_named(
    name: tl.constexpr, token_sums: tl.tensor, sequence_sums: tl.tensor, token_programs: tl.tensor,
    sequence_programs: tl.tensor, PLAN: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Finish a sum of tokens or of sequences; 0 where the plan has none of this name."""
    if has(PLAN, "token_sums", name):
        return add_up(token_sums, at(PLAN, "token_sums", name), token_programs, CHUNK)
    elif has(PLAN, "sequence_sums", name):
        column = at(PLAN, "sequence_sums", name)
        return add_up_rows(sequence_sums, column, sequence_programs, PLAN, "sequence_sums", CHUNK)
    else:
        return tl.sum(tl.zeros((CHUNK,), tl.float64), 0)


@triton.jit(do_not_specialize=["token_programs", "sequence_programs"])
def finish_kernel(
    numbers, token_sums, sequence_sums, token_maxima, given, value, divisor, statistics,
    token_programs: tl.int32, sequence_programs: tl.int32,
    PLAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Finish the value and its divisor in the first program, one statistic in each other."""
    program = tl.program_id(0)
    bounds = thresholds(numbers, PLAN)
    if program == 0:
        total = sum_named("total", token_sums, sequence_sums, token_programs, sequence_programs, PLAN, CHUNK)
        if PLAN.denominator is None:
            count = tl.load(given).to(tl.float64)
        elif PLAN.reduction == "sum":
            count = tl.full((), 1.0, tl.float64)
        else:
            count = sum_named(counted_as(PLAN), token_sums, sequence_sums, token_programs, sequence_programs, PLAN,
                              CHUNK)  # fmt: skip
        count = tl.where(count == 0.0, 1.0, count) * number(bounds, PLAN, "max_length")
        tl.store(divisor, count)
        tl.store(value, (total / count).to(value.dtype.element_ty))
    for i in tl.static_range(size(PLAN, "sums")):
        if program == i + 1:
            found = sum_named(name_of(PLAN, "sums", i), token_sums, sequence_sums, token_programs, sequence_programs,
                              PLAN, CHUNK)  # fmt: skip
            tl.store(statistics + i, found)
    for i in tl.static_range(size(PLAN, "maxima")):
        if program == i + 1 + size(PLAN, "sums"):
            tl.store(statistics + (size(PLAN, "sums") + i), largest(token_maxima, i, token_programs, CHUNK))
