"""Parts of the loss's oracle that see one token, or one sequence's log-ratios: levels, clips, masks."""

from __future__ import annotations

import math

from oracles.correction import exp


def clip(x, low, high):
    return min(max(x, low), high)


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def ppo(s, r, a):
    if s.delta is not None:
        r = min(r, s.delta)
    loss = max(-a * r, -a * clip(r, 1 - s.low, 1 + s.high))
    if a < 0 and s.dual is not None:
        loss = min(loss, -a * s.dual)
    return loss


def at_level(level, x, all_x):
    """The log-ratio of a token, of its sequence, or of one of their two means."""
    if level == "token":
        return x
    whole = mean(all_x)
    if level == "sequence":
        return whole
    return (x + whole) / 2 if level == "geometric_average" else math.log((exp(x) + exp(whole)) / 2)


def rec_keeps(s, r, a):
    below, above = r < 1 - s.low, r > 1 + s.high
    if s.mask == "one_side":
        return not ((a > 0 and above) or (a < 0 and below))
    outside = below or above
    if s.mask == "two_side":
        return not outside
    return not outside or (a >= 0 and r <= 1 - s.far_low) or (a <= 0 and r >= 1 + s.far_high)


def vespo_log_ratio(s, all_x, weights):
    """The logarithm of the product of ratios and weights."""
    least = math.log(1e-8)
    parts = [clip(x, -s.clamp, s.clamp) for x in all_x]
    if weights is not None:
        parts += [clip(math.log(w) if w > 0 else least, least, s.clamp) for w in weights]
    return clip(math.fsum(parts), max(least, -s.clamp), s.clamp)


def level_of(s, x, all_x, weights):
    """The log-ratio that a surrogate's ratio is made of."""
    kind = type(s).__name__
    if kind == "GSPO":
        return mean(all_x)
    if kind == "VESPO":
        return vespo_log_ratio(s, all_x, weights)
    if kind == "DRO" and s.level == "sequence":
        return math.fsum(clip(y, -1024, 1024) for y in all_x)
    return at_level(s.level, x, all_x) if kind in ("Score", "REC", "AveragePPO") else x
