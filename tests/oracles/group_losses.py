"""Surrogates that compare the sequences of a group, as loops over Python floats; shares nothing with the package."""

from __future__ import annotations

import math

from oracles.batch_losses import Token, tokens_of
from oracles.loss import Sequence
from oracles.surrogates import clip, mean


def score(s, tokens: list[Token]) -> float:
    """The mean log-ratio of a sequence."""
    return clip(mean(clip(q.x, -1024.0, 1024.0) for q in tokens), -s.clamp, s.clamp)


def contrasts(s, sequences: list[Sequence], groups: list[int]) -> dict[int, tuple[dict[int, float], dict[int, float]]]:
    """The scores of the sequences by number, those with A <= 0 and the good ones, of each group that has both."""
    found: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
    for i in range(len(sequences)):
        tokens = [q for q in tokens_of(s, sequences) if q.s == i]
        if tokens:
            good = mean(q.a for q in tokens) > 0
            found.setdefault(groups[i], ({}, {}))[good][i] = score(s, tokens)
    return {group: both for group, both in found.items() if both[0] and both[1]}


def token_losses(s, sequences: list[Sequence], groups: list[int]) -> dict[tuple[int, int], tuple[float, float]]:
    """The loss of each token that trains and what it adds to the derivative by its new_logp, without weights.

    The derivative is that of the sum over the group's sequences of their mean token loss, times the tokens.
    """
    found = {(q.s, q.t): (0.0, 0.0) for q in tokens_of(s, sequences)}
    for others, goods in contrasts(s, sequences, groups).values():
        below = 1.0 + math.fsum(math.exp(x / s.tau) for x in others.values())
        above = 1.0 + math.fsum(math.exp(-x / s.tau) for x in goods.values())
        size = len(others) + len(goods)
        for i, x in (others | goods).items():
            slope = -math.exp(-x / s.tau) / above if i in goods else math.exp(x / s.tau) / below
            slope = 0.0 if abs(x) >= s.clamp else slope * size / s.tau
            for t in [t for j, t in found if j == i]:
                found[i, t] = (s.coef * (math.log(below) + math.log(above)), s.coef * slope)
    return found
