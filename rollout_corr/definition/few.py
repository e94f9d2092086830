"""Sums of a token weight that its bounds change at a few tokens alone; statistics on the CPU come from it."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from rollout_corr.definition.bounds import Bound, WeightBounds, after_bounds, limits
from rollout_corr.definition.near import Near
from rollout_corr.definition.tokens import Tokens, rounded
from rollout_corr.definition.weights import Weighing
from rollout_corr.spec.choices import Outside
from rollout_corr.spec.correction import Spec


class FewBounded:
    """Sums of a token weight where all but a few tokens are near 1 and within the bounds, which change those few alone.

    Args:
        near: The sums before the bounds.
        bounds: Numbers, of a weight at token level without a token clamp.
        outside: What it becomes outside them.
    """

    def __init__(self, near: Near, bounds: WeightBounds, outside: Outside) -> None:
        self._near, self.bounds, self._outside = near, bounds, outside
        # The bounds of the ratio.
        self.lower, self.upper = (x if isinstance(x, float) else None for x in (bounds.lower, bounds.upper))

    @cached_property
    def few(self) -> Tensor:
        """[k] float64, ratio - 1 of the few after the bounds."""
        return after_bounds(self.bounds, self._outside, self._near.few_excess, self._near.few, 1.0)

    def squares(self) -> float:
        """The sum of (ratio - 1)^2 after the bounds."""
        return self._near.near_excess2 + self.few.dot(self.few).item()

    def count(self, low: Bound, high: Bound) -> int:
        """Tokens beyond a bound."""
        few = self._near.few
        least, most = limits(few.dtype, low, high)
        # In bools: floats would take less time, and be the largest temporary of a padded batch.
        beyond = [] if least is None else [few < least]
        beyond += [] if most is None else [few > most]
        return sum(int(torch.count_nonzero(which)) for which in beyond) if few.shape[0] else 0

    def extrema(self, raw: tuple[float, float]) -> tuple[float, float]:
        """(-minimum, maximum) of ratio - 1 after the bounds, from those before them."""
        low, high = -raw[0], raw[1]
        bounds = self.bounds
        if self._outside == "clamp" or not self.count(bounds.low, bounds.high):
            least = -math.inf if self.lower is None else self.lower - 1.0
            most = math.inf if self.upper is None else self.upper - 1.0
            return rounded((-min(max(low, least), most), min(max(high, least), most)), self._near.d.dtype)
        # Zero is the least of all; the largest is among those within the bounds.
        largest = max(math.expm1(self._near.largest_near()), self.few.amax().item())
        return rounded((1.0, largest), self._near.d.dtype)


def few_bounded(tokens: Tokens, spec: Spec, weighing: Weighing | None) -> FewBounded | None:
    """Sums of a token weight from those of D; None where too many tokens are far, or where nobody looked."""
    weight = spec.weight
    if weight is None or weight.level != "token" or weight.token_clamp is not None or tokens.near is None:
        return None
    return None if weighing is None else FewBounded(tokens.near, weighing.bounds, weight.outside)
