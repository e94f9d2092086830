"""Add up the columns of the slot tables by sequence.

`decide` does so by itself. Where the tokens of a sequence are on several ranks, `gather_kernel` writes the tables by
sequence, for ranks to add up; to `decide` they are then slot tables with one slot a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Tables
from rollout_corr.kernels.io import either
from rollout_corr.kernels.slots import Extents, edge
from rollout_corr.kernels.tokens import GRID_OF_D, GRID_OF_FRACTION, at, has, named, size


class SlotTables(NamedTuple):
    """Tables of slots, [columns, slots]; one without columns may be anything."""

    counts: tl.tensor  # int32; int64 by sequence
    integers: tl.tensor  # int64
    floats: tl.tensor  # the dtype that computes; float64 by sequence
    peaks: tl.tensor  # int32 or int64, keys of floats


class Gathered(NamedTuple):
    """The tables of some sequences: [columns, padded to a power of two; SEQUENCES]."""

    counts: tl.tensor  # int64
    integers: tl.tensor  # int64
    floats: tl.tensor  # float64
    peaks: tl.tensor  # int32 or int64, keys of floats


@triton.jit
def slot_tables(counts: tl.tensor, integers: tl.tensor, floats: tl.tensor, peaks: tl.tensor) -> SlotTables:
    """Group the slot tables; one that is None is replaced by the first, which is not read in its place."""
    return SlotTables(counts, either(integers, counts), either(floats, counts), either(peaks, counts))


@triton.constexpr_function
def power_of_two(plan: Tables, table: str) -> int:
    """Round the number of columns up to what a shape can be."""
    return max(1, 1 << (len(getattr(plan, table)) - 1).bit_length())


@triton.jit
def columns_of(
    table: tl.tensor, first: tl.tensor, many: tl.tensor, slots: tl.tensor, KIND: tl.constexpr,
    PLAN: tl.constexpr, TABLE: tl.constexpr, SHAPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add up (or take the largest of) every column over the slots of each sequence."""
    columns: tl.constexpr = size(PLAN, TABLE)
    width: tl.constexpr = power_of_two(PLAN, TABLE)
    column = tl.arange(0, width)[:, None, None]
    nothing = 0
    if TABLE == "peaks":
        nothing = -0x80000000 if table.dtype.element_ty == tl.int32 else -0x8000000000000000
    found = tl.full((width, SHAPE.sequences), nothing, KIND)
    for start in range(0, tl.max(many, 0), SHAPE.chunk):
        each = start + tl.arange(0, SHAPE.chunk)[None, None, :]
        slot = first[None, :, None] + each
        known = (column < columns) & (each < many[None, :, None]) & (slot < slots)
        x = tl.load(table + column.to(tl.int64) * slots + slot, mask=known, other=nothing).to(KIND)
        if TABLE == "peaks":
            found = tl.maximum(found, tl.max(x, 2))
        else:
            found += tl.sum(x, 2)
    return found


