"""Read PTX: the entry's parameters, registers, and its instructions with the lines they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*);$", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+%(\w+?)<(\d+)>;")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+%?(\w+);")
_BITS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}


@dataclass
class Instruction:
    """One instruction; `line` names its place in Triton's source, with the calls that led there."""

    opcode: str
    operands: list[str | list[str]]  # a list of several is a vector in braces
    guard: str | None  # the register of @p
    negated: bool
    line: str


@dataclass
class Kernel:
    """An entry of a module."""

    name: str
    parameters: dict[str, str]  # type by name
    threads: int
    registers: dict[str, int] = field(default_factory=dict)  # bits by name, without %
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the instruction behind each
    local: int = 0  # bytes of local memory of a thread
    tables: dict[str, list[str]] = field(default_factory=dict)  # labels that brx.idx chooses from


def parse(text: str) -> Kernel:
    """Read the one entry of a module."""
    text = text.partition(".section")[0]
    body = text.partition(".visible .entry ")[2]
    name = re.match(r"[\w$]+", body)
    if name is None:
        raise ValueError(f"ptx: expected an entry, got {text[:200]!r}")
    signature, _, rest = body.partition(")")
    threads = re.search(r"\.(?:reqntid|maxntid) (\d+)", rest)
    parameters = {parameter: kind for kind, parameter in _PARAMETER.findall(signature)}
    kernel = Kernel(name[0], parameters, int(threads[1]) if threads else 0)
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    line, label = kernel.name, ""
    for statement, comment in _statements(rest.partition("{")[2]):
        if statement.split()[0] == ".loc":
            _, file, number, *_ = statement.split()
            line = comment or f"{files.get(file, '?')}:{number}"
        elif statement.endswith(":"):
            label = statement[:-1]
            kernel.labels[label] = len(kernel.code)
        elif statement.startswith(".reg"):
            _declare(statement, kernel.registers)
        elif depot := re.match(r"\.local .*__local_depot0\[(\d+)\];", statement):
            kernel.local = int(depot[1])
        elif statement.startswith(".branchtargets"):
            kernel.tables[label] = re.findall(r"[$\w]+", statement.removeprefix(".branchtargets"))
        elif statement.startswith(".pragma"):
            continue  # a hint
        elif statement.startswith("."):
            raise ValueError(f"ptx: directive {statement!r} is not known")
        else:
            kernel.code.append(_instruction(statement, line))
    return kernel


def _statements(body: str):
    """Give statements without comments, and the comment behind a .loc."""
    pending = ""
    for raw in body.splitlines():
        code, _, comment = raw.partition("//")
        code = code.strip()
        if pending == "" and code in ("", "{", "}"):
            continue
        if code.split()[:1] == [".loc"]:
            yield code, comment.strip()
            continue
        pending = f"{pending} {code}".strip()
        # Braces around statements open a scope for names of inline assembly, which are never used twice with two types.
        while pending := pending.strip(" \t{}") if pending[:1] in "{} \t" else pending:
            label = re.match(r"([$\w]+:)\s*", pending)
            end = label.end() if label else pending.find(";") + 1
            if end <= 0:
                break
            yield (label[1] if label else pending[:end].strip()), ""
            pending = pending[end:].strip(" \t}")


def _declare(statement: str, registers: dict[str, int]) -> None:
    many, one = _REGISTERS.match(statement), _REGISTER.match(statement)
    if many:
        registers.update({f"{many[2]}{i}": _BITS[many[1]] for i in range(int(many[3]))})
    elif one:
        registers[one[2]] = _BITS[one[1]]
    else:
        raise ValueError(f"ptx: registers {statement!r} are not known")


def _instruction(statement: str, line: str) -> Instruction:
    match = _INSTRUCTION.match(statement)
    if match is None:
        raise ValueError(f"ptx: {statement!r} is not known, of {line}")
    negated, guard, opcode, rest = match.groups()
    operands: list[str | list[str]] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest):
        inner = [x.strip() for x in part[1:-1].split(",")]
        operands.append(inner if part[0] == "{" else part)
    return Instruction(opcode.replace("::cta", ""), operands, guard and guard[1:], negated == "!", line)
