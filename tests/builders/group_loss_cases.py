"""Batches and expectations for surrogates that compare the sequences of a group."""

from __future__ import annotations

import math

import rollout_corr as rc
from builders.loss_cases import only, random_batch
from oracles import group_losses as oracle

LENGTHS = (9, 1, 14, 0, 5, 12, 30, 3, 7, 2)
GROUPS = [2, 0, 2, 1, 0, 4, 0, 2, 2, 4]
TOGETHER = {"mean": rc.Mean("sequence", over="kept")}


def made(seed, *names, **options):
    """A batch with one advantage for each sequence."""
    return only(random_batch(seed, LENGTHS, **({"advantages": "sequence"} | options)), "old", *names)


def expected(surrogate, batch, groups):
    """The mean over sequences of their mean over trained tokens, and its derivatives by sequence."""
    losses = oracle.token_losses(surrogate, batch, groups)
    counts = [sum(s == i for s, _ in losses) for i in range(len(batch))]
    n = max(sum(count > 0 for count in counts), 1)
    weight = {(s, t): (1.0 if batch[s].weights is None else batch[s].weights[t]) / counts[s] / n for s, t in losses}
    value = math.fsum(weight[at] * pair[0] for at, pair in losses.items())
    slopes = [
        [weight.get((s, t), 0.0) * losses.get((s, t), (0.0, 0.0))[1] for t in range(len(q))]
        for s, q in enumerate(batch)
    ]
    return value, slopes
