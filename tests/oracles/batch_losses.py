"""Surrogates that look at the whole batch, as loops over Python floats and sorts; shares nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from oracles.correction import exp
from oracles.loss import Sequence, advantage, base_of, trained, valid
from oracles.surrogates import clip, mean, ppo

BITS = 2**64


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
    """All tokens that train."""
    found = []
    for s, q in enumerate(sequences):
        order = valid(q)
        for t in trained(q, surrogate):
            base = base_of(q, surrogate, t)
            x = 0.0 if base is None else q.new[t] - base
            found.append(Token(s, t, order.index(t) + 1, q.new[t], x, advantage(q, t)))
    return found


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
    """The places in the list of which ClipCov draws."""
    values = covariances(tokens)
    return [i for i, q in enumerate(tokens) if s.lower < values[i] < s.upper and not clipped(s, q)]


def as_many(share: float, tokens: list[Token]) -> int:
    return max(int(share * len(tokens)), 1)


def chosen(s, tokens: list[Token], ids: list[int]) -> set[tuple[int, int]]:
    """The tokens that ClipCov or KLCov chooses, by sequence and index."""
    if type(s).__name__ == "ClipCov":
        order = sorted(eligible(s, tokens), key=lambda i: drawn(s.seed, ids[tokens[i].s], tokens[i].place))
        places = order[: as_many(s.share, tokens)]
    else:
        values = covariances(tokens)
        last = sorted(values, reverse=True)[: as_many(s.share, tokens)][-1:]
        places = [i for i, value in enumerate(values) if value >= last[0]]
    return {(tokens[i].s, tokens[i].t) for i in places}


def contributions(s, tokens: list[Token], lower: float, upper: float) -> tuple[float, float]:
    """Of A > 0 and of A < 0."""
    up = math.fsum(q.a * min(q.ratio(s), upper) for q in tokens if q.a > 0)
    return up, math.fsum(-q.a * max(q.ratio(s), lower) for q in tokens if q.a < 0)


def walk(s) -> Iterator[tuple[float, float]]:
    """The pairs of bounds in turn."""
    bounds = {"lower": s.lower, "upper": s.upper}
    yield bounds["lower"], bounds["upper"]
    for side in ("lower", "upper") if s.first == "lower" else ("upper", "lower"):
        most, step = getattr(s, f"{side}_most"), getattr(s, f"{side}_step")
        while bounds[side] < most:
            bounds[side] = min(bounds[side] + step, most)
            yield bounds["lower"], bounds["upper"]


def bounds(s, tokens: list[Token]) -> tuple[float, float]:
    """The bounds at which BAPO stops."""
    found = (s.lower, s.upper)
    for found in walk(s):
        up, down = contributions(s, tokens, *found)
        if up * (1.0 - s.share) >= s.share * down:
            break
    return found


def token_losses(
    s, sequences: list[Sequence], ids: list[int] | None = None
) -> dict[tuple[int, int], tuple[float, float]]:
    """The loss of each token that trains and its derivative by new_logp, by sequence and index; without weights."""
    tokens = tokens_of(s, sequences)
    ids = list(range(len(sequences))) if ids is None else ids
    kind, found = type(s).__name__, {}
    picked = chosen(s, tokens, ids) if kind != "BAPO" and tokens else set()
    lower, upper = bounds(s, tokens) if kind == "BAPO" else (0.0, 0.0)
    for q in tokens:
        r = q.ratio(s)
        slope = r if abs(q.x) < s.clamp else 0.0
        if kind == "ClipCov":
            value = ppo(s, r, q.a)
            pair = (0.0, 0.0) if (q.s, q.t) in picked else (value, 0.0 if clipped(s, q) else -slope * q.a)
        elif kind == "KLCov":
            more = s.penalty * ((q.s, q.t) in picked)
            sign = (q.x > 0) - (q.x < 0) if abs(q.x) < 1024 else 0
            pair = (-r * q.a + more * min(abs(q.x), 1024.0), -slope * q.a + more * sign)
        else:
            far = s.dual is not None and r > s.dual
            cut = r > upper if q.a >= 0 else r < lower or far
            bound = upper if q.a >= 0 else s.dual if far else lower
            pair = (-q.a * (bound if cut else r), 0.0 if cut else -slope * q.a)
        found[q.s, q.t] = (s.coef * pair[0], s.coef * pair[1])
    return found
