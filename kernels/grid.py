"""Divide a batch into programs: the host side that the launchers of all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter, or_

import torch
from torch import Tensor

from ..specs.caches import cached_untraced, registered
from .tiles import WAYS, Tiling

# Threads of a program over sequences: a warp, which needs no barrier.
SEQUENCE_THREADS = 32
# Programs over tokens whose results one program adds up, and the most of such parts unless there is too much of each.
LEAST_PART, MOST_PARTS = 256, 256


@dataclass(frozen=True)
class Shape:
    """The division of work among programs and threads. A compile key contains it, so there are only these few."""

    tile: int  # tokens of a program that passes over tokens, in a large batch
    lanes: int  # threads of such a program, at most a warp: sums over them need no barrier
    sequences: int  # sequences of a program that passes over sequences
    chunk: int  # slots that each of its threads has on their way at a time; see gather.py
    least: int = 0  # tokens of a program over tokens in a small batch; 0: as many as in a large one
    parts: int = 4  # the most vectors of a thread in a step


# Tokens of a program that passes over tokens, in a batch that has enough for this many programs: 16 warps on each of
# 132 multiprocessors. In a smaller one tiles are shorter, since a program takes its steps one after the other.
TILE, PROGRAMS = 2048, 2048
# Tokens that a program over sequences may have to zero alone; beyond that, helper programs take a share.
MOST_ZEROED, SHARE, SHARERS = 1 << 17, 1 << 15, 1024
# (least mean length of the sequences, shape).
SHAPES = (
    (16384, Shape(tile=TILE, lanes=32, sequences=2, chunk=8, least=512)),
    (1024, Shape(tile=TILE, lanes=32, sequences=32, chunk=4, least=512)),
    (0, Shape(tile=TILE, lanes=32, sequences=32, chunk=2, least=256)),
)


@dataclass(frozen=True, eq=False)
class Cut:
    """A shape, and the tiling that follows; equal only to itself, so that keys which contain one are quick."""

    shape: Shape
    tiling: Tiling
    warp: int  # threads of a program that passes over tokens


_CUTS: dict[tuple[int, int, bool, bool, bool, int], Cut] = registered({})


def cut_for(
    tokens: int, sequences: int, element: int, unit: bool, aligned: bool, loose: bool = False, warp: int = 32
) -> Cut:
    """Choose the shape for a batch from its sizes, and its tiling; see `grid_for` for the others."""
    mean = tokens // (sequences or 1)
    for one in SHAPES:
        least, shape = one
        if mean >= least:
            break
    key = (least, element, unit, aligned, loose, warp)
    found = _CUTS.get(key)
    if found is None or found.shape is not shape:
        tiling = _tiling(shape, element, unit, aligned, loose)
        found = _CUTS[key] = Cut(shape, tiling.for_warps_of(warp), warp)
    return found


def _tiling(shape: Shape, element: int, unit: bool, aligned: bool, loose: bool) -> Tiling:
    """Divide a step: a thread loads 16 bytes at a time, and at most 4 log-probs."""
    # 4 tokens of a thread at a time: 8 take twice the registers (metrics 138 for 96, PPO 153 for 108), and 2 % less
    # instructions where sequences are long.
    vec = 1 if loose else min(16 // element, 4, shape.tile)
    parts = max(1, min(shape.parts, 4 // vec, shape.tile // (shape.lanes * vec)))
    return Tiling(parts, min(shape.lanes, shape.tile // vec), vec, unit, aligned)


def search_steps(sequences: int, ways: int = WAYS.value) -> int:
    """Count the steps in which a search with so many ways finds the first owner of a tile."""
    steps, span = 0, sequences + 1
    while span > 0:
        steps, span = steps + 1, span // ways
    return steps


@dataclass(frozen=True, eq=False)
class Grid:
    """The division of a batch into programs; equal only to itself. `SIZES` are arguments of kernels."""

    tokens: int
    sequences: int
    width: int  # of a row; 0 for a packed batch
    row_tiles: int  # of a row; 0 for a packed batch
    tile_bits: int  # a tile has 2^tile_bits tokens
    slots: int  # of `read`
    search_steps: int  # of the search for the first owner of a tile
    token_programs: int  # those that pass over tokens, and over sequences
    sequence_programs: int
    shares: int  # programs of `decide` that share the zeroing of what one of them decides about
    part: int  # programs over tokens whose results are added up together; see partials.py
    parts: int
    owner_count: int  # sequences, and what is of none before and behind those of a packed batch
    unit_count: int  # owners of slots, which with turns are these, and programs that pass over them
    unit_programs: int
    TILING: Tiling
    SHAPE: Shape
    cut: Cut  # the shape with its tiling
    sequence_rows: int  # of the tables that programs over sequences fill
    contiguous: bool  # all tensors that are read with strides of their own are


def tile_for(tokens: int, shape: Shape) -> int:
    """Choose the tokens of a tile: 2^this many, by the size of the batch.

    Integers add up to the same sums whatever the tile.
    """
    most = shape.tile.bit_length() - 1
    if not shape.least:
        return most
    return min(max((tokens // PROGRAMS - 1).bit_length(), shape.least.bit_length() - 1), most)


# The fields that kernels take.
SIZES = (
    *(
        "tokens",
        "sequences",
        "width",
        "row_tiles",
        "tile_bits",
        "slots",
        "search_steps",
        "token_programs",
        "sequence_programs",
    ),
    *("shares", "part", "parts"),
    *("owner_count", "unit_count", "TILING", "SHAPE"),
)
sizes_of = attrgetter(*SIZES)


def grid_for(sequences: int, width: int | None, tensors: Sequence[Tensor], element: int) -> Grid:
    """Divide a batch from its metadata.

    `tensors` are all per-token tensors that are read with strides of their own, `element` the bytes of the smallest
    log-prob.
    """
    first = tensors[0]
    tokens = first.numel()
    contiguous = all(map(Tensor.is_contiguous, tensors))
    if contiguous:
        unit, aligned = True, reduce(or_, map(Tensor.data_ptr, tensors)) & 15 == 0
    else:
        unit, aligned = _reads_of(tensors, width is None)
    if width is not None:
        aligned = aligned and not (width & 15 and sequences > 1)
    # Where no access to a row is known to be aligned Triton gives neighbors to different threads, which would exchange
    # every sum over neighbors. Outputs of a packed batch are.
    loose = width is not None and not aligned
    cut = cut_for(tokens, sequences, element, unit, aligned, loose, warp_size(first.device))
    return divided(cut, tokens, sequences, width, contiguous)


@cached_untraced(maxsize=1024)
def divided(cut: Cut, tokens: int, sequences: int, width: int | None, contiguous: bool) -> Grid:
    """Divide by a cut. What `correct` finds, `policy_loss` on the same batch finds again."""
    shape, bits = cut.shape, tile_for(tokens, cut.shape)
    tile = 1 << bits
    if width is None:
        of_row, owners = 0, sequences + 2
        slots, token_programs = tokens // tile + owners, tokens // tile + 1
    else:
        of_row, owners = max(1, -(-width // tile)), sequences
        slots = token_programs = max(1, of_row * sequences)
    sequence_programs = max(1, -(-owners // shape.sequences))
    shares = 1
    if tokens > MOST_ZEROED * sequence_programs:
        shares = max(1, min(tokens // SHARE, SHARERS) // sequence_programs)
    part = max(LEAST_PART, -(-token_programs // MOST_PARTS))
    parts = -(-token_programs // part)
    return Grid(
        tokens=tokens,
        sequences=sequences,
        width=width or 0,
        row_tiles=of_row,
        tile_bits=bits,
        slots=slots,
        search_steps=search_steps(sequences),
        token_programs=token_programs,
        sequence_programs=sequence_programs,
        shares=shares,
        part=part,
        parts=parts,
        owner_count=owners,
        unit_count=owners,
        unit_programs=sequence_programs,
        TILING=cut.tiling,
        SHAPE=shape,
        cut=cut,
        sequence_rows=sequence_programs * shares,
        contiguous=contiguous,
    )


@cached_untraced(maxsize=1024)
def of_units(grid: Grid, sequences: int) -> Grid:
    """Divide a batch whose owners of slots are turns: programs over sequences have so many to go through."""
    programs = -(-(sequences + 2) // grid.SHAPE.sequences)
    return replace(grid, sequence_programs=programs, shares=1, owner_count=sequences + 2, sequence_rows=programs)


def _reads_of(tensors: Sequence[Tensor], packed: bool) -> tuple[bool, bool]:
    """Return whether all tokens lie side by side, and whether all rows begin at a multiple of 16 elements and bytes."""
    apart = [x for x in tensors if not x.is_contiguous()]
    unit = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in apart)
    rows = packed or all(x.stride(0) % 16 == 0 or x.shape[0] <= 1 for x in apart)
    return unit, unit and rows and all(x.data_ptr() % 16 == 0 for x in tensors)


@cached_untraced(maxsize=16)
def warp_size(device: torch.device) -> int:
    """Count the threads of a warp: 32, or 64 on some of AMD's GPUs."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def over_tokens(grid: Grid) -> tuple[int, int]:
    """Programs of a kernel that passes over tokens, and the threads of each."""
    return grid.token_programs, grid.cut.warp


def over_units(grid: Grid) -> tuple[int, int]:
    """Programs of a kernel that passes over the owners of slots, and the threads of each."""
    return grid.unit_programs, SEQUENCE_THREADS


# For tensors of the device that is the current one already.
HERE = nullcontext()


def current(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of a tensor the current one, for launches."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else HERE


def strides_of(tensors: Sequence[Tensor | None], grid: Grid) -> list[int]:
    """List the distances from one row and from one token to the next, by tensor; one that is None is not read."""
    found = [grid.width, 1] * len(tensors)
    if not grid.contiguous:
        for place, x in enumerate(tensors):
            if x is not None and not x.is_contiguous():
                found[2 * place : 2 * place + 2] = (0, x.stride(0)) if x.dim() == 1 else x.stride()
    return found
