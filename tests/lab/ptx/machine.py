"""Run kernels: hand their steps, parameters and memory to machine.cpp, and word what it found."""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.ptx import native
from lab.ptx.encode import Encoder
from lab.ptx.native import KIND, SPACE, STAMP
from lab.ptx.parse import Instruction, Kernel, parse

KINDS = list(KIND)


@dataclass
class Region:
    """A tensor."""

    name: str  # of the kernel's parameter
    address: int  # of its first element
    item: int  # bytes of an element
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    unwritten: bool  # nobody has put values there
    record: NDArray[np.uint8] | None  # who touched its elements; without it nobody watches

    def __post_init__(self) -> None:
        self.axes = sorted(zip(self.strides, self.shape, range(len(self.shape)), strict=True), key=lambda x: -x[0])
        self.elements = 1 + sum((n - 1) * step for step, n, _ in self.axes)
        self.size = self.item * self.elements

    def index(self, element: int) -> str:
        """Name an element by its indices."""
        found = {}
        for step, _, axis in self.axes:
            found[axis], element = divmod(element, step) if step else (0, element)
        return f"{self.name}[{', '.join(str(found[axis]) for axis in sorted(found))}]"

    def shared_with(self) -> ctypes.Structure:
        """Describe it to machine.cpp; axes are told where there are gaps between elements."""
        axes = self.axes if self.elements > int(np.prod(self.shape)) else []
        steps, sizes = ([axis[i] for axis in axes] + [0] * (4 - len(axes)) for i in (0, 1))
        cells = 0 if self.record is None else self.record.ctypes.data
        return native.Region(
            self.address, self.address, self.size, self.item, self.unwritten, cells, len(axes), tuple(sizes),
            tuple(steps),
        )  # fmt: skip


def record_of(elements: int) -> NDArray[np.uint8]:
    """Promise a record of elements that nobody has touched, which takes memory only for those that somebody does."""
    # Python names the last flag from 3.13 on; this is Linux's number, as Triton runs there.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, ctypes.sizeof(native.Cell) * max(elements, 1), flags=flags), np.uint8)


@dataclass(frozen=True)
class Finding:
    """Something that a kernel must not do."""

    kind: str  # of native.KIND
    kernel: str
    line: str  # of Triton's source, with the calls that led there
    threads: str  # program and threads, the first of them
    where: str  # the address as tensor and index
    opcode: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel}, {self.opcode} of {self.line}: {self.threads}, {self.where}"


class FoundWrong(AssertionError):
    """A launch with findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


@dataclass
class Executed:
    """Counts of a launch: threads by instruction, bytes by kind; and the first finding of each kind in a place."""

    kernel: Kernel
    threads: NDArray[np.uint64]
    bytes: Counter[str]
    findings: list[Finding]


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
        end = Instruction("exit", [], None, False, "the end")
        steps = [self._encoder.step(x) for x in (*self.kernel.code, end)]
        self._steps = (native.Step * len(steps))(*steps)
        # No access to shared memory divides a granule of its record.
        self._granule = min((x.width for x in steps if x.space == SPACE["shared"]), default=4)

    def run(
        self, parameters: Sequence[int], grid: int, programs: NDArray[np.int64], tensors: list[Region], launch: int,
        seed: int, checked: bool, off_by: tuple[int, int] = (0, 0),
    ) -> Executed:  # fmt: skip
        """Run programs of a launch, in an order that the seed decides; tell what they executed, and what was found.

        Args:
            parameters: The kernel's parameters in order.
            grid: How many programs the launch has.
            programs: The numbers of those that run.
            tensors: All that it may touch.
            launch: A number that no earlier launch has had.
            seed: Of every order.
            checked: Accesses are recorded; bounds and alignment are checked always.
            off_by: Units in the last place that ex2 and lg2 are off at most, and the seed that chooses each.
        """
        encoder, initial = self._encoder, np.array(self._encoder.initial, np.uint64)
        given = dict(zip(self.kernel.parameters, parameters, strict=True))
        for name, value in {**given, "nctaid.x": grid}.items():
            initial[encoder.number[name]] = value
        order = np.random.default_rng(seed).permutation(programs).astype(np.int64)
        shared = np.zeros(self._shared, np.uint8)
        record = record_of(self._shared // self._granule if checked else 0)
        own = native.Region(shared.ctypes.data, 0, shared.size, self._granule, True, checked and record.ctypes.data)
        local = np.zeros(max(1, self.kernel.local * self.kernel.threads), np.uint8)
        tensors = [*tensors, Region("local memory", local.ctypes.data, 1, local.shape, (1,), False, None)]
        regions = (native.Region * (len(tensors) + 1))(*(x.shared_with() for x in tensors), own)
        found = (native.Finding * 64)()
        executed, counted = np.zeros(len(self._steps), np.uint64), np.zeros(6, np.uint64)
        task = native.Task(
            code=ctypes.addressof(self._steps), initial=initial.ctypes.data, executed=executed.ctypes.data,
            bytes=counted.ctypes.data, programs=order.ctypes.data, regions=ctypes.addressof(regions),
            findings=ctypes.addressof(found), end=len(self._steps) - 1, registers=initial.size,
            program_count=order.size, tensors=len(tensors), capacity=len(found), threads=self.kernel.threads,
            launch=launch, seed=seed, most=native.MANY, local=local.ctypes.data,
            local_bytes=self.kernel.local, off_by=off_by[0], off_seed=off_by[1],
        )  # fmt: skip
        native.library().run(ctypes.byref(task))
        words = [self._in_words(x, tensors) for x in found[: task.found]]
        first = {(x.kind, x.line, x.opcode): x for x in reversed(words)}
        keys = [f"{space} {how}" for space in (*SPACE, "sectors") for how in ("read", "write")]
        of_kind = Counter(dict(zip(keys, counted.tolist(), strict=True)))
        return Executed(self.kernel, executed[:-1], of_kind, list(first.values())[::-1])

    def _in_words(self, x: native.Finding, tensors: list[Region]) -> Finding:
        """Say what was found as kernel, line, threads, and address as tensor and index."""
        instruction, kind = self.kernel.code[x.step], KINDS[x.kind]
        who = f"program {x.program}, thread {x.thread}" + (f" and {x.threads - 1} more" if x.threads > 1 else "")
        if kind == "divergence":
            other = "the end" if x.place >= len(self.kernel.code) else self.kernel.code[x.place].line
            where = f"not all threads take part, others are at {other}"
        elif kind == "endless":
            where = f"in a program of more than {native.MANY:,} steps"
        elif kind == "alignment":
            where = f"address {x.place:#x} for {x.other} bytes"
        elif x.region == len(tensors) or self._steps[x.step].space == SPACE["shared"]:
            where = f"shared byte {x.place} of {self._shared} of shared memory"
        elif x.region == -1:
            near = min(tensors, key=lambda r: max(r.address - x.place, x.place - r.address - r.size + 1, 0))
            where = f"{x.place - near.address} bytes behind the start of {near.name}, which has {near.size}"
        else:
            region = tensors[x.region]
            element = region.index(x.place // region.item)
            where = f"between the elements of {region.name}" if kind == "bounds" else element
        if kind.startswith("race"):
            thread, program = x.other % 2 ** STAMP["epoch"], x.other % 2 ** STAMP["launch"] >> STAMP["program"]
            where += f", touched by thread {thread} of program {program}"
        return Finding(kind, self.kernel.name, instruction.line, who, where, instruction.opcode)
