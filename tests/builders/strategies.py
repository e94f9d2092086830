"""Hypothesis strategies: batches of sequences of ordinary, odd or broken tokens, and Specs to correct them by."""

from __future__ import annotations

import math

from hypothesis import strategies as st

import rollout_corr as rc
from builders.weights import KINDS, weight_of
from oracles.correction import Sequence
from rollout_corr.specs.choices import DROP, OUTSIDE, PREFIX_REDUCTIONS, REDUCTIONS, REJECTED, STATS, SUMS_OVER, WHEN
from rollout_corr.specs.statistics import STATISTICS

ADVANTAGES = st.sampled_from((-2.0, -0.25, 0.0, 0.25, 1.0, 1.0))
ODD = (0.0, -1e-12, -1e-6, -88.0, -200.0, -1100.0, -1e10)
BROKEN = (math.nan, math.inf, -math.inf, -3.4e38)
IMPOSSIBLE = (3.4e38, 1e4, 100.0, 1e-3)


def log_probs(impossible=False):
    """A log-prob: mostly one in [-8, 0], now and then an odd or a broken one, or one above 0."""
    choices = [st.floats(-8.0, 0.0, width=16)] * 6 + [st.sampled_from(ODD), st.sampled_from(BROKEN)]
    return st.one_of(choices + [st.sampled_from(IMPOSSIBLE)] * 2 * impossible)


@st.composite
def sequences(draw, most=6, longest=7, impossible=False):
    """A batch: any number of sequences, some of them empty, some without a valid token."""
    made = []
    for length in draw(st.lists(st.integers(0, longest), max_size=most)):
        rollout = draw(st.lists(log_probs(impossible), min_size=length, max_size=length))
        moves = draw(st.lists(st.floats(-0.75, 0.75, width=16), min_size=length, max_size=length))
        train = [x + move for x, move in zip(rollout, moves, strict=True)]
        if length and draw(st.integers(0, 4)) == 0:
            train[draw(st.integers(0, length - 1))] = draw(log_probs(impossible))
        mask = draw(st.lists(st.sampled_from((0, 1, 1, 1)), min_size=length, max_size=length))
        advantages = draw(st.lists(ADVANTAGES, min_size=length, max_size=length))
        entropy = draw(st.lists(st.floats(-4.0, 4.0, width=16), min_size=length, max_size=length))
        versions = draw(st.lists(st.integers(0, 8), min_size=length, max_size=length))
        ages = {"versions": versions, "current_version": 7}
        made.append(Sequence(train, rollout, mask, advantages, {"entropy": entropy}, **ages))
    return made


@st.composite
def criteria(draw, prefixes=False):
    """A criterion whose bounds lie where its statistic usually does."""
    stat = draw(st.sampled_from(STATS))
    reduce = draw(st.sampled_from((None, *REDUCTIONS)))
    over = "token" if reduce is None else draw(st.sampled_from(("sequence", "prefix")[: 1 + prefixes]))
    around = {"ratio": 1.0, "ratio_error": 1.3}.get(stat, 0.0)
    bounds = sorted(draw(st.lists(st.floats(0.015625, 1.5, width=16), min_size=2, max_size=2)))
    lower, upper = (around + (b - 0.5 if STATISTICS[stat].signed else b) for b in bounds)
    lower -= around / 2
    side = draw(st.sampled_from(("lower", "upper", "both")))
    return rc.Criterion(
        stat,
        over=over,
        reduce=reduce,
        lower=None if side == "upper" else lower,
        upper=None if side == "lower" else upper,
        when=draw(st.sampled_from(WHEN)),
        drop=draw(st.sampled_from(tuple(drop for drop in DROP if drop != "rest" or over == "prefix"))),
        name="entropy" if stat == "external" else None,
        token_clamp=draw(st.sampled_from((None, None, 0.5))),
        growth=draw(st.sampled_from((None, "sqrt"))) if over == "prefix" else None,
    )


@st.composite
def weights(draw, normalize=(None,), prefixes=False):
    lower, upper = draw(st.sampled_from(((None, None), (None, 2.0), (0.5, None), (0.5, 2.0), (0.9, 1.1))))
    level = draw(st.sampled_from(tuple(level for level in KINDS if level != "prefix" or prefixes)))
    return weight_of(
        level,
        lower,
        upper,
        draw(st.sampled_from(OUTSIDE)),
        draw(st.sampled_from(normalize)),
        draw(st.sampled_from((None, None, 0.5))),
        draw(st.sampled_from(PREFIX_REDUCTIONS)) if level == "prefix" else None,
        **({"growth": draw(st.sampled_from((None, "sqrt")))} if level == "prefix" else {}),
    )


@st.composite
def specs(draw, nonfinite=("reject", "neutral"), normalize=(None,), prefixes=False):
    """Any spec: with and without a weight, up to three criteria; with `prefixes` also over those."""
    picked = draw(st.lists(criteria(prefixes), max_size=3, unique_by=lambda criterion: criterion.label))
    return rc.Spec(
        weight=draw(st.none() | weights(normalize, prefixes)),
        criteria=tuple(picked),
        rejected=draw(st.sampled_from(REJECTED)),
        clamp=draw(st.sampled_from((20.0, 20.0, 0.5))),
        nonfinite=draw(st.sampled_from(nonfinite)),
        sums_over=draw(st.sampled_from(SUMS_OVER)),
        detail=draw(st.sampled_from(("basic", "full"))),
        apply=draw(st.sampled_from((True, True, True, False))),
    )
