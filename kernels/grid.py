"""Divide a batch into programs: the host side that the launchers of all operations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.slots import WAYS, Tiling

# Threads of a program over sequences, a warp that needs no barrier, and partial results that a program adds up at a
# time.
SEQUENCE_THREADS, FINISH_CHUNK = 32, 256


@dataclass(frozen=True)
class Shape:
    """The division of work among programs and threads. A compile key contains it, so there are only these few."""

    rows: int  # slots of a program
    tile: int  # tokens of a slot
    lanes: int  # threads that share a row: at most a warp, so that sums over a row stay within one
    sequences: int  # sequences of a program that passes over sequences
    chunk: int  # slots that each of its threads has on their way at a time; see gather.py
    warps: int  # of 32 threads


# (least mean length of the sequences, shape). A thread has 16 tokens in all of them. Tokens of a tile that the sequence
# does not fill are idle; a smaller tile spends more on the sums of its slot, and leaves more slots to add up.
# Instructions per token counted for metrics alone, packed, by tile: mean length 160: 163 (64), 206 (128), 242 (256);
# 400: 135 (64), 151 (128), 153 (256), 193 (512); 1,000: 124 (64), 129 (128), 117 (256), 128 (512); longest: 80 (512).
SHAPES = (
    (16384, Shape(rows=4, tile=512, lanes=32, sequences=2, chunk=8, warps=4)),
    (1024, Shape(rows=4, tile=512, lanes=32, sequences=32, chunk=8, warps=4)),
    (192, Shape(rows=8, tile=256, lanes=32, sequences=32, chunk=4, warps=4)),
    (0, Shape(rows=32, tile=64, lanes=32, sequences=32, chunk=2, warps=4)),
)


@dataclass(frozen=True, eq=False)
class Cut:
    """A shape, and the tiling that follows; equal to itself alone, so that keys which contain one are quick."""

    shape: Shape
    tiling: Tiling
    whole: Shape  # the shape before its tile was halved

    @property
    def threads(self) -> int:
        """Threads of a program over tokens."""
        return 32 * self.shape.warps


_CUTS: dict[tuple[int, int, int, bool, bool], Cut] = {}


def cut_for(tokens: int, sequences: int, halvings: int, element: int, unit: bool, aligned: bool) -> Cut:
    """Choose the shape for a batch from its sizes alone, with the tile halved so many times, and its tiling."""
    mean = tokens // max(1, sequences)
    for one in SHAPES:
        least, shape = one
        if mean >= least:
            break
    key = (least, halvings, element, unit, aligned)
    found = _CUTS.get(key)
    if found is None or found.whole is not shape:
        halved = replace(shape, tile=shape.tile >> halvings)
        found = _CUTS[key] = Cut(halved, _tiling(halved, element, unit, aligned), shape)
    return found


def _tiling(shape: Shape, element: int, unit: bool, aligned: bool) -> Tiling:
    """Divide tiles among threads so that one loads 16 bytes of the smallest log-prob at a time."""
    vec = min(16 // element, shape.tile)
    return Tiling(shape.rows, shape.tile, min(shape.lanes, shape.tile // vec), vec, unit, aligned)


@lru_cache(maxsize=256)
def search_steps(sequences: int, ways: int) -> int:
    """Count the steps in which a search with so many ways finds the owner of a slot."""
    steps, span = 0, sequences + 1
    while span > 0:
        steps, span = steps + 1, span // ways
    return steps


class Grid(NamedTuple):
    """The division of a batch into programs."""

    cut: Cut
    tokens: int
    sequences: int
    width: int  # of a row; 0 for a packed batch
    tiles: int  # of a row; 0 for a packed batch
    slots: int
    token_programs: int
    sequence_programs: int
    steps: int  # of the search for the owner of a slot
    contiguous: bool  # all tensors that are read with strides of their own

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The counts that workspaces of all operations are laid out by."""
        return self.slots, self.token_programs, self.sequence_programs, self.sequences


def grid_for(like: Tensor, offsets: Tensor | None, tensors: Sequence[Tensor], element: int, halvings: int) -> Grid:
    """Divide a batch from metadata alone.

    Args:
        like: Any of its per-token tensors, [N] or [B, T].
        offsets: [S + 1], of a packed batch.
        tensors: All per-token tensors that are read with strides of their own.
        element: Bytes of the smallest log-prob.
        halvings: How often a tile is halved.
    """
    packed = offsets is not None
    tokens = like.numel()
    if offsets is None:
        sequences, width = like.shape
        aligned = width % 16 == 0 or sequences <= 1
    else:
        sequences, width, aligned = offsets.shape[0] - 1, 0, True
    unit = contiguous = True
    addresses = 0
    for x in tensors:
        if x.is_contiguous():
            addresses |= x.data_ptr()
        else:
            contiguous = False
            unit = unit and (x.stride(-1) == 1 or x.shape[-1] <= 1)
            aligned = aligned and _is_aligned(x, packed)
    aligned = aligned and unit and addresses % 16 == 0
    # Where tokens are loaded one by one, addresses take registers too. A part of a tile has no fewer tokens than
    # threads: 64 of a tile of 512 where all are float64, else 128.
    halvings = min(3 if element == 8 else 2, halvings + (not aligned))
    cut = cut_for(tokens, sequences, halvings, element, unit, aligned)
    shape = cut.shape
    tiles = 0 if packed else max(1, -(-width // shape.tile))
    slots = tokens // shape.tile + sequences + 2 if packed else tiles * sequences
    token_programs = max(1, -(-slots // shape.rows))
    sequence_programs = max(1, -(-(sequences + 2 * packed) // shape.sequences))
    steps = search_steps(sequences, WAYS.value)
    slots = token_programs * shape.rows
    return Grid(cut, tokens, sequences, width, tiles, slots, token_programs, sequence_programs, steps, contiguous)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, for launches."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def _is_aligned(x: Tensor, packed: bool) -> bool:
    """Test that every row starts at a multiple of 16 elements behind a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and (packed or x.stride(0) % 16 == 0 or x.shape[0] <= 1)


def strides_of(tensors: Mapping[str, Tensor | None], grid: Grid) -> dict[str, int]:
    """Name the distances from one row and from one token to the next as the kernels do.

    Args:
        tensors: Per-token tensors by the names that the kernels give them; one that is None is not read.
        grid: Their division.
    """
    rows, steps = _names_of_strides(tuple(tensors))
    found = {**dict.fromkeys(rows, grid.width), **steps}
    if not grid.contiguous:
        for name, x in tensors.items():
            if x is not None and not x.is_contiguous():
                row, step = (0, x.stride(0)) if x.dim() == 1 else (x.stride(0), x.stride(1))
                found[f"{name}_row"], found[f"{name}_step"] = row, step
    return found


@lru_cache(maxsize=16)
def _names_of_strides(names: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    return [f"{name}_row" for name in names], {f"{name}_step": 1 for name in names}
