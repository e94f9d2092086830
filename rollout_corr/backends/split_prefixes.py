"""Prefixes of sequences that lie on several ranks, on the kernels: what ranks tell each other of their stretches.

Before `read` decides by prefixes, every rank tells what runs along each of its stretches: sums on the grids of sums
that decide, maxima and counts. A stretch then begins with those of the stretches before. Where a failure drops the
rest, ranks tell the counts of each stretch too, and what lies behind a failure is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout_corr.backends.split import NO_ORDER
from rollout_corr.metrics.collectives import Pending

if TYPE_CHECKING:
    from rollout_corr.kernels.correct.launch import Joins, TableBuffers
    from rollout_corr.kernels.correct.plan import Plan
    from rollout_corr.spec.choices import SequenceOrder


class Stretches:
    """The stretches of sequences over the ranks of a group, in the order of the tokens.

    Owners are sequences or turns, in a zigzag both halves of these as far as a rank has them.

    Args:
        rank: This rank.
        ranks: How many there are.
        order: "contiguous", one stretch of a rank, or "zigzag", two.
    """

    def __init__(self, rank: int, ranks: int, order: SequenceOrder | None) -> None:
        if order is None:
            raise ValueError(NO_ORDER)
        self.halves = order == "zigzag"
        self.many = 2 * ranks if self.halves else ranks
        self.own = [rank, self.many - 1 - rank] if self.halves else [rank]

    def apart(self, here: Tensor) -> Tensor:
        """[stretches, K, S], zeros but for those of this rank's [K, owners]: a sum over ranks hands over all."""
        parts = here.unflatten(-1, (-1, 2)).unbind(-1) if self.halves else (here,)
        every = here.new_zeros(self.many, *parts[0].shape)
        for place, part in zip(self.own, parts, strict=True):
            every[place] = part
        return every

    def together(self, here: Tensor, join: Callable[[Tensor, int], Tensor]) -> Tensor:
        """[K, S] from [K, owners]: both halves joined."""
        return join(here.unflatten(-1, (-1, 2)), -1) if self.halves else here

    def of_own(self, found: Callable[[int], Tensor]) -> Tensor:
        """[..., owners] from [..., S] for each stretch of this rank."""
        return torch.stack([found(place) for place in self.own], -1).flatten(-2)


# --- what comes before ---


def carry(joins: Joins, inner: slice, stretches: Stretches, group: Any) -> None:
    """Replace what runs along owners here by what does on the stretches before: one collective.

    Args:
        joins: Of `prepare`.
        inner: The columns of tables that are of owners.
        stretches: Their order.
        group: A torch.distributed process group.
    """
    tables = {name: x[:, inner] for name, x in vars(joins.carries).items() if x is not None}
    here = torch.cat([as_integers(x) for x in tables.values()])
    every = Pending(stretches.apart(here), group, "correct: the sums of the tokens before").wait()
    of_tables = every.split([x.shape[0] for x in tables.values()], 1)
    for (name, own), parts in zip(tables.items(), of_tables, strict=True):
        own.copy_(stretches.of_own(before(as_given(parts, own), name == "peaks")))


def before(parts: Tensor, largest: bool) -> Callable[[int], Tensor]:
    """Give what adds up, or is the largest, over the stretches before one: from [stretches, K, S] to [K, S]."""
    if not largest:
        return lambda place: parts[:place].sum(0)
    nothing = torch.full_like(parts[:1], torch.iinfo(parts.dtype).min)
    return lambda place: torch.cat([nothing, parts[:place]]).amax(0)


def as_integers(x: Tensor) -> Tensor:
    """Int64 of the bits of float64, or of an integer's value."""
    return x.contiguous().view(torch.int64) if x.is_floating_point() else x.long()


def as_given(x: Tensor, like: Tensor) -> Tensor:
    """The values of which `as_integers` gave x."""
    return x.contiguous().view(like.dtype) if like.is_floating_point() else x.to(like.dtype)


# --- what ranks decide by ---


class Shares:
    """The share of this rank in the sums and maxima by owner, and what becomes of these with those of all ranks.

    Attributes:
        integers, floats, peaks: Of each sequence or turn, to be added up over ranks in place, the last to be the
            largest; counts are those of each stretch in a place of its own where a failure drops the rest.

    Args:
        tables: The tables by owner, to be those of all ranks; of two halves, the first.
        joins: Of `prepare`.
        inner: The columns of tables that are of owners.
        stretches: Their order.
    """

    def __init__(self, tables: TableBuffers, joins: Joins, inner: slice, stretches: Stretches) -> None:
        self._tables, self._joins, self._inner, self._stretches = tables, joins, inner, stretches
        counts = tables.counts[:, inner]
        rests = joins.plan.rests
        counts = stretches.apart(counts).flatten(0, 1) if rests else stretches.together(counts, torch.sum)
        self.integers = [counts]
        if tables.integers is not None:
            self.integers.append(stretches.together(tables.integers[:, inner], torch.sum))
        self.floats = stretches.together(tables.floats[:, inner], torch.sum)
        self.peaks = None if tables.peaks is None else stretches.together(tables.peaks[:, inner], torch.amax)

    def settle(self) -> None:
        """Write totals, with what is lost behind failures, to where `decide` and `apply` read them."""
        plan, tables, stretches = self._joins.plan, self._tables, self._stretches
        counts = self.integers[0]
        if plan.rests:
            counts, behind = without_rests(counts.unflatten(0, (stretches.many, -1)), plan)
            if self._joins.rests is not None:
                lost = stretches.of_own(lambda place: behind[place])
                self._joins.rests.masked_fill_(lost, 0)
        self._put(tables.counts, counts)
        if tables.integers is not None:
            self._put(tables.integers, self.integers[1])
        self._put(tables.floats, self.floats)
        if tables.peaks is not None and self.peaks is not None:
            self._put(tables.peaks, self.peaks, other=self.peaks)

    def _put(self, own: Tensor, totals: Tensor, other: Tensor | None = None) -> None:
        """Write totals into a table; of two halves into the first, and `other` or zeros into the second."""
        if self._stretches.halves:
            totals = torch.stack([totals, torch.zeros_like(totals) if other is None else other], -1).flatten(-2)
        own[:, self._inner].copy_(totals)


def without_rests(every: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Take off what is lost behind failures on stretches before.

    Args:
        every: [stretches, counts, S] int64, each stretch without what it loses behind failures of its own.
        plan: The plan, which has the names of counts.

    Returns:
        [counts, S] int64, the totals; and [stretches, S] bool, those behind a failure.
    """
    names, every = plan.counts, every.clone()
    valid = every[:, names.index("valid")].clamp(min=0)
    behind = torch.zeros_like(valid, dtype=torch.bool)
    for test in plan.tests:
        if test.drop == "rest":
            lost = every[:, names.index(f"{test.index}/lost")]
            failed = (lost > 0).long()
            later = failed.cumsum(0) > failed
            lost.copy_(torch.where(later, valid, lost))
            behind |= later
    for place, name in enumerate(names):
        if name.split("/")[0] == "alive":
            every[:, place].masked_fill_(behind, 0)
    return every.sum(0), behind
