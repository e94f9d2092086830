"""Run calls otherwise than by default. Whatever names something private of the package is in this file.

It has to work with older checkouts: where a name changes, keep the old one next to it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def number_of(key: str, which: int = 0) -> int:
    """A number of a case, and others that are independent of it: the same in every process."""
    return zlib.crc32(f"{which} {key}".encode())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A batch of thirty tokens takes four times as long where threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def run_as(way: str) -> Iterator[None]:
    """Run calls on a CPU in "blocks", in "small blocks" with the sums of large ones, or as the "whole" batch at once.

    The last is the plain definition, as other devices run it without Triton: no value may be read.
    """
    from rollout_corr.api.policy_loss import LOSSES
    from rollout_corr.backends import blocks, cpu_sums, loss_blocks
    from rollout_corr.backends.run import CORRECTIONS

    small, run = way == "small blocks", "whole" if way == "whole" else "blocks"
    with (
        mock.patch.object(blocks, "BLOCK", 8 if small else blocks.BLOCK),
        mock.patch.object(cpu_sums, "SMALL", 0 if small else cpu_sums.SMALL),
        mock.patch.object(loss_blocks, "SMALL", 0 if small else loss_blocks.SMALL),
        mock.patch.dict(CORRECTIONS, blocks=CORRECTIONS[run]),
        mock.patch.dict(LOSSES, blocks=LOSSES[run]),
    ):
        yield


def in_blocks(key: str) -> contextlib.AbstractContextManager[None]:
    """On the CPU backend; every other case but the large batches in small blocks."""
    return run_as("small blocks" if number_of(key, 1) % 2 and not key.startswith("size/") else "blocks")


def as_whole(key: str) -> contextlib.AbstractContextManager[None]:
    """On the whole batch at once."""
    del key
    return run_as("whole")


# Tiles so small that a short sequence has many: one slot a program, some, and more; in one part and in several.
TILES = (
    {"tile": 16, "lanes": 2, "sequences": 2, "chunk": 2, "parts": 1},
    {"tile": 16, "lanes": 4, "sequences": 8, "chunk": 1},
    {"tile": 8, "lanes": 1, "sequences": 4, "chunk": 2, "parts": 8},
)


@contextlib.contextmanager
def shaped(shapes: Any) -> Iterator[None]:
    """Cut the work into other tiles, and what programs over tokens leave into several parts."""
    from rollout_corr.kernels import grid

    with mock.patch.object(grid, "SHAPES", shapes), mock.patch.object(grid, "LEAST_PART", 3):
        grid.divided.cache_clear()
        yield
    grid.divided.cache_clear()


def in_tiles(key: str) -> contextlib.AbstractContextManager[None]:
    """By the kernels, most of the time in small tiles."""
    from rollout_corr.kernels import grid

    shapes = (*(((0, grid.Shape(**tile)),) for tile in TILES), grid.SHAPES)
    return shaped(shapes[number_of(key, 1) % len(shapes)])


def quick_interpreter(interprets: bool) -> contextlib.AbstractContextManager[None]:
    """Keep what Triton's interpreter computes again and again."""
    from builders import interpreter

    return interpreter.quick() if interprets else contextlib.nullcontext()


def on_ranks(count: int, of_rank: Callable[[int, Any], Any]) -> list[Any]:
    """Call a function of each rank and its member of a process group, which this process plays."""
    from builders.threaded_ranks import Rank, Ranks

    return Ranks(count).run(lambda rank: of_rank(rank, Rank(rank=rank, ranks=count)))
