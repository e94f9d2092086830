"""Planted faults in the kernels' source: a mask or a barrier taken out of a Triton function, an `other=` made garbage.

To take an `other=` out would change nothing: Triton leaves undefined what a mask leaves out, and its backend for NVIDIA
happens to give 0. So garbage is put in its place, in the compiled code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton.runtime.jit import JITFunction

from ptx.cases import CASES, run_case
from ptx.machine import FoundWrong
from rollout_corr import kernels


@dataclass(frozen=True)
class Edit:
    """One call in the source of a Triton function, and the source without the mask or the barrier."""

    function: JITFunction
    kind: str
    place: str  # file:line, as PTX names it
    before: str  # the call
    source: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.place}: {self.before}"


def functions() -> list[JITFunction]:
    """List every Triton function of the kernels."""
    names = [found.name for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    values = [(name, value) for name in names for value in vars(importlib.import_module(name)).values()]
    return [value for name, value in values if isinstance(value, JITFunction) and value.__module__ == name]


def edits() -> list[Edit]:
    """List what can be taken out: of every call with a mask the mask, of a load its `other=`; every barrier."""
    found = []
    for function in functions():
        for call in ast.walk(function.parse()):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            names = [keyword.arg for keyword in call.keywords]
            changes = {
                "a mask": "mask" in names and without(function.src, call, "mask", "other"),
                "an other": "other" in names and function.src,
                "a barrier": call.func.attr == "debug_barrier" and replaced(function.src, call, "pass"),
            }
            above = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
            line = function.starting_line_number + above + call.lineno - 1
            place = f"{Path(function.fn.__code__.co_filename).name}:{line}"
            before = ast.get_source_segment(function.src, call) or ""
            found += [Edit(function, kind, place, before, made) for kind, made in changes.items() if made]
    return found


def replaced(source: str, node: ast.expr, text: str) -> str:
    """Put a text in the place of a node."""
    lines = source.splitlines(keepends=True)
    begin, end = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
    )
    return source[:begin] + text + source[end:]


def without(source: str, call: ast.Call, *names: str) -> str:
    """Leave keywords of a call out, and every line where it is."""
    keywords = sorted((x for x in call.keywords if x.arg in names), key=lambda x: -x.value.lineno * 1000 - x.col_offset)
    for keyword in keywords:
        marked = replaced(source, keyword.value, "\0")
        source = re.sub(rf",\s*{keyword.arg}=\0", "", marked)
    return source


# For registers of 16, 32 and 64 bits: NaN in float32 and float64 and a large count, a negative and a positive number.
GARBAGE = (
    {"16": "0x7FA5", "32": "0x7FA5DEAD", "64": "0x7FF4DEAD7FA5DEAD"},
    {"16": "0xC2DE", "32": "0xC2DEAD11", "64": "0xC07ADEADC2DEAD11"},
    {"16": "0x42DE", "32": "0x42DEAD11", "64": "0x407ADEAD42DEAD11"},
)


def with_garbage(place: str, garbage: dict[str, str], text: str) -> str:
    """Have the loads of a place in the source give garbage to threads that the mask leaves out."""
    here, lines = False, text.split("\n")
    # Triton sets the registers, loads into them if the mask says so, and has this in one piece of inline assembly.
    for i, line in enumerate(lines):
        if line.lstrip().startswith(".loc"):
            here = f" {place}:" in line.partition("@[")[0]
        following = "\n".join(lines[i : i + 99]).partition("// end inline asm")[0] if here and "\tmov.u" in line else ""
        if re.search(r"@%p\d+ ld\.global", following):
            lines[i] = re.sub(r"mov\.u(\d+) (%\w+), [^;]+;", lambda x: f"mov.u{x[1]} {x[2]}, {garbage[x[1]]};", line)
    return "\n".join(lines)


@contextlib.contextmanager
def edited(edit: Edit) -> Iterator[None]:
    """Have the kernels compiled with an edit."""
    before = edit.function.src
    try:
        _update(edit.function, edit.source)
        yield
    finally:
        _update(edit.function, before)


def reached(names: Sequence[str], seed: int) -> dict[str, list[str]]:
    """List for each place in the source the cases among these whose compiled code has something of it."""
    found: dict[str, list[str]] = {}
    for name in names:
        texts = set()

        def keep(kernel: str, text: str, texts: set[str] = texts) -> str:
            texts.add(text)
            return text

        CASES[name](seed, mutate=keep)
        for place in {place for text in texts for place in re.findall(r"[ /](\w+\.py:\d+):\d+", text)}:
            found.setdefault(place, []).append(name)
    return found


def noticed(edit: Edit, names: Sequence[str], seed: int) -> str:
    """Run cases with an edit until it is noticed; tell how, or give an empty text."""
    changes: list[Callable[[str, str], str] | None] = [None]
    if edit.kind == "an other":
        changes = [lambda _, text, garbage=garbage: with_garbage(edit.place, garbage, text) for garbage in GARBAGE]
    with edited(edit):
        for name, change in itertools.product(names, changes):
            try:
                run_case(name, seed, mutate=change)
            except FoundWrong as error:
                return ", ".join(sorted({x.kind for x in error.findings}))
            except AssertionError:
                return "numbers"
    return ""


def hunt_edits(names: Sequence[str], only: str = "", seed: int = 0) -> list[tuple[str, str]]:
    """Take out what stands in the source, here and there; give how each was noticed ("" if not), and which it is.

    Args:
        names: Of the cases that run, each edit in those that have it in their compiled code.
        only: Part of the names of edits; all others are left alone.
        seed: Of the order of programs.
    """
    where = reached(names, seed)
    return [
        (noticed(edit, where[edit.place], seed) if edit.place in where else "not compiled", str(edit))
        for edit in edits()
        if only in str(edit)
    ]


def _update(function: JITFunction, source: str) -> None:
    function._unsafe_update_src(source)
    for other in functions():
        other.hash = None  # callers' hashes hold those of what they call
