"""Add up the columns of the slot tables by sequence.

`decide` does so by itself. Where the tokens of a sequence are on several ranks, `gather_kernel` writes the tables by
sequence, for ranks to add up; to `decide` they are then slot tables with one slot a sequence. It is one launch: of
`split_packed`, 4,096 tokens a sequence, it executes 0.05 PTX instructions a token and reads 0.02 bytes, by
`lab.ptx.counts`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .grid import Shape
from .tables import at, has, named, size
from .tiles import Extents, edge, either, launched
from .tokens import GRID_OF_D, GRID_OF_FRACTION


class SlotTables(NamedTuple):
    """Tables of slots, [columns, slots]; one without columns may be anything."""

    counts: tl.tensor  # int32; int64 by sequence
    integers: tl.tensor  # int64
    floats: tl.tensor  # float32; float64 by sequence
    peaks: tl.tensor  # int32 or int64, keys of floats


class Units(NamedTuple):
    """Counts and sums of units, once criteria of tokens have decided: [SEQUENCES] each."""

    valid: tl.tensor  # valid tokens, int64; 0 outside sequences
    nonfinite: tl.tensor  # valid tokens whose D is not finite, int64
    differing: tl.tensor  # valid tokens whose D is not 0, int64
    n: tl.tensor  # measured tokens, int64
    n_among: tl.tensor  # tokens that sums over the sequence run over, int64
    sum_d: tl.tensor  # float64, as the following
    train: tl.tensor  # sums of log-probs
    rollout: tl.tensor


class UnitTotals(NamedTuple):
    """The tables of some sequences: a tuple of columns each, [SEQUENCES]."""

    counts: tl.tuple  # int64
    integers: tl.tuple  # int64
    floats: tl.tuple  # float64
    peaks: tl.tuple  # int32 or int64, keys of floats


@triton.constexpr_function
def sharers(shape: Shape) -> int:
    """Count the threads that share the slots of a sequence: a program is one warp of 32."""
    return max(1, 32 // shape.sequences)


@triton.constexpr_function
def at_once(turns: bool, shape: Shape) -> int:
    """Count the slots that each of these threads has on their way at a time.

    With turns that is one: a turn has few, and each load in the source makes Triton's `TritonGPUCoalesce` look at all
    of the largest kernel.
    """
    return 1 if turns else shape.chunk


@triton.constexpr_function
def lowest_key(kind: tl.dtype) -> int:
    """Find the lowest integer of a dtype: below the key of every float."""
    return -(1 << (kind.primitive_bitwidth - 1))


@triton.jit
def slot_tables(p_counts, p_integers, p_floats, p_peaks) -> SlotTables:
    """Group the slot tables; one that is None is replaced by the first, which is not read in its place."""
    return SlotTables(p_counts, either(p_integers, p_counts), either(p_floats, p_counts), either(p_peaks, p_counts))


@triton.jit
def nothing_yet(p_table, like, PLAN: tl.constexpr, TABLE: tl.constexpr) -> tl.tuple:
    """Start the columns of a table, each in the shape of `like`."""
    found: tl.tuple = ()
    for _ in tl.static_range(size(PLAN, TABLE)):
        if TABLE == "peaks":
            lowest = tl.full(like.shape, lowest_key(p_table.dtype.element_ty), p_table.dtype.element_ty)
            found = found + (lowest,)
        elif TABLE == "floats":
            found = found + (tl.zeros(like.shape, tl.float64),)
        else:
            found = found + (tl.zeros(like.shape, tl.int64),)
    return found


@triton.jit
def with_slots(found: tl.tuple, p_table, slot, slots, known, PLAN: tl.constexpr, TABLE: tl.constexpr) -> tl.tuple:
    """Add one slot of each thread to all columns of a table, or take the larger."""
    more: tl.tuple = ()
    for i in tl.static_range(size(PLAN, TABLE)):
        if TABLE == "peaks":
            lowest = lowest_key(p_table.dtype.element_ty)
            x = tl.maximum(found[i], tl.load(p_table + slots * i + slot, mask=known, other=lowest))
        else:
            x = found[i] + tl.load(p_table + slots * i + slot, mask=known, other=0).to(found[i].dtype)
        more = more + (x,)
    return more


@triton.jit
def together(found: tl.tuple, TABLE: tl.constexpr) -> tl.tuple:
    """Add up what the threads of each sequence have found, or take the largest: [SEQUENCES] each."""
    done: tl.tuple = ()
    for i in tl.static_range(len(found)):
        done = done + (tl.max(found[i], 1) if TABLE == "peaks" else tl.sum(found[i], 1),)
    return done


@triton.jit
def slots_of(p_offsets, owner, extents: Extents, PLAN: tl.constexpr,
             BY_OWNER: tl.constexpr = False) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Find the sequence of each owner, its first slot, and how many slots it has; all [SEQUENCES].

    An empty one has none. In a packed batch the first and the last owner are no sequence, as in `tiles.edge`.
    BY_OWNER: `gather_kernel` has left one slot of each.
    """
    if BY_OWNER:
        return owner - PLAN.packed, owner, owner * 0 + 1
    elif PLAN.packed:
        sequence = owner - 1
        begin = edge(p_offsets, owner, extents.sequences, extents.tokens)
        end = edge(p_offsets, owner + 1, extents.sequences, extents.tokens)
        first_slot = begin >> extents.tile_bits
        slot_count = (end >> extents.tile_bits) - first_slot + 1
        return sequence, first_slot + owner, tl.where((sequence <= extents.sequences) & (begin != end), slot_count, 0)
    else:
        return owner, owner * extents.row_tiles, tl.where(owner < extents.sequences, extents.row_tiles, 0)


