"""The apply phase: verdicts and sequence weights reach the tokens, and what all programs added becomes the statistics.

Token weights and most masks were written when the tokens were read. Here only rejected sequences are touched again,
unless the weight is the sequence's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import selected
from rollout_corr.kernels.correct.judge import REJECTED, WEIGHTLESS, late_bit
from rollout_corr.kernels.correct.measures import BINS, COPIES, weight_of
from rollout_corr.kernels.correct.peers import put_call, report_pack
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.slots import addresses, fetch, positions, stretch_of, write
from rollout_corr.kernels.tokens import (
    at,
    exponential,
    has,
    is_finite,
    key_of,
    limited,
    number,
    of_key,
    real,
    size,
    test,
    thresholds,
)


@triton.constexpr_function
def is_late(plan: Plan, i: int) -> bool:
    """Whether a criterion of sequences drops tokens."""
    return plan.tests[i].over == "sequence" and plan.tests[i].drop == "token"


@triton.jit
def add_up(column, rows, CHUNK: tl.constexpr):
    """The sum of a column of partial sums, always in the same order."""
    found = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, rows, CHUNK):
        each = start + tl.arange(0, CHUNK)
        found += tl.load(column + each, mask=each < rows, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def largest(column, rows, CHUNK: tl.constexpr):
    """The largest of a column; NaN if there is one."""
    found = tl.full((CHUNK,), float("-inf"), tl.float64)
    found = key_of(found)
    for start in range(0, rows, CHUNK):
        each = start + tl.arange(0, CHUNK)
        found = tl.maximum(found, key_of(tl.load(column + each, mask=each < rows, other=float("-inf"))))
    return of_key(tl.max(found, 0))


@triton.jit
def total_of(name: tl.constexpr, sequence_sums, judges, PLAN: tl.constexpr, CHUNK: tl.constexpr):
    """A finished sum of sequences."""
    return add_up(sequence_sums + tl.cast(judges, tl.int64) * at(PLAN, "sequence_sums", name), judges, CHUNK)


@triton.jit
def finish_call(sums, maxima, sequence_sums, tokens, sequences, judges, PLAN: tl.constexpr, CHUNK: tl.constexpr):
    """The statistics of the call as a whole: how large it is, and xtuner's packs."""
    put_call(sums, PLAN, "verl/rows", sequences)
    put_call(sums, PLAN, "xtuner/rows", sequences)
    put_call(sums, PLAN, "skyrl/rows", sequences)
    put_call(sums, PLAN, "skyrl/slots", tokens)
    if has(PLAN, "schemes", "xtuner"):
        n = total_of("tokens_measured", sequence_sums, judges, PLAN, CHUNK)
        train = total_of("xtuner/train", sequence_sums, judges, PLAN, CHUNK)
        rollout = total_of("xtuner/rollout", sequence_sums, judges, PLAN, CHUNK)
        difference = total_of("xtuner/log_difference", sequence_sums, judges, PLAN, CHUNK)
        report_pack(train, rollout, difference, n, sums, maxima, PLAN)


@triton.jit
def derived_maximum(k, token_maxima, numbers, readers, PLAN: tl.constexpr, CHUNK: tl.constexpr):
    """The k-th extremum of token weights, those with even k from above: a weight grows with D.

    One that becomes 0 outside its bounds does not: only its raw ratio stands here.
    """
    side = k % 2
    columns = token_maxima + tl.cast(at(PLAN, "token_maxima", "max_d") - PLAN.derived, tl.int64) * readers
    extremum = largest(columns + tl.cast(side, tl.int64) * readers, readers, CHUNK).to(real(PLAN))
    none = extremum == float("-inf")
    if PLAN.nonfinite == "propagate":
        # An infinite D is the extremum of one side alone; where there is no token both are -inf.
        other = largest(columns + tl.cast(1 - side, tl.int64) * readers, readers, CHUNK)
        none = none & (other == float("-inf"))
    d = tl.where(side == 0, extremum, -extremum)
    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e, excess, _ = exponential(log_ratio, PLAN)
    _, raw, bounded, _ = weight_of(d, log_ratio, e, excess, numbers, PLAN)
    found = tl.where(k < 2, raw, bounded)
    return tl.where(none, extremum, tl.where(side == 0, found, -found))


