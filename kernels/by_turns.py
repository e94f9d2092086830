"""The host side of turns: batches whose turns replace sequences, packed whatever the layout was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..specs.operands import CorrectOperands, LossOperands

Fields = TypeVar("Fields", CorrectOperands, LossOperands)


def by_turns(given: Fields, turns: Tensor, like: Tensor, names: Sequence[str]) -> tuple[Fields, Tensor]:
    """Replace sequences of a batch by turns: [U + 1] offsets among the tokens, row after row of a padded batch.

    `names` are all fields with a per-token tensor except for the advantages, in the shape of `like`. Returns the batch,
    flat, with offsets and advantages of turns; and [S + 1] int64, where sequences begin and end among the turns. That
    does not decrease, even where the offsets are unchecked: every turn has an owner.
    """
    # Their dtype would be part of compile keys, and who makes them in int32 is not known to `warmup`.
    turns = turns.to(torch.int64)
    many, offsets, advantages = turns.shape[0] - 1, given.offsets, given.advantages
    offsets = rows_as_offsets(like) if offsets is None else offsets.to(torch.int64)
    # Without the end of the last turn: an offset behind it is at its end.
    within = torch.searchsorted(turns[:many], offsets)
    if given.offsets is not None:  # those of rows do not decrease
        within = within.cummax(0).values
    if advantages is not None:
        if given.per_sequence:
            # The owner of a turn is the sequence of its first token.
            advantages = _of_turns(advantages, torch.searchsorted(offsets[1:], turns[:many], right=True))
        else:
            advantages = advantages.reshape(-1)
    flat = {name: x.reshape(-1) for name in names if (x := getattr(given, name)) is not None}
    return replace(given, offsets=turns, advantages=advantages, **flat), within


@dataclass(eq=False)
class PartsOfTurns:
    """Turns that lie on several ranks: one without a token here may belong to either of two sequences.

    Attributes:
        owners: [2, U] int64, to be added up over the ranks: the sequence of each turn, of those ranks that have a token
            of it, and how many they are.
        within: [S + 1] int64, from which the kernels read the turns of a sequence.
        advantages: [U], of a sequence at its first turn; None unless there is one per sequence.
        per_sequence: [S], these advantages.
    """

    owners: Tensor
    within: Tensor
    advantages: Tensor | None
    per_sequence: Tensor | None

    def settle(self) -> None:
        """Write what all ranks know together, from the totals in `owners`, to where the kernels read it."""
        # A turn without a token on any rank goes with the one before it.
        owners = (self.owners[0] // self.owners[1].clamp(min=1)).cummax(0).values
        sequences = torch.arange(self.within.shape[0], device=owners.device)
        self.within.copy_(torch.searchsorted(owners, sequences))
        if self.advantages is not None and self.per_sequence is not None:
            self.advantages.copy_(_of_turns(self.per_sequence, owners_of(self.within, owners.shape[0])))


def rows_as_offsets(like: Tensor) -> Tensor:
    """[B + 1] int64: where the rows of a padded batch begin and end among its tokens, counted row after row."""
    count, width = like.shape
    if not width:
        return like.new_zeros(count + 1, dtype=torch.int64)
    return torch.arange(0, (count + 1) * width, width, device=like.device)


def owners_of(within: Tensor, many: int) -> Tensor:
    """[U] int64: the sequence of each turn; S of a turn behind all sequences, and 0 of one before them."""
    return torch.searchsorted(within[1:], torch.arange(many, device=within.device), right=True)


def owners_here(turns: Tensor, within: Tensor) -> Tensor:
    """[2, U] int64: the sequence of each turn and 1; 0 and 0 of one that has no token here."""
    owners = owners_of(within, turns.shape[0] - 1)
    here = (turns.diff() > 0) & (owners < within.shape[0] - 1)
    return torch.stack([torch.where(here, owners, 0), here.long()])


def _of_turns(advantages: Tensor, owners: Tensor) -> Tensor:
    """[U]: the advantages of the sequences that turns belong to; those of none have no token, so any does."""
    if not advantages.shape[0]:
        return advantages.new_zeros(owners.shape[0])
    return advantages.index_select(0, owners.clamp(max=advantages.shape[0] - 1))
