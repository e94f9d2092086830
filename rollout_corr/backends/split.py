"""Sequences whose tokens lie on several ranks: one all-reduce of a small table between two runs of the definition.

The definition asks its sequences for sums and extrema and for nothing else that another rank could change. `Split`
stands in the place of `Rows` or `Packed`: during the first run it notes what this rank's tokens give, then all ranks'
tables are added up, and during the second run it answers with the totals. So there is one definition for one rank and
for many. It has to keep one rule: what is summed must not depend on an earlier sum (`survivors` in
definition/correction.py and `tokens_kept` in definition/findings.py are written as they are for this). Prefixes
cannot keep it: their Spec takes one more run and all-reduce for each step of the dependence.

Everything in the table is an integer, so ranks may be added in any order and all of them get the same bits. Sums that
decide are integers already. Other sums travel as three limbs and a count of what is not finite; extrema as their bits,
every rank's in a column of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..definition.sequences import Flattened, Packed, Rows
from ..metrics.collectives import Pending, all_reduce

if TYPE_CHECKING:
    from ..specs.choices import SequenceOrder

# A float64 sum is its whole part and two fractions of 38 bits.
GRID = 2.0**38

# Ranks are counted in 20 bits: NaN in the lowest, then inf, then -inf.
COUNTED = 20

NO_ORDER = (
    "ranks.order: expected 'contiguous' or 'zigzag' for a Spec with prefixes, got None; a rank has to know which "
    "tokens come before its own"
)


class Exchange:
    """The numbers that the two runs of a call note and read, of its sequences and of its turns."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Totals that have a gradient, and this rank's sums behind them.
        self.leaves: list[tuple[Tensor, Tensor]] = []
        self._noted: list[Tensor] = []
        self._notes = True
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
        self._table, self._read, self._notes = self._sum.wait(), 0, False

    def again(self) -> None:
        """Note anew, after `wait`: sums that depend on those which have come."""
        self._noted, self._notes = [], True

    def totals(self, here: Tensor) -> Tensor:
        """Return int64 of any shape: of this rank in the first run, of all ranks later."""
        if self._notes:
            self._noted.append(here.reshape(-1))
        if self._table is None:
            return here
        self._read += here.numel()
        return self._table[self._read - here.numel() : self._read].view(here.shape)


