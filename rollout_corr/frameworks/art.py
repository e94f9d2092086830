"""ART 0.5.18: its own loss, and that of `ppo=True`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

from rollout_corr.frameworks.shared.recipe import BYPASS, Named, as_wide, recipe
from rollout_corr.specs.surrogate import Level, Surrogate
from rollout_corr.specs.surrogates import GSPO, PPO, AveragePPO, Score
from rollout_corr.specs.validate import one_of

_LEVELS: dict[str, Level] = {level: level for level in get_args(Level)}
_PPO_OF_LEVEL: dict[Level, Callable[..., Surrogate]] = {
    "token": PPO,
    "sequence": GSPO,
    "average": partial(AveragePPO, level="average"),
    "geometric_average": partial(AveragePPO, level="geometric_average"),
}
UNKNOWN_LOGPS = "it trains on tokens that have no log-prob, this package leaves them out"


def _ppo(epsilon: float, epsilon_high: float | None, importance_sampling_level: str) -> Surrogate:
    """Return the loss of `ppo=True`."""
    level = _LEVELS[one_of("importance_sampling_level", importance_sampling_level, _LEVELS)]
    return as_wide(_PPO_OF_LEVEL[level])(epsilon, epsilon_high)


def _cispo(epsilon: float, epsilon_high: float | None, importance_sampling_level: str) -> Score:
    """Return the loss of `ppo=False`."""
    level = _LEVELS[one_of("importance_sampling_level", importance_sampling_level, _LEVELS)]
    return Score(1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high), level=level)


RECIPES = {
    "default": recipe(
        Named(_cispo, epsilon=1.0, epsilon_high=4.0, importance_sampling_level="token"), BYPASS, UNKNOWN_LOGPS
    ),
    "ppo": recipe(
        Named(_ppo, epsilon=0.2, epsilon_high=None, importance_sampling_level="token"), BYPASS, UNKNOWN_LOGPS
    ),
}
