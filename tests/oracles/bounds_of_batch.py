"""The oracle of bounds that the batch decides: loops over Python floats. It shares no code with the package."""

from __future__ import annotations

import math
from fractions import Fraction


def kept(rule, side, values):
    """True for each value that a rule keeps; NaN is kept by none.

    Args:
        rule: A rule of the package; its fields are read.
        side: "lower" or "upper".
        values: Floats.
    """
    numbers = [x for x in values if not math.isnan(x)]
    good = set()
    # The kept values grow by one distinct value after another, from the end that the side keeps.
    for candidate in sorted(set(numbers), reverse=side == "lower"):
        up_to = [x for x in numbers if (x >= candidate if side == "lower" else x <= candidate)]
        if type(rule).__name__ == "MeanBelow":
            if good and not mean_is_below(up_to, rule.below):
                break
            good.add(candidate)
            if not mean_is_below(up_to, rule.below):
                break
            continue
        good.add(candidate)
        if enough(rule, side, len(up_to), len(numbers)):
            break
    return [x in good for x in values]


def enough(rule, side, count, n):
    if type(rule).__name__ == "Quantile":
        return count / n >= rule.q if side == "upper" else (n - count) / n <= rule.q
    return count / n >= rule.share if rule.count is None else count >= rule.count


def mean_is_below(values, below):
    """Exactly, without rounding; an infinite value is never below."""
    if math.inf in values:
        return False
    if -math.inf in values:
        return True
    return sum(map(Fraction, values)) < Fraction(below) * len(values)


def sample_size(weights, bound):
    """(sum of w)^2 / (n sum of w^2) of weights clamped at a bound."""
    clamped = [min(w, bound) for w in weights]
    return math.fsum(clamped) ** 2 / (len(clamped) * math.fsum(w * w for w in clamped))
