"""The policy loss over sequences, and its end: counts and means of whole sequences, the value, the statistics.

A launch behind the one pass over tokens, which reads the slots: of `loss_ppo_packed`, 4,096 tokens a sequence, 0.06
bytes and 0.3 PTX instructions a token, by `lab.ptx.counts`. Where there are two passes the second does it: each of its
programs finds what the sequences of its tile need (`prepare_sequences`), and the last one finishes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import gather, partials, tiles
from ..gather import SlotTables, UnitTotals, exact, integer, plain
from ..partials import Partials, add, entry, name_of
from ..tables import at, has, number, size, thresholds
from ..tiles import Extents, Span, edge
from ..tokens import exponential, limited
from .formulas import clipped
from .plan import LossPlan


@triton.constexpr_function
def counted_as(plan: LossPlan) -> str:
    """Name the count that the sum is divided by."""
    unit = "tokens" if plan.mean == "token" else "sequences"
    return f"loss_{unit}" if plan.over == "kept" else f"loss_valid_{unit}"


@triton.jit
def pull_of(totals: UnitTotals, b_level, b_n, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute the derivative of a sequence's loss by each of its log-probs: [SEQUENCES]. GMPO's is the loss too."""
    b_length = tl.maximum(b_n, 1).to(tl.float64)
    if PLAN.surrogate == "GMPO":
        b_exponent = b_level
        if PLAN.weighted:
            b_exponent += exact(totals, PLAN, "log_weight", True) / b_length
        return -exact(totals, PLAN, "advantage", False) / b_length * tl.exp(b_exponent)
    else:
        b_mean = b_level.to(tl.float32)
        clamp = number(numbers, PLAN, "clamp").to(b_mean.dtype)
        b_clamped = limited(b_mean, -clamp, clamp, PLAN)
        b_ratio, _, _ = exponential(b_clamped)
        of_up = clipped(b_ratio, b_clamped, tl.full(b_mean.shape, 1.0, b_mean.dtype), numbers, PLAN)
        of_down = clipped(b_ratio, b_clamped, tl.full(b_mean.shape, -1.0, b_mean.dtype), numbers, PLAN)
        b_up = tl.where(of_up.held, 0.0, exact(totals, PLAN, "up", False))
        b_down = tl.where(of_down.held, 0.0, exact(totals, PLAN, "down", False))
        return tl.where(tl.abs(b_mean) <= clamp, -(b_up + b_down) * b_ratio.to(tl.float64) / b_length, 0.0)


@triton.jit
def inner_of(b_valid, b_n, PLAN: tl.constexpr):
    """Compute the factor of each sequence's loss where that is divided by its own length: [SEQUENCES] float64."""
    b_length = b_n if PLAN.over == "kept" else b_valid
    return 1.0 / tl.maximum(b_length, 1).to(tl.float64)


@triton.jit
def store_sequences(tables: SlotTables, p_inners, p_sums, p_offsets, extents: Extents, slots, PLAN: tl.constexpr,
                    SHAPE: tl.constexpr) -> None:  # fmt: skip
    """Compute for SHAPE.sequences sequences the factors of their gradients, and their share of the statistics."""
    i_owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    i_sequence, i_first_slot, b_slot_count = gather.slots_of(p_offsets, i_owner, extents, PLAN)
    m_known = (i_sequence >= 0) & (i_sequence < extents.sequences)
    totals = gather.gather_slots(tables, i_first_slot, b_slot_count, slots, PLAN, SHAPE)
    b_valid = tl.where(m_known, integer(totals, PLAN, "valid"), 0)
    b_n = tl.where(m_known, integer(totals, PLAN, "counted"), 0)
    add(p_sums, PLAN, "loss_valid_tokens", b_valid)
    add(p_sums, PLAN, "loss_tokens", b_n)
    add(p_sums, PLAN, "loss_valid_sequences", b_valid > 0)
    add(p_sums, PLAN, "loss_sequences", b_n > 0)
    if PLAN.averages:
        b_inner = inner_of(b_valid, b_n, PLAN)
        tl.store(p_inners + i_sequence, b_inner.to(p_inners.dtype.element_ty), mask=m_known)
        add(p_sums, PLAN, "total", tl.where(m_known, plain(totals, PLAN, "total") * b_inner, 0.0))


