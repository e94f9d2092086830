"""Sequences whose tokens lie on several ranks: sums by sequence for ranks to exchange, and the carries that come back.

`gather_kernel` adds up the slots of each sequence, or turn, or of the half of one where a rank holds two stretches. Of
the pass before a plan with prefixes ranks make from these what runs along a sequence on the ranks before, the carry,
with which it begins here; of `read` what `decide` decides by. It is one launch: of `split_packed`, 4,096 tokens a
sequence, it executes 0.05 PTX instructions a token and reads 0.02 bytes, by `ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.accumulators import is_extremum, kind_of, start_of
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.correct.rest import lose_behind
from rollout_corr.kernels.correct.scans import begins_sequence, crosses, row_of, runs, table_of
from rollout_corr.kernels.gather import gathered, slot_tables, slots_of
from rollout_corr.kernels.io import either
from rollout_corr.kernels.slots import Extents
from rollout_corr.kernels.sums import joined
from rollout_corr.kernels.tiles import Span, Tile, ends_in, next_span
from rollout_corr.kernels.tokens import size

# --- carries ---


@triton.jit
def carry_of(carries: tl.tuple, owner: tl.tensor, extents: Extents, AHEAD: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """Load an owner's carry of a column: a scalar."""
    owners = extents.sequences + 2 if AHEAD.packed else extents.sequences
    where = carries[table_of(AHEAD, K)] + (owners * row_of(AHEAD, K) + owner)
    return tl.load(where).to(kind_of(AHEAD, K))


@triton.jit
def with_carry(running: tl.tuple, carries: tl.tuple, span: Span, extents: Extents, AHEAD: tl.constexpr) -> tl.tuple:
    """Begin a tile with what its first owner has on the ranks before, too."""
    for k in tl.static_range(size(AHEAD, "recorded")):
        if runs(AHEAD, k):
            x = joined(running[k], carry_of(carries, span.owner, extents, AHEAD, k), is_extremum(AHEAD, k))
            running = running[:k] + (x,) + running[k + 1 :]
    return running


@triton.constexpr_function
def none_of(plan: Plan, k: int) -> float:
    """Choose what a token carries with which nothing begins; 0 in the place of a column that does not run."""
    return start_of(plan, k) if runs(plan, k) else 0


@triton.jit
def at_begin(
    carried: tl.tuple, carries: tl.tuple, span: Span, place: tl.tensor, offsets: tl.tensor, heads: tl.tensor,
    extents: Extents, AHEAD: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Let the first token of an owner bring its carries."""
    # One without a token begins where the next one does, which then has its place.
    begins = place == span.start
    sequence = begins
    if AHEAD.crosses_turns:
        sequence = begins & begins_sequence(span, offsets, heads, extents)
    found = ()
    for k in tl.static_range(size(AHEAD, "recorded")):
        if runs(AHEAD, k):
            here = sequence if crosses(AHEAD, k) else begins
            found = found + (tl.where(here, carry_of(carries, span.owner, extents, AHEAD, k), carried[k]),)
        else:
            found = found + (carried[k],)
    return found


@triton.jit
def carried_by(
    carries: tl.tuple, place: tl.tensor, span: Span, first: tl.tensor, offsets: tl.tensor, heads: tl.tensor,
    tile: Tile, extents: Extents, PLAN: tl.constexpr, AHEAD: tl.constexpr, TILING: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Give every token of a step what it brings from the ranks before, of all columns: [STEP] each.

    That is nothing, but for the first token of an owner; place and span are as in `scans.begins_of`.
    """
    carried = ()
    for k in tl.static_range(size(AHEAD, "recorded")):
        carried = carried + (tl.full((TILING.step,), none_of(AHEAD, k), kind_of(AHEAD, k)),)
    # The tile itself begins with the carry of its first owner.
    carried = at_begin(carried, carries, span, tl.where(first > 0, place, -1), offsets, heads, extents, AHEAD)
    if PLAN.packed:
        for _ in range(ends_in(span, first, offsets, tile, extents, PLAN, TILING)):
            span = next_span(span, offsets, tile, extents, PLAN)
            carried = at_begin(carried, carries, span, place, offsets, heads, extents, AHEAD)
    return carried


# --- sums by owner ---


@triton.jit
def put_columns(out: tl.tensor, columns: tl.tuple, owner: tl.tensor, owners: tl.tensor) -> None:
    """Write a gathered table to [columns, owners]."""
    for i in tl.static_range(len(columns)):
        tl.store(out + owners * i + owner, columns[i], mask=owner < owners)


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "tile_bits", "slots", "unit_count"])
def gather_kernel(
    counts, integers, floats, peaks, counts_out, integers_out, floats_out, peaks_out, offsets, rests,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    unit_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Write all tables by owner, [columns, unit_count]; the first and last owner of a packed batch are no sequence."""
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first, many = slots_of(offsets, owner, Extents(tokens, sequences, 0, tiles, tile_bits), PLAN)
    tables = slot_tables(counts, integers, floats, peaks)
    found = gathered(tables, first, many, slots, PLAN, SHAPE)
    if PLAN.rests and not PLAN.carries:
        known = (sequence >= 0) & (sequence < sequences)
        found = lose_behind(found, tables, sequence, first, many, known, either(rests, counts), slots, tile_bits, PLAN,
                            SHAPE)  # fmt: skip
    put_columns(counts_out, found.counts, owner, unit_count)
    put_columns(integers_out, found.integers, owner, unit_count)
    put_columns(floats_out, found.floats, owner, unit_count)
    put_columns(peaks_out, found.peaks, owner, unit_count)
