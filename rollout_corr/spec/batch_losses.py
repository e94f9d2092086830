"""Surrogates that look at the whole batch before the first token has a loss: clipped by what all of it shows.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage. Means and sums over the batch
are over its tokens that train, on all ranks of the batch group, and constants of the gradient. The covariance of a
token is (A - mean A) (new_logp - mean new_logp): tokens where it is large are those that take entropy from the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.spec.ratio_losses import PPO
from rollout_corr.spec.surrogate import Handed, Looked, LossTokens, SeenBatch, Surrogate, TokenLoss
from rollout_corr.spec.thresholds import LARGEST_FLOAT32
from rollout_corr.spec.validate import choice, number, positive, shown

First = Literal["lower", "upper"]
FIRSTS: tuple[str, ...] = get_args(First)

# Steps of one bound of BAPO: every candidate has a place in a table.
MOST_STEPS = 1000


def _share(name: str, value: object) -> float:
    share = number(name, value)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name}: expected a number above 0 and at most 1, got {share!r}")
    return share


def _covariance(seen: SeenBatch) -> Tensor:
    """The covariance of each token."""
    tokens = seen.tokens
    new = tokens.new.detach()
    return (tokens.advantages - seen.mean(tokens.advantages)) * (new - seen.mean(new))


def _as_many(seen: SeenBatch, share: float) -> Tensor:
    """0-d float64: a share of the tokens that train, rounded down, at least one."""
    return (seen.count() * share).floor().clamp(min=1.0)


def _of_chosen(covariance: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """The statistics of the tokens chosen."""
    return {
        "cov_chosen": torch.count_nonzero(chosen),
        "cov_of_chosen": torch.where(chosen, covariance, 0.0).sum(dtype=torch.float64),
    }


@dataclass(frozen=True, repr=False)
class ClipCov(PPO):
    """PPO's clip, and 0 at a few tokens of large covariance, which a random draw chooses (Clip-Cov).

    The draw is a function of `seed`, of the sequence and of the token's place among the valid tokens of its sequence,
    so a call repeats to the bit, whatever the padding. A sequence is known by `policy_loss(sequence_ids=...)`, and
    without by its place in the call. Give every step another seed, or other ids.

    Args:
        low: As for PPO.
        high: As for PPO.
        dual: As for PPO.
        delta: As for PPO.
        share: The number chosen is this share of the tokens that train, rounded down, at least 1, and fewer where fewer
            may be chosen; above 0 and at most 1.
        lower: A token may be chosen where it is not clipped and its covariance is above this,
        upper: and below this.
        seed: Of the draw, an integer from 0 up to 2^63 - 1.
    """

    share: float = 2e-4
    lower: float = 1.0
    upper: float = 5.0
    seed: int = 0

    looks: ClassVar[bool] = True
    hands_tokens: ClassVar[Handed | None] = "mask"
    found: ClassVar[tuple[str, ...]] = ("cov_chosen", "cov_of_chosen", "cov_eligible")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("ClipCov.share", self.share))
        for name in ("lower", "upper"):
            self._set(**{name: number(f"ClipCov.{name}", getattr(self, name))})
        if not self.lower <= self.upper:
            raise ValueError(f"ClipCov.upper: expected a number >= lower={self.lower!r}, got {self.upper!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"ClipCov.seed: expected an integer, got {type(self.seed).__name__} {shown(self.seed)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"ClipCov.seed: expected an integer from 0 up to 2^63 - 1, got {shown(self.seed)}")

    def look(self, seen: SeenBatch) -> Looked:
        """Choose among the tokens whose covariance lies within the bounds, those that PPO clips left out."""
        covariance = _covariance(seen)
        low, high, dual = self._clipped(seen.tokens)
        eligible = (covariance > self.lower) & (covariance < self.upper) & seen.trains & ~(low | high | dual)
        chosen = seen.drawn(self.seed, eligible, _as_many(seen, self.share))
        sums = {**_of_chosen(covariance, chosen), "cov_eligible": torch.count_nonzero(eligible)}
        return Looked((chosen,), (), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute PPO's loss, and 0 at the tokens chosen."""
        found = super().loss(tokens)
        return found._replace(value=torch.where(tokens.looked.tokens[0], 0.0, found.value))

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return (
            f"{super().explain()}; 0 at a share of {self.share:g} of the tokens, drawn from those of covariance in "
            f"({self.lower:g}, {self.upper:g})"
        )


