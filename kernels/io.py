"""Load and store a program's share of per-token and per-sequence tensors."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.slots import Extents, Stretch, inside_of, parts_of, positions


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
def addresses(
    tensor: PerToken, stretch: Stretch, place: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    """Find where the tokens of a part lie: [ROWS, LANES, VEC] pointers. UNIT: neighbours lie side by side."""
    first = stretch.tile.to(tl.int64) * TILING.tile
    if UNIT:
        if not PLAN.packed:
            # Aligned rows begin at multiples of 16. Accesses of 16 bytes need a product that shows it: the hint of
            # tl.multiple_of is lost where AMD's backend takes pointers apart.
            row = tensor.row >> 4 << 4 if TILING.aligned else tensor.row
            first += stretch.sequence.to(tl.int64) * row
        return tensor.pointer + (first[:, None, None] + place)
    else:
        where = (first[:, None, None] + place) * tensor.step
        if not PLAN.packed:
            where += (stretch.sequence.to(tl.int64) * tensor.row)[:, None, None]
        return tensor.pointer + where


@triton.jit
def load_tokens(pointers: tl.tensor, inside: tl.tensor, interior: tl.tensor) -> tl.tensor:
    """Load a part; without a mask where every slot fills its tile, so that the access can be wide."""
    if interior:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=inside, other=0)
    return x


@triton.jit
def store_tokens(pointers: tl.tensor, x: tl.tensor, inside: tl.tensor, interior: tl.tensor) -> None:
    """Store a part; without a mask where every slot fills its tile."""
    x = x.to(pointers.dtype.element_ty)
    if interior:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=inside)


@triton.jit
def store_parts(
    tensor: PerToken, parts: tl.tuple, stretch: Stretch, PLAN: tl.constexpr, TILING: tl.constexpr, FULL: tl.constexpr
) -> None:
    """Store all parts of a tile of a contiguous tensor, each [ROWS, LANES, VEC]. FULL: every slot fills its tile."""
    for part in tl.static_range(parts_of(TILING)):
        place = positions(part * TILING.part, TILING.lanes, TILING.vec)
        where = addresses(tensor, stretch, place, PLAN, TILING, True)
        store_tokens(where, parts[part], inside_of(stretch, place), FULL)


@triton.jit
def of_sequence(table: tl.tensor, stretch: Stretch, extents: Extents, like: tl.tensor) -> tl.tensor:
    """Load a per-sequence tensor, [S], for the tokens of a part: shape and dtype of `like`; 0 outside sequences."""
    known = (stretch.sequence >= 0) & (stretch.sequence < extents.sequences)
    each = tl.load(table + stretch.sequence, mask=known, other=0.0)
    return each.to(like.dtype)[:, None, None] + tl.zeros_like(like)
