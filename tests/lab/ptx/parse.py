"""Read PTX: the entry's parameters, registers, and its instructions with the lines they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
_REGISTERS = re.compile(r"\.reg\s+\.\w+\s+%?(\w+)(?:<(\d+)>)?")


@dataclass
class Instruction:
    """One instruction; `line` names its place in Triton's source, with the calls that led there."""

    opcode: str
    operands: list[list[str]]  # one of several registers is a vector in braces
    guard: str | None  # the register of @p
    negated: bool
    line: str


@dataclass
class Kernel:
    """An entry of a module."""

    name: str
    parameters: list[str]
    threads: int
    registers: list[str] = field(default_factory=list)  # without %
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the instruction behind each
    local: int = 0  # bytes of local memory of a thread


def parse(text: str) -> Kernel:
    """Read the one entry of a module."""
    signature, _, rest = text.partition(".section")[0].partition(".visible .entry ")[2].partition(")")
    directives, _, body = rest.partition("{")
    threads = re.search(r"\.(?:req|max)ntid (\d+)", directives)
    if threads is None:
        raise ValueError(f"ptx: expected an entry and its number of threads, got {text[:200]!r}")
    name, _, parameters = signature.partition("(")
    kernel = Kernel(name, re.findall(r"(\w+)\s*(?:,|$)", parameters), int(threads[1]))
    line = name
    for raw in body.splitlines():
        code, _, comment = raw.partition("//")
        # Braces around statements open a scope for names of inline assembly, which are never used twice with two types.
        *statements, rest = (part.strip(" \t").lstrip("{} \t") for part in code.split(";"))
        if rest.startswith(".loc"):
            line = comment.strip() or rest
        elif rest.endswith(":"):
            kernel.labels[rest[:-1]] = len(kernel.code)
        elif rest and not rest.startswith(".file"):
            raise ValueError(f"ptx: {rest!r} is not known, of {line}")
        for statement in statements:
            declared, match = _REGISTERS.fullmatch(statement), _INSTRUCTION.fullmatch(statement)
            if local := re.fullmatch(r"\.local .*__local_depot0\[(\d+)\]", statement):
                kernel.local = int(local[1])
            elif declared:
                register, many = declared.groups()
                kernel.registers += [f"{register}{i}" for i in range(int(many))] if many else [register]
            elif match:
                negated, guard, opcode, words = match.groups()
                operands = [
                    [x.strip() for x in part.strip("{}").split(",")]
                    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", words)
                ]
                kernel.code.append(Instruction(opcode.replace("::cta", ""), operands, guard, negated == "!", line))
            elif not statement.startswith(".pragma"):  # a hint
                raise ValueError(f"ptx: {statement!r} is not known, of {line}")
    return kernel
