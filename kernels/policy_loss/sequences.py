"""The policy loss over sequences, and its end: counts and means of whole sequences, the value, the statistics.

A launch behind the one pass over tokens, which reads the slots: of `loss_ppo_packed`, 4,096 tokens a sequence, 0.06
bytes and 0.3 PTX instructions a token, by `lab.ptx.counts`. Where there are two passes the second does it: each of its
programs finds what the sequences of its tile need (`prepare_sequences`), and the last one finishes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gather import (
    SlotTables,
    UnitTotals,
    exact,
    gather_slots,
    integer,
    owner_of_turn,
    plain,
    slot_tables,
    slots_between,
    slots_of,
    turns_of,
)
from ..partials import (
    Partials,
    add,
    add_up_part,
    copy,
    entry,
    is_last,
    largest_of_rows,
    name_of,
    put_all,
    rows_left,
    sum_of_rows,
)
from ..tiles import Extents, Span, edge, launched
from ..tokens import at, exponential, has, limited, number, real, size, thresholds
from .formulas import clipped
from .plan import LossPlan


@triton.constexpr_function
def counted_as(plan: LossPlan) -> str:
    """Name the count that the sum is divided by."""
    unit = "tokens" if plan.mean == "token" else "sequences"
    return f"loss_{unit}" if plan.over == "kept" else f"loss_valid_{unit}"


@triton.jit
def pull_of(totals: UnitTotals, level, n, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute the derivative of a sequence's loss by each of its log-probs: [SEQUENCES]. GMPO's is the loss too."""
    length = tl.maximum(n, 1).to(tl.float64)
    if PLAN.surrogate == "GMPO":
        exponent = level
        if PLAN.weighted:
            exponent += exact(totals, PLAN, "log_weight", True) / length
        return -exact(totals, PLAN, "advantage", False) / length * tl.exp(exponent)
    else:
        mean = level.to(real(PLAN))
        clamp = number(numbers, PLAN, "clamp").to(mean.dtype)
        clamped = limited(mean, -clamp, clamp, PLAN)
        ratio, _, _ = exponential(clamped, PLAN)
        of_up = clipped(ratio, clamped, tl.full(mean.shape, 1.0, mean.dtype), numbers, PLAN)
        of_down = clipped(ratio, clamped, tl.full(mean.shape, -1.0, mean.dtype), numbers, PLAN)
        up = tl.where(of_up.held, 0.0, exact(totals, PLAN, "up", False))
        down = tl.where(of_down.held, 0.0, exact(totals, PLAN, "down", False))
        return tl.where(tl.abs(mean) <= clamp, -(up + down) * ratio.to(tl.float64) / length, 0.0)


@triton.jit
def inner_of(valid, n, PLAN: tl.constexpr):
    """Compute the factor of each sequence's loss where that is divided by its own length: [SEQUENCES] float64."""
    length = n if PLAN.over == "kept" else valid
    return 1.0 / tl.maximum(length, 1).to(tl.float64)


@triton.jit
def store_sequences(
    tables: SlotTables, inners, sums, offsets, extents: Extents, slots, PLAN: tl.constexpr, SHAPE: tl.constexpr
) -> None:
    """Compute for SHAPE.sequences sequences the factors of their gradients, and their share of the statistics."""
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first_slot, slot_count = slots_of(offsets, owner, extents, PLAN)
    known = (sequence >= 0) & (sequence < extents.sequences)
    totals = gather_slots(tables, first_slot, slot_count, slots, PLAN, SHAPE)
    valid = tl.where(known, integer(totals, PLAN, "valid"), 0)
    n = tl.where(known, integer(totals, PLAN, "counted"), 0)
    add(sums, PLAN, "loss_valid_tokens", valid)
    add(sums, PLAN, "loss_tokens", n)
    add(sums, PLAN, "loss_valid_sequences", valid > 0)
    add(sums, PLAN, "loss_sequences", n > 0)
    if PLAN.averages:
        inner = inner_of(valid, n, PLAN)
        tl.store(inners + sequence, inner.to(inners.dtype.element_ty), mask=known)
        add(sums, PLAN, "total", tl.where(known, plain(totals, PLAN, "total") * inner, 0.0))


