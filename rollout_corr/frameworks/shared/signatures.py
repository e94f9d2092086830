"""Comparing the parameters of a framework's function with those that ours was written for: names, kinds, defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

Function = Callable[..., Any]

# Defaults of these types are compared by value. Others are the same only if they are one object.
PLAIN = (bool, int, float, str, type(None))

KINDS = {
    Parameter.POSITIONAL_ONLY: "positional-only",
    Parameter.POSITIONAL_OR_KEYWORD: "positional or keyword",
    Parameter.VAR_POSITIONAL: "*",
    Parameter.KEYWORD_ONLY: "keyword-only",
    Parameter.VAR_KEYWORD: "**",
}
SPECIAL = {
    "a coroutine function": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}


def expected_of(function: Function) -> Signature:
    """Return the signature that the framework's function has to have: ours without switches.

    A keyword-only parameter with a default is a switch, and so is what `**switches` takes.
    """
    kept = [
        Parameter(p.name, p.kind, default=p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is not Parameter.VAR_KEYWORD
        and (p.kind is not Parameter.KEYWORD_ONLY or p.default is Parameter.empty)
    ]
    return Signature(kept)


def difference(found: object, expected: Sequence[Signature]) -> str | None:
    """Compare a function with the signatures that it may have.

    Args:
        found: The framework's: a function, a decorated one, or whatever stands in its place.
        expected: Signatures, one of which it should have.

    Returns:
        None if it fits, else in words how it differs from the first.
    """
    if inspect.isclass(found) or not callable(found):
        return f"is no function, but {'a class' if inspect.isclass(found) else f'of type {type(found).__name__}'}"
    try:
        inner = inspect.unwrap(found)
        theirs = visible(found)
    except (TypeError, ValueError):
        return f"has no signature that could be compared, expected {shown(expected[0])}"
    for words, test in SPECIAL.items():
        if test(inner):
            return f"is {words}, expected a plain one"
    differences = [_difference(theirs, signature) for signature in expected]
    if None in differences:
        return None
    others = "".join(f" or {shown(signature)}" for signature in expected[1:])
    return f"takes {shown(theirs)}, expected {shown(expected[0])}{others}: {differences[0]}"


def matching(found: Function, expected: Sequence[Signature]) -> Signature:
    """Return the signature among those expected that a function has."""
    theirs = visible(found)
    return next(signature for signature in expected if _difference(theirs, signature) is None)


def visible(function: Function) -> Signature:
    """Return the signature that a call has to obey.

    A decorator that hands everything on, by (*args, **kwargs) behind some of the first parameters, has that of what it
    wraps. Any other signature of its own counts, also where functools.wraps hides it.
    """
    while True:
        signature = inspect.signature(function, follow_wrapped=False)
        wrapped = getattr(function, "__wrapped__", None)
        *first, args, kwargs = [None, None, *signature.parameters.values()]
        if wrapped is None or args is None or kwargs is None:
            return signature
        if (args.kind, kwargs.kind) != (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            return signature
        named = [parameter.name for parameter in first if parameter is not None]
        if named != list(inspect.signature(wrapped, follow_wrapped=False).parameters)[: len(named)]:
            return signature
        function = wrapped


def shown(signature: Signature) -> str:
    """Return a signature as text, without annotations; a default that is no plain value is shown as its type."""
    parameters = [
        p.replace(annotation=Parameter.empty, default=p.default if _plain(p.default) else _Shown(p.default))
        for p in signature.parameters.values()
    ]
    return str(Signature(parameters))


class _Shown:
    """A default that may not be printed as it is: its own text can be long, or raise."""

    def __init__(self, default: object) -> None:
        self.text = f"<{type(default).__name__}>"

    def __repr__(self) -> str:
        return self.text


def _plain(default: object) -> bool:
    return default is Parameter.empty or type(default) in PLAIN


def _difference(found: Signature, expected: Signature) -> str | None:
    theirs, ours = list(found.parameters.values()), list(expected.parameters.values())
    for number, (x, y) in enumerate(zip(theirs, ours, strict=False), start=1):
        if x.name != y.name:
            order = ", which stands elsewhere" if x.name in expected.parameters else ""
            return f"parameter {number} is {x.name!r}{order}, expected {y.name!r}"
        if x.kind is not y.kind:
            return f"parameter {x.name!r} is {KINDS[x.kind]}, expected {KINDS[y.kind]}"
        if not _same(x.default, y.default):
            return f"parameter {x.name!r} has {_default(x)}, expected {_default(y)}"
    if len(theirs) > len(ours):
        return f"parameter {len(ours) + 1} is {theirs[len(ours)].name!r}, expected none"
    if len(theirs) < len(ours):
        return f"parameter {ours[len(theirs)].name!r} is missing"
    return None


def _same(x: object, y: object) -> bool:
    if x is y:
        return True
    numbers = type(x) in (int, float) and type(y) in (int, float)
    return (numbers or (type(x) is type(y) and type(x) in PLAIN)) and x == y


def _default(parameter: Parameter) -> str:
    if parameter.default is Parameter.empty:
        return "no default"
    return f"the default {parameter.default if _plain(parameter.default) else _Shown(parameter.default)!r}"
