"""The statements left of a specialized kernel: dead ones removed, variables renamed, written as text."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .lines import fitted


@dataclass
class Kernel:
    """A kernel, or a function that it calls, as it is left."""

    name: str
    parameters: list[str]
    body: list[ast.stmt]
    doc: str  # the first sentence of its docstring
    returns: Any = None  # for the callers of a function
    types: dict[str, Any] = field(default_factory=dict)  # of its variables


# The longest line that writing something where it is read may make.
LONGEST = 100
EFFECTS = ("tl.store", "tl.atomic_add", "tl.debug_barrier")


def unparsed(node: ast.AST) -> str:
    """The text of a tree that was built here."""
    return ast.unparse(ast.fix_missing_locations(node))


def has_effect(node: ast.AST, effective: set[str]) -> bool:
    """An expression that does more than to give a value."""
    return any(
        isinstance(one, ast.Call) and (unparsed(one.func) in EFFECTS or unparsed(one.func) in effective)
        for one in ast.walk(node)
    )


def names_in(nodes: Any) -> Counter[str]:
    """How often variables are read."""
    found: Counter[str] = Counter()
    for node in nodes if isinstance(nodes, list) else [nodes]:
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                found[one.id] += 1
    return found


def reads_memory(node: ast.AST) -> bool:
    """An expression that loads."""
    return any(isinstance(one, ast.Call) and unparsed(one.func) == "tl.load" for one in ast.walk(node))


def cleaned(body: list[ast.stmt], effective: set[str]) -> list[ast.stmt]:
    """Statements without what nothing reads; what is read once stands where it is read."""
    while True:
        before = unparsed(ast.Module(body, []))
        body = without_dead(body, effective)
        body = Inliner(body, effective).run()
        if unparsed(ast.Module(body, [])) == before:
            return body


def targets_of(statement: ast.Assign) -> list[str]:
    """The variables that an assignment sets."""
    target = statement.targets[0]
    return [one.id for one in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(one, ast.Name)]


def without_dead(body: list[ast.stmt], effective: set[str]) -> list[ast.stmt]:
    """Leave out assignments that nothing reads, until there is none."""
    live: set[str] = set()

    def reads(block: list[ast.stmt]) -> None:
        for s in block:
            if isinstance(s, ast.Assign):
                if has_effect(s.value, effective) or any(one in live for one in targets_of(s)):
                    live.update(names_in(s.value))
            elif isinstance(s, (ast.If, ast.While)):
                live.update(names_in(s.test))
                reads(s.body)
                reads(s.orelse)
            elif isinstance(s, ast.For):
                live.update(names_in(s.iter))
                reads(s.body)
            else:
                live.update(names_in(s))

    size = -1
    while size != len(live):
        size = len(live)
        reads(body)

    def kept(block: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for s in block:
            if isinstance(s, ast.Assign):
                targets = targets_of(s)
                if not any(one in live for one in targets) and not has_effect(s.value, effective):
                    continue
                if not any(one in live for one in targets):
                    found.append(ast.Expr(s.value))
                    continue
                if isinstance(s.targets[0], ast.Tuple) and isinstance(s.value, ast.Tuple):
                    pairs = [(t, v) for t, v in zip(targets, s.value.elts, strict=True) if t in live]
                    if len(pairs) < len(targets):
                        if len(pairs) == 1:
                            found.append(ast.Assign([ast.Name(pairs[0][0], ast.Store())], pairs[0][1]))
                        else:
                            found.append(ast.Assign(
                                [ast.Tuple([ast.Name(t, ast.Store()) for t, _ in pairs], ast.Store())],
                                ast.Tuple([v for _, v in pairs], ast.Load()),
                            ))  # fmt: skip
                        continue
                found.append(s)
            elif isinstance(s, ast.If):
                body, orelse = kept(s.body), kept(s.orelse)
                if body or orelse:
                    if not body:
                        found.append(ast.If(ast.UnaryOp(ast.Not(), s.test), orelse, []))
                    else:
                        found.append(ast.If(s.test, body, orelse))
            elif isinstance(s, ast.For):
                inner = kept(s.body)
                if inner:
                    found.append(ast.For(s.target, s.iter, inner, []))
            elif isinstance(s, ast.While):
                found.append(ast.While(s.test, kept(s.body), []))
            else:
                found.append(s)
        return found

    return kept(body)


class Inliner:
    """Writes what is read once where it is read, and copies as what they copy."""

    def __init__(self, body: list[ast.stmt], effective: set[str]) -> None:
        self.body, self.effective = body, effective
        self.indent = 0
        self.reads = names_in(body)
        self.set: Counter[str] = Counter()
        for s in ast.walk(ast.Module(body, [])):
            if isinstance(s, ast.Name) and isinstance(s.ctx, ast.Store):
                self.set[s.id] += 1

    def run(self) -> list[ast.stmt]:
        """Return the statements."""
        return self.block(self.body)

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Go through a block: an assignment is written into the statement that reads it, if nothing between matters."""
        result = list(body)
        self.indent += 4
        place = 0
        while place < len(result):
            s = result[place]
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and self.moves(s):
                target, value = s.targets[0].id, s.value
                where = next((i for i in range(place + 1, len(result)) if names_in(result[i])[target]), None)
                if where is not None and self.reaches(result, place, where, target, value):
                    result[where] = Put(target, value).visit(result[where])
                    ast.fix_missing_locations(result[where])
                    del result[place]
                    # Whatever the value reads is still read once for each time.
                    place = max(place - 1, 0)
                    continue
            place += 1
        done = []
        for s in result:
            if isinstance(s, (ast.If, ast.While, ast.For)):
                s.body = self.block(s.body)
                s.orelse = self.block(s.orelse)
            done.append(s)
        self.indent -= 4
        return done

    def moves(self, s: ast.Assign) -> bool:
        target = s.targets[0]
        assert isinstance(target, ast.Name)
        if self.set[target.id] != 1 or has_effect(s.value, self.effective):
            return False
        if isinstance(s.value, (ast.Name, ast.Constant)):
            return all(self.set[one] <= 1 for one in names_in(s.value)) or self.reads[target.id] == 1
        if isinstance(s.value, ast.UnaryOp) and isinstance(s.value.operand, ast.Constant):
            return True
        return self.reads[target.id] == 1 and len(unparsed(s.value)) < 80

    def reaches(self, block: list[ast.stmt], place: int, where: int, target: str, value: ast.expr) -> bool:
        """Nothing between changes the value, and it is not read in a loop that would compute it again."""
        copies = isinstance(value, (ast.Name, ast.Constant, ast.UnaryOp))
        user = block[where]
        if isinstance(user, (ast.For, ast.While, ast.If)):
            if isinstance(user, ast.While) or not isinstance(value, (ast.Name, ast.Constant, ast.UnaryOp)):
                head = user.iter if isinstance(user, ast.For) else user.test
                if isinstance(user, ast.While) or names_in(head)[target] == 0:
                    return False
        elif not copies and self.indent + len(unparsed(user)) + len(unparsed(value)) - len(target) > LONGEST:
            return False
        if self.reads[target] > 1 and not copies:
            return False
        changed = set()
        for s in block[place + 1 : where + 1]:
            if s is user and isinstance(s, ast.Assign):
                continue
            for one in ast.walk(s):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    changed.add(one.id)
        if changed & set(names_in(value)):
            return False
        if copies and self.reads[target] > 1:
            later = [one for s in block[where + 1 :] for one in ast.walk(s)]
            stored = {one.id for one in later if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            if stored & set(names_in(value)):
                return False
            for i in range(where + 1, len(block)):
                block[i] = Put(target, value).visit(block[i])
        return not (reads_memory(value) and any(has_effect(s, self.effective) for s in block[place + 1 : where + 1]))


class Put(ast.NodeTransformer):
    """Replaces a variable by a value."""

    def __init__(self, target: str, value: ast.expr) -> None:
        self.target, self.put = target, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.put if node.id == self.target and isinstance(node.ctx, ast.Load) else node


class Renamer:
    """Gives variables names without numbers where another of that name neither is read nor would have another type."""

    def __init__(self, parameters: list[str], body: list[ast.stmt], types: dict[str, Any]) -> None:
        self.types = types
        self.first: dict[str, int] = dict.fromkeys(parameters, 0)
        self.last: dict[str, int] = dict.fromkeys(parameters, 0)
        self.path: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(parameters, ())
        self.clock = 0
        self.block(body, ())

    def block(self, body: list[ast.stmt], path: tuple[tuple[int, int], ...]) -> None:
        """Number statements; what a loop reads of before it lasts to its end."""
        for s in body:
            self.clock += 2
            if isinstance(s, (ast.For, ast.While, ast.If)):
                begin = self.clock
                self.see(s.iter if isinstance(s, ast.For) else s.test, path)
                if isinstance(s, ast.For):
                    self.see(s.target, (*path, (begin, 0)))
                self.block(s.body, (*path, (begin, 0)))
                self.block(s.orelse, (*path, (begin, 1)))
                self.clock += 2
                if not isinstance(s, ast.If):
                    for one in names_in([*s.body, s.iter if isinstance(s, ast.For) else s.test]):
                        if self.first.get(one, self.clock) < begin:
                            self.last[one] = self.clock
            else:
                self.see(s, path)

    def see(self, node: ast.AST, path: tuple[tuple[int, int], ...]) -> None:
        """Note the variables of a node."""
        for one in ast.walk(node):
            if isinstance(one, ast.Name):
                stores = isinstance(one.ctx, ast.Store)
                if stores:
                    self.first.setdefault(one.id, self.clock + 1)
                    # The outermost block that sets it.
                    self.path[one.id] = _common(self.path.get(one.id, path), path)
                self.last[one.id] = max(self.last.get(one.id, 0), self.clock + stores)

    def names(self, reserved: set[str]) -> dict[str, str]:
        """The new names."""
        of_name: dict[str, list[str]] = {}
        found = {}
        for old in sorted(self.first, key=lambda one: self.first[one]):
            base = re.sub(r"_\d+$", "", old) if self.first[old] else old
            if any(self.conflict(old, x) and self.kind(old) != self.kind(x) for x in of_name.get(base, ())):
                base = f"{base}_{self.kind(old)}"
            number, new = 1, base
            while new in reserved or any(self.conflict(old, other) for other in of_name.get(new, ())):
                number += 1
                new = f"{base}_{number}"
            of_name.setdefault(new, []).append(old)
            found[old] = new
        return found

    def kind(self, name: str) -> str:
        """The dtype of a variable, as a part of a name."""
        return str(self.types[name][0]).rpartition(".")[2] if name in self.types else "value"

    def conflict(self, one: str, other: str) -> bool:
        """Two variables cannot have one name."""
        if self.first[one] < self.last[other] and self.first[other] < self.last[one]:
            return True
        if one in self.types and self.types[one] == self.types.get(other):
            return False
        mine, theirs = self.path[one], self.path[other]
        for x, y in zip(mine, theirs, strict=False):
            if x != y:
                return x[0] == y[0]
        return len(mine) != len(theirs)


def _common(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The block that holds both."""
    found = []
    for x, y in zip(one, other, strict=False):
        if x != y:
            break
        found.append(x)
    return tuple(found)


class Liveness:
    """Which variables hold something at the same time, so that they cannot be one."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.apart: dict[str, set[str]] = {}
        self.before(body, set())

    def before(self, body: list[ast.stmt], after: set[str]) -> set[str]:
        """The variables that are read behind the beginning of a block, given those that are behind its end."""
        live = set(after)
        for s in reversed(body):
            if isinstance(s, ast.If):
                live = self.before(s.body, live) | self.before(s.orelse, live) | set(names_in(s.test))
            elif isinstance(s, (ast.For, ast.While)):
                live = self.around(s, live)
            elif isinstance(s, ast.Assign):
                copied = s.value.id if isinstance(s.value, ast.Name) else None
                targets = set(targets_of(s))
                for one in targets:
                    self.hold(one, (live | targets) - {copied})
                live = (live - targets) | set(names_in(s.value))
            else:
                live |= set(names_in(s))
        return live

    def around(self, s: ast.For | ast.While, after: set[str]) -> set[str]:
        """Find the variables that are live before a loop; its body runs again behind its end."""
        target = {s.target.id} if isinstance(s, ast.For) and isinstance(s.target, ast.Name) else set()
        tested = set(names_in(s.test)) if isinstance(s, ast.While) else set()
        live = after | tested
        while True:
            inside = self.before(s.body, live)
            for one in target:
                self.hold(one, inside | after)
            more = live | (inside - target)
            if more == live:
                return live | (set(names_in(s.iter)) if isinstance(s, ast.For) else set())
            live = more

    def hold(self, one: str, others: set[str | None] | set[str]) -> None:
        """Note that a variable is set while others are still to be read."""
        for other in others:
            if other is not None and other != one:
                self.apart.setdefault(one, set()).add(other)
                self.apart.setdefault(other, set()).add(one)


def coalesced(body: list[ast.stmt], parameters: list[str]) -> list[ast.stmt]:
    """A body in which a variable and its copy are one, where nothing tells them apart."""
    apart = Liveness(body).apart
    together: dict[str, set[str]] = {}
    for copy in [s for s in flat(body) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Name)]:
        target, value = copy.targets[0], copy.value
        assert isinstance(value, ast.Name)
        if not isinstance(target, ast.Name) or {target.id, value.id} & set(parameters):
            continue
        one, other = (together.setdefault(x, {x}) for x in (value.id, target.id))
        if one is not other and not any(apart.get(x, set()) & other for x in one):
            one |= other
            together |= dict.fromkeys(other, one)
    order = {name: place for place, name in enumerate(_stored_in_order(body))}
    names = {x: min(every, key=lambda x: (x.startswith("zeros_"), order.get(x, 0))) for x, every in together.items()}
    return without_copies([Renamed(names, False).visit(s) for s in body])


def _stored_in_order(body: list[ast.stmt]) -> list[str]:
    """Variables in the order in which a body sets them first."""
    return list(dict.fromkeys(one for s in flat(body) if isinstance(s, ast.Assign) for one in targets_of(s)))


def flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """All plain statements, also of inner blocks."""
    found: list[ast.stmt] = []
    for s in body:
        if isinstance(s, (ast.If, ast.For, ast.While)):
            found += flat([*s.body, *s.orelse])
        else:
            found.append(s)
    return found


class Renamed(ast.NodeTransformer):
    """Replaces old names by new ones, and `x = x + y` by `x += y`."""

    def __init__(self, names: dict[str, str], augments: bool = True) -> None:
        self.names, self.augments = names, augments

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        if not (self.augments and isinstance(target, ast.Name) and isinstance(value, ast.BinOp)):
            return node
        same = isinstance(value.left, ast.Name) and value.left.id == target.id
        return ast.AugAssign(target, value.op, value.right) if same else node


def without_copies(body: list[ast.stmt]) -> list[ast.stmt]:
    """A block without assignments of a variable to itself, and without what is empty then."""
    for s in body:
        if isinstance(s, (ast.If, ast.For, ast.While)):
            s.body, s.orelse = without_copies(s.body), without_copies(s.orelse)
    left = [s for s in body if not (isinstance(s, ast.Assign) and unparsed(s.targets[0]) == unparsed(s.value))]
    for place, s in enumerate(left):
        if isinstance(s, ast.If) and not s.body and s.orelse:
            left[place] = ast.If(ast.UnaryOp(ast.Not(), s.test), s.orelse, [])
    return [s for s in left if not isinstance(s, (ast.If, ast.For)) or s.body]


def text_of(body: list[ast.stmt], indent: int, width: int) -> list[str]:
    """Statements as lines."""
    lines: list[str] = []
    for s in body:
        pad = " " * indent
        start = len(lines)
        if isinstance(s, (ast.If, ast.While, ast.For)):
            if isinstance(s, ast.For):
                head = f"for {unparsed(s.target)} in {unparsed(s.iter)}:"
            else:
                head = f"{'if' if isinstance(s, ast.If) else 'while'} {unparsed(s.test)}:"
            lines += [pad + line for line in fitted(head, width - indent)]
            lines += text_of(s.body, indent + 4, width)
            if len(s.orelse) == 1 and isinstance(s.orelse[0], ast.If):
                first, *rest = text_of(s.orelse, indent, width)
                lines += [f"{pad}el{first.lstrip()}", *rest]
            elif s.orelse:
                lines += [pad + "else:", *text_of(s.orelse, indent + 4, width)]
            if indent == 4 and len(lines) - start > 8:
                # A block of some length stands apart.
                lines[start:] = [*([""] if lines[:start] and lines[start - 1] else []), *lines[start:], ""]
        else:
            text = unparsed(s).replace("'", '"')
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Tuple):
                text = text.replace("(", "", 1).replace(")", "", 1) if text.startswith("(") else text
            lines += [pad + line for line in fitted(text, width - indent)]
    return lines[:-1] if lines and not lines[-1] else lines
