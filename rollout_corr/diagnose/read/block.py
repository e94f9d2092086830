"""Some whole sequences of a dump, packed: what every reader yields and everything else consumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# Slots in a block; a longer sequence is a block of its own.
BLOCK = 262_144

MISSING_INTEGER = -1


@dataclass
class Block:
    """Whole sequences on the CPU.

    Attributes:
        train: [N] floating, log-probs of the trainer.
        rollout: [N] floating, log-probs of the engine.
        mask: [N] bool, or None: all tokens are valid.
        offsets: [S + 1] int64 from 0 to N.
        records: [S] int64, number of each sequence in its file, from 0.
        file: The file.
        columns: Further per-token values [N] by role or by name: int64 with -1 where a record has none, else floating
            with NaN there.
        texts: The text of each token by sequence, where the file has it.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    offsets: Tensor
    records: Tensor
    file: str
    columns: dict[str, Tensor] = field(default_factory=dict)
    texts: list[Sequence[str] | None] | None = None

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.offsets.shape[0] - 1

    def owners(self) -> Tensor:
        """[N] int64: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(self.sequences), self.offsets.diff())


@dataclass
class ValidTokens:
    """The valid tokens of a block, in order.

    Attributes:
        block: Where they come from.
        slots: [M] int64, where each stands in the block.
        owner: [M] int64, its sequence.
        position: [M] int64, how many valid tokens of its sequence come before it.
        lengths: [S] int64, the valid tokens of each sequence.
        train: [M] floating, at least float32.
        rollout: [M] of the same dtype.
        finite: [M] bool, both are finite and so is D.
        d: [M], train - rollout, and 0 where that is not finite.
    """

    block: Block
    slots: Tensor
    owner: Tensor
    position: Tensor
    lengths: Tensor
    train: Tensor
    rollout: Tensor
    finite: Tensor
    d: Tensor

    @classmethod
    def of(cls, block: Block) -> ValidTokens:
        """Take them out of a block."""
        owners = block.owners()
        slots = torch.arange(owners.shape[0]) if block.mask is None else block.mask.nonzero().squeeze(1)
        owner = owners[slots]
        lengths = torch.bincount(owner, minlength=block.sequences)
        position = torch.arange(slots.shape[0]) - (lengths.cumsum(0) - lengths)[owner]
        dtype = torch.promote_types(torch.promote_types(block.train.dtype, block.rollout.dtype), torch.float32)
        train, rollout = block.train[slots].to(dtype), block.rollout[slots].to(dtype)
        d = train - rollout
        finite = d.isfinite()
        return cls(block, slots, owner, position, lengths, train, rollout, finite, d.where(finite, 0.0))

    def column(self, name: str) -> Tensor | None:
        """[M], a further column of the block."""
        values = self.block.columns.get(name)
        return None if values is None else values[self.slots]

    @cached_property
    def turn_starts(self) -> Tensor:
        """[M] bool, whether a turn begins here: the turn id changes, or the mask had a hole before."""
        first = self.position == 0
        turns = self.column("turns")
        step = self.slots.diff() > 1 if turns is None else turns.diff() != 0
        return first | torch.cat([first.new_ones(min(1, first.numel())), step])

    @cached_property
    def turns(self) -> Tensor:
        """[M] int64, which turn of its sequence each token is in, from 0."""
        starts = self.turn_starts
        running = starts.cumsum(0)
        before = running[(self.position == 0).nonzero().squeeze(1)]
        rank = torch.cumsum(self.position == 0, 0) - 1
        return running - before[rank] if running.numel() else running
