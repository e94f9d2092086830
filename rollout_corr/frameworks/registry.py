"""Where the recipes are listed: their names, what they match, how they are built, and what old names are now called."""

from __future__ import annotations

import difflib
import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from rollout_corr.spec.correction import Spec

P = ParamSpec("P")


@dataclass(frozen=True)
class Recipe:
    """One listed recipe.

    Args:
        name: "framework.recipe".
        build: Makes the Spec.
        matches: The version of the framework whose numbers it gives.
        write: For an old name, the line to write now; empty for a current one.
    """

    name: str
    build: Callable[..., Spec]
    matches: str
    write: str = ""


PACKAGE = __name__.partition(".")[0]

RECIPES: dict[str, Recipe] = {}
OLD_NAMES: dict[str, Recipe] = {}

_warned: set[tuple[str, ...]] = set()


def warn_once(key: tuple[str, ...], message: str) -> None:
    """Warn the first time that `key` comes by in this process: a training loop may read its settings every step."""
    if key in _warned:
        return
    _warned.add(key)
    # Point at the line outside of this package that has to change, however deep the reading went.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def recipe(matches: str) -> Callable[[Callable[P, Spec]], Callable[P, Spec]]:
    """List a function under "framework.function", and let its errors say which recipe was asked for.

    Args:
        matches: The version of the framework whose numbers it gives.
    """

    def register(function: Callable[P, Spec]) -> Callable[P, Spec]:
        name = _name(function)
        build = _naming_itself(name, function)
        RECIPES[name] = Recipe(name, build, matches)
        return build

    return register


def old_name(matches: str, write: str) -> Callable[[Callable[P, Spec]], Callable[P, Spec]]:
    """List a function as the old name of a recipe: it works, and warns once with the line to write instead.

    Args:
        matches: The versions of the framework that had the name.
        write: The new line.
    """

    def register(function: Callable[P, Spec]) -> Callable[P, Spec]:
        name = _name(function)
        inner = _naming_itself(name, function)

        @functools.wraps(function)
        def build(*args: P.args, **kwargs: P.kwargs) -> Spec:
            warn_once(("preset", name), f"preset {name} is an old name ({matches}); write {write}")
            return inner(*args, **kwargs)

        OLD_NAMES[name] = Recipe(name, build, matches, write)
        return build

    return register


def _name(function: Callable[..., Spec]) -> str:
    # rollout_corr.frameworks.NAME, or NAME.presets
    return f"{function.__module__.split('.')[2]}.{function.__name__}"


def _naming_itself(name: str, function: Callable[P, Spec]) -> Callable[P, Spec]:
    @functools.wraps(function)
    def build(*args: P.args, **kwargs: P.kwargs) -> Spec:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            given = ", ".join([*(repr(value) for value in args), *(f"{key}={kwargs[key]!r}" for key in kwargs)])
            message = f"preset {name}({given}): {error}"
            raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error

    return build


def names() -> list[str]:
    """Every recipe as "framework.recipe", sorted. Old names work too, but are not listed."""
    return sorted(RECIPES)


def preset(name: str, /, **arguments: object) -> Spec:
    """Build a recipe by its framework's own name for it.

    Args:
        name: "framework.recipe", one of `names()` or an old name.
        **arguments: What the recipe takes.

    Returns:
        The Spec.

    Raises:
        ValueError: An unknown name (with the closest ones) or a wrong value.
        TypeError: An argument that the recipe does not take, or a value of the wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"preset: expected a name such as 'verl.decoupled_token_is', got {type(name).__name__} {name!r}"
        )
    found = RECIPES.get(name) or OLD_NAMES.get(name)
    if found is None:
        raise ValueError(f"preset: unknown name {name!r}{_closest(name)}; rollout_corr.presets.names() lists them all")
    return found.build(**arguments)


def _closest(name: str) -> str:
    known = [*names(), *sorted(OLD_NAMES)]
    last = name.rpartition(".")[2]
    same_recipe = [other for other in known if other.rpartition(".")[2] == last]
    close = list(dict.fromkeys([*same_recipe, *difflib.get_close_matches(name, known, n=3)]))[:3]
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""
