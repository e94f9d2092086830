"""Read a kernel's disassembly: registers, spills, instructions, how wide memory is accessed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import networkx as nx

# Bits of one access by a thread.
_SASS_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_AMD_BITS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}

_SASS_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;\n]*)", re.MULTILINE)
# A label, or an instruction.
_AMD_LINE = re.compile(r"^(?:(\.L\w+):|\t(([a-z]\w+)[^;\n]*))", re.MULTILINE)
# Accesses to a thread's stack: how wide, and from which byte on.
_SASS_STACK = re.compile(r"\b((?:STL|LDL)[.\w]*) [^\[]*\[R1(?:\+(0x[0-9a-f]+))?\]")
_AMD_STACK = re.compile(r"scratch_(?:load|store)_(dword(?:x[234])?)\b.*?(?:offset:(\d+).*)?")
_AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_[us]?(byte|short|dword(?:x[234])?)(?:_d16)?(?:_hi)?")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        text: The mnemonic and its operands, with the predicate before them.
        places: The names that branches have for it: its address, or the labels before it.
    """

    text: str
    places: tuple[str, ...]


class Branches(NamedTuple):
    """How a machine says where execution goes on.

    Attributes:
        target: Finds the place that a branch names.
        ends: Matches what never goes on with the next instruction.
    """

    target: re.Pattern[str]
    ends: re.Pattern[str]


# With a predicate, before the mnemonic or behind it, a branch may go on. A call does; what it calls is in no loop.
SASS = Branches(re.compile(r"\bBRA\b[^;]*?\b(0x[0-9a-f]+)"), re.compile(r"BRA 0x|EXIT|RET\b"))
AMD = Branches(re.compile(r"^s_c?branch\w*\s+(\.L\w+)"), re.compile(r"s_branch|s_endpgm|s_setpc_b64"))


class MachineCode(NamedTuple):
    """A kernel as it was compiled.

    Attributes:
        registers: Of a thread; on AMD its vector registers.
        spilled: Bytes of a thread in memory because no register was left. On AMD, scalar registers that moved into
            vector registers are not counted.
        spilled_in_loops: Those bytes that are stored or loaded in a loop, so that a program does so more than once.
        instructions: All of them, each once, whatever branch or loop it stands in; padding is left out.
        loads: How many instructions load so many bits from global memory.
        stores: How many instructions store so many bits to it.
    """

    registers: int
    spilled: int
    spilled_in_loops: int
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]


def read_machine_code(text: str) -> MachineCode:
    """Read the output of `cuobjdump -res-usage -sass`, or AMD's assembly of one kernel.

    Raises:
        ValueError: What is looked for is not there.
    """
    return _read_amd(text) if ".amdgcn_target" in text else _read_sass(text)


def _read_sass(text: str) -> MachineCode:
    lines = _SASS_LINE.findall(text)
    names = [name for _, _, name in lines if name != "NOP"]
    instructions = [Instruction(code.strip(), (hex(int(place, 16)),)) for place, code, _ in lines]
    accesses = [_SASS_STACK.search(one.text) for one in instructions]
    stack = [x and _bytes(int(x[2] or "0", 16), _sass_bits(x[1])) for x in accesses]
    spilled = _number(r"\bSTACK:(\d+)", text)
    return MachineCode(
        registers=_number(r"\bREG:(\d+)", text),
        instructions=_some(len(names)),
        spilled=spilled,
        spilled_in_loops=_spilled_in_loops(spilled, stack, instructions, SASS),
        loads=_widths(_sass_bits(name) for name in names if re.match(r"LDG\b", name)),
        stores=_widths(_sass_bits(name) for name in names if re.match(r"STG\b", name)),
    )


def _sass_bits(name: str) -> int:
    return next((_SASS_BITS[part] for part in reversed(name.split(".")) if part in _SASS_BITS), 32)


def _read_amd(text: str) -> MachineCode:
    instructions: list[Instruction] = []
    names: list[str] = []
    labels: tuple[str, ...] = ()
    for label, code, name in _AMD_LINE.findall(text.partition(".Lfunc_end")[0]):
        if label:
            labels = (*labels, label)
        elif name != "s_code_end":
            instructions.append(Instruction(code.strip(), labels))
            names.append(name)
            labels = ()
    accesses = [match for name in names if (match := _AMD_ACCESS.fullmatch(name))]
    of_stack = [_AMD_STACK.fullmatch(one.text) for one in instructions]
    stack = [x and _bytes(int(x[2] or "0"), _AMD_BITS[x[1]]) for x in of_stack]
    spilled = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return MachineCode(
        registers=_number(r"\.vgpr_count:\s+(\d+)", text),
        instructions=_some(len(names)),
        spilled=spilled,
        spilled_in_loops=_spilled_in_loops(spilled, stack, instructions, AMD),
        loads=_widths(_AMD_BITS[match[2]] for match in accesses if match[1] == "load"),
        stores=_widths(_AMD_BITS[match[2]] for match in accesses if match[1] == "store"),
    )


def in_loops(instructions: Sequence[Instruction], branches: Branches) -> set[int]:
    """Give the numbers of the instructions that are in a loop: a path of branches leads back to them.

    Raises:
        ValueError: A branch goes where no instruction is.
    """
    where = {place: i for i, one in enumerate(instructions) for place in one.places}
    flow = nx.DiGraph()
    for i, one in enumerate(instructions):
        found = branches.target.search(one.text)
        if found is not None:
            if found[1] not in where:
                raise ValueError(f"disassembly: expected an instruction where {one.text!r} goes, got none")
            flow.add_edge(i, where[found[1]])
        if branches.ends.match(one.text) is None and i + 1 < len(instructions):
            flow.add_edge(i, i + 1)
    return {i for part in nx.strongly_connected_components(flow) for i in part if len(part) > 1 or flow.has_edge(i, i)}


def _bytes(start: int, bits: int) -> range:
    return range(start, start + bits // 8)


def _spilled_in_loops(
    spilled: int, stack: Sequence[range | None], instructions: Sequence[Instruction], branches: Branches
) -> int:
    """Count the bytes of the stack that loops touch. stack: those that each instruction does, None: it does not."""
    if not spilled:
        return 0
    if not any(stack):
        raise ValueError(f"disassembly: expected accesses to the {spilled} bytes of the stack, got none")
    return len({byte for i in in_loops(instructions, branches) for byte in stack[i] or ()})


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"disassembly: expected a match of {pattern!r}, got {text[:200]!r}")
    return int(found[1])


def _some(instructions: int) -> int:
    if instructions == 0:
        raise ValueError("disassembly: expected instructions, got none")
    return instructions


def _widths(bits: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(bits).items(), reverse=True))
