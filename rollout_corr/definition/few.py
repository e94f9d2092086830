"""Sums of a token weight that its bounds change at a few tokens alone; statistics on the CPU come from it."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from rollout_corr.definition.bounds import after_bounds, limits
from rollout_corr.definition.near import Near
from rollout_corr.definition.tokens import Tokens, rounded
from rollout_corr.spec.correction import Spec, Weight
from rollout_corr.spec.thresholds import log_bound


class FewBounded:
    """Sums of a token weight where all but a few tokens are near 1 and within the bounds, which change those few alone.

    Args:
        near: The sums before the bounds.
        weight: At token level, without a token clamp.
    """

    def __init__(self, near: Near, weight: Weight) -> None:
        self._near, self._weight = near, weight

    @cached_property
    def few(self) -> Tensor:
        """[k] float64, ratio - 1 of the few after the bounds."""
        return after_bounds(self._weight, self._near.few_excess, self._near.few, 1.0)

    def squares(self) -> float:
        """The sum of (ratio - 1)^2 after the bounds."""
        return self._near.near_excess2 + self.few.dot(self.few).item()

    def count(self, low: float | None, high: float | None) -> int:
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
        weight = self._weight
        if weight.outside == "clamp" or not self.count(log_bound(weight.lower), log_bound(weight.upper)):
            least = -math.inf if weight.lower is None else weight.lower - 1.0
            most = math.inf if weight.upper is None else weight.upper - 1.0
            return rounded((-min(max(low, least), most), min(max(high, least), most)), self._near.d.dtype)
        # Zero is the least of all; the largest is among those within the bounds.
        largest = max(math.expm1(self._near.largest_near()), self.few.amax().item())
        return rounded((1.0, largest), self._near.d.dtype)


def few_bounded(tokens: Tokens, spec: Spec) -> FewBounded | None:
    """Sums of a token weight from those of D; None where too many tokens are far, or where nobody looked."""
    weight = spec.weight
    if weight is None or weight.level != "token" or weight.token_clamp is not None or tokens.near is None:
        return None
    return FewBounded(tokens.near, weight)
