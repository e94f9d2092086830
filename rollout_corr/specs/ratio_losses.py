"""Surrogates whose ratio has a gradient: it is bounded, gated or taken as it is.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage, sg() a constant of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .checked import keywords_meant
from .choices import STRETCHES, Stretch
from .surrogate import LossTokens, Surrogate, TokenLoss, Traits, averaged
from .validate import choice, positive

Through = Literal["sequence", "token"]
Between = Literal["average", "geometric_average"]
Gate = Literal["differentiable", "stopped"]

THROUGH: tuple[str, ...] = get_args(Through)
BETWEEN: tuple[str, ...] = get_args(Between)
GATES: tuple[str, ...] = get_args(Gate)

# Weights below this enter a geometric mean as this.
SMALLEST_WEIGHT = 1e-10


@keywords_meant(clip="low= and high=", eps="low= and high=", epsilon="low= and high=", clip_ratio="low= and high=")
@dataclass(frozen=True, repr=False)
class PPO(Surrogate):
    """PPO's clip: -min(r A, clip(r, 1 - low, 1 + high) A).

    Args:
        low: r is clipped from below at 1 - low.
        high: r is clipped from above at 1 + high; inf leaves that side open.
        dual: Where A < 0 the loss is at most -dual * A (dual clip), or None.
        delta: r is at most delta before anything else (INTELLECT-2's two-sided clip), or None.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None

    traits: ClassVar[Traits] = Traits(slope=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low", most=1.0)
        self._number("high")
        if self.dual is not None:
            self._number("dual", least=1.0)
        if self.delta is not None:
            self._number("delta", least=1.0)

    @property
    def ratio_bounds(self) -> tuple[float, float, float]:
        """Bounds of the ratio: lower where A < 0, upper elsewhere, upper where A < 0."""
        delta = math.inf if self.delta is None else self.delta
        dual = math.inf if self.dual is None else self.dual
        return 1.0 - self.low, min(1.0 + self.high, delta), min(dual, delta)

    @property
    def numbers(self) -> dict[str, float]:
        return dict(zip(("least", "most", "furthest"), self.ratio_bounds, strict=True))

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        """The bounds that are set, of the clip and of the far side: where A < 0 and the ratio is above 1."""
        least, most, furthest = self.ratio_bounds
        return {"clip": (least or None, most), "far": (None, furthest if furthest < math.inf else None)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        least, _, furthest = self.ratio_bounds
        return (*(["low"] if least > 0.0 else []), "high", *(["dual"] if furthest < math.inf else []))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -A times r, cut from above where A > 0 and from below where A < 0, which equals the minimum."""
        least, most, most_negative = self.ratio_bounds
        x, advantages = tokens.clamped, tokens.advantages
        known = tokens.clip(least, most, most_negative)
        if known is not None and known.slope is not None:
            return known._replace(value=known.slope[0] * known.value)
        down = advantages < 0
        above, far_above, below = tokens.over(x, most), tokens.over(x, most_negative), tokens.under(x, least)
        low, dual = down & below, down & far_above
        # The bounds are constants, so that only one selection has a gradient.
        from_below = torch.full((), least, dtype=x.dtype, device=x.device)
        bound = torch.where(down, torch.where(far_above, most_negative, from_below), most)
        cut, ratio = low | dual | (above & ~down), x.exp()
        negated = -advantages
        slope = None if x.requires_grad else (negated, torch.where(cut, 0.0, ratio))
        value = negated * torch.where(cut, bound, ratio)
        return TokenLoss(value, low=low, high=(advantages > 0) & above, dual=dual, slope=slope)

    def _clipped(self, tokens: LossTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Bool per token: clipped from below, from above, and on the far side, as in `loss`."""
        least, most, furthest = self.ratio_bounds
        x, down = tokens.clamped, tokens.advantages < 0
        above = (tokens.advantages > 0) & tokens.over(x, most)
        return down & tokens.under(x, least), above, down & tokens.over(x, furthest)

    def explain(self) -> str:
        text = f"-min(r A, clip(r, {1.0 - self.low:g}, {1.0 + self.high:g}) A)"
        text += "" if self.delta is None else f", r at most {self.delta:g}"
        return text if self.dual is None else f"{text}, at most {self.dual:g} |A| where A < 0"


@dataclass(frozen=True, repr=False)
class GSPO(PPO):
    """PPO's clip of the sequence's geometric ratio, exp(mean of x over the trained tokens), at each of its tokens.

    Args:
        low: As for PPO; GSPO's paper clips much tighter.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        through: Where the gradient flows: "sequence" through the mean to all tokens of the sequence; "token" through a
            token's own log-prob only (GSPO-token, whose value is the same). They agree where the tokens of a sequence
            share one advantage.
        over: The unit that has one ratio: the "sequence", or each "turn" of it in its place, of `Batch.turns`.
    """

    low: float = 3e-4
    high: float = 4e-4
    through: Through = "sequence"
    over: Stretch = "sequence"

    traits: ClassVar[Traits] = Traits(level="sequence", formula="through")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("GSPO.through", self.through, THROUGH)
        choice("GSPO.over", self.over, STRETCHES)

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        if self.through == "sequence":
            return tokens.mean(tokens.x)
        mean = tokens.mean(tokens.x.detach())
        step = torch.where(tokens.x.isfinite(), tokens.x, 0.0)
        return mean + (step - step.detach())

    def explain(self) -> str:
        flow = f"all tokens of the {self.over}" if self.through == "sequence" else "the token's own log-prob"
        return f"{super().explain()}; log r = the {self.over}'s mean of x, with its gradient through {flow}"


@dataclass(frozen=True, repr=False)
class AveragePPO(PPO):
    """PPO's clip of an average of the token's ratio and the sequence's geometric ratio (ART).

    The gradient of a token flows through its own log-prob and through the sequence's mean to all tokens of the
    sequence that train. The clip of each token decides how much of its gradient reaches the others, and needs the mean
    first: kernels would pass over the tokens three times, so it runs on plain torch.

    Args:
        low: As for PPO.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        level: r is the "average" of the two ratios, or their "geometric_average".
    """

    level: Between = "average"

    traits: ClassVar[Traits] = Traits(formula="level")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("AveragePPO.level", self.level, BETWEEN)

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        return averaged(self.level, tokens.x, tokens.mean(tokens.x), self.clamp)

    def explain(self) -> str:
        name = "average" if self.level == "average" else "geometric average"
        return f"{super().explain()}; r = the {name} of the token's ratio and the sequence's geometric ratio"


# Without fields of its own a class inherits all that dataclass makes, at none of its cost at import.
class Reinforce(Surrogate):
    """REINFORCE with a differentiable ratio: -r A."""

    def loss(self, tokens: LossTokens) -> TokenLoss:
        return TokenLoss(-tokens.clamped.exp() * tokens.advantages)

    def explain(self) -> str:
        return "-r A"


@dataclass(frozen=True, repr=False)
class SAPO(Surrogate):
    """A soft gate instead of a clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    Args:
        positive: tau where A > 0.
        negative: tau elsewhere.
        gate: "differentiable", or "stopped": the gate is a constant factor of the score function, -sg(gate) A new_logp.
    """

    positive: float = 1.0
    negative: float = 1.05
    gate: Gate = "differentiable"

    traits: ClassVar[Traits] = Traits(formula="gate")

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("SAPO.gate", self.gate, GATES)
        for name in ("positive", "negative"):
            self._set(**{name: positive(f"SAPO.{name}", getattr(self, name))})

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the gated loss; its slope at r = 1 equals the slope of -r A."""
        ratio, advantages = tokens.clamped.exp(), tokens.advantages
        positive, negative = ratio.new_full((), self.positive), ratio.new_full((), self.negative)
        tau = torch.where(advantages > 0, positive, negative)
        gate = (4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0))
        if self.gate == "stopped":
            return TokenLoss(-gate.detach() * advantages * tokens.new)
        return TokenLoss(-gate * advantages)

    def explain(self) -> str:
        gate = "(4 / tau) sigmoid(tau (r - 1))"
        loss = f"-{gate} A" if self.gate == "differentiable" else f"-sg({gate}) A new_logp"
        return f"{loss}, tau = {self.positive:g} where A > 0, else {self.negative:g}"


@dataclass(frozen=True, repr=False)
class GMPO(Surrogate):
    """The geometric mean of a sequence's ratios, clipped one by one in log space, times its mean advantage.

    -mean(A) exp(mean of x'), where x' is x clipped as PPO would by the sign of A; the same value at every token of the
    sequence. Weights enter as their geometric mean over the sequence, each at least 1e-10.

    Args:
        low: x is clipped from below at -low where A < 0.
        high: x is clipped from above at high where A > 0.
    """

    low: float = 0.4
    high: float = 0.4

    traits: ClassVar[Traits] = Traits(one_loss=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low")
        self._number("high")

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return "low", "high"

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped, tokens.advantages
        up, down = advantages > 0, advantages < 0
        high, low = up & (x > self.high), down & (x < -self.low)
        clipped = torch.where(up, x.clamp(max=self.high), torch.where(down, x.clamp(min=-self.low), x))
        return TokenLoss(-tokens.mean_advantage() * tokens.mean(clipped).exp(), low=low, high=high)

    def factor(self, tokens: LossTokens, weights: Tensor) -> Tensor:
        return tokens.mean(tokens.trained(weights.clamp(min=SMALLEST_WEIGHT).log())).exp()

    def explain(self) -> str:
        return f"-mean(A) exp(mean of x), x at most {self.high:g} where A > 0 and at least {-self.low:g} where A < 0"


DEFAULT_SURROGATE: Surrogate = PPO()
