"""Prefixes as loops: for every token the list of those up to and with it that count, added up anew each time."""

from __future__ import annotations

import math

from oracles.numbers import D_RANGE, add, reduced, saturate, smallest


def prefixes(counts):
    """For every token, the places of the tokens up to and with it that count."""
    return [[i for i in range(t + 1) if counts[i]] for t in range(len(counts))]


def log_weights(weight, ds, counts):
    """The log of every token's weight, from D after the token clamp."""
    found = []
    for t, places in enumerate(prefixes(counts)):
        if weight.reduce == "min":
            before = [ds[i] for i in places if i != t]
            found.append((ds[t] if counts[t] else 0.0) + (smallest(before) if before else 0.0))
        else:
            total = add(saturate(ds[i], D_RANGE) for i in places)
            found.append(total if weight.reduce == "sum" else total / max(len(places), 1))
    return found


def growths(growth, counts):
    """By what the bounds of every token grow."""
    return [1.0 if growth is None else math.sqrt(max(len(places), 1)) for places in prefixes(counts)]


def decide(criterion, each, chosen, alive, limit, passes):
    """For every token its value (None where it does not count), whether it is tested, fails, and is dropped."""
    counts = [v is not None and lives for v, lives in zip(each, alive, strict=True)]
    values = [
        reduced(criterion.reduce, [each[i] for i in places], limit) if counts[t] else None
        for t, places in enumerate(prefixes(counts))
    ]
    tested = [one and count for one, count in zip(chosen, counts, strict=True)]
    failed = [
        one and not passes(criterion, v, growth)
        for one, v, growth in zip(tested, values, growths(criterion.growth, counts), strict=True)
    ]
    if criterion.drop == "rest":
        return values, tested, failed, [any(failed[: t + 1]) for t in range(len(failed))]
    return values, tested, failed, [any(failed)] * len(failed) if criterion.drop == "sequence" else failed
