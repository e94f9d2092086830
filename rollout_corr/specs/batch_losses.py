"""Surrogates that see the whole batch, or its groups, before the first token has a loss.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage. Means and sums over the batch
are over its trained tokens, on all ranks of `Ranks.batch`, and constants of the gradient. The covariance of a
token is (A - mean A) (new_logp - mean new_logp): tokens where it is large take entropy from the policy.
Groups are those of `Batch.groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .surrogate import Decided, LossTokens, Range, Ranges, SeenBatch, SeenGroups, Surrogate, TokenLoss, Traits
from .surrogates import OF_FLOAT32, PPO
from .validate import LARGEST_FLOAT32, number, wrong_type, wrong_value


def _share(name: str, value: object) -> float:
    share = number(name, value)
    if not 0.0 < share <= 1.0:
        raise wrong_value(name, "a number above 0 and at most 1", share)
    return share


def _covariance(batch: SeenBatch) -> Tensor:
    """The covariance of each token."""
    tokens = batch.tokens
    new = tokens.new.detach()
    return (tokens.advantages - batch.mean(tokens.advantages)) * (new - batch.mean(new))


def _as_many(batch: SeenBatch, share: float) -> Tensor:
    """0-d float64: a share of the trained tokens, rounded down, at least one."""
    return (batch.count() * share).floor().clamp(min=1.0)


def _of_chosen(covariance: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """The statistics of the tokens chosen."""
    return {
        "cov_chosen": torch.count_nonzero(chosen),
        "cov_of_chosen": torch.where(chosen, covariance, 0.0).sum(dtype=torch.float64),
    }


@dataclass(frozen=True, repr=False)
class ClipCov(PPO):
    """PPO's clip, with the loss set to 0 at a few randomly drawn tokens of large covariance (Clip-Cov).

    The draw is a function of `seed`, of the sequence and of the token's place among the valid tokens of its sequence,
    so a call repeats to the bit, whatever the padding. `Batch.sequence_ids` identifies a
    sequence; without them its place in the call does. Give every step another seed, or other ids.

    Args:
        low: As for PPO.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        share: The number chosen is this share of the trained tokens, rounded down, at least 1, and fewer where fewer
            may be chosen; above 0 and at most 1.
        lower: A token may be chosen where it is not clipped and its covariance is above this,
        upper: and below this.
        seed: Of the draw, an integer from 0 up to 2^63 - 1.
    """

    share: float = 2e-4
    lower: float = 1.0
    upper: float = 5.0
    seed: int = 0

    traits: ClassVar[Traits] = Traits(sees="batch", sums=("cov_chosen", "cov_of_chosen", "cov_eligible"), slope=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("ClipCov.share", self.share))
        for name in ("lower", "upper"):
            self._set(**{name: number(f"ClipCov.{name}", getattr(self, name))})
        if not self.lower <= self.upper:
            raise wrong_value("ClipCov.upper", f"a number >= lower={self.lower!r}", self.upper)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise wrong_type("ClipCov.seed", "an integer", self.seed)
        if not 0 <= self.seed < 2**63:
            raise wrong_value("ClipCov.seed", "an integer from 0 up to 2^63 - 1", self.seed)

    def see_batch(self, batch: SeenBatch) -> Decided:
        """Choose among the tokens whose covariance lies within the bounds, those that PPO clips left out."""
        covariance = _covariance(batch)
        low, high, dual = self._clipped(batch.tokens)
        eligible = (covariance > self.lower) & (covariance < self.upper) & batch.trains & ~(low | high | dual)
        chosen = batch.drawn(self.seed, eligible, _as_many(batch, self.share))
        sums = {**_of_chosen(covariance, chosen), "cov_eligible": torch.count_nonzero(eligible)}
        return Decided((chosen,), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        clipped, chosen = super().loss(tokens), tokens.decided.tokens[0]
        slope = None if clipped.slope is None else (clipped.slope[0], torch.where(chosen, 0.0, clipped.slope[1]))
        return clipped._replace(value=torch.where(chosen, 0.0, clipped.value), slope=slope)

    def explain(self) -> str:
        return (
            f"{super().explain()}; 0 at a share of {self.share:g} of the tokens, drawn from tokens of covariance in "
            f"({self.lower:g}, {self.upper:g})"
        )


@dataclass(frozen=True, repr=False)
class KLCov(Surrogate):
    """REINFORCE's ratio, -r A, and a penalty |x| at the tokens of largest covariance (KL-Cov).

    Tokens that tie with the last one chosen are chosen too.

    Args:
        share: The number chosen is this share of the trained tokens, rounded down, at least 1; above 0, at most 1.
        penalty: Factor of |x| at these.
    """

    share: float = 2e-4
    penalty: float = 0.1

    traits: ClassVar[Traits] = Traits(sees="batch", sums=("cov_chosen", "cov_of_chosen"))
    # Times |x| = 0 an infinite penalty is NaN.
    ranges: ClassVar[Ranges] = {"penalty": OF_FLOAT32}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("KLCov.share", self.share))

    def see_batch(self, batch: SeenBatch) -> Decided:
        covariance = _covariance(batch)
        chosen = batch.largest(covariance, batch.trains, _as_many(batch, self.share))
        return Decided((chosen,), _of_chosen(covariance, chosen))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        away = tokens.saturated(tokens.x).abs()
        penalty = torch.where(tokens.decided.tokens[0], self.penalty * away, 0.0)
        return TokenLoss(penalty - tokens.clamped.exp() * tokens.advantages)

    def explain(self) -> str:
        return f"-r A, and {self.penalty:g} |x| more at the share of {self.share:g} of the tokens of largest covariance"


@dataclass(frozen=True, repr=False)
class REAL(Surrogate):
    """A classification of the sequences of each group by their scores (REAL): the good ones up, the others down.

    The score s of a sequence is its mean of x, and a sequence is good where its mean of A is above 0. The loss of a
    group that has both kinds is log(1 + sum of e^(s / tau) over the others) + log(1 + sum of e^(-s / tau) over the good
    ones); the loss of any other group is 0. Every sequence that trains carries the loss of its group, so a mean over
    sequences is the mean over groups where groups are of one size. Only the sign of an advantage matters.

    The gradient belongs to this mean, Mean("sequence"). A token's weight, its `scale` and its share of the mean
    multiply its own gradient. If these differ within a group, as with Mean("token") and sequences of
    different lengths, that is not the derivative of the value, in which they belong to all of the group.

    Args:
        tau: The temperature, at least 1e-30; no sequence's gradient by its score exceeds 1 / tau.
    """

    tau: float = 0.5

    traits: ClassVar[Traits] = Traits(level="sequence", sees="groups", sums=("group_contrast",))
    # With a smaller one a derivative, up to the size of a group over tau, may leave float32, and 0 times it is NaN.
    ranges: ClassVar[Ranges] = {"tau": Range(1e-30, LARGEST_FLOAT32)}

    def see_groups(self, groups: SeenGroups) -> Decided:
        """Compute the loss of each group, and its derivative by each score."""
        score, good = groups.scores, groups.advantages > 0.0
        scaled = torch.where(good, -score, score).double() / self.tau
        (others, goods), counts = groups.log_sums(scaled, good.long(), 2)
        contrasts = groups.trains & (counts > 0).all(0)
        value = torch.where(contrasts, others + goods, 0.0)
        # Of log(1 + sum of e^z) by z: a softmax. Each of the group's sequences carries its loss.
        slope = (scaled - torch.where(good, goods, others)).exp() / self.tau * counts.sum(0)
        slope = torch.where(contrasts & (score.abs() < self.clamp), torch.where(good, -slope, slope), 0.0)
        sums = {"group_contrast": torch.count_nonzero(contrasts)}
        return Decided((), sums, (score, value.to(score.dtype), slope.to(score.dtype)))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """The loss of its group at every token, with the derivative of that by its score as the slope."""
        _, value, slope = tokens.decided.tokens
        away = tokens.saturated(tokens.x)
        return TokenLoss(value + slope * (away - away.detach()))

    def explain(self) -> str:
        return (
            f"log(1 + sum of e^(s / {self.tau:g}) where A <= 0) + log(1 + sum of e^(-s / {self.tau:g}) where A > 0), "
            "over the sequences of its group, s = their mean log-ratio"
        )


OF_BATCH: tuple[type[Surrogate], ...] = (ClipCov, KLCov, REAL)
