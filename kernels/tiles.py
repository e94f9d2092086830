"""Tiles: the tokens of a program that passes over tokens, and the sequences that it walks along.

A program is one warp. It owns one aligned tile of 2^tile_bits tokens, fewer in a small batch so that there are enough
programs, and takes it in steps of [PARTS, LANES, VEC] tokens: VEC neighbors belong to one thread. Every token is
loaded, computed and stored once, whatever the lengths of the sequences; a loop over the sequences that end in a step
adds up what belongs to each. The part of a sequence in a tile is a slot; slot (sequence s, tile t) has number s + t.
Tokens before the first sequence and behind the last belong to two more owners, 0 and S + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NamedTuple

import triton
import triton.language as tl

# Owners that each step of the search for the first owner of a tile looks at: one a thread.
WAYS = tl.constexpr(32)
# Versions of policies lie between this and its negation.
LARGEST_VERSION = tl.constexpr(1 << 62)


# The types of lengths, strides and counts.
INTEGERS = ("tl.int32", "tl.int64")


def launched(kernel: Callable[..., None]) -> Any:
    """Make a kernel of a function whose annotated integers, such as lengths and strides, are in no compile key."""
    integers = [name for name, one in signature(kernel).parameters.items() if one.annotation in INTEGERS]
    return triton.jit(kernel, do_not_specialize=integers)


@dataclass(frozen=True)
class Tiling:
    """The division of a step into parts, lanes and vectors; a compile-time constant."""

    parts: int  # vectors of a thread in one step
    lanes: int  # threads of a part
    vec: int  # neighboring tokens of a thread
    unit: bool  # in all tensors neighboring tokens lie side by side
    aligned: bool  # every row starts at a multiple of 16 elements behind a multiple of 16 bytes

    @property
    def step(self) -> int:
        """Tokens that a walk along a tile takes at a time."""
        return self.parts * self.lanes * self.vec

    def for_warps_of(self, threads: int) -> Tiling:
        """Return the tiling for a larger warp: fewer vectors a thread, or more tokens a step."""
        times = threads // 32
        if times == 1 or self.lanes < 32:
            return self
        return replace(self, lanes=self.lanes * times, parts=max(1, self.parts // times))


class Extents(NamedTuple):
    """Sizes of a batch: int64 scalars, in no compile key."""

    tokens: tl.tensor
    sequences: tl.tensor
    width: tl.tensor  # of a row; 0 for a packed batch
    row_tiles: tl.tensor  # of a row; 0 for a packed batch
    tile_bits: tl.tensor  # int32: a tile has 2^tile_bits tokens; no constant, so that any size takes one kernel


class Tile(NamedTuple):
    """The tile of a program: part of a packed batch, or of a row. All positions are in [0, size]."""

    row: tl.tensor  # int64; 0 of a packed batch
    first: tl.tensor  # int64, the first token in the batch or in the row
    begin: tl.tensor  # int32, where the first sequence begins
    end: tl.tensor  # int32, where the last ends
    length: tl.tensor  # int32, where the batch or the row ends
    size: tl.tensor  # int32, tokens of a tile: a multiple of a step


class Span(NamedTuple):
    """The part in a tile of the sequence, or the turn of an agent, that a walk along the tile has come to."""

    owner: tl.tensor  # int64; its row in a padded batch
    start: tl.tensor  # int32, in [0, size]
    end: tl.tensor  # int32, in [start, size]
    last: tl.tensor  # int64, the last owner of the tile


class PerToken(NamedTuple):
    """A tensor with an entry for every token, [N] or [B, T], and the distances of its entries."""

    pointer: tl.tensor
    row: tl.tensor  # from one row to the next, int64
    step: tl.tensor  # from one token to the next, int64; not read where all lie side by side (UNIT)


@triton.jit
def edge(p_offsets, v, sequences, tokens):
    """Find where owner v of a packed batch begins: owner 0 is before the first sequence, S + 1 behind the last.

    Offsets are clamped into the batch, so that wrong ones cannot lead out of it.
    """
    known = (v > 0) & (v <= sequences + 1)
    found = tl.load(p_offsets + (v - 1), mask=known, other=0).to(tl.int64)
    found = tl.minimum(tl.maximum(found, 0), tokens)
    return tl.where(v > sequences + 1, tokens, found)


@triton.constexpr_function
def bits_of(step: int) -> int:
    """Count the zeros at the end of a power of two."""
    return step.bit_length() - 1


@triton.jit
def within_tile(x, size):
    """Clamp a distance from the first token of a tile to [0, size]."""
    return tl.minimum(tl.maximum(x, 0), size).to(tl.int32)


@triton.jit
def tile_of_program(p_offsets, extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr) -> Tile:
    """Find the tile of this program."""
    program = tl.program_id(0).to(tl.int64)
    # As a product, which shows that addresses of whole steps are aligned.
    size = (1 << (extents.tile_bits - bits_of(TILING.step))) * TILING.step
    if PLAN.packed:
        first = program * size
        begin = edge(p_offsets, program * 0 + 1, extents.sequences, extents.tokens) - first
        end = edge(p_offsets, extents.sequences + 1, extents.sequences, extents.tokens) - first
        length = within_tile(extents.tokens - first, size)
        return Tile(program * 0, first, within_tile(begin, size), within_tile(end, size), length, size)
    else:
        row = program // extents.row_tiles
        first = (program % extents.row_tiles) * size
        length = within_tile(tl.where(row < extents.sequences, extents.width - first, 0), size)
        return Tile(row, first, length * 0, length, length, size)


@triton.jit
def end_of(p_offsets, owner, start, tile: Tile, extents: Extents, PLAN: tl.constexpr):
    """Find where an owner ends in the tile, not before its start; behind the last sequence nothing follows."""
    if PLAN.packed:
        end = tl.load(p_offsets + owner, mask=owner <= extents.sequences, other=0).to(tl.int64) - tile.first
        return tl.minimum(tl.maximum(end, start), tile.length).to(tl.int32)
    else:
        return tile.length


@triton.jit
def owner_before(p_offsets, token, extents: Extents, steps, WAYS: tl.constexpr):
    """Find the last owner that begins before a token; before the first token it is owner 0.

    Every step of the search looks at WAYS owners at once, because its loads are what takes time.
    """
    owner, span = token * 0, extents.sequences + 1
    way = 1 + tl.arange(0, WAYS)
    for _ in range(steps):
        step = span // WAYS + 1
        begun = edge(p_offsets, owner + way * step, extents.sequences, extents.tokens) < token
        forward = tl.max(tl.where((way * step <= span) & begun, way, 0), 0) * step
        owner += forward
        span = tl.minimum(step - 1, span - forward)
    return owner


@triton.jit
def first_span(p_offsets, tile: Tile, extents: Extents, steps, PLAN: tl.constexpr) -> Span:
    """Find the first owner of a tile, which is the last of the tile before.

    Both are searched for, so that no slot is left out even where offsets are not sorted.
    """
    owner, last = tile.row, tile.row
    if PLAN.packed:
        owner = owner_before(p_offsets, tile.first, extents, steps, WAYS)
        last = owner_before(p_offsets, tile.first + tile.size, extents, steps, WAYS)
    return Span(owner, tile.begin, end_of(p_offsets, owner, tile.begin, tile, extents, PLAN), last)


@triton.jit
def ends_by(span: Span, first, TILING: tl.constexpr):
    """Return whether a span ends in the step that begins at `first`, or before it; the last owner's never does."""
    return (span.owner < span.last) & (span.end <= first + TILING.step)


