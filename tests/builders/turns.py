"""Turns for the tests: lengths that make up each sequence, and the offsets and ids of them in every layout."""

from __future__ import annotations

import itertools
import random

import torch

import rollout_corr as rc
from builders.weights import weight_of
from rollout_corr.specs.choices import REJECTED, SUMS_OVER


def random_turns(sequences, seed):
    """Lengths of turns, some of them 0, that add up to each sequence."""
    rng = random.Random(seed)
    found = []
    for sequence in sequences:
        cuts = sorted(rng.randint(0, len(sequence)) for _ in range(rng.randint(0, 3)))
        found.append([b - a for a, b in itertools.pairwise([0, *cuts, len(sequence)])])
    return found


def offsets_of(laid, turns):
    """[U + 1] offsets of turns in a layout; slots between two tokens of a padded row belong to the earlier turn."""
    return laid.out.turn_offsets(turns).long()


def ids_of(laid, turns):
    """An id per slot in the layout; ids differ between neighboring turns and repeat elsewhere."""
    offsets = offsets_of(laid, turns)
    size = max(int(offsets[-1]), 0)
    if isinstance(laid.train, list):
        shape = (size,)
    else:
        shape = (laid.train.values() if laid.train.is_nested else laid.train).shape
    ids = torch.zeros(shape, dtype=torch.int16).reshape(-1)
    for i, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        ids[a:b] = i % 7
    if isinstance(laid.train, list):
        return list(ids.split([len(row) for row in laid.train]))
    if laid.train.is_nested:
        return torch.nested.nested_tensor_from_jagged(ids, laid.train.offsets())
    return ids.reshape(shape)


# --- Specs ---


def specs_over(over):
    """Specs with everything above the token, over turns or over sequences."""
    unit = {"over": over, "reduce": "mean"}
    weights = [weight_of(level, 0.8, 1.25, among=over) for level in ("product", "geometric")]
    criteria = [
        rc.Criterion("ratio", **unit, lower=0.9, upper=1.2, label="a"),
        rc.Criterion("k3", over, "max", upper=0.1, when="negative_advantage", drop="token", label="b"),
        rc.Criterion("k1", over, "sum", upper=0.3, when="positive_advantage", label="c"),
    ]
    return [
        rc.Spec(weight, criteria[:i], rejected=rejected, sums_over=sums)
        for i, (weight, rejected, sums) in enumerate(itertools.product(weights, REJECTED[1:], SUMS_OVER))
    ]
