"""The last launch of a whole step, behind the one pass over tokens: decide about sequences, and finish both results.

The pass wrote the gradient as if every sequence were kept. Sums of the loss were kept by slot, so this launch adds up
those of sequences that are kept, and zeroes the gradient of the others. Nothing is subtracted from a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tiles
from ..correct.decide import Leftover, decide, zero_rejected
from ..correct.decide import finish as finish_correction
from ..gather import UnitTotals, gather_slots, integer, plain, slot_tables, slots_of
from ..partials import Partials, add, add_up_part, entry, is_last, name_of, put_extrema, rows_left, sum_of_rows
from ..tables import at, has, size, thresholds
from ..tiles import Extents, edge, either
from ..tokens import of_key
from .sequences import counted_as, inner_of, put_value


@triton.jit
def add_up(totals: UnitTotals, m_known, m_keep, m_alive, out: Partials, name: tl.constexpr, SPEC: tl.constexpr) -> None:
    """Add up a statistic of the loss. alive: the sequences whose tokens count."""
    if has(SPEC, "counts", name):
        m_among = m_known if name == "loss_tokens_nonfinite" else m_alive
        add(out.sums, SPEC, name, tl.where(m_among, integer(totals, SPEC, name), 0))
    elif has(SPEC, "floats", name):
        m_among = m_known & m_keep if name == "loss_policy" else m_alive
        add(out.sums, SPEC, name, tl.where(m_among, plain(totals, SPEC, name), 0.0))
    else:
        add(out.sums, SPEC, name, tl.where(m_alive, 0, 0))


@triton.jit
def add_up_loss(totals: UnitTotals, p_inners, i_sequence, m_known, m_keep, out: Partials, PLAN: tl.constexpr,
                SPEC: tl.constexpr) -> None:  # fmt: skip
    """Add up the loss of sequences that are kept, and its statistics."""
    b_valid = tl.where(m_known, tl.maximum(integer(totals, SPEC, "valid"), 0), 0)
    # Where no mask is edited a rejected sequence has the weight 0, and its tokens are counted.
    m_alive = m_known & m_keep if PLAN.trained else m_known
    b_n = tl.where(m_alive, integer(totals, SPEC, "counted"), 0)
    add(out.sums, SPEC, "loss_valid_tokens", b_valid)
    add(out.sums, SPEC, "loss_valid_sequences", b_valid > 0)
    add(out.sums, SPEC, "loss_tokens", b_n)
    add(out.sums, SPEC, "loss_sequences", b_n > 0)
    for i in tl.static_range(4, size(PLAN, "sums")):
        add_up(totals, m_known, m_keep, m_alive, out, name_of(PLAN, "sums", i), SPEC)
    if has(SPEC, "floats", "total"):
        b_total = tl.where(m_known & m_keep, plain(totals, SPEC, "total"), 0.0)
        if PLAN.averages:
            b_inner = inner_of(b_valid, b_n, PLAN)
            tl.store(p_inners + i_sequence, b_inner.to(p_inners.dtype.element_ty), mask=m_known)
            b_total = b_total * b_inner
        add(out.sums, SPEC, "total", b_total)
    b_low, b_high = extremum_of(totals, SPEC, "-min_ppo_log_ratio"), extremum_of(totals, SPEC, "max_ppo_log_ratio")
    put_extrema(out.maxima, SPEC, "", "-min_ppo_log_ratio", b_low, b_n > 0)
    put_extrema(out.maxima, SPEC, "", "max_ppo_log_ratio", b_high, b_n > 0)


@triton.jit
def extremum_of(totals: UnitTotals, SPEC: tl.constexpr, name: tl.constexpr):
    """Return the largest value of a column of peaks: [SEQUENCES] float64."""
    return of_key(totals.peaks[at(SPEC, "peaks", name)]).to(tl.float64)


@tiles.launched
def close_kernel(
    p_numbers, p_spec_numbers, p_advantages, p_offsets, p_counts, p_integers, p_floats, p_peaks, p_keep_out, p_inners,
    p_gradient, p_sequence_sums, p_sequence_maxima, p_token_sums, p_token_maxima, p_part_sums, p_part_maxima, p_counter,
    p_given, p_value, p_divisor, p_rest, p_statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, shares: tl.int32, parts: tl.int32, part: tl.int32,
    PLAN: tl.constexpr, SPEC: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Decide about SHAPE.sequences sequences and add up their loss; the last program of all finishes.

    Programs share the zeroing of long sequences, and others add up parts, as in `decide_kernel`.
    """
    numbers, spec_numbers = thresholds(p_numbers, PLAN), thresholds(p_spec_numbers, SPEC)
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    shares = shares if SPEC.zeroes else 1
    share = program // sequence_programs
    i_owner = (program % sequence_programs).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    i_sequence, i_first_slot, b_slot_count = slots_of(p_offsets, i_owner, extents, SPEC)
    m_known = (i_sequence >= 0) & (i_sequence < sequences)
    m_rejected = m_known
    if share < shares:
        out = Partials(p_sequence_sums, p_sequence_maxima)
        tables = slot_tables(p_counts, p_integers, p_floats, p_peaks)
        totals = gather_slots(tables, i_first_slot, b_slot_count, slots, SPEC, SHAPE)
        m_keep, _, _, _ = decide(totals, either(p_advantages, p_counts), i_sequence, m_known, out, p_counts,
                                 spec_numbers, (i_owner,), SPEC, SHAPE, False)  # fmt: skip
        add_up_loss(totals, either(p_inners, p_value), i_sequence, m_known,
                    m_keep if SPEC.rejects_from_loss else m_known, out, PLAN, SPEC)  # fmt: skip
        m_rejected = m_known & (m_keep == 0)
        tl.store(p_keep_out + i_sequence, m_keep.to(tl.int8), mask=tl.where(share == 0, m_known, False))
    else:
        k = program - sequence_programs * shares
        add_up_part(k, p_token_sums, p_token_maxima, p_part_sums, p_part_maxima, token_programs, part, SPEC)
    if is_last(p_counter, Partials(p_sequence_sums, p_sequence_maxima), program, sequence_programs, SPEC):
        leftover = Leftover(p_sequence_sums, p_sequence_maxima, p_part_sums, p_part_maxima)
        finish_correction(p_statistics, leftover, spec_numbers, extents, sequence_programs, parts, SPEC)
        rows, apart = rows_left(sequence_programs)
        b_found = sum_of_rows(p_sequence_sums, rows, apart, size(SPEC, "sequence_sums"))
        name: tl.constexpr = PLAN.total
        total, counted = entry(b_found, at(SPEC, "sequence_sums", name)), b_found
        if PLAN.over is not None:
            counted = entry(b_found, at(SPEC, "sequence_sums", counted_as(PLAN)))
        put_value(p_value, p_divisor, p_rest, total, counted, p_given, p_offsets, extents, numbers, PLAN)
    if SPEC.zeroes and share < shares:
        o_begin, o_end = i_sequence * width, (i_sequence + 1) * width
        if SPEC.packed:
            o_begin, o_end = (
                edge(p_offsets, i_owner, sequences, tokens),
                edge(p_offsets, i_owner + 1, sequences, tokens),
            )
        zero_rejected(p_gradient, p_gradient, o_begin, o_end, m_rejected, m_rejected, share, shares, SPEC)
