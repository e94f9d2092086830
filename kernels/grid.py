"""Divide a batch into programs and launch kernels: the host side that the launchers of all operations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any

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


def shape_for(tokens: int, sequences: int, halvings: int) -> Shape:
    """Choose the shape for a batch from its sizes alone, with the tile halved so many times."""
    mean = tokens // max(1, sequences)
    return _halved(next(shape for least, shape in SHAPES if mean >= least), halvings)


@lru_cache(maxsize=64)
def _halved(shape: Shape, times: int) -> Shape:
    return replace(shape, tile=shape.tile >> times)


@lru_cache(maxsize=256)
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


@dataclass(frozen=True)
class Grid:
    """The division of a batch into programs."""

    shape: Shape
    tiling: Tiling
    tokens: int
    sequences: int
    width: int  # of a row; 0 for a packed batch
    tiles: int  # of a row; 0 for a packed batch
    slots: int
    token_programs: int
    sequence_programs: int
    steps: int  # of the search for the owner of a slot

    @property
    def threads(self) -> int:
        """Threads of a program over tokens."""
        return 32 * self.shape.warps


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
    sequences = like.shape[0] if offsets is None else offsets.shape[0] - 1
    tokens, width = like.numel(), 0 if packed else like.shape[1]
    unit = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in tensors)
    aligned = unit and all(_is_aligned(x, packed) for x in tensors)
    aligned = aligned and (packed or width % 16 == 0 or like.shape[0] <= 1)
    # Where tokens are loaded one by one, addresses take registers too. A part of a tile has no fewer tokens than
    # threads: 64 of a tile of 512 where all are float64, else 128.
    shape = shape_for(tokens, sequences, min(3 if element == 8 else 2, halvings + (not aligned)))
    tiles = 0 if packed else max(1, -(-width // shape.tile))
    slots = tokens // shape.tile + sequences + 2 if packed else tiles * sequences
    token_programs = max(1, -(-slots // shape.rows))
    return Grid(
        shape=shape,
        tiling=_tiling(shape, element, unit, aligned),
        tokens=tokens,
        sequences=sequences,
        width=width,
        tiles=tiles,
        slots=token_programs * shape.rows,
        token_programs=token_programs,
        sequence_programs=max(1, -(-(sequences + 2 * packed) // shape.sequences)),
        steps=search_steps(sequences, WAYS.value),
    )


@dataclass(frozen=True)
class Launch:
    """A kernel launch, ready to run or to be compiled ahead of time."""

    kernel: Any
    programs: int
    threads: int
    arguments: dict[str, Any]  # every parameter of the kernel by name

    @classmethod
    def by_name(cls, kernel: Any, programs: int, threads: int, values: Mapping[str, Any]) -> Launch:
        """Launch a kernel with those of the values that its parameters name."""
        return cls(kernel, programs, threads, {name: values[name] for name in parameters_of(kernel)})

    def run(self) -> None:
        """Launch it on the current stream."""
        warps = max(1, self.threads // warp_size(self.device))
        self.kernel[(self.programs,)](**self.arguments, num_warps=warps)

    @property
    def device(self) -> torch.device:
        """The device of its tensors; the first parameter of every kernel is a tensor."""
        return next(iter(self.arguments.values())).device


@lru_cache(maxsize=64)
def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Name the parameters of a kernel in order."""
    return tuple(signature(kernel.fn).parameters)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, for launches."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


@lru_cache(maxsize=16)
def warp_size(device: torch.device) -> int:
    """Count the threads of a warp: 32, or 64 on some of AMD's GPUs."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def as_bytes(x: Tensor | None) -> Tensor | None:
    """View a bool tensor as the bytes it holds: a byte of 2 is valid too."""
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def _is_aligned(x: Tensor, packed: bool) -> bool:
    """Test that every row starts at a multiple of 16 elements behind a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and (packed or x.stride(0) % 16 == 0 or x.shape[0] <= 1)


def strides_of(name: str, x: Tensor | None, packed: bool) -> dict[str, int]:
    """Name the distances from one row and from one token to the next as the kernels do."""
    if x is None:
        row, step = 0, 1
    else:
        row, step = (0, x.stride(0)) if packed else (x.stride(0), x.stride(1))
    return {f"{name}_row": row, f"{name}_step": step}
