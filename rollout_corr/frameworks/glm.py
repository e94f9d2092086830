"""GLM-5's IcePop, of its reasoning RL. The double-sided importance sampling of its agentic RL is a loss: a recipe."""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, BYPASS, SEQUENCES, Named, around_one, clip, of_presets, recipe
from rollout_corr.frameworks.shared.specs import gated
from rollout_corr.specs.correction import Criterion, Spec
from rollout_corr.specs.validate import positive


@preset_of("GLM-5 (2026-02), arXiv 2602.15763")
def icepop(beta: float = 2.0) -> Spec:
    """w = exp(D) inside [1 / beta, beta], else 0."""
    upper = positive("beta", beta, finite=False)
    return gated(Criterion("ratio", lower=1.0 / upper, upper=upper))


# GLM-5's report: equation 1, and equations 3 to 5, which give no number: the bounds are equation 1's.
RECIPES = of_presets("glm", Named(clip, epsilon_low=0.2, epsilon_high=0.28), BOTH, mean=SEQUENCES) | {
    "double_sided": recipe(
        Named(partial(around_one, outside="zero", of="new/rollout"), epsilon_low=0.2, epsilon_high=0.28),
        BYPASS,
        "its bounds exclude their ends, those of this package include them",
    ),
}
