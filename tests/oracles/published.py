"""The losses that papers and frameworks publish whose functions cannot be run here, in plain Python.

All others are recorded: tests/conformance. `sg` in a name says that the value is a constant of the gradient.
"""

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


def ppo(row, t, low=0.2, high=0.2, c=None, base=None, delta=None):
    r = math.exp(row.new[t] - (base or row.old)[t])
    a = row.adv[t]
    one = -a * (r if delta is None else min(r, delta))
    loss = max(one, -a * clip(r, 1 - low, 1 + high))
    return min(loss, -a * c) if c is not None and a < 0 else loss


def cispo(row, t, low, high, base=None):
    r = clip(math.exp(row.sg[t] - (base or row.old)[t]), low, high)
    return -r * row.adv[t] * row.new[t]


def gspo_token(row, t, low=0.2, high=0.2, base=None):
    s = math.exp(row.new[t] - row.sg[t] + mean(n - o for n, o in zip(row.sg, base or row.old, strict=True)))
    return max(-row.adv[t] * s, -row.adv[t] * clip(s, 1 - low, 1 + high))


def gspo(row, t, low=0.2, high=0.2, base=None):
    s = math.exp(mean(n - o for n, o in zip(row.new, base or row.old, strict=True)))
    return max(-row.adv[t] * s, -row.adv[t] * clip(s, 1 - low, 1 + high))


def reinforce(row, t, base):
    return -math.exp(row.new[t] - base[t]) * row.adv[t]


def score(row, t):
    return -row.adv[t] * row.new[t]


def k1(row, t):
    return row.new[t] - row.ref[t]


def k3(row, t):
    d = row.ref[t] - row.new[t]
    return math.exp(d) - d - 1


def ratio(row, t, train):
    return math.exp(train[t] - row.mu[t])


def binary_kl(p, q, eps):
    p, q = min(max(p, eps), 1 - eps), min(max(q, eps), 1 - eps)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def bkl(row, t, train):
    return binary_kl(math.exp(row.mu[t]), math.exp(train[t]), 1e-12)


def both_ways(row, t, train):
    p, q = math.exp(row.mu[t]), math.exp(train[t])
    return max(binary_kl(p, q, 1e-12), binary_kl(q, p, 1e-12))


def prob_diff(row, t):
    return math.exp(row.sg[t]) - math.exp(row.mu[t])


def token_mean(rows, loss):
    return math.fsum(loss(r, t) for r in rows for t in range(r.n)) / sum(r.n for r in rows)


def rows_mean(rows, loss):
    return mean(mean(loss(r, t) for t in range(r.n)) for r in rows)


def rows_sum(rows, loss):
    return mean(math.fsum(loss(r, t) for t in range(r.n)) for r in rows)


def total(rows, loss):
    return math.fsum(loss(r, t) for r in rows for t in range(r.n))


def within(x, low, high):
    return low <= x <= high


def old(r):
    return r.old


def new(r):
    return r.sg


def token_tis(train):
    return lambda r, t: min(ratio(r, t, train(r)), 2.0)


def icepop(train, low, high):
    return lambda r, t: ratio(r, t, train(r)) * within(ratio(r, t, train(r)), low, high)


def plain(weight, loss=ppo, agg=token_mean):
    """PPO's clip times a weight that is 0 where something was rejected."""
    return lambda rows: agg(rows, lambda r, t: weight(r, t) * loss(r, t))


def prime_rl(keep):
    def loss(r, t):
        d = r.new[t] - r.mu[t]
        return 1e-3 * d * d - (r.adv[t] * math.exp(d) if keep(r, t) else 0.0)

    return lambda rows: token_mean(rows, loss)


def stable_rl(r, t, kind, delta):
    a, diff = r.adv[t], prob_diff(r, t)
    moved = abs(diff) if kind == "tv" else bkl(r, t, r.sg)
    dropped = moved > delta and (diff > 0 if a > 0 else diff < 0)
    return 0.0 if dropped else -min(ratio(r, t, r.sg), 20.0) * a * r.new[t]


def minirl(r, t):
    a, moved = r.adv[t], math.exp(r.sg[t] - r.old[t])
    dropped = (a > 0 and moved > 1.2) or (a < 0 and moved < 0.8)
    return 0.0 if dropped else -min(ratio(r, t, r.sg), 20.0) * a * r.new[t]


def with_kl(loss, kl, coef):
    return lambda r, t: loss(r, t) + coef * kl(r, t)


