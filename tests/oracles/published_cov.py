"""Clip-Cov and KL-Cov as verl computes them, with the draw of this package in place of torch.randperm."""

from __future__ import annotations

import math

from oracles.batch_losses import drawn
from oracles.published import ppo, token_mean
from oracles.published_rows import mean


def covariances(rows):
    """By row and token, of the log-probs as constants."""
    places = [(i, t) for i, row in enumerate(rows) for t in range(row.n)]
    a, x = mean(rows[i].adv[t] for i, t in places), mean(rows[i].sg[t] for i, t in places)
    return {(i, t): (rows[i].adv[t] - a) * (rows[i].sg[t] - x) for i, t in places}


def clip_cov(rows, share, lower, upper):
    found = covariances(rows)
    open_to_it = []
    for (i, t), value in found.items():
        row, r = rows[i], math.exp(rows[i].sg[t] - rows[i].old[t])
        clipped = row.adv[t] * min(max(r, 0.8), 1.2) < row.adv[t] * r
        if lower < value < upper and not clipped:
            open_to_it.append((i, t))
    count = max(int(share * len(found)), 1)
    gone = sorted(open_to_it, key=lambda at: drawn(0, at[0], at[1] + 1))[:count]
    numbers = {id(row): i for i, row in enumerate(rows)}
    return token_mean(rows, lambda r, t: 0.0 if (numbers[id(r)], t) in gone else ppo(r, t))


def kl_cov(rows, share, coefficient):
    found = covariances(rows)
    count = max(int(share * len(found)), 1)
    largest = sorted(found, key=found.__getitem__)[-count:]
    numbers = {id(row): i for i, row in enumerate(rows)}

    def loss(row, t):
        x = row.new[t] - row.old[t]
        return -row.adv[t] * math.exp(x) + coefficient * abs(x) * ((numbers[id(row)], t) in largest)

    return token_mean(rows, loss)
