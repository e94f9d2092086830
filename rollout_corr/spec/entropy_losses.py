"""Surrogates whose bounds depend on the entropy of each token, which the call brings, and on that of the whole batch.

Notation as in surrogate.py: x the log-ratio new_logp - base, r = e^x, A the advantage; H the entropy of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.spec.surrogate import Handed, Looked, LossTokens, SeenBatch, Surrogate, TokenLoss
from rollout_corr.spec.thresholds import LARGEST_FLOAT32
from rollout_corr.spec.validate import choice, number

Widens = Literal["outward", "upper"]
WIDENS: tuple[str, ...] = get_args(Widens)

# Entropies enter their logarithm as at least this.
SMALLEST_ENTROPY = 1e-8


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
        pivot: The quantile that parts high from low entropies, from 0 to 1: of n tokens that train number
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

    option: ClassVar[str | None] = "widens"
    looks: ClassVar[bool] = True
    hands_tokens: ClassVar[Handed | None] = "number"
    reads_entropy: ClassVar[bool] = True
    found: ClassVar[tuple[str, ...]] = ("entropy_clip_low", "entropy_clip_high")

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
        """The bound of the far side; those of the clip are each token's own."""
        return {"furthest": self.dual or 0.0}

    @property
    def cuts(self) -> dict[str, tuple[float | None, float | None]]:
        """The bound of the far side."""
        return {"far": (None, self.dual)}

    def clips(self, own_ratio: bool) -> tuple[str, ...]:
        """Name the clips."""
        return ("low", "high") if self.dual is None else ("low", "high", "dual")

    def look(self, seen: SeenBatch) -> Looked:
        """Find the pivot and the ends of the batch, and from them the bound of each token that its advantage asks for.

        It is handed over as a logarithm, so that whoever compares with it takes none of their own.
        """
        assert seen.entropy is not None
        known = seen.trains & seen.entropy.isfinite()
        log = torch.where(known, seen.entropy, 1.0).clamp(min=SMALLEST_ENTROPY).log()
        n = seen.count_of(known)
        pivot = seen.numbered(log, known, (self.pivot * (n - 1.0)).round() + 1.0)
        away = log - pivot
        up, down = (seen.numbered(log, known, place) - pivot for place in (n, torch.ones_like(n)))
        above, below = known & (away > 0), known & (away < 0)
        h = torch.where(above, away / up, torch.where(below, away / down, 0.0))
        nothing = torch.zeros_like(h)
        of_low = h if self.widens == "outward" else nothing
        low = self.low * (1.0 + self.strength * torch.where(below, of_low, nothing))
        of_high = torch.where(above, h, nothing) if self.widens == "outward" else h
        high = self.high * (1.0 + self.strength * of_high)
        sums = {
            name: torch.where(seen.trains, x, 0.0).sum(dtype=torch.float64)
            for name, x in zip(self.found, (low, high), strict=True)
        }
        lower, upper = bounds_around_one(low, high)
        return Looked((torch.where(seen.tokens.advantages < 0, lower, upper).log(),), (), sums)

    def loss(self, tokens: LossTokens) -> TokenLoss:
        """Compute -A times r, cut from above where A > 0 and from below where A < 0, by the token's own bounds."""
        x, advantages = tokens.clamped, tokens.advantages
        (bound,) = tokens.looked.tokens
        down = advantages < 0
        low, above, dual = down & (x < bound), ~down & (x > bound), None
        ratio = torch.where(low | above, bound, x).exp()
        if self.dual is not None:
            dual = down & tokens.over(x, self.dual)
            ratio = torch.where(dual, self.dual, ratio)
        return TokenLoss(-advantages * ratio, low=low, high=above & (advantages > 0), dual=dual)

    def explain(self) -> str:
        """Say the loss of a token in one line."""
        side = "lower" if self.widens == "outward" else "upper"
        text = (
            f"-min(r A, clip(r, {1.0 - self.low:g}, {1.0 + self.high:g}) A), the upper bound up to "
            f"{1.0 + self.strength:g} times as far from 1 at high entropy, the {side} at low, pivot {self.pivot:g}"
        )
        return text if self.dual is None else f"{text}; at most {self.dual:g} |A| where A < 0"


def bounds_around_one(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds at distances from 1; no ratio is below 0."""
    return (1.0 - low).clamp(min=0.0), 1.0 + high
