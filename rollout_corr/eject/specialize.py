"""Specializing a Triton kernel: its syntax tree, evaluated as far as a plan decides, and what is left as source.

A value is static, a value of Python such as the plan, a dtype or a tuple; or a `Dyn`, an expression of the kernel that
is left. Branches on static values are taken, `tl.static_range` is unrolled, tuples become variables, functions are
written into their callers. Loops and branches on tensors stay, with the variables that they carry.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction

from ..specs.caches import cached
from .emitter import Emitter, fields_of
from .residual import EFFECTS, Kernel, has_effect, names_in, unparsed
from .scope import Left, Scope
from .values import Dyn, Jit, UsesMissing, first_missing, leaves, name, rebuilt, unwrap


class Specializer(Emitter):
    """Specializes kernels of one plan; `kept` and `label` as of `Emitter`.

    `given` has values by the names of functions that are not evaluated, such as loads of numbers that are known.
    `clean` leaves out what nothing reads, given the names of functions that store.
    """

    def __init__(
        self,
        kept: Iterable[str],
        given: dict[str, Callable[..., Any]],
        label: Callable[[str, tuple[Any, ...]], list[str] | None],
        clean: Callable[[list[ast.stmt], set[str]], list[ast.stmt]],
    ) -> None:
        super().__init__(kept, label)
        self.given, self.clean = given, clean
        # Columns that something is stored in, or would be if the plan had them.
        self.stored: set[str] = set()

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
        called = function.fn.__name__
        arguments = {key: unwrap(x) for key, x in self.bound(function, args, kwargs).items()}
        if called in STORES:
            self.stored.add(str(arguments["name"]))
        if called in self.given:
            return self.given[called](**arguments)
        if 0 in (arguments.get("COLUMNS"), arguments.get("LAST"), arguments.get("many")):
            return None
        gone = first_missing(*arguments.values())
        if gone is not None and called in SHORT:
            return gone
        if called in self.kept:
            return self.call_kept(function, arguments)
        if gone is not None and self.is_verbatim(function):
            if function.fn.__annotations__.get("return") == "None":
                raise UsesMissing(gone.column)
            return gone
        if self.is_verbatim(function):
            return self.call_verbatim(function, arguments)
        return self.inlined(function, arguments)

    def inlined(self, function: Any, arguments: dict[str, Any]) -> Any:
        """Write a function into its caller."""
        tree = self.tree(function)
        env = {}
        for key, value in arguments.items():
            hint = self.column_of(arguments, key)
            env[key] = self.assigned(value, hint) if _tree(function.fn)[1][key] > 1 else value
        return self.evaluated(function, tree, env)

    def column_of(self, arguments: dict[str, Any], key: str) -> str:
        """A name for an argument: that of the column in which it is stored."""
        column = arguments.get("name")
        if key != "x" or not isinstance(column, str):
            return key
        column = re.sub("^[0-9]+/", "", column)
        if arguments.get("TABLE") == "integers":
            return f"{column}_on_grid"
        return f"{column}_here" if column in self.taken else column

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
        words = _words(function.fn)
        return "tuple" not in words and not any(hasattr(function.fn.__globals__.get(x), "_fields") for x in words)

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
        targets = [self.fresh(x.node.id if isinstance(x.node, ast.Name) else function.fn.__name__, x) for x in result]
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
        kinds = function.fn.__annotations__
        # One function takes a number that is known here and one that is not.
        arguments = {key: Dyn(ast.Constant(x), tl.int32) if type(x) is int and kinds.get(key) == "tl.tensor" else x
                     for key, x in arguments.items()}  # fmt: skip
        key = (function.fn.__name__, tuple((name, _signature(x)) for name, x in arguments.items()))
        tensors = [leaf for x in arguments.values() for leaf in leaves(x) if isinstance(leaf, Dyn)]
        if key not in self.functions:
            made = self.specialized(function, arguments)
            if len(made.body) == 1 and function.fn.__name__ in SHORT:
                return self.inlined(function, arguments)
            # Plans may differ in what this function does not ask.
            self.functions[key] = next((one for one in self.functions.values() if is_same(one, made)), made)
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
        targets = [self.fresh(leaf.node.id if isinstance(leaf.node, ast.Name) else kernel.name, leaf)
                   for leaf in dynamic]  # fmt: skip
        self.emit(ast.Assign([ast.Tuple([ast.Name(one, ast.Store()) for one in targets], ast.Store())], call))
        found = iter(
            Dyn(ast.Name(one, ast.Load()), leaf.dtype, leaf.shape) for one, leaf in zip(targets, dynamic, strict=True)
        )
        return rebuilt(result, [next(found) if isinstance(leaf, Dyn) else leaf for leaf in leaves(result)])

    def specialized(self, function: Any, arguments: dict[str, Any], top: bool = False) -> Kernel:
        """Specialize a function on its own: with the parameters alone that it reads."""
        outer = self.block, self.taken, self.holds, self.types
        self.block, self.taken, self.holds = [], {kernel.name for kernel in self.functions.values()}, [{}]
        types: dict[str, Any] = {}
        self.types = types
        base = function.fn.__name__
        own = base if top else base.lstrip("_")
        number = 2
        while own in {kernel.name for kernel in self.functions.values()}:
            own, number = f"{base}_{number}", number + 1
        parameters: list[str] = []

        def parameter(leaf: Any, hint: str) -> Any:
            if not isinstance(leaf, Dyn):
                return leaf
            parameters.append(self.fresh(hint, leaf))
            return Dyn(ast.Name(parameters[-1], ast.Load()), leaf.dtype, leaf.shape, leaf.points)

        def entered(key: str, x: Any) -> Any:
            if not isinstance(x, tuple):
                return parameter(x, key)
            named = fields_of(x) if hasattr(x, "_fields") else self.label(key, x)
            hints = named or [f"{key}_{i}" for i in range(len(x))]
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
        body = self.clean(self.block, self.effective)
        self.block, self.taken, self.holds, self.types = outer
        if any(has_effect(statement, self.effective) for statement in body):
            self.effective.add(own)
        return Kernel(own, parameters, body, doc, result, types)

    def function_of_tensors(self, function: Any) -> Kernel:
        key = (function.fn.__name__, "reduction")
        if key not in self.functions:
            one = Dyn(name("x"), tl.float32)
            self.functions[key] = self.specialized(
                function, dict.fromkeys(inspect.signature(function.fn).parameters, one)
            )
        return self.functions[key]


def is_same(one: Kernel, other: Kernel) -> bool:
    """Two specialized functions do the same."""
    bodies = (unparsed(ast.Module(kernel.body, [])) for kernel in (one, other))
    return one.doc == other.doc and one.parameters == other.parameters and len({*bodies}) == 1


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


def _signature(x: Any) -> Any:
    if isinstance(x, Dyn):
        return "dyn", str(x.dtype)
    if isinstance(x, tuple):
        return type(x).__name__, tuple(map(_signature, x))
    if isinstance(x, Jit):
        return x.fn.__name__
    return repr(x)


# Functions that store in a column by its name.
STORES = ("put", "put_call", "put_call_maximum", "record")
# Functions that are written into their callers where a type leaves one expression of them.
SHORT = {"over_lanes", "unordered"}
# Short functions that read better where they are called.
INLINED = {
    "store_part", "is_finite", "either", "entry_of", "within_tile", "over_factorial", "zeros_by", "chosen", "joined",
}  # fmt: skip