class Split:
    """Sequences whose tokens this rank holds in part, in any order, perhaps none.

    Args:
        part: The sequences, or their turns, as far as they lie here.
        exchange: What the call shares with the other ranks, which all hold the same sequences in the same order.
        order: Which stretches of a sequence a rank holds; None where nothing depends on it.
        halves: The sequences that a rank holds as two stretches of a zigzag, where `part` is their turns.
    """

    def __init__(
        self,
        part: Rows | Packed | Flattened,
        exchange: Exchange,
        order: SequenceOrder | None = None,
        halves: Rows | Packed | Flattened | None = None,
    ) -> None:
        self.part, self.exchange, self.order = part, exchange, order
        self._halves = part if halves is None else halves
        self.count = part.count
        self.group, self.rank, self.ranks = exchange.group, exchange.rank, exchange.ranks
        self._totals, self._leaves = exchange.totals, exchange.leaves
        self.start, self.done, self.wait, self.again = exchange.start, exchange.done, exchange.wait, exchange.again

    # --- the interface of Sequences ---

    def sum(self, x: Tensor) -> Tensor:
        """Add floating x up over all ranks: [S] float64."""
        return from_limbs(self._totals(to_limbs(self.part.sum(x), self.ranks)))

    def sum_integers(self, x: Tensor) -> Tensor:
        """Add int64 or bool x up over all ranks: [S] int64."""
        return self._totals(self.part.sum_integers(x)[None])[0]

    def max(self, x: Tensor) -> Tensor:
        """Find the largest floating x over all ranks: [S]; -inf for a sequence without tokens."""
        here = self.part.max(x).double().view(torch.int64)
        return self._totals(apart(here, self.rank, self.ranks)).view(torch.float64).amax(0).to(x.dtype)

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Find the largest x and the largest -x over all ranks: [S] each."""
        return self.max(x), self.max(-x)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every token of this rank its sequence's value."""
        return self.part.spread(per_sequence)

    def running(self, x: Tensor) -> Tensor:
        """Add int64 or bool x up along each sequence, from the sums of the stretches before on all ranks."""
        later = self._later(x)
        stretches = [self.part.sum_integers(which) for which in self._stretches(x.long(), later, 0)]
        every = self._every(torch.stack(stretches))
        before = [self.part.spread(every[which].sum(0)) for which in self._before()]
        # The rank's own first stretch is in its running sum already.
        return self.part.running(x) + (before[0] if later is None else torch.where(later, before[1], before[0]))

    def running_max(self, x: Tensor, before: bool = False) -> Tensor:
        """Find the largest floating x along each sequence likewise."""
        later = self._later(x)
        stretches = [self.part.max(which) for which in self._stretches(x, later, -torch.inf)]
        every = self._every(torch.stack(stretches).double().view(torch.int64)).view(torch.float64).to(x.dtype)
        nothing = every.new_full((1, self.count), -torch.inf)
        found = [self.part.spread(torch.cat([nothing, every[which]]).amax(0)) for which in self._before()]
        return self.part.running_max(x, before).maximum(
            found[0] if later is None else torch.where(later, found[1], found[0])
        )

    def _later(self, x: Tensor) -> Tensor | None:
        """Bool per token: it lies in the second of the rank's two stretches; None: there is one."""
        if self.order is None:
            raise ValueError(NO_ORDER)
        return self._halves.later_half(x) if self.order == "zigzag" else None

    def _stretches(self, x: Tensor, later: Tensor | None, nothing: float) -> list[Tensor]:
        """A copy of x for each stretch, with `nothing` at the tokens of the other."""
        if later is None:
            return [x.clone()]
        return [torch.where(later, nothing, x).to(x.dtype), torch.where(later, x, nothing).to(x.dtype)]

    def _every(self, here: Tensor) -> Tensor:
        """[stretches of all ranks in the order of the sequence, S] from [stretches of this rank, S]."""
        every = self._totals(apart(here, self.rank, self.ranks).flatten(0, 1)).unflatten(0, (self.ranks, -1))
        return torch.cat([every[:, 0], every[:, 1].flip(0)]) if self.order == "zigzag" else every[:, 0]

    def _before(self) -> list[list[int]]:
        """For each of the rank's stretches those of other ranks that come before it."""
        first = list(range(self.rank))
        if self.order != "zigzag":
            return [first]
        return [first, [i for i in range(2 * self.ranks - 1 - self.rank) if i != self.rank]]

    # --- the gradient ---

    def with_gradient(self, total: Tensor, x: Tensor) -> Tensor:
        """Give a total the gradient of `sum(x)`; `gradient` adds up over the ranks what arrives at the total."""
        leaf = total.detach().requires_grad_()
        self._leaves.append((leaf, self.part.sum(x)))
        return leaf

    def gradient(self, value: Tensor, new: Tensor) -> Tensor:
        """d(sum of all ranks' values) / d(new): one more all-reduce where a total has a gradient, whatever lies here.

        Args:
            value: 0-d, this rank's.
            new: The leaf that it was computed from.
        """
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
    """Sums and maxima per sequence, on their way to the other ranks.

    Args:
        integers: [K, S] int64, sums; tables below each other.
        floats: [L, S] float64, sums.
        peaks: [M, S] integers, maxima; None for none.
        group: A torch.distributed process group.
    """

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
    """[..., S] float64 as [4, ..., S] int64, such that `ranks` of them add up without overflow."""
    largest = 2.0**62 / ranks
    finite = torch.where(x.isfinite(), x, 0.0).clamp(-largest, largest)
    whole = finite.trunc()
    fraction = (finite - whole) * GRID
    high = fraction.trunc()
    low = ((fraction - high) * GRID).round()
    broken = x.isnan().long() + (x == torch.inf).long() * 2**COUNTED + (x == -torch.inf).long() * 2 ** (2 * COUNTED)
    return torch.stack([whole.long(), high.long(), low.long(), broken])


def from_limbs(limbs: Tensor) -> Tensor:
    """The sum, NaN and infinite as a sum of floats would be."""
    whole, high, low = limbs[:3].double()
    total = whole + (high + low / GRID) / GRID
    for place, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        some = (limbs[3] >> (place * COUNTED)) % 2**COUNTED > 0
        total = torch.where(some, total + value, total)
    return total
