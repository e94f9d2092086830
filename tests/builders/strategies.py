"""Hypothesis strategies: any Spec whose bounds are numbers."""

from __future__ import annotations

from hypothesis import strategies as st

from builders.unit_cases import random_spec


@st.composite
def specs(draw, nonfinite=("reject", "neutral"), normalize=(None,), prefixes=False):
    """Any Spec over tokens and sequences: with and without a weight and criteria; with `prefixes` also over those."""
    rng = draw(st.randoms(use_true_random=False))
    units = ("token", "sequence", "sequence", *(("prefix",) * prefixes))
    return random_spec(rng, units, nonfinite, normalize, versions=False)
