"""Make the tasks of machine.cpp out of kernels, and words of its findings.

`g++` compiles machine.cpp when it is first needed; the result lies beside Triton's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import triton
from numpy.typing import NDArray

from ptx.findings import Finding, Findings
from ptx.parse import Instruction, Kernel, parse

# Beside Triton's cache and not in it: what lies there has no machine code.
CACHE = Path(triton.knobs.cache.dir) / "ptx_alone"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("machine.cpp", "opcodes.hpp"))
# No sum and product that the instructions have apart may be joined; integers wrap.
COMPILE = ("g++", "-std=gnu++17", "-O1", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off")
LANES, END = 32, ("ret", "exit")
# Whatever a register holds that nobody has set: a NaN in float32 and float64, no index of anything.
NOBODYS = 0x7FF4DEAD7FA5DEAD
ACTIONS = (
    "compute", "setp", "pack", "unpack", "load", "store", "atomic", "matrix", "store matrix", "shuffle", "ballot",
    "reduce", "barrier", "branch", "indexed", "exit",
)  # fmt: skip
SPACES, MODES = ("global", "shared"), ("bfly", "down", "up", "idx")
KINDS = ("bounds", "alignment", "unwritten", "race in a program", "race of programs", "divergence")
# Fields of opcodes that change nothing here; caches and the default rounding.
IDLE = {"rn", "approx", "full", "ftz", "relaxed", "gpu", "sys", "cta", "volatile", "weak", "nc", "uni"}
EPOCH, PROGRAM, LAUNCH = 10, 27, 49
LOCAL = 1 << 60  # where local memory begins as a generic address
CELL = 56  # bytes of a record


class UnknownOpcode(Exception):
    """An opcode, or a form of one, that this interpreter does not know."""


# --- what machine.cpp shares ---


class _Step(ctypes.Structure):
    _fields_ = [
        ("compute", c_void_p), ("place", c_int64),
        *((name, c_int32) for name in (
            "action", "guard", "negated", "flush_from", "flush_to", "space", "width", "is_signed", "mode", "target",
            "acquires", "releases", "to_count", "from_count",
        )),
        ("to", c_int32 * 9), ("from_", c_int32 * 9),
    ]  # fmt: skip


class _Region(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("data", "base", "size", "item", "fresh", "cells", "axes")),
        ("shape", c_int64 * 4), ("strides", c_int64 * 4),
    ]  # fmt: skip


class _Found(ctypes.Structure):
    _fields_ = [
        (name, c_int64) for name in ("kind", "instruction", "program", "thread", "threads", "region", "place", "other")
    ]


class _Task(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "code", "targets", "initial", "executed", "bytes", "programs", "regions", "findings")),
        *((name, c_int64) for name in (
            "instructions", "registers", "program_count", "tensors", "found", "capacity", "threads", "thread",
            "program", "lane", "launch", "seed")),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Compile machine.cpp, unless that was done before, and load it."""
    name = hashlib.sha256(b"".join(x.read_bytes() for x in SOURCES) + repr(COMPILE).encode()).hexdigest()[:16]
    path = CACHE / f"{name}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            subprocess.run([*COMPILE, str(SOURCES[0]), "-o", str(made)], check=True)
            os.replace(made, path)
    loaded = ctypes.CDLL(str(path))
    loaded.find.restype, loaded.compute.restype = c_void_p, c_uint64
    loaded.compute.argtypes = [c_void_p, c_uint64, c_uint64, c_uint64]
    return loaded


@cache
def operation(opcode: str) -> int:
    """Find the function of an opcode that computes from registers alone.

    Raises:
        UnknownOpcode: machine.cpp has none.
    """
    name, *parts = opcode.split(".")
    exact = ".".join([name, *(x for x in parts if x not in ("rn", "ftz"))])
    plain = "mov" if name == "mov" else ".".join([name, *(x for x in parts if x not in IDLE)])
    found = library().find(exact.encode()) or library().find(plain.encode())
    if not found:
        raise UnknownOpcode(opcode)
    return found


