"""Instructions that compute: a NumPy function for each opcode, by the chapters of the PTX ISA.

Values are arrays over [warps, 32 threads] of the instruction's own type; bf16, which NumPy lacks, is held as its bits.
Fused multiply-add is exact before it rounds but for one case in 2^29 or so: float32 goes by float64, float64 by
error-free products. Approximations (ex2, lg2) are computed in float64 and rounded; a GPU is off by up to 2 ulp.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.generic]
U16, U32, U64 = np.uint16, np.uint32, np.uint64

# Fundamental types. A predicate is a bool.
TYPES = {
    "pred": np.dtype(bool), "bf16": np.dtype(U16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64), "bf16x2": np.dtype(U32), "f16x2": np.dtype(U32), "s16x2": np.dtype(U32),
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
       for kind in "bus" for bits in (8, 16, 32, 64)},
}  # fmt: skip


class UnknownOpcode(Exception):
    """An opcode, or a form of one, that this interpreter does not know."""


class Operation(NamedTuple):
    """How an instruction computes: its result's type, its operands' types, and the function."""

    result: str
    operands: tuple[str, ...]
    compute: Callable[..., Any]  # a pair of predicates for setp of pairs


@cache
def operation(opcode: str) -> Operation:
    """Look up an instruction that computes from registers alone.

    Raises:
        UnknownOpcode: It is in no table.
    """
    name, *parts = opcode.split(".")
    kinds = [part for part in parts if part in TYPES]
    how = frozenset(parts) - frozenset(kinds)
    if name == "cvt" and len(kinds) == 2:
        return _conversion(kinds[0], kinds[1], how)
    if name == "setp" and len(kinds) == 1 and parts[0] in COMPARISONS:
        return Operation("pred", (kinds[0],) * 2, _compare(parts[0], kinds[0], how - {parts[0]}))
    if len(kinds) != 1:
        raise UnknownOpcode(opcode)
    kind = kinds[0]
    if name in SPECIAL and how <= {"lo", "wide", "approx", "ftz"}:
        return SPECIAL[name](kind, "wide" in how)
    table = FLOATING if kind in ("f16", "f32", "f64") else INTEGER
    entry = table.get(".".join([name, *sorted(how - {"rn", "ftz", "approx", "full"})]))
    if opcode == "add.s16x2":
        entry = 2, _halves
    elif kind in ("bf16", "bf16x2", "f16x2", "s16x2"):
        entry = None
    if entry is None:
        raise UnknownOpcode(opcode)
    count, compute = entry
    flush = "ftz" in how and kind == "f32"
    return Operation(kind, (kind,) * count, _flushed(compute) if flush else compute)


# --- 9.7.1 integer arithmetic, 9.7.8 logic and shift ---


def _bits(x: Values) -> int:
    return 8 * x.dtype.itemsize


def _shift_left(a: Values, by: Values) -> Values:
    return np.where(by < _bits(a), a << (by & (_bits(a) - 1)).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Values, by: Values) -> Values:
    if a.dtype.kind == "i":
        return a >> np.minimum(by, _bits(a) - 1).astype(a.dtype)
    return np.where(by < _bits(a), a >> (by & (_bits(a) - 1)).astype(a.dtype), a.dtype.type(0))


def _divide(a: Values, b: Values) -> Values:
    """Divide towards zero; by zero gives all ones, as the ISA leaves it to the machine."""
    by = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // by
    quotient = quotient + ((a % by != 0) & ((a < 0) != (by < 0))).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def _high(a: Values, b: Values) -> Values:
    return ((a.astype(object) * b.astype(object)) >> _bits(a)).astype(a.dtype)


def _halves(a: Values, b: Values) -> Values:
    low = (a + b) & U32(0xFFFF)
    return low | (((a >> U32(16)) + (b >> U32(16))) << U32(16))


def _extract(a: Values, start: Values, length: Values) -> Values:
    """Take a field of bits; a signed one is filled with its highest bit."""
    start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
    bits = _bits(a)
    field = _shift_right(a.view(f"u{bits // 8}"), np.minimum(start, bits)) & _ones(length, bits)
    if a.dtype.kind == "u":
        return field
    unused = np.clip(bits - length, 0, bits - 1)
    return _shift_right(_shift_left(field, unused).view(a.dtype), unused)


def _ones(length: Values, bits: int) -> Values:
    one = np.ones_like(length, dtype=f"u{bits // 8}")
    return _shift_left(one, length) - one


def _permute(a: Values, b: Values, selector: Values) -> Values:
    """Pick four of the eight bytes of two registers; the highest bit of a selector repeats the byte's sign."""
    both = a.astype(U64) | (b.astype(U64) << U64(32))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), U32)
    for i in range(4):
        choice = (selector >> U32(4 * i)) & U32(15)
        byte = ((both >> (U64(8) * (choice & U32(7)).astype(U64))) & U64(255)).astype(U32)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        out = out | (np.where(choice & U32(8), sign, byte) << U32(8 * i))
    return out


