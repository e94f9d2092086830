"""Validation of values: errors name the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Rational, Real
from types import MappingProxyType
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)

# exp(2 * clamp) has to be finite in float32, because chi2 squares a ratio.
LARGEST_CLAMP = 40.0

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
SMALLEST_FLOAT32 = 2.0**-149


def shown(value: object) -> str:
    """The text of a value in an error. Python does not write an integer of thousands of digits out."""
    if isinstance(value, Rational) and max(abs(int(value.numerator)), int(value.denominator)) >= 1 << 256:
        return f"{'an integer' if isinstance(value, Integral) else 'a fraction'} of many digits"
    try:
        return repr(value)
    except ValueError:
        return "what holds an integer of many digits"


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Make the error for a value of the wrong type."""
    return TypeError(f"{name}: expected {wanted}, got {type(value).__name__} {shown(value)}")


def boolean(name: str, value: object) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)


def choice(name: str, value: object, options: tuple[str, ...], meant: Mapping[str, str] = MappingProxyType({})) -> None:
    """Require one of some strings; `meant` says what to write in place of a wrong one."""
    if not isinstance(value, str):
        raise wrong_type(name, f"one of {list(options)}", value)
    if value not in options:
        hint = f"; write {meant[value]}" if value in meant else ""
        raise ValueError(f"{name}: expected one of {list(options)}, got {shown(value)}{hint}")


def one_of(name: str, value: object, options: Iterable[Choice], *, or_null: bool = False) -> Choice:
    """Return the option that a value of a configuration equals; ValueError for everything else.

    With `or_null` the error says that null is accepted too; the caller has handled it.
    """
    options = list(options)
    for option in options:
        if isinstance(value, str) and value == option:
            return option
    raise ValueError(f"{name}: expected {'null or ' if or_null else ''}one of {options}, got {shown(value)}")


def beyond_float32(value: object) -> bool:
    """Whether a number is finite and above what float32 holds, on either side."""
    return isinstance(value, (int, float)) and LARGEST_FLOAT32 < abs(value) < math.inf


def number(name: str, value: object) -> float:
    """Return a number as a float; NaN, booleans, strings and finite numbers beyond the floats are refused."""
    if isinstance(value, str):
        raise TypeError(f"{name}: expected a number, got the string {value!r}")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, "a number", value)
    try:
        converted = float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: expected a number that a float holds, got {shown(value)}") from error
    # NumPy's long double has numbers beyond the floats and turns them into infinity.
    if abs(converted) == math.inf and value != converted:
        raise ValueError(f"{name}: expected a number that a float holds, got {shown(value)}")
    # Not math.isnan: inside a compiled function a threshold may be a symbol.
    if converted != converted:
        raise ValueError(f"{name}: expected a number, got nan")
    return converted


def positive(name: str, value: object, most: float = math.inf, *, finite: bool = True) -> float:
    """Return a number > 0, at most `most`, as a float; infinity only with finite=False."""
    converted = number(name, value)
    if not 0.0 < converted <= most or (finite and converted == math.inf):
        limit = "" if math.isinf(most) else f" and <= {most:g}"
        raise ValueError(f"{name}: expected a {'finite ' if finite else ''}number > 0{limit}, got {converted!r}")
    return converted


def not_negative(name: str, value: object) -> float:
    """Return a number >= 0 as a float."""
    converted = number(name, value)
    if converted < 0.0:
        raise ValueError(f"{name}: expected a number >= 0, got {converted!r}")
    return converted


def bounds(
    owner: str, lower: object, upper: object, *, signed: bool, ratio: bool = False, clamps: bool = False
) -> tuple[float | None, float | None]:
    """Return lower and upper bound as floats, in order; None leaves a side open.

    Those of a `ratio` may be logs by mistake. What `clamps` to its bounds becomes a lower one, which has to be finite.
    """
    low = None if lower is None else _bound(f"{owner}.lower", lower)
    high = None if upper is None else _bound(f"{owner}.upper", upper)
    if not signed:
        if low is not None and low < 0.0:
            raise ValueError(f"{owner}.lower: expected a number >= 0, got {low!r}{_of_log(low) if ratio else ''}")
        if high is not None and high <= 0.0:
            raise ValueError(f"{owner}.upper: expected a number > 0, got {high!r}{_of_log(high) if ratio else ''}")
    if clamps and low == math.inf:
        raise ValueError(f"{owner}.lower: expected a finite number, got {low!r}")
    for side, bound in (("lower", low), ("upper", high)):
        # A ratio is clamped to a bound in float32, where a smaller one would be 0.
        if clamps and (beyond_float32(bound) or 0.0 < abs(bound or 0.0) < SMALLEST_FLOAT32):
            raise ValueError(f"{owner}.{side}: expected a number that float32 holds, got {bound!r}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{owner}: expected lower <= upper, got lower={low!r}, upper={high!r}")
    return low, high


def _of_log(bound: float) -> str:
    return f"; the bounds of a ratio are ratios, not logs: for a log-ratio of {bound!r} pass {math.exp(bound):.6g}"


def _bound(name: str, value: object) -> float:
    if isinstance(value, str) and "_" in value:
        hint = "('low_high' strings are a framework's grammar: use rc.spec)"
        raise TypeError(f"{name}: expected a number, got the string {value!r} {hint}")
    return number(name, value)
