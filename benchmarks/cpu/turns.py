"""Interleaved rounds on a CPU: clocks, and a calibration that tells a quiet machine from a busy one."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

# A round is dropped in which the calibration took so many times its median, or a call so many times its CPU time: then
# something else ran. Where fewer quiet rounds are left than QUIET, none is dropped, and the table says so.
BUSY = 1.3
QUIET = 3

# A few rounds are better than none, and more than these change no median.
FEWEST, MOST = 5, 101


@dataclass
class Samples:
    """Rounds of one contender."""

    wall: list[float] = field(default_factory=list)  # seconds
    cpu: list[float] = field(default_factory=list)  # seconds, of all threads

    def only(self, rounds: Sequence[int]) -> Samples:
        """Give some of the rounds."""
        return Samples(*([taken[i] for i in rounds] for taken in (self.wall, self.cpu)))

    def add(self, call: Callable[[], object]) -> None:
        """Time one call, and free its result after the clocks have stopped."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        del result


class Calibration:
    """exp of 4 MiB into an existing tensor: one core's arithmetic and cache, no allocation."""

    def __init__(self) -> None:
        self.given = -torch.rand(1 << 20)
        self.out = torch.empty_like(self.given)

    def __call__(self) -> None:
        torch.exp(self.given, out=self.out)


def rounds_for(seconds: float, budget: float) -> int:
    """Return how many rounds of this length fit."""
    return min(MOST, max(FEWEST, math.floor(budget / max(seconds, 1e-9))))


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect garbage once, and then not until the end of the block."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def quiet(samples: Sequence[Samples]) -> list[int]:
    """Find the rounds that nothing disturbed, all where they are few. The last of the samples is the calibration."""
    calibration = samples[-1].wall
    usual = BUSY * statistics.median(calibration)
    found = [
        i
        for i, taken in enumerate(calibration)
        if taken <= usual and all(one.wall[i] <= BUSY * one.cpu[i] for one in samples[:-1])
    ]
    return found if len(found) >= QUIET else list(range(len(calibration)))


def take_turns(calls: Sequence[Callable[[], object]], rounds: int, calibrate: Callable[[], object]) -> list[Samples]:
    """Return samples of every call, and of the calibration as the last entry; every round in another order.

    In a fixed order, rotated or not, a call would always follow the same neighbor and find the heap as that left it.
    """
    order = list(range(len(calls)))
    shuffle = random.Random(0).shuffle
    samples = [Samples() for _ in range(len(calls) + 1)]
    with without_collector():
        for _ in range(rounds):
            samples[-1].add(calibrate)
            shuffle(order)
            for which in order:
                samples[which].add(calls[which])
    return samples
