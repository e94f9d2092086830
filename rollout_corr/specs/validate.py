"""Validation of values: errors name the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Rational, Real
from types import MappingProxyType
from typing import TypeVar

Choice = TypeVar("Choice", bound=str)
Error = TypeVar("Error", bound=Exception)

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


def of_key(error: Error, key: str, got: object = None, wanted: str = "") -> Error:
    """Attach to an error the argument or setting that is wrong.

    Its attributes are `key`, what it was `given`, what was `wanted`, and `why`, the message without the key.
    """
    values = got if isinstance(got, (tuple, list)) else (got,)
    # An error may be pickled, and what is no plain value may not.
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
    error.__dict__.update(
        key=key, given=got if plain else shown(got), wanted=wanted, why=str(error).removeprefix(f"{key}: ")
    )
    return error


def wrong_value(name: str, wanted: str, value: object, hint: str = "") -> ValueError:
    """Make the error for a wrong value."""
    return of_key(ValueError(f"{name}: expected {wanted}, got {shown(value)}{hint}"), name, value, wanted)


def wrong_type(name: str, wanted: str, value: object) -> TypeError:
    """Make the error for a value of the wrong type."""
    got = f"the string {value!r}" if isinstance(value, str) and wanted == "a number" else None
    return of_key(
        TypeError(f"{name}: expected {wanted}, got {got or f'{type(value).__name__} {shown(value)}'}"),
        name,
        value,
        wanted,
    )


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
        raise wrong_value(name, f"one of {list(options)}", value, hint)


def one_of(name: str, value: object, options: Iterable[Choice], *, or_null: bool = False) -> Choice:
    """Return the option that a value of a configuration equals; ValueError for everything else.

    With `or_null` the error says that null is accepted too; the caller has handled it.
    """
    options = list(options)
    for option in options:
        if isinstance(value, str) and value == option:
            return option
    raise wrong_value(name, f"{'null or ' if or_null else ''}one of {options}", value)


def beyond_float32(value: object) -> bool:
    """Whether a number is finite and above what float32 holds, on either side."""
    return isinstance(value, (int, float)) and LARGEST_FLOAT32 < abs(value) < math.inf


def number(name: str, value: object) -> float:
    """Return a number as a float; NaN, booleans, strings and finite numbers beyond the floats are refused."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, "a number", value)
    try:
        converted = float(value)
    except OverflowError as error:
        raise wrong_value(name, "a number that a float holds", value) from error
    # NumPy's long double has numbers beyond the floats and turns them into infinity.
    if abs(converted) == math.inf and value != converted:
        raise wrong_value(name, "a number that a float holds", value)
    # Not math.isnan: inside a compiled function a threshold may be a symbol.
    if converted != converted:
        raise wrong_value(name, "a number", converted)
    return converted


def positive(name: str, value: object, most: float = math.inf, *, finite: bool = True) -> float:
    """Return a number > 0, at most `most`, as a float; infinity only with finite=False."""
    converted = number(name, value)
    if not 0.0 < converted <= most or (finite and converted == math.inf):
        limit = "" if math.isinf(most) else f" and <= {most:g}"
        raise wrong_value(name, f"a {'finite ' if finite else ''}number > 0{limit}", converted)
    return converted


def not_negative(name: str, value: object) -> float:
    """Return a number >= 0 as a float."""
    converted = number(name, value)
    if converted < 0.0:
        raise wrong_value(name, "a number >= 0", converted)
    return converted


def bounds(
    owner: str, lower: object, upper: object, *, signed: bool, ratio: bool = False, clamps: bool = False
) -> tuple[float | None, float | None]:
    """Return lower and upper bound as floats, in order; None leaves a side open.

    Bounds of a `ratio` may be logs by mistake. What `clamps` to its bounds becomes a lower one, which has to be finite.
    """
    low = None if lower is None else _bound(f"{owner}.lower", lower)
    high = None if upper is None else _bound(f"{owner}.upper", upper)
    if not signed:
        if low is not None and low < 0.0:
            raise wrong_value(f"{owner}.lower", "a number >= 0", low, _of_log(low) if ratio else "")
        if high is not None and high <= 0.0:
            raise wrong_value(f"{owner}.upper", "a number > 0", high, _of_log(high) if ratio else "")
    if clamps and low == math.inf:
        raise wrong_value(f"{owner}.lower", "a finite number", low)
    for side, bound in (("lower", low), ("upper", high)):
        # A ratio is clamped to a bound in float32, where a smaller one would be 0.
        if clamps and (beyond_float32(bound) or 0.0 < abs(bound or 0.0) < SMALLEST_FLOAT32):
            raise wrong_value(f"{owner}.{side}", "a number that float32 holds", bound)
    if low is not None and high is not None and low > high:
        error = ValueError(f"{owner}: expected lower <= upper, got lower={low!r}, upper={high!r}")
        raise of_key(error, owner, (low, high), "lower <= upper")
    return low, high


def _of_log(bound: float) -> str:
    return f"; the bounds of a ratio are ratios, not logs: for a log-ratio of {bound!r} pass {math.exp(bound):.6g}"


def _bound(name: str, value: object) -> float:
    if isinstance(value, str) and "_" in value:
        hint = "('low_high' strings are a framework's grammar: use rc.spec)"
        raise of_key(TypeError(f"{name}: expected a number, got the string {value!r} {hint}"), name, value, "a number")
    return number(name, value)
