"""Surrogates: one frozen, hashable, checked class each, which knows its formula and everything else that is said of it.

To add one, write a class here, list it in SURROGATES, export it in `rollout_corr/__init__.py`, and give it a branch in
kernels/policy_loss/formulas.py and a formula in tests/oracles/loss.py. Nothing else names a surrogate.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage, sg() a constant of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.spec.correction import OUTSIDE, Outside
from rollout_corr.spec.meant import keywords_meant
from rollout_corr.spec.surrogate import LossTokens, Surrogate, TokenLoss, WeightUse
from rollout_corr.spec.validate import bounds, choice, positive

Through = Literal["sequence", "token"]
Divergence = Literal["tv", "kl"]

THROUGH: tuple[str, ...] = get_args(Through)
DIVERGENCES: tuple[str, ...] = get_args(Divergence)

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
        """The bounds of the ratio."""
        return dict(zip(("least", "most", "furthest"), self.ratio_bounds, strict=True))

    @property
    def cuts(self) -> dict[str, tuple[float | None, float | None]]:
        """The bounds that are set, of the clip and of the far side: where A < 0 and the ratio is above 1."""
        least, most, furthest = self.ratio_bounds
        return {"clip": (least or None, most), "far": (None, furthest if furthest < math.inf else None)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name the clips: from below and on the far side only where there is a bound."""
        least, _, furthest = self.ratio_bounds
        return (*(["low"] if least > 0.0 else []), "high", *(["dual"] if furthest < math.inf else []))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -A times r, cut from above where A > 0 and from below where A < 0, which equals the minimum."""
        least, most, most_negative = self.ratio_bounds
        x, advantages = tokens.clamped, tokens.advantages
        down = advantages < 0
        above, far_above, below = tokens.over(x, most), tokens.over(x, most_negative), tokens.under(x, least)
        ratio = torch.where(down & below, least, x.exp())
        ratio = torch.where(down, torch.where(far_above, most_negative, ratio), torch.where(above, most, ratio))
        return TokenLoss(-advantages * ratio, low=down & below, high=(advantages > 0) & above, dual=down & far_above)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        text = f"-min(r A, clip(r, {1.0 - self.low:g}, {1.0 + self.high:g}) A)"
        text += "" if self.delta is None else f", r at most {self.delta:g}"
        return text if self.dual is None else f"{text}, at most {self.dual:g} |A| where A < 0"


@dataclass(frozen=True, repr=False)
class GSPO(PPO):
    """PPO's clip of the sequence's geometric ratio, exp(mean of x over the tokens that train), at each of its tokens.

    Args:
        low: As for PPO; GSPO's paper clips much tighter.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        through: Where the gradient flows: "sequence" through the mean to all tokens of the sequence; "token" through a
            token's own log-prob alone (GSPO-token, whose value is the same). They agree where the tokens of a sequence
            share one advantage.
    """

    low: float = 3e-4
    high: float = 4e-4
    through: Through = "sequence"

    option: ClassVar[str | None] = "through"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("GSPO.through", self.through, THROUGH)

    def log_ratio(self, tokens: LossTokens) -> Tensor:
        """Give the sequence's mean of x."""
        if self.through == "sequence":
            return tokens.mean(tokens.x)
        mean = tokens.mean(tokens.x.detach())
        step = torch.where(tokens.x.isfinite(), tokens.x, 0.0)
        return mean + (step - step.detach())

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        flow = "all tokens of the sequence" if self.through == "sequence" else "the token's own log-prob"
        return f"{super().explain()}; log r = the sequence's mean of x, with its gradient through {flow}"


