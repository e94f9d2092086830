"""Findings of the interpreter about a kernel, in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that a kernel must not do.

    Attributes:
        kind: "bounds", "alignment", "unwritten", "race in a program", "race of programs", "divergence" or "endless".
        kernel: Its name.
        line: Of Triton's source, with the calls that led there.
        threads: Program and threads, the first of them.
        where: The address as tensor and index.
        opcode: The instruction.
    """

    kind: str
    kernel: str
    line: str
    threads: str
    where: str
    opcode: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel}, {self.opcode} of {self.line}: {self.threads}, {self.where}"


class FoundWrong(AssertionError):
    """A launch with findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


class Findings:
    """The first finding of each kind at each instruction."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Keep a finding, unless there is one like it."""
        self.found.setdefault((finding.kind, finding.line, finding.opcode), finding)

    def complain(self, allowed: Collection[str] = ()) -> None:
        """Raise what was found but for kinds that are allowed, and forget it.

        Raises:
            FoundWrong: There was something.
        """
        found, self.found = [x for x in self.found.values() if x.kind not in allowed], {}
        if found:
            raise FoundWrong(found)
