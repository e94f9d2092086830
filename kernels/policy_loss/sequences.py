"""The policy loss over sequences, and its end: counts and means of whole sequences, the value, the statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.apply import add_up, largest
from rollout_corr.kernels.correct.judge import add
from rollout_corr.kernels.gather import exact, integer, plain, slots_of, tables_of
from rollout_corr.kernels.policy_loss.formulas import clipped
from rollout_corr.kernels.policy_loss.plan import LossPlan
from rollout_corr.kernels.tokens import at, exponential, has, limited, number, real, size, thresholds


@triton.constexpr_function
def name_of(plan: LossPlan, table: str, i: int) -> str:
    """The i-th column of a table."""
    return getattr(plan, table)[i]


@triton.constexpr_function
def counted_as(plan: LossPlan) -> str:
    """What the sum is divided by, among the counts."""
    unit = "tokens" if plan.reduction == "token_mean" else "sequences"
    return f"loss_{unit}" if plan.denominator == "kept" else f"loss_valid_{unit}"


@triton.jit
def pull_of(found, level, n, numbers, PLAN: tl.constexpr):
    """GSPO: the derivative of a sequence's loss by each of its log-probs. GMPO: its loss, which is that too."""
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
        _, held_up, _, _, _ = clipped(ratio, clamped, tl.full(mean.shape, 1.0, mean.dtype), numbers, PLAN)
        _, held_down, _, _, _ = clipped(ratio, clamped, tl.full(mean.shape, -1.0, mean.dtype), numbers, PLAN)
        up = tl.where(held_up, 0.0, exact(found, PLAN, "up", False))
        down = tl.where(held_down, 0.0, exact(found, PLAN, "down", False))
        return tl.where(tl.abs(mean) <= clamp, -(up + down) * ratio.to(tl.float64) / many, 0.0)


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "slots"])
def sequences_kernel(
    numbers, offsets, counts, integers, floats, levels, pulls, inners, sums,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, slots: tl.int64,
    PLAN: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What SEQUENCES sequences are, from what their slots left behind, and what they add to the statistics."""
    numbers = thresholds(numbers, PLAN)
    owner = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    sequence, first, many = slots_of(offsets, owner, sequences, tokens, tiles, PLAN, TILE)
    real_row = (sequence >= 0) & (sequence < sequences)
    found = tables_of(counts, integers, floats, counts, first, many, slots, PLAN, SEQUENCES, CHUNK)
    valid = tl.where(real_row, integer(found, PLAN, "valid"), 0)
    n = tl.where(real_row, integer(found, PLAN, "counted"), 0)
    add(sums, PLAN, "loss_valid_tokens", valid)
    add(sums, PLAN, "loss_valid_sequences", valid > 0)
    add(sums, PLAN, "loss_tokens", n)
    add(sums, PLAN, "loss_sequences", n > 0)
    if PLAN.averages:
        length = n if PLAN.denominator == "kept" else valid
        inner = 1.0 / tl.maximum(length, 1).to(tl.float64)
        tl.store(inners + sequence, inner.to(inners.dtype.element_ty), mask=real_row)
        if has(PLAN, "floats", "total"):
            add(sums, PLAN, "total", tl.where(real_row, plain(found, PLAN, "total") * inner, 0.0))
    if PLAN.levels or PLAN.pulls:
        level = exact(found, PLAN, "level", True) / tl.maximum(n, 1).to(tl.float64)
        if PLAN.levels:
            tl.store(levels + sequence, level.to(levels.dtype.element_ty), mask=real_row)
        if PLAN.pulls:
            pull = pull_of(found, level, n, numbers, PLAN)
            tl.store(pulls + sequence, pull.to(pulls.dtype.element_ty), mask=real_row)


@triton.jit
def sum_named(name: tl.constexpr, token_sums, sequence_sums, readers, judges, PLAN: tl.constexpr, CHUNK: tl.constexpr):
    """A finished sum of tokens or of sequences; 0 where nothing of this name can be."""
    if has(PLAN, "token_sums", name):
        return add_up(token_sums + tl.cast(readers, tl.int64) * at(PLAN, "token_sums", name), readers, CHUNK)
    elif has(PLAN, "sequence_sums", name):
        return add_up(sequence_sums + tl.cast(judges, tl.int64) * at(PLAN, "sequence_sums", name), judges, CHUNK)
    else:
        return tl.sum(tl.zeros((CHUNK,), tl.float64), 0)


@triton.jit(do_not_specialize=["readers", "judges"])
def finish_kernel(
    numbers, token_sums, sequence_sums, token_maxima, given, value, divisor, statistics,
    readers: tl.int32, judges: tl.int32,
    PLAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first program makes the value and its divisor, each of the others one statistic."""
    program = tl.program_id(0)
    bounds = thresholds(numbers, PLAN)
    if program == 0:
        total = sum_named("total", token_sums, sequence_sums, readers, judges, PLAN, CHUNK)
        if PLAN.denominator is None:
            count = tl.load(given).to(tl.float64)
        elif PLAN.reduction == "sum":
            count = tl.full((), 1.0, tl.float64)
        else:
            count = sum_named(counted_as(PLAN), token_sums, sequence_sums, readers, judges, PLAN, CHUNK)
        count = tl.where(count == 0.0, 1.0, count) * number(bounds, PLAN, "max_length")
        tl.store(divisor, count)
        tl.store(value, (total / count).to(value.dtype.element_ty))
    for i in tl.static_range(size(PLAN, "sums")):
        if program == i + 1:
            found = sum_named(name_of(PLAN, "sums", i), token_sums, sequence_sums, readers, judges, PLAN, CHUNK)
            tl.store(statistics + i, found)
    for i in tl.static_range(size(PLAN, "maxima")):
        if program == i + 1 + size(PLAN, "sums"):
            found = largest(token_maxima + tl.cast(readers, tl.int64) * i, readers, CHUNK)
            tl.store(statistics + (size(PLAN, "sums") + i), found)
