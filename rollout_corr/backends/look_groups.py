"""Sequences and their groups, as a surrogate looks at them: `SeenGroups` of spec/surrogate.py.

Sums of exponentials are taken below the largest of their group and added up as integers, so neither the order of the
sequences nor the ranks that hold them change a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends.sequence_groups import SequenceGroups
from rollout_corr.definition.loss import Read
from rollout_corr.definition.sequences import Sequences
from rollout_corr.spec.surrogate import Looked, Surrogate

if TYPE_CHECKING:
    from rollout_corr.backends.groups import Groups

# Exponentials are at most 1 and multiples of 1 / GRID: room for 2^21 sequences of a group.
GRID = 2.0**42


class Facts(NamedTuple):
    """The sequences of a batch, [S] each, as `SeenGroups` names them."""

    trains: Tensor
    scores: Tensor
    advantages: Tensor


def facts_of(found: Read, sequences: Sequences) -> Facts:
    """Take the facts of sequences from their tokens, which have them in common."""
    tokens = found.tokens

    def of_tokens(x: Tensor) -> Tensor:
        x = x.expand(tokens.x.shape)
        x = x if found.counted is None else torch.where(found.counted, x, -torch.inf)
        return torch.where(found.n > 0, sequences.max(x), 0.0)

    return Facts(found.n > 0, of_tokens(tokens.clamped), of_tokens(tokens.mean_advantage()))


def look(surrogate: Surrogate, facts: Facts, groups: SequenceGroups | None, ranks: Groups) -> Looked:
    """Let a surrogate look at the groups of a batch, over the ranks that share it."""
    assert groups is not None
    return surrogate.look_at_groups(WholeGroups(facts, groups, ranks))


class WholeGroups:
    """The sequences of a batch and their groups.

    Args:
        facts: The sequences.
        groups: Their groups.
        ranks: The process groups; nothing is exchanged where every group lies on one rank.
    """

    def __init__(self, facts: Facts, groups: SequenceGroups, ranks: Groups) -> None:
        self.trains, self.scores, self.advantages = facts
        self._count, self._index = groups.total, groups.placed()
        self._ranks = ranks._replace(batch=None) if groups.whole else ranks

    def log_sums(self, x: Tensor, kind: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
        # Those of no group have columns too, which count nothing.
        columns = kinds * (self._count + 1)
        place = kind * (self._count + 1) + self._index
        some = self.trains & (self._index < self._count)
        x = torch.where(some, x, 0.0)
        # 0 is the logarithm of the 1 beside every sum.
        largest = self._ranks.highest(x.new_zeros(columns).scatter_reduce(0, place, x, "amax"))
        parts = torch.where(some, ((x - largest[place]).exp() * GRID).round(), 0.0).long()
        totals = torch.stack([parts, some.long()])
        totals = totals.new_zeros(2, columns).scatter_add_(1, place.expand_as(totals), totals)
        total, count = self._ranks.sum(totals.flatten()).view(2, columns).unbind()
        logs = largest + (total.double() / GRID + (-largest).exp()).log()
        logs, count = logs.view(kinds, -1), count.view(kinds, -1)
        return logs[:, self._index], count[:, self._index]