# --- memory ---


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """View memory of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


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

    def shared_with(self) -> _Region:
        """Describe it to machine.cpp; axes are told where there are gaps between elements."""
        gaps = self.elements > int(np.prod([n for _, n, _ in self.axes]))
        steps, sizes = ([axis[i] for axis in self.axes] + [0] * (4 - len(self.axes)) for i in (0, 1))
        cells = 0 if self.cells is None else _address(self.cells)
        axes = len(self.axes) if gaps else 0
        return _Region(
            self.address, self.address, self.size, self.item, self.unwritten, cells, axes, tuple(sizes), tuple(steps)
        )


def _zeros(size: int) -> mmap.mmap:
    """Promise zeros, of which only those that are touched take memory."""
    # Python names the last flag from 3.13 on; this is Linux's number, as Triton runs there.
    promised = getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | promised)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- instructions ---


class _Encoder:
    """Turns the instructions of a kernel into steps; constants and special registers become registers."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.number = {name: i for i, name in enumerate(kernel.registers)}
        self.initial = [NOBODYS] * len(self.number)
        self.parameters: dict[int, tuple[str, int]] = {}
        self.targets: list[int] = []
        others = [f"{name}.{axis}" for name in ("tid", "ctaid") for axis in "yz"]
        for name in ("tid.x", "ctaid.x", "laneid", "nctaid.x", "_", "global_smem", "__local_depot0", *others):
            self.constant(name, 0)
        self.constant("ntid.x", kernel.threads)

    def constant(self, name: str, value: int) -> int:
        """Give the register that holds a value."""
        if name not in self.number:
            self.number[name] = len(self.initial)
            self.initial.append(value & (2**64 - 1))
        return self.number[name]

    def register(self, operand: str) -> int:
        """Give the register of an operand; 0f and 0d are the bits of a float."""
        text = operand.lstrip("%!")
        if text in self.number:
            return self.number[text]
        bits = re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text)
        return self.constant(text, int(bits[1], 16) if bits else int(text.rstrip("U"), 0))

    def step(self, x: Instruction) -> _Step:
        """Encode an instruction.

        Raises:
            UnknownOpcode: The interpreter does not know it.
        """
        try:
            step = self._step(x)
        except (UnknownOpcode, KeyError, ValueError, IndexError) as error:
            raise UnknownOpcode(f"{x.opcode} of {x.line} is not known: {error!r}") from error
        step.guard, step.negated = -1 if x.guard is None else self.number[x.guard], x.negated
        return step

    def _made(self, action: str, to: Sequence[str] = (), of: Sequence[str] = (), **fields: int) -> _Step:
        step = _Step(action=ACTIONS.index(action), to_count=len(to), from_count=len(of), **fields)
        nothing = self.register("_")
        for i in range(9):
            step.to[i] = self.register(to[i]) if i < len(to) else nothing
            step.from_[i] = self.register(of[i]) if i < len(of) else nothing
        return step

    def _step(self, x: Instruction) -> _Step:
        name, *parts = x.opcode.split(".")
        kind, lists = parts[-1] if parts else "", [y if isinstance(y, list) else [y] for y in x.operands]
        words = [y[0] for y in lists]
        if x.opcode in END:
            return self._made("exit")
        if name == "bra":
            return self._made("branch", target=self.kernel.labels[words[0]])
        if x.opcode == "brx.idx":
            first = len(self.targets)
            self.targets += [self.kernel.labels[label] for label in self.kernel.tables[words[1]]]
            return self._made("indexed", of=words[:1], target=first)
        if x.opcode in ("bar.sync", "barrier.sync") and words == ["0"]:
            return self._made("barrier")
        if x.opcode == "bar.warp.sync" and self.kernel.threads == LANES and words == ["-1"]:
            # The warp is the program.
            return self._made("barrier")
        if name == "mov" and len(lists[0]) > 1:
            return self._made("unpack", lists[0], words[1:], width=_bytes(kind) // len(lists[0]))
        if name == "mov" and len(lists[1]) > 1:
            return self._made("pack", words[:1], lists[1], width=_bytes(kind) // len(lists[1]))
        if name in ("ld", "st", "atom", "red"):
            return self._access(name, parts, lists)
        if (
            name in ("ldmatrix", "stmatrix")
            and parts[:3] == ["sync", "aligned", "m8n8"]
            and parts[4:] == ["shared", "b16"]
        ):
            place, values = (words[1], []) if name == "ldmatrix" else (words[0], lists[1])
            base, _, plus = place[1:-1].replace(" ", "").partition("+")
            return self._made(
                "store matrix" if values else "matrix", [] if values else lists[0], [base, *values],
                place=int(plus or 0), space=SPACES.index("shared"),
            )  # fmt: skip
        if name == "shfl" and "|" not in words[0]:
            return self._made("shuffle", words[:1], words[1:], mode=MODES.index(parts[1]))
        if name == "vote" and parts[1] == "ballot":
            return self._made("ballot", words[:1], words[1:], mode=words[1].startswith("!"))
        if name == "redux":
            return self._made("reduce", words[:1], words[1:], compute=operation(f"{parts[1]}.{kind}"))
        if x.opcode == "cvta.local.u64":
            return self._made("compute", words[:1], [words[1], str(LOCAL)], compute=operation("add.u64"))
        to, step = words[0].split("|"), "setp" if name == "setp" else "compute"
        flush = "ftz" in parts
        return self._made(
            step, to, words[1:], compute=operation(x.opcode), width=2 if kind.endswith("x2") and name == "setp" else 1,
            flush_from=flush and kind == "f32", flush_to=flush and name != "setp" and _kinds(parts)[0] == "f32",
        )  # fmt: skip

    def _access(self, name: str, parts: list[str], lists: list[list[str]]) -> _Step:
        """ld, st, atom and red: in one space, of one or several registers."""
        kind, space = parts[-1], next((x for x in parts if x in ("param", *SPACES)), "global")  # or a generic address
        known = {space, kind, "v2", "v4", "v8", *IDLE}
        others = [part for part in parts if part not in known and not part.startswith(("L1::", "L2::"))]
        to = lists.pop(0) if name in ("ld", "atom") else []
        ((place,), *values) = lists
        base, _, plus = place[1:-1].replace(" ", "").partition("+")
        if space == "param":
            return self._made("compute", to, [self._parameter(base, int(plus or 0))], compute=operation("mov"))
        step = self._made(
            {"ld": "load", "st": "store"}.get(name, "atomic"), to, [base, *(x for value in values for x in value)],
            place=int(plus or 0), space=SPACES.index(space), width=_bytes(kind), is_signed=kind[0] == "s",
        )  # fmt: skip
        if name in ("atom", "red"):
            step.acquires, step.releases = ("acq_rel" in others or how in others for how in ("acquire", "release"))
            others = [part for part in others if part not in ("acq_rel", "acquire", "release")]
            step.compute = operation(f"{others.pop()}.{kind}")
        if others:
            raise UnknownOpcode(".".join(others))
        return step

    def _parameter(self, name: str, offset: int) -> str:
        """Name the register that holds a parameter, or the part of one that lies behind an offset."""
        register = f"{name}+{offset}"
        self.parameters[self.constant(register, 0)] = (name, 8 * offset)
        return register


def _kinds(parts: list[str]) -> list[str]:
    return [part for part in parts if re.fullmatch(r"b?[fusb]\d+(x2)?|pred", part)]


def _bytes(kind: str) -> int:
    return int(kind.lstrip("bfsu").rstrip("d") or 8) // 8


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
        self._encoder = _Encoder(self.kernel)
        self._shared = -(-shared // 16) * 16
        steps = [self._encoder.step(x) for x in self.kernel.code] + [self._encoder.step(_THE_END)]
        self._steps = (_Step * len(steps))(*steps)
        # No access to shared memory divides a granule of its record.
        widths = [x.width for x in steps if x.space == SPACES.index("shared") and x.width]
        self._granule = min(widths, default=4)

    def run(
        self, parameters: Sequence[int], grid: int, programs: NDArray[np.int64], tensors: list[Region], launch: int,
        seed: int, checked: bool, findings: Findings,
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
            _Region(shared.ctypes.data, 0, shared.size, self._granule, True, cells),
            _Region(local.ctypes.data, 0, local.size, 1),
        ]
        regions = (_Region * (len(tensors) + 2))(*(x.shared_with() for x in tensors), *own)
        targets, found = np.array([*encoder.targets, 0], np.int32), (_Found * 64)()
        executed, counted = np.zeros(len(self._steps), np.uint64), np.zeros(6, np.uint64)
        task = _Task(
            ctypes.addressof(self._steps), targets.ctypes.data, initial.ctypes.data, executed.ctypes.data,
            counted.ctypes.data, order.ctypes.data, ctypes.addressof(regions), ctypes.addressof(found),
            len(self._steps) - 1, initial.size, order.size, len(tensors), 0, len(found), kernel.threads,
            *(encoder.number[name] for name in ("tid.x", "ctaid.x", "laneid")), launch, seed,
        )  # fmt: skip
        library().run(ctypes.byref(task))
        for x in found[: task.found]:
            findings.add(self._in_words(x, tensors))
        keys = [f"{space} {how}" for space in (*SPACES, "sectors") for how in ("read", "write")]
        return Executed(kernel, executed[:-1], Counter(dict(zip(keys, counted.tolist(), strict=True))))

    def _in_words(self, x: _Found, tensors: list[Region]) -> Finding:
        """Say what was found as kernel, line, threads, and address as tensor and index."""
        instruction, kind = self.kernel.code[x.instruction], KINDS[x.kind]
        who = f"program {x.program}, thread {x.thread}" + (f" and {x.threads - 1} more" if x.threads > 1 else "")
        if kind == "divergence":
            other = "the end" if x.place >= len(self.kernel.code) else self.kernel.code[x.place].line
            where = f"not all threads take part, others are at {other}"
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
