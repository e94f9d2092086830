"""The surrogates of tokens, a class each: bounded ratios, the score function, and what depends on the sign of A.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage, sg() a constant of the gradient.

To add one, write a class with its `traits` and formulas, list it in SURROGATES and in `rollout_corr/__init__.pyi`, and
give it a branch in kernels/policy_loss/formulas.py and a formula in tests/oracles/loss.py. Nothing else names it.
Surrogates that see the whole batch first are in batch_losses.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .checked import keywords_meant
from .choices import OUTSIDE, STRETCHES, Outside, Stretch
from .surrogate import LEVELS, Choices, Level, LossTokens, Range, Ranges, Surrogate, TokenLoss, Traits, averaged
from .validate import LARGEST_FLOAT32, bounds, number, wrong_value

Through = Literal["sequence", "token"]
Between = Literal["average", "geometric_average"]
Gate = Literal["differentiable", "stopped"]
Divergence = Literal["tv", "kl"]
Extent = Literal["token", "sequence"]
Mask = Literal["one_side", "two_side", "ring"]
Factor = Literal["one", "ratio"]

ANY_SIZE, SHARE, OF_FLOAT32 = Range(0.0, math.inf), Range(0.0, 1.0), Range(0.0, LARGEST_FLOAT32)
BEYOND_1 = Range(1.0, math.inf, or_none=True)

# Weights below this enter a geometric mean as this.
SMALLEST_WEIGHT = 1e-10
# VESPO's ratio, and each weight that enters it, is at least this.
SMALLEST_RATIO = 1e-8

OF_LEVEL: dict[Level, str] = {
    "token": "",
    "sequence": "; log r = the sequence's mean of x",
    "average": "; r = the average of the token's ratio and the sequence's geometric ratio",
    "geometric_average": "; log r = the average of x and the sequence's mean of x",
}

# --- ratios with a gradient: bounded, gated or taken as they are ---


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
    ranges: ClassVar[Ranges] = {"low": SHARE, "high": ANY_SIZE, "dual": BEYOND_1, "delta": BEYOND_1}

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
        bounded = tokens.clip(least, most, most_negative)
        if bounded is not None and bounded.slope is not None:
            return bounded._replace(value=bounded.slope[0] * bounded.value)
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
    choices: ClassVar[Choices] = {"through": get_args(Through), "over": STRETCHES}

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
    choices: ClassVar[Choices] = {"level": get_args(Between)}

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
    choices: ClassVar[Choices] = {"gate": get_args(Gate)}
    above_0: ClassVar[tuple[str, ...]] = ("positive", "negative")

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
    ranges: ClassVar[Ranges] = {"low": ANY_SIZE, "high": ANY_SIZE}

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


# --- the score function: the ratio is stopped, or there is none ---


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
    choices: ClassVar[Choices] = {"outside": OUTSIDE, "level": LEVELS}

    def __post_init__(self) -> None:
        super().__post_init__()
        lower, upper = bounds("Score", self.lower, self.upper, signed=False, ratio=True, clamps=True)
        self._set(lower=lower, upper=upper)

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        return {"score": (self.lower, self.upper)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        sides = (("low", self.lower), ("high", self.upper))
        return tuple(name for name, bound in sides if own_ratio and bound is not None)

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
    choices: ClassVar[Choices] = {"divergence": get_args(Divergence)}
    ranges: ClassVar[Ranges] = {"low": ANY_SIZE, "high": ANY_SIZE, "upper": BEYOND_1}
    above_0: ClassVar[tuple[str, ...]] = ("eps",)

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
    -(A new_logp - beta / 2 sg(X) x), with the gradient of X squared, so every token of the sequence moves each of them.

    Args:
        beta: Pull toward base. x and X are saturated at +-1024.
        level: Square the log-ratio of the "token" or of the "sequence".
    """

    beta: float = 0.1
    level: Extent = "token"

    traits: ClassVar[Traits] = Traits(aggregate="total", weights_in_bypass="multiply")
    choices: ClassVar[Choices] = {"level": get_args(Extent)}
    above_0: ClassVar[tuple[str, ...]] = ("beta",)

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


# --- the score function with a factor by the sign of A: tapered, masked or softened ---


@dataclass(frozen=True, repr=False)
class TOPR(Surrogate):
    """Tapered off-policy REINFORCE: -positive A new_logp where A is good, else -negative sg(min(r, upper)) A new_logp.

    Good tokens are learned whatever policy sampled them; bad ones count less where the policy has already moved away.

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

    ranges: ClassVar[Ranges] = {"positive": OF_FLOAT32, "negative": OF_FLOAT32}
    above_0: ClassVar[tuple[str, ...]] = ("upper",)

    def __post_init__(self) -> None:
        super().__post_init__()
        value = number("TOPR.threshold", self.threshold)
        if not math.isfinite(value):
            raise wrong_value("TOPR.threshold", "a finite number", value)
        self._set(threshold=value)

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
    level: Extent = "token"

    traits: ClassVar[Traits] = Traits(formula="mask")
    choices: ClassVar[Choices] = {
        "mask": get_args(Mask),
        "weight": get_args(Factor),
        "level": get_args(Extent),
    }
    ranges: ClassVar[Ranges] = {"low": SHARE, "far_low": SHARE, "high": ANY_SIZE, "far_high": ANY_SIZE}

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
    ranges: ClassVar[Ranges] = {"k_positive": OF_FLOAT32, "k_negative": OF_FLOAT32}
    above_0: ClassVar[tuple[str, ...]] = ("rate_positive", "rate_negative")

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


SURROGATES: tuple[type[Surrogate], ...] = (
    *(PPO, GSPO, AveragePPO, Reinforce, Score, DPPO, SAPO, GMPO, GPG, DRO, TOPR, REC, VESPO),
)
DEFAULT_SURROGATE: Surrogate = PPO()
