"""Memory with a record of who touched it: tensors of a launch, and what the threads of a program share.

Every granule (an element of a tensor, a few bytes of shared memory) has stamps of the last writer and of the first and
the last reader. A stamp is one integer: launch, program, epoch (barriers that the program has passed), thread. Two
accesses, one of them a write, race if no barrier and no launch lies between them: in one launch by two programs, or by
two threads of a program in one epoch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Stamps = NDArray[np.int64]
Indices = NDArray[np.int64]

THREAD, EPOCH, PROGRAM, LAUNCH = 0, 10, 27, 49
# The lowest program and the lowest thread are the highest of these bits when they are flipped.
_FLIPPED = ((1 << EPOCH) - 1) | (((1 << LAUNCH) - 1) ^ ((1 << PROGRAM) - 1))


def stamp(launch: int, program: Any, epoch: Any, thread: Any) -> Any:
    """Pack who touches memory, and when."""
    return (launch << LAUNCH) | (program << PROGRAM) | (epoch << EPOCH) | thread


def races(before: Stamps, now: Stamps) -> NDArray[np.bool_]:
    """Tell which accesses have nothing between them and an earlier one by somebody else."""
    apart = before ^ now
    return (before != 0) & (apart >> LAUNCH == 0) & (apart != 0) & ((apart >> PROGRAM != 0) | (apart >> EPOCH == 0))


class Shadow:
    """The record of so many granules; stamps begin at 0, which is nobody."""

    def __init__(self, granules: int, zeros: Callable[[int], Stamps]) -> None:
        self._zeros, self._granules = zeros, granules
        self.wrote, self.last, self.first = zeros(granules), zeros(granules), zeros(granules)
        self._atomics: tuple[Stamps, Stamps] | None = None

    def read(self, at: Indices, now: Stamps) -> Stamps:
        """Record reads; give the stamp of whoever races, 0 elsewhere."""
        _latest(self.last, self.first, at, now)
        return _first_of(now, self.wrote[at], *self._atomic_stamps(at))

    def write(self, at: Indices, now: Stamps) -> tuple[Stamps, Stamps, Stamps]:
        """Record writes; give who races: readers and atomic accesses, earlier writers, those of this instruction."""
        readers = _first_of(now, self.last[at], self.first[at] ^ _flips(self.first[at]), *self._atomic_stamps(at))
        writers = _first_of(now, self.wrote[at])
        self.wrote[at] = now
        return readers, writers, _first_of(now, self.wrote[at])

    def touch(self, at: Indices, now: Stamps) -> Stamps:
        """Record atomic accesses, which race with all others alone; give the stamp of whoever races."""
        if self._atomics is None:
            self._atomics = self._zeros(self._granules), self._zeros(self._granules)
        _latest(*self._atomics, at, now)
        return _first_of(now, self.wrote[at], self.last[at], self.first[at] ^ _flips(self.first[at]))

    def _atomic_stamps(self, at: Indices) -> tuple[Stamps, ...]:
        if self._atomics is None:
            return ()
        last, first = (x[at] for x in self._atomics)
        return last, first ^ _flips(first)


def _flips(stamps: Stamps) -> Stamps:
    return np.where(stamps == 0, 0, _FLIPPED)


def _latest(last: Stamps, first: Stamps, at: Indices, now: Stamps) -> None:
    np.maximum.at(last, at, now)
    np.maximum.at(first, at, now ^ _FLIPPED)


def _first_of(now: Stamps, *others: Stamps) -> Stamps:
    out = np.zeros_like(now)
    for other in others:
        out = np.where((out == 0) & races(other, now), other, out)
    return out


class Region:
    """A tensor in global memory, or shared or local memory: its bytes and the record of its granules.

    Args:
        name: Of the kernel's parameter, or "shared".
        base: Its address.
        item: Bytes of a granule, which are the elements of a tensor.
        shape: Its sizes.
        strides: Its strides in elements.
        data: Its bytes, from the first element to the last.
        unwritten: Nobody has put values there.
        races: Who touches it is recorded.
        zeros: Makes the arrays of the record.
    """

    def __init__(
        self,
        name: str,
        base: int,
        item: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        data: NDArray[np.uint8],
        unwritten: bool,
        races: bool = True,
        zeros: Callable[[int], Stamps] = lambda n: np.zeros(n, np.int64),
    ) -> None:
        self.name, self.base, self.item, self.shape, self.strides, self.data = name, base, item, shape, strides, data
        self.end, granules = base + data.size, data.size // item
        self.shadow = Shadow(granules, zeros) if races else None
        self.unwritten = np.ones(granules, bool) if unwritten else None
        # Elements between those of a tensor that is not contiguous are somebody else's.
        self.gaps: NDArray[np.bool_] | None = None
        if races and int(np.prod(shape)) < granules:
            self.gaps = np.ones(granules, bool)
            np.lib.stride_tricks.as_strided(self.gaps, shape, strides)[...] = False

    def index(self, element: int) -> str:
        """Name an element by its indices."""
        found, left = {}, element
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            found[axis] = left // self.strides[axis] if self.strides[axis] else 0
            left -= found[axis] * self.strides[axis]
        return f"{self.name}[{', '.join(str(found[axis]) for axis in range(len(self.shape)))}]"

    def _units(self, at: Indices, size: int, width: int) -> tuple[NDArray[Any], Indices]:
        """View the bytes as integers, and index those of accesses of so many bytes."""
        unit = min(self.item, width, size)
        first = at // unit
        return self.data.view(f"u{unit}"), first[:, None] + np.arange(size // unit)

    def load(self, at: Indices, size: int, width: int) -> NDArray[Any]:
        """Fetch [accesses, size // width] unsigned integers from byte offsets."""
        data, units = self._units(at, size, width)
        return np.ascontiguousarray(data[units]).view(f"u{width}")

    def store(self, at: Indices, values: NDArray[Any]) -> None:
        """Put [accesses, count] unsigned integers at byte offsets; of two for one place the later row stays."""
        width = values.dtype.itemsize
        data, units = self._units(at, values.shape[1] * width, width)
        data[units] = np.ascontiguousarray(values).view(data.dtype)

    def granules(self, at: Indices, size: int) -> Indices:
        """Number the granules of accesses: [accesses, granules of each]."""
        first = at // self.item
        return first[:, None] + np.arange(max(1, size // self.item))


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """View memory of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
