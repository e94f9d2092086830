"""The bounds that a batch has decided, looked up by criterion and side."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..definition.bounds import Bound, Sides
from ..specs.bounds_of_batch import WEIGHT, Place
from ..specs.correction import Criterion, Weight


class KnownBounds:
    """The bounds found, by place.

    They are of criteria, and of the logarithms of weights: 0-d each, or [groups + 1] of each group, and the last of
    none; infinite where a side is open.
    """

    def __init__(self, bounds: dict[Place, Tensor]) -> None:
        self.bounds = bounds
        self._numbers: Sides | None = None

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Look the bounds of a criterion up."""
        low, high = (
            x if x is None or not x.dim() or groups is None else x[groups] for x in self._sides(criterion.label)
        )
        return low, high

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Look the bounds of the weight up: as numbers, None for an open side, where values may be read."""
        low, high = self.known_of_weight()
        if low is None and high is None:
            return self._sides(WEIGHT)
        return None if low == -math.inf else low, None if high == math.inf else high

    def known_of_weight(self) -> Sides:
        """Read the bounds of the weight once, where values may be read."""
        sides = self._sides(WEIGHT)
        if torch.compiler.is_compiling() or any(x is not None and x.device.type != "cpu" for x in sides):
            return None, None
        if self._numbers is None:
            low, high = (None if x is None else x.item() for x in sides)
            self._numbers = low, high
        return self._numbers

    def _sides(self, label: str) -> tuple[Tensor | None, Tensor | None]:
        return self.bounds.get(Place(label, "lower")), self.bounds.get(Place(label, "upper"))
