"""Problems of a dump: raised if nothing can be read, else noted while the rest is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

# So many problems are kept to be shown; all are counted.
SHOWN = 20


class DumpError(ValueError):
    """Nothing can be read or done; the message names the file, the record and the field, or the argument.

    Args:
        message: The problem in one sentence.
        problem: Its parts, for a problem of a record or a field.
    """

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Problem(NamedTuple):
    """A part of a dump that cannot be read.

    Attributes:
        file: Path of the file.
        record: Number of the sequence or line in it, from 0; None for the whole file.
        field: Name of the field; None for the whole record.
        what: What was expected, and what was found.
    """

    file: str
    record: int | None
    field: str | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record}"
        return f"{self.file}{where}{'' if self.field is None else f', field {self.field!r}'}: {self.what}"

    def error(self) -> DumpError:
        """Make an exception of it."""
        return DumpError(str(self), self)


@dataclass
class Problems:
    """Problems that were noted while the rest of a dump was read."""

    shown: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        """Note a problem."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)


def cut_off(suffix: str) -> str:
    """Say why nothing can be read from a cut-off file of a kind that has its index at the end."""
    return f"a {suffix} file that is cut off cannot be read, because its index is at the end of the file"


def extra(module: str, name: str, purpose: str) -> ModuleType:
    """Import an optional requirement, or say which extra brings it.

    Args:
        module: What to import.
        name: The extra of this distribution that requires it.
        purpose: What needs it, as the beginning of the message.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        raise DumpError(f"{purpose} needs {missing}: pip install 'rollout-corr[{name}]' (or {missing})") from error