@dataclass(frozen=True, repr=False)
class KLCov(Surrogate):
    """REINFORCE's ratio, -r A, and a penalty |x| at the tokens of largest covariance (KL-Cov).

    Tokens whose covariance equals that of the last one chosen are chosen too.

    Args:
        share: The number chosen is this share of the tokens that train, rounded down, at least 1; above 0, at most 1.
        penalty: Factor of |x| at these.
    """

    share: float = 2e-4
    penalty: float = 0.1

    looks: ClassVar[bool] = True
    hands_tokens: ClassVar[Handed | None] = "mask"
    found: ClassVar[tuple[str, ...]] = ("cov_chosen", "cov_of_chosen")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(share=_share("KLCov.share", self.share))
        # Times |x| = 0 an infinite penalty is NaN.
        self._number("penalty", most=LARGEST_FLOAT32)

    def look(self, seen: SeenBatch) -> Looked:
        """Choose the tokens of largest covariance."""
        covariance = _covariance(seen)
        chosen = seen.largest(covariance, seen.trains, _as_many(seen, self.share))
        return Looked((chosen,), (), _of_chosen(covariance, chosen))

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -r A, with the penalty at the tokens chosen."""
        away = tokens.saturated(tokens.x).abs()
        penalty = torch.where(tokens.looked.tokens[0], self.penalty * away, 0.0)
        return TokenLoss(penalty - tokens.clamped.exp() * tokens.advantages)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        return f"-r A, and {self.penalty:g} |x| more at the share of {self.share:g} of the tokens of largest covariance"


@dataclass(frozen=True, repr=False)
class BAPO(Surrogate):
    """PPO's clip whose bounds rise step by step until positive advantages carry a share of the loss (BAPO).

    The contribution of A > 0 is the sum of A min(r, upper bound), that of A < 0 the sum of |A| max(r, lower bound).
    From `lower` and `upper` on one bound rises to its end in steps, then the other, and both stop where the positive
    contribution is at least `share` of both together, or at the end. A higher lower bound never raises that share; it
    takes the gradient of tokens whose ratio is already far below 1.

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

    option: ClassVar[str | None] = "first"
    looks: ClassVar[bool] = True
    hands_numbers: ClassVar[tuple[str, ...]] = ("least", "most", "clip/lower", "clip/upper")
    found: ClassVar[tuple[str, ...]] = ("bapo_calls", "bapo_lower", "bapo_upper", "bapo_positive", "bapo_negative")

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
        """The bounds of the ratio; those of the clip until the batch has decided them."""
        return {"least": self.lower, "most": self.upper, "furthest": self.dual or 0.0}

    @property
    def cuts(self) -> dict[str, tuple[float | None, float | None]]:
        """The bounds of the clip, until the batch has decided them, and of the far side."""
        return {"clip": (self.lower, self.upper), "far": (None, self.dual)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name the clips."""
        return ("low", "high") if self.dual is None else ("low", "high", "dual")

    def look(self, seen: SeenBatch) -> Looked:
        """Find the bounds: the contributions at all of them come from one table of sums."""
        tokens, lowers, uppers = seen.tokens, self.lowers, self.uppers
        x, advantages = tokens.clamped, tokens.advantages
        low_cuts, high_cuts = tokens.cuts(lowers, "lower"), tokens.cuts(uppers, "upper")
        # How many lower bounds are not above the ratio, and how many upper ones are below it.
        below, above = torch.bucketize(x, low_cuts, right=True), torch.bucketize(x, high_cuts)
        place = torch.where(advantages < 0, below, above + (len(lowers) + 1))
        amounts = torch.stack((x.exp() * advantages.abs(), advantages.abs()))
        here, total = seen.sums(amounts, place, len(lowers) + len(uppers) + 2)
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
        return Looked((), (lower.to(x.dtype), upper.to(x.dtype), *cuts), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -A times r, cut from above where A > 0 and from below where A < 0, by the bounds found."""
        x, advantages = tokens.clamped, tokens.advantages
        lower, upper, low_cut, high_cut = tokens.looked.numbers
        down = advantages < 0
        low, above, bound, dual = down & (x < low_cut), x > high_cut, torch.where(down, lower, upper), None
        cut = low | (above & ~down)
        if self.dual is not None:
            dual = down & tokens.over(x, self.dual)
            cut, bound = cut | dual, torch.where(dual, self.dual, bound)
        ratio = torch.where(cut, bound, x.exp())
        return TokenLoss(-advantages * ratio, low=low, high=above & (advantages > 0), dual=dual)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
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

    Args:
        table: [2, places] float64, the sums of r |A| and of |A| at each place: of A < 0 by how many lower bounds are
            not above r, then of the others by how many upper bounds are below r.
        lowers: [L] float64.
        uppers: [H] float64.
    """
    of_negative, of_positive = table.split([lowers.shape[0] + 1, uppers.shape[0] + 1], dim=1)
    up_to, total = of_negative.cumsum(1), of_negative.sum(1, keepdim=True)
    negative = (total - up_to)[0, :-1] + lowers * up_to[1, :-1]
    up_to, total = of_positive.cumsum(1), of_positive.sum(1, keepdim=True)
    positive = up_to[0, :-1] + uppers * (total - up_to)[1, :-1]
    return negative, positive
