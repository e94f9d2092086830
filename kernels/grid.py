"""Divide a batch into programs: the host side that the launchers of all operations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels import tiles
from rollout_corr.kernels.launches import warp_size
from rollout_corr.kernels.slots import WAYS, Tiling

# Threads of a program over sequences: a warp, which needs no barrier.
SEQUENCE_THREADS = 32
# Programs over tokens whose results one program adds up, and the most of such parts unless there is too much of each.
LEAST_PART, MOST_PARTS = 256, 256


@dataclass(frozen=True)
class Shape:
    """The division of work among programs and threads. A compile key contains it, so there are only these few."""

    rows: int  # slots of a program of `apply`
    tile: int  # tokens of a program of `read`, and so of a slot
    lanes: int  # threads of such a program, at most a warp: sums over them need no barrier
    sequences: int  # sequences of a program that passes over sequences
    chunk: int  # slots that each of its threads has on their way at a time; see gather.py
    warps: int  # of 32 threads, of a program of `apply`
    spread: int = 0  # tokens of a slot of `apply`; 0: as many as of `read`


# Tokens of a program that passes over tokens. Finding its first sequence and storing its sums costs the same whatever
# the tile; other tiles have not been counted.
TILE = 2048
# (least mean length of the sequences, shape).
SHAPES = (
    (16384, Shape(rows=4, tile=TILE, lanes=32, sequences=2, chunk=8, warps=4, spread=512)),
    (1024, Shape(rows=4, tile=TILE, lanes=32, sequences=32, chunk=4, warps=4, spread=512)),
    (192, Shape(rows=8, tile=TILE, lanes=32, sequences=32, chunk=2, warps=4, spread=256)),
    (0, Shape(rows=32, tile=TILE, lanes=32, sequences=32, chunk=2, warps=4, spread=64)),
)


@dataclass(frozen=True, eq=False)
class Cut:
    """A shape, and the tilings that follow; equal to itself alone, so that keys which contain one are quick."""

    shape: Shape
    tiling: Tiling  # of `read`
    spread: Tiling  # of `apply`
    warp: int  # threads of a program of `read`

    @property
    def threads(self) -> int:
        """Threads of a program of `apply`."""
        return 32 * self.shape.warps


_CUTS: dict[tuple[int, int, bool, bool, int], Cut] = {}


def cut_for(tokens: int, sequences: int, element: int, unit: bool, aligned: bool, warp: int = 32) -> Cut:
    """Choose the shape for a batch from its sizes alone, and its tilings."""
    mean = tokens // max(1, sequences)
    for one in SHAPES:
        least, shape = one
        if mean >= least:
            break
    key = (least, element, unit, aligned, warp)
    found = _CUTS.get(key)
    if found is None or found.shape is not shape:
        tiling, spread = _tilings(shape, element, unit, aligned)
        found = _CUTS[key] = Cut(shape, tiling.for_warps_of(warp), spread, warp)
    return found


def _tilings(shape: Shape, element: int, unit: bool, aligned: bool) -> tuple[Tiling, Tiling]:
    """Divide tiles of `read` and slots of `apply`: a thread loads 16 bytes at a time, and at most 4 log-probs."""
    # 4 tokens of a thread at a time: 8 take twice the registers (metrics 138 for 96, PPO 153 for 108), and 2 % less
    # instructions where sequences are long.
    vec = min(16 // element, 4, shape.tile)
    parts = max(1, min(shape.rows, 4 // vec, shape.tile // (shape.lanes * vec)))
    spread = shape.spread or shape.tile
    return (
        Tiling(parts, shape.tile, min(shape.lanes, shape.tile // vec), vec, unit, aligned),
        Tiling(shape.rows, spread, min(shape.lanes, spread // vec), vec, unit, aligned),
    )


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
    steps: int  # of the search for the first owner of a tile
    tiles_of_apply: int  # of a row; 0 for a packed batch
    programs_of_apply: int
    steps_of_apply: int  # of the search for the owner of one of its slots
    contiguous: bool  # all tensors that are read with strides of their own

    @property
    def part(self) -> int:
        """Programs over tokens whose results are added up together; see partials.py."""
        return max(LEAST_PART, -(-self.token_programs // MOST_PARTS))

    @property
    def parts(self) -> int:
        """Count these parts."""
        return -(-self.token_programs // self.part)

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """The counts that workspaces of all operations are laid out by."""
        return self.slots, self.token_programs, self.sequence_programs, self.sequences, self.parts


def grid_for(like: Tensor, offsets: Tensor | None, tensors: Sequence[Tensor], element: int) -> Grid:
    """Divide a batch from metadata alone.

    Args:
        like: Any of its per-token tensors, [N] or [B, T].
        offsets: [S + 1], of a packed batch.
        tensors: All per-token tensors that are read with strides of their own.
        element: Bytes of the smallest log-prob.
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
    cut = cut_for(tokens, sequences, element, unit, aligned, warp_size(like.device))
    tile, spread, rows = cut.shape.tile, cut.spread.tile, cut.spread.rows
    if packed:
        of_row, of_row_of_apply, slots_of_apply = 0, 0, tokens // spread + sequences + 2
        token_programs, slots = tokens // tile + 1, tokens // tile + sequences + 2
    else:
        of_row, of_row_of_apply = max(1, -(-width // tile)), max(1, -(-width // spread))
        token_programs, slots_of_apply = max(1, of_row * sequences), of_row_of_apply * sequences
        slots = token_programs
    return Grid(
        cut=cut,
        tokens=tokens,
        sequences=sequences,
        width=width,
        tiles=of_row,
        slots=slots,
        token_programs=token_programs,
        sequence_programs=max(1, -(-(sequences + 2 * packed) // cut.shape.sequences)),
        steps=search_steps(sequences, tiles.WAYS.value),
        tiles_of_apply=of_row_of_apply,
        programs_of_apply=max(1, -(-slots_of_apply // rows)),
        steps_of_apply=search_steps(sequences, WAYS.value),
        contiguous=contiguous,
    )


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
