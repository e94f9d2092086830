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
from typing import Any

# What a test may consist of; anything else is decided at run time.
PLAIN = (ast.Compare, ast.cmpop, ast.Attribute, ast.Name, ast.Constant, ast.Tuple, ast.expr_context)
# The names by which a file calls objects of its classes; objects of other classes are read as any attribute is.
OWNERS = {"Settings": ("settings", "self"), "Criterion": ("criterion",)}

Definition = (ast.FunctionDef, ast.ClassDef)


def cut(source: str, values: Mapping[str, Any]) -> str:
    """The file for these values of its `Settings`; a criterion is a mapping."""
    file = _File(source, values)
    file.decide(file.tree.body, list(getattr(file.settings, "criteria", ())))
    file.fill_in(file.drop_unread())
    return file.text()


class _File:
    """The lines of a file, counted from 1, and what becomes of them."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.tree, self._lines = ast.parse(source), ["", *source.splitlines()]
        self.settings = _settings_in(self.tree, values)
        of_settings = {field.name: getattr(self.settings, field.name) for field in fields(self.settings)}
        self._capitals = {name.upper(): value for name, value in of_settings.items()}
        self._gone: set[int] = set()
        self._moved: dict[int, int] = {}  # how many levels to the left

    def text(self) -> str:
        """The lines that are left."""
        left = [
            line.removeprefix("    " * self._moved.get(number, 0))
            for number, line in enumerate(self._lines)
            if number and number not in self._gone
        ]
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(left)).rstrip("\n") + "\n"

    # --- branches ---

    def decide(self, body: Sequence[ast.stmt], criteria: list[Any]) -> bool:
        """Decide the tests in a block of statements; True if it returns for sure."""
        for statement in body:
            returns = isinstance(statement, (ast.Return, ast.Raise))
            if isinstance(statement, ast.If):
                returns = self._chain(statement, criteria)
            else:
                for name in ("body", "orelse", "finalbody"):
                    self.decide(getattr(statement, name, ()), criteria)
            if isinstance(statement, ast.For) and self._gone.issuperset(_span(statement)[1:]):
                self._gone.add(statement.lineno)
            if returns:
                self._gone.update(range(_last(statement) + 1, _last(body[-1]) + 1))
                return True
        return False

    def _chain(self, first: ast.If, criteria: list[Any]) -> bool:
        """Decide an `if` with its `elif` and `else`; True if what is left returns for sure."""
        branches = list(self._branches(first))
        kept = 0
        for (test, header, body), (_, following, _) in pairwise([*branches, (None, _last(first) + 1, [])]):
            verdict, chosen, criteria = self._decided(test, criteria)
            if verdict is False:
                self._gone.update(range(header, following))
                continue
            returns = self.decide(body, chosen)
            if not kept and verdict is None:
                self._lines[header] = " " * first.col_offset + self._lines[header].strip().removeprefix("el")
            elif not kept:
                self._gone.add(header)
                for number in range(header + 1, following):
                    self._moved[number] = self._moved.get(number, 0) + 1
            kept += 1
            if verdict:
                self._gone.update(range(following, _last(first) + 1))
                return returns and kept == 1
        return False

    def _branches(self, link: ast.If) -> Iterator[tuple[ast.expr | None, int, list[ast.stmt]]]:
        """The test, the line and the body of each branch; `else` has no test."""
        yield link.test, link.lineno, link.body
        if link.orelse:
            header = _last(link.body[-1]) + 1
            while not self._lines[header].lstrip().startswith(("elif ", "else:")):
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
        if not any(isinstance(node, ast.Name) and node.id == "criterion" for node in ast.walk(test)):
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
        objects = {"settings": self.settings, "criterion": criterion} | self._capitals
        for node in ast.walk(test):
            if not isinstance(node, PLAIN) or (isinstance(node, ast.Name) and node.id not in objects):
                return None
        return bool(eval(compile(ast.Expression(test), "test", "eval"), {"__builtins__": {}}, objects))

    # --- what nothing reads ---

    def drop_unread(self) -> set[str]:
        """Drop definitions, fields, parameters and imports that nothing left reads; return what is read."""
        definitions = {node.name: node for node in self.tree.body if isinstance(node, Definition)}
        units: dict[ast.AST, str] = {node: name for name, node in definitions.items()}
        offered = set(definitions)
        for name, definition in definitions.items():
            units |= {node: f"{name}.{member}" for member, node in _members(definition).items()}
            if isinstance(definition, ast.FunctionDef):
                units |= {x: f"{name}({x.arg})" for x in definition.args.args if x.arg in self._capitals}
            elif name not in OWNERS:
                offered |= {f"{name}.{member}" for member in _members(definition)}
        reads = _Reads(units, self._gone)
        reads.visit(self.tree)
        # What a file offers is what nothing in it reads to begin with.
        read = {name for name in offered if (last := name.rpartition(".")[2]) not in reads.names and last[0] != "_"}
        while more := {name for parts, name in reads.of_parts if parts <= read} - read:
            read |= more
        for node, name in units.items():
            if name not in read:
                self._gone.update(_span(node))
        for node in self.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", None) != "__future__":
                left = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in read]
                if not left:
                    self._gone.update(_span(node))
                elif len(left) < len(node.names):
                    node.names = left
                    self._lines[node.lineno] = ast.unparse(node)
        return read

    # --- values ---

    def fill_in(self, read: set[str]) -> None:
        """Give the fields of Settings that are left their values as defaults."""
        classes = {node.name: _members(node) for node in self.tree.body if isinstance(node, ast.ClassDef)}
        of_criterion = [name for name in classes.get("Criterion", ()) if f"Criterion.{name}" in read]
        for name, node in classes["Settings"].items():
            if isinstance(node, ast.AnnAssign) and f"Settings.{name}" in read:
                value = getattr(self.settings, name)
                default = _criteria(value, of_criterion) if name == "criteria" else written(value)
                comment = re.search(r"  #.*", self._lines[node.lineno])
                line = f"    {name}: {ast.unparse(node.annotation)} = {default}"
                self._lines[node.lineno] = line + (f"  {comment[0].strip()}" if comment else "")


class _Reads(ast.NodeVisitor):
    """The names that a file reads.

    Its units are definitions, "correct", their members, "Settings.upper", and parameters in capitals with their
    arguments, "read_kernel(UPPER)". What is part of several units counts where all of them are read.
    """

    def __init__(self, units: dict[ast.AST, str], gone: set[int]) -> None:
        self.names: set[str] = set()  # all that occur; names of attributes among them
        self.of_parts: list[tuple[frozenset[str], str]] = []  # on lines that are left: units, and what is read in them
        self._units, self._gone = units, gone
        self._members = {name for name in units.values() if "." in name}
        self._parameters = {name for name in units.values() if name.endswith(")")}
        self._inside: frozenset[str] = frozenset()

    def visit(self, node: ast.AST) -> None:
        outside = self._inside
        if node in self._units:
            self._inside = outside | {self._units[node]}
        super().visit(node)
        self._inside = outside

    def visit_Name(self, node: ast.Name) -> None:
        self._read(node.id, node.lineno, [node.id, *(f"{unit}({node.id})" for unit in self._inside)])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        names = [name for name in self._members if name.endswith(f".{node.attr}")]
        self._read(node.attr, node.lineno, [x for x in names if owner in OWNERS.get(x.partition(".")[0], (owner,))])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(called, ast.Name):
            units = {keyword: f"{called.id}({keyword.arg})" for keyword in node.keywords}
            self._units |= {keyword: unit for keyword, unit in units.items() if unit in self._parameters}
        self.generic_visit(node)

    def _read(self, name: str, line: int, units: list[str]) -> None:
        self.names.add(name)
        if line not in self._gone:
            self.of_parts += [(self._inside, unit) for unit in units]


def _settings_in(tree: ast.Module, values: Mapping[str, Any]) -> Any:
    """Make the `Settings` of a file, which need not be importable here: kernel.py imports Triton."""
    classes: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in OWNERS]
    scope: dict[str, Any] = {"__name__": "settings", "dataclass": dataclass}
    exec(compile(ast.Module(classes, []), "settings", "exec", dont_inherit=True), scope)
    criteria = tuple(scope["Criterion"](**criterion) for criterion in values.get("criteria", ()))
    return scope["Settings"](**{**values, "criteria": criteria} if "criteria" in values else values)


def _members(node: ast.stmt) -> dict[str, ast.stmt]:
    """The methods of a class, and the fields of Settings and Criterion; the fields of a result stay."""
    members: dict[str, ast.stmt] = {}
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
            members[item.name] = item
        elif (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and getattr(node, "name", "") in OWNERS
        ):
            members[item.target.id] = item
    return members


def _criteria(criteria: Sequence[Any], names: Sequence[str]) -> str:
    """Write a tuple of criteria, each on a line of its own, by the fields that are left and not their defaults."""
    lines = ["("]
    for criterion in criteria:
        defaults = {field.name: field.default for field in fields(criterion)}
        values = {name: getattr(criterion, name) for name in names}
        said = [f"{name}={written(value)}" for name, value in values.items() if value != defaults[name]]
        lines.append(f"        Criterion({', '.join(said)}),")
    return "\n".join([*lines, "    )"])


def written(value: object) -> str:
    """A value of a setting as source."""
    if isinstance(value, str):
        return f'"{value}"'
    return f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _span(node: Any) -> range:
    """The line numbers of a node and its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or first) + 1)
