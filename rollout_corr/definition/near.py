"""Sums over tokens of which nearly all lie near D = 0: those by a short series, the few others one by one.

Where tokens are so few that an operation costs more than its arithmetic, all of them are taken one by one. It reads
values, so it is for CPU tensors, [N], all of them valid and finite. Statistics alone come from here: nothing that
decides, and no weight, because what a token gets must not depend on its neighbours.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from rollout_corr.definition.bounds import Sides
from rollout_corr.definition.sequences import Packed
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.thresholds import float32_at_least, float32_at_most, log_bound

# Neighbours that `Peaks` looks at together.
STRETCH = 64

# |D| up to which the series of `Near` is taken.
NEAR = 0.125


# Tokens up to which each is taken in float64: 7 operations, where a series and the few others take 28. Both take the
# same time at this number.
SMALL = 65_536


def near_up_to(spec: Spec, found: Sides | None) -> float | None:
    """The |D| up to which a token is near 0 and within the bounds of a token weight; None where 0 is outside.

    Args:
        spec: The Spec.
        found: The logarithms of the lower and the upper bound that the batch has decided; None for each that it has
            not, or not yet.
    """
    weight = spec.weight
    if weight is None or weight.level != "token":
        return NEAR
    low, high = (None, None) if found is None else found
    if any(known is None for side, known in (("lower", low), ("upper", high)) if side in weight.rules):
        return None
    return _near_within(weight.low, weight.high, low, high)


@cached(maxsize=256)
def _near_within(lower: float | None, upper: float | None, low: float | None, high: float | None) -> float | None:
    low = log_bound(lower) if low is None else low
    high = log_bound(upper) if high is None else high
    # Rounded to numbers that comparing float32 with them finds every token beyond.
    nearest = min(
        NEAR, NEAR if low is None else -float32_at_least(low), NEAR if high is None else float32_at_most(high)
    )
    return nearest if nearest > 0.0 else None


def few_above(x: Tensor, bound: float) -> Tensor | None:
    """Find the places where x, [N], is above a bound: [k] int64 in order, or None if there are many.

    A maximum costs a tenth of a comparison and its places.
    """
    size = x.shape[0]
    whole = size // STRETCH * STRETCH
    stretches = (x[:whole].view(-1, STRETCH).amax(1) > bound).nonzero()
    if 8 * STRETCH * stretches.shape[0] > size:
        return None
    near = (stretches * STRETCH + torch.arange(STRETCH, device="cpu")).flatten()
    near = torch.cat([near, torch.arange(whole, size, device="cpu")])
    return near[x.index_select(0, near) > bound]


class Near:
    """Sums of e^D - 1 - D, e^D - 1 and their squares, and what they are of single tokens that are not near 0.

    Args:
        d: [N], |D| at most 1024.
        sequences: Which tokens belong together.
        places: [k] int64, the few: at least those with |D| > NEAR.
        clamp: What limits |D| in all but the sum of D^2.
        largest: The largest |D|.

    Attributes:
        few_d, few: [k] float64, D of the few, and after the clamp.
        few_excess: [k] float64, their e^D - 1.
        near_excess2: The sum of (e^D - 1)^2 without the few.
        excess2: The sum of (e^D - 1)^2.
    """

    def __init__(self, d: Tensor, sequences: Packed, places: Tensor, clamp: float, largest: float) -> None:
        self._sequences = sequences
        self.d, self.places, self.clamp = d, places, clamp
        self.few_d = d.index_select(0, places).double()
        self.few = self.few_d if largest <= clamp else self.few_d.clamp(-clamp, clamp)
        self.few_excess = self.few.expm1()
        squares = d * d
        if places.shape[0]:
            squares.index_fill_(0, places, 0.0)
        near = squares.sum().item()
        self._squares = squares
        # 0 at the few, as their squares are.
        self._k3 = series_of_k3(d).mul_(squares)
        self.near_excess2 = near + 2.0 * torch.dot(d, self._k3).item() + torch.dot(self._k3, self._k3).item()
        self._sum_d2 = near + self.few_d.dot(self.few_d).item()
        self.excess2 = self.near_excess2 + self.few_excess.dot(self.few_excess).item()
        self._of_sequences: Tensor | None = None
        self._few_sequences: Tensor | None = None
        self._excess2: Tensor | None = None
        self._d2: Tensor | None = None

    @property
    def d2(self) -> float:
        """The sum of D^2."""
        return self._sum_d2

    @cached_property
    def near_k3(self) -> float:
        """The sum of k3 without the few."""
        found = self._k3 if self._of_sequences is None else self._of_sequences
        return found.sum().item()

    @cached_property
    def few_k3(self) -> float:
        """The sum of k3 of the few."""
        return (self.few_excess - self.few).sum().item()

    @property
    def k3(self) -> float:
        """The sum of k3."""
        return self.near_k3 + self.few_k3

    def excess(self, sum_d: Tensor) -> float:
        """The sum of e^D - 1, from the sums of D, [S] float64."""
        few = self.few_k3 if self.few is self.few_d else (self.few_excess - self.few_d).sum().item()
        return sum_d.sum().item() + self.near_k3 + few

    def excess_of_sequences(self, sum_d: Tensor, of_few: Tensor) -> Tensor:
        """[S] float64: the sums of e^D - 1 from those of D, where the few have another e^D - 1, [k] float64."""
        return self.added(sum_d + self.near_k3_of_sequences(), of_few - self.few_d)

    def largest_near(self) -> float:
        """The largest D without the few."""
        return self.d.index_fill(0, self.places, -torch.inf).amax().item()

    def near_k3_of_sequences(self) -> Tensor:
        """[S] float64: the sums of k3 without the few."""
        if self._of_sequences is None:
            self._of_sequences = self._sequences.sum(self._k3)
        return self._of_sequences

    def k3_of_sequences(self) -> Tensor:
        """[S] float64: the sums of k3."""
        return self.added(self.near_k3_of_sequences(), self.few_excess - self.few)

    def d2_of_sequences(self) -> Tensor:
        """[S] float64: the sums of D^2."""
        if self._d2 is None:
            self._d2 = self.added(self._sequences.sum(self._squares), self.few_d * self.few_d)
        return self._d2

    def excess2_of_sequences(self, of_few: Tensor) -> Tensor:
        """[S] float64: the sums of (e^D - 1)^2, where the few have another e^D - 1, [k] float64."""
        if self._excess2 is None:
            # In the memory of the squares, after their last use.
            self.d2_of_sequences()
            excess = torch.add(self.d, self._k3, out=self._squares)
            if self.places.shape[0]:
                excess.index_fill_(0, self.places, 0.0)
            self._excess2 = self._sequences.sum_squares(excess)
        return self.added(self._excess2, of_few * of_few)

    def without_few(self) -> tuple[Tensor, Tensor]:
        """[N] each: D and k3, 0 at the few; not to be written to."""
        d = self.d.index_fill(0, self.places, 0.0) if self.places.shape[0] else self.d
        return d, self._k3

    def k3_of_tokens(self) -> Tensor:
        """[N]: k3."""
        return self._k3.index_copy(0, self.places, (self.few_excess - self.few).to(self.d.dtype))

    def added(self, totals: Tensor, of_few: Tensor) -> Tensor:
        """Add numbers of the few, [k] float64, to totals of their sequences, [S] float64."""
        if not self.places.shape[0]:
            return totals
        if self._few_sequences is None:
            self._few_sequences = self._sequences.of(self.places)
        return totals.index_add(0, self._few_sequences, of_few)


class Each(Near):
    """`Near` with all tokens among the few: nothing is near, and whatever D is takes the same operations.

    Args:
        d: [N], |D| at most 1024.
        sequences: Which tokens belong together.
        clamp: What limits |D| in all but the sum of D^2.
        largest: The largest |D|.

    Attributes:
        few_d, few: [N], D, and after the clamp; not in float64, which would be twice the memory.
        sum: The sum of D after the clamp.
    """

    def __init__(self, d: Tensor, sequences: Packed, clamp: float, largest: float) -> None:
        self._sequences = sequences
        self.d, self.clamp = d, clamp
        self.few_d, self.few = d, d if largest <= clamp else d.clamp(-clamp, clamp)
        wide = self.few.double()
        self.sum = wide.sum().item()
        self.few_excess = wide.expm1() if wide is self.few else wide.expm1_()
        self.near_excess2 = 0.0
        self.excess2 = self.few_excess.dot(self.few_excess).item()

    @property
    def d2(self) -> float:
        """The sum of D^2."""
        return (self.d * self.d).sum().item()

    @cached_property
    def _excess(self) -> float:
        return self.few_excess.sum().item()

    @property
    def k3(self) -> float:
        """The sum of k3."""
        return self._excess - self.sum

    def excess(self, sum_d: Tensor) -> float:
        """The sum of e^D - 1."""
        return self._excess

    def excess_of_sequences(self, sum_d: Tensor, of_few: Tensor) -> Tensor:
        """[S] float64: the sums of another e^D - 1, [N] float64."""
        return self._sequences.sum(of_few)

    def largest_near(self) -> float:
        """The largest of nothing."""
        return -math.inf

    def k3_of_tokens(self) -> Tensor:
        """[N]: k3."""
        return (self.few_excess - self.few).to(self.d.dtype)

    def k3_of_sequences(self) -> Tensor:
        """[S] float64: the sums of k3."""
        return self._sequences.sum(self.few_excess - self.few)

    def d2_of_sequences(self) -> Tensor:
        """[S] float64: the sums of D^2."""
        wide = self.d.double()
        return self._sequences.sum(wide * wide)

    def excess2_of_sequences(self, of_few: Tensor) -> Tensor:
        """[S] float64: the sums of (e^D - 1)^2 of another e^D - 1, [N] float64."""
        return self._sequences.sum(of_few * of_few)

    def added(self, totals: Tensor, of_few: Tensor) -> Tensor:
        """Add numbers of tokens, [N] float64, to totals of their sequences, [S] float64."""
        return totals + self._sequences.sum(of_few)


# |D| up to which a longer series is taken, and its terms in float32 and in float64: the next is below a rounding.
WIDE, WIDE_TERMS = 1.0, (11, 18)


def series_of_k3(d: Tensor, largest: float = NEAR) -> Tensor:
    """1/2! + D/3! + D^2/4! + ...: so many terms that the next is below a rounding where |D| <= largest <= WIDE."""
    first, *others = _factors(d.dtype, largest > NEAR)
    # With two numbers beside one tensor addcmul is not vectorised.
    series = torch.mul(d, first).add_(others[0])
    for factor in others[1:]:
        torch.addcmul(factor, series, d, out=series)
    return series


@cached(maxsize=8)
def _factors(dtype: torch.dtype, wide: bool) -> list[Tensor]:
    """1/n!, ..., 1/2!, 0-d each: a number beside tensors would be one operation more at each step."""
    terms = (WIDE_TERMS if wide else (5, 11))[dtype == torch.float64]
    with torch.inference_mode(False):
        return [torch.tensor(1.0 / math.factorial(n), dtype=dtype, device="cpu") for n in range(terms + 1, 1, -1)]
