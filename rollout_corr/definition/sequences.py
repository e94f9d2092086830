"""Per-sequence reductions over padded rows (`Rows`, [B, T]) or packed tokens with offsets (`Packed`, [N]).

`Split` in backends/split.py serves sequences whose tokens lie on several ranks. So there is one definition for all.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor


class Sequences(Protocol):
    """Sums and maxima of tokens, [N] or [B, T], per sequence, [S], and the way back."""

    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Add floating x up: [S] float64."""

    def sum_integers(self, x: Tensor) -> Tensor:
        """Add int64 (may be overwritten) or bool x up: [S] int64, exact whatever the order."""

    def max(self, x: Tensor) -> Tensor:
        """Find the largest floating x: [S]; -inf for a sequence without tokens."""

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every token its sequence's value: [S] -> a shape that broadcasts over the tokens."""

    def with_gradient(self, total: Tensor, x: Tensor) -> Tensor:
        """Give a total of x that was computed by other means, [S] float64, the gradient of `sum(x)`."""

    def gradient(self, value: Tensor, new: Tensor) -> Tensor:
        """Differentiate a 0-d value by `new`, also through a total of `with_gradient`; 0 if nothing was summed."""


class Whole:
    """Gradients for sequences of which no rank holds only a part."""

    def with_gradient(self: Sequences, total: Tensor, x: Tensor) -> Tensor:
        """Give a total, [S] float64, the gradient of `sum(x)`."""
        plain = self.sum(x)
        return total + (plain - plain.detach())

    def gradient(self, value: Tensor, new: Tensor) -> Tensor:
        """Differentiate by autograd."""
        return torch.autograd.grad(value, new)[0] if value.requires_grad else torch.zeros_like(new)


class Rows(Whole):
    """Each row of a [B, T] tensor is a sequence."""

    def __init__(self, count: int) -> None:
        self.count = count

    def sum(self, x: Tensor) -> Tensor:
        """[B, T] floating -> [B] float64."""
        return x.sum(1, dtype=torch.float64)

    def sum_integers(self, x: Tensor) -> Tensor:
        """[B, T] int64 or bool -> [B] int64, exact whatever the order."""
        return x.sum(1)

    def max(self, x: Tensor) -> Tensor:
        """[B, T] -> [B]; -inf for a row without tokens."""
        return x.amax(1) if x.shape[1] else x.new_full((self.count,), -torch.inf)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[B] -> [B, 1], which broadcasts over the row."""
        return per_sequence[:, None]


# Tokens of a part of a sum on the CPU.
PART = 65_536


class Packed(Whole):
    """Sequence s is the tokens offsets[s] .. offsets[s + 1] of an [N] tensor.

    Args:
        offsets: [S + 1] int64, not decreasing, within [0, N]. Tokens outside belong to no sequence: their statistics
            must be 0, and the values that `spread` gives them have no meaning.
        size: N.
    """

    def __init__(self, offsets: Tensor, size: int) -> None:
        self.offsets = offsets
        self.size = size
        self.count = offsets.shape[0] - 1
        self._ids: Tensor | None = None
        self._lengths: Tensor | None = None
        self._parts: list[tuple[slice, Tensor]] | None = None

    @classmethod
    def of_lengths(cls, lengths: Tensor, size: int) -> Packed:
        """Build from [S] lengths that sum to N, for sequences without gaps between them."""
        packed = cls(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), size)
        packed._lengths = lengths
        return packed

    def sum(self, x: Tensor) -> Tensor:
        """[N] floating -> [S] float64; nothing in one sequence touches another."""
        if self.size == 0 or self.count == 0:
            return torch.zeros(self.count, dtype=torch.float64, device=x.device)
        if x.device.type != "cpu" or x.dtype == torch.float64 or torch.compiler.is_compiling():
            return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True)
        # Part by part, so that the float64 copy is small and stays in cache.
        if self._parts is None:
            self._parts = self._cut()
        return torch.cat(
            [torch.segment_reduce(x[part].double(), "sum", offsets=inner, unsafe=True) for part, inner in self._parts]
        )

    def _cut(self) -> list[tuple[slice, Tensor]]:
        """Cut into parts of consecutive sequences, about PART tokens each: their tokens and the offsets inside."""
        marks = torch.arange(1, self.size // PART + 1, device=self.offsets.device) * PART
        cuts = [0, *torch.searchsorted(self.offsets[1:], marks).tolist(), self.count]
        parts = []
        for first, last in itertools.pairwise(cuts):
            if first < last:
                offsets = self.offsets[first : last + 1]
                start, end = int(offsets[0]), int(offsets[-1])
                parts.append((slice(start, end), offsets - start))
        return parts

    def sum_integers(self, x: Tensor) -> Tensor:
        """[N] int64 or bool -> [S] int64, exact. Overwrites int64 x, which is as large as two of the log-probs.

        Takes differences of a running sum: the sum may wrap around, its differences do not. With floats a sequence
        would take part in its neighbours' rounding.
        """
        if not self.size:
            return self.offsets.new_zeros(self.count)
        running = x.cumsum_(0) if x.dtype == torch.int64 else x.cumsum(0)
        running = running.index_select(0, (self.offsets - 1).clamp_(min=0))
        return torch.where(self.offsets > 0, running, 0).diff()

    def max(self, x: Tensor) -> Tensor:
        """[N] floating -> [S]; -inf for a sequence without tokens."""
        if self.size == 0 or self.count == 0:
            return x.new_full((self.count,), -torch.inf)
        return torch.segment_reduce(x, "max", offsets=self.offsets, unsafe=True)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [N]."""
        if self.count == 0:
            return per_sequence.new_zeros(self.size)
        return per_sequence.index_select(0, self.ids)

    @property
    def ids(self) -> Tensor:
        """[N] int64, the sequence of each token."""
        if self._ids is None:
            if self._lengths is not None:
                which = torch.arange(self.count, device=self.offsets.device)
                self._ids = which.repeat_interleave(self._lengths, output_size=self.size)
            else:
                self._ids = self.of(torch.arange(self.size, device=self.offsets.device)).clamp_(max=self.count - 1)
        return self._ids

    def of(self, places: Tensor) -> Tensor:
        """The sequence, [k] int64, of each token at `places`, [k] int64."""
        return torch.searchsorted(self.offsets[1:], places, right=True)
