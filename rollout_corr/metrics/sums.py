"""Sums of tokens: of the whole batch or of each label. A statistic is one formula, taken through either.

`Sums` is for sums what `Sequences` (definition/sequences.py) is for layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rollout_corr.definition.sequences import Sequences
from rollout_corr.definition.tokens import Number, extrema, select, squares

if TYPE_CHECKING:
    from rollout_corr.definition.findings import Findings
    from rollout_corr.metrics.rows import OfTokens


class Sums(Protocol):
    """Reduces values of tokens: to 0-d for the batch, to [labels] for labels. `among` is bool; None: every token."""

    def sum(self, x: Tensor, among: Tensor | None = None) -> Number:
        """Add x up."""

    def squares(self, x: Tensor, among: Tensor | None = None, dot: bool = False) -> Number:
        """Add the squares of x up; `dot`: as a product of vectors where x is one, which rounds otherwise."""

    def count(self, which: Tensor | None, among: Tensor | None = None) -> Number:
        """Count the tokens that are True; None: every token."""

    def none(self) -> Number:
        """Count no token."""

    def ends(self, x: Tensor, among: Tensor | None = None) -> tuple[Number, Number]:
        """Find the largest x and the largest -x; -inf where there is no token."""

    def over(self, units: Sequences, counts: Tensor, among: Tensor | None) -> Sums:
        """Reduce values of turns or sequences, each counted by its tokens.

        Args:
            units: Which tokens belong together.
            counts: [U] int64, the tokens of each unit that count.
            among: Bool per token: it counts; None: every one does.
        """


class OfBatch:
    """The tokens of a batch, or of a block of it.

    Args:
        tokens: Any tensor of their shape.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._last: tuple[Tensor, Tensor] | None = None

    def sum(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """0-d: the sum."""
        return select(among, x).sum()

    def squares(self, x: Tensor, among: Tensor | None = None, dot: bool = False) -> Tensor:
        """0-d: the sum of squares."""
        if among is not None:
            return squares(select(among, x))
        if dot and x.dim() == 1:
            return x.dot(x)
        # A ratio without bounds is the weight before them and after them.
        if self._last is None or self._last[0] is not x:
            self._last = x, squares(x)
        return self._last[1]

    def count(self, which: Tensor | None, among: Tensor | None = None) -> Tensor:
        """0-d: how many are True."""
        if which is None:
            return self._tokens.new_full((), self._tokens.numel(), dtype=torch.int64)
        return torch.count_nonzero(which if among is None else which & among)

    def none(self) -> Tensor:
        """0-d: 0."""
        return self._tokens.new_zeros((), dtype=torch.int64)

    def ends(self, x: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """0-d each: the largest x and the largest -x."""
        negated, largest = extrema(x, among)
        return largest, negated

    def over(self, units: Sequences, counts: Tensor, among: Tensor | None) -> OfUnits:
        """Values of units, times their tokens."""
        return OfUnits(counts)


class OfUnits(OfBatch):
    """Values of units, [U], each counted by its tokens.

    Args:
        counts: [U] int64, the tokens of each.
    """

    def __init__(self, counts: Tensor) -> None:
        super().__init__(counts)
        self._counts = counts

    def sum(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """0-d: the sum over tokens."""
        return (self._counts * x).sum()

    def squares(self, x: Tensor, among: Tensor | None = None, dot: bool = False) -> Tensor:
        """0-d: the sum of squares over tokens."""
        return (self._counts * x * x).sum()

    def count(self, which: Tensor | None, among: Tensor | None = None) -> Tensor:
        """0-d: the tokens of the units that are True."""
        return (self._counts if which is None else self._counts * which).sum()

    def ends(self, x: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """0-d each: the largest x and the largest -x of units with a token."""
        return super().ends(x, self._counts > 0)


# --- weights ---


def by_weight(f: Findings, by: Sums) -> tuple[Sums, Tensor | None]:
    """Give what reduces a weight where it is, at tokens or at their units, and which of them count."""
    weight, measured = f.spec.weight, f.tokens.measured
    assert weight is not None
    return (
        (by, measured) if weight.per_token else (by.over(f.tokens.units(weight.over), f.units_measured, measured), None)
    )


def sum_of_weight(field: str) -> OfTokens:
    """The formula of the sum of a field of `Weighing` over tokens."""

    def formula(f: Findings, by: Sums) -> tuple[Number]:
        here, among = by_weight(f, by)
        return (here.sum(getattr(f.weighing, field), among),)

    return formula


def squares_of_weight(field: str) -> OfTokens:
    """The formula of the sum of squares of a field of `Weighing` over tokens."""

    def formula(f: Findings, by: Sums) -> tuple[Number]:
        (here, among), x, weight = by_weight(f, by), getattr(f.weighing, field), f.spec.weight
        assert weight is not None
        if weight.level == "token" and weight.token_clamp is None and x is f.tokens.excess:
            among = None  # it is 0 where it is not measured
        return (here.squares(x, among),)

    return formula
