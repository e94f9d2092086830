"""Surrogates whose gradient is a constant times the gradient of new_logp: the ratio is stopped, or there is none.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage, sg() a constant of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .choices import OUTSIDE, Outside
from .surrogate import LEVELS, Level, LossTokens, Surrogate, TokenLoss, Traits
from .validate import bounds, choice, positive

Divergence = Literal["tv", "kl"]
Squared = Literal["token", "sequence"]

DIVERGENCES: tuple[str, ...] = get_args(Divergence)
SQUARED: tuple[str, ...] = get_args(Squared)

OF_LEVEL: dict[Level, str] = {
    "token": "",
    "sequence": "; log r = the sequence's mean of x",
    "average": "; r = the average of the token's ratio and the sequence's geometric ratio",
    "geometric_average": "; log r = the average of x and the sequence's mean of x",
}


@dataclass(frozen=True, repr=False)
class Score(Surrogate):
    """The score function with a stopped ratio: -sg(bounded r) A new_logp (CISPO, truncated policy gradient).

    Args:
        lower: Lower bound of the ratio, or None for an open side.
        upper: Upper bound of the ratio, or None for an open side.
        outside: A ratio outside the bounds becomes the bound ("clamp") or 0 ("zero").
        level: The ratio of the token, the geometric mean over its "sequence", or the "average" or the
            "geometric_average" of these two.
    """

    lower: float | None = None
    upper: float | None = None
    outside: Outside = "clamp"
    level: Level = "token"

    traits: ClassVar[Traits] = Traits(
        formula="outside", own_bounds=("lower", "upper"), weights_in_bypass="replace_ratio"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        lower, upper = bounds("Score", self.lower, self.upper, signed=False, ratio=True, clamps=True)
        self._set(lower=lower, upper=upper)
        choice("Score.outside", self.outside, OUTSIDE)
        choice("Score.level", self.level, LEVELS)

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        return {"score": (self.lower, self.upper)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        found = (("low", self.lower), ("high", self.upper))
        return tuple(name for name, bound in found if own_ratio and bound is not None)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the score function's loss: the ratio is a constant, and 1 where weights take its place."""
        new, advantages = tokens.new, tokens.advantages
        if not tokens.own_ratio:
            return TokenLoss(-advantages * new)
        x = tokens.clamped.detach()
        ratio = x.exp()
        above, below = tokens.outside(x, self.lower, self.upper)
        if self.outside == "zero":
            ratio = torch.where(above | below, 0.0, ratio)
        elif self.has_own_bounds:
            ratio = ratio.clamp(self.lower, self.upper)
        return TokenLoss(-ratio * advantages * new, low=below, high=above)

    def explain(self) -> str:
        text = "-sg(r) A new_logp"
        if self.has_own_bounds:
            lower, upper = self.lower or 0.0, math.inf if self.upper is None else self.upper
            becomes = "clamped to" if self.outside == "clamp" else "0 outside"
            text += f", r {becomes} [{lower:g}, {upper:g}]"
        return text + OF_LEVEL[self.level]