INTEGER: dict[str, tuple[int, Callable[..., Values]]] = {
    "add": (2, np.add), "sub": (2, np.subtract), "min": (2, np.minimum), "max": (2, np.maximum),
    "div": (2, _divide), "rem": (2, lambda a, b: a - _divide(a, b) * b), "neg": (1, np.negative), "abs": (1, np.abs),
    "mul.hi": (2, _high), "and": (2, np.bitwise_and), "or": (2, np.bitwise_or), "xor": (2, np.bitwise_xor),
    "not": (1, np.invert),
    "prmt": (3, _permute),
}  # fmt: skip


def _multiply(kind: str, wide: bool, adds: bool) -> Operation:
    result = kind[0] + str(2 * int(kind[1:])) if wide else kind
    to = TYPES[result]

    def compute(a: Values, b: Values, *c: Values) -> Values:
        product = a.astype(to) * b.astype(to)
        return product + c[0] if adds else product

    return Operation(result, (kind, kind, *((result,) if adds else ())), compute)


def _with_kind(others: tuple[str, ...], compute: Callable[..., Values], result: str = "") -> Callable[..., Operation]:
    return lambda kind, wide: Operation(result or kind, tuple(other or kind for other in others), compute)


def _product(kind: str, wide: bool) -> Operation:
    return Operation(kind, (kind,) * 2, np.multiply) if kind[0] == "f" else _multiply(kind, wide, False)


def _fused(kind: str, wide: bool) -> Operation:
    return Operation(kind, (kind,) * 3, _fma) if kind[0] == "f" else _multiply(kind, wide, True)


# Those whose operands have other types than the result.
SPECIAL: dict[str, Callable[[str, bool], Operation]] = {
    "shl": _with_kind(("", "u32"), _shift_left),
    "shr": _with_kind(("", "u32"), _shift_right),
    "bfe": _with_kind(("", "u32", "u32"), _extract),
    "popc": _with_kind(("",), lambda a: np.bitwise_count(a).astype(U32), "u32"),
    "selp": _with_kind(("", "", "pred"), lambda a, b, p: np.where(p, a, b)),
    "mul": _product,
    "mad": _fused,
}


# --- 9.7.3 and 9.7.4 floating point ---


def _fma(a: Values, b: Values, c: Values) -> Values:
    if a.dtype == np.float32 or a.dtype == np.float16:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)
    product = a * b
    high_a, high_b = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    low_a, low_b = a - high_a, b - high_b
    left = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    total = product + c
    virtual = total - product
    exact = total + (((product - (total - virtual)) + (c - virtual)) + left)
    return np.where(np.isfinite(exact), exact, product + c)


def _least(a: Values, b: Values) -> Values:
    """The smaller one; of a number and a NaN the number; -0 is below +0."""
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def _largest(a: Values, b: Values) -> Values:
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def _wide(function: Callable[[Values], Values]) -> Callable[[Values], Values]:
    """Compute in float64 and round once."""
    return lambda a: function(a.astype(np.float64)).astype(a.dtype)


def _reciprocal(a: Values) -> Values:
    """Give what rcp.approx.ftz.f64 promises: the upper half of the bits, as a first guess."""
    exact = np.asarray(1.0 / a)
    return exact if a.dtype == np.float32 else (exact.view(U64) & U64(0xFFFFFFFF00000000)).view(np.float64)


FLOATING: dict[str, tuple[int, Callable[..., Values]]] = {
    "add": (2, np.add), "sub": (2, np.subtract), "div": (2, np.divide), "fma": (3, _fma), "neg": (1, np.negative),
    "abs": (1, np.abs), "min": (2, _least), "max": (2, _largest),
    "min.NaN": (2, np.minimum), "max.NaN": (2, np.maximum), "ex2": (1, _wide(np.exp2)), "lg2": (1, _wide(np.log2)),
    "sqrt": (1, np.sqrt), "rcp": (1, _reciprocal),
    "rsqrt": (1, _wide(lambda a: 1.0 / np.sqrt(a))), "mul": (2, np.multiply),
}  # fmt: skip


def _flushed(compute: Callable[..., Values]) -> Callable[..., Values]:
    """Take subnormal operands and results as zeros of their sign."""

    def flush(x: Values) -> Values:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(x.dtype.type(0), x), x)

    return lambda *operands: flush(compute(*map(flush, operands)))


