"""ART 0.5.18: its own loss, and that of `ppo=True`."""

from __future__ import annotations

from rollout_corr.frameworks.shared.recipe import BYPASS, Named, around_one, as_wide, recipe
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import GSPO, PPO
from rollout_corr.spec.validate import one_of

UNKNOWN_LOGPS = "it trains on tokens that have no log-prob, this package leaves them out"


def _ppo(epsilon: float, epsilon_high: float | None, importance_sampling_level: str) -> Surrogate:
    """Return the loss of `ppo=True`. ART's two averages of token and sequence ratio have no surrogate here."""
    level = one_of("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    return as_wide(PPO if level == "token" else GSPO)(epsilon, epsilon_high)


RECIPES = {
    "default": recipe(Named(as_wide(around_one), epsilon=1.0, epsilon_high=4.0), BYPASS, UNKNOWN_LOGPS),
    "ppo": recipe(
        Named(_ppo, epsilon=0.2, epsilon_high=None, importance_sampling_level="token"), BYPASS, UNKNOWN_LOGPS
    ),
}
