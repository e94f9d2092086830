"""Specializing a Triton kernel: its syntax tree, evaluated as far as a plan decides, and what is left as source.

A value is static, a value of Python such as the plan, a dtype or a tuple; or a `Dyn`, an expression of the kernel that
is left. Branches on static values are taken, `tl.static_range` is unrolled, tuples become variables, functions are
written into their callers. Loops and branches on tensors stay, with the variables that they carry.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from ..specs.caches import cached
from .record import CannotEject

Jit = (JITFunction, InterpretedFunction)


@dataclass(frozen=True, eq=False)
class Dyn:
    """An expression of the kernel that is left.

    Attributes:
        node: The expression.
        dtype: A dtype of Triton; a text where only the caller's tensor knows it, such as "mask.dtype.element_ty".
        shape: Its shape; () for a scalar.
        points: It is a pointer to such elements.
    """

    node: ast.expr
    dtype: Any
    shape: tuple[int, ...] = ()
    points: bool = False


class Missing:
    """The value of a column that the plan has not: whatever is made of it must not be stored."""

    def __init__(self, column: str) -> None:
        self.column = column


def first_missing(*values: Any) -> Missing | None:
    """One of the values that are missing."""
    return next((x for x in values if isinstance(x, Missing)), None)


class Left(Exception):
    """A function returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


def name(text: str) -> ast.expr:
    """An expression from its text."""
    return ast.parse(text, mode="eval").body


def unwrap(x: Any) -> Any:
    """What a constexpr holds."""
    return x.value if isinstance(x, tl.constexpr) else x


RANK = {tl.int1: 0, tl.int8: 1, tl.uint8: 1, tl.int16: 2, tl.int32: 3, tl.uint32: 4, tl.int64: 5, tl.uint64: 6,
        tl.float16: 7, tl.bfloat16: 7, tl.float32: 8, tl.float64: 9}  # fmt: skip
OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.LShift: "<<",
    ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Pow: "**",
}  # fmt: skip


def promoted(*values: Any) -> Any:
    """The dtype of what is computed of some values."""
    dtypes = [x.dtype for x in values if isinstance(x, Dyn)]
    known = [dtype for dtype in dtypes if not isinstance(dtype, str)]
    if len(known) < len(dtypes):
        return next(dtype for dtype in dtypes if isinstance(dtype, str))
    best = max(known, key=lambda dtype: RANK[dtype])
    numbers = [x for x in values if not isinstance(x, Dyn)]
    if any(isinstance(x, float) for x in numbers) and RANK[best] < 7:
        return tl.float32
    if best == tl.int1 and any(isinstance(x, int) and not isinstance(x, bool) for x in numbers):
        return tl.int32
    return best


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what is computed of several."""
    most = max(shapes, key=len)
    padded = [(1,) * (len(most) - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a value."""
    return x.shape if isinstance(x, Dyn) else ()


def leaves(x: Any) -> list[Any]:
    """All values in nested tuples."""
    return [leaf for one in x for leaf in leaves(one)] if isinstance(x, tuple) else [x]


def rebuilt(x: Any, values: Iterable[Any]) -> Any:
    """Nested tuples with other leaves."""
    values = iter(values)

    def build(one: Any) -> Any:
        if not isinstance(one, tuple):
            return next(values)
        inner = [build(each) for each in one]
        return type(one)(*inner) if hasattr(one, "_fields") else tuple(inner)

    return build(x)


@dataclass
class Kernel:
    """A kernel, or a function that it calls, as it is left.

    Attributes:
        name: Its name.
        parameters: The names of its parameters.
        body: Its statements.
        doc: The first sentence of its docstring.
        returns: What it returns, for the callers of a function.
        source: Its own text, where nothing of it depends on the plan.
    """

    name: str
    parameters: list[str]
    body: list[ast.stmt]
    doc: str
    returns: Any = None
    source: str | None = None


