"""CTPO's losses in plain Python: the ratio of the prefix as a constant, and 0 where its clip holds."""

from __future__ import annotations

import math

from oracles.published import token_mean
from oracles.published_rows import clip


def ctpo(reduce, power, low, high, dual):
    """Score of a token by the ratio of its prefix; bounds are of the log-ratio, times t to a power."""

    def loss(r, t):
        ds = [clip(n - m, -20.0, 20.0) for n, m in zip(r.sg[: t + 1], r.mu, strict=False)]
        log, band, a = math.fsum(ds), (t + 1) ** power, r.adv[t]
        if reduce == "mean":
            log /= len(ds)
        if (log > high * band) if a > 0 else (log < low * band or log > dual * band):
            return 0.0
        return -math.exp(log) * a * r.new[t]

    return lambda rows: token_mean(rows, loss)


FIXED = 0.0, math.log(0.8), math.log(1.2), math.log(3.0)
PUBLISHED = {
    "ctpo.cumprod": ctpo("sum", *FIXED),
    "ctpo.geomean": ctpo("mean", *FIXED),
    "ctpo.cumprod_la": ctpo("sum", 0.5, -0.025, 0.05, 0.05),
    "ctpo.geomean_la": ctpo("mean", -0.5, -0.025, 0.05, 0.05),
}
