"""The whole batch, and its groups of sequences, as a surrogate sees them before the first token has a loss.

All of it is plain torch on any device. A surrogate decides by sums of integers on a grid and by a sort. So the packing,
the order of tokens and sequences and the ranks that hold them change no bit of it. No value is read on the host, apart
from lengths over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..definition.bounds_of_batch import by_sort
from ..definition.loss import Read
from ..definition.sequences import Sequences
from ..definition.tokens import GRID_OF_FRACTION, LARGEST_STATISTIC
from ..specs.bounds_of_batch import Side
from ..specs.rules import Before, Counting
from ..specs.surrogate import LossTokens
from . import whole
from .batch import Laid, SequenceGroups

if TYPE_CHECKING:
    from .ranks import Ranks

# SplitMix64 (Steele, Lea and Flood 2014): its increment, and the multipliers and shifts of its finalizer.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))

# Exponentials are at most 1 and multiples of 1 / GRID_OF_GROUPS: room for 2^21 sequences of a group.
GRID_OF_GROUPS = 2.0**42


def mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64: each bit of the result depends on every bit of x."""
    x = x + INCREMENT
    for shift, factor in MIXES:
        # An int64 is shifted arithmetically; the generator shifts logically.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def uniform(seed: int, sequence: Tensor, place: Tensor) -> Tensor:
    """Random float64 in [0, 1) on a grid of 2^-53, of counters: the seed, a sequence's number, a place in it."""
    start = mixed(torch.full((), seed, dtype=torch.int64, device=place.device))
    bits = mixed(mixed(start ^ sequence) ^ place)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


class AsMany(Counting):
    """A rule that keeps so many values, a number that lies on the device."""

    def __init__(self, count: Tensor) -> None:
        self._count = count

    def goes_on(self, before: Before, side: Side) -> Tensor:
        return before.kept < self._count

    def words(self, side: Side) -> str:
        return "a number that the batch decides"


class WholeBatch:
    """A batch as a surrogate sees it: `SeenBatch` of specs/surrogate.py.

    `ids`, [S] int64, are the numbers of its sequences; `ranks` share it.
    """

    def __init__(self, batch: Laid, found: Read, ids: Tensor, ranks: Ranks) -> None:
        self.tokens: LossTokens = found.tokens
        counted = found.counted
        self.trains = torch.ones_like(found.x, dtype=torch.bool) if counted is None else counted
        self._batch, self._ids, self._ranks = batch, ids, ranks
        self._count = torch.count_nonzero(self.trains)

    def count(self) -> Tensor:
        return self._ranks.sum(self._count).double()

    def mean(self, x: Tensor) -> Tensor:
        here = [limb.sum() for limb in self._limbs(x)]
        whole, fraction, count = self._ranks.sum(torch.stack([*here, self._count])).unbind()
        # Between 0 and 1 the fraction is exact, however the sum was made.
        whole, fraction = whole + fraction // GRID_OF_FRACTION, fraction % GRID_OF_FRACTION
        return ((whole.double() + fraction.double() / GRID_OF_FRACTION) / count.clamp(min=1)).to(x.dtype)

    def largest(self, x: Tensor, among: Tensor, count: Tensor) -> Tensor:
        return among & (x >= self._bound("lower", x, among, count))

    def drawn(self, seed: int, among: Tensor, count: Tensor) -> Tensor:
        sequences, valid = whole.sequences_of(self._batch)
        ones = torch.ones_like(self.trains)
        place = sequences.running(ones if valid is None else valid)
        numbers = uniform(seed, sequences.spread(self._ids), place)
        return among & (numbers <= self._bound("upper", numbers, among, count))

    def _bound(self, side: Side, x: Tensor, among: Tensor, count: Tensor) -> Tensor:
        """Find the last value that is chosen; infinite where all are."""
        values = torch.where(among, x, torch.nan).reshape(-1)
        if self._ranks.batch is not None:
            (values,) = self._ranks.gathered(values)
        return by_sort(AsMany(count), side, values)

    def _limbs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The whole part of each token that trains, and its fraction on a grid; int64."""
        x = torch.where(self.trains, x, 0.0).nan_to_num(0.0).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC).double()
        part = x.trunc()
        return part.long(), ((x - part) * GRID_OF_FRACTION).round().long()


class Facts(NamedTuple):
    """The sequences of a batch, [S] each, as `SeenGroups` names them."""

    trains: Tensor
    scores: Tensor
    advantages: Tensor


def facts_of(found: Read, sequences: Sequences) -> Facts:
    """The facts of sequences, taken from their tokens, which have them in common."""
    tokens = found.tokens

    def of_tokens(x: Tensor) -> Tensor:
        x = x.expand(tokens.x.shape)
        x = x if found.counted is None else torch.where(found.counted, x, -torch.inf)
        return torch.where(found.n > 0, sequences.max(x), 0.0)

    return Facts(found.n > 0, of_tokens(tokens.clamped), of_tokens(tokens.mean_advantage()))


class WholeGroups:
    """The sequences of a batch and their groups: `SeenGroups` of specs/surrogate.py.

    Sums of exponentials are taken below the largest of their group and added up as integers. Nothing is exchanged where
    every group lies on one rank.
    """

    def __init__(self, facts: Facts, groups: SequenceGroups, ranks: Ranks) -> None:
        self.trains, self.scores, self.advantages = facts
        self._count, self._index = groups.total, groups.placed()
        self._ranks = ranks._replace(batch=None) if groups.whole else ranks

    def log_sums(self, x: Tensor, kind: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
        # Those of no group have columns too, which count nothing.
        columns = kinds * (self._count + 1)
        place = kind * (self._count + 1) + self._index
        some = self.trains & (self._index < self._count)
        x = torch.where(some, x, 0.0)
        # 0 is the logarithm of the 1 that is added to every sum.
        largest = self._ranks.highest(x.new_zeros(columns).scatter_reduce(0, place, x, "amax"))
        parts = torch.where(some, ((x - largest[place]).exp() * GRID_OF_GROUPS).round(), 0.0).long()
        totals = torch.stack([parts, some.long()])
        totals = totals.new_zeros(2, columns).scatter_add_(1, place.expand_as(totals), totals)
        total, count = self._ranks.sum(totals.flatten()).view(2, columns).unbind()
        logs = largest + (total.double() / GRID_OF_GROUPS + (-largest).exp()).log()
        logs, count = logs.view(kinds, -1), count.view(kinds, -1)
        return logs[:, self._index], count[:, self._index]
