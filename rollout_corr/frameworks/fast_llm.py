"""Fast-LLM 7d61a1b (2026-07-20)."""

from __future__ import annotations

from rollout_corr.frameworks.shared.recipe import BYPASS, GLOBAL, Named, clip, recipe
from rollout_corr.specs.surrogates import GSPO
from rollout_corr.specs.terms import Mean

RECIPES = {
    "grpo": recipe(Named(clip, epsilon_low=0.2, epsilon_high=0.2), BYPASS, GLOBAL),
    "gspo": recipe(
        Named(GSPO, epsilon_low=0.2, epsilon_high=0.2),
        BYPASS,
        "pass the documents of all ranks as the total",
        mean=Mean("sequence_sum"),
    ),
}
