"""Hypothesis strategies: batches of sequences of ordinary, odd or broken tokens, and Specs to correct them by."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from builders.unit_cases import random_spec
from builders.weights import KINDS
from oracles.correction import Sequence
from rollout_corr.specs.choices import STATS

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
def specs(draw, nonfinite=("reject", "neutral"), normalize=(None,), prefixes=False):
    """Any Spec over tokens and sequences: with and without a weight and criteria; with `prefixes` also over those."""
    rng = draw(st.randoms(use_true_random=False))
    overs = ("token", "sequence", "sequence", *(("prefix",) * prefixes))
    levels = KINDS if prefixes else KINDS[:3]
    return random_spec(rng, STATS, overs, nonfinite, levels=levels, normalize=normalize, decay=(None,))
