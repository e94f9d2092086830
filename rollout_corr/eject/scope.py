"""Statements and expressions of a function that is specialized: taken where they are known, left where they are not."""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl

from .emitter import Emitter, fields_of
from .record import CannotEject
from .values import (
    OPERATORS,
    RANK,
    Dyn,
    Float,
    Jit,
    Missing,
    Shape,
    UsesMissing,
    broadcast,
    first_missing,
    labeled,
    leaves,
    name,
    promoted,
    rebuilt,
    shape_of,
    unwrap,
)


class Left(Exception):
    """A function returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Scope:
    """The variables of a function that is evaluated."""

    def __init__(self, owner: Emitter, module: dict[str, Any], env: dict[str, Any]) -> None:
        self.owner, self.module, self.env = owner, module, env

    # --- statements ---

    def run(self, body: list[ast.stmt]) -> None:
        """Evaluate statements."""
        for statement in body:
            self.statement(statement)

    def statement(self, s: ast.stmt) -> None:
        """Evaluate a statement."""
        if isinstance(s, ast.Return):
            raise Left(None if s.value is None else self.value(s.value))
        if isinstance(s, ast.Expr):
            if not isinstance(s.value, ast.Constant):
                self.value(s.value)
        elif isinstance(s, ast.Assign):
            value = self.value(s.value)
            for target in s.targets:
                self.bind(target, value)
        elif isinstance(s, ast.AnnAssign):
            assert s.value is not None
            self.bind(s.target, self.value(s.value))
        elif isinstance(s, ast.AugAssign):
            assert isinstance(s.target, ast.Name)
            combined = ast.BinOp(ast.Name(s.target.id, ast.Load()), s.op, s.value)
            self.bind(s.target, self.value(combined))
        elif isinstance(s, ast.If):
            self.branch(s)
        elif isinstance(s, ast.For):
            self.loop(s)
        elif isinstance(s, ast.While):
            self.repeat([], lambda scope: scope.value(s.test), s.body, None)
        else:
            raise CannotEject(f"a statement that cannot be specialized: {ast.unparse(s)}")

    def bind(self, target: ast.expr, value: Any) -> None:
        """Assign to a name, or to several."""
        if isinstance(target, ast.Tuple):
            if self.owner.block and all(isinstance(one, ast.Name) for one in target.elts):
                value = self.renamed([one.id for one in target.elts if isinstance(one, ast.Name)], value)
            for one, part in zip(target.elts, value, strict=True):
                self.bind(one, part)
            return
        assert isinstance(target, ast.Name)
        self.env[target.id] = self.owner.assigned(unwrap(value), target.id)

    def renamed(self, hints: list[str], value: Any) -> Any:
        """Rename the variables of a call's results to the names that the caller assigns them to."""
        last = self.owner.block[-1]
        if not (isinstance(last, ast.Assign) and isinstance(last.targets[0], ast.Tuple)):
            return value
        given = [one.id for one in last.targets[0].elts if isinstance(one, ast.Name)]
        if given != [x.node.id if isinstance(x, Dyn) and isinstance(x.node, ast.Name) else None for x in value]:
            return value
        fresh = [self.owner.fresh(hint if hint != "_" else "unused", x) for hint, x in zip(hints, value, strict=True)]
        last.targets[0].elts = [ast.Name(one, ast.Store()) for one in fresh]
        return tuple(Dyn(ast.Name(one, ast.Load()), x.dtype, x.shape) for one, x in zip(fresh, value, strict=True))

    def branch(self, s: ast.If) -> None:
        """Take the branch that is known, or leave both."""
        test = self.value(s.test)
        if not isinstance(test, Dyn):
            self.run(s.body if test else s.orelse)
            return
        owner, before = self.owner, self.owner.block
        ends = []
        for body in (s.body, s.orelse):
            scope = Scope(owner, self.module, dict(self.env))
            ends.append((scope.env, owner.inside(partial(scope.run, body))))
        (one, block), (other, other_block) = ends
        for key in [key for key in one if key in other]:
            mine, theirs = leaves(one[key]), leaves(other[key])
            if len(mine) != len(theirs) or all(_same(x, y) for x, y in zip(mine, theirs, strict=True)):
                continue
            joined = []
            hints = _hints(owner, key, one[key])
            for x, y, hint in zip(mine, theirs, hints, strict=True):
                if _same(x, y):
                    joined.append(x)
                    continue
                if (gone := first_missing(x, y)) is not None:
                    joined.append(gone)
                    continue
                kind = x if isinstance(x, Dyn) else y
                target = owner.fresh(hint, kind)
                for value, where in ((x, block), (y, other_block)):
                    owner.block = where
                    owner.set_to(target, value)
                owner.block = before
                joined.append(Dyn(ast.Name(target, ast.Load()), kind.dtype, kind.shape))
            self.env[key] = rebuilt(one[key], joined)
        if block or other_block:
            negated = not block
            owner.emit(
                ast.If(
                    ast.UnaryOp(ast.Not(), owner.node(test)) if negated else owner.node(test),
                    other_block if negated else block, [] if negated else other_block,
                )
            )  # fmt: skip

    def loop(self, s: ast.For) -> None:
        """Unroll a loop over what is known; leave any other."""
        assert isinstance(s.iter, ast.Call)
        over = self.value(s.iter.func)
        args = [self.value(x) for x in s.iter.args]
        assert isinstance(s.target, ast.Name)
        if over is tl.static_range:
            for i in range(*args):
                self.env[s.target.id] = i
                self.run(s.body)
            return
        if over is not range:
            raise CannotEject(f"a loop over {ast.unparse(s.iter)}")
        args = [self.owner.assigned(x, "end") if isinstance(x, Dyn) else x for x in args]
        self.repeat(args, None, s.body, s.target.id)

    def repeat(
        self, args: list[Any], test: Callable[[Scope], Any] | None, body: list[ast.stmt], counter: str | None
    ) -> None:
        """Leave a loop, with the variables that it changes.

        A while loop has a `test`, which gives its condition; a for loop the `args` of `range` and a `counter`.
        """
        owner = self.owner
        index = None
        if counter is not None:
            dtype = promoted(*args, 0) if any(isinstance(x, Dyn) for x in args) else tl.int32
            used = counter != "_" and any(
                isinstance(n, ast.Name) and n.id == counter for s in body for n in ast.walk(s)
            )
            index = Dyn(ast.Name(owner.fresh(counter, Dyn(name("0"), dtype)) if used else "_", ast.Load()), dtype)
        # Once only to see what changes.
        taken, functions = set(owner.taken), dict(owner.functions)
        changes: dict[str, list[bool]] = {}
        trial = Scope(owner, self.module, self.env | ({counter: index} if counter else {}))
        for _ in range(3):
            env = dict(trial.env)
            trial_scope = Scope(owner, self.module, env)
            owner.inside(partial(_once, trial_scope, test, body))
            more = False
            for key in self.env:
                marks = [not _same(x, y) for x, y in zip(leaves(trial.env[key]), leaves(env[key]), strict=True)]
                known = changes.setdefault(key, [False] * len(marks))
                for place, mark in enumerate(marks):
                    if mark and not known[place]:
                        known[place] = more = True
            if not more:
                break
            for key, marks in changes.items():
                if any(marks):
                    parts = [
                        _opened(x, y) if mark else x
                        for x, y, mark in zip(leaves(self.env[key]), leaves(env[key]), marks, strict=True)
                    ]
                    trial.env[key] = rebuilt(self.env[key], parts)
        ends = {key: leaves(env[key]) for key in changes}
        owner.taken, owner.functions = taken, functions
        carried: list[tuple[str, str, int]] = []
        inner = dict(self.env)
        for key, marks in changes.items():
            if not any(marks):
                continue
            hints, parts = _hints(owner, key, self.env[key]), []
            for place, (x, hint, mark) in enumerate(zip(leaves(self.env[key]), hints, marks, strict=True)):
                if not mark or isinstance(x, Missing):
                    parts.append(x)
                    continue
                kind = x if isinstance(x, Dyn) else ends[key][place]
                # What something else still reads keeps its name.
                target = owner.fresh(hint, kind)
                owner.set_to(target, x)
                carried.append((key, target, place))
                parts.append(Dyn(ast.Name(target, ast.Load()), kind.dtype, kind.shape))
            inner[key] = rebuilt(self.env[key], parts)
        outer_env = dict(inner)
        scope = Scope(owner, self.module, inner | ({counter: index} if counter else {}))
        condition = None if test is None else owner.node(test(scope))

        def once() -> None:
            scope.run(body)
            updates = []
            for key, target, place in carried:
                node = owner.node(leaves(scope.env[key])[place])
                if not (isinstance(node, ast.Name) and node.id == target):
                    updates.append((target, node))
            if len(updates) > 1 and _depends(updates):
                targets: list[ast.expr] = [ast.Name(one, ast.Store()) for one, _ in updates]
                values = ast.Tuple([x for _, x in updates], ast.Load())
                owner.emit(ast.Assign([ast.Tuple(targets, ast.Store())], values))
            else:
                for target, node in updates:
                    owner.emit(ast.Assign([ast.Name(target, ast.Store())], node))

        inside = owner.inside(once)
        if condition is not None:
            owner.emit(ast.While(condition, inside, []))
        else:
            assert index is not None
            assert isinstance(index.node, ast.Name)
            span = ast.Call(ast.Name("range", ast.Load()), [owner.node(x) for x in args], [])
            owner.emit(ast.For(ast.Name(index.node.id, ast.Store()), span, inside, []))
        self.env.update({key: x for key, x in outer_env.items() if key in self.env})

    # --- expressions ---

    def value(self, e: ast.expr) -> Any:
        """Evaluate an expression."""
        return unwrap(getattr(self, f"of_{type(e).__name__}")(e))

    def of_Constant(self, e: ast.Constant) -> Any:
        return e.value

    def of_Name(self, e: ast.Name) -> Any:
        if e.id in self.env:
            return self.env[e.id]
        if e.id in self.module:
            found = self.module[e.id]
            return labeled(found.value, e.id) if isinstance(found, tl.constexpr) else found
        return getattr(builtins, e.id)

    def of_Tuple(self, e: ast.Tuple) -> Any:
        return tuple(self.value(x) for x in e.elts)

    def of_Slice(self, e: ast.Slice) -> Any:
        return slice(*(None if x is None else self.value(x) for x in (e.lower, e.upper)))

    def of_IfExp(self, e: ast.IfExp) -> Any:
        test = self.value(e.test)
        if not isinstance(test, Dyn):
            return self.value(e.body if test else e.orelse)
        one, other = self.value(e.body), self.value(e.orelse)
        node = ast.IfExp(test.node, self.owner.node(one), self.owner.node(other))
        return Dyn(node, promoted(one, other), broadcast(shape_of(one), shape_of(other)))

    def of_BoolOp(self, e: ast.BoolOp) -> Any:
        every = isinstance(e.op, ast.And)
        result: Any = every
        open_ones: list[Dyn] = []
        for x in e.values:
            result = self.value(x)
            if isinstance(result, Dyn):
                open_ones.append(result)
            elif bool(result) != every:
                return result
        if not open_ones:
            return result
        nodes = [one.node for one in open_ones]
        return open_ones[0] if len(nodes) == 1 else Dyn(ast.BoolOp(e.op, nodes), tl.int1, open_ones[0].shape)

    def of_UnaryOp(self, e: ast.UnaryOp) -> Any:
        x = self.value(e.operand)
        if isinstance(x, Missing):
            return x
        if isinstance(x, Dyn):
            return Dyn(ast.UnaryOp(e.op, x.node), x.dtype, x.shape)
        return {ast.USub: lambda: -x, ast.Not: lambda: not x, ast.Invert: lambda: ~x}[type(e.op)]()

    def of_BinOp(self, e: ast.BinOp) -> Any:
        one, other = self.value(e.left), self.value(e.right)
        if (gone := first_missing(one, other)) is not None:
            return gone
        if not isinstance(one, Dyn) and not isinstance(other, Dyn):
            return eval(f"one {OPERATORS[type(e.op)]} other", {"one": one, "other": other})
        if (
            isinstance(e.op, (ast.Add, ast.Sub, ast.RShift, ast.LShift))
            and other == 0
            and not isinstance(other, (Dyn, float))
        ):
            return one
        if isinstance(e.op, ast.Mult) and isinstance(one, Dyn) and _is_zero(one) and not one.shape:
            return one
        for x, factor in ((one, other), (other, one)):
            integers = type(factor) is int and isinstance(x, Dyn) and x.dtype in (tl.int32, tl.int64)
            floats = type(factor) is float and isinstance(x, Dyn) and x.dtype in (tl.float32, tl.float64)
            if isinstance(e.op, ast.Mult) and (integers or floats) and factor == 1:
                return x
        if isinstance(e.op, ast.Add) and isinstance(one, Dyn) and isinstance(other, Dyn) and _is_none(other, one):
            return one
        pointer = next((x for x in (one, other) if isinstance(x, Dyn) and x.points), None)
        dtype = pointer.dtype if pointer else promoted(one, other)
        if isinstance(e.op, ast.Div) and not isinstance(dtype, str) and RANK[dtype] < 7:
            dtype = tl.float32
        node = ast.BinOp(self.owner.node(one), e.op, self.owner.node(other))
        return Dyn(node, dtype, broadcast(shape_of(one), shape_of(other)), pointer is not None)

    def of_Compare(self, e: ast.Compare) -> Any:
        values = [self.value(x) for x in (e.left, *e.comparators)]
        if (gone := first_missing(*values)) is not None:
            return gone
        if isinstance(e.ops[0], (ast.Is, ast.IsNot)):
            return (values[0] is values[1]) == isinstance(e.ops[0], ast.Is)
        if not any(isinstance(x, Dyn) for x in values):
            one, other = values
            return {ast.Eq: lambda: one == other, ast.NotEq: lambda: one != other, ast.Lt: lambda: one < other,
                    ast.LtE: lambda: one <= other, ast.Gt: lambda: one > other, ast.GtE: lambda: one >= other,
                    ast.In: lambda: one in other, ast.NotIn: lambda: one not in other}[type(e.ops[0])]()  # fmt: skip
        node = ast.Compare(self.owner.node(values[0]), e.ops, [self.owner.node(values[1])])
        return Dyn(node, tl.int1, broadcast(*map(shape_of, values)))

    def of_Attribute(self, e: ast.Attribute) -> Any:
        x = self.value(e.value)
        if isinstance(x, Dyn):
            if e.attr == "shape":
                return Shape(x.shape).of(x.node)
            if e.attr == "dtype":
                return _Pointer(x.dtype) if x.points else x.dtype
            return _Method(x, e.attr)
        if isinstance(x, (int, float)) and e.attr == "to":
            return _Method(x, "to")
        if isinstance(x, Missing):
            return _Method(x, e.attr) if e.attr == "to" else x
        return getattr(x, e.attr)

    def of_Subscript(self, e: ast.Subscript) -> Any:
        x, index = self.value(e.value), self.value(e.slice)
        if not isinstance(x, Dyn):
            return first_missing(x, index) or x[index]
        places, shape = list(index) if isinstance(index, tuple) else [index], []
        dims = iter(x.shape)
        for place in places:
            shape.append(1 if place is None else next(dims))
        parts = [name("None") if place is None else ast.Slice() for place in places]
        node = ast.Subscript(x.node, ast.Tuple(parts, ast.Load()) if len(parts) > 1 else parts[0], ast.Load())
        return Dyn(node, x.dtype, tuple(shape))

    def of_Call(self, e: ast.Call) -> Any:
        function = self.value(e.func)
        args: list[Any] = []
        for x in e.args:
            if isinstance(x, ast.Starred):
                args += list(self.value(x.value))
            else:
                args.append(self.value(x))
        kwargs = {str(k.arg): self.value(k.value) for k in e.keywords}
        if isinstance(function, _Method):
            return self.method(function, args, kwargs)
        plain = getattr(function, "fn", function)
        if str(getattr(plain, "__module__", "")).startswith("triton.language") and not isinstance(function, type):
            return self.builtin(plain.__name__, args, kwargs)
        if isinstance(function, Jit):
            return self.owner.call(function, args, kwargs)
        if isinstance(function, type) and hasattr(function, "_fields"):
            return function(*args, **kwargs)
        if any(isinstance(leaf, Dyn) for x in (*args, *kwargs.values()) for leaf in leaves(x)) and function is not len:
            raise CannotEject(f"a call with tensors: {ast.unparse(e)}")
        try:
            return unwrap(function(*args, **kwargs))
        except ValueError:
            return Missing(str(args[-1]))

    def method(self, method: _Method, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of a tensor: `to` alone is used."""
        x = method.of
        if isinstance(x, Missing):
            return x
        if method.name != "to":
            raise CannotEject(f"a method that cannot be specialized: {method.name}")
        (dtype,) = args
        if not isinstance(x, Dyn):
            if isinstance(x, Float):  # those with a name are the same in float32
                return x
            return float(np.float32(x)) if dtype == tl.float32 else float(x) if dtype == tl.float64 else int(x)
        bitcast = bool(kwargs.get("bitcast"))
        if dtype == x.dtype:
            return x
        what = name(dtype) if isinstance(dtype, str) else self.owner.node(dtype)
        keywords = [ast.keyword("bitcast", name("True"))] if bitcast else []
        return Dyn(ast.Call(ast.Attribute(x.node, "to", ast.Load()), [what], keywords), dtype, x.shape)

    def builtin(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Leave a function of triton.language; give the dtype and the shape of what it returns."""
        owner = self.owner
        if function in ("store", "debug_barrier"):
            if (gone := first_missing(*args)) is not None:
                raise UsesMissing(gone.column)
            owner.emit(ast.Expr(self.tl(function, args, kwargs)))
            return None
        every = [*args, *kwargs.values()]
        if (gone := first_missing(*every)) is not None:
            return gone
        if function == "cast":
            return self.method(_Method(args[0], "to"), args[1:], kwargs)
        if function == "where" and isinstance(args[0], bool):
            return args[1] if args[0] else args[2]
        dtype, shape = self.type_of(function, args, kwargs)
        found = Dyn(self.tl(function, args, kwargs), dtype, shape)
        # What reads memory keeps its place among stores.
        return owner.assigned(found, "loaded") if function in ("load", "atomic_add") else found

    def tl(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> ast.Call:
        """A call of triton.language."""
        dtypes = [x if not isinstance(x, str) or "." not in x else Dyn(name(x), tl.int32) for x in args]
        keywords = [ast.keyword(key, self.owner.node(x)) for key, x in kwargs.items()]
        return ast.Call(name(f"tl.{function}"), [self.owner.node(x) for x in dtypes], keywords)

    def type_of(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, tuple[int, ...]]:
        """The dtype and the shape of what a function of triton.language returns."""
        if function in ("program_id", "num_programs"):
            return tl.int32, ()
        if function == "arange":
            return tl.int32, (args[1] - args[0],)
        if function in ("full", "zeros"):
            return args[-1], tuple(args[0])
        first = args[0]
        if function in ("zeros_like", "abs", "exp", "log", "sqrt"):
            return first.dtype, first.shape
        if function == "load":
            return first.dtype, first.shape
        if function == "atomic_add":
            return first.dtype, first.shape
        if function in ("sum", "max", "min", "reduce"):
            axis = args[1] if len(args) > 1 else kwargs["axis"]
            shape = first.shape[:axis] + first.shape[axis + 1 :]
            dtype = first.dtype
            if function == "sum" and dtype in (tl.int1, tl.int8, tl.int16):
                dtype = tl.int32
            return dtype, shape
        if function == "ravel":
            return first.dtype, (math.prod(first.shape),)
        if function in ("minimum", "maximum", "fma"):
            return promoted(*args), broadcast(*map(shape_of, args))
        if function == "where":
            chosen = args[1:]
            dtype = promoted(*chosen) if any(isinstance(x, Dyn) for x in chosen) else (
                tl.float32 if any(isinstance(x, float) for x in chosen) else tl.int32)  # fmt: skip
            return dtype, broadcast(*map(shape_of, args))
        raise CannotEject(f"a function of triton.language that is not known here: {function}")


@dataclass(frozen=True)
class _Method:
    of: Any
    name: str


@dataclass(frozen=True)
class _Pointer:
    element_ty: Any


def _once(scope: Scope, test: Callable[[Scope], Any] | None, body: list[ast.stmt]) -> None:
    """Evaluate a loop once."""
    if test is not None:
        test(scope)
    scope.run(body)


def _hints(owner: Emitter, key: str, x: Any) -> list[str]:
    """Names for the leaves of a variable."""
    if not isinstance(x, tuple):
        return [key]
    hints = fields_of(x) if hasattr(x, "_fields") else owner.label(key, x) or [f"{key}_{i}" for i in range(len(x))]
    return [more for hint, one in zip(hints, x, strict=True) for more in _hints(owner, hint, one)]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Dyn) and isinstance(y, Dyn):
        return x is y or (isinstance(x.node, ast.Name) and isinstance(y.node, ast.Name) and x.node.id == y.node.id)
    if isinstance(x, Dyn) or isinstance(y, Dyn):
        return False
    return x is y or bool(x == y)


def _opened(before: Any, after: Any) -> Any:
    """A variable of a loop, of the type that it has."""
    kind = before if isinstance(before, Dyn) else after
    return Dyn(name("carried"), kind.dtype, kind.shape) if isinstance(kind, Dyn) else kind


def _is_zero(x: Dyn) -> bool:
    return isinstance(x.node, ast.Constant) and x.node.value == 0


def _depends(updates: list[tuple[str, ast.expr]]) -> bool:
    """An update reads a variable that one before it has changed."""
    changed: set[str] = set()
    for target, node in updates:
        if any(isinstance(one, ast.Name) and one.id in changed for one in ast.walk(node)):
            return True
        changed.add(target)
    return False


def _is_none(x: Dyn, beside: Dyn) -> bool:
    """A scalar times 0, which changes neither the value nor the type of what it is added to."""
    product = x.node
    if x.shape or not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return False
    zero = any(isinstance(one, ast.Constant) and one.value == 0 for one in (product.left, product.right))
    return zero and x.dtype in (tl.int32, tl.int64) and (beside.points or promoted(beside, x) == beside.dtype)
