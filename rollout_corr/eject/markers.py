"""Filling in the settings of a file, and leaving out what they never reach.

An `if` whose test reads settings alone is the marker: `settings.FIELD`, in Triton functions FIELD in capitals, and
`criterion.FIELD` of each of the criteria. A test that is False for these settings takes its branch with it. One that is
True leaves its branch, one level to the left, and what would follow a `return` in it goes too. Then go the functions,
classes, imports, fields and parameters that nothing reads any more. The rest of `Settings` gets the values as defaults.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

# What a test may consist of; anything else is decided at run time.
PLAIN = (ast.Compare, ast.cmpop, ast.Attribute, ast.Name, ast.Constant, ast.Tuple, ast.expr_context)


def cut(source: str, values: Mapping[str, Any]) -> str:
    """The file for these values of its `Settings`; a criterion is a mapping."""
    tree = ast.parse(source)
    settings = _settings_in(tree, values)
    text = "\n".join(_Branches(source, tree, settings).lines()) + "\n"
    read = _names(tree) | {name for _, name in _attributes(tree)}
    known = [name for node in _definitions(tree) for name in (node.name, *(item.name for item in _members(node)))]
    entries = {name for name in known if name not in read and name[0] != "_"}
    while (less := _without_unread(text, entries, settings)) != text:
        text = less
    return re.sub(r"\n{4,}", "\n\n\n", _with_defaults(text, settings)).rstrip("\n") + "\n"


def _settings_in(tree: ast.Module, values: Mapping[str, Any]) -> Any:
    """Make the `Settings` of a file, which need not be importable here: kernel.py imports Triton."""
    classes = [node for node in _definitions(tree) if node.name in OWNERS]
    scope: dict[str, Any] = {"__name__": "settings", "dataclass": dataclass}
    exec(compile(ast.Module([*classes], []), "settings", "exec", dont_inherit=True), scope)
    criteria = tuple(scope["Criterion"](**criterion) for criterion in values.get("criteria", ()))
    return scope["Settings"](**{**values, "criteria": criteria} if "criteria" in values else values)


# --- branches ---


class _Branches:
    """A file whose branches are decided."""

    def __init__(self, source: str, tree: ast.Module, settings: Any) -> None:
        self._source, self._settings = source.splitlines(), settings
        self._gone: set[int] = set()  # lines, counted from 1
        self._moved: dict[int, int] = {}  # how many levels to the left
        self._block(tree.body, list(getattr(settings, "criteria", ())))

    def lines(self) -> Iterator[str]:
        """The lines that are left."""
        for number, line in enumerate(self._source, 1):
            if number not in self._gone:
                yield line.removeprefix("    " * self._moved.get(number, 0))

    def _block(self, body: Sequence[ast.stmt], criteria: list[Any]) -> bool:
        """Decide the tests in a block of statements; True if it returns for sure."""
        for statement in body:
            returns = isinstance(statement, (ast.Return, ast.Raise))
            if isinstance(statement, ast.If):
                returns = self._chain(statement, criteria)
            else:
                for name in ("body", "orelse", "finalbody"):
                    self._block(getattr(statement, name, ()), criteria)
            if isinstance(statement, ast.For) and self._gone.issuperset(
                range(statement.lineno + 1, _last(statement) + 1)
            ):
                self._gone.add(statement.lineno)
            if returns:
                self._drop(_last(statement) + 1, _last(body[-1]))
                return True
        return False

    def _chain(self, first: ast.If, criteria: list[Any]) -> bool:
        """Decide an `if` with its `elif` and `else`; True if what is left returns for sure."""
        branches = list(self._branches(first))
        kept = 0
        for (test, header, body), (_, following, _) in pairwise([*branches, (None, _last(first) + 1, [])]):
            verdict, chosen, criteria = self._decided(test, criteria)
            if verdict is False:
                self._drop(header, following - 1)
                continue
            returns = self._block(body, chosen)
            indent = " " * first.col_offset
            if verdict is None:
                line = self._source[header - 1].strip().removeprefix("el")
                self._source[header - 1] = f"{indent}{'el' if kept else ''}{line}"
            elif kept:
                self._source[header - 1] = f"{indent}else:"
            else:
                self._gone.add(header)
                for number in range(header + 1, following):
                    self._moved[number] = self._moved.get(number, 0) + 1
            kept += 1
            if verdict:
                self._drop(following, _last(first))
                return returns and kept == 1
        return False

    def _branches(self, link: ast.If) -> Iterator[tuple[ast.expr | None, int, list[ast.stmt]]]:
        """The test, the line and the body of each branch; `else` has no test."""
        yield link.test, link.lineno, link.body
        if link.orelse:
            header = _last(link.body[-1]) + 1
            while not self._source[header - 1].lstrip().startswith(("elif ", "else:")):
                header += 1
            inner = link.orelse[0]
            if isinstance(inner, ast.If) and inner.lineno == header:
                yield from self._branches(inner)
            else:
                yield None, header, link.orelse

    def _decided(self, test: ast.expr | None, criteria: list[Any]) -> tuple[bool | None, list[Any], list[Any]]:
        """What a test is, or None; for which criteria its branch runs, and for which the next ones do."""
        if test is None:
            return True, criteria, []
        if "criterion" not in _names(test):
            return self._value(test, None), criteria, criteria
        verdicts = [self._value(test, criterion) for criterion in criteria]
        chosen = [criterion for criterion, is_so in zip(criteria, verdicts, strict=True) if is_so is not False]
        rest = [criterion for criterion, is_so in zip(criteria, verdicts, strict=True) if not is_so]
        return (verdicts[0] if len(set(verdicts)) == 1 else None if verdicts else False), chosen, rest

    def _value(self, test: ast.expr, criterion: Any) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            value = self._value(test.operand, criterion)
            return None if value is None else not value
        if isinstance(test, ast.BoolOp):
            values = [self._value(part, criterion) for part in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        known = {"settings": self._settings, "criterion": criterion} | {
            field.name.upper(): getattr(self._settings, field.name) for field in fields(self._settings)
        }
        if not all(isinstance(node, PLAIN) for node in ast.walk(test)) or not _names(test) <= known.keys():
            return None
        return bool(eval(compile(ast.Expression(test), "test", "eval"), {"__builtins__": {}}, known))

    def _drop(self, first: int, last: int) -> None:
        self._gone.update(range(first, last + 1))


# --- what nothing reads ---


def _without_unread(text: str, entries: set[str], settings: Any) -> str:
    """The text without definitions, fields, parameters and imports that nothing in it reads."""
    tree, lines = ast.parse(text), text.splitlines()
    names = _names(tree)
    capitals = {field.name.upper() for field in fields(settings)}
    read = _attributes(tree)
    gone: set[int] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in names | entries:
            gone |= _span(node)
        elif isinstance(node, ast.ClassDef):
            for item in _members(node):
                owners = OWNERS.get(node.name)
                by = {owner for owner, name in read if name == item.name and (owners is None or owner in owners)}
                if not by and item.name.upper() not in names and (owners or item.name not in entries):
                    gone |= _span(item.node)
        elif isinstance(node, ast.FunctionDef):
            if unread := capitals & {parameter.arg for parameter in node.args.args}:
                unread -= _names(ast.Module(node.body, []))
            for place in _places(tree, node, unread) if unread else ():
                gone |= _span(place)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != "__future__":
            kept = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in names]
            if not kept:
                gone |= _span(node)
            elif len(kept) < len(node.names):
                node.names = kept
                lines[node.lineno - 1] = ast.unparse(node)
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in gone) + "\n"


# The names by which a file calls objects of its classes; those of others are read as any attribute is.
OWNERS = {"Settings": ("settings", "self"), "Criterion": ("criterion",)}


class _Member(NamedTuple):
    name: str
    node: ast.stmt


def _members(node: ast.stmt) -> Iterator[_Member]:
    """The methods of a class, and the fields of Settings and Criterion; the fields of a result stay."""
    if not isinstance(node, ast.ClassDef):
        return
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
            yield _Member(item.name, item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and node.name in OWNERS:
            yield _Member(item.target.id, item)


def _places(tree: ast.Module, function: ast.FunctionDef, unread: set[str]) -> Iterator[ast.arg | ast.keyword]:
    """Where parameters stand, and the arguments for them."""
    yield from (parameter for parameter in function.args.args if parameter.arg in unread)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if isinstance(called, ast.Name) and called.id == function.name:
            yield from (keyword for keyword in call.keywords if keyword.arg in unread)


def _with_defaults(text: str, settings: Any) -> str:
    """The text whose Settings have their values as defaults."""
    tree, lines = ast.parse(text), text.splitlines()
    classes = {node.name: node for node in _definitions(tree) if isinstance(node, ast.ClassDef)}
    of_criterion = [item.name for item in _members(classes["Criterion"])] if "Criterion" in classes else []
    for name, node in reversed([*_members(classes["Settings"])]):
        if isinstance(node, ast.AnnAssign):
            value = getattr(settings, name)
            said = _criteria(value, of_criterion) if name == "criteria" else written(value)
            comment = re.search(r"  #.*", lines[node.lineno - 1])
            line = f"    {name}: {ast.unparse(node.annotation)} = {said}"
            lines[node.lineno - 1] = line + (f"  {comment[0].strip()}" if comment else "")
    return "\n".join(lines) + "\n"


def _criteria(criteria: Sequence[Any], names: Sequence[str]) -> str:
    """Write a tuple of criteria, each on a line of its own, by the fields that are left and not their defaults."""
    lines = ["("]
    for criterion in criteria:
        default = {field.name: field.default for field in fields(criterion)}
        given = [
            f"{name}={written(getattr(criterion, name))}" for name in names if getattr(criterion, name) != default[name]
        ]
        lines.append(f"        Criterion({', '.join(given)}),")
    return "\n".join([*lines, "    )"])


def written(value: object) -> str:
    """A value of a setting as source."""
    if isinstance(value, str):
        return f'"{value}"'
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _attributes(tree: ast.AST) -> set[tuple[str, str]]:
    """The attributes that are read, each with the name of the object, or none."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {(node.value.id if isinstance(node.value, ast.Name) else "", node.attr) for node in found}


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _span(node: ast.stmt | ast.arg | ast.keyword) -> set[int]:
    """The numbers of its lines, with those of its decorators."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return set(range(first, (node.end_lineno or first) + 1))
