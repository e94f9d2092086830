"""Tallies for the doctor of one value on both sides at the ends of rows: padding that counts, or certain tokens."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..read.chunk import ValidTokens

# Shorter runs of zeros are certain tokens.
SHORTEST = 4
# Other values that rows of a dump are padded with, and rows of a chunk that such a value has to end, or begin.
MOST_FILLERS, FEWEST_ROWS = 4, 2
# Lengths that are remembered, of sequences that end or begin with a run.
MOST_LENGTHS = 4096
# A mask is too long where this share of so many rows ends with zeros, this part of them with equally many, and zeros
# are rare elsewhere. Certain tokens come in runs of many lengths, and in the middle of rows.
SHARE, FEWEST, EQUALLY, ELSEWHERE = 0.9, 8, 0.8, 1e-3


class Beyond(NamedTuple):
    """Zeros on both sides at one end of nearly all rows."""

    at: Literal["end", "beginning"]  # which end of the rows
    length: int  # zeros of most of these rows
    # These rows, and their zeros there.
    rows: int
    zeros: int
    elsewhere: int  # zeros at all other places


class Padding:
    """Tallies over chunks of 0, and of other values that several rows begin or end with on both sides."""

    def __init__(self) -> None:
        self.fillers = {0.0: Filler()}

    def add(self, tokens: ValidTokens) -> None:
        """Add the tokens of a chunk."""
        same = (tokens.train == tokens.rollout) & tokens.finite
        if not bool(same.any()):
            return
        for value in self._values(tokens, same):
            self.fillers.setdefault(value, Filler())
        for value, filler in self.fillers.items():
            filler.add(tokens, same & (tokens.train == value))

    def _values(self, tokens: ValidTokens, same: Tensor) -> list[float]:
        """Return new values in runs that several rows begin or end with."""
        starts = tokens.lengths.cumsum(0) - tokens.lengths
        long = tokens.lengths >= SHORTEST
        found: Counter[float] = Counter()
        for at in (starts[long], (starts + tokens.lengths - SHORTEST)[long]):
            run = at[:, None] + torch.arange(SHORTEST)
            values = tokens.train[run]
            filled = same[run].all(1) & (values == values[:, :1]).all(1)
            found.update(values[filled, 0].tolist())
        often = [value for value, count in found.most_common(MOST_FILLERS) if count >= FEWEST_ROWS]
        return often[: MOST_FILLERS + 1 - len(self.fillers)]


class Filler:
    """Tallies over chunks of one value, such as 0: "zeros" here."""

    def __init__(self) -> None:
        # Tokens in runs of at least SHORTEST zeros at the ends and at the beginnings of sequences, and these sequences.
        self.at_end = self.at_begin = self.rows = 0
        self.inside = self.runs = 0  # zeros at all other places, and the runs that they form
        self._lengths: Counter[int] = Counter()
        self._zeros = 0
        self._ends: Counter[int] = Counter()
        self._begins: Counter[int] = Counter()

    def add(self, tokens: ValidTokens, zero: Tensor) -> None:
        """Add the tokens of a chunk; [M] bool `zero`: both log-probs are the value."""
        if not bool(zero.any()):
            return
        owner, position, lengths = tokens.owner, tokens.position, tokens.lengths
        other, where = owner[~zero], position[~zero]
        first = lengths.scatter_reduce(0, other, where, "amin", include_self=True)
        last = torch.full_like(lengths, -1).scatter_reduce(0, other, where, "amax", include_self=True)
        end = lengths - 1 - last
        begin = torch.where(end < lengths, first, 0)
        self._zeros += int(zero.sum())
        for counter, run in ((self._ends, end), (self._begins, begin)):
            counts = run[run > 0].unique(return_counts=True)
            counter.update(dict(zip(*(x.tolist() for x in counts), strict=True)))
        end, begin = (run.where(run >= SHORTEST, 0) for run in (end, begin))
        some = end + begin > 0
        self.at_end += int(end.sum())
        self.at_begin += int(begin.sum())
        self.rows += int(some.sum())
        inner = zero & (position >= begin[owner]) & (position < (lengths - end)[owner])
        self.inside += int(inner.sum())
        self.runs += int((inner & ~(inner.roll(1) & (position > 0))).sum())
        for length, count in zip(*(x.tolist() for x in lengths[some].unique(return_counts=True)), strict=True):
            if length in self._lengths or len(self._lengths) < MOST_LENGTHS:
                self._lengths[length] += count

    @property
    def tokens(self) -> int:
        """Tokens in runs at the ends and beginnings of sequences."""
        return self.at_end + self.at_begin

    def beyond(self, sequences: int, tokens: int) -> Beyond | None:
        """Return the zeros that a mask includes beyond nearly every row, equally many in each; None: it does not."""
        sides: tuple[tuple[Literal["end", "beginning"], Counter[int]], ...] = (
            ("end", self._ends),
            ("beginning", self._begins),
        )
        for at, runs in sides:
            rows, zeros = runs.total(), sum(length * count for length, count in runs.items())
            if rows < max(FEWEST, SHARE * sequences):
                continue
            ((length, count),) = runs.most_common(1)
            # The longer the runs, the less single certain tokens explain them.
            rare = ELSEWHERE * min(10.0, max(1.0, length / 2))
            if count >= EQUALLY * rows and self._zeros - zeros <= rare * (tokens - zeros):
                return Beyond(at, length, rows, zeros, self._zeros - zeros)
        return None

    def is_likely(self, sequences: int, tokens: int) -> bool:
        """Return whether these runs are padding: long, in many of the sequences, which are equally long with it."""
        alike = sum(count for count in self._lengths.values() if count > 1)
        usual = self.inside / self.runs if self.runs else 1.0
        return (
            self.rows >= max(2, 0.1 * sequences)
            and self.tokens >= 0.02 * tokens
            and self.tokens >= 4.0 * usual * self.rows
            and alike >= 0.8 * self.rows
        )
