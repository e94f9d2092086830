"""Sums and ends of tokens by label: sorted by it on a device, where they lie on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.metrics.labels import SMALL, sorted_by

# Neighbours that are summed together where they have one label, on the CPU.
TILE = 64

# Sums that each label has there, of every so many-th number: an addition to the sum before it would wait for that one.
LANES = 8

# Bools of an int64.
WORD = 8


class Sorted:
    """Tokens sorted by label, which adds up in the same order every time, as atomics of a device do not.

    Args:
        place: [N] integers, the label of each token.
        many: How many labels there are.
    """

    def __init__(self, place: Tensor, many: int) -> None:
        self._order, self._runs = sorted_by(place, many)
        self._ordered: list[tuple[Tensor, Tensor]] = []

    def ordered(self, x: Tensor) -> Tensor:
        """[N]: x per token, in the order in which it is reduced."""
        # The statistics of D and those of weights read the same tensors.
        for known, found in self._ordered:
            if known is x:
                return found
        self._ordered.append((x, x.reshape(-1).index_select(0, self._order)))
        return self._ordered[-1][1]

    def counts(self) -> Tensor:
        """[many] float64: the tokens of each label."""
        return self._runs.offsets.diff().double()

    def sum(self, x: Tensor) -> Tensor:
        """[many] float64: the sums of floating x, of `ordered`."""
        return self._runs.sum(x)

    def sum_squares(self, x: Tensor) -> Tensor:
        """[many] float64: the sums of squares."""
        return self._runs.sum(x * x)

    def ends(self, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """[many] each: the largest of the first, and the largest of the negated second."""
        return self._runs.ends(high) if high is low else (self._runs.max(high), self._runs.max(-low))


class Tiled:
    """Tokens on the CPU where they lie: tiles of one label as a whole, the tokens of all other tiles one by one.

    Args:
        place: [N] integers, the label of each token.
        many: How many labels there are.
    """

    def __init__(self, place: Tensor, many: int) -> None:
        self._many, self._whole = many, place.shape[0] // TILE
        mixed = self._mixed(place)
        if 2 * mixed.shape[0] > self._whole:
            self._whole = 0
        self._cut = mixed
        if self._whole:
            # What is found of a tile that is mixed is nobody's.
            of_tiles = self._tiles(place)[:, 0].int().index_fill(0, mixed, many)
            place = torch.cat([of_tiles, *self._single(place)])
        lanes = torch.arange(place.shape[0], dtype=torch.int32, device="cpu").bitwise_and_(LANES - 1)
        self._place = (place.int() * LANES).add_(lanes).long()

    def _mixed(self, place: Tensor) -> Tensor:
        """The tiles in which labels change, or from which to the next they do."""
        changes = torch.zeros(self._whole * TILE, dtype=torch.bool, device="cpu")
        first = place[: self._whole * TILE]
        torch.ne(first[1:], first[:-1], out=changes[:-1])
        # Words of eight bools: looking for bools would take longer than all else here.
        return torch.unique_consecutive(
            changes.view(torch.int64).nonzero().squeeze(1).div_(TILE // WORD, rounding_mode="floor")
        )

    def _tiles(self, x: Tensor) -> Tensor:
        return x[: self._whole * TILE].view(self._whole, TILE)

    def _single(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._tiles(x).index_select(0, self._cut).view(-1), x[self._whole * TILE :]

    def ordered(self, x: Tensor) -> Tensor:
        """[N]: x per token."""
        return x.reshape(-1)

    def counts(self) -> Tensor:
        """[many] float64: the tokens of each label."""
        each = (torch.bincount(x, minlength=(self._many + 1) * LANES) for x in self._place.tensor_split((self._whole,)))
        tiles, tokens = each
        return self._lanes(tiles.mul_(TILE).add_(tokens)).sum(1).double()

    def sum(self, x: Tensor) -> Tensor:
        """[many] float64: the sums of floating x. A tile is summed in its dtype."""
        return self._summed(torch.cat([self._tiles(x).sum(1), *self._single(x)]) if self._whole else x)

    def sum_squares(self, x: Tensor) -> Tensor:
        """[many] float64: the sums of squares, of a tile from its length."""
        lengths = [torch.linalg.vector_norm(self._tiles(x), dim=1), *self._single(x)] if self._whole else [x]
        return self._summed(torch.cat(lengths) if lengths[1:] else x, squared=True)

    def _summed(self, x: Tensor, squared: bool = False) -> Tensor:
        found = torch.zeros((self._many + 1) * LANES, dtype=torch.float64, device="cpu")
        # In parts: a copy of all in float64 would leave the cache.
        for part, place in zip(x.split(SMALL), self._place.split(SMALL), strict=True):
            wide = part.double()
            found.scatter_add_(0, place, wide * wide if squared else wide)
        return self._lanes(found).sum(1)

    def ends(self, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """[many] each: the largest of the first, and the largest of the negated second."""
        largest, least = (high.new_full(((self._many + 1) * LANES,), sign * torch.inf) for sign in (-1.0, 1.0))
        if self._whole:
            high, low = (
                torch.cat([end(self._tiles(x), 1), *self._single(x)])
                for x, end in ((high, torch.amax), (low, torch.amin))
            )
        largest.scatter_reduce_(0, self._place, high, "amax")
        least.scatter_reduce_(0, self._place, low, "amin")
        return self._lanes(largest).amax(1), self._lanes(least).amin(1).neg_()

    def _lanes(self, x: Tensor) -> Tensor:
        return x.view(-1, LANES)[: self._many]
