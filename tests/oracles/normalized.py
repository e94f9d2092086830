"""The oracle of self-normalized weights: the mean of each sequence or group, from the loops of correction.py."""

from __future__ import annotations

from dataclasses import replace

from oracles import correction as oracle
from oracles.numbers import add


def units_of(sequence_weights, tokens, spec):
    """The weights of one sequence that count in a mean: of each token, or one for the sequence."""
    found = [w for w, token in zip(sequence_weights, tokens, strict=True) if token is not None and token.measured]
    return found if spec.weight.per_token else found[:1]


def divisors(answer, spec, groups):
    """The mean that the weights of each sequence are divided by; 1.0 where there is none, or a small one."""
    broken = [
        spec.nonfinite == "reject" and any(token is not None and not token.finite for token in row)
        for row in answer.tokens
    ]
    means = []
    for s in range(len(answer.tokens)):
        together = [s] if spec.weight.normalize == "sequence" else [i for i, g in enumerate(groups) if g == groups[s]]
        units = []
        for i in together:
            if not broken[i]:
                units += units_of(answer.bounded[i], answer.tokens[i], spec)
        mean = add(units) / len(units) if units else 0.0
        means.append(1.0 if mean <= 1e-8 else mean)
    return means


def correct(sequences, spec, groups=None):
    """The weights of `rollout_corr.correct` for a weight with normalize "sequence" or "group"."""
    plain = oracle.correct(sequences, replace(spec, weight=replace(spec.weight, normalize=None)))
    if plain.weights is None:
        return plain
    by = divisors(plain, spec, groups)
    weights = [[w / by[s] if w else 0.0 for w in row] for s, row in enumerate(plain.weights)]
    return replace(plain, weights=weights)
