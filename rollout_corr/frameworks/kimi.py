"""Kimi K2.5's interval, for `policy_loss`: a token outside has no gradient, whatever the sign of its advantage."""

from __future__ import annotations

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BYPASS, anchor, recipe
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.surrogates import Reinforce


@preset_of("Kimi K2.5 (2026-02), arXiv 2602.02276")
def interval(lower: float = 0.5, upper: float = 2.0) -> Spec:
    """0 for a token whose ratio new/rollout is outside [lower, upper]; the report gives no bounds."""
    criterion = Criterion("ratio", lower=lower, upper=upper, of="new/rollout", label="interval")
    return Spec(criteria=(criterion,), rejected="zero")


# Kimi K2.5's report, equation 1, gives no number: tau is prime-rl's, the interval ours.
RECIPES = {
    "k25": recipe(
        Reinforce(of="new/rollout"),
        BYPASS,
        "outside the interval its Clip has a value, which is 0 here: no gradient in either",
        spec="kimi.interval",
        regularizer=anchor("all", tau=1e-3),
    ),
}
