"""The frameworks' own code: functions cut out of an installed package or of a checkout, and run as they are.

A cut makes what a run reaches, when it reaches it: definitions of the function's file and of other files of the
framework. The standard library, torch and NumPy are imported; any other import is a stub that raises when it is called.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

# Imported for real. Whatever else a framework imports from outside of itself is a stub.
REAL = {*sys.stdlib_module_names, "torch", "numpy", "typing_extensions"}
ANNOTATIONS = __future__.annotations.compiler_flag
IMPORT = "__conformance_import__"


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


@dataclass(frozen=True)
class Source:
    """A framework's code of one version.

    Attributes:
        framework: Its name in `rollout_corr.frameworks`.
        version: Version of the installed distribution, or the short commit of the checkout.
        root: The folder that its packages lie in.
        kind: "installed" or "checkout".
    """

    framework: str
    version: str
    root: Path
    kind: str

    def has(self, path: str, name: str | None = None) -> bool:
        """Tell whether a file is there, and whether it defines a function, class or "Class.method"."""
        file = self.root / path
        if not file.is_file():
            return False
        return name is None or _find(ast.parse(file.read_text(encoding="utf-8")), name) is not None

    def cut(self, path: str, name: str, **given: Any) -> Any:
        """Cut a function, a class, a constant or the function of "Class.method".

        Args:
            path: A file, relative to `root`.
            name: What to cut.
            **given: Objects for names that the framework imports, in place of a cut or a stub.
        """
        return Cutter(self.root, given).get(self.root / path, name)

    def instance(self, path: str, name: str, methods: tuple[str, ...], given: Any = None, **attributes: Any) -> Any:
        """Make an object with some methods of a class, cut, and the attributes that they read.

        Args:
            path: A file, relative to `root`.
            name: The class.
            methods: Names of its methods.
            given: As for `cut`, as a dict.
            **attributes: Attributes by name.
        """
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
        found = _find(file.tree, function)
        if found is None:
            raise LookupError(f"{path}: no {function}")
        body = _statements(found, file.text, first, last)
        end = ast.parse("return dict(locals())").body

        def run(**variables: Any) -> dict[str, Any]:
            made = ast.parse(f"def fragment({', '.join(variables)}): pass").body[0]
            assert isinstance(made, ast.FunctionDef)
            made.body = [*copy.deepcopy(body), *end]
            file.define(made)
            result: dict[str, Any] = file.space["fragment"](**variables)
            return result

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
        if name in file.index:
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
        self.path, self.cutter = path, cutter
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.space = Names(self)
        # The name of a module that is imported: dataclasses look theirs up.
        self.space.update({"__name__": __name__, "__file__": str(path), "__builtins__": builtins, IMPORT: self._import})
        self.begun: set[str] = set()

    @cached_property
    def index(self) -> dict[str, ast.stmt]:
        """The statement that defines each name of the module; the first one counts."""
        found: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            for name in _binds(statement):
                found.setdefault(name, statement)
        return found

    def need(self, name: str) -> None:
        """Make a name of the module."""
        with self.cutter.lock:
            if name in self.begun or name not in self.index:
                return
            self.begun.add(name)
            if name in self.cutter.given:
                self.space[name] = self.cutter.given[name]
            else:
                self.define(self.index[name])

    def method(self, name: str) -> Any:
        """Make the function of "Class.method", without its decorators."""
        found = _find(self.tree, name)
        if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise LookupError(f"{self.path}: no {name}")
        bare = copy.deepcopy(found)
        bare.decorator_list = []
        self.define(bare)
        return self.space.pop(bare.name)

    def define(self, statement: ast.stmt) -> None:
        """Execute a definition."""
        for name in _read_by_a_class(statement):
            self.need(name)
        made = _Imports().visit(ast.Module([copy.deepcopy(statement)], []))
        code = compile(ast.fix_missing_locations(made), str(self.path), "exec", flags=ANNOTATIONS, dont_inherit=True)
        self.cutter.defining += 1
        try:
            exec(code, self.space)
        finally:
            self.cutter.defining -= 1

    def _import(self, module: str, name: str | None, level: int) -> Any:
        return self.cutter.imported(module, name, level, self.path)


class _Imports(ast.NodeTransformer):
    """Turns import statements into calls of `Cutter.imported`."""

    def _bound(self, at: ast.stmt, name: str, *arguments: object) -> ast.stmt:
        made = ast.parse(f"{name} = {IMPORT}({', '.join(map(repr, arguments))})").body[0]
        return ast.copy_location(made, at)

    def visit_Import(self, node: ast.Import) -> Any:
        return [
            self._bound(
                node, a.asname or a.name.partition(".")[0], a.name if a.asname else a.name.partition(".")[0], None, 0
            )
            for a in node.names
        ]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module == "__future__":
            return ast.copy_location(ast.Pass(), node)
        return [self._bound(node, a.asname or a.name, node.module or "", a.name, node.level) for a in node.names]


def _module_file(path: Path) -> Path | None:
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _binds(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)):
        for inner in ast.iter_child_nodes(statement):
            parts = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
            for part in parts:
                if isinstance(part, ast.stmt):
                    yield from _binds(part)
    else:
        yield from (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _read_by_a_class(statement: ast.AST) -> set[str]:
    """The names that the body of a class reads at once: Python looks them up past `Names.__missing__`."""
    if not isinstance(statement, ast.ClassDef):
        return set()
    found, left = set(), list(ast.iter_child_nodes(statement))
    while left:
        node = left.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        bodies = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
        left += [child for child in ast.iter_child_nodes(node) if child not in bodies]
    return found


def _find(tree: ast.AST, name: str) -> ast.stmt | None:
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == first:
            return _find(node, rest) if rest else node
        if isinstance(node, (ast.If, ast.Try)) and (found := _find(node, name)) is not None:
            return found
    return None


def _statements(function: ast.AST, text: str, first: str, last: str) -> list[ast.stmt]:
    """The statements from `first` to `last`, which stand in one block."""
    for node in ast.walk(function):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list) or not all(isinstance(s, ast.stmt) for s in block):
                continue
            texts = [(ast.get_source_segment(text, s) or "") for s in block]
            begin = next((i for i, t in enumerate(texts) if t.startswith(first)), None)
            if begin is None:
                continue
            end = next((i for i in range(begin, len(texts)) if texts[i].startswith(last)), None)
            if end is not None:
                return block[begin : end + 1]
    raise LookupError(f"no statements from {first!r} to {last!r} in one block")


def found(framework: str, distribution: str | None, package: str, checkout: str, under: str = "") -> list[Source]:
    """Find a framework's code: the installed distribution, and PEERS/checkout.

    Args:
        framework: Its name in `rollout_corr.frameworks`.
        distribution: Its name on the package index, None if it has none.
        package: The folder that tells that its code is there.
        checkout: Its folder in the folder that the environment's PEERS names.
        under: The folder of the checkout that holds `package`.
    """
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
    folder = Path(os.environ.get("PEERS") or os.devnull) / checkout / under
    if (folder / package).exists():
        asked = ["git", "-C", str(folder), "rev-parse", "--short=9", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        sources.append(Source(framework, commit or "no commit", folder.resolve(), "checkout"))
    return sources
