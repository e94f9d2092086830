"""Batches of few different values for tests of bounds that the batch decides, and what is expected of them in loops."""

from __future__ import annotations

import math
import random

from oracles.bounds_of_batch import kept
from oracles.correction import Sequence


def coarse(seed, broken=False):
    """Sequences whose D is a multiple of 1/4, so that sums are exact and ties are many; the third is all invalid."""
    rng = random.Random(seed)
    made = []
    for s, length in enumerate((5, 1, 7, 0, 4, 6, 9, 3)):
        mask = [int(s != 2 and rng.random() > 0.2) for _ in range(length)]
        rollout = [-rng.randrange(4, 16) / 4 for _ in range(length)]
        train = [x + rng.choice((-1, 0, 0, 1, 2, 3)) / 4 for x in rollout]
        advantages = [rng.choice((-1.0, 0.0, 1.0)) for _ in range(length)]
        for t, valid in enumerate(mask):
            if not valid:
                train[t], rollout[t], advantages[t] = (rng.choice((math.nan, math.inf, -1e10)) for _ in range(3))
            elif broken and rng.random() < 0.1:
                train[t] = rng.choice((math.nan, -math.inf))
        made.append(Sequence(train, rollout, mask, advantages))
    return made


def abs_d(batch):
    """|D| of every valid token whose D is finite, by sequence and place."""
    return {
        (s, t): abs(one.train[t] - one.rollout[t])
        for s, one in enumerate(batch)
        for t, valid in enumerate(one.mask)
        if valid and math.isfinite(one.train[t])
    }


def within(rules, values):
    """The places that every bound keeps; `rules` may have a number."""
    good = set(values)
    for side, rule in rules.items():
        if isinstance(rule, float):
            good &= {place for place, x in values.items() if (x >= rule if side == "lower" else x <= rule)}
        else:
            keeps = kept(rule, side, list(values.values()))
            good &= {place for place, keep in zip(values, keeps, strict=True) if keep}
    return good


def mask_of(batch, good):
    return [[float((s, t) in good) for t in range(len(one))] for s, one in enumerate(batch)]


def rejects_nonfinite(batch):
    bad = {s for s, one in enumerate(batch) for t, m in enumerate(one.mask) if m and not math.isfinite(one.train[t])}
    return bad
