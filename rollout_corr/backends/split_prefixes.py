"""Prefixes of sequences that lie on several ranks, on the kernels: what ranks tell each other of their stretches.

Before `read` decides by prefixes, every rank tells what runs along each of its stretches: sums on the grids of sums
that decide, maxima and counts. A stretch then begins with those of the stretches before. Where a failure drops the
rest, ranks tell the counts of each stretch too, and what lies behind a failure is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Columns(NamedTuple):
    """Columns of one table of carries.

    Attributes:
        rows: [owners] each.
        largest: They keep the largest, and not the sum.
        reach: "before", "past" or "all"; see `Joins.reach`.
    """

    rows: list[Tensor]
    largest: bool
    reach: str


def carry(joins: Joins, inner: slice, stretches: Stretches, group: Any) -> None:
    """Replace what runs along owners here by what does on the stretches before: one collective.

    Args:
        joins: Of `prepare`.
        inner: The columns of tables that are of owners.
        stretches: Their order.
        group: A torch.distributed process group.
    """
    every = [
        Columns([row for row, far in zip(table[:, inner], joins.reach(name), strict=True) if far == reach],
                name == "peaks", reach)
        for name, table in vars(joins.carries).items() if table is not None for reach in ("before", "past", "all")
    ]  # fmt: skip
    every = [columns for columns in every if columns.rows]
    # A rank knows the sequence of a turn that it has a token of, so what runs past turns travels by sequence.
    turns = None if joins.within is None else OfSequences(joins.within, every[0].rows[0].shape[0], stretches.halves)
    here = []
    for columns in every:
        stacked = torch.stack(columns.rows)
        if turns is not None and columns.reach == "past":
            stacked = turns.joined(stacked, columns.largest)
        here.append(stacked)
    table = torch.cat([stretches.apart(as_integers(x)).flatten(1) for x in here], 1)
    table = Pending(table, group, "correct: the sums of the tokens before").wait()
    sizes = [x.numel() // (1 + stretches.halves) for x in here]
    for columns, own, parts in zip(every, here, table.split(sizes, 1), strict=True):
        found = stretches.of_own(reached(as_given(parts, own).unflatten(1, (own.shape[0], -1)), columns))
        if turns is not None and columns.reach == "past":
            found = turns.spread(found)
        for row, x in zip(columns.rows, found, strict=True):
            row.copy_(x)


class OfSequences:
    """The turns of sequences, as far as a rank knows them.

    Args:
        within: [S + 1] int64, which turns a sequence has.
        owners: How many owners there are: the turns, in a zigzag both halves of each.
        halves: There are both halves.
    """

    def __init__(self, within: Tensor, owners: int, halves: bool) -> None:
        self.count, self._halves = within.shape[0] - 1, 1 + halves
        self.ids = sequences_of(within, owners // self._halves)

    def joined(self, x: Tensor, largest: bool) -> Tensor:
        """[K, S], or both halves of each, from [K, owners]."""
        x = x.unflatten(1, (-1, self._halves))
        ids = self.ids[None, :, None].expand(x.shape)
        found = x.new_full((x.shape[0], self.count, self._halves), lowest(x) if largest else 0)
        return found.scatter_reduce_(1, ids, x, "amax" if largest else "sum").flatten(1)

    def spread(self, x: Tensor) -> Tensor:
        """[K, owners] from [K, S] or both halves of each."""
        return x.unflatten(1, (-1, self._halves)).index_select(1, self.ids).flatten(1)


def sequences_of(within: Tensor, turns: int) -> Tensor:
    """[U] int64: the sequence of each turn; of one that belongs to none, any."""
    places = torch.arange(turns, device=within.device)
    return torch.searchsorted(within[1:], places, right=True).clamp(max=within.shape[0] - 2)


def lowest(x: Tensor) -> int:
    """The least value of an integer's dtype."""
    return torch.iinfo(x.dtype).min


def reached(parts: Tensor, columns: Columns) -> Callable[[int], Tensor]:
    """Give what reaches a stretch, by its place: [K, S] from [stretches, K, S]."""
    if columns.reach == "all":
        return lambda place: parts.sum(0)
    if not columns.largest:
        return lambda place: parts[:place].sum(0)
    nothing = torch.full_like(parts[:1], lowest(parts))
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
            counts, behind = without_rests(counts.unflatten(0, (stretches.many, -1)), plan, self._joins.within)
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


def without_rests(every: Tensor, plan: Plan, within: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Take off what is lost behind failures on stretches before.

    Args:
        every: [stretches, counts, U] int64 of sequences or turns, each stretch without what it loses behind failures
            of its own.
        plan: The plan, which has the names of counts.
        within: [S + 1] int64, which turns a sequence has, as all ranks know it; None without turns.

    Returns:
        [counts, U] int64, the totals; and [stretches, U] bool, those behind a failure.
    """
    names, every = plan.counts, every.clone()
    valid = every[:, names.index("valid")].clamp(min=0)
    behind = torch.zeros_like(valid, dtype=torch.bool)
    for test in plan.tests:
        if test.drop == "rest":
            lost = every[:, names.index(f"{test.index}/lost")]
            later = behind_failures(lost > 0, within if test.within == "sequence" else None)
            lost.copy_(torch.where(later, valid, lost))
            behind |= later
    for place, name in enumerate(names):
        if name.split("/")[0] == "alive":
            every[:, place].masked_fill_(behind, 0)
    return every.sum(0), behind


def behind_failures(failed: Tensor, within: Tensor | None) -> Tensor:
    """Bool like [stretches, U] bool: a stretch before has failed, of the same unit or of its sequence's turns."""
    if within is None or not failed.numel() or within.shape[0] < 2:
        return failed.cumsum(0) > failed.long()
    # Tokens are in the order of turns, and within a turn in that of stretches.
    flat = failed.T.reshape(-1).long()
    before = (flat.cumsum(0) - flat).view(failed.shape[::-1])
    first = within.index_select(0, sequences_of(within, failed.shape[1]))
    return (before > before[:, 0].index_select(0, first)[:, None]).T