@triton.jit
def next_span(span: Span, p_offsets, tile: Tile, extents: Extents, PLAN: tl.constexpr) -> Span:
    """Go on to the next owner."""
    end = end_of(p_offsets, span.owner + 1, span.end, tile, extents, PLAN)
    return Span(span.owner + 1, span.end, end, span.last)


@triton.jit
def places_of(first, TILING: tl.constexpr):
    """Number the tokens of a step in their tile: [parts, lanes, vec]."""
    part = tl.arange(0, TILING.parts)[:, None, None] * (TILING.lanes * TILING.vec)
    lane = tl.arange(0, TILING.lanes)[None, :, None] * TILING.vec
    return first + (part + lane + tl.arange(0, TILING.vec)[None, None, :])


@triton.jit
def zeros_by(x):
    """Make int32 zeros that threads divide as they do the log-probs from which x is computed.

    A loop carries a tensor by the layout it begins with, and constants have another: what such a loop gives would go
    through shared memory. Not a constant to Triton, this is one to LLVM.
    """
    return (x.to(tl.int32, bitcast=True) & 1) >> 1


@triton.jit
def number_of_sequence(owner, PLAN: tl.constexpr):
    """Number the sequence of an owner; -1 and S are no sequence."""
    if PLAN.packed:
        return owner - 1
    else:
        return owner


