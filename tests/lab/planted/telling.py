"""Batches that tell: those on which a change of a number, by 1 % or in sign, is noticed.

The numbers are those that a row's side of this package hands to `correct` and `policy_loss`. A recording holds such
batches for each of them, so that what is compared with it cannot change by so much unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from torch import Tensor

from conformance.aims import Aim, aimed, aims_at, parted
from conformance.batches import Batch, batch
from conformance.rows import Result, Row, Tally, expected
from lab.planted.numbers import CHANGES, Change, Planter, Where

# How many aims are tried until a change of a number is taken not to show.
ENOUGH = 3
# How many settings are drawn to find one under which it is noticed.
TRIES = 40
# Between a number and 1.01 of it, and on the other side.
NEARBY = (0.005, -0.005)


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
