"""Run kernels: hand their steps, parameters and memory to machine.cpp, and word what it found."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptx import native
from ptx.encode import Encoder
from ptx.findings import Finding, Findings
from ptx.native import CELL, EPOCH, KINDS, LAUNCH, PROGRAM, SPACES
from ptx.parse import Instruction, Kernel, parse

# --- memory ---


class Region:
    """A tensor: its bytes, and the record of its elements, which takes memory only where it is touched.

    Args:
        name: Of the kernel's parameter.
        address: Of its first element.
        item: Bytes of an element.
        shape: Its sizes.
        strides: Its strides in elements.
        unwritten: Nobody has put values there.
        recorded: Who touches it is recorded.
    """

    def __init__(
        self, name: str, address: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...], unwritten: bool,
        recorded: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.address, self.item, self.unwritten = name, address, item, unwritten
        self.lies(name, shape, strides)
        self.cells = _zeros(CELL * self.elements) if recorded else None

    def lies(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Name the tensor anew, as a launch has it."""
        self.name = name
        self.axes = sorted(zip(strides, shape, range(len(shape)), strict=True), key=lambda axis: -axis[0])
        self.elements = 1 + sum((n - 1) * step for step, n, _ in self.axes)
        self.size = self.item * self.elements

    def index(self, element: int) -> str:
        """Name an element by its indices."""
        found = {}
        for step, _, axis in self.axes:
            found[axis], element = divmod(element, step) if step else (0, element)
        return f"{self.name}[{', '.join(str(found[axis]) for axis in sorted(found))}]"

    def shared_with(self) -> native.Region:
        """Describe it to machine.cpp; axes are told where there are gaps between elements."""
        gaps = self.elements > int(np.prod([n for _, n, _ in self.axes]))
        steps, sizes = ([axis[i] for axis in self.axes] + [0] * (4 - len(self.axes)) for i in (0, 1))
        cells = 0 if self.cells is None else _address(self.cells)
        axes = len(self.axes) if gaps else 0
        return native.Region(
            self.address, self.address, self.size, self.item, self.unwritten, cells, axes, tuple(sizes), tuple(steps)
        )


def _zeros(size: int) -> mmap.mmap:
    """Promise zeros, of which only those that are touched take memory."""
    # Python names the last flag from 3.13 on; this is Linux's number, as Triton runs there.
    promised = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | promised)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- a kernel ready to run, and how it went ---


@dataclass
class Executed:
    """How many threads executed each instruction of a kernel; bytes by kind."""

    kernel: Kernel
    threads: NDArray[np.uint64]
    bytes: Counter[str] = field(default_factory=Counter)


