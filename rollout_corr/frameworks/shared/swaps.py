"""The replacement of one function: what it must look like, and what stands in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import Signature
from typing import Any, NamedTuple

from rollout_corr.frameworks.shared import signatures
from rollout_corr.frameworks.shared.places import MISSING, Place

Function = Callable[..., Any]


class Target(NamedTuple):
    """A function of the framework and its replacement.

    Attributes:
        module: Where the framework defines it.
        name: Its name there; "Class.method" for a method.
        ours: Takes the framework's arguments: names, order, kinds and defaults are the same. The drop-in's switches are
            keyword-only and have defaults.
        takes_original: `ours` is a factory: it is given the framework's function and the switches, and returns the
            replacement.
        also: Functions with other signatures that versions of the framework have. Where their order is another, a call
            is handed to `ours` by name; a default that the call leaves out is that of `ours`.
    """

    module: str
    name: str
    ours: Function
    takes_original: bool = False
    also: tuple[Function, ...] = ()

    @property
    def path(self) -> str:
        """Full name of the function."""
        return f"{self.module}.{self.name}"


class Live:
    """Tells the replacements of one installation whether they still replace."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = True


class Swap(NamedTuple):
    """A replacement that is made and not yet put anywhere.

    Attributes:
        target: What is replaced.
        place: Where the framework defines it; None for a function that its module had before it was reloaded.
        original: What stands there, as it is defined: a staticmethod maybe.
        ours: The replacement, of the same kind.
    """

    target: Target
    place: Place | None
    original: Any
    ours: Any

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return the original and its replacement, and the functions in them if they are staticmethods."""
        if isinstance(self.original, staticmethod):
            return [(self.original, self.ours), (self.original.__func__, self.ours.__func__)]
        return [(self.original, self.ours)]


def swap_of(
    target: Target, place: Place | None, original: Any, switches: Mapping[str, object], live: Live
) -> Swap | str:
    """Make the replacement of a function, or say in words why it does not fit."""
    static = isinstance(original, staticmethod)
    plain = original.__func__ if static else original
    if plain is MISSING or plain is None:
        return "is missing"
    ours, given = target.ours, switches
    if target.takes_original and callable(plain):
        ours, given = target.ours(plain, **switches), {}
    expected = [signatures.expected_of(function) for function in (ours, *target.also)]
    problem = signatures.difference(plain, expected)
    if problem is not None:
        return problem
    theirs = signatures.matching(plain, expected)
    names = list(theirs.parameters)
    in_order = names == list(expected[0].parameters)[: len(names)]
    made = _standing_in(plain, ours, given, live, None if in_order else theirs)
    return Swap(target, place, original, staticmethod(made) if static else made)


def _standing_in(
    original: Function, ours: Function, switches: Mapping[str, object], live: Live, theirs: Signature | None
) -> Function:
    """Make the replacement: a new function for each installation, so that every place that holds it can be found again.

    It has the name of the original, so a pickle of it refers to whatever function the other process has there.

    Args:
        original: The framework's.
        ours: What is called instead.
        switches: Keywords for it.
        live: Tells whether it is called instead.
        theirs: A signature whose order differs from that of `ours`: arguments are handed over by name.
    """

    @functools.wraps(original)
    def standing_in(*args: Any, **kwargs: Any) -> Any:
        if live.on:
            return ours(*args, **kwargs, **switches)
        return original(*args, **kwargs)

    @functools.wraps(original)
    def by_name(*args: Any, **kwargs: Any) -> Any:
        if live.on and theirs is not None:
            return ours(**theirs.bind(*args, **kwargs).arguments, **switches)
        return original(*args, **kwargs)

    return standing_in if theirs is None else by_name