class Specializer:
    """Specializes kernels of one plan.

    Args:
        kept: Names of functions that stay functions.
        given: Values by the names of functions that are not evaluated, such as loads of numbers that are known.
        label: Names the leaves of a tuple that a variable holds; None: by their places.
        clean: Leaves out what nothing reads, given the names of functions that store.
    """

    def __init__(
        self,
        kept: Iterable[str],
        given: dict[str, Callable[..., Any]],
        label: Callable[[str, tuple[Any, ...]], list[str] | None],
        clean: Callable[[list[ast.stmt], set[str]], list[ast.stmt]],
    ) -> None:
        self.kept, self.given, self.label = set(kept), given, label
        self.functions: dict[Any, Kernel] = {}
        # Functions, and constants of their modules, that are written as they are.
        self.verbatim: dict[str, str] = {}
        self.effective: set[str] = set()
        # Columns that something is stored in, or would be if the plan had them.
        self.stored: set[str] = set()
        self.clean = clean
        self.constants: dict[str, Any] = {}
        self.block: list[ast.stmt] = []
        self.taken: set[str] = set()
        # What variables hold, by its text: of this block and of those around it.
        self.holds: list[dict[str, str]] = [{}]

    # --- names and statements ---

    def fresh(self, hint: str) -> str:
        """A name that no variable has yet."""
        hint = "".join(sign if sign.isalnum() else "_" for sign in hint).strip("_") or "x"
        hint = f"x{hint}" if hint[0].isdigit() else hint
        found, number = hint, 2
        functions = {kernel.name for kernel in self.functions.values()}
        while found in self.taken or found in RESERVED or found in self.verbatim or found in functions | self.kept:
            found, number = f"{hint}_{number}", number + 1
        self.taken.add(found)
        return found

    def emit(self, statement: ast.stmt) -> None:
        """Add a statement."""
        self.block.append(statement)

    def assigned(self, value: Any, hint: str) -> Any:
        """A value in variables of its own."""
        if isinstance(value, tuple):
            if not hasattr(value, "_fields"):
                hints = self.label(hint, value) or [f"{hint}_{place}" for place in range(len(value))]
            else:
                hints = [f"{field}" if isinstance(one, Dyn) else f"{hint}_{field}"
                         for field, one in zip(value._fields, value, strict=True)]  # fmt: skip
            parts = [self.assigned(one, more) for one, more in zip(value, hints, strict=True)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, Dyn) or isinstance(value.node, ast.Name):
            return value
        text = unparsed(value.node)
        target = next((found[text] for found in self.holds if text in found), None)
        if target is None:
            zeros = re.fullmatch(r"tl\.full\(.*, 0, tl\.(\w+)\)", text)
            target = self.fresh(f"zeros_{zeros[1]}" if zeros else hint)
            self.emit(ast.Assign([ast.Name(target, ast.Store())], value.node))
            if not any(
                word in text for word in ("tl.load(", "tl.atomic", "carried", *(f"{x}(" for x in self.effective))
            ):
                self.holds[-1][text] = target
        return Dyn(ast.Name(target, ast.Load()), value.dtype, value.shape, value.points)

    def set_to(self, target: str, value: Any) -> None:
        """Assign a value to a variable that exists."""
        self.emit(ast.Assign([ast.Name(target, ast.Store())], self.node(value)))

    def node(self, value: Any) -> ast.expr:
        """A value as an expression."""
        value = unwrap(value)
        if isinstance(value, Dyn):
            return value.node
        if isinstance(value, Missing):
            raise UsesMissing(value.column)
        if isinstance(value, (Float, Int)):
            self.constants[value.label] = type(value).__mro__[1](value)
            return ast.Name(value.label, ast.Load())
        if isinstance(value, Shape) and isinstance(value.node.value, ast.Name):
            return value.node
        if isinstance(value, float) and not math.isfinite(value):
            return name(f'float("{value}")')
        if isinstance(value, (bool, int, float, str)) or value is None:
            return name(repr(value)) if not isinstance(value, str) else ast.Constant(value)
        if isinstance(value, tl.dtype):
            return name(f"tl.{self.dtype_name(value)}")
        if isinstance(value, tuple):
            return ast.Tuple([self.node(one) for one in value], ast.Load())
        if isinstance(value, slice):
            return ast.Slice(*(None if end is None else self.node(end) for end in (value.start, value.stop)))
        if isinstance(value, Jit):
            return name(self.function_of_tensors(value).name)
        if value is tl.PropagateNan.ALL:
            return name("tl.PropagateNan.ALL")
        raise CannotEject(f"a value that has no text: {value!r}")

    @staticmethod
    def dtype_name(dtype: tl.dtype) -> str:
        """The name of a dtype in triton.language."""
        return {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}.get(dtype.name, dtype.name)

    def inside(self, run: Callable[[], Any]) -> list[ast.stmt]:
        """Run something whose statements go to a block of its own; give this block."""
        before, self.block = self.block, []
        self.holds.append({})
        try:
            run()
            return self.block
        finally:
            self.block = before
            self.holds.pop()

    # --- functions ---

    def tree(self, function: Any) -> ast.FunctionDef:
        """The syntax tree of a function."""
        return _tree(function.fn)[0]

    def bound(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        signature = inspect.signature(function.fn)
        called = signature.bind(*args, **kwargs)
        called.apply_defaults()
        return dict(called.arguments)

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of Triton: write it into the caller, or call what is left of it."""
        called = function.fn.__name__
        arguments = {key: unwrap(x) for key, x in self.bound(function, args, kwargs).items()}
        if called in STORES:
            self.stored.add(str(arguments["name"]))
        if called in self.given:
            return self.given[called](**arguments)
        if arguments.get("COLUMNS") == 0:
            return None
        if (gone := first_missing(*arguments.values())) is not None and self.is_verbatim(function):
            if function.fn.__annotations__.get("return") == "None":
                raise UsesMissing(gone.column)
            return gone
        if self.is_verbatim(function):
            return self.call_verbatim(function, arguments)
        if called in self.kept:
            return self.call_kept(function, arguments)
        tree = self.tree(function)
        env = {}
        for key, value in arguments.items():
            hint = arguments.get("name") if key == "x" and isinstance(arguments.get("name"), str) else key
            env[key] = self.assigned(value, str(hint)) if _tree(function.fn)[1][key] > 1 else value
        return self.evaluated(function, tree, env)

    def evaluated(self, function: Any, tree: ast.FunctionDef, env: dict[str, Any]) -> Any:
        """Evaluate the body of a function in the current block."""
        scope = Scope(self, function.fn.__globals__, env)
        try:
            scope.run(tree.body)
        except Left as left:
            return left.value
        return None

    def is_verbatim(self, function: Any) -> bool:
        """Nothing of a function depends on the plan: neither its arguments nor what it calls."""
        parameters = inspect.signature(function.fn).parameters
        if function.fn.__name__ in INLINED or {"PLAN", "TILING", "SHAPE", "CRITERION"} & set(parameters):
            return False
        if not any(kind in str(function.fn.__annotations__.get("return")) for kind in ("tl.tensor", "None")):
            return False
        return not {"Extents", "Partials", "tuple", "Span"} & set(_words(function.fn))

    def call_verbatim(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Call a function that is written as it is."""
        self.include(function)
        outer = self.block, self.taken, self.holds
        self.block, self.taken, self.holds = [], set(), [{}]
        blanks = {
            key: Dyn(ast.Name(key, ast.Load()), x.dtype, x.shape, x.points) if isinstance(x, Dyn) else x
            for key, x in arguments.items()
        }
        result = self.evaluated(function, self.tree(function), blanks)
        self.block, self.taken, self.holds = outer
        call = ast.Call(ast.Name(function.fn.__name__, ast.Load()), [self.node(x) for x in arguments.values()], [])
        if result is None:
            self.emit(ast.Expr(call))
            return None
        if not isinstance(result, tuple):
            return Dyn(call, result.dtype, result.shape) if isinstance(result, Dyn) else result
        targets = [self.fresh(x.node.id if isinstance(x.node, ast.Name) else function.fn.__name__) for x in result]
        self.emit(ast.Assign([ast.Tuple([ast.Name(one, ast.Store()) for one in targets], ast.Store())], call))
        return tuple(Dyn(ast.Name(one, ast.Load()), x.dtype, x.shape) for one, x in zip(targets, result, strict=True))

    def include(self, function: Any) -> None:
        """Write a function as it is, and what it calls before it."""
        called = function.fn.__name__
        if called in self.verbatim:
            return
        module = function.fn.__globals__
        source = textwrap.dedent(inspect.getsource(function.fn)).rstrip()
        self.verbatim[called] = ""
        for one in ast.walk(ast.parse(source)):
            if not isinstance(one, ast.Name) or one.id not in module or one.id == called:
                continue
            other = module[one.id]
            if isinstance(other, tl.constexpr):
                self.constants[one.id] = other.value
            elif isinstance(other, Jit) and not str(other.fn.__module__).startswith("triton"):
                self.include(other)
            elif isinstance(other, ConstexprFunction) and one.id not in self.verbatim:
                self.verbatim[one.id] = textwrap.dedent(inspect.getsource(other.fn)).rstrip()
        self.verbatim.pop(called)
        self.verbatim[called] = source
        if any(effect in source for effect in EFFECTS) or any(f"{one}(" in source for one in self.effective):
            self.effective.add(called)

    def call_kept(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Call a function that stays one: specialized by its static arguments, with the tensors that it reads."""
        key = (function.fn.__name__, tuple((name, _signature(x)) for name, x in arguments.items()))
        tensors = [leaf for x in arguments.values() for leaf in leaves(x) if isinstance(leaf, Dyn)]
        if key not in self.functions:
            self.functions[key] = self.specialized(function, arguments)
        kernel = self.functions[key]
        reads = names_in(kernel.body)
        read = [x for x, parameter in zip(tensors, kernel.parameters, strict=True) if reads[parameter]]
        call = ast.Call(ast.Name(kernel.name, ast.Load()), [self.node(x) for x in read], [])
        result = kernel.returns
        if result is None:
            self.emit(ast.Expr(call))
            return None
        if not isinstance(result, tuple):
            return Dyn(call, result.dtype, result.shape)
        dynamic = [leaf for leaf in leaves(result) if isinstance(leaf, Dyn)]
        targets = [self.fresh(leaf.node.id if isinstance(leaf.node, ast.Name) else kernel.name) for leaf in dynamic]
        self.emit(ast.Assign([ast.Tuple([ast.Name(one, ast.Store()) for one in targets], ast.Store())], call))
        found = iter(
            Dyn(ast.Name(one, ast.Load()), leaf.dtype, leaf.shape) for one, leaf in zip(targets, dynamic, strict=True)
        )
        return rebuilt(result, [next(found) if isinstance(leaf, Dyn) else leaf for leaf in leaves(result)])

    def specialized(self, function: Any, arguments: dict[str, Any], top: bool = False) -> Kernel:
        """Specialize a function on its own: with the parameters alone that it reads."""
        outer = self.block, self.taken, self.holds
        self.block, self.taken, self.holds = [], {kernel.name for kernel in self.functions.values()}, [{}]
        base = function.fn.__name__
        own = base if top else base.lstrip("_")
        number = 2
        while own in {kernel.name for kernel in self.functions.values()}:
            own, number = f"{base}_{number}", number + 1
        parameters: list[str] = []

        def parameter(leaf: Any, hint: str) -> Any:
            if not isinstance(leaf, Dyn):
                return leaf
            parameters.append(self.fresh(hint))
            return Dyn(ast.Name(parameters[-1], ast.Load()), leaf.dtype, leaf.shape, leaf.points)

        def entered(key: str, x: Any) -> Any:
            if not isinstance(x, tuple):
                return parameter(x, key)
            hints = x._fields if hasattr(x, "_fields") else self.label(key, x) or [f"{key}_{i}" for i in range(len(x))]
            parts = [entered(hint, one) for hint, one in zip(hints, x, strict=True)]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)

        env = {key: entered(key, x) for key, x in arguments.items()}
        # Known before it is evaluated: nothing here is recursive.
        result = self.evaluated(function, self.tree(function), env)
        if result is not None:
            result = result if isinstance(result, tuple) else self.assigned(result, "result")
            dynamic = [self.node(leaf) for leaf in leaves(result) if isinstance(leaf, Dyn)]
            several = isinstance(result, tuple)
            self.emit(ast.Return(ast.Tuple(dynamic, ast.Load()) if several else dynamic[0]))
        doc = inspect.cleandoc(function.fn.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        body, (self.block, self.taken, self.holds) = self.clean(self.block, self.effective), outer
        if any(has_effect(statement, self.effective) for statement in body):
            self.effective.add(own)
        return Kernel(own, parameters, body, doc, result)

    def function_of_tensors(self, function: Any) -> Kernel:
        """A function that a reduction applies."""
        key = (function.fn.__name__, "reduction")
        if key not in self.functions:
            one = Dyn(name("x"), tl.float32)
            self.functions[key] = self.specialized(
                function, dict.fromkeys(inspect.signature(function.fn).parameters, one)
            )
        return self.functions[key]


def _is_none(x: Dyn, beside: Dyn) -> bool:
    """A scalar times 0, which changes neither the value nor the type of what it is added to."""
    product = x.node
    if x.shape or not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return False
    zero = any(isinstance(one, ast.Constant) and one.value == 0 for one in (product.left, product.right))
    return zero and x.dtype in (tl.int32, tl.int64) and (beside.points or promoted(beside, x) == beside.dtype)


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


@cached(maxsize=None)
def _words(function: Any) -> frozenset[str]:
    """The words of the source of a function."""
    return frozenset(re.findall(r"\w+", inspect.getsource(function)))


@cached(maxsize=None)
def _tree(function: Any) -> tuple[ast.FunctionDef, Counter[str]]:
    """The syntax tree of a function, and how often it reads each variable."""
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found, names_in(found)


class UsesMissing(Exception):
    """A column that the plan has not would be stored."""


def _signature(x: Any) -> Any:
    if isinstance(x, Dyn):
        return "dyn", str(x.dtype)
    if isinstance(x, tuple):
        return type(x).__name__, tuple(map(_signature, x))
    if isinstance(x, Jit):
        return x.fn.__name__
    return repr(x)


# Functions that store in a column by its name.
STORES = ("put", "put_call", "record")
# Short functions that read better where they are called.
INLINED = {
    "constant",
    "is_finite",
    "either",
    "entry_of",
    "within_tile",
    "over_factorial",
    "zeros_by",
    "chosen",
    "joined",
}
RESERVED = {*keyword.kwlist, *dir(builtins), "tl", "triton", "torch"}


class Scope:
    """The variables of a function that is evaluated."""

    def __init__(self, owner: Specializer, module: dict[str, Any], env: dict[str, Any]) -> None:
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
        """What a call gave in variables is called as the caller calls it."""
        last = self.owner.block[-1]
        if not (isinstance(last, ast.Assign) and isinstance(last.targets[0], ast.Tuple)):
            return value
        given = [one.id for one in last.targets[0].elts if isinstance(one, ast.Name)]
        if given != [x.node.id if isinstance(x, Dyn) and isinstance(x.node, ast.Name) else None for x in value]:
            return value
        fresh = [self.owner.fresh(hint if hint != "_" else "unused") for hint in hints]
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
                target = owner.fresh(hint)
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

        Args:
            args: Those of `range`.
            test: Gives the condition of a while loop; None: it is a for loop.
            body: Its statements.
            counter: The variable of a for loop.
        """
        owner = self.owner
        index = None
        if counter is not None:
            dtype = promoted(*args, 0) if any(isinstance(x, Dyn) for x in args) else tl.int32
            used = counter != "_" and any(
                isinstance(n, ast.Name) and n.id == counter for s in body for n in ast.walk(s)
            )
            index = Dyn(ast.Name(owner.fresh(counter) if used else "_", ast.Load()), dtype)
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
                target = owner.fresh(hint)
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
        for x in e.values:
            result = self.value(x)
            if not isinstance(result, Dyn) and bool(result) != every:
                return result
        return result

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
            if isinstance(e.op, ast.Mult) and type(factor) is int and factor == 1 and x.dtype in (tl.int32, tl.int64):
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


class Shape(tuple[int, ...]):
    """The shape of a tensor, which is written as such."""

    node: ast.Attribute

    def of(self, x: ast.expr) -> Shape:
        """Name the tensor."""
        self.node = ast.Attribute(x, "shape", ast.Load())
        return self


class Float(float):
    """A constant of a module, which is written by its name."""

    label: str


class Int(int):
    """A constant of a module, which is written by its name."""

    label: str


def labeled(x: Any, label: str) -> Any:
    """A number with its name."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return x
    found: Any = Float(x) if isinstance(x, float) else Int(x)
    found.label = label
    return found


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


def _hints(owner: Specializer, key: str, x: Any) -> list[str]:
    """Names for the leaves of a variable."""
    if not isinstance(x, tuple):
        return [key]
    hints = x._fields if hasattr(x, "_fields") else owner.label(key, x) or [f"{key}_{i}" for i in range(len(x))]
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
