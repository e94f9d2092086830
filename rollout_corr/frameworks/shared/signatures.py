"""Comparing the parameters of a framework's function with those that ours was written for: names, kinds, defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from itertools import zip_longest
from typing import Any

Function = Callable[..., Any]

# Defaults of these types are compared by value. Others are the same only if they are one object.
PLAIN = {bool, int, float, str, type(None)}


def expected_of(function: Function, also: int | None = None) -> list[Signature]:
    """Return the signatures that the framework's function may have: ours without switches, or `also` first parameters.

    A keyword-only parameter with a default is a switch, and so is what `**switches` takes.
    """
    kept = [
        Parameter(p.name, p.kind, default=p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is not Parameter.VAR_KEYWORD
        and (p.kind is not Parameter.KEYWORD_ONLY or p.default is Parameter.empty)
    ]
    return [Signature(kept)] if also is None else [Signature(kept), Signature(kept[:also])]


def difference(found: object, expected: Sequence[Signature]) -> str | None:
    """Say how the framework's function differs from the signatures that it may have; None: it has one of them."""
    if inspect.isclass(found) or not callable(found):
        return f"is no function, but {'a class' if inspect.isclass(found) else f'of type {type(found).__name__}'}"
    try:
        inner = inspect.unwrap(found)
        theirs = visible(found)
    except (TypeError, ValueError):
        return f"has no signature that could be compared, expected {_shown(expected[0])}"
    if any(test(inner) for test in (inspect.iscoroutinefunction, inspect.isgeneratorfunction)):
        return "is a coroutine or a generator function, expected a plain one"
    differ = [_first_difference(theirs, signature) for signature in expected]
    if None in differ:
        return None
    others = "".join(f" or {_shown(signature)}" for signature in expected[1:])
    return f"takes {_shown(theirs)}, expected {_shown(expected[0])}{others}: they differ at {differ[0]!r}"


def visible(function: Function) -> Signature:
    """Return the signature that a call has to obey.

    A decorator that hands everything on, by (*args, **kwargs) behind its own parameters, has the signature of the
    function that it wraps. Any other signature of its own counts, also where functools.wraps hides it.
    """
    signature = inspect.signature(function, follow_wrapped=False)
    wrapped = getattr(function, "__wrapped__", None)
    last = [parameter.kind for parameter in signature.parameters.values()][-2:]
    hands_on = last == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    return signature if wrapped is None or not hands_on else visible(wrapped)


def _shown(signature: Signature) -> str:
    return str(Signature([p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]))


def _first_difference(found: Signature, expected: Signature) -> str | None:
    """Name the first parameter in which two signatures differ."""
    for x, y in zip_longest(found.parameters.values(), expected.parameters.values()):
        if x is None or y is None or (x.name, x.kind) != (y.name, y.kind) or not _same(x.default, y.default):
            return str((x or y).name)
    return None


def _same(x: object, y: object) -> bool:
    kinds = {type(x), type(y)}
    return x is y or ((len(kinds) == 1 or kinds == {int, float}) and kinds <= PLAIN and x == y)