@triton.jit
def prepare_sequences(
    tables: SlotTables, levels, pulls, inners, token_sums, offsets, within, span: Span, extents: Extents, sequences,
    slots, numbers: tl.tuple, PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute what the tokens of this tile need of their sequences, or turns, from the slots that the first pass left.

    It is stored at the slots of the tile. The tile counts the tokens in it, and the sequences that end in it.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    last = tl.maximum(span.owner, span.last)
    sums: tl.tuple = ()
    for _ in tl.static_range(size(PLAN, "sequence_sums")):
        sums = sums + (tl.full((SHAPE.sequences,), 0, tl.int32),)
    for first in range(span.owner, last + 1, SHAPE.sequences):
        owner = first + tl.arange(0, SHAPE.sequences)
        slot = program + owner * PLAN.packed
        sequence, first_slot, slot_count = slots_of(offsets, owner, extents, PLAN)
        known = (owner <= last) & (sequence >= 0) & (sequence < extents.sequences)
        totals = gather_slots(tables, first_slot, tl.where(known, slot_count, 0), slots, PLAN, SHAPE)
        n = integer(totals, PLAN, "counted")
        level = exact(totals, PLAN, "level", True)
        if PLAN.sequence_value != "total":
            level = level / tl.maximum(n, 1).to(tl.float64)
        if PLAN.levels:
            tl.store(levels + slot, level.to(levels.dtype.element_ty), mask=known)
        if PLAN.pulls:
            pull = pull_of(totals, level, n, numbers, PLAN)
            tl.store(pulls + slot, pull.to(pulls.dtype.element_ty), mask=known)
        whole = known
        if PLAN.turns:
            # From here on the sequence of each turn.
            owner = owner_of_turn(within, owner, sequences)
            low, high = turns_of(within, owner, sequences, extents.sequences)
            first_slot, slot_count = slots_between(offsets, low, high, extents)
            totals = gather_slots(tables, first_slot, tl.where(known, slot_count, 0), slots, PLAN, SHAPE)
            n, whole = integer(totals, PLAN, "counted"), known & (owner > 0) & (owner <= sequences)
        valid = integer(totals, PLAN, "valid")
        if PLAN.averages:
            tl.store(inners + slot, inner_of(valid, n, PLAN).to(inners.dtype.element_ty), mask=known)
        ends = whole & (slot == first_slot + slot_count - 1)
        valid_here = tl.load(tables.counts + slot, mask=known, other=0)
        n_here = tl.load(tables.counts + slots + slot, mask=known, other=0)
        here = (valid_here, ends & (valid > 0), n_here, ends & (n > 0))
        more: tl.tuple = ()
        for i in tl.static_range(size(PLAN, "sequence_sums")):
            x = here[at(PLAN, "of_sequences", name_of(PLAN, "sequence_sums", i))]
            more = more + (sums[i] + x.to(tl.int32),)
        sums = more
    for i in tl.static_range(size(PLAN, "sequence_sums")):
        column = at(PLAN, "token_sums", name_of(PLAN, "sequence_sums", i))
        tl.store(token_sums + (program + column * programs), tl.sum(sums[i], 0).to(tl.float64))


@triton.jit
def sum_named(name: tl.constexpr, of_tokens, of_sequences, PLAN: tl.constexpr):
    """Return a sum of tokens or of sequences; 0 where the plan has none of this name."""
    if has(PLAN, "token_sums", name):
        return entry(of_tokens, at(PLAN, "token_sums", name))
    elif has(PLAN, "sequence_sums", name):
        return entry(of_sequences, at(PLAN, "sequence_sums", name))
    else:
        return tl.full((), 0.0, tl.float64)


@triton.jit
def assumed_divisor(given, offsets, extents: Extents, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute what the gradient is written over, float64: the divisor itself, unless tokens or rows do not count."""
    count = tl.full((), 1.0, tl.float64)
    if PLAN.assumes == "given":
        count = tl.load(given).to(tl.float64)
    elif PLAN.assumes == "rows":
        count = extents.sequences.to(tl.float64)
    elif PLAN.assumes == "tokens":
        if PLAN.packed:
            one = extents.sequences * 0 + 1
            begin = edge(offsets, one, extents.sequences, extents.tokens)
            count = (edge(offsets, one + extents.sequences, extents.sequences, extents.tokens) - begin).to(tl.float64)
        else:
            count = (extents.sequences * extents.width).to(tl.float64)
    if PLAN.assumes is not None:
        count = tl.where(count > 0.0, count, 1.0) * number(numbers, PLAN, "max_length")
    return count


@triton.jit
def put_value(
    value, divisor, rest, total, counted, given, offsets, extents: Extents, numbers: tl.tuple, PLAN: tl.constexpr
) -> None:
    """Divide the sum of the loss, by what is counted, or given: store the value, its divisor, and `rest`."""
    count = counted
    if PLAN.over is None:
        count = tl.load(given).to(tl.float64)
    elif PLAN.mean == "sum":
        count = tl.full((), 1.0, tl.float64)
    elif PLAN.over == "rows":
        count = extents.sequences.to(tl.float64)
    count = tl.where(count == 0.0, 1.0, count) * number(numbers, PLAN, "max_length")
    tl.store(divisor, count)
    tl.store(rest, count / assumed_divisor(given, offsets, extents, numbers, PLAN))
    tl.store(value, (total / count).to(value.dtype.element_ty))


@triton.jit
def finish(
    sequence_sums, part_sums, part_maxima, given, value, divisor, rest, before, statistics, sums_before, maxima_before,
    sequence_programs, parts, offsets, extents: Extents, numbers: tl.tuple, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the rows of all programs, in the last one: the value, its divisor, the statistics behind those before.

    `rest` is what the gradient is still to be divided by: the divisor over the assumed one.
    """
    of_tokens = sum_of_rows(part_sums, parts, 1, size(PLAN, "token_sums"))
    of_sequences = of_tokens
    if PLAN.adds_up:
        rows, apart = rows_left(sequence_programs)
        of_sequences = sum_of_rows(sequence_sums, rows, apart, size(PLAN, "sequence_sums"))
    # Of its own, because Triton 3.5 and 3.6 pass on the text of an attribute only as a constant.
    name: tl.constexpr = PLAN.total
    total = sum_named(name, of_tokens, of_sequences, PLAN)
    counted = sum_named(counted_as(PLAN), of_tokens, of_sequences, PLAN)
    put_value(value, divisor, rest, total, counted, given, offsets, extents, numbers, PLAN)
    copy(before, statistics, sums_before)
    statistics += sums_before
    for i in tl.static_range(size(PLAN, "sums")):
        tl.store(statistics + i, sum_named(name_of(PLAN, "sums", i), of_tokens, of_sequences, PLAN))
    statistics += size(PLAN, "sums")
    copy(before + sums_before, statistics, maxima_before)
    found = largest_of_rows(part_maxima, parts, 1, size(PLAN, "maxima"))
    put_all(statistics + maxima_before, found, size(PLAN, "maxima"))


@launched
def sequences_kernel(
    numbers, offsets, counts, floats, inners, sequence_sums, token_sums, token_maxima, part_sums, part_maxima, counter,
    given, value, divisor, rest, before, statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, parts: tl.int32, part: tl.int32, sums_before: tl.int32,
    maxima_before: tl.int32,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Pass over sequences, add up parts of what programs over tokens have left, and finish in the last program."""
    numbers = thresholds(numbers, PLAN)
    program, extents = tl.program_id(0), Extents(tokens, sequences, width, tiles, tile_bits)
    if program < sequence_programs:
        store_sequences(slot_tables(counts, None, floats, None), inners, sequence_sums, offsets, extents, slots, PLAN,
                        SHAPE)  # fmt: skip
    else:
        add_up_part(program - sequence_programs, token_sums, token_maxima, part_sums, part_maxima, token_programs, part,
                    PLAN)  # fmt: skip
    last = is_last(counter, Partials(sequence_sums, sequence_sums), program, sequence_programs, PLAN)
    if last:
        finish(sequence_sums, part_sums, part_maxima, given, value, divisor, rest, before, statistics, sums_before,
               maxima_before, sequence_programs, parts, offsets, extents, numbers, PLAN)  # fmt: skip
