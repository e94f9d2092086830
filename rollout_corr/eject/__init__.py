"""Writing one file that does what a Spec says, with torch alone: for those who copy code rather than install it."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from ..frameworks.shared.doors import Door
from ..frameworks.shared.lookup import named
from ..frameworks.shared.settings import reporting
from ..specs.correction import Spec
from .file import Request, arguments_of, checked, written
from .plain import DOORS
from .program import Program, program_of
from .record import CannotEject

__all__ = ["FRAMEWORKS", "CannotEject", "Ejected", "check", "eject"]

FRAMEWORKS = ("plain", "verl")
PACKAGE = __name__.partition(".")[0]


def door_of(framework: str, layout: str) -> Door:
    """How a framework calls the file."""
    if framework == "plain":
        return DOORS[layout]
    door: Door = import_module(f"{PACKAGE}.frameworks.{framework}.eject").DOOR
    return door


class Ejected(NamedTuple):
    """A file that stands alone.

    Attributes:
        source: Its text.
        request: What was asked for.
        program: The parts that it was written from.
    """

    source: str
    request: Request
    program: Program

    def test(self, module: str) -> str:
        """Write the test of the file.

        Args:
            module: What the test imports the file as.
        """
        from .proof import test_of

        return test_of(self.request, self.program, module)


def eject(what: str | Spec, framework: str = "plain", layout: str = "packed", metrics: str = "dashboard") -> Ejected:
    """Write one file that corrects as a Spec says, in plain torch, with nothing of this package.

    Args:
        what: The name of a preset, or a Spec.
        framework: Whose function the file defines: "plain", `correct` with tensors alone; or "verl".
        layout: For "plain": "packed", [N] with cu_seqlens, or "padded", [B, T].
        metrics: For "plain": "dashboard", "all" or "none". A framework has its own.

    Raises:
        CannotEject: No single file can do it; the message says why.
    """
    spec = named(what) if isinstance(what, str) else what
    if not isinstance(spec, Spec):
        raise TypeError(f"what: expected the name of a preset, or a Spec, got {type(what).__name__}")
    for name, value, known in (("framework", framework, FRAMEWORKS), ("layout", layout, tuple(DOORS)),
                               ("metrics", metrics, ("dashboard", "all", "none"))):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}: expected one of {list(known)}, got {value!r}")
    door = door_of(framework, layout)
    if door.metrics is not None:
        spec = reporting(spec, door.metrics)
    program = program_of(spec, door.layout, door.metrics or metrics, door.names)
    arguments = None
    if isinstance(what, str):
        arguments = f"{what} --for {framework}"
        if framework == "plain":
            arguments += f" --layout {layout} --metrics {metrics}"
    request = Request(str(what) if arguments else "a Spec", spec, door, arguments)
    return Ejected(written(request, program), request, program)


def check(source: str) -> tuple[bool, list[str]]:
    """Say from which version a file comes, whether it was edited, and what would be written today.

    Args:
        source: The text of the file.

    Returns:
        Whether it is what would be written today, and the lines that say so.
    """
    arguments = arguments_of(source)
    return checked(source, None if arguments is None else _again(arguments.split()))


def _again(arguments: list[str]) -> str:
    what, *flags = arguments
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    options = (given.get("--for", "plain"), given.get("--layout", "packed"), given.get("--metrics", "dashboard"))
    return eject(what, *options).source
