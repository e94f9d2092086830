"""Where in a dump sequences lie: whether some of them are whole files, a block of records, or every n-th record."""

from __future__ import annotations

import torch
from torch import Tensor

from ..read.chunk import Chunk

# Sequences whose places are remembered: 16 bytes each.
MOST = 1 << 20
# Fewer sequences may form a pattern by chance.
FEWEST = 4
# Ranks and replicas that are looked for, where every n-th record is of one.
MOST_RANKS = 64
# A pattern holds this share of the sequences in question, and these are this share of it.
HOLDS, OF_IT = 0.9, 0.8


class Tested:
    """Sequences that were tested for a sign, and those that have it."""

    def __init__(self) -> None:
        self.tested = self.having = 0
        # Which, by the order of reading: a tensor [K] int64 a chunk.
        self.tested_at: list[Tensor] = []
        self.having_at: list[Tensor] = []

    def add(self, first: int, tested: Tensor, having: Tensor) -> None:
        """Add sequences of a chunk, both [K] int64 within it, whose first sequence is this one of the dump."""
        self.tested += tested.numel()
        self.having += having.numel()
        if first <= MOST:
            self.tested_at.append(tested + first)
            self.having_at.append(having + first)


class Places:
    """File and record of every sequence, in the order in which they are read."""

    def __init__(self) -> None:
        self.count = 0
        self._files: dict[str, int] = {}
        self._parts: list[Tensor] = []

    def add(self, chunk: Chunk) -> None:
        """Add the sequences of a chunk."""
        self.count += chunk.sequences
        if self.count <= MOST:
            names = [chunk.file] * chunk.sequences if chunk.files is None else chunk.files
            numbers = [self._files.setdefault(name, len(self._files)) for name in names]
            self._parts.append(torch.stack([torch.tensor(numbers, dtype=torch.int64), chunk.records]))

    def pattern(self, found: Tested) -> str | None:
        """Say how the sequences that have a sign lie among those tested; None: in no such way."""
        if not found.having or not self._parts or self.count > MOST:
            return None
        places, chosen, every = torch.cat(self._parts, 1), torch.cat(found.having_at), torch.cat(found.tested_at)
        if chosen.numel() < max(FEWEST, 0.05 * every.numel()):
            return None
        (files, records), (all_files, all_records) = places[:, chosen], places[:, every]

        def fills(inside: Tensor, all_inside: Tensor) -> bool:
            held = int(inside.sum())
            return held >= HOLDS * chosen.numel() and held >= OF_IT * int(all_inside.sum())

        own = files.unique()
        if own.numel() < all_files.unique().numel() and fills(files >= 0, torch.isin(all_files, own)):
            return "they are whole files"
        low, high = int(records.min()), int(records.max())
        if fills(records >= 0, (all_records >= low) & (all_records <= high)):
            return f"they are one block, {low} to {high}"
        for ranks in range(2, MOST_RANKS + 1):
            rank = int((records % ranks).mode().values)
            if fills(records % ranks == rank, all_records % ranks == rank):
                return f"they are the records whose number modulo {ranks} is {rank}"
        return None
