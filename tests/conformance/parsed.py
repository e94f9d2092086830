"""A framework's file as text: its definitions by name, compiled, with imports turned into calls."""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import Any

ANNOTATIONS = __future__.annotations.compiler_flag
# The global by which a compiled import statement asks for what it binds.
IMPORT = "__conformance_import__"


class Parsed:
    """A file's text, which all cuts of it share: parsing takes longer than most runs of what was cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.compiled: dict[tuple[ast.stmt, bool], CodeType] = {}

    @cached_property
    def index(self) -> dict[str, ast.stmt]:
        """The statement that defines each name of the module; the first one counts."""
        found: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            for name in _binds(statement):
                found.setdefault(name, statement)
        return found

    def code(self, statement: ast.stmt, bare: bool) -> CodeType:
        """Compile a statement; `bare`: a function without its decorators."""
        key = statement, bare
        if key not in self.compiled:
            own = copy.deepcopy(statement)
            if bare:
                assert isinstance(own, (ast.FunctionDef, ast.AsyncFunctionDef))
                own.decorator_list = []
            made = ast.fix_missing_locations(_Imports().visit(ast.Module([own], [])))
            self.compiled[key] = compile(made, str(self.path), "exec", flags=ANNOTATIONS, dont_inherit=True)
        return self.compiled[key]


@cache
def parsed(path: Path) -> Parsed:
    """Read a file, once in a process."""
    return Parsed(path)


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


def read_by_a_class(statement: ast.AST) -> set[str]:
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


def find(tree: ast.AST, name: str) -> ast.stmt | None:
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == first:
            return find(node, rest) if rest else node
        if isinstance(node, (ast.If, ast.Try)) and (found := find(node, name)) is not None:
            return found
    return None


def statements(function: ast.AST, lines: list[str], first: str, last: str) -> list[ast.stmt]:
    """The statements from `first` to `last`, which stand in one block."""

    def begins(statement: ast.stmt, words: str) -> bool:
        line = lines[statement.lineno - 1].encode()[statement.col_offset :].decode()
        return "".join((line, *lines[statement.lineno : statement.end_lineno])).startswith(words)

    for node in ast.walk(function):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list) or not all(isinstance(s, ast.stmt) for s in block):
                continue
            start = next((i for i, s in enumerate(block) if begins(s, first)), None)
            if start is None:
                continue
            end = next((i for i in range(start, len(block)) if begins(block[i], last)), None)
            if end is not None:
                return block[start : end + 1]
    raise LookupError(f"no statements from {first!r} to {last!r} in one block")
