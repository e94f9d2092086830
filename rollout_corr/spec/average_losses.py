"""PPO's clip of a ratio that lies between those of the token and of its sequence, with its gradient through both.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from rollout_corr.spec.ratio_losses import PPO
from rollout_corr.spec.surrogate import Level, LossTokens, averaged
from rollout_corr.spec.validate import choice

Between = Literal["average", "geometric_average"]
BETWEEN: tuple[str, ...] = get_args(Between)


@dataclass(frozen=True, repr=False)
class AveragePPO(PPO):
    """PPO's clip of an average of the token's ratio and the sequence's geometric ratio (ART).

    The gradient of a token flows through its own log-prob and through the sequence's mean to all tokens of the
    sequence that train. The clip of each token decides how much of its gradient reaches the others, and needs the mean
    first: the kernels pass over the tokens three times, and twice without a gradient.

    Args:
        low: As for PPO.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        level: r is the "average" of the two ratios, or their "geometric_average".
    """

    level: Between = "average"

    option: ClassVar[str | None] = "level"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("AveragePPO.level", self.level, BETWEEN)

    @property
    def takes(self) -> Level:
        """As its field says."""
        return self.level

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        """Give the logarithm of the average, which has a gradient through the token and through the mean."""
        return averaged(self.level, tokens.x, tokens.mean(tokens.x))

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        name = "average" if self.level == "average" else "geometric average"
        return f"{super().explain()}; r = the {name} of the token's ratio and the sequence's geometric ratio"
