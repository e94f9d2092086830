"""A chunk of a dump, whole sequences packed: what every reader yields and everything else consumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...specs.operands import compute_dtype

# Tokens in a chunk, valid or not; a longer sequence is a chunk of its own.
CHUNK_SLOTS = 262_144
# Sequences in a chunk: short ones have more to remember for each than for their tokens.
CHUNK_SEQUENCES = 16_384

MISSING_INTEGER = -1


@dataclass
class Chunk:
    """Whole sequences, packed, on the CPU."""

    train: Tensor  # [N] floating, log-probs of the trainer
    rollout: Tensor  # [N] floating, log-probs of the engine
    mask: Tensor | None  # [N] bool, True is valid; None: all tokens are valid
    offsets: Tensor  # [S + 1] int64 from 0 to N
    records: Tensor  # [S] int64, number of each sequence in its file, from 0
    file: str  # path of the file, of the first sequence if there are several files
    # Further values of tokens, [N], by role or name: int64 with -1, or floating with NaN, where a record has none.
    columns: dict[str, Tensor] = field(default_factory=dict)
    # For each sequence the texts of its tokens, if it has any; None if no sequence has.
    texts: list[Sequence[str] | None] | None = None
    # For each sequence the path of its file, if there are several; None: all are from `file`.
    files: list[str] | None = None

    @classmethod
    def of(cls, values: dict[str, Tensor], **more: Any) -> Chunk:
        """Make a chunk of values by role, [N] each, and of its other fields. Where there are two masks, both count."""
        mask, whole = values.pop("mask", None), values.pop("sequence_mask", None)
        mask = whole if mask is None else mask if whole is None else mask & whole
        return cls(values.pop("train_logp"), values.pop("rollout_logp"), mask, columns=values, **more)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.offsets.shape[0] - 1

    def owners(self) -> Tensor:
        """Return the sequence of each token, [N] int64."""
        return torch.repeat_interleave(torch.arange(self.sequences), self.offsets.diff())

    def file_of(self, sequence: int) -> str:
        """Return the path of the file that a sequence comes from."""
        return self.file if self.files is None else self.files[sequence]

    @property
    def log_mass(self) -> Tensor | None:
        """[N], the log of the mass that truncated sampling kept; 0 where a token has none, or no log of a mass."""
        given = self.columns.get("log_mass")
        return None if given is None else given.nan_to_num(nan=0.0).clamp(max=0.0)

    def part(self, first: int, last: int) -> Chunk:
        """Return the sequences from first up to last, without copying their tokens."""
        if first == 0 and last == self.sequences:
            return self
        start, stop = int(self.offsets[first]), int(self.offsets[last])
        return Chunk(
            train=self.train[start:stop],
            rollout=self.rollout[start:stop],
            mask=None if self.mask is None else self.mask[start:stop],
            offsets=self.offsets[first : last + 1] - start,
            records=self.records[first:last],
            file=self.file_of(first),
            columns={name: values[start:stop] for name, values in self.columns.items()},
            texts=None if self.texts is None else self.texts[first:last],
            files=None if self.files is None else self.files[first:last],
        )


def blocks(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Regroup the chunks of a dump, across its files, into chunks that are as large as they may be.

    What is computed chunk by chunk then depends on the sequences alone: not on how many a reader returns at a time, and
    not on how they are spread over files. And thousands of small files cost little more than a large one.
    """
    waiting: list[Chunk] = []
    slots = sequences = 0
    for chunk in chunks:
        if waiting and chunk.file != waiting[-1].file and not _joinable(waiting[0], chunk):
            yield joined(waiting)
            waiting, slots, sequences = [], 0, 0
        first = 0
        for i, length in enumerate(chunk.offsets.diff().tolist()):
            if sequences and (slots + length > CHUNK_SLOTS or sequences == CHUNK_SEQUENCES):
                yield joined([*waiting, *([chunk.part(first, i)] if i > first else [])])
                waiting, slots, sequences, first = [], 0, 0, i
            slots += length
            sequences += 1
        if chunk.sequences:
            waiting.append(chunk.part(first, chunk.sequences))
    if waiting:
        yield joined(waiting)


