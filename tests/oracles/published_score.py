"""Published formulas of score functions that are softened, tapered or masked, and of ratios of tokens with sequences.

Rows and helpers are those of published_rows.py.
"""

from __future__ import annotations

import math

from oracles.published import score
from oracles.published_rows import clip, mean


def vespo(row, weight=lambda r, t: 1.0, positive=(2.0, 3.0), negative=(3.0, 2.0)):
    """The weight of a sequence: TRL's get_gamma_weights."""
    log_w = sum(clip(n - o, -20, 20) for n, o in zip(row.sg, row.old, strict=True))
    log_w += sum(clip(math.log(max(weight(row, t), 1e-8)), math.log(1e-8), 20) for t in range(row.n))
    log_w = clip(log_w, math.log(1e-8), 20)
    k, rate = positive if row.adv[0] >= 0 else negative
    return math.exp(rate + k * log_w - rate * math.exp(log_w))


def vespo_loss(weight=lambda r, t: 1.0):
    return lambda r, t: vespo(r, weight) * score(r, t)


def topr(row, t, base=None, good=1.0, bad=1.0):
    r = min(ratio_to(row, t, base), 1.0)
    return score(row, t) * (good if row.adv[t] > 0 else bad * r)


def ratio_to(row, t, base=None):
    return math.exp(row.sg[t] - (base or row.old)[t])


def sapo_stopped(row, t, base=None):
    tau = 1.0 if row.adv[t] > 0 else 1.05
    return score(row, t) * (4 / tau) / (1 + math.exp(-tau * (ratio_to(row, t, base) - 1)))


def rec(row, t, mask, weigh=False, whole=False):
    """Trinity's RECPolicyLossFn, whose old policy is the rollout's."""
    r, a = ratio_to(row, t, row.mu), row.adv[t]
    if whole:
        r = math.exp(mean(n - m for n, m in zip(row.sg, row.mu, strict=True)))
    inside = 0.8 <= r <= 1.2
    kept = {
        "one": (r <= 1.2 and a >= 0) or (r >= 0.8 and a <= 0),
        "two": inside,
        "ring": inside or (a >= 0 and r <= 0.4) or (a <= 0 and r >= 3.0),
    }[mask]
    return score(row, t) * kept * (r if weigh else 1.0)


def art(row, t, level, low=0.0, high=5.0):
    """ART's CISPO, whose ratio lies between that of the token and that of the sequence."""
    r, s = ratio_to(row, t, row.mu), math.exp(mean(n - m for n, m in zip(row.sg, row.mu, strict=True)))
    mixed = {"token": r, "sequence": s, "average": (r + s) / 2, "geometric_average": math.sqrt(r * s)}[level]
    return clip(mixed, low, high) * score(row, t)


def art_ppo(row, t, level, low, high):
    """ART's PPO, whose ratio moves with the token and with its whole sequence."""
    r, s = math.exp(row.new[t] - row.mu[t]), math.exp(mean(n - m for n, m in zip(row.new, row.mu, strict=True)))
    mixed = {"average": (r + s) / 2, "geometric_average": math.sqrt(r * s)}[level]
    return max(-mixed * row.adv[t], -clip(mixed, low, high) * row.adv[t])


def real(rows, tau=0.5):
    """The rows as one group: ms-swift's loss_type real."""
    scores = [mean(r.new[t] - r.old[t] for t in range(r.n)) / tau for r in rows]
    goods = [x for x, r in zip(scores, rows, strict=True) if r.adv[0] > 0]
    others = [x for x, r in zip(scores, rows, strict=True) if r.adv[0] <= 0]
    if not goods or not others:
        return 0.0
    return math.log1p(math.fsum(map(math.exp, others))) + math.log1p(math.fsum(math.exp(-x) for x in goods))