@triton.jit
def age_at(version, current):
    """Compute an age from a version; a filler at the end of int64 must not wrap around to the other sign."""
    return current - tl.minimum(tl.maximum(version.to(tl.int64), -LARGEST_VERSION), LARGEST_VERSION)


@triton.jit
def entry_of(p_table, owner, extents: Extents, PLAN: tl.constexpr, current: tl.tensor | None = None):
    """Load an owner's entry of a per-sequence tensor, or its age where versions are read; 0 where it is no sequence."""
    sequence = number_of_sequence(owner, PLAN)
    found = tl.load(p_table + sequence, mask=(sequence >= 0) & (sequence < extents.sequences), other=0)
    if current is None:
        return found
    else:
        return age_at(found, current)


@triton.jit
def ends_in(span: Span, first, p_offsets, tile: Tile, extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Count the sequences that end in a step, for a loop that carries a tensor: a `while` moves it between threads."""
    many = tile.length * 0
    while ends_by(span, first, TILING):
        span = next_span(span, p_offsets, tile, extents, PLAN)
        many += 1
    return many


@triton.jit
def of_sequences(p_table, like, span: Span, first, p_offsets, tile: Tile, extents: Extents, PLAN: tl.constexpr,
                 TILING: tl.constexpr, current: tl.tensor | None = None, own: tl.tensor | None = None):  # fmt: skip
    """Load a per-sequence tensor, [S], for the tokens of a step: shape and dtype of `like`.

    Args:
        current: The version to whose ages versions are turned.
        own: The entry of the span's owner, where the walk has loaded it already.
    """
    if own is None:
        own = entry_of(p_table, span.owner, extents, PLAN, current)
    x = tl.zeros_like(like) + own.to(like.dtype)
    if PLAN.packed:
        # The loop carries x as threads have the log-probs, so that no step goes through shared memory.
        x += zeros_by(like).to(like.dtype)
        for _ in range(ends_in(span, first, p_offsets, tile, extents, PLAN, TILING)):
            span = next_span(span, p_offsets, tile, extents, PLAN)
            # Added to zero as the first, where -0 becomes 0: a sign must not tell where in a tile a sequence begins.
            its = tl.zeros_like(like) + entry_of(p_table, span.owner, extents, PLAN, current).to(like.dtype)
            x = tl.where(places_of(first, TILING) >= span.start, its, x)
    return x


# --- loads and stores of a step ---


@triton.jit
def either(x, other):
    """Return x, or the other where x is None: Triton 3.6 takes no None into a tuple."""
    if x is None:
        return other
    else:
        return x


@triton.jit
def contiguous(p_tensor, extents: Extents) -> PerToken:
    """A contiguous tensor, for UNIT accesses."""
    return PerToken(p_tensor, extents.width, extents.width)


@triton.jit
def pointers_to(tensor: PerToken, tile: Tile, place, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr):
    """Find where the tokens of a step lie: [PARTS, LANES, VEC] pointers. UNIT: neighbors lie side by side."""
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
def load_step(tensor: PerToken, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
              WHOLE: tl.constexpr):  # fmt: skip
    """Load a step; without a mask, so that accesses can be wide, where all of it lies within the batch (WHOLE)."""
    place = places_of(first, TILING)
    if WHOLE:
        return tl.load(pointers_to(tensor, tile, place, PLAN, TILING, UNIT))
    else:
        return tl.load(pointers_to(tensor, tile, place, PLAN, TILING, UNIT), mask=place < tile.length, other=0)


@triton.jit
def store_step(tensor: PerToken, x, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr,
               WHOLE: tl.constexpr) -> None:  # fmt: skip
    """Store a step of a contiguous tensor; without a mask where all of it lies within the batch."""
    place = places_of(first, TILING)
    where = pointers_to(tensor, tile, place, PLAN, TILING, True)
    if WHOLE:
        tl.store(where, x.to(where.dtype.element_ty))
    else:
        tl.store(where, x.to(where.dtype.element_ty), mask=place < tile.length)
