"""PPO's clip scaled by entropy, as loops over Python floats and a sort; shares nothing with the package."""

from __future__ import annotations

import math

from oracles.batch_losses import tokens_of
from oracles.loss import Sequence


def widths(s, sequences: list[Sequence], entropy: list[list[float]]) -> dict[tuple[int, int], tuple[float, float]]:
    """The distances of the lower and the upper bound from 1, of each token that trains."""
    logs = {
        (q.s, q.t): math.log(max(entropy[q.s][q.t], 1e-8))
        for q in tokens_of(s, sequences)
        if math.isfinite(entropy[q.s][q.t])
    }
    order, found = sorted(logs.values()), {}
    pivot = order[round(s.pivot * (len(order) - 1))] if order else 0.0
    for q in tokens_of(s, sequences):
        away = logs.get((q.s, q.t), pivot) - pivot
        low, high = s.low, s.high
        if away > 0:
            high *= 1.0 + s.strength * away / (order[-1] - pivot)
        elif away < 0 and s.widens == "outward":
            low *= 1.0 + s.strength * away / (order[0] - pivot)
        elif away < 0:
            high *= 1.0 + s.strength * away / (order[0] - pivot)
        found[q.s, q.t] = (low, high)
    return found


def token_losses(s, sequences: list[Sequence], entropy) -> dict[tuple[int, int], tuple[float, float]]:
    """The loss of each token that trains and its derivative by new_logp, without weights."""
    found, bounds = {}, widths(s, sequences, entropy)
    for q in tokens_of(s, sequences):
        r, (low, high) = q.ratio(s), bounds[q.s, q.t]
        far = s.dual is not None and q.a < 0 and r > s.dual
        cut = far or (r > 1.0 + high if q.a >= 0 else r < 1.0 - low)
        bound = s.dual if far else 1.0 + high if q.a >= 0 else 1.0 - low
        slope = 0.0 if cut or abs(q.x) >= s.clamp else -r * q.a
        found[q.s, q.t] = (-s.coef * q.a * (bound if cut else r), s.coef * slope)
    return found
