"""Sequences whose tokens lie on several ranks: one all-reduce of a small table between two runs of the definition.

The definition asks its sequences for sums and extrema and for nothing else that another rank could change. `Split`
stands in the place of `Rows` or `Packed`: during the first run it notes what this rank's tokens give, then all ranks'
tables are added up, and during the second run it answers with the totals. So there is one definition for one rank and
for many. It has to keep one rule: what is summed must not depend on an earlier sum (`survivors` in
definition/correction.py and `tokens_kept` in definition/facts.py are written as they are for this). Prefixes cannot
keep it, and are refused.

Everything in the table is an integer, so ranks may be added in any order and all of them get the same bits. Sums that
decide are integers already. Other sums travel as three limbs and a count of what is not finite; extrema as their bits,
every rank's in a column of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..definition.sequences import Flattened, Packed, Rows
from ..definition.tokens import GRID_OF_FRACTION
from ..metrics.collectives import Pending, all_reduce

# Ranks are counted in 20 bits: NaN in the lowest, then inf, then -inf.
COUNTED = 20


class Exchange:
    """The numbers that the two runs of a call note and read, of its sequences and of its turns."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Totals that have a gradient, and this rank's sums behind them.
        self.leaves: list[tuple[Tensor, Tensor]] = []
        self._noted: list[Tensor] = []
        self._sum: Pending | None = None
        self._table: Tensor | None = None
        self._read = 0

    def start(self, what: str) -> None:
        """Start to add up all ranks' tables, after the first run; an error says what travels."""
        self._sum = Pending(torch.cat(self._noted), self.group, what)

    def done(self) -> bool:
        """Return whether the second run could begin without waiting."""
        return self._sum is not None and self._sum.done()

    def wait(self) -> None:
        """Wait for the totals, before the second run."""
        if self._sum is None:
            raise RuntimeError("wait: expected a start before")
        self._table, self._read = self._sum.wait(), 0

    def totals(self, here: Tensor) -> Tensor:
        """Return int64 of any shape: of this rank in the first run, of all ranks later."""
        if self._table is None:
            self._noted.append(here.reshape(-1))
            return here
        self._read += here.numel()
        return self._table[self._read - here.numel() : self._read].view(here.shape)


