"""The numbers of the Specs and losses that a row hands to `correct` and `policy_loss`, and a change of one of them.

They are noted and changed at the call, whoever made them: a preset, a recipe, a reader or a drop-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

from conformance.aims import Number, Where
from rollout_corr.api import correct, policy_loss

Change = Callable[[float], float]
CHANGES: dict[str, Change] = {"1 %": lambda value: value * 1.01 if value else 0.01, "sign": lambda value: -value}


class Planter:
    """Stands before `correct` and `policy_loss`, and changes one number of what they are given."""

    def __init__(self) -> None:
        self.found: dict[Where, Number] = {}
        self.plant: tuple[Where, Change] | None = None

    def change(self, name: str, thing: Any) -> Any:
        """Note the numbers of an argument; return it with the one that is to be changed."""
        own = {(name, *path): number for path, number in numbers(thing)}
        self.found.update(own)
        if self.plant is None or self.plant[0] not in own:
            return thing
        path, change = self.plant
        try:
            return changed(thing, path[1:], change)
        except (ValueError, TypeError):
            # No Spec and no loss: who wrote it would have seen that.
            return thing

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Stand there in every module that has imported the two, or does so meanwhile."""
        pairs = [(x, self._before(x)) for x in (correct.correct, policy_loss.policy_loss)]
        for original, own in pairs:
            _replace(original, own)
        try:
            yield
        finally:
            for original, own in pairs:
                _replace(own, original)

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*given: Any, **named: Any) -> Any:
            if original.__name__ == "policy_loss" and len(given) > 3:
                given = (*given[:3], self.change("loss", given[3]), *given[4:])
            for name in ("loss", "spec"):
                if named.get(name) is not None:
                    named[name] = self.change(name, named[name])
            return original(*given, **named)

        return call


def _replace(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(function.__name__) is function:
            setattr(module, function.__name__, other)


def numbers(thing: Any, path: Where = (), owner: Any = None) -> Iterator[tuple[Where, Number]]:
    """The numbers of a Spec or a loss, with where they stand in it."""
    if isinstance(thing, (int, float)) and not isinstance(thing, bool):
        yield path, Number(float(thing), owner)
    elif is_dataclass(thing):
        for each in fields(thing):
            if each.init:
                yield from numbers(getattr(thing, each.name), (*path, each.name), thing)
    elif isinstance(thing, tuple):
        for place, value in enumerate(thing):
            yield from numbers(value, (*path, place), owner)


def changed(thing: Any, path: Where, change: Change) -> Any:
    """Copy a Spec or a loss with one number changed."""
    if not path:
        return change(float(thing))
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return (*thing[:first], changed(thing[first], rest, change), *thing[first + 1 :])
    return replace(thing, **{first: changed(getattr(thing, first), rest, change)})
