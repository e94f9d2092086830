"""Sums of tokens: of the whole batch or of each label. A statistic is one formula, taken through either.

`Sums` is for sums what `Sequences` (definition/sequences.py) is for layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..definition.sequences import Sequences
from ..definition.tokens import Number, extrema, select, squares

if TYPE_CHECKING:
    from ..definition.findings import Findings


class Reducer(Protocol):
    """Reduces values: to 0-d for the batch, to [labels] for labels. `counted` is bool; None: every value counts."""

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Number:
        """Add x up."""

    def squares(self, x: Tensor, counted: Tensor | None = None, dot: bool = False) -> Number:
        """Add the squares of x up; `dot`: as a product of vectors where x is one, which rounds otherwise."""

    def count(self, which: Tensor | None, counted: Tensor | None = None) -> Number:
        """Count the tokens that are True; None: every token."""

    def none(self) -> Number:
        """Count no token."""

    def ends(self, x: Tensor, counted: Tensor | None = None) -> tuple[Number, Number]:
        """Find the largest x and the largest -x; -inf where there is no token."""


class Sums(Reducer, Protocol):
    """Reduces values of tokens."""

    def over(self, units: Sequences, counts: Tensor, counted: Tensor | None) -> Reducer:
        """Reduce values of units, each counted by its tokens: those in `counted`, or all; `counts`, [U], of each."""


# The sums and then the maxima of a row of statistics, from what a block found and what reduces its tokens.
OfTokens = Callable[["Findings", Sums], tuple[Number, ...]]


class OfBatch:
    """The tokens of a batch, or of a block of it, in the shape of `tokens`."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._last: tuple[Tensor, Tensor] | None = None

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """0-d: the sum."""
        return select(counted, x).sum()

    def squares(self, x: Tensor, counted: Tensor | None = None, dot: bool = False) -> Tensor:
        """0-d: the sum of squares."""
        if counted is not None:
            return squares(select(counted, x))
        if dot and x.dim() == 1:
            return x.dot(x)
        # A ratio without bounds is the weight before them and after them.
        if self._last is None or self._last[0] is not x:
            self._last = x, squares(x)
        return self._last[1]

    def count(self, which: Tensor | None, counted: Tensor | None = None) -> Tensor:
        """0-d: how many are True."""
        if which is None:
            return self._tokens.new_full((), self._tokens.numel(), dtype=torch.int64)
        return torch.count_nonzero(which if counted is None else which & counted)

    def none(self) -> Tensor:
        """0-d: 0."""
        return self._tokens.new_zeros((), dtype=torch.int64)

    def ends(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """0-d each: the largest x and the largest -x."""
        negated, largest = extrema(x, counted)
        return largest, negated

    def over(self, units: Sequences, counts: Tensor, counted: Tensor | None) -> _Units:
        """Values of units, times their tokens."""
        return _Units(counts)


class _Units(OfBatch):
    """Values of units, [U], each counted by its tokens."""

    def __init__(self, counts: Tensor) -> None:
        super().__init__(counts)
        self._counts = counts

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        return (self._counts * x).sum()

    def squares(self, x: Tensor, counted: Tensor | None = None, dot: bool = False) -> Tensor:
        return (self._counts * x * x).sum()

    def count(self, which: Tensor | None, counted: Tensor | None = None) -> Tensor:
        return (self._counts if which is None else self._counts * which).sum()

    def ends(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().ends(x, self._counts > 0)


# --- weights ---


def by_weight(f: Findings, by: Sums) -> tuple[Reducer, Tensor | None]:
    """Return what reduces a weight where it is, at tokens or at their units, and which of them count."""
    weight, measured = f.spec.weight, f.tokens.measured
    assert weight is not None
    return (
        (by, measured) if weight.per_token else (by.over(f.tokens.units(weight.unit), f.units_measured, measured), None)
    )


def sum_of_weight(field: str, excess: str) -> OfTokens:
    """The formula of the sum of a field of `Weighing` over tokens; `excess` is the field less 1.

    The variance takes squares of `excess` where the mean is 1/2 or more, else of the field. This sum takes the same
    numbers: otherwise the variance of equal weights would be the rounding between the two, and not 0.
    """

    def formula(f: Findings, by: Sums) -> tuple[Number]:
        (here, counted), weight = by_weight(f, by), getattr(f.weighing, field)
        wide = torch.where(weight < 0.5, weight.double(), getattr(f.weighing, excess).double() + 1.0)
        return (here.sum(wide, counted),)

    return formula


def squares_of_weight(field: str) -> OfTokens:
    """The formula of the sum of squares of a field of `Weighing` over tokens."""

    def formula(f: Findings, by: Sums) -> tuple[Number]:
        (here, counted), x, weight = by_weight(f, by), getattr(f.weighing, field), f.spec.weight
        assert weight is not None
        if weight.is_token_ratio and x is f.tokens.excess:
            counted = None  # it is 0 where it is not measured
        return (here.squares(x, counted),)

    return formula
