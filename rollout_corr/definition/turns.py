"""Turns: the stretches of consecutive tokens that make up a sequence, such as each answer of an agent.

They are units as sequences are: what adds, compares and spreads over sequences does so over turns, with `units` in the
place of the sequences. What turns give their sequence is a sum over `of_sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sequences import Packed, Sequences

# The place of a turn among the turns of its sequence with a measured token; an only one is the first.
FIRST, MIDDLE, LAST = range(3)


@dataclass(eq=False, repr=False)
class Turns:
    """The turns of some sequences.

    Attributes:
        units: Which tokens belong to which turn.
        of_sequences: Which turns belong to which sequence.
        n_valid: [U] int64, the valid tokens of each turn.
        nonfinite: [U] int64, how many of them have a D that is NaN or infinite; None: there is none.
    """

    units: Sequences
    of_sequences: Packed
    n_valid: Tensor
    nonfinite: Tensor | None = None

    def measured(self, rejects_nonfinite: bool) -> Tensor:
        """[U] int64: the measured tokens of each turn."""
        return self.n_valid - self.nonfinite if rejects_nonfinite and self.nonfinite is not None else self.n_valid

    def any(self, which: Tensor) -> Tensor:
        """[U] bool -> [S] bool: the sequences with such a turn."""
        return self.of_sequences.sum_integers(which) > 0

    def places(self, measured: Tensor) -> Tensor:
        """[U] int64: FIRST, MIDDLE or LAST among the turns of the sequence that have a measured token.

        Args:
            measured: [U] bool, which turns have one; the place of another has no meaning.
        """
        order = measured.long().cumsum(0)
        counts = self.of_sequences.sum_integers(measured)
        # Of the turns before a sequence's first, that many have a measured token.
        before = torch.cat([order.new_zeros(1), order]).index_select(0, self.of_sequences.offsets[:-1])
        inside = order - self.of_sequences.spread(before)
        last = torch.where(inside == self.of_sequences.spread(counts), LAST, MIDDLE)
        return torch.where(inside == 1, FIRST, last)


def turns_within(offsets: Tensor, of_sequences: Tensor) -> Packed:
    """Which turns belong to which sequence, from where both lie among the tokens.

    Offsets of sequences are offsets of turns too. Turns behind the last sequence hold no token and belong to none.
    """
    count = offsets.shape[0] - 1
    # Offsets of a device, which are not checked, may end before the sequences do.
    return Packed(torch.searchsorted(offsets, of_sequences).clamp(max=count), count)