@triton.jit
def turns_of(p_within, owner, sequences, turns) -> tuple[tl.tensor, tl.tensor]:
    """Find the first turn of each owner, and the one behind its last: all turns have an owner, 0 to S + 1.

    Args:
        p_within: [S + 1] int64, where sequences begin and end among the turns; it does not decrease.
        owner: [SEQUENCES] int64.
        sequences: S.
        turns: U.
    """
    begins = tl.load(p_within + (owner - 1), mask=(owner > 0) & (owner <= sequences + 1), other=-1)
    ends = tl.load(p_within + owner, mask=owner <= sequences)
    high = tl.where(owner > sequences, turns + 1, ends) + 1
    return tl.where(owner > sequences + 1, high, begins + 1), high


@triton.jit
def owner_of_turn(p_within, turn, sequences):
    """Find the owner, 0 to S + 1, that has each turn, which is numbered as in `turns_of`; arguments as there."""
    low, high = turn * 0, turn * 0 + sequences + 1
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        before = tl.load(p_within + middle, mask=low < high, other=0) < turn
        low, high = tl.where((low < high) & before, middle + 1, low), tl.where(before, high, middle)
    return low


@triton.jit
def slots_between(p_offsets, low, high, extents: Extents,
                  BY_OWNER: tl.constexpr = False) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Find the first slot of turns from low to before high, and how many there are. BY_OWNER: as in `slots_of`."""
    if BY_OWNER:
        return low, tl.maximum(high - low, 0)
    else:
        first_slot = (edge(p_offsets, low, extents.sequences, extents.tokens) >> extents.tile_bits) + low
        end = (edge(p_offsets, high, extents.sequences, extents.tokens) >> extents.tile_bits) + high
        return first_slot, tl.where(high > low, end - first_slot, 0)


@triton.jit
def gather_slots(tables: SlotTables, first_slot, slot_count, slots, PLAN: tl.constexpr,
                 SHAPE: tl.constexpr) -> UnitTotals:  # fmt: skip
    """Gather all tables by sequence.

    One loop for all of them, in which the loads of several slots are on their way at once. Threads exchange what
    they have found once, behind it.
    """
    lane = tl.arange(0, sharers(SHAPE))[None, :]
    slot = first_slot[:, None] + lane
    counts = nothing_yet(tables.counts, slot, PLAN, "counts")
    integers = nothing_yet(tables.integers, slot, PLAN, "integers")
    floats = nothing_yet(tables.floats, slot, PLAN, "floats")
    peaks = nothing_yet(tables.peaks, slot, PLAN, "peaks")
    # Wrong offsets may promise more slots than there are.
    many = tl.minimum(slot_count, slots - first_slot).to(tl.int32)
    for start in range(0, tl.max(many, 0), sharers(SHAPE) * at_once(PLAN.turns, SHAPE)):
        for i in tl.static_range(at_once(PLAN.turns, SHAPE)):
            index = start + i * sharers(SHAPE) + lane
            some = index < many[:, None]
            slot = first_slot[:, None] + index
            counts = with_slots(counts, tables.counts, slot, slots, some, PLAN, "counts")
            integers = with_slots(integers, tables.integers, slot, slots, some, PLAN, "integers")
            floats = with_slots(floats, tables.floats, slot, slots, some, PLAN, "floats")
            peaks = with_slots(peaks, tables.peaks, slot, slots, some, PLAN, "peaks")
    return UnitTotals(
        together(counts, "counts"), together(integers, "integers"), together(floats, "floats"), together(peaks, "peaks")
    )


@triton.jit
def integer(totals: UnitTotals, PLAN: tl.constexpr, name: tl.constexpr):
    """Return a sum of integers: [SEQUENCES] int64."""
    if has(PLAN, "counts", name):
        return totals.counts[at(PLAN, "counts", name)]
    else:
        return totals.integers[at(PLAN, "integers", name)]


@triton.jit
def plain(totals: UnitTotals, PLAN: tl.constexpr, name: tl.constexpr):
    """Return a plain sum: [SEQUENCES] float64."""
    return totals.floats[at(PLAN, "floats", name)]


@triton.jit
def exact(totals: UnitTotals, PLAN: tl.constexpr, name: tl.constexpr, OF_D: tl.constexpr):
    """Return a sum that decides: [SEQUENCES] float64. Sums of D are on one grid, others in two limbs."""
    if OF_D:
        x = integer(totals, PLAN, name).to(tl.float64) / GRID_OF_D
    else:
        fraction = integer(totals, PLAN, named(name, "fraction")).to(tl.float64) / GRID_OF_FRACTION
        x = integer(totals, PLAN, name).to(tl.float64) + fraction
    if has(PLAN, "floats", named(name, "rest")):
        x += plain(totals, PLAN, named(name, "rest"))
    return x


# --- sums by owner, where sequences lie on several ranks ---


@triton.jit
def put_columns(p_out, columns: tl.tuple, owner, owners) -> None:
    """Write a gathered table to [columns, owners]."""
    for i in tl.static_range(len(columns)):
        tl.store(p_out + owners * i + owner, columns[i], mask=owner < owners)


@launched
def gather_kernel(
    p_counts, p_integers, p_floats, p_peaks, p_counts_out, p_integers_out, p_floats_out, p_peaks_out, p_offsets,
    tokens: tl.int64, sequences: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    unit_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Write all tables by owner, [columns, unit_count]; the first and last owner of a packed batch are no sequence."""
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    _, first_slot, slot_count = slots_of(p_offsets, owner, Extents(tokens, sequences, 0, row_tiles, tile_bits), PLAN)
    totals = gather_slots(
        slot_tables(p_counts, p_integers, p_floats, p_peaks), first_slot, slot_count, slots, PLAN, SHAPE
    )
    put_columns(p_counts_out, totals.counts, owner, unit_count)
    put_columns(p_integers_out, totals.integers, owner, unit_count)
    put_columns(p_floats_out, totals.floats, owner, unit_count)
    put_columns(p_peaks_out, totals.peaks, owner, unit_count)
