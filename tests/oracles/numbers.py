"""Numbers as the oracles compute with them: Python floats, `math.fsum`, and IEEE's answers where nothing is finite."""

from __future__ import annotations

import math

NAN = math.nan
INF = math.inf

# Ranges stated in the definition: D enters a sum within +-1024, any other summed statistic within +-2^37.
D_RANGE = 1024.0
STAT_RANGE = 2.0**37


def exp(x):
    try:
        return math.exp(x)
    except OverflowError:
        return INF


def probability(log_prob):
    """A log-prob above 0 is not one: its probability is read as 1."""
    return exp(smallest([log_prob, 0.0]))


def log(x):
    return -INF if x == 0 else math.log(x)


def clamp(x, limit):
    if math.isnan(x) or limit is None:
        return x
    return min(max(x, -limit), limit)


def saturate(x, limit):
    """Infinities stay: only finite values have a range."""
    return clamp(x, limit) if math.isfinite(x) else x


def add(values):
    """The exact sum, with IEEE's answers where something is not finite."""
    values = list(values)
    if any(math.isnan(v) for v in values) or (INF in values and -INF in values):
        return NAN
    for infinity in (INF, -INF):
        if infinity in values:
            return infinity
    return math.fsum(values)


def largest(values):
    return NAN if any(math.isnan(v) for v in values) else max(values)


def smallest(values):
    return NAN if any(math.isnan(v) for v in values) else min(values)


def reduced(how, values, limit):
    """The sum, mean, maximum or minimum of values; each enters a sum or mean within its range."""
    if how in ("max", "min"):
        return (largest if how == "max" else smallest)(values)
    total = add(saturate(v, limit) for v in values)
    return total / len(values) if how == "mean" else total


def k3(d):
    """e^d - 1 - d, by its series where the subtraction would cancel."""
    if not abs(d) < 0.5:
        return exp(d) - 1.0 - d
    terms, term = [], d
    for n in range(2, 40):
        term = term * d / n
        terms.append(term)
    return math.fsum(terms)
