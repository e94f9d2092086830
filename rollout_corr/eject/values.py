"""Values while a kernel is specialized: known to Python, or an expression that is left, with its dtype and shape."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Jit = (JITFunction, InterpretedFunction)


class UsesMissing(Exception):
    """A column that the plan has not would be stored."""


@dataclass(frozen=True, eq=False)
class Dyn:
    """An expression of the kernel that is left."""

    node: ast.expr
    dtype: Any  # of Triton; a text where only the caller's tensor knows it, such as "mask.dtype.element_ty"
    shape: tuple[int, ...] = ()
    points: bool = False  # it is a pointer to such elements


class Missing:
    """The value of a column that the plan has not: whatever is made of it must not be stored."""

    def __init__(self, column: str) -> None:
        self.column = column


def first_missing(*values: Any) -> Missing | None:
    """Find the first value of a column that the plan lacks; None: there is no such value."""
    return next((x for x in values if isinstance(x, Missing)), None)


def name(text: str) -> ast.expr:
    """An expression from its text."""
    return ast.parse(text, mode="eval").body


def unwrap(x: Any) -> Any:
    """Take a value out of its constexpr."""
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
