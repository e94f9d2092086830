"""The frameworks' own code: functions cut out of an installed package or of a checkout, and run as they are.

A cut makes what a run reaches, when it reaches it: definitions of the function's file and of other files of the
framework. The standard library, torch and NumPy are imported; any other import is a stub that raises when it is called.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from conformance.parsed import IMPORT, find, parsed, read_by_a_class, statements

RECORDED = "recorded"
# Imported for real. Whatever else a framework imports from outside of itself is a stub.
REAL = {*sys.stdlib_module_names, "torch", "numpy", "typing_extensions"}


class StubReached(Exception):
    """A run called something that was not cut: name it in `given`."""


class Stub:
    """An import that is not there. While definitions are made it may decorate and be a base; a later call raises."""

    def __init__(self, name: str, cutter: Cutter) -> None:
        self.__dict__.update(_name=name, _cutter=cutter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}", self._cutter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._cutter.defining:
            return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], (FunctionType, type)) else self
        raise StubReached(f"{self._name} was called")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        raise StubReached(f"{self._name} was tested")


def absent(*args: Any, **kwargs: Any) -> Any:
    """Stand for what would be cut out of code that is not there."""
    raise StubReached("a recording has no code of the framework: this package's side of a row called it")


@dataclass(frozen=True)
class Source:
    """A framework's code of one version.

    Attributes:
        framework: Its name in `rollout_corr.frameworks`.
        version: Version of the installed distribution, or the short commit of the checkout.
        root: The folder that its packages lie in.
        kind: "installed", "checkout", or "recorded": its code is not there, and what is cut out of it raises.
        facts: What was asked of the code, with the answers: a recording has them.
    """

    framework: str
    version: str
    root: Path
    kind: str
    facts: dict[str, bool] = field(default_factory=dict)

    def fact(self, question: str, find_out: Callable[[], bool]) -> bool:
        """Answer a question about the code, once."""
        if question not in self.facts:
            if self.kind == RECORDED:
                raise LookupError(
                    f"{question}: the recording is stale, make conformance ARGS='{self.framework} --record'"
                )
            self.facts[question] = find_out()
        return self.facts[question]

    def has(self, path: str, name: str | None = None) -> bool:
        """Whether a file is there, and whether it defines a function, class or "Class.method"."""
        file = self.root / path

        def find_out() -> bool:
            return file.is_file() and (name is None or find(parsed(file).tree, name) is not None)

        return self.fact(f"{path} has {name}", find_out)

    def says(self, path: str, text: str) -> bool:
        """Whether a file holds some text."""
        return self.fact(f"{path} says {text}", lambda: text in (self.root / path).read_text(encoding="utf-8"))

    def cut(self, path: str, name: str, **given: Any) -> Any:
        """Cut a function, class, constant or "Class.method"; `given` has objects for names that it imports."""
        if self.kind == RECORDED:
            return absent
        return Cutter(self.root, given).get(self.root / path, name)

    def instance(self, path: str, name: str, methods: tuple[str, ...], given: Any = None, **attributes: Any) -> Any:
        """Make an object with some methods of a class, cut, and the attributes that they read."""
        if self.kind == RECORDED:
            return absent
        cutter = Cutter(self.root, given or {})
        made = SimpleNamespace(**attributes)
        for method in methods:
            setattr(made, method, MethodType(cutter.get(self.root / path, f"{name}.{method}"), made))
        return made

    def lines(self, path: str, function: str, first: str, last: str, **given: Any) -> Callable[..., dict[str, Any]]:
        """Cut consecutive statements out of a function.

        Args:
            path: A file, relative to `root`.
            function: The function or "Class.method" that holds them.
            first: The beginning of the first statement's text.
            last: The beginning of the last one's.
            **given: As for `cut`.

        Returns:
            A function of the variables that the statements read, by keyword; it returns all variables by name.
        """
        if self.kind == RECORDED:
            return absent
        return Cutter(self.root, given).fragment(self.root / path, function, first, last)


@dataclass
class Cutter:
    """Cuts of one framework, which share what they have in common."""

    root: Path
    given: dict[str, Any]
    defining: int = 0
    files: dict[Path, File] = field(default_factory=dict)
    # Threads stand in for ranks, and may want the same name at once.
    lock: Any = field(default_factory=RLock)

    def file(self, path: Path) -> File:
        with self.lock:
            if path not in self.files:
                self.files[path] = File(path, self)
            return self.files[path]

    def get(self, path: Path, name: str) -> Any:
        """Return one definition of a file."""
        file = self.file(path)
        if "." in name:
            return file.method(name)
        file.need(name)
        return file.space[name]

    def fragment(self, path: Path, function: str, first: str, last: str) -> Callable[..., dict[str, Any]]:
        """Make a function of some statements."""
        file = self.file(path)
        found = find(file.parsed.tree, function)
        if found is None:
            raise LookupError(f"{path}: no {function}")
        body = statements(found, file.parsed.lines, first, last)
        end = ast.parse("return dict(locals())").body
        made: dict[tuple[str, ...], Callable[..., dict[str, Any]]] = {}

        def run(**variables: Any) -> dict[str, Any]:
            names = tuple(variables)
            with self.lock:
                if names not in made:
                    fragment = ast.parse(f"def fragment({', '.join(names)}): pass").body[0]
                    assert isinstance(fragment, ast.FunctionDef)
                    fragment.body = [*body, *end]
                    file.define(fragment)
                    made[names] = file.space.pop("fragment")
            return made[names](**variables)

        return run

    def imported(self, module: str, name: str | None, level: int, importer: Path) -> Any:
        """Return what an import statement of `importer` binds; `name` None: the module."""
        last = (name or module).rpartition(".")[2]
        if last in self.given:
            return self.given[last]
        if not level and module.partition(".")[0] in REAL:
            try:
                found = importlib.import_module(module)
            except ImportError:
                return Stub(module, self)
            if name is None:
                return found
            return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
        base = self.root
        if level:
            base = importer.parents[level - 1]
        target = base.joinpath(*module.split(".")) if module else base
        if name is not None:
            for path in (target / name, target):
                file = _module_file(path)
                if file is not None:
                    return Modules(file, self) if path == target / name else self._member(file, name)
        elif _module_file(target) is not None:
            return Modules(_module_file(target), self)
        return Stub(f"{module}.{name}" if name else module, self)

    def _member(self, path: Path, name: str) -> Any:
        file = self.file(path)
        if name in file.parsed.index:
            file.need(name)
            return file.space[name]
        return Stub(f"{path.stem}.{name}", self)


class Modules:
    """A module of the framework, whose members are cut when they are read."""

    def __init__(self, path: Path | None, cutter: Cutter) -> None:
        self.__dict__.update(_path=path, _cutter=cutter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._cutter.given:
            return self._cutter.given[name]
        inner = _module_file(self._path.parent / name) if self._path.name == "__init__.py" else None
        return Modules(inner, self._cutter) if inner else self._cutter._member(self._path, name)


class Names(dict[str, Any]):
    """The globals of a file, each made when it is first read: Python asks a subclass of dict by `__missing__`."""

    def __init__(self, file: File) -> None:
        self.file = file

    def __missing__(self, name: str) -> Any:
        self.file.need(name)
        if name in self:
            return self[name]
        raise KeyError(name)


class File:
    """One file: its definitions by name, and the globals that they are made in."""

    def __init__(self, path: Path, cutter: Cutter) -> None:
        self.path, self.cutter, self.parsed = path, cutter, parsed(path)
        self.space = Names(self)
        # The name of a module that is imported: dataclasses look theirs up.
        self.space.update({"__name__": __name__, "__file__": str(path), "__builtins__": builtins, IMPORT: self._import})
        self.begun: set[str] = set()

    def need(self, name: str) -> None:
        """Make a name of the module."""
        with self.cutter.lock:
            if name in self.begun or name not in self.parsed.index:
                return
            self.begun.add(name)
            if name in self.cutter.given:
                self.space[name] = self.cutter.given[name]
            else:
                self.define(self.parsed.index[name])

    def method(self, name: str) -> Any:
        """Make the function of "Class.method", without its decorators."""
        found = find(self.parsed.tree, name)
        if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise LookupError(f"{self.path}: no {name}")
        self.define(found, bare=True)
        return self.space.pop(found.name)

    def define(self, statement: ast.stmt, bare: bool = False) -> None:
        """Execute a definition; `bare`: a function without its decorators."""
        for name in read_by_a_class(statement):
            self.need(name)
        code = self.parsed.code(statement, bare)
        self.cutter.defining += 1
        try:
            exec(code, self.space)
        finally:
            self.cutter.defining -= 1

    def _import(self, module: str, name: str | None, level: int) -> Any:
        return self.cutter.imported(module, name, level, self.path)


def _module_file(path: Path) -> Path | None:
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def found(framework: str, distribution: str | None, package: str, checkout: str, under: str = "") -> list[Source]:
    """Find a framework's code: the distribution, PEERS/checkout[/under], and PEERS/checkout-0.7.0 of other versions."""
    sources = []
    if distribution is not None:
        try:
            held = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            held = None
        if held is not None:
            root = Path(str(held.locate_file(""))).resolve()
            if (root / package).exists():
                sources.append(Source(framework, held.version, root, "installed"))
    peers = Path(os.environ.get("PEERS") or os.devnull)
    for checked_out in (peers / checkout, *sorted(peers.glob(f"{checkout}-[0-9]*"))):
        folder = checked_out / under
        if (folder / package).exists():
            asked = ["git", "-C", str(folder), "rev-parse", "--short=9", "HEAD"]
            commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
            unpacked = checked_out.name.removeprefix(checkout).removeprefix("-") or "no commit"
            sources.append(Source(framework, commit or unpacked, folder.resolve(), "checkout"))
    return sources
