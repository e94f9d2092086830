"""Random Specs with prefixes of sequences, beside criteria over tokens and sequences, and batches that they cut."""

from __future__ import annotations

import random

import rollout_corr as rc
from builders.batches import random_sequences, spoil, wild
from rollout_corr.spec.choices import PREFIX_REDUCTIONS, REDUCTIONS, REJECTED, STATS, SUMS_OVER, WHEN
from rollout_corr.spec.statistics import STATISTICS

# Ages come to the kernels as external statistics do, and have metrics of their own; entropies too.
OF_LOG_PROBS = tuple(stat for stat in STATS if stat == "external" or STATISTICS[stat].source in ("d", "probabilities"))


def random_weight(rng):
    return rc.Weight(
        "prefix",
        *rng.choice(((None, None), (0.5, 2.0), (None, 1.1), (0.9, None))),
        outside=rng.choice(("clamp", "zero")),
        normalize=rng.choice((None, "batch")),
        token_clamp=rng.choice((None, 0.5)),
        reduce=rng.choice(PREFIX_REDUCTIONS),
        growth=rng.choice((None, "sqrt")),
    )


def random_criterion(rng):
    stat = rng.choice(OF_LOG_PROBS)
    around = {"ratio": 1.0, "ratio_error": 1.2}.get(stat, 0.0)
    upper = around + rng.uniform(0.02, 0.6)
    return rc.Criterion(
        stat,
        "prefix",
        rng.choice(REDUCTIONS),
        lower=rng.choice((None, None, upper * 0.3)),
        upper=upper,
        when=rng.choice(WHEN),
        drop=rng.choice(("unit", "rest", "rest", "sequence", "token")),
        growth=rng.choice((None, "sqrt")),
        token_clamp=rng.choice((None, 0.5)),
        name="entropy" if stat == "external" else None,
    )


OTHERS = (
    rc.Criterion("k1", upper=0.4),
    rc.Criterion("abs", "sequence", "sum", upper=1.5, drop="token", when="outward"),
    rc.Criterion("ratio", "sequence", "mean", lower=0.8, upper=1.2),
)


def random_spec(rng):
    """A Spec that has prefixes, in its weight or its criteria or both."""
    found = [random_criterion(rng) for _ in range(rng.randint(0, 3))]
    criteria = {c.label: c for c in (*found, *(c for c in OTHERS if rng.random() < 0.3))}
    weight = random_weight(rng)
    if found and rng.random() < 0.4:
        weight = rng.choice((None, rc.Weight("token", upper=2.0), rc.Weight("product", upper=2.0)))
    return rc.Spec(
        weight,
        tuple(criteria.values()),
        rejected=rng.choice(REJECTED),
        nonfinite=rng.choice(("reject", "neutral", "propagate")),
        sums_over=rng.choice(SUMS_OVER),
        clamp=rng.choice((20.0, 0.5)),
        detail=rng.choice(("basic", "full")),
    )


def made(seed, lengths=(0, 1, 4, 9, 20, 33)):
    """A random batch, some of its tokens spoilt or wild, and a Spec."""
    rng = random.Random(seed)
    batch = random_sequences(
        seed, [rng.choice(lengths) for _ in range(rng.randint(1, 5))], advantages=rng.choice(("token", "sequence"))
    )
    return wild(batch) if rng.random() < 0.3 else spoil(batch, seed), random_spec(rng)