def _joinable(one: Chunk, other: Chunk) -> bool:
    """Return whether two chunks can be joined without a value changing its dtype."""
    shared = one.columns.keys() & other.columns.keys()
    pairs = [(one.train, other.train), (one.rollout, other.rollout)]
    pairs += [(one.columns[name], other.columns[name]) for name in shared]
    return all(a.dtype == b.dtype for a, b in pairs)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join chunks; a column that only some of them have is filled up."""
    if len(chunks) == 1:
        return chunks[0]
    columns = {name: values for chunk in chunks for name, values in chunk.columns.items()}
    starts = torch.tensor([0, *(chunk.train.numel() for chunk in chunks)]).cumsum(0)
    ends = [chunk.offsets[1:] + start for chunk, start in zip(chunks, starts, strict=False)]
    several = any(chunk.file != chunks[0].file or chunk.files is not None for chunk in chunks)
    return Chunk(
        train=torch.cat([chunk.train for chunk in chunks]),
        rollout=torch.cat([chunk.rollout for chunk in chunks]),
        mask=None
        if all(chunk.mask is None for chunk in chunks)
        else torch.cat([torch.ones_like(c.train, dtype=torch.bool) if c.mask is None else c.mask for c in chunks]),
        offsets=torch.cat([starts[:1], *ends]),
        records=torch.cat([chunk.records for chunk in chunks]),
        file=chunks[0].file,
        columns={
            name: torch.cat([c.columns[name] if name in c.columns else missing(like, c.train.numel()) for c in chunks])
            for name, like in columns.items()
        },
        texts=None
        if all(chunk.texts is None for chunk in chunks)
        else [text for c in chunks for text in (c.texts or [None] * c.sequences)],
        files=[c.file_of(i) for c in chunks for i in range(c.sequences)] if several else None,
    )


def missing(like: Tensor, count: int) -> Tensor:
    """Return the values of a column for tokens that have none, of the dtype of another part of it."""
    return like.new_full((count,), torch.nan if like.is_floating_point() else MISSING_INTEGER)


@dataclass
class ValidTokens:
    """The M valid tokens of a chunk, in order."""

    chunk: Chunk
    slots: Tensor  # [M] int64, index of each token in the chunk
    owner: Tensor  # [M] int64, its sequence
    position: Tensor  # [M] int64, number of valid tokens of its sequence before it
    lengths: Tensor  # [S] int64, number of valid tokens of each sequence
    train: Tensor  # [M] floating, at least float32, log-probs of the trainer
    rollout: Tensor  # [M] of the same dtype, log-probs of the engine, over the whole vocabulary where a mass is known
    finite: Tensor  # [M] bool, D is finite
    d: Tensor  # [M], D = train - rollout, and 0 where that is not finite
    log_mass: Tensor | None = None  # [M], as in the chunk

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
        log_mass = None if chunk.log_mass is None else chunk.log_mass[slots]
        if log_mass is not None:
            # Back to the whole vocabulary: the trainer's log-probs over the engine's set may lie above 0.
            rollout = rollout + log_mass
        d = train - rollout
        finite = d.isfinite()
        return cls(chunk, slots, owner, position, lengths, train, rollout, finite, d.where(finite, 0.0), log_mass)

    def column(self, name: str) -> Tensor | None:
        """Return a further column of the chunk at the valid tokens, [M], or None if the chunk lacks it."""
        values = self.chunk.columns.get(name)
        return None if values is None else values[self.slots]

    @cached_property
    def turn_starts(self) -> Tensor:
        """[M] bool, True where a turn begins: the turn id changes, or without ids the mask had a hole before."""
        first = self.position == 0
        turns = self.column("turns")
        step = self.slots.diff() > 1
        if turns is not None:
            # Sequences with and without ids may share a chunk.
            unknown = (turns[1:] == MISSING_INTEGER) & (turns[:-1] == MISSING_INTEGER)
            step = torch.where(unknown, step, turns.diff() != 0)
        return first | torch.cat([first.new_ones(min(1, first.numel())), step])

    @cached_property
    def turns(self) -> Tensor:
        """[M] int64, number of the turn of each token within its sequence, from 0."""
        starts = self.turn_starts
        running = starts.cumsum(0)
        before = running[(self.position == 0).nonzero().squeeze(1)]
        rank = torch.cumsum(self.position == 0, 0) - 1
        return running - before[rank] if running.numel() else running