@triton.jit
def finish(k, token_sums, sequence_sums, histogram, token_maxima, sequence_maxima, statistics, numbers, tokens,
           sequences, readers, judges, PLAN: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The k-th of the statistics: sums of tokens, of sequences, histogram, of the call, maxima in the same order.

    What is the call's own, its maxima too, is left to the first of its sums.
    """
    of_sequences: tl.constexpr = size(PLAN, "token_sums")
    of_bins: tl.constexpr = of_sequences + size(PLAN, "sequence_sums")
    of_call: tl.constexpr = of_bins + (BINS if PLAN.full else 0)
    maxima: tl.constexpr = of_call + size(PLAN, "call_sums")
    last: tl.constexpr = maxima + size(PLAN, "token_maxima")
    row = k.to(tl.int64)
    if k < of_sequences:
        tl.store(statistics + row, add_up(token_sums + row * readers, readers, CHUNK))
    elif k < of_bins:
        tl.store(statistics + row, add_up(sequence_sums + (row - of_sequences) * judges, judges, CHUNK))
    elif k < of_call:
        if PLAN.full:
            copies = tl.load(histogram + tl.arange(0, COPIES) * BINS + (row - of_bins))
            tl.store(statistics + row, tl.sum(copies, 0).to(tl.float64))
    elif k < maxima:
        if k == of_call:
            finish_call(statistics + of_call, statistics + (last + size(PLAN, "sequence_maxima")), sequence_sums,
                        tokens, sequences, judges, PLAN, CHUNK)  # fmt: skip
    elif k < maxima + PLAN.derived:
        if PLAN.derived > 0:
            found = derived_maximum(k - maxima, token_maxima, thresholds(numbers, PLAN), readers, PLAN, CHUNK)
            tl.store(statistics + row, found)
    elif k < last:
        tl.store(statistics + row, largest(token_maxima + (row - maxima - PLAN.derived) * readers, readers, CHUNK))
    else:
        tl.store(statistics + row, largest(sequence_maxima + (row - last) * judges, judges, CHUNK))


@triton.jit
def zero(pointers, where):
    """Store 0 at some tokens."""
    tl.store(pointers, tl.zeros(where.shape, pointers.dtype.element_ty), mask=where)


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "width", "tiles", "train_row", "train_step", "rollout_row", "rollout_step",
        "mask_row", "mask_step", "token_programs", "readers", "judges",
    ]
)  # fmt: skip
def apply_kernel(
    train_logp, rollout_logp, mask, advantages, offsets, numbers, owners, states, sequence_weights, weights, mask_out,
    token_sums, sequence_sums, histogram, token_maxima, sequence_maxima, statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    token_programs: tl.int32, readers: tl.int32, judges: tl.int32,
    PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first programs own the same slots as those of `read`; each of the others finishes one statistic."""
    program = tl.program_id(0)
    if program >= token_programs:
        finish(program - token_programs, token_sums, sequence_sums, histogram, token_maxima, sequence_maxima,
               statistics, numbers, tokens, sequences, readers, judges, PLAN, CHUNK)  # fmt: skip
    elif PLAN.applies:
        slot = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        owner = slot
        if PLAN.packed:
            owner = tl.load(owners + slot).to(tl.int64)
        sequence, tile, start, end = stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN, TILE)
        known = (sequence >= 0) & (sequence < sequences)
        state = tl.load(states + sequence, mask=known, other=0)
        late: tl.constexpr = size(PLAN, "late_drops") > 0
        if PLAN.spreads or tl.max(state, 0) > 0:
            place = positions(0, TILE // VEC, VEC)
            inside = (place >= start) & (place < end)
            interior = tl.min(tl.min(end - start, 0)) == TILE
            rows = state[:, None, None]
            lost = inside & (rows < 0)
            valid = inside
            if PLAN.masked and ((PLAN.spreads and not PLAN.marks) or late):
                where = addresses(mask, sequence, tile, mask_row, mask_step, place, PLAN, TILE, UNIT, ALIGNED)
                valid = fetch(where, inside, interior) != 0
            if late:
                where = addresses(train_logp, sequence, tile, train_row, train_step, place, PLAN, TILE, UNIT, ALIGNED)
                d = fetch(where, inside, interior).to(real(PLAN))
                where = addresses(rollout_logp, sequence, tile, rollout_row, rollout_step, place, PLAN, TILE, UNIT,
                                  ALIGNED)  # fmt: skip
                d -= fetch(where, inside, interior).to(real(PLAN))
                measured = valid
                if PLAN.nonfinite == "reject":
                    measured = valid & is_finite(d)
                elif PLAN.nonfinite == "neutral":
                    d = tl.where(is_finite(d), d, 0.0)
                advantage = d
                if PLAN.advantages == "token":
                    where = addresses(advantages, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
                    advantage = fetch(where, inside, interior).to(real(PLAN))
                elif PLAN.advantages == "sequence":
                    each = tl.load(advantages + sequence, mask=known, other=0.0)
                    advantage = each.to(real(PLAN))[:, None, None] + tl.zeros_like(d)
                for i in tl.static_range(size(PLAN, "tests")):
                    if is_late(PLAN, i):
                        taken = (rows & late_bit(PLAN, i)) != 0
                        lost = lost | (taken & selected(d, advantage, measured, test(PLAN, i)))
            if PLAN.spreads:
                where = addresses(weights, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
                if PLAN.marks:
                    valid = fetch(where, inside, interior) != 0
                if PLAN.rejected != "mask":
                    valid = valid & (lost == 0)
                each = tl.load(sequence_weights + sequence, mask=known, other=0.0)
                spread = tl.where(valid, each[:, None, None], 0.0)
                write(where, spread, inside, interior)
            elif PLAN.zeroes_weights:
                where = addresses(weights, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
                gone = inside & ((rows & WEIGHTLESS) != 0)
                if PLAN.rejected != "mask":
                    gone = gone | lost
                zero(where, gone)
            if PLAN.zeroes_mask:
                where = addresses(mask_out, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
                zero(where, lost | (inside & ((rows & REJECTED) != 0)))
