"""Surrogates of the score function whose factor depends on the sign of the advantage: tapered, masked or softened.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage, sg() a constant of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .score_losses import OF_LEVEL
from .surrogate import LossTokens, Surrogate, TokenLoss, Traits
from .validate import LARGEST_FLOAT32, choice, number, positive, wrong_value

Mask = Literal["one_side", "two_side", "ring"]
Factor = Literal["one", "ratio"]
RecLevel = Literal["token", "sequence"]

MASKS: tuple[str, ...] = get_args(Mask)
FACTORS: tuple[str, ...] = get_args(Factor)
REC_LEVELS: tuple[str, ...] = get_args(RecLevel)

# VESPO's ratio, and each weight that enters it, is at least this.
SMALLEST_RATIO = 1e-8


@dataclass(frozen=True, repr=False)
class TOPR(Surrogate):
    """Tapered off-policy REINFORCE: -positive A new_logp where A is good, else -negative sg(min(r, upper)) A new_logp.

    What is good is learned from whatever policy it comes; what is bad counts less where the policy has left it already.

    Args:
        threshold: A token is good where A is above it.
        upper: Upper bound of the ratio elsewhere.
        positive: Factor of the good ones.
        negative: Factor of the others.
    """

    threshold: float = 0.0
    upper: float = 1.0
    positive: float = 1.0
    negative: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        value = number("TOPR.threshold", self.threshold)
        if not math.isfinite(value):
            raise wrong_value("TOPR.threshold", "a finite number", value)
        self._set(threshold=value, upper=positive("TOPR.upper", self.upper))
        for name in ("positive", "negative"):
            self._number(name, most=LARGEST_FLOAT32)

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        return {"taper": (None, self.upper)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return ("high",)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped.detach(), tokens.advantages
        good, above = advantages > self.threshold, tokens.over(x, self.upper)
        tapered = torch.where(above, self.upper, x.exp())
        factor = torch.where(good, self.positive, self.negative * tapered)
        return TokenLoss(-factor * advantages * tokens.new, high=~good & above)

    def explain(self) -> str:
        good, other = ("" if x == 1.0 else f"{x:g} " for x in (self.positive, self.negative))
        where = f"where A > {self.threshold:g}"
        return f"-{good}A new_logp {where}, else -{other}sg(min(r, {self.upper:g})) A new_logp"


@dataclass(frozen=True, repr=False)
class REC(Surrogate):
    """REINFORCE with clipping: -f A new_logp, 0 where a mask on the ratio leaves a token out.

    Args:
        mask: "one_side" keeps r <= 1 + high where A > 0 and r >= 1 - low where A < 0; "two_side" keeps r inside both;
            "ring" keeps those, and r <= 1 - far_low where A > 0 and r >= 1 + far_high where A < 0.
        low: Distance of the lower bound from 1.
        high: Distance of the upper bound from 1.
        far_low: Distance of the ring's lower bound.
        far_high: Distance of the ring's upper bound.
        weight: f is 1 ("one") or sg(r) ("ratio").
        level: The ratio of the token, or the geometric mean over its "sequence".
    """

    mask: Mask = "one_side"
    low: float = 0.2
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0
    weight: Factor = "one"
    level: RecLevel = "token"

    traits: ClassVar[Traits] = Traits(formula="mask")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("REC.mask", self.mask, MASKS)
        choice("REC.weight", self.weight, FACTORS)
        choice("REC.level", self.level, REC_LEVELS)
        for name in ("low", "far_low"):
            self._number(name, most=1.0)
        for name in ("high", "far_high"):
            self._number(name)

    @property
    def numbers(self) -> dict[str, float]:
        """1 where the ratio is the factor, else 0; the bounds are cuts."""
        return {"by_ratio": float(self.weight == "ratio")}

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        """The bounds of the inside, and of what a ring leaves out: below the first and above the second of `ring`."""
        return {"ring": (1.0 + self.far_high, 1.0 - self.far_low), "inside": (1.0 - self.low, 1.0 + self.high)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return "low", "high"

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped.detach(), tokens.advantages
        factor = x.exp() if self.weight == "ratio" else torch.ones_like(x)
        high, low = tokens.over(x, 1.0 + self.high), tokens.under(x, 1.0 - self.low)
        if self.mask == "one_side":
            high, low = high & (advantages > 0), low & (advantages < 0)
        elif self.mask == "ring":
            high = high & ~((advantages <= 0) & ~tokens.under(x, 1.0 + self.far_high))
            low = low & ~((advantages >= 0) & ~tokens.over(x, 1.0 - self.far_low))
        return TokenLoss(torch.where(high | low, 0.0, -factor * advantages * tokens.new), low=low, high=high)

    def explain(self) -> str:
        text = "-A new_logp" if self.weight == "one" else "-sg(r) A new_logp"
        least, most = f"{1.0 - self.low:g}", f"{1.0 + self.high:g}"
        text += {
            "two_side": f", r 0 outside [{least}, {most}]",
            "one_side": f", and 0 where r > {most} (A > 0) or r < {least} (A < 0)",
            "ring": (
                f", and 0 outside [{least}, {most}] except for r <= {1.0 - self.far_low:g} (A > 0) "
                f"and r >= {1.0 + self.far_high:g} (A < 0)"
            ),
        }[self.mask]
        return text + OF_LEVEL[self.level]


@dataclass(frozen=True, repr=False)
class VESPO(Surrogate):
    """A soft weight of the whole sequence's ratio: -sg(phi) A new_logp, phi = w^k exp(rate (1 - w)), 1 at w = 1.

    w is the product of the sequence's ratios and of the weights, which are in it and do not multiply the loss. In log
    space x and log w are clamped to +-clamp and each weight to at most clamp; w and each weight are at least 1e-8.

    Args:
        k_positive: k where A >= 0.
        rate_positive: The rate of decay where A >= 0.
        k_negative: k elsewhere.
        rate_negative: The rate elsewhere.
    """

    k_positive: float = 2.0
    rate_positive: float = 3.0
    k_negative: float = 3.0
    rate_negative: float = 2.0

    traits: ClassVar[Traits] = Traits(level="sequence", aggregate="total")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k_positive", "k_negative"):
            self._number(name, most=LARGEST_FLOAT32)
        for name in ("rate_positive", "rate_negative"):
            self._set(**{name: positive(f"VESPO.{name}", getattr(self, name))})

    @property
    def numbers(self) -> dict[str, float]:
        """The four numbers, and the logarithm of the smallest ratio."""
        return super().numbers | {"log_smallest": math.log(SMALLEST_RATIO)}

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        """The logarithm of w."""
        x, least = tokens.x.detach().clamp(-self.clamp, self.clamp), math.log(SMALLEST_RATIO)
        if tokens.weights is not None:
            x = tokens.trained(x + tokens.weights.clamp(min=SMALLEST_RATIO).log().clamp(max=self.clamp))
        return tokens.total(x).clamp(min=least)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped, tokens.advantages
        up = advantages >= 0
        k = torch.where(up, x.new_full((), self.k_positive), x.new_full((), self.k_negative))
        rate = torch.where(up, x.new_full((), self.rate_positive), x.new_full((), self.rate_negative))
        phi = (k * x - rate * torch.expm1(x)).exp()
        return TokenLoss(-phi * advantages * tokens.new)

    def factor(self, tokens: LossTokens, weights: Tensor) -> Tensor:
        """Ones: the weights are in w."""
        return torch.ones_like(weights)

    def explain(self) -> str:
        positive, negative = (
            f"w^{k:g} exp({rate:g} (1 - w))"
            for k, rate in ((self.k_positive, self.rate_positive), (self.k_negative, self.rate_negative))
        )
        phi = f"{positive} where A >= 0, else {negative}"
        return f"-sg(phi) A new_logp, phi = {phi}; w = the product of the sequence's ratios and weights"
