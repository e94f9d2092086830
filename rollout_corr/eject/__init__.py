"""Writing one file that does what a Spec says, with torch alone: for those who copy code rather than install it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, cast

from ..frameworks.shared.doors import Door
from ..frameworks.shared.lookup import named, recipe, recipe_names, spec_names
from ..frameworks.shared.preset import RECIPES
from ..frameworks.shared.settings import reporting
from ..specs.correction import Spec
from . import plain_loss
from .file import Request, arguments_of, checked, written
from .loss import Wanted, program_of_loss
from .plain import DOORS
from .program import Program, program_of
from .record import CannotEject

__all__ = ["BACKENDS", "FRAMEWORKS", "CannotEject", "Ejected", "check", "eject"]

BACKENDS = ("torch", "triton", "both")
FRAMEWORKS = ("plain", "skyrl", "trl", "verl")
PACKAGE = __name__.partition(".")[0]


def door_of(framework: str, layout: str) -> Door:
    """How a framework calls the file."""
    if framework == "plain":
        return DOORS[layout]
    door: Door = import_module(f"{PACKAGE}.frameworks.{framework}.eject").DOOR
    return door


class Ejected(NamedTuple):
    """A file that stands alone: its text, what was asked for, and the parts that it was written from."""

    source: str
    request: Request
    program: Program

    def test(self, module: str) -> str:
        """Write the test of the file, which imports it as `module`."""
        if self.request.loss is not None:
            from .loss_proof import test_of_loss

            return test_of_loss(self.request, self.program, module)
        from .proof import test_of

        return test_of(self.request, self.program, module)


def eject(
    what: str | Spec,
    framework: str = "plain",
    layout: str = "packed",
    metrics: str = "dashboard",
    loss: bool = False,
    backend: str = "torch",
) -> Ejected:
    """Write one file that corrects as a Spec says, with torch alone, or torch and Triton.

    Args:
        what: The name of a preset or a recipe, or a Spec. A name of both is the preset, unless `loss` asks for more.
        framework: Whose function the file defines: "plain", `correct` with tensors alone; or a framework's.
        layout: For "plain": "packed", [N] with cu_seqlens, or "padded", [B, T].
        metrics: For "plain": "dashboard", "all" or "none". A framework has its own.
        loss: Write the policy loss of a recipe, with its correction, rather than a correction alone.
        backend: "torch", plain torch; "triton", the Triton kernels of the Spec; or "both": each call chooses.

    Raises:
        CannotEject: No single file can do it; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if isinstance(what, str) and what in recipe_names() and (loss or what not in spec_names()):
        return _loss(what, framework, layout, metrics, backend)
    if loss:
        raise ValueError(f"loss: expected the name of a recipe with loss=True, got {what!r}")
    spec = named(what) if isinstance(what, str) else what
    if not isinstance(spec, Spec):
        raise TypeError(f"what: expected the name of a preset, or a Spec, got {type(what).__name__}")
    _check(framework, layout, metrics, FRAMEWORKS)
    if framework != "plain":
        spec.to_config(framework)  # its settings have to say all of the Spec
    door = door_of(framework, layout)
    if door.metrics is not None:
        spec = reporting(spec, door.metrics)
    wanted = door.metrics or (metrics if framework == "plain" else "none")
    program = program_of(spec, door.layout, wanted, door.names, door.gives)
    fused: list[str] = []
    if backend != "torch":
        from .fused import completed
        from .fused import fused as fused_of

        found = completed(spec, program.numbers)
        if found != program.numbers:
            program = program_of(spec, door.layout, wanted, door.names, door.gives, found)
        fused = fused_of(spec, door, program.numbers, program.gives, eager=backend == "both")
    arguments = None
    if isinstance(what, str):
        arguments = f"{what} --for {framework}"
        if framework == "plain":
            arguments += f" --layout {layout} --metrics {metrics}"
        arguments += f" --backend {backend}" if backend != "torch" else ""
    request = Request(str(what) if arguments else "a Spec", spec, door, arguments, backend=backend)
    return Ejected(written(request, program, fused), request, program)


def _check(framework: str, layout: str, metrics: str, frameworks: tuple[str, ...]) -> None:
    for name, value, known in (("framework", framework, frameworks), ("layout", layout, tuple(DOORS)),
                               ("metrics", metrics, ("dashboard", "all", "none"))):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}: expected one of {list(known)}, got {value!r}")


def _loss(name: str, framework: str, layout: str, metrics: str, backend: str) -> Ejected:
    """Write the policy loss of a recipe."""
    _check(framework, layout, metrics, ("plain",))
    spec, loss = recipe(cast("Any", name))
    wanted = Wanted(spec, loss, RECIPES[name].needs)
    door = plain_loss.door_of(layout, spec)
    program, traced = program_of_loss(wanted, layout, metrics)
    fused: list[str] = []
    if backend != "torch":
        from .fused_loss import completed, fused_loss

        if more := completed(traced, program.numbers):
            program, traced = program_of_loss(wanted, layout, metrics, more)
        fused = fused_loss(traced, program, door, eager=backend == "both")
    arguments = f"{name} --loss --for {framework} --layout {layout} --metrics {metrics}"
    arguments += f" --backend {backend}" if backend != "torch" else ""
    request = Request(name, spec or Spec(), door, arguments, wanted, backend)
    return Ejected(written(request, program, fused), request, program)


def check(source: str) -> tuple[bool, list[str]]:
    """Say from which version a file comes, whether it was edited, and what would be written today.

    Returns whether it is what would be written today, and the lines that say so.
    """
    arguments = arguments_of(source)
    return checked(source, None if arguments is None else _again(arguments.split()))


def _again(arguments: list[str]) -> str:
    what, *flags = arguments
    loss = "--loss" in flags
    flags = [flag for flag in flags if flag != "--loss"]
    if len(flags) % 2:
        raise ValueError(
            f"source: expected a command with a value for each flag in its head, got {' '.join(arguments)!r}"
        )
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    options = (given.get("--for", "plain"), given.get("--layout", "packed"), given.get("--metrics", "dashboard"))
    return eject(what, *options, loss, given.get("--backend", "torch")).source