def megatron(weight):
    return plain(
        weight, lambda r, t: ppo(r, t, 0.01, 0.01), lambda rows, loss: token_mean(rows, with_kl(loss, k3, 0.001))
    )


def tunix(loss, agg=rows_mean):
    return lambda rows: agg(rows, with_kl(loss, k1, 0.04))


def rllm_dppo(r, t, dropped):
    return 0.0 if dropped else -math.exp(r.sg[t] - r.old[t]) * r.adv[t] * r.new[t]


def rllm_tv(r, t):
    moved = math.exp(r.sg[t]) - math.exp(r.old[t])
    return rllm_dppo(r, t, moved > 0.2 if r.adv[t] > 0 else moved < -0.2)


def rllm_kl(r, t):
    away = r.sg[t] > r.old[t] if r.adv[t] > 0 else r.sg[t] < r.old[t]
    return rllm_dppo(r, t, away and binary_kl(math.exp(r.old[t]), math.exp(r.sg[t]), 1e-6) > 0.2)


def kimi(r, t):
    """The report's equation 1: a gradient mask, and the squared log-ratio of every token."""
    d = r.new[t] - r.mu[t]
    return 1e-3 * d * d - r.adv[t] * math.exp(d) * within(ratio(r, t, r.sg), 0.5, 2.0)


def one(r, t):
    return 1.0


PUBLISHED = {
    "prime_rl.icepop": lambda rows: token_mean(
        rows, lambda r, t: reinforce(r, t, r.mu) * within(ratio(r, t, r.sg), 0.2, 5.0)
    ),
    "prime_rl.kpop": prime_rl(lambda r, t: both_ways(r, t, r.sg) <= 0.1),
    "tinker.importance_sampling": lambda rows: total(rows, lambda r, t: reinforce(r, t, r.mu)),
    "tinker.ppo": lambda rows: total(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "tinker.cispo": lambda rows: total(rows, lambda r, t: cispo(r, t, 0.0, 4.0, r.mu)),
    "torchforge.default": lambda rows: token_mean(rows, lambda r, t: cispo(r, t, 0.1, 10.0, r.mu)),
    "dppo.tv": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "tv", 0.15)),
    "dppo.kl": lambda rows: token_mean(rows, lambda r, t: stable_rl(r, t, "kl", 0.05)),
    "minirl.default": lambda rows: token_mean(rows, minirl),
    "areal.cispo": plain(one, lambda r, t: cispo(r, t, 0.0, 5.0)),
    "areal.kpop": plain(lambda r, t: ratio(r, t, r.old) * (both_ways(r, t, r.old) <= 2.0)),
    "megatron.grpo": megatron(one),
    "megatron.tis": megatron(token_tis(old)),
    "tunix.grpo": tunix(lambda r, t: ppo(r, t, base=r.mu)),
    "tunix.gspo_token": tunix(lambda r, t: gspo_token(r, t, base=r.mu)),
    "tunix.dapo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, 0.2, 0.28, base=r.mu)),
    "tunix.drgrpo": lambda rows: tunix(lambda r, t: ppo(r, t, base=r.mu), rows_sum)(rows) / 64,
    "tunix.tis": tunix(lambda r, t: min(ratio(r, t, r.old), 2.0) * ppo(r, t)),
    "tunix.ppo": plain(one),
    "fast_llm.grpo": lambda rows: token_mean(rows, lambda r, t: ppo(r, t, base=r.mu)),
    "fast_llm.gspo": lambda rows: rows_sum(rows, lambda r, t: gspo(r, t, base=r.mu)),
    "flash_rl.tis": plain(token_tis(old), lambda r, t: ppo(r, t, c=3.0)),
    "rllm.ppo_clip": plain(one),
    "rllm.cispo": plain(one, lambda r, t: cispo(r, t, 0.8, 1.2)),
    "rllm.gspo": plain(one, gspo_token, rows_mean),
    "rllm.dppo_tv": plain(one, rllm_tv),
    "rllm.dppo_kl": plain(one, rllm_kl),
    "rllm.icepop": plain(icepop(new, 0.5, 5.0), score),
    "rllm.reinforce": plain(one, score),
    "rllm.reinforce_kl": plain(lambda r, t: ratio(r, t, r.sg), score),
    "glm.icepop": plain(icepop(old, 0.5, 2.0), lambda r, t: ppo(r, t, 0.2, 0.28), rows_mean),
    "glm.double_sided": plain(lambda r, t: ratio(r, t, r.sg) * (0.8 < ratio(r, t, r.sg) < 1.28), score),
    "kimi.k25": lambda rows: token_mean(rows, kimi),
}
