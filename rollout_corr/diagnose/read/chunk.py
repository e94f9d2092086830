"""A chunk of a dump, whole sequences packed: what every reader yields and everything else consumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from rollout_corr.definition.tokens import compute_dtype

# Tokens in a chunk, valid or not; a longer sequence is a chunk of its own.
CHUNK_SLOTS = 262_144

MISSING_INTEGER = -1


@dataclass
class Chunk:
    """Whole sequences, packed, on the CPU.

    Attributes:
        train: [N] floating, log-probs of the trainer.
        rollout: [N] floating, log-probs of the engine.
        mask: [N] bool, True is valid; None: all tokens are valid.
        offsets: [S + 1] int64 from 0 to N.
        records: [S] int64, number of each sequence in its file, from 0.
        file: Path of the file.
        columns: Further values of tokens, [N], by role or name: int64 with -1, or floating with NaN, where a record
            has none.
        texts: For each sequence the texts of its tokens, if it has any; None if no sequence has.
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
        """Number of sequences."""
        return self.offsets.shape[0] - 1

    def owners(self) -> Tensor:
        """Return the sequence of each token, [N] int64."""
        return torch.repeat_interleave(torch.arange(self.sequences), self.offsets.diff())


@dataclass
class ValidTokens:
    """The M valid tokens of a chunk, in order.

    Attributes:
        chunk: The chunk.
        slots: [M] int64, index of each token in the chunk.
        owner: [M] int64, its sequence.
        position: [M] int64, number of valid tokens of its sequence before it.
        lengths: [S] int64, number of valid tokens of each sequence.
        train: [M] floating, at least float32, log-probs of the trainer.
        rollout: [M] of the same dtype, log-probs of the engine.
        finite: [M] bool, D is finite.
        d: [M], D = train - rollout, and 0 where that is not finite.
    """

    chunk: Chunk
    slots: Tensor
    owner: Tensor
    position: Tensor
    lengths: Tensor
    train: Tensor
    rollout: Tensor
    finite: Tensor
    d: Tensor

    @classmethod
    def of(cls, chunk: Chunk) -> ValidTokens:
        """Select the valid tokens of a chunk."""
        owners = chunk.owners()
        slots = torch.arange(owners.shape[0]) if chunk.mask is None else chunk.mask.nonzero().squeeze(1)
        owner = owners[slots]
        lengths = torch.bincount(owner, minlength=chunk.sequences)
        position = torch.arange(slots.shape[0]) - (lengths.cumsum(0) - lengths)[owner]
        dtype = compute_dtype(chunk.train.dtype, chunk.rollout.dtype)
        train, rollout = chunk.train[slots].to(dtype), chunk.rollout[slots].to(dtype)
        d = train - rollout
        finite = d.isfinite()
        return cls(chunk, slots, owner, position, lengths, train, rollout, finite, d.where(finite, 0.0))

    def column(self, name: str) -> Tensor | None:
        """Return a further column of the chunk at the valid tokens, [M], or None if the chunk lacks it."""
        values = self.chunk.columns.get(name)
        return None if values is None else values[self.slots]

    @cached_property
    def turn_starts(self) -> Tensor:
        """[M] bool, True where a turn begins: the turn id changes, or without ids the mask had a hole before."""
        first = self.position == 0
        turns = self.column("turns")
        step = self.slots.diff() > 1 if turns is None else turns.diff() != 0
        return first | torch.cat([first.new_ones(min(1, first.numel())), step])

    @cached_property
    def turns(self) -> Tensor:
        """[M] int64, number of the turn of each token within its sequence, from 0."""
        starts = self.turn_starts
        running = starts.cumsum(0)
        before = running[(self.position == 0).nonzero().squeeze(1)]
        rank = torch.cumsum(self.position == 0, 0) - 1
        return running - before[rank] if running.numel() else running