@dataclass(frozen=True, repr=False)
class DPPO(Surrogate):
    """-sg(min(r, upper)) A new_logp, and 0 where the update pushes a token further than a divergence allows.

    With p = e^base, q = e^new_logp: a token with A > 0 is masked where q > p and the divergence exceeds `high`, one
    with A < 0 where q < p and it exceeds `low`.

    Args:
        divergence: "tv" |q - p|, or "kl" of {p, 1 - p} from {q, 1 - q}.
        low: Bound where A < 0.
        high: Bound where A > 0.
        upper: Upper bound of the ratio, or None.
        eps: Floor of 1 - p and 1 - q in the KL.
    """

    divergence: Divergence = "tv"
    low: float = 0.2
    high: float = 0.2
    upper: float | None = 20.0
    eps: float = 1e-8

    traits: ClassVar[Traits] = Traits(formula="divergence", weights_in_bypass="replace_ratio")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("DPPO.divergence", self.divergence, DIVERGENCES)
        self._number("low")
        self._number("high")
        if self.upper is not None:
            self._number("upper", least=1.0)
        self._set(eps=positive("DPPO.eps", self.eps))

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        return {"score": (None, self.upper)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return ("low", "high", "dual") if own_ratio and self.upper is not None else ("low", "high")

    def loss(self, tokens: LossTokens) -> TokenLoss:
        new, advantages = tokens.new, tokens.advantages
        # Not clamped: it leads from new_logp to base, whose probability the divergence needs.
        stopped, d = tokens.compared.detach(), tokens.x.detach()
        p, q = tokens.probability(stopped - d), tokens.probability(stopped)
        if self.divergence == "tv":
            moved = (q - p).abs()
        else:
            moved = tokens.binary_kl(stopped - d, stopped, d, self.eps)
        high = (advantages > 0) & (q > p) & (moved > self.high)
        low = (advantages < 0) & (q < p) & (moved > self.low)
        ratio, dual = torch.ones_like(d), None
        if tokens.own_ratio:
            clamped = tokens.clamped.detach()
            ratio = clamped.exp()
            if self.upper is not None:
                dual = tokens.over(clamped, self.upper)
                ratio = torch.where(dual, self.upper, ratio)
        value = torch.where(~(high | low), -ratio * advantages * new, 0.0)
        return TokenLoss(value, low=low, high=high, dual=dual)

    def explain(self) -> str:
        ratio = "r" if self.upper is None else f"min(r, {self.upper:g})"
        return (
            f"-sg({ratio}) A new_logp, and 0 where r has moved with A and {self.divergence} exceeds "
            f"{self.high:g} (A > 0) or {self.low:g} (A < 0)"
        )


class GPG(Surrogate):
    """The plain policy gradient: -A new_logp. It has no ratio, so weights multiply it in every mode."""

    traits: ClassVar[Traits] = Traits(weights_in_bypass="multiply")

    def loss(self, tokens: LossTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages * tokens.new)

    def explain(self) -> str:
        return "-A new_logp"


@dataclass(frozen=True, repr=False)
class DRO(Surrogate):
    """Direct reward optimization: -(A new_logp - beta / 2 x^2). It has no ratio, so weights multiply it in every mode.

    With level="sequence" it squares X, the sum of x over the sequence (Kimi K1.5). The value of a token is its share,
    -(A new_logp - beta / 2 sg(X) x), with the gradient of X squared: all tokens pull each one.

    Args:
        beta: Pull toward base. x and X are saturated at +-1024.
        level: Square the log-ratio of the "token" or of the "sequence".
    """

    beta: float = 0.1
    level: Squared = "token"

    traits: ClassVar[Traits] = Traits(aggregate="total", weights_in_bypass="multiply")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(beta=positive("DRO.beta", self.beta))
        choice("DRO.level", self.level, SQUARED)

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        """The token's x, or the sum of x over the sequence."""
        return tokens.x if self.level == "token" else tokens.total(tokens.x.detach())

    def loss(self, tokens: LossTokens) -> TokenLoss:
        pull = tokens.saturated(tokens.x).square()
        if self.level == "sequence":
            total = tokens.total(tokens.x.detach())
            saturated = tokens.saturated(total)
            here, step = tokens.saturated(tokens.x.detach()), tokens.x - tokens.x.detach()
            pull = saturated * (here + torch.where(total == saturated, 2.0 * step, 0.0))
        return TokenLoss(-(tokens.advantages * tokens.new - 0.5 * self.beta * pull))

    def explain(self) -> str:
        square = "x^2" if self.level == "token" else "X x, X = the sequence's sum of x, with the gradient of X^2"
        return f"-(A new_logp - {0.5 * self.beta:g} {square})"


def without_ratio(clamp: float) -> Surrogate:
    """Make a surrogate that is 0 with its gradient where the advantages are 0, and needs no base."""
    return GPG(clamp=clamp)
