"""Batches that tell: those on which a change of a number, by 1 % or in sign, is noticed.

The numbers are those of the Specs and losses that a row's side of this package hands to `correct` and `policy_loss`.
They are noted and changed at the call, whoever made them: a preset, a recipe, a reader or a drop-in. A recording holds
such batches for each of them, so that what is compared with it cannot change by so much unseen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from itertools import islice
from random import Random
from typing import Any

from torch import Tensor

from conformance.aims import Aim, Number, Where, aimed, aims_at, parted
from conformance.batches import Batch, batch
from conformance.rows import Result, Row, Tally, expected
from rollout_corr.api import correct, policy_loss

Change = Callable[[float], float]
CHANGES: dict[str, Change] = {"1 %": lambda value: value * 1.01 if value else 0.01, "sign": lambda value: -value}
# How many aims are tried until a change of a number is taken not to show.
ENOUGH = 3
# How many settings are drawn to find one under which it is noticed.
TRIES = 40
# Between a number and 1.01 of it, and on the other side.
NEARBY = (0.005, -0.005)


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


def aimed_batch(row: Row, settings: dict[str, Any], seed: int) -> Batch:
    """Make a batch in which the numbers of a row act, on one side of them or the other."""
    rng, planter = Random(f"aimed-{seed}"), Planter()
    with planter.standing():
        row.ours(batch("mild", 0), dict(settings))
    aims = aims_at(planter.found, rng.choice((-1, 1)) * rng.uniform(0.003, 0.009))
    parts = parted(aim for own in aims.values() for aim in own)
    return aimed(rng.choice(parts), seed) if parts else replace(batch("mild", seed), kind="aimed")


def telling(row: Row, drawn: Iterable[dict[str, Any]]) -> Iterator[tuple[list[Aim], dict[str, Any]]]:
    """Choose the aims at which changes of the numbers are noticed, with the settings: as few batches as do."""
    tried, planter, mild = Counter[tuple[Where, str]](), Planter(), batch("mild", 0)
    with planter.standing():
        for settings in drawn:
            planter.plant, planter.found = None, {}
            row.ours(mild, dict(settings))
            by_path = aims_at(planter.found, *NEARBY)
            plants = [(path, name) for path in by_path for name in CHANGES if tried[path, name] < TRIES]
            for part in parted(aim for path, _ in plants for aim in by_path[path]):
                given, chosen = aimed(part), dict[tuple[Where, str], Aim]()
                planter.plant = None
                plain = row.ours(given, dict(settings))
                noticed = partial(_noticed, row, settings, planter, {})
                for path, name in plants:
                    own = set(by_path[path]) & set(part)
                    if tried[path, name] >= TRIES or not own:
                        continue
                    planter.plant = plant = path, CHANGES[name]
                    shown = [part[place // 2] for place in _showing(row, given, settings, plain)]
                    tried[path, name] += 1
                    # One that is chosen already, or else one that was made for this number.
                    made = dict.fromkeys(aim for aims in (chosen.values(), own) for aim in shown if aim in aims)
                    if first := next((aim for aim in islice(made, ENOUGH) if noticed(plant, [aim])), None):
                        chosen[path, name] = first
                        tried[path, name] = TRIES
                together = list(dict.fromkeys(chosen.values()))
                if chosen:
                    yield together, settings
                # A change that the other aims of a batch hide gets a batch of its own.
                alone = (aim for (path, name), aim in chosen.items() if not noticed((path, CHANGES[name]), together))
                yield from (([aim], settings) for aim in dict.fromkeys(alone))


def _noticed(
    row: Row,
    settings: dict[str, Any],
    planter: Planter,
    kept: dict[tuple[Aim, ...], Result],
    plant: tuple[Where, Change],
    aims: list[Aim],
) -> bool:
    """Tell whether the row differs undeclared on a batch of aims with a change, and `kept` is the framework's side."""
    planter.plant, given, tally = None, aimed(aims), Tally(row.title)
    if (key := tuple(aims)) not in kept:
        kept[key] = expected(row, given, settings)
    planter.plant = plant
    tally.add(row, given, settings, kept[key])
    return bool(tally.undeclared)


def _showing(row: Row, given: Batch, settings: dict[str, Any], plain: Result) -> list[int]:
    """The sequences at which results differ from those without a change."""
    try:
        found = row.ours(given, dict(settings))
    except Exception:  # noqa: BLE001 - a planted number may be refused by any check, with an exception of its own
        # Batches without an aim meet that too: no aim is needed for it.
        return []
    made: set[int] = set()
    rows, tensors = len(given.mask), False
    for name, value in plain.items():
        other = found.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and len(value) == len(other) == rows:
            tensors = True
            a, b = value.double().flatten(1), other.double().flatten(1)
            scale = a.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True)
            made |= set(((a - b).abs() > 1e-6 * scale).any(1).nonzero().flatten().tolist())
    numbers = [(value, found.get(name)) for name, value in plain.items() if isinstance(value, float)]
    if not tensors and any(other is None or abs(value - other) > 1e-6 * abs(value) for value, other in numbers):
        return list(range(rows))
    return sorted(made)
