"""What the slots of a sequence left behind, added up: the columns of the slot tables by sequence.

`judge` does so by itself. Where the tokens of a sequence lie on several ranks, `gather_kernel` writes the tables by
sequence, for ranks to add up; for `judge` they are then slot tables of one slot a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Tables
from rollout_corr.kernels.slots import edge
from rollout_corr.kernels.tokens import GRID_OF_D, GRID_OF_FRACTION, at, has, named, size


@triton.constexpr_function
def power_of_two(plan: Tables, table: str) -> int:
    """The number of columns, as a shape."""
    return max(1, 1 << (len(getattr(plan, table)) - 1).bit_length())


@triton.jit
def columns_of(table, first, many, slots, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SEQUENCES: tl.constexpr,
               CHUNK: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """[WIDTH, SEQUENCES], each column of a slot table added up (or the largest) over every sequence's slots."""
    column = tl.arange(0, WIDTH)[:, None, None]
    nothing = 0
    if LARGEST:
        nothing = -0x80000000 if table.dtype.element_ty == tl.int32 else -0x8000000000000000
    found = tl.full((WIDTH, SEQUENCES), nothing, KIND)
    for start in range(0, tl.max(many, 0), CHUNK):
        each = start + tl.arange(0, CHUNK)[None, None, :]
        slot = first[None, :, None] + each
        known = (column < COLUMNS) & (each < many[None, :, None]) & (slot < slots)
        x = tl.load(table + column.to(tl.int64) * slots + slot, mask=known, other=nothing).to(KIND)
        if LARGEST:
            found = tl.maximum(found, tl.max(x, 2))
        else:
            found += tl.sum(x, 2)
    return found


@triton.jit
def slots_of(offsets, owner, sequences, tokens, tiles, PLAN: tl.constexpr, TILE: tl.constexpr):
    """Which sequences these are, each one's first slot, and how many it has.

    In a packed batch the first and the last owner are what belongs to no sequence, as `edge` counts.
    """
    if PLAN.packed:
        sequence = owner - 1
        first = edge(offsets, owner, sequences, tokens) // TILE
        many = edge(offsets, owner + 1, sequences, tokens) // TILE - first + 1
        return sequence, first + owner, tl.where(sequence <= sequences, many, 0)
    else:
        return owner, owner * tiles, tl.where(owner < sequences, tiles, 0)


@triton.jit
def tables_of(counts, integers, floats, peaks, first, many, slots, PLAN: tl.constexpr, SEQUENCES: tl.constexpr,
              CHUNK: tl.constexpr):  # fmt: skip
    """All tables by sequence; one without columns is another's."""
    counted = columns_of(counts, first, many, slots, size(PLAN, "counts"), power_of_two(PLAN, "counts"), SEQUENCES,
                         CHUNK, tl.int64, False)  # fmt: skip
    exactly, summed, highest = counted, counted, counted
    if size(PLAN, "integers") > 0:
        exactly = columns_of(integers, first, many, slots, size(PLAN, "integers"), power_of_two(PLAN, "integers"),
                             SEQUENCES, CHUNK, tl.int64, False)  # fmt: skip
    if size(PLAN, "floats") > 0:
        summed = columns_of(floats, first, many, slots, size(PLAN, "floats"), power_of_two(PLAN, "floats"), SEQUENCES,
                            CHUNK, tl.float64, False)  # fmt: skip
    if size(PLAN, "peaks") > 0:
        highest = columns_of(peaks, first, many, slots, size(PLAN, "peaks"), power_of_two(PLAN, "peaks"), SEQUENCES,
                             CHUNK, peaks.dtype.element_ty, True)  # fmt: skip
    return counted, exactly, summed, highest


@triton.jit
def column(found, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, LARGEST: tl.constexpr):
    """[SEQUENCES], one of the columns."""
    chosen = tl.arange(0, power_of_two(PLAN, TABLE))[:, None] == at(PLAN, TABLE, name)
    if LARGEST:
        return tl.max(tl.where(chosen, found, -0x80000000 if found.dtype == tl.int32 else -0x8000000000000000), 0)
    else:
        return tl.sum(tl.where(chosen, found, 0), 0)


@triton.jit
def integer(found, PLAN: tl.constexpr, name: tl.constexpr):
    """[SEQUENCES] int64, a sum of integers."""
    if has(PLAN, "counts", name):
        return column(found[0], PLAN, "counts", name, False)
    else:
        return column(found[1], PLAN, "integers", name, False)


@triton.jit
def plain(found, PLAN: tl.constexpr, name: tl.constexpr):
    """[SEQUENCES] float64, a plain sum."""
    return column(found[2], PLAN, "floats", name, False)


@triton.jit
def exact(found, PLAN: tl.constexpr, name: tl.constexpr, D: tl.constexpr):
    """[SEQUENCES] float64, a sum that decides: of D on one grid, of anything else in two limbs."""
    if PLAN.double:
        x = plain(found, PLAN, name)
    elif D:
        x = integer(found, PLAN, name).to(tl.float64) / GRID_OF_D
    else:
        fraction = integer(found, PLAN, named(name, "fraction")).to(tl.float64) / GRID_OF_FRACTION
        x = integer(found, PLAN, name).to(tl.float64) + fraction
    if has(PLAN, "floats", named(name, "rest")):
        x += plain(found, PLAN, named(name, "rest"))
    return x


@triton.jit
def put_columns(out, found, owner, owners, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Write [WIDTH, SEQUENCES] to a table of so many owners."""
    column = tl.arange(0, WIDTH)[:, None]
    place = column.to(tl.int64) * owners + owner[None, :]
    tl.store(out + place, found, mask=(column < COLUMNS) & (owner[None, :] < owners))


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "slots", "owners"])
def gather_kernel(
    counts, integers, floats, peaks, counts_out, integers_out, floats_out, peaks_out, offsets,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, slots: tl.int64, owners: tl.int64,
    PLAN: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tables by sequence; those of a packed batch begin and end with what belongs to no sequence."""
    owner = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    _, first, many = slots_of(offsets, owner, sequences, tokens, tiles, PLAN, TILE)
    found = tables_of(counts, integers, floats, peaks, first, many, slots, PLAN, SEQUENCES, CHUNK)
    put_columns(counts_out, found[0], owner, owners, size(PLAN, "counts"), power_of_two(PLAN, "counts"))
    if size(PLAN, "integers") > 0:
        put_columns(integers_out, found[1], owner, owners, size(PLAN, "integers"), power_of_two(PLAN, "integers"))
    if size(PLAN, "floats") > 0:
        put_columns(floats_out, found[2], owner, owners, size(PLAN, "floats"), power_of_two(PLAN, "floats"))
    if size(PLAN, "peaks") > 0:
        put_columns(peaks_out, found[3], owner, owners, size(PLAN, "peaks"), power_of_two(PLAN, "peaks"))
