"""Turn the instructions of a kernel into steps of machine.cpp."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from ptx.native import ACTIONS, LOCAL, MODES, SPACES, Step, library
from ptx.parse import Instruction, Kernel

LANES, END = 32, ("ret", "exit")
# Whatever a register holds that nobody has set: a NaN in float32 and float64, no index of anything.
NOBODYS = 0x7FF4DEAD7FA5DEAD
# Fields of opcodes that change nothing here; caches and the default rounding.
IDLE = {"rn", "approx", "full", "ftz", "relaxed", "gpu", "sys", "cta", "volatile", "weak", "nc", "uni"}


class UnknownOpcode(Exception):
    """An opcode, or a form of one, that this interpreter does not know."""


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


class Encoder:
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

    def step(self, x: Instruction) -> Step:
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

    def _made(self, action: str, to: Sequence[str] = (), of: Sequence[str] = (), **fields: int) -> Step:
        step = Step(action=ACTIONS.index(action), to_count=len(to), from_count=len(of), **fields)
        nothing = self.register("_")
        for i in range(9):
            step.to[i] = self.register(to[i]) if i < len(to) else nothing
            step.from_[i] = self.register(of[i]) if i < len(of) else nothing
        return step

    def _step(self, x: Instruction) -> Step:
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

    def _access(self, name: str, parts: list[str], lists: list[list[str]]) -> Step:
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
