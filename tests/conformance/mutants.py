"""Plant a change in each number that a row's side of this package uses, and see whether the comparison notices it.

The numbers are the fields of the Specs and losses that a row hands to `correct` and `policy_loss`, whoever made them:
a preset, a recipe, a reader or a drop-in. Rows of metrics and of drop-ins also have those that they return.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any

from conformance.recording import Case
from conformance.rows import Row, Tally
from rollout_corr.api import correct, policy_loss

Path = tuple[str | int, ...]
CHANGES: dict[str, Callable[[float], float]] = {
    "1 %": lambda value: value * 1.01 if value else 0.01,
    "sign": lambda value: -value,
}


@dataclass
class Mutants:
    """What became of the mutants of a row.

    Attributes:
        noticed: How many made it differ where nothing is declared.
        missed: The others: the path of the number, its value, the change.
    """

    row: str
    noticed: int = 0
    missed: list[str] = field(default_factory=list)


class Planter:
    """Stands before `correct` and `policy_loss`, and changes one number of what they are given."""

    def __init__(self) -> None:
        self.found: dict[Path, float] = {}
        self.values: dict[Path, float] = {}
        self.plant: tuple[Path, Callable[[float], float]] | None = None
        self.refused = self.reached = False

    def change(self, name: str, thing: Any) -> Any:
        """Note the numbers of an argument; return it with the one that is to be changed."""
        self.found.update({(name, *path): value for path, value in numbers(thing)})
        if self.plant is None or self.plant[0][0] != name:
            return thing
        path, change = self.plant
        if (name, *path[1:]) not in {(name, *own) for own, _ in numbers(thing)}:
            return thing
        self.reached = True
        try:
            return changed(thing, path[1:], change)
        except (ValueError, TypeError):
            # No Spec and no loss: who wrote it would have seen that.
            self.refused = True
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


def numbers(thing: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """The numbers of a Spec or a loss, with where they stand in it."""
    if isinstance(thing, (int, float)) and not isinstance(thing, bool):
        yield path, float(thing)
    elif is_dataclass(thing):
        for each in fields(thing):
            if each.init:
                yield from numbers(getattr(thing, each.name), (*path, each.name))
    elif isinstance(thing, tuple):
        for place, value in enumerate(thing):
            yield from numbers(value, (*path, place))


def changed(thing: Any, path: Path, change: Callable[[float], float]) -> Any:
    """Copy a Spec or a loss with one number changed."""
    if not path:
        return change(float(thing))
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return (*thing[:first], changed(thing[first], rest, change), *thing[first + 1 :])
    return replace(thing, **{first: changed(getattr(thing, first), rest, change)})


def mutated(row: Row, cases: list[Case]) -> Mutants:
    """Change each number of a row, one at a time, and compare the cases that use it."""
    made, planter = Mutants(row.title), Planter()
    with planter.standing():
        uses: dict[Path, list[Case]] = {}
        for case in cases:
            planter.found = {}
            planter.found.update(_results(row, case))
            planter.values.update(planter.found)
            for path in planter.found:
                uses.setdefault(path, []).append(case)
        for path, using in uses.items():
            for name, change in CHANGES.items():
                if change(planter.values[path]) == planter.values[path]:
                    continue  # infinity, or the sign of 0
                planter.plant = path, change
                outcome = _outcome(row, using, planter)
                if outcome is None:
                    continue
                made.noticed += outcome
                if not outcome:
                    made.missed.append(f"{'.'.join(map(str, path))}: {name}, {len(using)} cases")
    return made


def _results(row: Row, case: Case) -> dict[Path, float]:
    found = row.ours(case.batch, dict(case.settings))
    if row.kind not in ("report", "drop-in"):
        return {}
    return {("result", name): float(x) for name, x in found.items() if isinstance(x, (int, float)) and x == x}


def _outcome(row: Row, cases: list[Case], planter: Planter) -> bool | None:
    """Tell whether a case differs undeclared; None: the number cannot be changed so."""
    path, change = planter.plant or ((), float)
    own = row
    if path[0] == "result":

        def ours(given: Any, settings: Any) -> Mapping[str, Any]:
            found = dict(row.ours(given, settings))
            if path[1] in found:
                found[str(path[1])] = change(float(found[str(path[1])]))
            return found

        own = replace(row, ours=ours)
    refused = Counter[bool]()
    for case in cases:
        tally = Tally(row.title)
        planter.refused = False
        try:
            tally.add(own, *case)
        except Exception:  # noqa: BLE001  (whatever it raises is noticed)
            return True
        refused[planter.refused] += 1
        if tally.undeclared:
            return True
    return False if refused[False] else None
