"""Tokens so near to the bounds of criteria that the last bits of an exponential would decide, if they were asked."""

from __future__ import annotations

import math

import numpy as np
import torch

import rollout_corr as rc
from builders.kernel_cases import shaped
from builders.same_bits import is_count
from frozen.runners import one_thread
from lab.aot.variants import VARIANTS
from lab.ptx.cases import shape_of
from lab.ptx.session import compiled
from rollout_corr.specs.criterion import threshold_of

C = rc.Criterion
# Compared as D, or as sums of D and its square.
OF_D = (
    C("ratio", lower=0.8, upper=1.25),
    C("k1", upper=0.21),
    C("k2", upper=0.025),
    C("abs", upper=0.23),
    C("ratio_error", upper=1.27),
    C("ratio_deviation", upper=0.19),
    C("k3", lower=1e-3, upper=0.02),
    C("k3_reverse", upper=0.021),
    C("ratio", over="sequence", reduce="max", upper=1.22),
    C("ratio", over="sequence", reduce="min", lower=0.82),
    C("ratio", over="sequence", reduce="mean", lower=0.85, upper=1.19),
    C("ratio", over="sequence", reduce="sum", upper=1.4, label="product"),
    C("k1", over="sequence", reduce="mean", upper=0.16),
)
# The value of exp decides.
OF_EXP = (
    C("prob_diff", upper=0.03),
    C("tv", upper=0.05),
    C("binary_kl", upper=0.004),
    C("binary_kl_reverse", upper=0.5),
)
# How near to a bound these may be decided otherwise on another backend: docs/math.md.
RELATIVE, ABSOLUTE = 1e-5, 5e-7


def around(x: float) -> list[float]:
    """List the five floats next to a number."""
    middle = np.float32(x)
    low, high = np.nextafter(middle, np.float32(-9)), np.nextafter(middle, np.float32(9))
    return [float(y) for y in (np.nextafter(low, np.float32(-9)), low, middle, high, np.nextafter(high, np.float32(9)))]


def at_bounds_of_d() -> list[list[tuple[float, float]]]:
    """Make sequences of train and rollout log-probs: each D next to a bound alone, with another one, and with 0."""
    sequences = []
    for criterion in OF_D:
        threshold = threshold_of(criterion)
        for bound in (threshold.lower, threshold.upper, *(threshold.hole or ())):
            if bound is None:
                continue
            for sign in (1, -1):  # some statistics grow with |D| or fall with D
                near = [y for x in around(sign * bound) for y in [(x, 0.0) if x <= 0 else (0.0, -x)]]
                sequences += [[token] for token in near]
                sequences += [[one, other] for one in near for other in near]
                sequences += [[token, (-1.0, -1.0)] for token in near]
    return sequences


def value_of(stat: str, train: float, rollout: float) -> float:
    """A statistic of the probabilities of a token, in float64."""
    p, q, d = math.exp(rollout), math.exp(train), train - rollout
    if stat == "prob_diff":
        return q - p
    if stat == "tv":
        return abs(q - p)
    p, q, d = (p, q, d) if stat == "binary_kl" else (q, p, -d)
    return (1 - p) * (math.log1p(-p) - math.log1p(-q)) - p * d


def at_bounds_of_exp(seed: int, count: int = 400) -> list[tuple[float, float]]:
    """Draw train and rollout log-probs of tokens just farther from a bound than the tolerance, on either side."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        criterion = OF_EXP[len(found) % len(OF_EXP)]
        bound, rollout = float(criterion.upper), float(np.float32(-rng.exponential(0.7) - 0.06))
        apart = max(RELATIVE * bound, ABSOLUTE)
        # Where the statistic grows with the train policy's log-prob, above the rollout policy's.
        low, high = rollout, -1e-3
        if value_of(criterion.stat, high, rollout) < 1.1 * bound:
            continue
        wanted = bound + rng.choice([-1.05, 1.05]) * apart
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if value_of(criterion.stat, middle, rollout) < wanted else (low, middle)
        train = float(np.float32(low))
        if apart <= abs(value_of(criterion.stat, train, rollout) - bound) <= 1.5 * apart:
            found.append((train, rollout))
    return found


def run_near_bounds(seed: int = 0, **settings) -> None:
    """Decide tokens at bounds as plain torch does: those of D to the last float, those of exp beyond the tolerance."""
    spec = rc.Spec(rc.Weight.token(lower=0.8, upper=1.25, outside="zero"), OF_D + OF_EXP)
    sequences = at_bounds_of_d() + [[token] for token in at_bounds_of_exp(seed)]
    train, rollout = (torch.tensor([token[i] for row in sequences for token in row]) for i in (0, 1))
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in sequences])])
    given = {"mask": torch.ones(train.shape, dtype=torch.bool), "cu_seqlens": offsets, "spec": spec}
    wanted = rc.correct(train, rollout, **given, backend="torch")
    shapes = ((0, shape_of(VARIANTS["metrics_short"])),)
    with one_thread(), shaped(shapes), compiled(seed=seed, **settings):
        out = rc.correct(train, rollout, **given, backend="triton")
    assert out.keep.equal(wanted.keep) and out.mask.equal(wanted.mask)
    assert (out.weights == 0).equal(wanted.weights == 0)
    counts, expected = (x.statistics.metrics_async().values() for x in (out, wanted))
    # Whether the mean weight of a sequence lies beyond a bound is no decision, and a matter of exponentials.
    exact = [name for name in expected if is_count(name) and name not in ("sequences_above", "sequences_below")]
    wrong = {name: (counts[name], expected[name]) for name in exact if counts[name] != expected[name]}
    assert not wrong, wrong