class Split:
    """Sequences whose tokens this rank holds in part, in any order, perhaps none; or their turns.

    All ranks hold the same sequences in the same order.
    """

    def __init__(self, part: Rows | Packed | Flattened, exchange: Exchange) -> None:
        self.part, self.exchange = part, exchange
        self.count = part.count
        self.group, self.rank, self.ranks = exchange.group, exchange.rank, exchange.ranks
        self._totals, self._leaves = exchange.totals, exchange.leaves
        self.start, self.done, self.wait = exchange.start, exchange.done, exchange.wait

    # --- the interface of Sequences ---

    def sum(self, x: Tensor) -> Tensor:
        """Add floating x up over all ranks: [S] float64."""
        return from_limbs(self._totals(to_limbs(self.part.sum(x), self.ranks)))

    def sum_integers(self, x: Tensor, largest: float | None = None) -> Tensor:
        """Add int64 or bool x up over all ranks: [S] int64."""
        return self._totals(self.part.sum_integers(x)[None])[0]

    def max(self, x: Tensor) -> Tensor:
        """Find the largest floating x over all ranks: [S]; -inf for a sequence without tokens."""
        here = self.part.max(x).double().view(torch.int64)
        return self._totals(apart(here, self.rank, self.ranks)).view(torch.float64).amax(0).to(x.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every token of this rank its sequence's value."""
        return self.part.spread(per_sequence)

    def running(self, x: Tensor, before: bool = False) -> Tensor:
        """Refuse what depends on the tokens before: a rank does not know which come before its own."""
        raise ValueError(
            "spec: expected no weight or criterion over prefixes with ranks.sequence, whose ranks do not know which "
            "tokens come before their own, got one"
        )

    running_max = running

    # --- the gradient ---

    def with_gradient(self, total: Tensor, x: Tensor) -> Tensor:
        """Give a total the gradient of `sum(x)`; `gradient` adds up over the ranks what arrives at the total."""
        leaf = total.detach().requires_grad_()
        self._leaves.append((leaf, self.part.sum(x)))
        return leaf

    def gradient(self, value: Tensor, new: Tensor) -> Tensor:
        """d(sum of all ranks' values) / d(new): one more all-reduce where a total has a gradient, whatever is here."""
        leaves, sums = [leaf for leaf, _ in self._leaves], [here for _, here in self._leaves]
        found: list[Tensor | None] = [None] * (1 + len(leaves))
        if value.requires_grad:
            found = list(torch.autograd.grad(value, [new, *leaves], allow_unused=True, retain_graph=True))
        own, arrived = found[0], found[1:]
        gradient = torch.zeros_like(new) if own is None else own
        if not leaves:
            return gradient
        given = [torch.zeros_like(leaf) if x is None else x for leaf, x in zip(leaves, arrived, strict=True)]
        # One table holds the totals of turns and of sequences.
        table = torch.cat([to_limbs(x, self.ranks) for x in given], 1)
        all_reduce(table, self.group, "policy_loss: the gradients of the sums of each sequence")
        for here, limbs in zip(sums, table.split([x.shape[0] for x in given], 1), strict=True):
            if here.requires_grad:
                (through,) = torch.autograd.grad(here, new, from_limbs(limbs), retain_graph=True)
                gradient = gradient + through
        return gradient


class ExchangedTables:
    """Sums, [K, S] int64 and [L, S] float64, and maxima, [M, S], of sequences on their way to the other ranks."""

    def __init__(self, integers: list[Tensor], floats: Tensor, peaks: Tensor | None, group: Any) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._own = integers, floats, peaks
        parts = [*integers, to_limbs(floats, ranks).flatten(0, 1)]
        if peaks is not None:
            parts.append(apart(peaks.long(), rank, ranks).flatten(0, 1))
        self._sum = Pending(torch.cat(parts), group, "correct: the sums of each sequence")
        self.done = self._sum.done

    def complete(self) -> None:
        """Wait, and write the totals where the rank's own sums were."""
        integers, floats, peaks = self._own
        table = self._sum.wait()
        first = 0
        for own in integers:
            own.copy_(table[first : first + own.shape[0]])
            first += own.shape[0]
        limbs, rest = table[first : first + 4 * floats.shape[0]], table[first + 4 * floats.shape[0] :]
        floats.copy_(from_limbs(limbs.unflatten(0, (4, -1))))
        if peaks is not None:
            peaks.copy_(rest.unflatten(0, (-1, peaks.shape[0])).amax(0))


def apart(here: Tensor, rank: int, ranks: int) -> Tensor:
    """[ranks, ...], 0 except at this rank's entry: a sum over ranks then hands over every rank's values unchanged."""
    every = here.new_zeros(ranks, *here.shape)
    every[rank] = here
    return every


def to_limbs(x: Tensor, ranks: int) -> Tensor:
    """[..., S] float64 as [4, ..., S] int64, such that `ranks` of them add up without overflow.

    A sum is its whole part and two fractions of 38 bits; the last limb counts what is not finite.
    """
    largest = 2.0**62 / ranks
    finite = torch.where(x.isfinite(), x, 0.0).clamp(-largest, largest)
    whole = finite.trunc()
    fraction = (finite - whole) * GRID_OF_FRACTION
    high = fraction.trunc()
    low = ((fraction - high) * GRID_OF_FRACTION).round()
    broken = x.isnan().long() + (x == torch.inf).long() * 2**COUNTED + (x == -torch.inf).long() * 2 ** (2 * COUNTED)
    return torch.stack([whole.long(), high.long(), low.long(), broken])


def from_limbs(limbs: Tensor) -> Tensor:
    """The sum, NaN and infinite as a sum of floats would be."""
    whole, high, low = limbs[:3].double()
    total = whole + (high + low / GRID_OF_FRACTION) / GRID_OF_FRACTION
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        some = (limbs[3] >> (place * COUNTED)) % 2**COUNTED > 0
        total = torch.where(some, total + value, total)
    return total
