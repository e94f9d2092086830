"""Slots: the tokens of a program, and the sequences that own them.

A slot is the part of one aligned tile of TILE tokens that belongs to one sequence. In a packed batch slot
(sequence s, tile t) has number s + t, so `N // TILE + S` slots cover any packing, and a search over
`offsets[s] // TILE + s` finds the owner of a slot: no prefix sum, no map on the host. Each step of the search looks at
128 sequences. Tokens before the first sequence and behind the last belong to two more owners, 0 and S + 1. The rows of
a padded batch have equally many slots each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import triton
import triton.language as tl

# Sequences that each step of the search for the owner of a slot looks at.
WAYS = tl.constexpr(128)


@dataclass(frozen=True)
class Tiling:
    """The division of a program's tokens into rows, lanes and vectors; a compile-time constant."""

    rows: int  # slots of a program
    tile: int  # tokens of a slot
    lanes: int  # threads that share a row of a part
    vec: int  # neighbouring tokens of a thread
    unit: bool  # in all tensors neighbouring tokens lie side by side
    aligned: bool  # every row starts at a multiple of 16 elements behind a multiple of 16 bytes

    @property
    def parts(self) -> int:
        """Vectors of a thread in one step."""
        return self.rows

    @property
    def step(self) -> int:
        """Tokens that a walk along a tile takes at a time."""
        return self.rows * self.lanes * self.vec

    def for_warps_of(self, threads: int) -> Tiling:
        """Give each thread of a larger warp fewer vectors, or the warp more tokens at a time."""
        times = threads // 32
        if times == 1 or self.lanes < 32:
            return self
        return replace(self, lanes=self.lanes * times, rows=max(1, self.rows // times))


class Extents(NamedTuple):
    """Sizes of a batch: int64 scalars, in no compile key."""

    tokens: tl.tensor
    sequences: tl.tensor
    width: tl.tensor  # of a row; 0 for a packed batch
    tiles: tl.tensor  # of a row; 0 for a packed batch
    tile_bits: tl.tensor  # int32: a tile has 2^tile_bits tokens; no constant, so that any size takes one kernel


class Stretch(NamedTuple):
    """The slots of a program: each is the tokens from start to end of a tile."""

    sequence: tl.tensor  # [ROWS] int64; -1 and S are no sequence
    tile: tl.tensor  # [ROWS] int64, of the batch if packed, else of the row
    start: tl.tensor  # [ROWS, 1, 1] int32, in [0, TILE]
    end: tl.tensor  # [ROWS, 1, 1] int32, in [0, TILE]


@triton.jit
def edge(offsets: tl.tensor, v: tl.tensor, sequences: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Find where owner v of a packed batch begins: owner 0 is before the first sequence, S + 1 behind the last.

    Offsets are clamped into the batch, so that wrong ones cannot lead out of it.
    """
    known = (v > 0) & (v <= sequences + 1)
    found = tl.load(offsets + (v - 1), mask=known, other=0).to(tl.int64)
    found = tl.minimum(tl.maximum(found, 0), tokens)
    return tl.where(v > sequences + 1, tokens, found)


@triton.jit
def reached(
    offsets: tl.tensor, v: tl.tensor, slot: tl.tensor, sequences: tl.tensor, tokens: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Test whether the slots of owner v begin at this slot or before it."""
    return edge(offsets, v, sequences, tokens) // TILE + v <= slot


@triton.jit
def owners_of(
    offsets: tl.tensor, slot: tl.tensor, sequences: tl.tensor, tokens: tl.tensor, steps: tl.tensor,
    ROWS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find the owners of consecutive slots of a packed batch: [ROWS], as `edge` counts them.

    Every step of the search for the first owner looks at WAYS of them at once, because its loads are what takes time.
    It takes the last that has begun, not their number, so that unsorted offsets leave no token without an owner either.
    """
    first = tl.min(slot, 0)
    low, span = first * 0, sequences + 1
    for _ in range(steps):
        step = span // WAYS + 1
        way = 1 + tl.arange(0, WAYS)
        hits = (way * step <= span) & reached(offsets, low + way * step, first, sequences, tokens, TILE)
        forward = tl.max(tl.where(hits, way, 0), 0) * step
        low += forward
        span = tl.minimum(step - 1, span - forward)
    # From one slot to the next, either the tile or the owner is the next one.
    ahead = 1 + tl.arange(0, ROWS)[None, :]
    known = low + ahead <= sequences + 1
    hits = known & reached(offsets, low + ahead, slot[:, None], sequences, tokens, TILE)
    return low + tl.max(tl.where(hits, ahead, 0), 1)


@triton.jit
def slots_of_program(
    offsets: tl.tensor, extents: Extents, steps: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Number the slots of a program and find their owners: [ROWS] each."""
    slot = tl.program_id(0).to(tl.int64) * TILING.rows + tl.arange(0, TILING.rows)
    owner = slot
    if PLAN.packed:
        owner = owners_of(offsets, slot, extents.sequences, extents.tokens, steps, TILING.rows, TILING.tile, WAYS)
    return slot, owner


@triton.jit
def stretch_of(
    offsets: tl.tensor, owner: tl.tensor, slot: tl.tensor, extents: Extents, PLAN: tl.constexpr, TILE: tl.constexpr
) -> Stretch:
    """Find the sequence of each slot, its tile, and which part of the tile is the sequence's."""
    if PLAN.packed:
        tile = slot - owner
        start = edge(offsets, owner, extents.sequences, extents.tokens) - tile * TILE
        end = edge(offsets, owner + 1, extents.sequences, extents.tokens) - tile * TILE
        sequence = owner - 1
    else:
        sequence = slot // extents.tiles
        tile = slot % extents.tiles
        start = slot * 0
        end = tl.where(sequence < extents.sequences, extents.width - tile * TILE, 0)
    start = tl.minimum(tl.maximum(start, 0), TILE)
    end = tl.minimum(tl.maximum(end, 0), TILE)
    return Stretch(sequence, tile, start.to(tl.int32)[:, None, None], end.to(tl.int32)[:, None, None])


@triton.jit
def is_full(stretch: Stretch, TILE: tl.constexpr) -> tl.tensor:
    """Test whether every slot of a program fills its tile."""
    return tl.min(tl.min(stretch.end - stretch.start, 0)) == TILE


@triton.jit
def positions(FIRST: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr) -> tl.tensor:
    """Number the tokens of a part in their tile: [1, LANES, VEC], from the first on."""
    lane = tl.arange(0, LANES)[None, :, None]
    return FIRST + lane * VEC + tl.arange(0, VEC)[None, None, :]


@triton.jit
def inside_of(stretch: Stretch, place: tl.tensor) -> tl.tensor:
    """Test which tokens of a tile belong to the slot: [ROWS, LANES, VEC]."""
    return (place >= stretch.start) & (place < stretch.end)
