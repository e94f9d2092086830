"""Numbers as the oracles compute with them: Python floats, `math.fsum`, and IEEE's answers where nothing is finite.

A `Moving` number carries its derivative by one log-prob through the same formulas, so that an oracle states a loss
alone and its gradient follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NAN = math.nan
INF = math.inf

# Ranges stated in the definition: D enters a sum within +-1024, any other summed statistic within +-2^37.
D_RANGE = 1024.0
STAT_RANGE = 2.0**37


# Two values that float32 may round past each other, relative to the larger of 1 and their size.
NEAR = 2.0**-15


@dataclass(frozen=True)
class Moving:
    """A number with its slope: its derivative by a log-prob. NaN where a bound is so near that either side is right."""

    value: float
    slope: float

    def __add__(self, other):
        return Moving(self.value + value_of(other), self.slope + slope_of(other))

    def __neg__(self):
        return Moving(-self.value, -self.slope)

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def __mul__(self, other):
        return Moving(self.value * value_of(other), self.slope * value_of(other) + self.value * slope_of(other))

    def __truediv__(self, number):
        return Moving(self.value / number, self.slope / number)

    def __rtruediv__(self, number):
        return Moving(number / self.value, -number * self.slope / self.value**2)

    def __pow__(self, power):
        return Moving(self.value**power, power * self.value ** (power - 1) * self.slope)

    def __abs__(self):
        # The sign of a difference of two log-probs is exact; at 0 its magnitude has the slope 0.
        return Moving(abs(self.value), self.slope * ((self.value > 0) - (self.value < 0)))

    __radd__, __rmul__ = __add__, __mul__


def value_of(x):
    return x.value if isinstance(x, Moving) else x


def slope_of(x):
    return x.slope if isinstance(x, Moving) else 0.0


def _either(a, b, first):
    """The first or the second, without a slope where their order is a matter of rounding."""
    one, two = value_of(a), value_of(b)
    if slope_of(a) != slope_of(b) and abs(one - two) <= NEAR * max(1.0, abs(one), abs(two)):
        return Moving(one if first else two, NAN)
    return a if first else b


def smaller(a, b):
    return _either(a, b, value_of(a) <= value_of(b))


def larger(a, b):
    return _either(a, b, value_of(a) >= value_of(b))


def fsum(values):
    values = list(values)
    total = math.fsum(value_of(x) for x in values)
    return Moving(total, math.fsum(map(slope_of, values))) if any(isinstance(x, Moving) for x in values) else total


def exp(x):
    if isinstance(x, Moving):
        return Moving(exp(x.value), exp(x.value) * x.slope)
    try:
        return math.exp(x)
    except OverflowError:
        return INF


def probability(log_prob):
    """A log-prob above 0 is not one: its probability is read as 1."""
    return exp(smallest([log_prob, 0.0]))


def log(x):
    if isinstance(x, Moving):
        return Moving(math.log(x.value), x.slope / x.value)
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
    if isinstance(d, Moving):
        return Moving(k3(d.value), math.expm1(d.value) * d.slope)
    if not abs(d) < 0.5:
        return exp(d) - 1.0 - d
    terms, term = [], d
    for n in range(2, 40):
        term = term * d / n
        terms.append(term)
    return math.fsum(terms)
