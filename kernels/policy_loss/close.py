"""The last launch of a whole step, behind the one pass over tokens: decide about sequences, and finish both results.

The pass wrote the gradient as if every sequence were kept. Sums of the loss were kept by slot, so this launch adds up
those of sequences that are kept, and zeroes the gradient of the others. Nothing is subtracted from a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..correct.decide import Leftover, decide, zero_rejected
from ..correct.decide import finish as finish_correction
from ..gather import UnitTotals, gather_slots, integer, plain, slot_tables, slots_of
from ..partials import Partials, add, add_up_part, entry, is_last, name_of, put_extrema, rows_left, sum_of_rows
from ..tiles import Extents, edge, either, launched
from ..tokens import at, has, of_key, size, thresholds
from .sequences import counted_as, inner_of, put_value


@triton.jit
def add_up(totals: UnitTotals, known, keep, alive, out: Partials, name: tl.constexpr, SPEC: tl.constexpr) -> None:
    """Add up a statistic of the loss. alive: the sequences whose tokens count."""
    if has(SPEC, "counts", name):
        among = known if name == "loss_tokens_nonfinite" else alive
        add(out.sums, SPEC, name, tl.where(among, integer(totals, SPEC, name), 0))
    elif has(SPEC, "floats", name):
        among = known & keep if name == "loss_policy" else alive
        add(out.sums, SPEC, name, tl.where(among, plain(totals, SPEC, name), 0.0))
    else:
        add(out.sums, SPEC, name, tl.where(alive, 0, 0))


@triton.jit
def add_up_loss(
    totals: UnitTotals, inners, sequence, known, keep, out: Partials, PLAN: tl.constexpr, SPEC: tl.constexpr
) -> None:
    """Add up the loss of sequences that are kept, and its statistics."""
    valid = tl.where(known, tl.maximum(integer(totals, SPEC, "valid"), 0), 0)
    # Where no mask is edited a rejected sequence has the weight 0, and its tokens are counted.
    alive = known & keep if PLAN.trained else known
    n = tl.where(alive, integer(totals, SPEC, "counted"), 0)
    add(out.sums, SPEC, "loss_valid_tokens", valid)
    add(out.sums, SPEC, "loss_valid_sequences", valid > 0)
    add(out.sums, SPEC, "loss_tokens", n)
    add(out.sums, SPEC, "loss_sequences", n > 0)
    for i in tl.static_range(4, size(PLAN, "sums")):
        add_up(totals, known, keep, alive, out, name_of(PLAN, "sums", i), SPEC)
    if has(SPEC, "floats", "total"):
        total = tl.where(known & keep, plain(totals, SPEC, "total"), 0.0)
        if PLAN.averages:
            inner = inner_of(valid, n, PLAN)
            tl.store(inners + sequence, inner.to(inners.dtype.element_ty), mask=known)
            total = total * inner
        add(out.sums, SPEC, "total", total)
    low, high = extremum_of(totals, SPEC, "-min_ppo_log_ratio"), extremum_of(totals, SPEC, "max_ppo_log_ratio")
    put_extrema(out.maxima, SPEC, "", "-min_ppo_log_ratio", low, n > 0)
    put_extrema(out.maxima, SPEC, "", "max_ppo_log_ratio", high, n > 0)


@triton.jit
def extremum_of(totals: UnitTotals, SPEC: tl.constexpr, name: tl.constexpr):
    """Return the largest value of a column of peaks: [SEQUENCES] float64."""
    return of_key(totals.peaks[at(SPEC, "peaks", name)]).to(tl.float64)


@launched
def close_kernel(
    numbers, spec_numbers, advantages, offsets, counts, integers, floats, peaks, keep_out, inners, gradient,
    sequence_sums, sequence_maxima, token_sums, token_maxima, part_sums, part_maxima, counter, given, value, divisor,
    rest, statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, shares: tl.int32, parts: tl.int32, part: tl.int32,
    PLAN: tl.constexpr, SPEC: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Decide about SHAPE.sequences sequences and add up their loss; the last program of all finishes.

    Programs share the zeroing of long sequences, and others add up parts, as in `decide_kernel`.
    """
    numbers, spec_numbers = thresholds(numbers, PLAN), thresholds(spec_numbers, SPEC)
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    shares = shares if SPEC.zeroes else 1
    share = program // sequence_programs
    owner = (program % sequence_programs).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first_slot, slot_count = slots_of(offsets, owner, extents, SPEC)
    known = (sequence >= 0) & (sequence < sequences)
    rejected = known
    if share < shares:
        out = Partials(sequence_sums, sequence_maxima)
        tables = slot_tables(counts, integers, floats, peaks)
        totals = gather_slots(tables, first_slot, slot_count, slots, SPEC, SHAPE)
        keep, _, _, _ = decide(totals, either(advantages, counts), sequence, known, out, counts, spec_numbers,
                                       (owner,), SPEC, SHAPE, False)  # fmt: skip
        add_up_loss(totals, either(inners, value), sequence, known, keep if SPEC.rejects_from_loss else known, out,
                    PLAN, SPEC)  # fmt: skip
        rejected = known & (keep == 0)
        tl.store(keep_out + sequence, keep.to(tl.int8), mask=tl.where(share == 0, known, False))
    else:
        k = program - sequence_programs * shares
        add_up_part(k, token_sums, token_maxima, part_sums, part_maxima, token_programs, part, SPEC)
    if is_last(counter, Partials(sequence_sums, sequence_maxima), program, sequence_programs, SPEC):
        partials = Leftover(sequence_sums, sequence_maxima, part_sums, part_maxima)
        finish_correction(statistics, partials, spec_numbers, extents, sequence_programs, parts, SPEC)
        rows, apart = rows_left(sequence_programs)
        found = sum_of_rows(sequence_sums, rows, apart, size(SPEC, "sequence_sums"))
        name: tl.constexpr = PLAN.total
        total, counted = entry(found, at(SPEC, "sequence_sums", name)), found
        if PLAN.over is not None:
            counted = entry(found, at(SPEC, "sequence_sums", counted_as(PLAN)))
        put_value(value, divisor, rest, total, counted, given, offsets, extents, numbers, PLAN)
    if SPEC.zeroes and share < shares:
        begin, end = sequence * width, (sequence + 1) * width
        if SPEC.packed:
            begin, end = edge(offsets, owner, sequences, tokens), edge(offsets, owner + 1, sequences, tokens)
        zero_rejected(gradient, gradient, begin, end, rejected, rejected, share, shares, SPEC)
