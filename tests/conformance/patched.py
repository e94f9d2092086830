"""A framework's checkout with a patch applied, and the pytest functions of a test file in it, run on cut-out code."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.sources import Cutter, Modules, _module_file


def files_of(patch: Path) -> list[str]:
    """The paths that a patch changes or makes."""
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)


def overlay(root: Path, package: str, patch: Path, into: Path) -> Path:
    """Link a package's files into a folder, with copies of those that a patch changes."""
    shutil.copytree(root / package, into / package, copy_function=lambda source, to: Path(to).symlink_to(source))
    for path in files_of(patch):
        if (root / path).is_file():
            (into / path).unlink(missing_ok=True)
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, into / path)
    return into


def apply(patch: Path, folder: Path, *, only: str = "*") -> None:
    """Apply a patch to an overlay; `only`: the paths that match."""
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", f"--include={only}", str(patch)], cwd=folder, check=True)


@contextmanager
def importable(root: Path, test: str, given: dict[str, Any]) -> Iterator[None]:
    """Let the imports of a test file find the framework's modules under `root`, whose members are cut when read."""
    cutter = Cutter(root, given)
    with pytest.MonkeyPatch.context() as put:
        for node in ast.walk(ast.parse(test)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            # Of `from package import module` the module is a member.
            for name in filter(None, names):
                file = _module_file(root.joinpath(*name.split(".")))
                if file is None:
                    continue
                for number in range(1, name.count(".") + 1):
                    above = ".".join(name.split(".")[:number])
                    if not isinstance(sys.modules.get(above), Modules):
                        put.setitem(sys.modules, above, ModuleType(above))
                put.setitem(sys.modules, name, Modules(file, cutter))
        yield


def run(root: Path, test: Path, given: dict[str, Any]) -> int:
    """Run every function of a test file with all of its parameters."""
    text = test.read_text(encoding="utf-8")
    space: dict[str, Any] = {"__name__": "of_the_patch"}
    calls = 0
    with importable(root, text, given):
        exec(compile(text, str(test), "exec"), space)
        for function in [value for name, value in space.items() if name.startswith("test_")]:
            for chosen in parameters(function):
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in inspect.signature(function).parameters:
                        chosen["monkeypatch"] = patch
                    function(**chosen)
                calls += 1
    return calls


def parameters(function: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments that the marks of a test ask for."""
    choices = []
    for mark in getattr(function, "pytestmark", ()):
        names = mark.args[0]
        names = re.split(r",\s*", names) if isinstance(names, str) else list(names)
        choices.append([dict(zip(names, one if len(names) > 1 else (one,), strict=True)) for one in mark.args[1]])
    for parts in itertools.product(*choices):
        yield {key: value for part in parts for key, value in part.items()}
