"""Checks of arguments, with the name that the framework gives them in the message."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real


def one_of(key: str, value: object, options: Iterable[str], *, or_null: bool = False) -> str:
    """One of a few names."""
    options = list(options)
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{key}: expected {'null or ' if or_null else ''}one of {options}, got {value!r}")
    return value


def number(key: str, value: object) -> float:
    """A number that is not NaN; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{key}: expected a number, got {type(value).__name__} {value!r}")
    if math.isnan(value):
        raise ValueError(f"{key}: expected a number, got nan")
    return float(value)


def positive(key: str, value: object) -> float:
    """A number > 0, or infinity."""
    found = number(key, value)
    if not found > 0.0:
        raise ValueError(f"{key}: expected a number > 0, got {value!r}")
    return found


def not_negative(key: str, value: object) -> float:
    """A number >= 0: as a lower bound of a ratio, 0 leaves the side open."""
    found = number(key, value)
    if found < 0.0:
        raise ValueError(f"{key}: expected a number >= 0, got {value!r}")
    return found
