"""Surrogates that look at the batch or at a group of sequences, as loops over floats and sorts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oracles.loss_terms import Sequence, advantage, base_of, clip, mean, mean_log_ratio, ppo, trained, valid
from oracles.numbers import D_RANGE, NEAR, exp

BITS = 2**64
# The loss of each token that trains and its derivative by new_logp, without weights, by sequence and place.
Losses = dict[tuple[int, int], tuple[float, float]]


@dataclass
class Token:
    """A token that trains: its sequence and index, its place among the valid ones, and its numbers."""

    s: int
    t: int
    place: int
    new: float
    x: float
    a: float

    def ratio(self, surrogate) -> float:
        return exp(clip(self.x, -surrogate.clamp, surrogate.clamp))


def tokens_of(surrogate, sequences: list[Sequence]) -> list[Token]:
    """All trained tokens."""
    found = []
    for s, q in enumerate(sequences):
        order = valid(q)
        for t in trained(q, surrogate):
            base = base_of(q, surrogate, t)
            x = 0.0 if base is None else q.new[t] - base
            found.append(Token(s, t, order.index(t) + 1, q.new[t], x, advantage(q, t)))
    return found


def look(s, sequences: list[Sequence]) -> list[dict | None]:
    """Per sequence, the loss and the slope of its tokens by place; None for a surrogate that does not look."""
    kind = type(s).__name__
    if kind not in LOOK:
        return [None for _ in sequences]
    found = LOOK[kind](s, sequences)
    return [{t: pair for (i, t), pair in found.items() if i == place} for place in range(len(sequences))]


# --- ClipCov and KLCov ---


def splitmix(state: int) -> int:
    """The output of SplitMix64 in a state."""
    z = (state + 0x9E3779B97F4A7C15) % BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % BITS
    return z ^ (z >> 31)


def drawn(seed: int, number: int, place: int) -> float:
    """A random number of a token, in [0, 1)."""
    return (splitmix(splitmix(splitmix(seed) ^ (number % BITS)) ^ place) >> 11) / 2**53


def covariances(tokens: list[Token]) -> list[float]:
    middle, level = mean(q.a for q in tokens), mean(q.new for q in tokens)
    return [(q.a - middle) * (q.new - level) for q in tokens]


def clipped(s, q: Token) -> bool:
    r = q.ratio(s)
    furthest = min(x for x in (s.dual, s.delta, math.inf) if x is not None)
    most = min(1.0 + s.high, math.inf if s.delta is None else s.delta)
    return (q.a > 0 and r > most) or (q.a < 0 and (r < 1.0 - s.low or r > furthest))


def eligible(s, tokens: list[Token]) -> list[int]:
    """The places in the list that ClipCov draws from."""
    values = covariances(tokens)
    return [i for i, q in enumerate(tokens) if s.lower < values[i] < s.upper and not clipped(s, q)]


def many(s, tokens: list[Token]) -> int:
    """How many tokens ClipCov or KLCov chooses."""
    return max(int(s.share * len(tokens)), 1)


def chosen(s, sequences: list[Sequence]) -> set[tuple[int, int]]:
    """The tokens that ClipCov or KLCov chooses, by sequence and index."""
    tokens = tokens_of(s, sequences)
    if not tokens:
        return set()
    if type(s).__name__ == "ClipCov":
        ids = [i if q.number is None else q.number for i, q in enumerate(sequences)]
        order = sorted(eligible(s, tokens), key=lambda i: drawn(s.seed, ids[tokens[i].s], tokens[i].place))
        places = order[: many(s, tokens)]
    else:
        values = covariances(tokens)
        last = sorted(values, reverse=True)[many(s, tokens) - 1]
        places = [i for i, value in enumerate(values) if value >= last]
    return {(tokens[i].s, tokens[i].t) for i in places}


def clip_cov(s, sequences: list[Sequence]) -> Losses:
    found, picked = {}, chosen(s, sequences)
    for q in tokens_of(s, sequences):
        pair = ppo(s, q.ratio(s), q.a), 0.0 if clipped(s, q) else -slope_of(s, q) * q.a
        found[q.s, q.t] = (0.0, 0.0) if (q.s, q.t) in picked else pair
    return found


def kl_cov(s, sequences: list[Sequence]) -> Losses:
    found, picked = {}, chosen(s, sequences)
    for q in tokens_of(s, sequences):
        more = s.penalty * ((q.s, q.t) in picked)
        sign = (q.x > 0) - (q.x < 0) if abs(q.x) < 1024 else 0
        found[q.s, q.t] = -q.ratio(s) * q.a + more * min(abs(q.x), 1024.0), -slope_of(s, q) * q.a + more * sign
    return found


def slope_of(s, q: Token) -> float:
    """The derivative of a token's ratio."""
    return through(q.x, s.clamp, q.ratio(s))


