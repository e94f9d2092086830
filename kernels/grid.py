"""How work is cut and launched: what the launchers of all operators share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rollout_corr.kernels.slots import WAYS


@dataclass(frozen=True)
class Shape:
    """How work is cut. All of it is in a compile key, so there are only these few."""

    rows: int  # slots a program
    tile: int  # tokens a slot
    lanes: int  # threads that share a row: at most a warp, so that its sums need no other
    sequences: int  # a program of `judge`
    chunk: int  # slots of each that it adds up at a time
    warps: int  # of 32 threads


# For sequences of at least so many tokens on average. A thread has 16 tokens in all of them. Of a tile that a sequence
# fills in part the rest is idle; of a small one the sums of its slot cost more, and there are more slots to add up.
# Instructions counted for metrics alone, packed, a token of a sequence, by tile: at 160 tokens a sequence 163 (64), 206
# (128), 242 (256); at 400 tokens 135 (64), 151 (128), 153 (256), 193 (512); at 1,000 tokens 124 (64), 129 (128), 117
# (256), 128 (512); in long sequences about 80 (512).
SHAPES = (
    (16384, Shape(rows=4, tile=512, lanes=32, sequences=4, chunk=64, warps=4)),
    (1024, Shape(rows=4, tile=512, lanes=32, sequences=32, chunk=8, warps=4)),
    (192, Shape(rows=8, tile=256, lanes=32, sequences=64, chunk=4, warps=4)),
    (0, Shape(rows=32, tile=64, lanes=32, sequences=128, chunk=2, warps=4)),
)


def shape_for(tokens: int, sequences: int, halvings: int) -> Shape:
    """The shape for a batch, from its sizes alone; a smaller tile where a token takes many registers."""
    mean = tokens // max(1, sequences)
    shape = next(shape for least, shape in SHAPES if mean >= least)
    return replace(shape, tile=shape.tile >> halvings)


def search_steps(sequences: int, ways: int) -> int:
    """How many steps of that many ways find a slot's sequence."""
    steps, span = 0, sequences + 1
    while span > 0:
        steps, span = steps + 1, span // ways
    return steps


@dataclass(frozen=True)
class Cut:
    """How a batch is cut into programs."""

    shape: Shape
    tokens: int
    sequences: int
    width: int  # of a row; 0 for a packed batch
    tiles: int  # of a row
    slots: int
    readers: int  # programs that pass over tokens
    judges: int  # programs that pass over sequences
    steps: int  # of the search for the sequence of a slot
    unit: bool  # neighbouring tokens lie side by side in all tensors
    aligned: bool
    constants: dict[str, Any]  # of a kernel that passes over tokens


def cut_of(like: Tensor, offsets: Tensor | None, lines: Sequence[Tensor], element: int, halvings: int) -> Cut:
    """How to cut a batch, from metadata alone.

    Args:
        like: Any of its tensors, [N] or [B, T].
        offsets: Of a packed batch.
        lines: All tensors that are read with strides of their own.
        element: Bytes of the smallest log-prob.
        halvings: How often a tile is halved.
    """
    packed = offsets is not None
    sequences = like.shape[0] if offsets is None else offsets.shape[0] - 1
    tokens, width = like.numel(), 0 if packed else like.shape[1]
    unit = all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in lines)
    aligned = unit and all(_is_aligned(x, packed) for x in lines) and (packed or width % 16 == 0 or like.shape[0] <= 1)
    # Where each token is loaded by itself, its address takes registers too. A part of a tile has no fewer tokens than
    # threads: 64 of a tile of 512 where all are float64, else 128.
    shape = shape_for(tokens, sequences, min(3 if element == 8 else 2, halvings + (not aligned)))
    tiles = 0 if packed else max(1, -(-width // shape.tile))
    slots = tokens // shape.tile + sequences + 2 if packed else tiles * sequences
    readers = max(1, -(-slots // shape.rows))
    vec = min(16 // element, shape.tile)
    lanes = min(shape.lanes, shape.tile // vec)
    return Cut(
        shape=shape,
        tokens=tokens,
        sequences=sequences,
        width=width,
        tiles=tiles,
        slots=readers * shape.rows,
        readers=readers,
        judges=max(1, -(-(sequences + 2 * packed) // shape.sequences)),
        steps=search_steps(sequences, WAYS.value),
        unit=unit,
        aligned=aligned,
        constants={"ROWS": shape.rows, "TILE": shape.tile, "LANES": lanes, "VEC": vec, "ALIGNED": aligned},
    )


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to be compiled for a device that is not there."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    threads: int

    def run(self) -> None:
        """Launch it on the current stream."""
        warps = max(1, self.threads // warp_size(self.arguments[0].device))
        self.kernel[(self.programs,)](*self.arguments, **self.constants, num_warps=warps)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, for launches."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


@lru_cache(maxsize=16)
def warp_size(device: torch.device) -> int:
    """Threads of a warp: 32, or 64 on some of AMD's."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def as_bytes(x: Tensor | None) -> Tensor | None:
    """A bool as the byte it is: one that holds 2 is valid too."""
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def _is_aligned(x: Tensor, packed: bool) -> bool:
    """Whether every row starts at a multiple of 16 elements behind a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and (packed or x.stride(0) % 16 == 0 or x.shape[0] <= 1)


def strides_of(x: Tensor | None, packed: bool) -> tuple[int, int]:
    """From one row to the next, and from one token to the next."""
    if x is None:
        return 0, 1
    return (0, x.stride(0)) if packed else (x.stride(0), x.stride(1))


def on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers that kernels read, in float64; the copy waits for nothing."""
    host = torch.tensor(numbers, dtype=torch.float64)
    return host.to(device) if device.type in ("cpu", "meta") else host.pin_memory().to(device, non_blocking=True)
