"""Planted faults in the kernels' source: a mask, barrier or order taken out, `other=` garbage, a `where` one-sided.

To take an `other=` out would change nothing: Triton leaves undefined what a mask leaves out, and its backend for NVIDIA
happens to give 0. So garbage is put in its place, in the compiled code.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import itertools
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from ptx.cases import CASES, run_case
from ptx.machine import FoundWrong
from rollout_corr import kernels


@dataclass(frozen=True)
class Edit:
    """One call in the source of a Triton function, and the source with the fault."""

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
    """List what can be taken out: masks, barriers, orders, `other=` of loads, of every `tl.where` one of its sides."""
    found = []
    for function in functions():
        for call in ast.walk(function.parse()):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            names = [keyword.arg for keyword in call.keywords]
            before = ast.get_source_segment(function.src, call) or ""
            condition = ast.get_source_segment(function.src, call.args[0]) if call.func.attr == "where" else None
            changes = {
                "a mask": "mask" in names and without(function.src, call, "mask", "other"),
                "an other": "other" in names and function.src,
                "an order": "acq_rel" in before and replaced(function.src, call, before.replace("acq_rel", "relaxed")),
                "a barrier": call.func.attr == "debug_barrier" and replaced(function.src, call, "pass"),
                "always": condition and replaced(function.src, call.args[0], f"({condition}) | True"),
                "never": condition and replaced(function.src, call.args[0], f"({condition}) & False"),
            }
            above = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
            line = function.starting_line_number + above + call.lineno - 1
            place = f"{Path(function.fn.__code__.co_filename).name}:{line}"
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


def reached(names: Sequence[str]) -> dict[str, list[str]]:
    """List for each place in the source the cases that have something of it compiled, those of least code first."""
    of_case: dict[str, set[str]] = {name: set() for name in names}
    for name, texts in of_case.items():

        def keep(kernel: str, text: str, texts: set[str] = texts) -> str:
            texts.add(text)
            return text

        with contextlib.suppress(AssertionError):  # no program runs, so numbers are wrong
            CASES[name](mutate=keep, programs=lambda launch: np.arange(0))
    found: dict[str, list[str]] = {}
    for name, texts in sorted(of_case.items(), key=lambda x: sum(map(len, x[1]))):
        for place in {place for text in texts for place in re.findall(r"[ /](\w+\.py:\d+):\d+", text)}:
            found.setdefault(place, []).append(name)
    return found


def noticed(edit: Edit, names: Sequence[str], seed: int = 0, **settings: Any) -> tuple[str, str]:
    """Run cases with an edit until it is noticed; tell how and by which, or give empty texts."""
    changes: list[Callable[[str, str], str] | None] = [None]
    if edit.kind == "an other":
        changes = [lambda _, text, garbage=garbage: with_garbage(edit.place, garbage, text) for garbage in GARBAGE]
    with edited(edit):
        for name, change in itertools.product(names, changes):
            try:
                run_case(name, seed, mutate=change, **settings)
            except FoundWrong as error:
                return ", ".join(sorted({x.kind for x in error.findings})), name
            except AssertionError:
                return "numbers", name
    return "", ""


def hunt_edits(names: Sequence[str], kind: str, only: str = "", seed: int = 0) -> list[tuple[str, str]]:
    """Take out what stands in the source, here and there; give how each was noticed ("" if not), and which it is.

    Args:
        names: Of the cases that run, each edit in those that have it in their compiled code.
        kind: Of the edits; all others are left alone.
        only: Part of what stands in the source there.
        seed: Of the order of programs.
    """
    where = reached(names)
    return [
        (noticed(edit, where[edit.place], seed)[0] if edit.place in where else "not compiled", str(edit))
        for edit in edits()
        if edit.kind == kind and only in edit.before
    ]


# What changes nothing when it is taken out or made garbage, and why it stands there all the same.
SPARE = {
    "tl.debug_barrier()": "for an atomic that releases Triton 3.7 and 3.9 have a barrier of their own; their language "
    "promises none",
    "tl.where(known, slot_count, 0)": "spares loads: nothing is stored of sequences that the tile does not have",
}


def hunt(names: Sequence[str], only: str, keep: Path | None, seed: int, **settings: Any) -> int:
    """Hunt edits and write a line for each; give how many are neither noticed nor spare.

    Args:
        names: Of the cases that run, each edit in those that have it in their compiled code.
        only: Part of the names of edits; all others are left alone.
        keep: A file for what was noticed. Edits that it has, of the same source, are passed over.
        seed: Of the order of programs.
        settings: Of the session.
    """
    state = hashlib.sha256("".join(x.src for x in functions()).encode()).hexdigest()[:8]
    rows = [line.split("\t") for line in keep.read_text().splitlines()] if keep and keep.exists() else []
    done = {row[1]: row for row in rows if row[0] == state}
    # What nobody notices takes every case, so it comes last.
    asked = sorted((edit for edit in edits() if only in str(edit)), key=lambda edit: edit.before in SPARE)
    where = reached(names) if {str(edit) for edit in asked} - done.keys() else {}
    missed = 0
    for edit in asked:
        row = done.get(str(edit))
        if row is None:
            begun = time.process_time()
            how, case = noticed(edit, where.get(edit.place, ()), seed, **settings)
            row = [state, str(edit), how, case, f"{time.process_time() - begun:.1f} s"]
            if keep and how:
                with keep.open("a") as file:
                    file.write("\t".join(row) + "\n")
        is_spare = not row[2] and edit.before in SPARE
        missed += not row[2] and not is_spare
        said = f"{row[2]}, by {row[3]}" if row[2] else f"spare, {SPARE[edit.before]}" if is_spare else "NOT NOTICED"
        sys.stdout.write(f"{edit}: {said}, {row[4]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(asked)} edits, {missed} not noticed\n")
    return missed


def _update(function: JITFunction, source: str) -> None:
    function._unsafe_update_src(source)
    for other in functions():
        other.hash = None  # callers' hashes hold those of what they call
