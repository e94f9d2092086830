"""Tinker's losses, sums over tokens."""

from __future__ import annotations

from rollout_corr.frameworks.shared.recipe import BYPASS, recipe
from rollout_corr.specs.surrogates import PPO, Reinforce, Score
from rollout_corr.specs.terms import Mean

RECIPES = {
    "importance_sampling": recipe(Reinforce(), BYPASS, mean=Mean("sum")),
    "ppo": recipe(PPO(0.2, 0.2), BYPASS, mean=Mean("sum")),
    "cispo": recipe(Score(0.0, 4.0), BYPASS, mean=Mean("sum")),
}