@triton.jit
def prepare_sequences(tables: SlotTables, p_levels, p_pulls, p_inners, p_token_sums, p_offsets, p_within, span: Span,
        extents: Extents, sequences, slots, numbers: tl.tuple, PLAN: tl.constexpr,
        SHAPE: tl.constexpr) -> None:  # fmt: skip
    """Compute what the tokens of this tile need of their sequences, or turns, from the slots that the first pass left.

    It is stored at the slots of the tile. The tile counts the tokens in it, and the sequences that end in it.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    last = tl.maximum(span.owner, span.last)
    sums: tl.tuple = ()
    for _ in tl.static_range(size(PLAN, "sequence_sums")):
        sums = sums + (tl.full((SHAPE.sequences,), 0, tl.int32),)
    for first in range(span.owner, last + 1, SHAPE.sequences):
        i_owner = first + tl.arange(0, SHAPE.sequences)
        i_slot = program + i_owner * PLAN.packed
        i_sequence, i_first_slot, b_slot_count = gather.slots_of(p_offsets, i_owner, extents, PLAN)
        m_known = (i_owner <= last) & (i_sequence >= 0) & (i_sequence < extents.sequences)
        totals = gather.gather_slots(tables, i_first_slot, tl.where(m_known, b_slot_count, 0), slots, PLAN, SHAPE)
        b_n = integer(totals, PLAN, "counted")
        b_level = exact(totals, PLAN, "level", True)
        if PLAN.sequence_value != "total":
            b_level = b_level / tl.maximum(b_n, 1).to(tl.float64)
        if PLAN.levels:
            tl.store(p_levels + i_slot, b_level.to(p_levels.dtype.element_ty), mask=m_known)
        if PLAN.pulls:
            b_pull = pull_of(totals, b_level, b_n, numbers, PLAN)
            tl.store(p_pulls + i_slot, b_pull.to(p_pulls.dtype.element_ty), mask=m_known)
        m_whole = m_known
        if PLAN.turns:
            # From here on the sequence of each turn.
            i_owner = gather.owner_of_turn(p_within, i_owner, sequences)
            i_low, i_high = gather.turns_of(p_within, i_owner, sequences, extents.sequences)
            i_first_slot, b_slot_count = gather.slots_between(p_offsets, i_low, i_high, extents)
            totals = gather.gather_slots(tables, i_first_slot, tl.where(m_known, b_slot_count, 0), slots, PLAN, SHAPE)
            b_n, m_whole = integer(totals, PLAN, "counted"), m_known & (i_owner > 0) & (i_owner <= sequences)
        b_valid = integer(totals, PLAN, "valid")
        if PLAN.averages:
            tl.store(p_inners + i_slot, inner_of(b_valid, b_n, PLAN).to(p_inners.dtype.element_ty), mask=m_known)
        m_ends = m_whole & (i_slot == i_first_slot + b_slot_count - 1)
        b_valid_here = tl.load(tables.counts + i_slot, mask=m_known, other=0)
        b_n_here = tl.load(tables.counts + slots + i_slot, mask=m_known, other=0)
        here = (b_valid_here, m_ends & (b_valid > 0), b_n_here, m_ends & (b_n > 0))
        more: tl.tuple = ()
        for i in tl.static_range(size(PLAN, "sequence_sums")):
            x = here[at(PLAN, "of_sequences", name_of(PLAN, "sequence_sums", i))]
            more = more + (sums[i] + x.to(tl.int32),)
        sums = more
    for i in tl.static_range(size(PLAN, "sequence_sums")):
        column = at(PLAN, "token_sums", name_of(PLAN, "sequence_sums", i))
        tl.store(p_token_sums + (program + column * programs), tl.sum(sums[i], 0).to(tl.float64))


@triton.jit
def sum_named(name: tl.constexpr, b_of_tokens, b_of_sequences, PLAN: tl.constexpr):
    """Return a sum of tokens or of sequences; 0 where the plan has none of this name."""
    if has(PLAN, "token_sums", name):
        return entry(b_of_tokens, at(PLAN, "token_sums", name))
    elif has(PLAN, "sequence_sums", name):
        return entry(b_of_sequences, at(PLAN, "sequence_sums", name))
    else:
        return tl.full((), 0.0, tl.float64)


@triton.jit
def assumed_divisor(p_given, p_offsets, extents: Extents, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute what the gradient is written over, float64: the divisor itself, unless tokens or rows do not count."""
    count = tl.full((), 1.0, tl.float64)
    if PLAN.assumes == "given":
        count = tl.load(p_given).to(tl.float64)
    elif PLAN.assumes == "rows":
        count = extents.sequences.to(tl.float64)
    elif PLAN.assumes == "tokens":
        if PLAN.packed:
            one = extents.sequences * 0 + 1
            begin = edge(p_offsets, one, extents.sequences, extents.tokens)
            count = (edge(p_offsets, one + extents.sequences, extents.sequences, extents.tokens) - begin).to(tl.float64)
        else:
            count = (extents.sequences * extents.width).to(tl.float64)
    if PLAN.assumes is not None:
        count = tl.where(count > 0.0, count, 1.0) * number(numbers, PLAN, "max_length")
    return count


