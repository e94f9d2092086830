"""The program that specializing writes: blocks of statements, names of variables, values as expressions."""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import triton.language as tl

from .record import CannotEject
from .residual import Kernel, unparsed
from .values import Dyn, Float, Int, Jit, Missing, Shape, UsesMissing, name, unwrap

# Structures whose fields have names that say little without theirs.
PREFIXED = {"Tile", "Span"}
RESERVED = {*keyword.kwlist, *dir(builtins), "tl", "triton", "torch"}


def fields_of(x: Any) -> list[str]:
    """Names for the fields of a structure."""
    kind = type(x).__name__
    return [f"{kind.lower()}_{field}" if kind in PREFIXED else field for field in x._fields]


class Emitter(ABC):
    """Statements of the function that is written now, and the functions that are written already.

    Functions by the names in `kept` stay functions. `label` names the leaves of a tuple that a variable holds, or gives
    None: then their places do.
    """

    def __init__(self, kept: Iterable[str], label: Callable[[str, tuple[Any, ...]], list[str] | None]) -> None:
        self.kept, self.label = set(kept), label
        self.functions: dict[Any, Kernel] = {}
        # Functions, and constants of their modules, that are written as they are.
        self.verbatim: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        # Names of functions that store.
        self.effective: set[str] = set()
        self.block: list[ast.stmt] = []
        self.taken: set[str] = set()
        # The types of variables.
        self.types: dict[str, Any] = {}
        # Variables by the text of what they hold: of this block and of those around it.
        self.holds: list[dict[str, str]] = [{}]

    @abstractmethod
    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of Triton."""

    @abstractmethod
    def function_of_tensors(self, function: Any) -> Kernel:
        """Write a function that a reduction applies."""

    def fresh(self, hint: str, like: Any = None) -> str:
        """A name that no variable has yet, for one of the type of a value."""
        hint = "".join(sign if sign.isalnum() else "_" for sign in hint).strip("_") or "x"
        hint = f"x{hint}" if hint[0].isdigit() else hint
        found, number = hint, 2
        functions = {kernel.name for kernel in self.functions.values()}
        while found in self.taken or found in RESERVED or found in self.verbatim or found in functions | self.kept:
            found, number = f"{hint}_{number}", number + 1
        self.taken.add(found)
        if isinstance(like, Dyn):
            self.types[found] = like.dtype, like.shape, like.points
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
                hints = [field if isinstance(one, Dyn) else f"{hint}_{field}"
                         for field, one in zip(fields_of(value), value, strict=True)]  # fmt: skip
            parts = [self.assigned(one, more) for one, more in zip(value, hints, strict=True)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, Dyn) or isinstance(value.node, ast.Name):
            return value
        text = unparsed(value.node)
        target = next((found[text] for found in self.holds if text in found), None)
        if target is None:
            zeros = re.fullmatch(r"tl\.(?:full\(.*, 0|zeros\(.*), tl\.(\w+)\)", text)
            target = self.fresh(f"zeros_{zeros[1]}" if zeros else hint, value)
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
