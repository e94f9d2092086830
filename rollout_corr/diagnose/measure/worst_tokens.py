"""The tokens with the largest |D| of a dump, each among its neighbors."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ..read.chunk import MISSING_INTEGER, ValidTokens

# Tokens that are ranked, tokens that are kept for their records, and neighbors that are shown to each side.
WORST, KEPT, CONTEXT = 20, 100, 6

Item = TypeVar("Item")


class Largest(Generic[Item]):
    """The items of the largest values above 0, up to `most`; of equal ones the first stays."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[float, int, Item]] = []
        self._seen = 0

    def add(self, value: float, make: Callable[[], Item]) -> bool:
        """Keep the item of a value, which is made only then; return whether it is kept."""
        full = len(self._heap) == self._most
        if value <= (self._heap[0][0] if full else 0.0):
            return False
        # The number breaks ties: two items cannot be compared.
        self._seen += 1
        (heapq.heappushpop if full else heapq.heappush)(self._heap, (value, -self._seen, make()))
        return True

    def ranked(self) -> list[Item]:
        """List the items, the one of the largest value first."""
        return [item for _, _, item in sorted(self._heap, key=lambda one: one[:2], reverse=True)]


@dataclass(frozen=True)
class WorstToken:
    """A token with a large |D|, among its neighbors."""

    file: str  # path of the file
    record: int  # number of its sequence in the file, from 0
    position: int  # number of valid tokens of the sequence before it
    d: float  # train_logp - rollout_logp
    train_logp: float  # log-prob of the trainer
    rollout_logp: float  # log-prob of the engine
    at: int  # index of the token in `context`
    context: tuple[float | None, ...]  # D of the valid tokens around it, in order; None where it is not finite
    tokens: tuple[str, ...] | None  # texts or ids of the tokens in `context`, if the dump has them
    turn: int  # number of its turn, from 0
    version: int | None  # its weight version, if the dump has them


class WorstTokens(Largest[WorstToken]):
    """The KEPT worst tokens seen so far; WORST of them are shown."""

    def __init__(self) -> None:
        super().__init__(KEPT)

    def add_all(self, tokens: ValidTokens) -> None:
        """Add the tokens of a chunk."""
        magnitude = tokens.d.abs()
        largest = magnitude.topk(min(KEPT, magnitude.numel()))
        for value, i in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
            if not self.add(value, partial(_in_context, tokens, i)):
                break

    def of(self, file: str, record: int) -> list[WorstToken]:
        """List the tokens of a record that are among them."""
        return [token for token in self.ranked() if (token.file, token.record) == (file, record)]


def _in_context(tokens: ValidTokens, i: int) -> WorstToken:
    """Describe valid token i of a chunk."""
    owner, chunk = int(tokens.owner[i]), tokens.chunk
    before = int(tokens.position[i])
    begin = i - min(before, CONTEXT)
    end = min(i + CONTEXT + 1, i - before + int(tokens.lengths[owner]))
    around = zip(tokens.d[begin:end].tolist(), tokens.finite[begin:end].tolist(), strict=True)
    ids, versions = tokens.column("token_ids"), tokens.column("versions")
    texts = None if chunk.texts is None else chunk.texts[owner]
    shown = None
    if texts is not None:
        shown = tuple(texts[slot - int(chunk.offsets[owner])] for slot in tokens.slots[begin:end].tolist())
    elif ids is not None and int(ids[i]) != MISSING_INTEGER:
        shown = tuple(str(token) for token in ids[begin:end].tolist())
    return WorstToken(
        file=chunk.file_of(owner),
        record=int(chunk.records[owner]),
        position=before,
        d=float(tokens.d[i]),
        train_logp=float(tokens.train[i]),
        rollout_logp=float(tokens.rollout[i]),
        at=i - begin,
        context=tuple(value if finite else None for value, finite in around),
        tokens=shown,
        turn=int(tokens.turns[i]),
        version=None if versions is None else int(versions[i]),
    )
