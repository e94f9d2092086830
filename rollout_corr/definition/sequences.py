"""Per-sequence reductions over padded rows (`Rows`, [B, T]) or packed tokens with offsets (`Packed`, [N]).

`Flattened` serves turns, which lie anywhere in padded rows.
`Split` in backends/split.py serves sequences whose tokens lie on several ranks. So there is one definition for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


# What float64 holds exactly, with all integers below.
FLOAT64 = 2.0**53


class Sequences(Protocol):
    """Sums and maxima of tokens, [N] or [B, T], per sequence, [S], and the way back."""

    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Add floating x up: [S] float64."""

    def sum_integers(self, x: Tensor, largest: float | None = None) -> Tensor:
        """Add int64 or bool x up, or whole numbers up to 2^38 as floats: [S] int64, exact in any order.

        Where no |x| is above a `largest` the result may be float64 that holds every sum. May overwrite x unless it is
        bool.
        """

    def max(self, x: Tensor) -> Tensor:
        """Find the largest floating x: [S]; -inf for a sequence without tokens."""

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Every token's value of its sequence: [S] -> a shape that broadcasts over the tokens."""

    def running(self, x: Tensor) -> Tensor:
        """Add int64 or bool x up along each sequence, up to and with each token: int64 per token, exact."""

    def running_max(self, x: Tensor, before: bool = False) -> Tensor:
        """Find the largest floating x up to and with each token, or only before it: -inf of none. NaN stays."""

    def with_gradient(self, total: Tensor, x: Tensor) -> Tensor:
        """A total of x that was computed by other means, [S] float64, with the gradient of `sum(x)`."""

    def gradient(self, value: Tensor, new: Tensor) -> Tensor:
        """Differentiate a 0-d value by `new`, also through a total of `with_gradient`; 0 if nothing was summed."""


