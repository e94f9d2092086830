"""Load and store the steps of a tile of per-token tensors."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.tiles import Extents, Tile, places_of


class PerToken(NamedTuple):
    """A tensor with an entry for every token, [N] or [B, T], and the distances of its entries."""

    pointer: tl.tensor
    row: tl.tensor  # from one row to the next, int64
    step: tl.tensor  # from one token to the next, int64; not read where all lie side by side (UNIT)


@triton.jit
def either(x: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Return x, or the other where x is None: Triton 3.5 and 3.6 take no None into a tuple."""
    if x is None:
        return other
    else:
        return x


@triton.jit
def contiguous(pointer: tl.tensor, extents: Extents) -> PerToken:
    """A contiguous tensor, for UNIT accesses."""
    return PerToken(pointer, extents.width, extents.width)


@triton.jit
def pointers_to(
    tensor: PerToken, tile: Tile, place: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Find where the tokens of a step lie: [PARTS, LANES, VEC] pointers. UNIT: neighbours lie side by side."""
    if UNIT:
        begin = tensor.pointer + tile.first
        if not PLAN.packed:
            # Aligned rows begin at multiples of 16. Accesses of 16 bytes need a product that shows it: the hint of
            # tl.multiple_of is lost where AMD's backend takes pointers apart.
            row = tensor.row >> 4 << 4 if TILING.aligned else tensor.row
            begin += tile.row * row
        return begin + place
    else:
        begin = tensor.pointer + tile.first * tensor.step
        if not PLAN.packed:
            begin += tile.row * tensor.row
        return begin + place * tensor.step


@triton.jit
def load_step(
    tensor: PerToken, tile: Tile, first: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a step; without a mask, so that accesses can be wide, where all of it lies within the batch (WHOLE)."""
    place = places_of(first, TILING)
    if WHOLE:
        return tl.load(pointers_to(tensor, tile, place, PLAN, TILING, UNIT))
    else:
        return tl.load(pointers_to(tensor, tile, place, PLAN, TILING, UNIT), mask=place < tile.length, other=0)


@triton.jit
def store_step(
    tensor: PerToken, x: tl.tensor, tile: Tile, first: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Store a step of a contiguous tensor; without a mask where all of it lies within the batch."""
    place = places_of(first, TILING)
    where = pointers_to(tensor, tile, place, PLAN, TILING, True)
    if WHOLE:
        tl.store(where, x.to(where.dtype.element_ty))
    else:
        tl.store(where, x.to(where.dtype.element_ty), mask=place < tile.length)
