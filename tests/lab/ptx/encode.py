"""Turn the instructions of a kernel into steps of machine.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from lab.ptx.native import ACTION, MODE, SPACE, Step, library
from lab.ptx.parse import Instruction, Kernel

LANES = 32
# Whatever a register holds that nobody has set: a NaN in float32 and float64, no index of anything.
NOBODYS = 0x7FF4DEAD7FA5DEAD
# Of a kernel without a y and a z; shared memory begins at 0; what stands where there is no operand.
ZEROS = ("nctaid.x", "tid.y", "tid.z", "ctaid.y", "ctaid.z", "global_smem", "_")
# What changes nothing here: the default rounding; of accesses caches, and an order that is theirs by itself.
IDLE = {"rn", "ftz", "full"}
IDLE_OF_ACCESS = re.compile(r"local|relaxed|gpu|sys|volatile|weak|nc|v[24]|L[12]::\S+")

FOUR_MATRICES = ["sync", "aligned", "m8n8", "x4", "shared", "b16"]


class UnknownOpcode(Exception):
    """An opcode, or a form of one, that this interpreter does not know."""


@cache
def operation(opcode: str) -> int:
    """Find the function of an opcode that computes from registers alone, or raise UnknownOpcode."""
    found = library().find(".".join(part for part in opcode.split(".") if part not in IDLE).encode())
    if not found:
        raise UnknownOpcode(opcode)
    return found


class Encoder:
    """Turns the instructions of a kernel into steps; constants, parameters and special registers become registers.

    `number` has the number of each register by its name, `initial` what it holds when a program begins.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        names = ["tid.x", "ctaid.x", "__local_depot0", *kernel.registers]
        self.number = {name: i for i, name in enumerate(names)}
        self.initial = [NOBODYS] * len(names)
        for name in (*ZEROS, *kernel.parameters):
            self._constant(name, 0)
        self._constant("ntid.x", kernel.threads)

    def step(self, x: Instruction) -> Any:
        """Encode an instruction, or raise UnknownOpcode with its place in Triton's source."""
        try:
            step = self._step(x)
            step.guard, step.negated = -1 if x.guard is None else self.number[x.guard], x.negated
        except (UnknownOpcode, KeyError, ValueError, IndexError) as error:
            raise UnknownOpcode(f"{x.opcode} of {x.line} is not known: {error!r}") from error
        return step

    def _step(self, x: Instruction) -> Any:
        name, *parts = x.opcode.split(".")
        kind, words = parts[-1] if parts else "", [y[0] for y in x.operands]
        if x.opcode in ("ret", "exit"):
            return self._made("exit", target=len(self.kernel.code))
        if name == "bra":
            return self._made("branch", target=self.kernel.labels[words[0]])
        barriers = {"bar.sync": ["0"], "barrier.sync": ["0"]}
        if self.kernel.threads == LANES:  # the warp is the program
            barriers["bar.warp.sync"] = ["-1"]
        if x.opcode in barriers and words == barriers[x.opcode]:
            return self._made("barrier")
        if name in ("ld", "st", "atom", "red"):
            return self._access(name, parts, x.operands)
        if name in ("ldmatrix", "stmatrix") and parts == FOUR_MATRICES:
            return self._access(name[:2], ["shared", "b32"], x.operands, matrix=True)
        if name == "shfl":
            return self._made("shuffle", words[:1], words[1:], mode=MODE[parts[1]])
        if name == "redux":
            return self._made("reduce", words[:1], words[1:], compute=operation(f"{parts[1]}.{kind}"))
        if name == "mov" or x.opcode == "cvta.local.u64":
            to, of = x.operands
            apart = 8 * _bytes(kind) // max(len(to), len(of))
            return self._made("compute" if len(of) == 1 else "pack", to, of, compute=operation("mov"), shift=apart)
        flush, result = "ftz" in parts, {"cvt": parts[-2:-1], "setp": []}.get(name, parts[-1:])
        return self._made(
            "compute", words[0].split("|"), words[1:], compute=operation(x.opcode), shift=1,
            flush_from=flush and kind == "f32", flush_to=flush and result == ["f32"],
        )  # fmt: skip

    def _access(self, name: str, parts: list[str], operands: list[list[str]], **fields: int) -> Any:
        """ld, st, atom and red: in one space, of one or several registers."""
        kind, space = parts[-1], next((part for part in parts if part in ("param", *SPACE)), "global")
        to, place, *values = operands if name in ("ld", "atom") else [[], *operands]
        base, _, plus = place[0][1:-1].replace(" ", "").partition("+")
        if (name, space) == ("ld", "param"):
            return self._made("compute", to, [base], compute=operation("mov"))
        others = [part for part in parts[:-1] if part != space and not IDLE_OF_ACCESS.fullmatch(part)]
        step = self._made(
            {"ld": "load", "st": "store"}.get(name, "atomic"), to, [base, *(x for value in values for x in value)],
            place=int(plus or 0), space=SPACE[space], width=_bytes(kind), is_signed=kind[0] == "s", **fields,
        )  # fmt: skip
        if name in ("atom", "red"):
            step.orders = "acq_rel" in others
            others = [part for part in others if part != "acq_rel"]
            step.compute = operation(f"{others.pop()}.{kind}")
        if others:
            raise UnknownOpcode(".".join(others))
        return step

    def _made(self, action: str, to: Sequence[str] = (), of: Sequence[str] = (), **fields: int) -> Any:
        step = Step(action=ACTION[action], to_count=len(to), of_count=len(of), **fields)
        for registers, operands in ((step.to, to), (step.of, of)):
            registers[:] = [*map(self._register, operands), *[0] * (len(registers) - len(operands))]
        return step

    def _register(self, operand: str) -> int:
        """Give the register of an operand; 0f and 0d are the bits of a float."""
        name = operand.lstrip("%")
        if name in self.number:
            return self.number[name]
        bits = re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", name)
        return self._constant(name, int(bits[1], 16) if bits else int(name.rstrip("U"), 0))

    def _constant(self, name: str, value: int) -> int:
        self.number[name] = len(self.initial)
        self.initial.append(value & (2**64 - 1))
        return self.number[name]


def _bytes(kind: str) -> int:
    return int(re.sub(r"\D", "", kind) or 8) // 8