@triton.jit
def slots_of(
    offsets: tl.tensor, owner: tl.tensor, extents: Extents, PLAN: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find the sequence of each owner, its first slot, and how many slots it has; all [SEQUENCES].

    In a packed batch the first and the last owner are no sequence, as in `slots.edge`.
    """
    if PLAN.packed:
        sequence = owner - 1
        first = edge(offsets, owner, extents.sequences, extents.tokens) // TILE
        many = edge(offsets, owner + 1, extents.sequences, extents.tokens) // TILE - first + 1
        return sequence, first + owner, tl.where(sequence <= extents.sequences, many, 0)
    else:
        return owner, owner * extents.tiles, tl.where(owner < extents.sequences, extents.tiles, 0)


@triton.jit
def gathered(
    tables: SlotTables, first: tl.tensor, many: tl.tensor, slots: tl.tensor, PLAN: tl.constexpr, SHAPE: tl.constexpr
) -> Gathered:
    """Gather all tables by sequence; one without columns is a copy of the counts, and not looked at."""
    counts = columns_of(tables.counts, first, many, slots, tl.int64, PLAN, "counts", SHAPE)
    integers, floats, peaks = counts, counts, counts
    if size(PLAN, "integers") > 0:
        integers = columns_of(tables.integers, first, many, slots, tl.int64, PLAN, "integers", SHAPE)
    if size(PLAN, "floats") > 0:
        floats = columns_of(tables.floats, first, many, slots, tl.float64, PLAN, "floats", SHAPE)
    if size(PLAN, "peaks") > 0:
        peaks = columns_of(tables.peaks, first, many, slots, tables.peaks.dtype.element_ty, PLAN, "peaks", SHAPE)
    return Gathered(counts, integers, floats, peaks)


@triton.jit
def column(found: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr) -> tl.tensor:
    """Take one column of a gathered table: [SEQUENCES]."""
    chosen = tl.arange(0, power_of_two(PLAN, TABLE))[:, None] == at(PLAN, TABLE, name)
    if TABLE == "peaks":
        return tl.max(tl.where(chosen, found, -0x80000000 if found.dtype == tl.int32 else -0x8000000000000000), 0)
    else:
        return tl.sum(tl.where(chosen, found, 0), 0)


@triton.jit
def integer(found: Gathered, PLAN: tl.constexpr, name: tl.constexpr) -> tl.tensor:
    """Take a sum of integers: [SEQUENCES] int64."""
    if has(PLAN, "counts", name):
        return column(found.counts, PLAN, "counts", name)
    else:
        return column(found.integers, PLAN, "integers", name)


@triton.jit
def plain(found: Gathered, PLAN: tl.constexpr, name: tl.constexpr) -> tl.tensor:
    """Take a plain sum: [SEQUENCES] float64."""
    return column(found.floats, PLAN, "floats", name)


@triton.jit
def exact(found: Gathered, PLAN: tl.constexpr, name: tl.constexpr, OF_D: tl.constexpr) -> tl.tensor:
    """Take a sum that decides: [SEQUENCES] float64. Sums of D are on one grid, others in two limbs."""
    if PLAN.double:
        x = plain(found, PLAN, name)
    elif OF_D:
        x = integer(found, PLAN, name).to(tl.float64) / GRID_OF_D
    else:
        fraction = integer(found, PLAN, named(name, "fraction")).to(tl.float64) / GRID_OF_FRACTION
        x = integer(found, PLAN, name).to(tl.float64) + fraction
    if has(PLAN, "floats", named(name, "rest")):
        x += plain(found, PLAN, named(name, "rest"))
    return x


@triton.jit
def put_columns(
    out: tl.tensor, found: tl.tensor, owner: tl.tensor, owners: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr
) -> None:
    """Write a gathered table to [columns, owners]."""
    column = tl.arange(0, power_of_two(PLAN, TABLE))[:, None]
    place = column.to(tl.int64) * owners + owner[None, :]
    tl.store(out + place, found, mask=(column < size(PLAN, TABLE)) & (owner[None, :] < owners))


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "slots", "owner_count"])
def gather_kernel(
    counts, integers, floats, peaks, counts_out, integers_out, floats_out, peaks_out, offsets,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, slots: tl.int64, owner_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Write all tables by owner, [columns, owner_count]; the first and last owner of a packed batch are no sequence."""
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    _, first, many = slots_of(offsets, owner, Extents(tokens, sequences, 0, tiles), PLAN, SHAPE.tile)
    found = gathered(slot_tables(counts, integers, floats, peaks), first, many, slots, PLAN, SHAPE)
    put_columns(counts_out, found.counts, owner, owner_count, PLAN, "counts")
    if size(PLAN, "integers") > 0:
        put_columns(integers_out, found.integers, owner, owner_count, PLAN, "integers")
    if size(PLAN, "floats") > 0:
        put_columns(floats_out, found.floats, owner, owner_count, PLAN, "floats")
    if size(PLAN, "peaks") > 0:
        put_columns(peaks_out, found.peaks, owner, owner_count, PLAN, "peaks")
