"""What the slots of a sequence left behind, added up: the columns of the slot tables by sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.plan import Plan
from rollout_corr.kernels.tokens import GRID_OF_D, GRID_OF_FRACTION, at, has, named


@triton.constexpr_function
def power_of_two(plan: Plan, table: str) -> int:
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
