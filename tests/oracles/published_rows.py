"""Rows of a batch as frameworks see them, for the formulas that they publish."""

from __future__ import annotations

import math
import random


class Row:
    """One padded row as a framework sees it: valid tokens only."""

    def __init__(self, rng, length, advantage):
        self.new = [-rng.expovariate(1.0) - 0.05 for _ in range(length)]
        # Some rows pass even a geometric mask of 1e-4.
        scale = rng.choice((1.0, 1.0, 0.1, 1e-4, 6.0))
        self.old = [x + rng.gauss(0, 0.3 * scale) for x in self.new]
        self.mu = [x + rng.gauss(0, 0.1 * scale) for x in self.old]
        self.ref = [x + rng.gauss(0, 0.5) for x in self.new]
        self.old, self.mu, self.ref = ([min(x, -0.01) for x in xs] for xs in (self.old, self.mu, self.ref))
        self.adv = [advantage] * length
        self.sg = list(self.new)
        self.n = length


def batch(seed):
    rng = random.Random(seed)
    return [Row(rng, n, rng.choice((-1, 1)) * rng.uniform(0.3, 1.5)) for n in (6, 1, 9, 4, 12)]


def clip(x, low, high):
    return max(low, min(high, x))


def mean(values):
    values = list(values)
    return math.fsum(values) / max(len(values), 1)
