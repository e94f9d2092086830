"""Settings: the frozen types, presets, recipes and configurations, with garbage for values and misspelled keys.

What is accepted has to hold what was given, and to survive repr, pickle and plain data. What is refused is a ValueError
or TypeError that names an argument.
"""

from __future__ import annotations

import decimal
import fractions
import inspect
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import NamedTuple

import numpy as np
import torch

import rollout_corr as rc
from attack.campaign import Area, Outcome
from rollout_corr.frameworks.shared import lookup
from rollout_corr.specs.checked import Checked

TYPES = [value for name in rc.__all__ if isinstance(value := getattr(rc, name), type) and issubclass(value, Checked)]
# What a repr may name.
NAMES = {kind.__name__: kind for kind in TYPES} | {"inf": math.inf}
CONFIGURED = lookup.readable("read")

# Arguments that are names of the caller's own.
ANY_WORD = ("label", "name")

CYCLE: list[object] = []
CYCLE.append(CYCLE)
NUMBERS = (0, 1, -1, 2.0, 0.5, 1.01, 20.0, 1e-4, 5e-324, 1e308, -0.0, math.inf, -math.inf, math.nan, 10**30, 10**400)
NUMBERS += (np.float32(2.0), np.float64("nan"), np.int64(3), fractions.Fraction(1, 3), fractions.Fraction(10**400))
WORDS = ("token", "product", "geometric", "sequence", "mask", "zero", "batch", "k1", "ratio", "mean", "native", "verl")
WORDS += (
    "2.0",
    "0.5_5.0",
    "truncate",
    "Token",
    "nan",
    "null",
    "",
    "toke\u0144",
    "\ud800",
    "a\nb",
    "\x00",
    "/",
    "x" * 5000,
)
OTHERS = (None, True, False, b"token", [], {}, (), (1, 2), [0.5, [2]], {"lower": 1}, {1: 2}, CYCLE, object(), 1j, len)
OTHERS += (
    decimal.Decimal(2),
    torch.tensor(2.0),
    torch.tensor([1.0, 2.0]),
    np.ones(2),
    np.bool_(True),
    range(3),
    int,
    ...,
)


def garbage(rng: random.Random) -> object:
    """Draw a value that a field may or may not take."""
    return rng.choice(rng.choice((NUMBERS, WORDS, OTHERS)))


def misspelled(rng: random.Random, name: str) -> str:
    """A name with one letter doubled, lost or exchanged."""
    at = rng.randrange(len(name))
    return name[:at] + rng.choice((name[at] * 2, "", "x", name[at].upper())) + name[at + 1 :]


def arguments(rng: random.Random, known: dict[str, object]) -> dict[str, object]:
    """Draw some arguments, of which one name may be misspelled; what has no default is always given."""
    chosen = {name for name, default in known.items() if default is MISSING or rng.random() < 2 / len(known)}
    given = {name: garbage(rng) for name in known if name in chosen}
    # A required argument is often right, so that the others are looked at.
    for name in given:
        if name in ("over", "stat") and rng.random() < 0.8:
            given[name] = {"over": "token", "stat": "ratio"}[name]
    if rng.random() < 0.15:
        name = misspelled(rng, rng.choice(list(known)))
        if name.isidentifier():
            given[name] = garbage(rng)
    return given


def parameters(function: Callable[..., object]) -> dict[str, object]:
    """The named parameters of a function, with their defaults."""
    found = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    return {
        one.name: MISSING if one.default is empty else one.default
        for one in found
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }


class Door(NamedTuple):
    """A call: its name, what it is given, and the names of arguments that an error may name."""

    name: str
    call: Callable[[dict[str, object]], object]
    given: dict[str, object]
    known: set[str]


def defaults(cls: type) -> dict[str, object]:
    """The fields of a frozen type, with their defaults."""
    return {one.name: one.default for one in fields(cls) if one.init}


def door_of(rng: random.Random) -> Door:
    """Draw a door and what it is given."""
    kind = rng.choice(("type", "type", "dict", "name", "recipe", "config", "config"))
    if kind == "type":
        cls = rng.choice(TYPES)
        known = defaults(cls)
        given = arguments(rng, known)
        return Door(cls.__name__, lambda given: cls(**given), given, {*given, *known})
    if kind == "dict":
        given = arguments(rng, defaults(rc.Spec))
        weight, criterion = arguments(rng, defaults(rc.Weight)), arguments(rng, defaults(rc.Criterion))
        known = {*given, *weight, *criterion, *defaults(rc.Spec), *defaults(rc.Weight), *defaults(rc.Criterion)}
        given |= {"weight": weight} if rng.random() < 0.7 else {}
        given |= {"criteria": [criterion]} if rng.random() < 0.7 else {}
        return Door("Spec.from_dict", rc.Spec.from_dict, given, known)
    if kind == "name":
        found = rng.choice(lookup.every_preset())
        given = arguments(rng, found.settings or {"upper": 2.0})
        return Door(f"spec {found.name}", lambda given: rc.spec(found.name, **given), given, set(given))
    if kind == "recipe":
        name, recipe = rng.choice(list(lookup.every_recipe().items()))
        given = arguments(rng, dict(recipe.settings) or {"clip": 0.2})
        return Door(f"recipe {name}", lambda given: rc.recipe(name, **given), given, set(given))
    framework = rng.choice(CONFIGURED)
    module = lookup.part(framework)
    known = getattr(module, "KNOWN", None) or (parameters(module.spec) if hasattr(module, "spec") else ("eps_clip",))
    given = arguments(rng, dict.fromkeys(known))
    return Door(f"spec({framework!r})", lambda given: rc.spec(framework, given), given, {*given, *known})


def broken(made: object, door: Door) -> str:
    """Say what is wrong with something that was accepted; empty: nothing."""
    for value in made.values() if isinstance(made, dict) else (made,):
        if not isinstance(value, Checked):
            continue
        if pickle.loads(pickle.dumps(value)) != value or hash(value) != hash(pickle.loads(pickle.dumps(value))):
            return f"{value!r} is not itself after pickling"
        if eval(repr(value), dict(NAMES)) != value:
            return f"the repr {value!r} makes something else"
        if isinstance(value, rc.Spec) and (rc.Spec.from_dict(value.to_dict()) != value or not value.explain()):
            return f"{value!r} is not itself after to_dict"
    if door.name == type(made).__name__:
        for name, value in door.given.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and getattr(made, name) != float(value):
                return f"{name}={value!r} became {getattr(made, name)!r}"
    for name in door.given:
        # A framework's configuration says much about what is off, and that is not read.
        if name in ANY_WORD or door.name.startswith("spec(") or isinstance(door.given[name], (dict, list)):
            continue
        try:
            door.call({**door.given, name: "no such word"})
        except (TypeError, ValueError):
            continue
        return f"{name}='no such word' is accepted too"
    return ""


def attempt(seed: int) -> Outcome:
    """Give a door what it may not expect."""
    door = door_of(random.Random(seed))
    told = f"{door.name} given {door.given!r:.1000}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # old names say so
        try:
            made = door.call(door.given)
        except (TypeError, ValueError) as error:
            line = str(error)
            # Of a setting within a section, its own name.
            if any(name.rpartition(".")[2] in line for name in door.known) or not door.given:
                return Outcome("refused", line)
            return Outcome("wrong", f"{told}: no argument is named: {line}")
    found = broken(made, door)
    return Outcome("wrong", f"{told}: {found}") if found else Outcome("right")


AREA = Area("settings", "settings", attempt, count=20_000, few=50)
