"""Plant a change in each number that a row's side of this package uses, and see whether the comparison notices it.

Rows of metrics and of drop-ins also have the numbers that they return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from torch import Tensor

from conformance.aims import Aim, aimed, aims_at, parted
from conformance.batches import Batch, batch
from conformance.planting import CHANGES, Change, Number, Planter, Where
from conformance.rows import CLAMP, Result, Row, Tally, expected

if TYPE_CHECKING:
    from conformance.recording import Case

# How many settings are tried until a change of a number is taken not to show.
ENOUGH = 3
# How many settings are drawn to find one under which it is noticed.
TRIES = 40
# Between a number and 1.01 of it, and on the other side.
BESIDE = (0.005, -0.005)

NEARER = "no effect: another bound or clamp acts before it, in every batch that is aimed at it"
# Why a change is not noticed: the path of a number, the rows and owners, the reason. A miss that has none is an error.
REASONS: tuple[tuple[str, Callable[[Row, Any], bool], str], ...] = (
    (
        "spec.criteria.*.eps",
        lambda row, owner: not owner.stat.startswith("binary_kl"),
        "no effect: its statistic has no floor",
    ),
    ("spec.criteria.*", lambda row, owner: getattr(owner, "stat", "") == "age", "no effect: ages are whole numbers"),
    (
        "spec.criteria.*",
        lambda row, owner: getattr(owner, "label", "") == "nonfinite",
        "no effect: no finite log-ratio comes near it",
    ),
    (
        "spec.clamp",
        lambda row, owner: any(known.says == CLAMP.says for known in row.declared),
        "no counterpart: the framework has no such clamp, and what lies beyond ours is declared",
    ),
    (
        "spec.criteria.*",
        lambda row, owner: "luspo" in row.key and any(known.name == "luspo over padding" for known in row.declared),
        "hidden: luspo differs as declared under most settings",
    ),
    ("*.below", lambda row, owner: True, "not aimed at: all tokens of a batch decide the bound"),
    (
        "loss.kl.*",
        lambda row, owner: bool({"luspo over padding", "the KL's ratio"} & {known.name for known in row.declared}),
        "hidden: the framework's KL differs as declared",
    ),
    (
        "*clamp",
        lambda row, owner: any(known.name == CLAMP.name for known in row.declared),
        "no counterpart: the framework has no such clamp, and what lies beyond ours is declared",
    ),
)


@dataclass
class Mutants:
    """Outcome of a row's mutants: the number noticed, and the reason or "" for each one missed."""

    row: str
    noticed: int = 0
    missed: dict[str, str] = field(default_factory=dict)


def reason(row: Row, cases: list[Case], planter: Planter, owner: Any) -> str:
    """Say why the change that is planted cannot be noticed; "" if nothing is known."""
    path = planter.plant[0] if planter.plant else ()
    text = ".".join(map(str, path))
    known = next((why for pattern, holds, why in REASONS if fnmatch(text, pattern) and holds(row, owner)), "")
    return known or (NEARER if _shows_nowhere(row, cases, planter) else "")


def _shows_nowhere(row: Row, cases: list[Case], planter: Planter) -> bool:
    """Tell whether a number has batches that are aimed at it, and in none this package's results change with it."""
    plant, aims = planter.plant, 0
    for settings in list({repr(case.settings): case.settings for case in cases}.values())[:ENOUGH]:
        planter.plant, planter.found = None, {}
        row.ours(cases[0].batch, dict(settings))
        for part in parted(aims_at(planter.found, *BESIDE).get(plant[0], ()) if plant else ()):
            aims += len(part)
            planter.plant, given = None, aimed(part)
            plain = row.ours(given, dict(settings))
            planter.plant = plant
            if _showing(row, given, settings, plain):
                return False
    planter.plant = plant
    return aims > 0


def mutated(row: Row, cases: list[Case]) -> Mutants:
    """Change each number of a row, one at a time, and compare the cases that use it."""
    made, planter = Mutants(row.title), Planter()
    with planter.standing():
        values: dict[Where, Number] = {}
        uses: dict[Where, list[Case]] = {}
        # The aimed ones stand behind the others, and tell most.
        for case in reversed(cases):
            planter.found = {}
            results = _results(row, case)
            values |= planter.found | results
            for path in planter.found | results:
                uses.setdefault(path, []).append(case)
        for path, using in uses.items():
            for name, change in CHANGES.items():
                if change(values[path].value) == values[path].value:
                    continue  # infinity, or the sign of 0
                planter.plant = path, change
                outcome = _outcome(row, using, planter)
                if outcome is None:
                    continue
                made.noticed += outcome
                if not outcome:
                    text = f"{'.'.join(map(str, path))}: {name}"
                    made.missed[text] = reason(row, using, planter, values[path].owner)
    return made


def _results(row: Row, case: Case) -> dict[Where, Number]:
    found = row.ours(case.batch, dict(case.settings))
    if row.kind not in ("report", "drop-in"):
        return {}
    return {
        ("result", name): Number(float(x), None) for name, x in found.items() if isinstance(x, (int, float)) and x == x
    }


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
            by_path = aims_at(planter.found, *BESIDE)
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
                # What the others of a batch hide has one of its own.
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
    # A planted number may be refused by any check. Batches without an aim meet that too: no aim is needed for it.
    except Exception:  # noqa: BLE001
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
