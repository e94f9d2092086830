"""Tinker's losses, sums over tokens."""

from __future__ import annotations

from rollout_corr.frameworks.shared.recipe import BYPASS, recipe
from rollout_corr.specs.surrogates import PPO, Reinforce, Score

RECIPES = {
    "importance_sampling": recipe(Reinforce(), BYPASS, reduction="sum"),
    "ppo": recipe(PPO(0.2, 0.2), BYPASS, reduction="sum"),
    "cispo": recipe(Score(0.0, 4.0), BYPASS, reduction="sum"),
}
