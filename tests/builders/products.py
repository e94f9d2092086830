"""Cross products of what a Spec can say, each on a small random batch whose bounds cut it. Layouts are drawn."""

from __future__ import annotations

import itertools
import math
import random

import rollout_corr as rc
from builders.batches import LAYOUTS, cut, random_sequences, spoil, wild
from builders.weights import weight_of
from oracles import correction as oracle
from rollout_corr.specs.choices import DROP, NONFINITE, OUTSIDE, REDUCTIONS, REJECTED, SUMS_OVER, WHEN

BATCHES = [
    random_sequences(0),
    wild(random_sequences(1)),
    random_sequences(2, (6, 3, 2, 8), invalid=0.4),
    wild(random_sequences(3, (1, 9, 4, 3, 5), invalid=0.1)),
    random_sequences(4, advantages="sequence"),
    random_sequences(5, (2, 2, 2, 2, 2, 2, 2), scale=1.5, invalid=0.1),
]
BROKEN = [spoil(random_sequences(seed, scale=0.6), seed, share=0.5) for seed in (6, 7, 8)]


def fit(sequences, spec, arguments, pattern):
    """The criterion with bounds that cut this batch."""
    open_ended = rc.Criterion(**arguments, upper=math.inf, label="fit")
    answer = oracle.correct(sequences, rc.Spec(**{**spec, "criteria": (*spec.get("criteria", ()), open_ended)}))
    flat = [v for row in answer.outcomes[-1].values for v in row]
    in_logs = arguments["stat"] == "ratio"
    lower, upper = cut(flat, pattern, signed=in_logs or arguments["stat"] in ("k1", "prob_diff", "age", "external"))
    if in_logs:
        lower, upper = (None if b is None else math.exp(b) for b in (lower, upper))
    return rc.Criterion(**arguments, lower=lower, upper=upper)


# Prefixes have tests of their own: tests/definition/test_prefix.py.
DROPS = tuple(drop for drop in DROP if drop != "rest")

TRANSFORMS = [(None, None), (None, 1.2), (0.8, None), (0.8, 1.2)]


def weights_product(level, share=1.0):
    """A share of bounds x outside x normalization x nonfinite x rejection x sums_over, with and without criteria."""
    rng = random.Random(level)
    veto = rc.Criterion("abs", over="sequence", reduce="max", upper=1.1)
    drops = rc.Criterion("abs", upper=0.45)
    for (lower, upper), outside, normalize, nonfinite, rejected, sums_over, criteria in itertools.product(
        TRANSFORMS, OUTSIDE, (None, "batch"), NONFINITE, REJECTED, SUMS_OVER, ((), (veto, drops))
    ):
        if rng.random() > share:
            continue
        weight = weight_of(level, lower, upper, outside, normalize, token_clamp=rng.choice((None, None, 0.3)))
        detail = rng.choice(("basic", "full"))
        spec = rc.Spec(weight, criteria, rejected, rng.choice((20.0, 20.0, 0.25)), nonfinite, sums_over, detail)
        yield rng.choice(BATCHES + BROKEN), spec, rng.choice(LAYOUTS), rng.random() < 0.3


def criteria_product(stat, share=1.0):
    """A share of over x reduce x when x drop x non-finite policy x sums_over; layout, rejection and sides are drawn."""
    rng = random.Random(stat)
    settings = list(itertools.product(REJECTED, (None, 0.3), (rc.Weight.geometric(), None), (True, False), (1e-8, 0.2)))
    first = rc.Criterion("external", name="entropy", upper=0.6, label="first")
    for over, when, drop in itertools.product((None, *REDUCTIONS), WHEN, DROPS):
        for nonfinite, sums_over in itertools.product(NONFINITE, SUMS_OVER):
            if rng.random() > share:
                continue
            rejected, token_clamp, weight, apply, eps = rng.choice(settings)
            spec = {
                "nonfinite": nonfinite,
                "sums_over": sums_over,
                "rejected": rejected,
                "weight": weight,
                "apply": apply,
            }
            if sums_over == "kept":
                spec["criteria"] = (first,)
            arguments = {"stat": stat, "when": when, "drop": drop, "token_clamp": token_clamp, "eps": eps}
            arguments.update({} if over is None else {"over": "sequence", "reduce": over})
            arguments.update({"name": "entropy"} if stat == "external" else {})
            sequences = rng.choice(BATCHES + BROKEN if nonfinite == "reject" else BROKEN)
            tested = fit(sequences, spec, arguments, rng.choice(("upper", "lower", "both")))
            spec = rc.Spec(**{**spec, "criteria": (tested, *spec.get("criteria", ()))})
            yield sequences, spec, rng.choice(LAYOUTS), rng.random() < 0.3
