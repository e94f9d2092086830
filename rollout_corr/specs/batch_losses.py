"""Surrogates that see the whole batch, or its groups, before the first token has a loss.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage. Means and sums over the batch
are over its trained tokens, on all ranks of `Ranks.batch`, and constants of the gradient. The covariance of a
token is (A - mean A) (new_logp - mean new_logp): tokens where it is large are those that take entropy from the policy.
Groups are those of `Batch.groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .ratio_losses import PPO
from .surrogate import Decided, LossTokens, SeenBatch, SeenGroups, Surrogate, TokenLoss, Traits
from .validate import LARGEST_FLOAT32, choice, number, positive, shown, wrong_type

First = Literal["lower", "upper"]
Widens = Literal["outward", "upper"]

FIRSTS: tuple[str, ...] = get_args(First)
WIDENS: tuple[str, ...] = get_args(Widens)

# Steps of one bound of BAPO: every candidate has a place in a table.
MOST_STEPS = 1000
# Entropies enter their logarithm as at least this.
SMALLEST_ENTROPY = 1e-8
SMALLEST_TAU = 1e-30


def _share(name: str, value: object) -> float:
    share = number(name, value)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name}: expected a number above 0 and at most 1, got {share!r}")
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
    so a call repeats to the bit, whatever the padding. A sequence is known by `Batch.sequence_ids`, and
    without by its place in the call. Give every step another seed, or other ids.

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

    traits: ClassVar[Traits] = Traits(
        sees="batch", chooses_tokens=True, sums=("cov_chosen", "cov_of_chosen", "cov_eligible"), slope=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("ClipCov.share", self.share))
        for name in ("lower", "upper"):
            self._set(**{name: number(f"ClipCov.{name}", getattr(self, name))})
        if not self.lower <= self.upper:
            raise ValueError(f"ClipCov.upper: expected a number >= lower={self.lower!r}, got {self.upper!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise wrong_type("ClipCov.seed", "an integer", self.seed)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"ClipCov.seed: expected an integer from 0 up to 2^63 - 1, got {shown(self.seed)}")

    def see_batch(self, batch: SeenBatch) -> Decided:
        """Choose among the tokens whose covariance lies within the bounds, those that PPO clips left out."""
        covariance = _covariance(batch)
        low, high, dual = self._clipped(batch.tokens)
        eligible = (covariance > self.lower) & (covariance < self.upper) & batch.trains & ~(low | high | dual)
        chosen = batch.drawn(self.seed, eligible, _as_many(batch, self.share))
        sums = {**_of_chosen(covariance, chosen), "cov_eligible": torch.count_nonzero(eligible)}
        return Decided((chosen,), (), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        found, chosen = super().loss(tokens), tokens.decided.tokens[0]
        slope = None if found.slope is None else (found.slope[0], torch.where(chosen, 0.0, found.slope[1]))
        return found._replace(value=torch.where(chosen, 0.0, found.value), slope=slope)

    def explain(self) -> str:
        return (
            f"{super().explain()}; 0 at a share of {self.share:g} of the tokens, drawn from those of covariance in "
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

    traits: ClassVar[Traits] = Traits(sees="batch", chooses_tokens=True, sums=("cov_chosen", "cov_of_chosen"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("KLCov.share", self.share))
        # Times |x| = 0 an infinite penalty is NaN.
        self._number("penalty", most=LARGEST_FLOAT32)

    def see_batch(self, batch: SeenBatch) -> Decided:
        covariance = _covariance(batch)
        chosen = batch.largest(covariance, batch.trains, _as_many(batch, self.share))
        return Decided((chosen,), (), _of_chosen(covariance, chosen))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        away = tokens.saturated(tokens.x).abs()
        penalty = torch.where(tokens.decided.tokens[0], self.penalty * away, 0.0)
        return TokenLoss(penalty - tokens.clamped.exp() * tokens.advantages)

    def explain(self) -> str:
        return f"-r A, and {self.penalty:g} |x| more at the share of {self.share:g} of the tokens of largest covariance"


@dataclass(frozen=True, repr=False)
class BAPO(Surrogate):
    """PPO's clip whose bounds rise step by step until positive advantages carry a share of the loss (BAPO).

    A > 0 contributes the sum of A min(r, upper bound), A < 0 the sum of |A| max(r, lower bound).
    From `lower` and `upper` on, first one bound rises step by step to its maximum, then the other. The search stops
    when positive contributions make up at least `share` of the total, or when both are at their maximum. A higher
    lower bound never raises that share; it removes the gradient of tokens whose ratio is already far below 1.

    Args:
        share: Share of the positive contributions, above 0 and at most 1.
        lower: Lower bound of r where A < 0, at first.
        lower_most: At most; the bound stays where this is not above `lower`.
        lower_step: Its step.
        upper: Upper bound of r where A >= 0, at first.
        upper_most: At most; the bound stays where this is not above `upper`.
        upper_step: Its step.
        first: The bound that rises first.
        dual: Where A < 0 the loss is at most -dual * A (dual clip), or None.
    """

    share: float = 0.5
    lower: float = 0.6
    lower_most: float = 0.9
    lower_step: float = 0.05
    upper: float = 1.2
    upper_most: float = 3.0
    upper_step: float = 0.05
    first: First = "lower"
    dual: float | None = None

    traits: ClassVar[Traits] = Traits(
        formula="first", sees="batch", sums=("bapo_calls", "bapo_lower", "bapo_upper", "bapo_positive", "bapo_negative")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("BAPO.share", self.share))
        for name in ("lower_most", "upper_most"):
            self._number(name)
        for name in ("lower", "upper"):
            # An infinite bound makes the loss infinite, or the share of the contributions NaN.
            self._number(name, most=LARGEST_FLOAT32)
        choice("BAPO.first", self.first, FIRSTS)
        for side in ("lower", "upper"):
            name = f"{side}_step"
            self._set(**{name: positive(f"BAPO.{name}", getattr(self, name))})
            start, most = getattr(self, side), getattr(self, f"{side}_most")
            if not most - start <= MOST_STEPS * getattr(self, name):
                raise ValueError(
                    f"BAPO.{name}: expected at most {MOST_STEPS} steps from {start!r} to {most!r}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.dual is not None:
            self._number("dual", least=1.0)

    @property
    def lowers(self) -> tuple[float, ...]:
        """The lower bounds in turn."""
        return _steps(self.lower, self.lower_most, self.lower_step)

    @property
    def uppers(self) -> tuple[float, ...]:
        """The upper bounds in turn."""
        return _steps(self.upper, self.upper_most, self.upper_step)

    @property
    def numbers(self) -> dict[str, float]:
        """The bounds of the ratio; the clip's bounds until the batch has decided them."""
        return {"least": self.lower, "most": self.upper, "furthest": self.dual or 0.0}

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        """The bounds of the clip, until the batch has decided them, and of the far side."""
        return {"clip": (self.lower, self.upper), "far": (None, self.dual)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return ("low", "high") if self.dual is None else ("low", "high", "dual")

    def see_batch(self, batch: SeenBatch) -> Decided:
        """Find the bounds: the contributions at all of them come from one table of sums."""
        tokens, lowers, uppers = batch.tokens, self.lowers, self.uppers
        x, advantages = tokens.clamped, tokens.advantages
        low_cuts, high_cuts = tokens.log_bounds(lowers, "lower"), tokens.log_bounds(uppers, "upper")
        # How many lower bounds are not above the ratio, and how many upper ones are below it.
        below, above = torch.bucketize(x, low_cuts, right=True), torch.bucketize(x, high_cuts)
        place = torch.where(advantages < 0, below, above + (len(lowers) + 1))
        amounts = torch.stack((x.exp() * advantages.abs(), advantages.abs()))
        here, total = batch.sums(amounts, place, len(lowers) + len(uppers) + 2)
        bounds = torch.stack([total.new_full((), bound) for bound in (*lowers, *uppers)])
        by_lower, by_upper = bounds.split([len(lowers), len(uppers)])
        negative, positive = _contributions(total, by_lower, by_upper)
        of_first, of_second = (by_lower, by_upper) if self.first == "lower" else (by_upper, by_lower)
        steps, more = of_first.shape[0], of_second.shape[0] - 1
        # The place on the way: so many steps of the one, then of the other.
        at = torch.arange(steps + more, device=x.device)
        first, second = at.clamp(max=steps - 1), (at - (steps - 1)).clamp(min=0)
        lower_at, upper_at = (first, second) if self.first == "lower" else (second, first)
        enough = (1.0 - self.share) * positive[upper_at] >= self.share * negative[lower_at]
        stops = (~enough).long().cumprod(0).sum(0, keepdim=True).clamp(max=steps + more - 1)
        low, high = lower_at.gather(0, stops), upper_at.gather(0, stops)
        own_negative, own_positive = _contributions(here, by_lower, by_upper)
        lower, upper = by_lower.gather(0, low)[0], by_upper.gather(0, high)[0]
        sums = {
            "bapo_calls": torch.ones_like(lower),
            "bapo_lower": lower,
            "bapo_upper": upper,
            "bapo_positive": own_positive.gather(0, high)[0],
            "bapo_negative": own_negative.gather(0, low)[0],
        }
        cuts = low_cuts.gather(0, low)[0], high_cuts.gather(0, high)[0]
        return Decided((), (lower.to(x.dtype), upper.to(x.dtype), *cuts), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped, tokens.advantages
        lower, upper, low_cut, high_cut = tokens.decided.numbers
        down = advantages < 0
        low, above, bound, dual = down & (x < low_cut), x > high_cut, torch.where(down, lower, upper), None
        cut = low | (above & ~down)
        if self.dual is not None:
            dual = down & tokens.over(x, self.dual)
            cut, bound = cut | dual, torch.where(dual, self.dual, bound)
        ratio = torch.where(cut, bound, x.exp())
        return TokenLoss(-advantages * ratio, low=low, high=above & (advantages > 0), dual=dual)

    def explain(self) -> str:
        text = (
            f"-min(r A, clip(r, lower, upper) A), lower from {self.lower:g} to {self.lowers[-1]:g} and upper from "
            f"{self.upper:g} to {self.uppers[-1]:g}, {self.first} first, until A > 0 carries {self.share:g} of the loss"
        )
        return text if self.dual is None else f"{text}; at most {self.dual:g} |A| where A < 0"


def _steps(start: float, most: float, step: float) -> tuple[float, ...]:
    """The bounds from a start, each a step above the last, to an end that none passes."""
    found = [start]
    while found[-1] < most:
        following = found[-1] + step
        # A step that a float cannot hold.
        found.append(min(following, most) if following > found[-1] else most)
    return tuple(found)


def _contributions(table: Tensor, lowers: Tensor, uppers: Tensor) -> tuple[Tensor, Tensor]:
    """The negative contribution at each lower bound, and the positive one at each upper bound.

    `table`, [2, places] float64, has the sums of r |A| and of |A| at each place: of A < 0 by how many lower bounds are
    not above r, then of the others by how many upper bounds are below r.
    """
    of_negative, of_positive = table.split([lowers.shape[0] + 1, uppers.shape[0] + 1], dim=1)
    up_to, total = of_negative.cumsum(1), of_negative.sum(1, keepdim=True)
    negative = (total - up_to)[0, :-1] + lowers * up_to[1, :-1]
    up_to, total = of_positive.cumsum(1), of_positive.sum(1, keepdim=True)
    positive = up_to[0, :-1] + uppers * (total - up_to)[1, :-1]
    return negative, positive


@dataclass(frozen=True, repr=False)
class EntropyClip(Surrogate):
    """PPO's clip with bounds scaled by the entropy of each token (HAPO's asymmetric adaptive clipping).

    A token's place h is its distance in log H from the pivot, a quantile of the batch, as a share of the largest such
    distance on its side: 1 at the largest and at the smallest entropy of the batch, 0 at the pivot. Above the pivot the
    upper bound is 1 + high (1 + strength h). Below it the lower bound is 1 - low (1 + strength h), so that noise of
    nearly certain tokens may be pushed down further; the authors' code widens the upper side there too. A token whose
    entropy is not finite has h = 0.

    Args:
        low: Distance of the lower bound from 1, where A < 0.
        high: Distance of the upper bound from 1, where A > 0.
        strength: How much wider the bounds are at h = 1: that many times.
        pivot: The quantile that parts high from low entropies, from 0 to 1: of n trained tokens number
            round(pivot (n - 1)), counted from 0, halves to even.
        widens: Below the pivot the lower side widens ("outward"), as the paper has it, or the "upper", as the code.
        dual: Where A < 0 the loss is at most -dual * A (dual clip), or None.
    """

    low: float = 0.2
    high: float = 0.2
    strength: float = 1.0
    pivot: float = 0.5
    widens: Widens = "outward"
    dual: float | None = None

    traits: ClassVar[Traits] = Traits(
        formula="widens", sees="batch", reads_entropy=True, sums=("entropy_clip_low", "entropy_clip_high")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "high", "strength"):
            self._number(name, most=LARGEST_FLOAT32)
        pivot = number("EntropyClip.pivot", self.pivot)
        if not 0.0 <= pivot <= 1.0:
            raise ValueError(f"EntropyClip.pivot: expected a number from 0 to 1, got {pivot!r}")
        self._set(pivot=pivot)
        choice("EntropyClip.widens", self.widens, WIDENS)
        if self.dual is not None:
            self._number("dual", least=1.0)

    @property
    def numbers(self) -> dict[str, float]:
        """The bound of the far side; each token has its own clip bounds."""
        return {"furthest": self.dual or 0.0}

    @property
    def thresholds(self) -> dict[str, tuple[float | None, float | None]]:
        return {"far": (None, self.dual)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        return ("low", "high") if self.dual is None else ("low", "high", "dual")

    def see_batch(self, batch: SeenBatch) -> Decided:
        """Find the pivot and the ends of the batch, and from them the bound of each token that its advantage asks for.

        It is a logarithm, so that `loss` compares with it as it is.
        """
        assert batch.entropy is not None
        known = batch.trains & batch.entropy.isfinite()
        log = torch.where(known, batch.entropy, 1.0).clamp(min=SMALLEST_ENTROPY).log()
        n = batch.count_of(known)
        pivot = batch.numbered(log, known, (self.pivot * (n - 1.0)).round() + 1.0)
        away = log - pivot
        up, down = (batch.numbered(log, known, place) - pivot for place in (n, torch.ones_like(n)))
        above, below = known & (away > 0), known & (away < 0)
        h = torch.where(above, away / up, torch.where(below, away / down, 0.0))
        nothing = torch.zeros_like(h)
        of_low = h if self.widens == "outward" else nothing
        low = self.low * (1.0 + self.strength * torch.where(below, of_low, nothing))
        of_high = torch.where(above, h, nothing) if self.widens == "outward" else h
        high = self.high * (1.0 + self.strength * of_high)
        sums = {
            name: torch.where(batch.trains, x, 0.0).sum(dtype=torch.float64)
            for name, x in zip(self.traits.sums, (low, high), strict=True)
        }
        # No ratio is below 0.
        bound = torch.where(batch.tokens.advantages < 0, (1.0 - low).clamp(min=0.0), 1.0 + high)
        return Decided((bound.log(),), (), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        x, advantages = tokens.clamped, tokens.advantages
        (bound,) = tokens.decided.tokens
        down = advantages < 0
        low, above, dual = down & (x < bound), ~down & (x > bound), None
        ratio = torch.where(low | above, bound, x).exp()
        if self.dual is not None:
            dual = down & tokens.over(x, self.dual)
            ratio = torch.where(dual, self.dual, ratio)
        return TokenLoss(-advantages * ratio, low=low, high=above & (advantages > 0), dual=dual)

    def explain(self) -> str:
        side = "lower" if self.widens == "outward" else "upper"
        text = (
            f"-min(r A, clip(r, {1.0 - self.low:g}, {1.0 + self.high:g}) A), the upper bound up to "
            f"{1.0 + self.strength:g} times as far from 1 at high entropy, the {side} at low, pivot {self.pivot:g}"
        )
        return text if self.dual is None else f"{text}; at most {self.dual:g} |A| where A < 0"


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

    def __post_init__(self) -> None:
        super().__post_init__()
        # With a smaller one a derivative, up to the size of a group over tau, may leave float32, and 0 times it is NaN.
        self._number("tau", least=SMALLEST_TAU, most=LARGEST_FLOAT32)

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
        found = {"group_contrast": torch.count_nonzero(contrasts)}
        return Decided((), (), found, (score, value.to(score.dtype), slope.to(score.dtype)))

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