class Whole:
    """Gradients for sequences that lie whole on this rank."""

    def with_gradient(self: Sequences, total: Tensor, x: Tensor) -> Tensor:
        """The total, [S] float64, with the gradient of `sum(x)`."""
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

    def sum_integers(self, x: Tensor, largest: float | None = None) -> Tensor:
        """[B, T] int64, bool, or floating whole numbers -> [B] int64, exact whatever the order."""
        return (x.to(torch.int64) if x.is_floating_point() else x).sum(1)

    def max(self, x: Tensor) -> Tensor:
        """[B, T] -> [B]; -inf for a row without tokens."""
        return x.amax(1) if x.shape[1] else x.new_full((self.count,), -torch.inf)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[B] -> [B, 1], which broadcasts over the row."""
        return per_sequence[:, None]

    def running(self, x: Tensor) -> Tensor:
        """[B, T] int64 or bool -> [B, T] int64."""
        return x.cumsum(1)

    def running_max(self, x: Tensor, before: bool = False) -> Tensor:
        """[B, T] -> [B, T]."""
        return scan_max(x, torch.arange(x.shape[1], device=x.device), before)


def scan_max(x: Tensor, place: Tensor, before: bool) -> Tensor:
    """The largest x up to each token, in steps that double: exact in every dtype, NaN stays, no value is read.

    `place` is each token's place in its sequence, from 0. With `before` the token itself is left out; before the first
    there is -inf.
    """
    if before and x.shape[-1]:
        x = torch.where(place > 0, torch.cat([x[..., :1], x[..., :-1]], -1), -torch.inf)
    step = 1
    while step < x.shape[-1]:
        ahead = x[..., step:]
        found = torch.where(place[step:] >= step, ahead.maximum(x[..., :-step]), ahead)
        x, step = torch.cat([x[..., :step], found], -1), 2 * step
    return x


def _differences(x: Tensor, offsets: Tensor) -> Tensor:
    """The sums of int64 or bool x from each offset to the next: differences of a running sum, which may overflow."""
    if not x.shape[0]:
        return torch.zeros_like(offsets[1:])
    running = x.cumsum_(0) if x.dtype == torch.int64 else x.cumsum(0)
    return running.index_select(0, (offsets - 1).clamp_(min=0)).mul_(offsets > 0).diff()


class Packed(Whole):
    """Sequence s is the tokens offsets[s] .. offsets[s + 1] of an [N] tensor, where size is N.

    Offsets do not decrease. Tokens outside belong to no sequence: their statistics must be 0, and the values that
    `spread` gives them have no meaning. `lengths`, [S], are given where it is known that there are none.
    """

    def __init__(self, offsets: Tensor, size: int, lengths: Tensor | None = None) -> None:
        self.offsets = offsets
        self.size = size
        self.count = offsets.shape[0] - 1
        self._lengths = lengths
        self._ids: Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: Tensor, size: int) -> Self:
        """Build from [S] lengths that sum to N, for sequences without gaps between them."""
        return cls(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), size, lengths)

    def sum(self, x: Tensor) -> Tensor:
        """[N] floating -> [S] float64; nothing in one sequence touches another."""
        if self.size == 0 or self.count == 0:
            return torch.zeros(self.count, dtype=torch.float64, device=x.device)
        return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True)

    def sum_integers(self, x: Tensor, largest: float | None = None) -> Tensor:
        """[N] int64, bool, or floating whole numbers -> [S] int64, exact, or float64. May overwrite x.

        With floats a running sum would let a sequence take part in its neighbors' rounding.
        """
        if largest is not None and self.count and largest * self.size <= FLOAT64:
            # A third of the operations of a running sum.
            return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True)
        return _differences(x.to(torch.int64) if x.is_floating_point() else x, self.offsets)

    def max(self, x: Tensor) -> Tensor:
        """[N] floating -> [S]; -inf for a sequence without tokens."""
        if self.size == 0 or self.count == 0:
            return x.new_full((self.count,), -torch.inf)
        return torch.segment_reduce(x, "max", offsets=self.offsets, unsafe=True)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[S] -> [N]."""
        if self.count == 0:
            return per_sequence.new_zeros(self.size)
        if per_sequence.dtype == torch.bool and self._lengths is not None and self._ids is None:
            # A running sum of where it changes, in bytes: a fifth of the time of the index.
            flags = per_sequence.to(torch.int8)
            changes = torch.cat([flags[:1], flags.diff()])
            running = torch.zeros(self.size + 1, dtype=torch.int8, device=flags.device)
            return running.index_add_(0, self.offsets[:-1], changes).cumsum_(0)[:-1].view(torch.bool)
        return per_sequence.index_select(0, self.ids)

    def running(self, x: Tensor) -> Tensor:
        """[N] int64 or bool -> [N] int64; nothing in one sequence touches another."""
        if self.size == 0 or self.count == 0:
            return torch.zeros(self.size, dtype=torch.int64, device=x.device)
        # The sum may wrap around, its differences do not.
        running = x.cumsum(0)
        starts = self.offsets[:-1]
        before = running.index_select(0, (starts - 1).clamp(min=0)).mul_(starts > 0)
        return running.sub_(self.spread(before))

    def running_max(self, x: Tensor, before: bool = False) -> Tensor:
        """[N] -> [N]."""
        return scan_max(x, self.places, before)

    @property
    def places(self) -> Tensor:
        """[N] int64, the place of each token in its sequence, from 0; without meaning outside."""
        places = torch.arange(self.size, device=self.offsets.device)
        return places if self.count == 0 else places.sub_(self.spread(self.offsets[:-1]))

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


class Flattened(Whole):
    """Stretches of the tokens of [B, T], row after row, as `Packed` has them of [N]."""

    def __init__(self, packed: Packed, shape: torch.Size) -> None:
        self.packed, self.shape = packed, shape
        self.count = packed.count

    def sum(self, x: Tensor) -> Tensor:
        """[B, T] floating -> [U] float64."""
        return self.packed.sum(x.reshape(-1))

    def sum_integers(self, x: Tensor, largest: float | None = None) -> Tensor:
        """[B, T] int64, bool, or floating whole numbers -> [U] int64, exact, or float64. May overwrite x."""
        return self.packed.sum_integers(x.reshape(-1), largest)

    def max(self, x: Tensor) -> Tensor:
        """[B, T] -> [U]; -inf for a stretch without tokens."""
        return self.packed.max(x.reshape(-1))

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[U] -> [B, T]."""
        return self.packed.spread(per_sequence).view(self.shape)

    def running(self, x: Tensor) -> Tensor:
        """[B, T] int64 or bool -> [B, T] int64."""
        return self.packed.running(x.reshape(-1)).view(self.shape)

    def running_max(self, x: Tensor, before: bool = False) -> Tensor:
        """[B, T] -> [B, T]."""
        return self.packed.running_max(x.reshape(-1), before).view(self.shape)
