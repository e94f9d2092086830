"""Planted faults in compiled kernels: PTX with one instruction changed, as a wrong kernel or a wrong compiler would."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One changed instruction: which kernel of a case, which line of its PTX, how."""

    kernel: str
    kind: str
    line: int
    before: str
    after: str

    def apply(self, kernel: str, text: str) -> str:
        """Change the text of this kernel and leave those of others."""
        lines = text.split("\n")
        if kernel == self.kernel and lines[self.line] == self.before:
            lines[self.line] = self.after
        return "\n".join(lines)


def _farther(match: re.Match[str]) -> str:
    return f"[{match[1]}+{int(match[2] or 0) + 16}]"


# What a fault does to an instruction that matches; None where it leaves it as it is.
FAULTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "a barrier removed": (r"^\s*bar\.(warp\.)?sync", lambda line: ""),
    "a shuffle's lane changed": (
        # To its own: an exchange with another neighbor of the same group gives the same sum.
        r"shfl\.sync\.bfly\.b32.* (16|8|4|2|1), 31, -1;",
        lambda line: re.sub(r", (\d+), 31, -1;", ", 0, 31, -1;", line),
    ),
    "a load's mask dropped": (r"@!?%p\d+ ld\.global", lambda line: re.sub(r"@!?%p\d+ ", "", line)),
    "a store's mask dropped": (r"@!?%p\d+ st\.(global|shared)", lambda line: re.sub(r"@!?%p\d+ ", "", line)),
    "an address moved": (
        r"(ld|st)\.global\S* .*\[",
        lambda line: re.sub(r"\[ *(%rd\d+) *\+? *(\d+)? *\]", _farther, line),
    ),
    "an atomic made plain": (
        # What it adds is stored: to add it without being atomic takes more than one instruction.
        r"(atom|red)\.\S*add",
        lambda line: re.sub(
            r"(?:atom|red)\.(?:\w+\.)*?(shared|global)\S*\.[us](\d+)(?: %\w+,)? (\[.*\])", r"st.\1.b\2 \3", line
        ),
    ),
    "an atomic that orders nothing": (r"(atom|red)\.\S*acq_rel", lambda line: line.replace("acq_rel", "relaxed")),
}


def mutants_of(texts: dict[str, str], kind: str, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of a kind from the PTX of a case's kernels."""
    pattern, change = FAULTS[kind]
    found = [
        Mutant(kernel, kind, number, line, change(line))
        for kernel, text in texts.items()
        for number, line in enumerate(text.split("\n"))
        if re.search(pattern, line) and change(line) != line
    ]
    return random.Random(seed).sample(found, min(count, len(found)))
