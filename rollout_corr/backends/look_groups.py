"""Sequences and their groups, as a surrogate looks at them: `SeenGroups` of spec/surrogate.py.

Sums of exponentials are taken below the largest of their group and added up as integers, so neither the order of the
sequences nor the ranks that hold them change a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout_corr.backends.sequence_groups import SequenceGroups
from rollout_corr.definition.sequences import Sequences

# Exponentials are at most 1 and multiples of 1 / GRID: room for 2^21 sequences of a group.
GRID = 2.0**42

OverRanks = Callable[[Tensor], Tensor]


class WholeGroups:
    """The sequences of a batch and their groups.

    Args:
        sequences: The sequences.
        trains: Bool per token: it trains.
        groups: Their groups.
        add_up: Adds int64 up over the ranks that share the batch.
        highest: Takes the maximum of float64 over them.
    """

    def __init__(
        self, sequences: Sequences, trains: Tensor, groups: SequenceGroups, add_up: OverRanks, highest: OverRanks
    ) -> None:
        self._sequences, self._tokens, self._index = sequences, trains, groups.placed()
        self._count, self._shape = groups.total, trains.shape
        self._add_up, self._highest = (_here, _here) if groups.whole else (add_up, highest)
        self.trains = sequences.sum_integers(trains) > 0

    def of_tokens(self, x: Tensor) -> Tensor:
        found = self._sequences.max(torch.where(self._tokens, x.expand(self._shape), -torch.inf))
        return torch.where(self.trains, found, 0.0)

    def at_tokens(self, x: Tensor) -> Tensor:
        return self._sequences.spread(x).expand(self._shape)

    def log_sums(self, x: Tensor, kind: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
        # Those of no group have columns too, which count nothing.
        columns = kinds * (self._count + 1)
        place = kind * (self._count + 1) + self._index
        some = self.trains & (self._index < self._count)
        x = torch.where(some, x, 0.0)
        # 0 is the logarithm of the 1 beside every sum.
        largest = self._highest(x.new_zeros(columns).scatter_reduce(0, place, x, "amax"))
        parts = torch.where(some, ((x - largest[place]).exp() * GRID).round(), 0.0).long()
        totals = torch.stack([parts, some.long()])
        totals = totals.new_zeros(2, columns).scatter_add_(1, place.expand_as(totals), totals)
        total, count = self._add_up(totals.flatten()).view(2, columns).unbind()
        logs = largest + (total.double() / GRID + (-largest).exp()).log()
        logs, count = logs.view(kinds, -1), count.view(kinds, -1)
        return logs[:, self._index], count[:, self._index]


def _here(x: Tensor) -> Tensor:
    return x
