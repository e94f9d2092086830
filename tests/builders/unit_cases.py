"""Random Specs and batches over tokens, turns, prefixes and sequences, for tests that lay sequences out themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import rollout_corr as rc
from builders.batches import random_sequences, spoil, wild
from builders.turns import random_turns
from frozen.generator import UNITS, needs_of
from frozen.generator import random_spec as any_spec


def random_spec(
    rng: random.Random,
    units: Sequence[str] = UNITS,
    nonfinite: Sequence[str] = ("reject", "neutral"),
    normalize: Sequence[str | None] = (None, "batch"),
    versions: bool = True,
) -> rc.Spec:
    """Any Spec that asks for no more than `random_sequences` have, with bounds that are numbers, and native metrics."""
    while True:
        spec = replace(any_spec(rng, units, rules=False), report=("native",))
        wants, weight = needs_of(spec), spec.weight
        right = spec.nonfinite in nonfinite and (weight is None or weight.normalize in normalize)
        right &= not wants.entropy and wants.external <= {"entropy"} and (versions or not wants.versions)
        if right:
            return spec


def turns_alone(seed: int):
    """A batch, its turns and a Spec of tokens, turns and sequences."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 2, 4, 9, 17)) for _ in range(rng.randint(0, 6))]
    kind, invalid = rng.choice(("token", "sequence")), rng.choice((0.0, 0.25, 0.6))
    batch = random_sequences(rng.random(), lengths, advantages=kind, invalid=invalid)
    batch = wild(batch) if rng.random() < 0.3 else batch
    batch = spoil(batch, seed) if rng.random() < 0.4 else batch
    batch = [replace(q, turns=turns) for q, turns in zip(batch, random_turns(batch, seed), strict=True)]
    # As many offsets as packed tokens, or as those between gaps, could be ids.
    while batch and 1 + sum(len(q.turns) for q in batch) in (sum(map(len, batch)), sum(map(len, batch)) + 5):
        batch[-1].turns.append(0)
    spec = random_spec(rng, ("turn", "turn", "token", "sequence"))
    return batch, [q.turns for q in batch], replace(spec, turns=True)