# --- 9.7.6 comparison and selection ---

_ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMPARISONS = {*_ORDERED, *_UNSIGNED, *(f"{name}u" for name in _ORDERED), "num", "nan"}


def _compare(name: str, kind: str, others: frozenset[str]) -> Callable[..., Any]:
    """Compare; an ordered comparison with a NaN is false, an unordered one true; of pairs give two results."""
    if others - {"ftz"} or kind in ("f16x2", "s16x2"):
        raise UnknownOpcode(f"setp.{name}.{'.'.join(others)}.{kind}")
    if kind == "bf16":
        alone = _compare(name, "f32", others)
        return lambda a, b: alone(from_bf16(a), from_bf16(b))
    if kind == "bf16x2":
        half = _compare(name, "bf16", others)
        return lambda a, b: (half(a & U32(0xFFFF), b & U32(0xFFFF)), half(a >> U32(16), b >> U32(16)))
    name = _UNSIGNED.get(name, name)
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in _ORDERED:
        # NumPy's "not equal" holds for a NaN, the ISA's does not.
        return (lambda a, b: (a < b) | (a > b)) if name == "ne" and kind[0] == "f" else _ORDERED[name]
    compare = _ORDERED[name[:-1]]
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


# --- 9.7.9 conversion ---

_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_bf16(x: Values) -> Values:
    """Round float32 to the nearest bf16, ties to even."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), U32(0x7FFF), rounded).astype(U16)


def from_bf16(x: Values) -> Values:
    """Widen bf16 to float32."""
    return (x.astype(U32) << U32(16)).view(np.float32)


def _conversion(to: str, source: str, how: frozenset[str]) -> Operation:
    if how - {"rn", "rz", "ftz", *_ROUNDINGS} or ("rz" in how):
        raise UnknownOpcode(f"cvt.{'.'.join(how)}.{to}.{source}")
    rounding = next((_ROUNDINGS[x] for x in how if x in _ROUNDINGS), None)
    kind = TYPES[to]
    if to in ("bf16x2", "f16x2") and source == "f32":
        half = to_bf16 if to == "bf16x2" else lambda x: x.astype(np.float16).view(U16)
        return Operation(to, ("f32", "f32"), lambda a, b: (half(a).astype(U32) << U32(16)) | half(b).astype(U32))
    if "x2" in to + source:
        raise UnknownOpcode(f"cvt.{to}.{source}")
    if source[0] in "fb" and "f" in source and to[0] in "us":
        return Operation(to, (source,), partial(_to_integer, kind=kind, source=source, rounding=rounding))

    def compute(a: Values) -> Values:
        x = from_bf16(a) if source == "bf16" else a
        if rounding is not None:
            x = rounding(x)
        return to_bf16(x.astype(np.float32)) if to == "bf16" else x.astype(kind)

    return Operation(to, (source,), compute)


def _to_integer(a: Values, kind: np.dtype, source: str, rounding: Callable[[Values], Values] | None) -> Values:
    """Round to an integer, clamped to its range; what a NaN gives is in the ISA's table."""
    x = from_bf16(a) if source == "bf16" else a
    rounded = (rounding or np.trunc)(x.astype(np.float64))
    info = np.iinfo(kind)
    inside = (rounded >= float(info.min)) & (rounded < float(info.max) + (info.bits < 53))
    clamped = np.where(rounded > 0, kind.type(info.max), kind.type(info.min))
    of_nan = 1 << (info.bits - 1) if source == "f64" or info.bits == 64 else 0
    of_nan = info.min if of_nan and info.min < 0 else of_nan
    out = np.where(inside, np.where(inside, rounded, 0.0).astype(kind), clamped)
    return np.where(np.isnan(x), kind.type(of_nan), out)


# --- literals ---


def literal(text: str, kind: str) -> Values:
    """Read a constant of an instruction: 0f and 0d are the bits of a float, the rest integers of any type."""
    dtype = TYPES[kind]
    if kind == "pred":
        return np.full((1, 1), bool(int(text)))
    bits = np.dtype(f"u{dtype.itemsize}")
    floats = re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text)
    if floats:
        value = int(floats[1], 16)
        if dtype.kind == "f" and 8 * dtype.itemsize != 4 * len(floats[1]):
            raise UnknownOpcode(f"literal {text} of type {kind}")
    elif re.fullmatch(r"-?\d+\.\d*", text):
        return np.full((1, 1), float(text), dtype)
    else:
        value = int(text.rstrip("U"), 0)
    return np.full((1, 1), value & (2 ** (8 * bits.itemsize) - 1), bits).view(dtype)