class Program:
    """A kernel ready to run.

    Args:
        text: The module.
        shared: Bytes of shared memory of a program.
    """

    def __init__(self, text: str, shared: int) -> None:
        self.kernel = parse(text)
        self._encoder = Encoder(self.kernel)
        self._shared = -(-shared // 16) * 16
        steps = [self._encoder.step(x) for x in self.kernel.code] + [self._encoder.step(_THE_END)]
        self._steps = (native.Step * len(steps))(*steps)
        # No access to shared memory divides a granule of its record.
        widths = [x.width for x in steps if x.space == SPACES.index("shared") and x.width]
        self._granule = min(widths, default=4)

    def run(
        self, parameters: Sequence[int], grid: int, programs: NDArray[np.int64], tensors: list[Region], launch: int,
        seed: int, checked: bool, findings: Findings, off_by: tuple[int, int] = (0, 0),
    ) -> Executed:  # fmt: skip
        """Run programs of a launch, in an order that the seed decides, and count what they execute.

        Args:
            parameters: The kernel's parameters in order.
            grid: How many programs the launch has.
            programs: The numbers of those that run.
            tensors: All that it may touch.
            launch: A number that no earlier launch has had.
            seed: Of every order.
            checked: Accesses are recorded; bounds and alignment are checked always.
            findings: Where findings go.
            off_by: Units in the last place that ex2 and lg2 are off at most, and the seed that chooses each.
        """
        kernel, encoder = self.kernel, self._encoder
        given = dict(zip(kernel.parameters, parameters, strict=True))
        initial = np.array(encoder.initial, np.uint64)
        for number, (name, shift) in encoder.parameters.items():
            initial[number] = given[name] >> shift
        initial[encoder.number["nctaid.x"]] = grid
        order = np.random.default_rng(seed).permutation(programs).astype(np.int64)
        shared = np.zeros(self._shared, np.uint8)
        record = _zeros(CELL * (self._shared // self._granule)) if checked else None
        cells = 0 if record is None else _address(record)
        local = np.zeros(kernel.local * kernel.threads, np.uint8)
        own = [
            native.Region(shared.ctypes.data, 0, shared.size, self._granule, True, cells),
            native.Region(local.ctypes.data, 0, local.size, 1),
        ]
        regions = (native.Region * (len(tensors) + 2))(*(x.shared_with() for x in tensors), *own)
        targets, found = np.array([*encoder.targets, 0], np.int32), (native.Found * 64)()
        executed, counted = np.zeros(len(self._steps), np.uint64), np.zeros(6, np.uint64)
        task = native.Task(
            ctypes.addressof(self._steps), targets.ctypes.data, initial.ctypes.data, executed.ctypes.data,
            counted.ctypes.data, order.ctypes.data, ctypes.addressof(regions), ctypes.addressof(found),
            len(self._steps) - 1, initial.size, order.size, len(tensors), 0, len(found), kernel.threads,
            *(encoder.number[name] for name in ("tid.x", "ctaid.x", "laneid")), launch, seed, native.MANY, *off_by,
        )  # fmt: skip
        native.library().run(ctypes.byref(task))
        for x in found[: task.found]:
            findings.add(self._in_words(x, tensors))
        keys = [f"{space} {how}" for space in (*SPACES, "sectors") for how in ("read", "write")]
        return Executed(kernel, executed[:-1], Counter(dict(zip(keys, counted.tolist(), strict=True))))

    def _in_words(self, x: native.Found, tensors: list[Region]) -> Finding:
        """Say what was found as kernel, line, threads, and address as tensor and index."""
        instruction, kind = self.kernel.code[x.instruction], KINDS[x.kind]
        who = f"program {x.program}, thread {x.thread}" + (f" and {x.threads - 1} more" if x.threads > 1 else "")
        if kind == "divergence":
            other = "the end" if x.place >= len(self.kernel.code) else self.kernel.code[x.place].line
            where = f"not all threads take part, others are at {other}"
        elif kind == "endless":
            where = f"in a program of more than {native.MANY:,} steps"
        elif kind == "alignment":
            where = f"address {x.place:#x} for {x.other} bytes"
        elif x.region == -1:
            near = min(tensors, key=lambda r: max(r.address - x.place, x.place - r.address - r.size + 1, 0))
            where = f"{x.place - near.address} bytes behind the start of {near.name}, which has {near.size}"
        elif x.region >= len(tensors):
            space, size = (("shared", self._shared), ("local", self.kernel.local))[x.region - len(tensors)]
            where = f"{space} byte {x.place} of {size} of {space} memory"
        else:
            region = tensors[x.region]
            where = region.index(x.place // region.item)
            where = f"between the elements of {region.name}" if kind == "bounds" else where
        if kind.startswith("race"):
            program, thread = (x.other >> PROGRAM) & (2 ** (LAUNCH - PROGRAM) - 1), x.other & (2**EPOCH - 1)
            where += f", touched by thread {thread} of program {program}"
        return Finding(kind, self.kernel.name, instruction.line, who, where, instruction.opcode)


_THE_END = Instruction("exit", [], None, False, "the end")
