"""Hypothesis strategies: any Spec whose bounds are numbers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from frozen.generator import needs_of, random_spec


@st.composite
def specs(draw, nonfinite=("reject", "neutral"), normalize=(None,), prefixes=False):
    """Any Spec over tokens and sequences that reports native metrics; with `prefixes` also over those.

    It asks for no tensor of the caller's but the external one "entropy".
    """
    rng = draw(st.randoms(use_true_random=False))
    units = ("token", "sequence", "sequence", *(("prefix",) * prefixes))
    while True:
        spec = replace(random_spec(rng, units, rules=False), report=("native",))
        wants, weight = needs_of(spec), spec.weight
        right = spec.nonfinite in nonfinite and (weight is None or weight.normalize in normalize)
        if right and not wants.entropy and not wants.versions and wants.external <= {"entropy"}:
            return spec