# Without fields of its own a class inherits all that dataclass makes, at none of its cost at import.
class Reinforce(Surrogate):
    """REINFORCE with a differentiable ratio: -r A."""

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -r A."""
        return TokenLoss(-tokens.clamped.exp() * tokens.advantages)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return "-r A"


@dataclass(frozen=True, repr=False)
class Score(Surrogate):
    """The score function with a stopped ratio: -sg(bounded r) A new_logp (CISPO, truncated policy gradient).

    Args:
        lower: Lower bound of the ratio, or None for an open side.
        upper: Upper bound of the ratio, or None for an open side.
        outside: A ratio outside the bounds becomes the bound ("clamp") or 0 ("zero").
    """

    lower: float | None = None
    upper: float | None = None
    outside: Outside = "clamp"

    weights_in_bypass: ClassVar[WeightUse] = "replace_ratio"
    option: ClassVar[str | None] = "outside"

    def __post_init__(self) -> None:
        super().__post_init__()
        lower, upper = bounds("Score", self.lower, self.upper, signed=False, ratio=True)
        self._set(lower=lower, upper=upper)
        choice("Score.outside", self.outside, OUTSIDE)

    @property
    def cuts(self) -> dict[str, tuple[float | None, float | None]]:
        """Its bounds."""
        return {"score": (self.lower, self.upper)}

    @property
    def has_own_bounds(self) -> bool:
        """True if either bound is given."""
        return self.lower is not None or self.upper is not None

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name the bounds that are given."""
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
        """Say the loss of a token in one line."""
        if self.lower is None and self.upper is None:
            return "-sg(r) A new_logp"
        lower, upper = self.lower or 0.0, math.inf if self.upper is None else self.upper
        becomes = "clamped to" if self.outside == "clamp" else "0 outside"
        return f"-sg(r) A new_logp, r {becomes} [{lower:g}, {upper:g}]"


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

    weights_in_bypass: ClassVar[WeightUse] = "replace_ratio"
    option: ClassVar[str | None] = "divergence"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("DPPO.divergence", self.divergence, DIVERGENCES)
        self._number("low")
        self._number("high")
        if self.upper is not None:
            self._number("upper", least=1.0)
        self._set(eps=positive("DPPO.eps", self.eps))

    @property
    def cuts(self) -> dict[str, tuple[float | None, float | None]]:
        """The upper bound of the ratio."""
        return {"score": (None, self.upper)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name both sides, and the upper bound where it holds."""
        return ("low", "high", "dual") if own_ratio and self.upper is not None else ("low", "high")

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the score function's loss where the token has not moved too far with its advantage."""
        new, advantages = tokens.new, tokens.advantages
        # Not clamped: it leads from new_logp to base, whose probability the divergence needs.
        stopped, d = new.detach(), tokens.x.detach()
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
        """Say the loss of a token in one line."""
        ratio = "r" if self.upper is None else f"min(r, {self.upper:g})"
        return (
            f"-sg({ratio}) A new_logp, and 0 where r has moved with A and {self.divergence} exceeds "
            f"{self.high:g} (A > 0) or {self.low:g} (A < 0)"
        )


@dataclass(frozen=True, repr=False)
class SAPO(Surrogate):
    """A soft gate instead of a clip: -(4 / tau) sigmoid(tau (r - 1)) A.

    Args:
        positive: tau where A > 0.
        negative: tau elsewhere.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("positive", "negative"):
            self._set(**{name: positive(f"SAPO.{name}", getattr(self, name))})

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the gated loss; its slope at r = 1 is that of -r A."""
        ratio, advantages = tokens.clamped.exp(), tokens.advantages
        positive, negative = ratio.new_full((), self.positive), ratio.new_full((), self.negative)
        tau = torch.where(advantages > 0, positive, negative)
        return TokenLoss(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return f"-(4 / tau) sigmoid(tau (r - 1)) A, tau = {self.positive:g} where A > 0, else {self.negative:g}"


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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low")
        self._number("high")

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name both sides."""
        return "low", "high"

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the sequence's loss, at each of its tokens."""
        x, advantages = tokens.clamped, tokens.advantages
        up, down = advantages > 0, advantages < 0
        high, low = up & (x > self.high), down & (x < -self.low)
        clipped = torch.where(up, x.clamp(max=self.high), torch.where(down, x.clamp(min=-self.low), x))
        return TokenLoss(-tokens.mean_advantage() * tokens.mean(clipped).exp(), low=low, high=high)

    def factor(self, tokens: LossTokens, weights: Tensor) -> Tensor:
        """Give the geometric mean of the sequence's weights."""
        return tokens.mean(tokens.trained(weights.clamp(min=SMALLEST_WEIGHT).log())).exp()

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return f"-mean(A) exp(mean of x), x at most {self.high:g} where A > 0 and at least {-self.low:g} where A < 0"


class GPG(Surrogate):
    """The plain policy gradient: -A new_logp. It has no ratio, so weights multiply it in every mode."""

    weights_in_bypass: ClassVar[WeightUse] = "multiply"

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -A new_logp."""
        return TokenLoss(-tokens.advantages * tokens.new)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return "-A new_logp"


@dataclass(frozen=True, repr=False)
class DRO(Surrogate):
    """Direct reward optimisation: -(A new_logp - beta / 2 x^2). It has no ratio, so weights multiply it in every mode.

    Args:
        beta: Pull towards base. x is saturated at +-1024.
    """

    beta: float = 0.1

    weights_in_bypass: ClassVar[WeightUse] = "multiply"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(beta=positive("DRO.beta", self.beta))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute the policy gradient's loss with the pull towards base."""
        square = tokens.saturated(tokens.x).square()
        return TokenLoss(-(tokens.advantages * tokens.new - 0.5 * self.beta * square))

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return f"-(A new_logp - {0.5 * self.beta:g} x^2)"


SURROGATES: tuple[type[Surrogate], ...] = (PPO, GSPO, Reinforce, Score, DPPO, SAPO, GMPO, GPG, DRO)

DEFAULT_SURROGATE: Surrogate = PPO()