@triton.jit
def put_value(p_value, p_divisor, p_rest, total, counted, p_given, p_offsets, extents: Extents, numbers: tl.tuple,
              PLAN: tl.constexpr) -> None:  # fmt: skip
    """Divide the sum of the loss, by what is counted, or given: store the value, its divisor, and `p_rest`."""
    count = counted
    if PLAN.over is None:
        count = tl.load(p_given).to(tl.float64)
    elif PLAN.mean == "sum":
        count = tl.full((), 1.0, tl.float64)
    elif PLAN.over == "rows":
        count = extents.sequences.to(tl.float64)
    count = tl.where(count == 0.0, 1.0, count) * number(numbers, PLAN, "max_length")
    tl.store(p_divisor, count)
    tl.store(p_rest, count / assumed_divisor(p_given, p_offsets, extents, numbers, PLAN))
    tl.store(p_value, (total / count).to(p_value.dtype.element_ty))


@triton.jit
def finish(p_sequence_sums, p_part_sums, p_part_maxima, p_given, p_value, p_divisor, p_rest, p_before, p_statistics,
        sums_before, maxima_before, sequence_programs, parts, p_offsets, extents: Extents, numbers: tl.tuple,
        PLAN: tl.constexpr) -> None:  # fmt: skip
    """Add up the rows of all programs, in the last one: the value, its divisor, the statistics behind those before.

    `p_rest` is what the gradient is still to be divided by: the divisor over the assumed one.
    """
    b_of_tokens = partials.sum_of_rows(p_part_sums, parts, 1, size(PLAN, "token_sums"))
    b_of_sequences = b_of_tokens
    if PLAN.adds_up:
        rows, apart = partials.rows_left(sequence_programs)
        b_of_sequences = partials.sum_of_rows(p_sequence_sums, rows, apart, size(PLAN, "sequence_sums"))
    # Of its own, because Triton 3.5 and 3.6 pass on the text of an attribute only as a constant.
    name: tl.constexpr = PLAN.total
    total = sum_named(name, b_of_tokens, b_of_sequences, PLAN)
    counted = sum_named(counted_as(PLAN), b_of_tokens, b_of_sequences, PLAN)
    put_value(p_value, p_divisor, p_rest, total, counted, p_given, p_offsets, extents, numbers, PLAN)
    partials.copy(p_before, p_statistics, sums_before)
    p_statistics += sums_before
    for i in tl.static_range(size(PLAN, "sums")):
        tl.store(p_statistics + i, sum_named(name_of(PLAN, "sums", i), b_of_tokens, b_of_sequences, PLAN))
    p_statistics += size(PLAN, "sums")
    partials.copy(p_before + sums_before, p_statistics, maxima_before)
    b_found = partials.largest_of_rows(p_part_maxima, parts, 1, size(PLAN, "maxima"))
    partials.put_all(p_statistics + maxima_before, b_found, size(PLAN, "maxima"))


@tiles.launched
def sequences_kernel(
    p_numbers, p_offsets, p_counts, p_floats, p_inners, p_sequence_sums, p_token_sums, p_token_maxima, p_part_sums,
    p_part_maxima, p_counter, p_given, p_value, p_divisor, p_rest, p_before, p_statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, parts: tl.int32, part: tl.int32, sums_before: tl.int32,
    maxima_before: tl.int32,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Pass over sequences, add up parts of what programs over tokens have left, and finish in the last program."""
    numbers = thresholds(p_numbers, PLAN)
    program, extents = tl.program_id(0), Extents(tokens, sequences, width, row_tiles, tile_bits)
    if program < sequence_programs:
        store_sequences(gather.slot_tables(p_counts, None, p_floats, None), p_inners, p_sequence_sums, p_offsets,
                        extents, slots, PLAN, SHAPE)  # fmt: skip
    else:
        partials.add_up_part(program - sequence_programs, p_token_sums, p_token_maxima, p_part_sums, p_part_maxima,
                             token_programs, part, PLAN)  # fmt: skip
    last = partials.is_last(p_counter, Partials(p_sequence_sums, p_sequence_sums), program, sequence_programs, PLAN)
    if last:
        finish(p_sequence_sums, p_part_sums, p_part_maxima, p_given, p_value, p_divisor, p_rest, p_before, p_statistics,
               sums_before, maxima_before, sequence_programs, parts, p_offsets, extents, numbers, PLAN)  # fmt: skip
