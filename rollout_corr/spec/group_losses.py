"""Surrogates that compare the sequences of a group, and so look at the whole batch before the first token has a loss.

Notation as in surrogate.py: x the log-ratio new_logp - base, A the advantage. Groups are those of the call's
`group_index` or `group_size`, on all ranks of the batch group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rollout_corr.spec.surrogate import Level, Looked, LossTokens, SeenGroups, Surrogate, TokenLoss
from rollout_corr.spec.thresholds import LARGEST_FLOAT32

SMALLEST_TAU = 1e-30


@dataclass(frozen=True, repr=False)
class REAL(Surrogate):
    """A classification of the sequences of each group by their scores (REAL): the good ones up, the others down.

    The score s of a sequence is its mean of x, and a sequence is good where its mean of A is above 0. The loss of a
    group that has both kinds is log(1 + sum of e^(s / tau) over the others) + log(1 + sum of e^(-s / tau) over the good
    ones); that of any other group is 0. Every sequence that trains carries the loss of its group, so a mean over
    sequences is the mean over groups where groups are of one size. Advantages decide by their sign alone.

    The gradient is that of this mean, reduction="sequence_mean_token_mean". A token's weight, its `scale` and its part
    in the denominator multiply its own gradient. Where those of a group's sequences differ, as with "token_mean" and
    sequences of different lengths, that is not the derivative of the value, in which they belong to all of the group.

    Args:
        tau: The temperature, at least 1e-30; no sequence's gradient by its score exceeds 1 / tau.
    """

    tau: float = 0.5

    looks: ClassVar[bool] = True
    by_group: ClassVar[bool] = True
    found: ClassVar[tuple[str, ...]] = ("group_contrast",)

    def __post_init__(self) -> None:
        super().__post_init__()
        # With a smaller one a derivative, up to the size of a group over tau, may leave float32, and 0 times it is NaN.
        self._number("tau", least=SMALLEST_TAU, most=LARGEST_FLOAT32)

    @property
    def takes(self) -> Level:
        """Its sequence's."""
        return "sequence"

    def look_at_groups(self, seen: SeenGroups) -> Looked:
        """Compute the loss of each group, and its derivative by each score."""
        score, good = seen.scores, seen.advantages > 0.0
        scaled = torch.where(good, -score, score).double() / self.tau
        (others, goods), counts = seen.log_sums(scaled, good.long(), 2)
        contrasts = seen.trains & (counts > 0).all(0)
        value = torch.where(contrasts, others + goods, 0.0)
        # Of log(1 + sum of e^z) by z: a softmax. Each of the group's sequences carries its loss.
        slope = (scaled - torch.where(good, goods, others)).exp() / self.tau * counts.sum(0)
        slope = torch.where(contrasts & (score.abs() < self.clamp), torch.where(good, -slope, slope), 0.0)
        found = {"group_contrast": torch.count_nonzero(contrasts)}
        return Looked((), (), found, (score, value.to(score.dtype), slope.to(score.dtype)))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Give every token the loss of its group, and the derivative of that by its score as its slope."""
        _, value, slope = tokens.looked.tokens
        away = tokens.saturated(tokens.x)
        return TokenLoss(value + slope * (away - away.detach()))

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return (
            f"log(1 + sum of e^(s / {self.tau:g}) where A <= 0) + log(1 + sum of e^(-s / {self.tau:g}) where A > 0), "
            "over the sequences of its group, s = their mean log-ratio"
        )
