"""Slots: which tokens a program has, and where they lie.

A slot is one sequence's part of one aligned stretch of TILE tokens: slot (sequence s, tile t) has number s + t, so that
`N // TILE + S` slots cover any packing and a search over `offsets[s] // TILE + s`, of 128 ways a step, finds a slot's
owner, without a prefix sum. Rows of a padded batch have equally many each.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Sequences that each step of the search for a slot's owner looks at.
WAYS = tl.constexpr(128)


@triton.jit
def edge(offsets, v, sequences, tokens):
    """Where sequence v of a packed batch begins: 0 is what lies before the first, `sequences` + 1 what lies behind.

    Offsets are clamped into the batch, so that wrong ones cannot lead out of it.
    """
    known = (v > 0) & (v <= sequences + 1)
    found = tl.load(offsets + (v - 1), mask=known, other=0).to(tl.int64)
    found = tl.minimum(tl.maximum(found, 0), tokens)
    return tl.where(v > sequences + 1, tokens, found)


@triton.jit
def reached(offsets, v, slot, sequences, tokens, TILE: tl.constexpr):
    """Whether the slots of sequence v begin at this slot or before it."""
    return edge(offsets, v, sequences, tokens) // TILE + v <= slot


@triton.jit
def owners_of(offsets, slot, sequences, tokens, steps, ROWS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr):
    """[ROWS], the sequences (as `edge` counts) to which consecutive slots of a packed batch belong.

    Every step of the search for the first of them looks at WAYS sequences at once: its loads are what takes time. Of
    those that have begun the last is taken, not their number: so unsorted offsets leave no token to nobody either.
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
    # From one slot to the next, either the tile or the sequence is the next one.
    ahead = 1 + tl.arange(0, ROWS)[None, :]
    known = low + ahead <= sequences + 1
    hits = known & reached(offsets, low + ahead, slot[:, None], sequences, tokens, TILE)
    return low + tl.max(tl.where(hits, ahead, 0), 1)


@triton.jit
def slots_of_program(offsets, sequences, tokens, steps, PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """[ROWS], the slots of a program, whose they are, and which of them are nobody's."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    owner = slot
    outside = (slot < 0)[:, None, None]
    if PLAN.packed:
        owner = owners_of(offsets, slot, sequences, tokens, steps, ROWS, TILE, WAYS)
        outside = ((owner == 0) | (owner == sequences + 1))[:, None, None]
    return slot, owner, outside


@triton.jit
def coverage(tile, start, end, tokens, PLAN: tl.constexpr, TILE: tl.constexpr):
    """Whether every slot of a program fills its tile, and whether every tile lies within the batch."""
    full = tl.min(tl.min(end - start, 0)) == TILE
    whole = full
    if PLAN.packed:
        whole = (tl.min(tile, 0) >= 0) & ((tl.max(tile, 0) + 1) * TILE <= tokens)
    return full, whole


@triton.jit
def stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN: tl.constexpr, TILE: tl.constexpr):
    """The sequence of a slot, its tile, and which part of the tile is the sequence's."""
    if PLAN.packed:
        tile = slot - owner
        start = edge(offsets, owner, sequences, tokens) - tile * TILE
        end = edge(offsets, owner + 1, sequences, tokens) - tile * TILE
        sequence = owner - 1
    else:
        sequence = slot // tiles
        tile = slot % tiles
        start = slot * 0
        end = tl.where(sequence < sequences, width - tile * TILE, 0)
    start = tl.minimum(tl.maximum(start, 0), TILE)
    end = tl.minimum(tl.maximum(end, 0), TILE)
    return sequence, tile, start.to(tl.int32)[:, None, None], end.to(tl.int32)[:, None, None]


@triton.jit
def positions(first: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """[1, LANES, VEC], the place in its tile of each token from the first on."""
    lane = tl.arange(0, LANES)[None, :, None]
    return first + lane * VEC + tl.arange(0, VEC)[None, None, :]


@triton.jit
def row_start(sequence, tile, stride, PLAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """[ROWS, 1, 1] int64, where a slot's tile begins in a tensor whose rows are `stride` apart."""
    start = tile.to(tl.int64) * TILE
    if not PLAN.packed:
        rows = sequence.to(tl.int64) * stride
        if ALIGNED:
            rows = tl.multiple_of(rows, 16)
        start += rows
    return start[:, None, None]


@triton.jit
def addresses(pointer, sequence, tile, stride, step, place, PLAN: tl.constexpr, TILE: tl.constexpr,
              UNIT: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Where the tokens of a tile lie in a per-token tensor with these strides."""
    if UNIT:
        return pointer + (row_start(sequence, tile, stride, PLAN, TILE, ALIGNED) + place)
    else:
        where = ((tile.to(tl.int64) * TILE)[:, None, None] + place) * step
        if not PLAN.packed:
            where += (sequence.to(tl.int64) * stride)[:, None, None]
        return pointer + where


@triton.jit
def fetch(pointers, inside, interior):
    """Load a tile; without a mask where every slot fills its tile, so that the access can be wide."""
    if interior:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=inside, other=0)
    return x


@triton.jit
def write(pointers, x, inside, interior):
    """Store a tile."""
    if interior:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=inside)
