"""What is wrong with a dump: fatal as an exception, or noted while the rest is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

# Each kind of problem is kept this often with its record; all are counted.
SHOWN = 20


class DumpError(ValueError):
    """A file out of which nothing can be read; the message names the file, the record and the field.

    Args:
        message: What is wrong.
        problem: The same in parts, where it has them.
    """

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class Problem(NamedTuple):
    """Something that could not be read.

    Attributes:
        file: The file.
        record: Number of the sequence or line in it, from 0; None where the file as a whole is meant.
        field: Name of the field, or None.
        what: What was expected and what came.
    """

    file: str
    record: int | None
    field: str | None
    what: str

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record}"
        return f"{self.file}{where}{'' if self.field is None else f', field {self.field!r}'}: {self.what}"

    def error(self) -> DumpError:
        """The same as an exception."""
        return DumpError(str(self), self)


@dataclass
class Problems:
    """What could not be read while the rest was."""

    shown: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        """Note one."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)


def extra(module: str, name: str, purpose: str) -> ModuleType:
    """Import an optional requirement, or say which extra brings it.

    Args:
        module: What to import.
        name: The extra of this distribution that requires it.
        purpose: What it is needed for.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        raise DumpError(f"{purpose} needs {missing}: pip install 'rollout-corr[{name}]' (or {missing})") from error
