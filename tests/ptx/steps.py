"""A function for each instruction, `step(wave, mask)`, with its operands bound: registers by number, constants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import opcodes
from ptx.opcodes import TYPES, UnknownOpcode, literal
from ptx.parse import Instruction, Kernel
from ptx.wave import LANES, LOCAL, Mask, Values, Wave

Step = Callable[[Wave, Mask], None]
Read = Callable[[Wave], Values]
U32 = np.uint32
EVERY_LANE = 0xFFFFFFFF
# cvta of local memory is what makes an address generic here; shared memory is never seen through a generic one.
IGNORED = {"relaxed", "gpu", "cta", "volatile", "weak", "nc"}


class Assembler:
    """Turns the instructions of one kernel into functions.

    Args:
        kernel: As it was read.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._number = {name: i for i, name in enumerate(kernel.registers)}
        self._used = {name for block in kernel.blocks for x in block.instructions for name in _names(x.operands[1:])}

    def step(self, instruction: Instruction) -> Step:
        """Make the function of an instruction that is not a branch.

        Raises:
            UnknownOpcode: The interpreter does not know it.
        """
        try:
            step = self._make(instruction)
        except (UnknownOpcode, KeyError, ValueError) as error:
            raise UnknownOpcode(f"{instruction.opcode} of {instruction.line} is not known: {error!r}") from error
        if instruction.guard is None:
            return step
        guard = self.guard(instruction)
        return lambda wave, mask: step(wave, guard(wave, mask))

    def guard(self, instruction: Instruction) -> Callable[[Wave, Mask], NDArray[np.bool_]]:
        """Make the function that gives the threads for which @p or @!p holds."""
        assert instruction.guard is not None
        number, negated = self._number[instruction.guard], instruction.negated

        def threads(wave: Wave, mask: Mask) -> NDArray[np.bool_]:
            holds = wave.registers[number] ^ negated
            return np.broadcast_to(holds, wave.shape) if mask is None else holds & mask

        return threads

    def _make(self, x: Instruction) -> Step:
        name, *parts = x.opcode.split(".")
        if name == "mov":
            return self._move(x, parts[-1])
        if name in ("ld", "st", "atom", "red"):
            return self._parameter(x) if parts[0] == "param" else self._access(x, name, parts)
        if name == "ldmatrix":
            return self._load_matrix(x, parts)
        if x.opcode in ("bar.sync", "barrier.sync"):
            if x.operands != ["0"]:
                raise UnknownOpcode("a barrier of some of the threads")
            return lambda wave, mask: wave.pass_barrier(mask)
        if name in ("shfl", "vote", "redux"):
            return self._exchange(x, name, parts)
        if x.opcode == "cvta.local.u64":
            address = self.read(x.operands[1], "u64")
            return self._setting(x.operands[0], "u64", lambda wave: address(wave) + np.uint64(LOCAL))
        return self._compute(x)

    # --- operands ---

    def read(self, operand: str | list[str], kind: str) -> Read:
        """Read an operand as a type; of a wider register the low bits."""
        assert isinstance(operand, str)
        text = operand.lstrip("%")
        dtype = TYPES[kind]
        if text in self._number:
            number, bits = self._number[text], self._kernel.registers[text]
            if bits == 1:
                return lambda wave: wave.registers[number]
            if bits == 8 * dtype.itemsize:
                return lambda wave: wave.registers[number].view(dtype)
            if bits < 8 * dtype.itemsize:
                raise UnknownOpcode(f"{operand} as {kind}")
            raw = np.dtype(f"u{dtype.itemsize}")
            return lambda wave: wave.registers[number].astype(raw).view(dtype)
        constant = {"global_smem": "0", "__local_depot0": "0"}.get(text, text)
        if constant in SPECIAL_REGISTERS:
            special = SPECIAL_REGISTERS[constant]
            return lambda wave: np.asarray(special(wave)).astype(dtype)
        value = literal(constant, kind)
        return lambda wave: value

    def _writer(self, operand: str, kind: str) -> Callable[[Wave, Values, Mask], None]:
        """Write a register of at least a type's size; a signed value fills a wider one with its sign."""
        if operand == "_":
            return lambda wave, value, mask: None
        number, bits = self._number[operand.lstrip("%")], self._kernel.registers[operand.lstrip("%")]
        dtype = TYPES[kind]
        narrow = np.dtype(bool) if bits == 1 else np.dtype(f"u{dtype.itemsize}")
        raw = np.dtype(bool) if bits == 1 else np.dtype(f"u{bits // 8}")
        signed = np.dtype(f"i{bits // 8}") if dtype.kind == "i" and raw != narrow else None

        def write(wave: Wave, value: Values, mask: Mask) -> None:
            if signed is not None:
                value = value.astype(signed).view(raw)
            elif value.dtype != raw:
                value = value.view(narrow).astype(raw, copy=False)
            if value.shape != wave.shape:
                value = np.ascontiguousarray(np.broadcast_to(value, wave.shape))
            if mask is not None:
                value = np.where(mask, value, wave.registers[number].astype(raw, copy=False))
            wave.registers[number] = value

        return write

    def _setting(self, operand: str | list[str], kind: str, value: Read) -> Step:
        assert isinstance(operand, str)
        write = self._writer(operand, kind)
        return lambda wave, mask: write(wave, value(wave), mask)

    # --- 9.7.1 to 9.7.9: what computes ---

    def _compute(self, x: Instruction) -> Step:
        result, kinds, compute = opcodes.operation(x.opcode)
        if len(x.operands) != 1 + len(kinds):
            raise UnknownOpcode(f"{len(x.operands)} operands")
        reads = [self.read(operand, kind) for operand, kind in zip(x.operands[1:], kinds, strict=True)]
        first, _, second = str(x.operands[0]).partition("|")
        write = self._writer(first, result)
        if second:
            write_second = self._writer(second, result)

            def both(wave: Wave, mask: Mask) -> None:
                found = compute(*[read(wave) for read in reads])
                one, other = found if isinstance(found, tuple) else (found, ~found)
                write(wave, one, mask)
                write_second(wave, other, mask)

            return both
        if len(reads) == 2:
            left, right = reads
            return lambda wave, mask: write(wave, compute(left(wave), right(wave)), mask)
        return lambda wave, mask: write(wave, compute(*[read(wave) for read in reads]), mask)

    def _move(self, x: Instruction, kind: str) -> Step:
        """Copy; packs a vector of registers into one and unpacks it too."""
        target, source = x.operands
        bits = 8 * TYPES[kind].itemsize
        if isinstance(target, list):
            read, part = self.read(source, kind), bits // len(target)
            writes = [self._writer(name, f"b{part}") for name in target]

            def unpack(wave: Wave, mask: Mask) -> None:
                whole = np.ascontiguousarray(read(wave)).view(f"u{part // 8}")
                for i, write in enumerate(writes):
                    write(wave, np.ascontiguousarray(whole[:, i :: len(writes)]), mask)

            return unpack
        if isinstance(source, list):
            part = bits // len(source)
            reads = [self.read(name, f"b{part}") for name in source]
            dtype = TYPES[f"b{bits}"]

            def pack(wave: Wave) -> Values:
                return sum(
                    (read(wave).astype(dtype) << dtype.type(part * i) for i, read in enumerate(reads)), dtype.type(0)
                )

            return self._setting(target, f"b{bits}", pack)
        return self._setting(target, kind, self.read(source, kind))

    # --- 9.7.9.8 and on: data movement ---

    def _address(self, operand: str | list[str], bits: int) -> Callable[[Wave], NDArray[np.int64]]:
        assert isinstance(operand, str)
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        if base in ("global_smem", "__local_depot0"):
            bits = 32
        read, plus = self.read(base, f"u{bits}"), int(offset or 0)
        return lambda wave: np.broadcast_to(read(wave).astype(np.int64) + plus, wave.shape)

    def _parameter(self, x: Instruction) -> Step:
        name, _, offset = str(x.operands[1])[1:-1].partition("+")
        kind, shift = x.opcode.split(".")[-1], 8 * int(offset or 0)
        return self._setting(x.operands[0], kind, lambda wave: literal(str(wave.parameters[name] >> shift), kind))

    def _access(self, x: Instruction, name: str, parts: list[str]) -> Step:
        """ld, st, atom and red: in one space, of one or several registers."""
        space = parts.pop(0) if parts[0] in ("global", "shared", "local") else "generic"
        kind = parts.pop()
        count = int(parts.pop()[1:]) if parts and parts[-1] in ("v2", "v4", "v8") else 1
        action = parts.pop() if name in ("atom", "red") else ""
        if {part for part in parts if not part.startswith(("L1::", "L2::"))} - IGNORED:
            raise UnknownOpcode(".".join(parts))
        width = TYPES[kind].itemsize
        operands = list(x.operands)
        target = operands.pop(0) if name in ("ld", "atom") else "_"
        address = self._address(operands.pop(0), 32 if space == "shared" else 64)
        hint: list[int] = []

        def reached(wave: Wave, mask: Mask, how: str) -> Any:
            flat = address(wave).ravel()
            lanes = np.arange(flat.size) if mask is None else np.nonzero(mask.ravel())[0]
            if not lanes.size:
                return
            flat = flat[lanes]
            where = space
            if space == "generic":
                where = "local" if flat.size and flat[0] >= LOCAL else "global"
                flat = flat - LOCAL if where == "local" else flat
            wave.count(how, where, flat, lanes, count * width)
            for region, at, these in wave.places(where, flat, lanes, count * width, x, hint):
                yield region, at, lanes[these]

        if name == "ld":
            writes = [self._writer(part, kind) for part in (target if isinstance(target, list) else [target])]

            def load(wave: Wave, mask: Mask) -> None:
                out = np.zeros((count, wave.rows * LANES), f"u{width}")
                for region, at, lanes in reached(wave, mask, "read"):
                    wave.read(region, at, lanes, count * width, x)
                    out[:, lanes] = region.load(at, count * width, width).T
                for values, write in zip(out, writes, strict=True):
                    write(wave, values.reshape(wave.shape).view(TYPES[kind]), mask)

            return load
        values = operands.pop(0)
        reads = [self.read(part, kind) for part in (values if isinstance(values, list) else [values])]
        if len(reads) != count or operands:
            raise UnknownOpcode(f"operands {x.operands}")
        if name == "st":

            def store(wave: Wave, mask: Mask) -> None:
                given = np.stack(
                    [np.broadcast_to(read(wave), wave.shape).ravel().view(f"u{width}") for read in reads], 1
                )
                for region, at, lanes in reached(wave, mask, "write"):
                    wave.write(region, at, lanes, given[lanes], x)

            return store
        if action != "add" or str(target).lstrip("%") in self._used:
            raise UnknownOpcode("an atomic other than an addition, or one whose result is used")

        def add(wave: Wave, mask: Mask) -> None:
            given = np.broadcast_to(reads[0](wave), wave.shape).ravel()
            for region, at, lanes in reached(wave, mask, "touch"):
                wave.touch(region, at, lanes, width, x)
                np.add.at(region.data.view(TYPES[kind]), at // width, given[lanes])

        return add

    def _load_matrix(self, x: Instruction, parts: list[str]) -> Step:
        """ldmatrix without .trans: thread i gets bytes 4 * (i % 4) of row i // 4, whose address is thread i // 4's."""
        if parts[:4] != ["sync", "aligned", "m8n8", "x1"] or parts[4:] != ["shared", "b16"]:
            raise UnknownOpcode(x.opcode)
        (target,), address = x.operands[0], self._address(x.operands[1], 32)
        write, row = self._writer(target, "b32"), np.arange(LANES) // 4

        def load(wave: Wave, mask: Mask) -> None:
            lanes = _together(wave, mask, x)
            rows = address(wave)[:, row].ravel()[lanes]
            wave.count("read", "shared", rows, lanes, 4)
            out = np.zeros(wave.rows * LANES, U32)
            for region, at, these in wave.places("shared", rows, lanes, 16, x, []):
                mine = at + 4 * (lanes[these] % 4)
                wave.read(region, mine, lanes[these], 4, x)
                out[lanes[these]] = region.load(mine, 4, 4)[:, 0]
            write(wave, out.reshape(wave.shape), mask)

        return load

    # --- 9.7.13: parallel synchronization ---

    def _exchange(self, x: Instruction, name: str, parts: list[str]) -> Step:
        """shfl, vote and redux of whole warps."""
        *operands, members = x.operands[1:]
        member, target = self.read(members, "u32"), str(x.operands[0])
        if name == "shfl" and "|" not in target:
            value, by, limit = (self.read(operand, "u32") for operand in operands)
            mode, kind = parts[1], "b32"

            def exchange(wave: Wave) -> Values:
                mine = np.broadcast_to(value(wave), wave.shape)
                return np.take_along_axis(mine, _source_lanes(mode, by(wave), limit(wave), wave), 1)
        elif name == "vote" and parts[1] == "ballot":
            (operand,), kind = operands, "b32"
            negated, vote = str(operand).startswith("!"), self.read(str(operand).lstrip("!"), "pred")

            def exchange(wave: Wave) -> Values:
                votes = np.broadcast_to(vote(wave), wave.shape) ^ negated
                return (votes.astype(U32) << np.arange(LANES, dtype=U32)).sum(1, dtype=U32)[:, None]
        elif name == "redux" and parts[1] in REDUCTIONS:
            kind, reduce = parts[2], REDUCTIONS[parts[1]]
            value = self.read(operands[0], kind)

            def exchange(wave: Wave) -> Values:
                mine = np.broadcast_to(value(wave), wave.shape)
                return reduce.reduce(mine, axis=1, dtype=mine.dtype, keepdims=True)
        else:
            raise UnknownOpcode(x.opcode)
        write = self._writer(target, kind)

        def step(wave: Wave, mask: Mask) -> None:
            lanes = _together(wave, mask, x)
            if (np.broadcast_to(member(wave), wave.shape).ravel()[lanes] != EVERY_LANE).any():
                raise UnknownOpcode(f"{x.opcode} of {x.line}: of some of a warp's threads")
            write(wave, exchange(wave), mask)

        return step


REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip

# 10: special registers.
SPECIAL_REGISTERS: dict[str, Callable[[Wave], Any]] = {
    "tid.x": lambda wave: wave.thread,
    "laneid": lambda wave: np.arange(LANES)[None],
    "ctaid.x": lambda wave: wave.program,
    "nctaid.x": lambda wave: np.full((1, 1), wave.grid),
    "ntid.x": lambda wave: np.full((1, 1), wave.warps * LANES),
    **{f"{name}.{axis}": lambda wave: np.zeros((1, 1)) for name in ("tid", "ctaid") for axis in "yz"},
}


def _names(operands: list[str | list[str]]) -> list[str]:
    return [name for operand in operands for name in re.findall(r"%(\w+)", str(operand))]


def _together(wave: Wave, mask: Mask, instruction: Instruction) -> NDArray[np.int64]:
    """Give the threads of a mask, which has to hold whole warps."""
    if mask is None:
        return np.arange(wave.rows * LANES)
    some = mask.any(1) & ~mask.all(1)
    if some.any():
        lanes = np.nonzero((mask & some[:, None]).ravel())[0]
        wave.report_divergence(lanes, instruction, "the other threads of the warp do not take part")
    return np.nonzero(mask.ravel())[0]


def _source_lanes(mode: str, by: Values, limit: Values, wave: Wave) -> NDArray[np.int64]:
    """Find whose value each thread gets, as the ISA's pseudo-code for shfl has it."""
    lane = np.arange(LANES)
    by, segment, clamp = (x.astype(np.int64) for x in (by & U32(31), (limit >> U32(8)) & U32(31), limit & U32(31)))
    highest = (lane & segment) | (clamp & ~segment & 31)
    if mode == "bfly":
        source = lane ^ by
        good = source <= highest
    elif mode == "down":
        source = lane + by
        good = source <= highest
    elif mode == "up":
        source = lane - by
        good = source >= highest
    elif mode == "idx":
        source = (lane & segment) | (by & ~segment & 31)
        good = source <= highest
    else:
        raise UnknownOpcode(f"shfl.sync.{mode}")
    return np.broadcast_to(np.where(good, source, lane), wave.shape)
