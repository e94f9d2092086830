"""Problems of a dump: raised if nothing can be read, else noted while the rest is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# So many problems are kept to be shown; all are counted.
SHOWN = 20
# A longer reason of a parser is cut: some of them quote the file.
LONGEST_REASON = 200


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
    """A part of a dump that cannot be read."""

    file: str  # path of the file
    record: int | None  # number of the sequence or line in it, from 0; None for the whole file
    field: str | None  # name of the field; None for the whole record
    what: str  # what was expected, and what was found

    def __str__(self) -> str:
        where = "" if self.record is None else f", record {self.record}"
        return f"{self.file}{where}{'' if self.field is None else f', field {self.field!r}'}: {self.what}"

    def error(self) -> DumpError:
        """Make an exception of it."""
        return DumpError(str(self), self)


@dataclass
class Problems:
    """Problems that were noted while the rest of a dump was read."""

    shown: list[Problem] = field(default_factory=list)  # the first ones
    count: int = 0  # how many there are
    cause: Exception | None = None  # the exception behind the first one, if there was any

    def add(self, problem: Problem, cause: Exception | None = None) -> None:
        """Note a problem."""
        if self.count == 0:
            self.cause = cause
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)


def reason_of(error: Exception) -> str:
    """Return the reason of an exception in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = " ".join(str(error).strip().partition("\n")[0].split())
    if len(line) > LONGEST_REASON:
        line = line[:LONGEST_REASON] + "..."
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