def through(x: float, bound: float, slope: float) -> float:
    """A slope behind a clamp of x: 0 beyond its bound, NaN where rounding decides on which side x lies."""
    if abs(abs(x) - bound) <= NEAR * bound:
        return math.nan
    return slope if abs(x) < bound else 0.0


# --- REAL ---


def score(s, tokens: list[Token]) -> float:
    """The mean log-ratio of a sequence, before the clamp."""
    return mean_log_ratio(q.x for q in tokens)


def contrasts(s, sequences: list[Sequence]) -> dict[int, tuple[dict[int, float], dict[int, float]]]:
    """The scores of the sequences by number, those with A <= 0 and the good ones, of each group that has both."""
    found: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
    for i, sequence in enumerate(sequences):
        tokens = [q for q in tokens_of(s, sequences) if q.s == i]
        if tokens:
            good = mean(q.a for q in tokens) > 0
            found.setdefault(sequence.group, ({}, {}))[good][i] = score(s, tokens)
    return {group: both for group, both in found.items() if both[0] and both[1]}


def real(s, sequences: list[Sequence]) -> Losses:
    """The derivative is that of the sum over the group's sequences of their mean token loss, times the tokens."""
    found = {(q.s, q.t): (0.0, 0.0) for q in tokens_of(s, sequences)}
    for others, goods in contrasts(s, sequences).values():
        powers = {i: clip(x, -s.clamp, s.clamp) / s.tau for i, x in (others | goods).items()}
        below = 1.0 + math.fsum(math.exp(powers[i]) for i in others)
        above = 1.0 + math.fsum(math.exp(-powers[i]) for i in goods)
        size = len(others) + len(goods)
        for i, x in (others | goods).items():
            slope = -math.exp(-powers[i]) / above if i in goods else math.exp(powers[i]) / below
            slope = through(x, s.clamp, slope * size / s.tau)
            for q in tokens_of(s, sequences):
                if q.s == i:
                    found[i, q.t] = math.log(below) + math.log(above), through(q.x, D_RANGE, slope)
    return found


LOOK = {"ClipCov": clip_cov, "KLCov": kl_cov, "REAL": real}


def metrics(s, sequences: list[Sequence]) -> dict[str, float]:
    """What a surrogate reports of its look."""
    tokens, kind = tokens_of(s, sequences), type(s).__name__
    n = max(len(tokens), 1)
    if kind in ("ClipCov", "KLCov"):
        picked = chosen(s, sequences)
        some = [x for x, q in zip(covariances(tokens), tokens, strict=True) if (q.s, q.t) in picked]
        found = {"cov_chosen_fraction": len(picked) / n, "cov_chosen_mean": mean(some)}
        return found | ({"cov_eligible_fraction": len(eligible(s, tokens)) / n} if kind == "ClipCov" else {})
    compared = [i for both in contrasts(s, sequences).values() for part in both for i in part]
    train = {q.s for q in tokens}
    return {"sequence_group_contrast_fraction": len(compared) / max(len(train), 1)}
