"""The CPU's own sums: what the definition computes of all tokens of a block, in less time, because values may be read.

1. `read_tokens` reads the tokens of a block, all of them valid. Where all are finite it reads the ends of D too, so
   that nothing is clamped that lies within.
2. `take` takes the sums of them that need no pass over the tokens, by `SeriesSums` or `ExactSums`: those that the
   definition would derive, and statistics by name.

All of it is handed to the definition and to the metrics as data. What decides, and every weight, is computed as the
definition says: what a token gets must not depend on its neighbors.
"""

from __future__ import annotations

import math
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from ..definition import tokens as plain
from ..definition.bounds import OPEN, Bound, WeightBounds, after_bounds, limits
from ..definition.sequences import Packed
from ..definition.tokens import LARGEST_D, Number, Tokens, k3
from ..specs.caches import cached
from ..specs.choices import Outside
from ..specs.correction import Spec
from ..specs.statistics import float32_at_least, float32_at_most

if TYPE_CHECKING:
    from ..definition.turns import Turns

# --- sums of small D, and of outliers ---

# |D| up to which a token is small: the series of `SeriesSums` is exact to roundings.
SMALL_D = 0.125

# |x| up to which a longer series is, and its terms in float32 and in float64: the next is below a rounding.
WIDE, WIDE_TERMS = 1.0, (11, 18)

# Neighbors that `outliers_above` compares together.
STRETCH = 64

# Tokens up to which each is taken in float64: 7 operations, where a series and the outliers take 28. Both take the
# same time at this number.
SMALL = 65_536

# Two float32.
FLOATS = Struct("2f")


def rounded(ends: tuple[float, float], dtype: torch.dtype) -> tuple[float, float]:
    """Two numbers as a dtype holds them."""
    if dtype == torch.float32:
        # A tensor would take twenty times as long.
        return cast("tuple[float, float]", FLOATS.unpack(FLOATS.pack(*ends)))
    low, high = torch.tensor(ends, dtype=dtype, device="cpu").tolist()
    return low, high


def series_of_k3(d: Tensor, largest: float = SMALL_D) -> Tensor:
    """1/2! + D/3! + D^2/4! + ...: so many terms that the next is below a rounding where |D| <= largest <= WIDE."""
    first, *others = _factors(d.dtype, largest > SMALL_D)
    # With two numbers and one tensor addcmul is not vectorized.
    series = torch.mul(d, first).add_(others[0])
    for factor in others[1:]:
        torch.addcmul(factor, series, d, out=series)
    return series


@cached(maxsize=8)
def _factors(dtype: torch.dtype, wide: bool) -> list[Tensor]:
    """1/n!, ..., 1/2!, 0-d each: with a number and a tensor each step would be one operation more."""
    terms = (WIDE_TERMS if wide else (5, 11))[dtype == torch.float64]
    with torch.inference_mode(False):
        return [torch.tensor(1.0 / math.factorial(n), dtype=dtype, device="cpu") for n in range(terms + 1, 1, -1)]


def k3_within(d: Tensor, largest: float) -> Tensor:
    """k3 of tokens whose largest |D| is known: by a series alone where that is as exact."""
    return series_of_k3(d, largest).mul_(d).mul_(d) if largest <= WIDE else k3(d)


@cached(maxsize=256)
def small_within(low: float | None, high: float | None) -> float | None:
    """The |D| up to which a token is small, and its D within two bounds; None where 0 is outside of them."""
    # Rounded to numbers that comparing float32 with them finds every token beyond.
    nearest = min(
        SMALL_D, SMALL_D if low is None else -float32_at_least(low), SMALL_D if high is None else float32_at_most(high)
    )
    return nearest if nearest > 0.0 else None


def outliers_above(x: Tensor, bound: float) -> Tensor | None:
    """Find the places where x, [N], is above a bound: [k] int64 in order, or None if there are many.

    A maximum costs a tenth of a comparison and its places.
    """
    size = x.shape[0]
    whole = size // STRETCH * STRETCH
    stretches = (x[:whole].view(-1, STRETCH).amax(1) > bound).nonzero()
    if 8 * STRETCH * stretches.shape[0] > size:
        return None
    places = (stretches * STRETCH + torch.arange(STRETCH, device="cpu")).flatten()
    places = torch.cat([places, torch.arange(whole, size, device="cpu")])
    return places[x.index_select(0, places) > bound]


class SumsOfD(Protocol):
    """Sums of the tokens of a block, |D| at most 1024, taken from *outliers* one by one and from all others at once.

    Attributes:
        d: [N].
        outliers: [k] D of the outliers after the clamp, which limits |D| in all but the sum of D^2.
        outlier_excess: [k] float64, their e^D - 1.
        small_excess2: The sum of (e^D - 1)^2 without the outliers.
        excess2: The sum of (e^D - 1)^2.
    """

    d: Tensor
    outliers: Tensor
    outlier_excess: Tensor
    small_excess2: float
    excess2: float

    @property
    def d2(self) -> float:
        """The sum of D^2."""

    @property
    def k3(self) -> float:
        """The sum of k3."""

    def excess(self, sum_d: Tensor) -> float:
        """The sum of e^D - 1, from the sums of D, [S] float64."""

    def largest_small_d(self) -> float:
        """The largest D without the outliers."""

    def k3_of_tokens(self) -> Tensor:
        """[N]: k3."""


class SeriesSums:
    """`SumsOfD` of small D by a short series, and of outliers one by one in float64.

    Args:
        d: [N], |D| at most 1024.
        sequences: Which tokens belong together.
        places: [k] int64, the outliers: at least those with |D| > SMALL_D.
        clamp: What limits |D| in all but the sum of D^2.
        largest: The largest |D|.
    """

    def __init__(self, d: Tensor, sequences: Packed, places: Tensor, clamp: float, largest: float) -> None:
        self._sequences = sequences
        self.d, self._places = d, places
        self._outlier_d = d.index_select(0, places).double()
        self.outliers = self._outlier_d if largest <= clamp else self._outlier_d.clamp(-clamp, clamp)
        self.outlier_excess = self.outliers.expm1()
        squares = d * d
        if places.shape[0]:
            squares.index_fill_(0, places, 0.0)
        small = squares.sum().item()
        # 0 at the outliers, as their squares are.
        self._k3 = series_of_k3(d).mul_(squares)
        self.small_excess2 = small + 2.0 * torch.dot(d, self._k3).item() + torch.dot(self._k3, self._k3).item()
        self._d2 = small + self._outlier_d.dot(self._outlier_d).item()
        self.excess2 = self.small_excess2 + self.outlier_excess.dot(self.outlier_excess).item()
        self._k3_of_sequences: Tensor | None = None

    @property
    def d2(self) -> float:
        return self._d2

    def ratio2(self, sum_d: Tensor, of_outliers: Tensor) -> float:
        """The sum of e^(2 D) from the sums of D, [S] float64, where outliers have another e^D - 1, [k] float64."""
        # Small D have ratios next to 1, where nothing cancels.
        excess = (sum_d.sum() - self._outlier_d.sum()).item() + self._small_k3
        small = self.d.shape[0] - self._places.shape[0] + 2.0 * excess + self.small_excess2
        ratio = of_outliers + 1.0
        return small + ratio.dot(ratio).item()

    @cached_property
    def _small_k3(self) -> float:
        found = self._k3 if self._k3_of_sequences is None else self._k3_of_sequences
        return found.sum().item()

    @cached_property
    def _outlier_k3(self) -> float:
        return (self.outlier_excess - self.outliers).sum().item()

    @property
    def k3(self) -> float:
        return self._small_k3 + self._outlier_k3

    def excess(self, sum_d: Tensor) -> float:
        same = self.outliers is self._outlier_d
        outliers = self._outlier_k3 if same else (self.outlier_excess - self._outlier_d).sum().item()
        return sum_d.sum().item() + self._small_k3 + outliers

    def excess_of_sequences(self, sum_d: Tensor, of_outliers: Tensor) -> Tensor:
        """[S] float64: the sums of e^D - 1 from those of D, where outliers have another e^D - 1, [k] float64."""
        if self._k3_of_sequences is None:
            self._k3_of_sequences = self._sequences.sum(self._k3)
        totals = sum_d + self._k3_of_sequences
        if self._places.shape[0]:
            totals = totals.index_add(0, self._sequences.of(self._places), of_outliers - self._outlier_d)
        return totals

    def largest_small_d(self) -> float:
        return self.d.index_fill(0, self._places, -torch.inf).amax().item()

    def k3_of_tokens(self) -> Tensor:
        return self._k3.index_copy(0, self._places, (self.outlier_excess - self.outliers).to(self.d.dtype))


class ExactSums:
    """`SumsOfD` of small batches: every token is an outlier, and none is in the series.

    D of the outliers is not in float64, which would be twice the memory. `sum` is of D after the clamp.
    """

    small_excess2 = 0.0

    def __init__(self, d: Tensor, clamp: float, largest: float) -> None:
        self.d = d
        self.outliers = d if largest <= clamp else d.clamp(-clamp, clamp)
        wide = self.outliers.double()
        self.sum = wide.sum().item()
        self.outlier_excess = wide.expm1() if wide is self.outliers else wide.expm1_()
        self.excess2 = self.outlier_excess.dot(self.outlier_excess).item()

    @property
    def d2(self) -> float:
        return (self.d * self.d).sum().item()

    @cached_property
    def _excess(self) -> float:
        return self.outlier_excess.sum().item()

    @property
    def k3(self) -> float:
        return self._excess - self.sum

    def excess(self, sum_d: Tensor) -> float:
        return self._excess

    def largest_small_d(self) -> float:
        return -math.inf

    def k3_of_tokens(self) -> Tensor:
        return (self.outlier_excess - self.outliers).to(self.d.dtype)


class BoundedSums:
    """Sums of a token weight whose small D all lie within the bounds, which change outliers alone.

    The weight has no token clamp; `outside` is what it becomes outside of the bounds, which are numbers.
    """

    def __init__(self, sums: SumsOfD, bounds: WeightBounds, outside: Outside) -> None:
        self._sums, self._bounds, self._outside = sums, bounds, outside

    @cached_property
    def outliers(self) -> Tensor:
        """[k] float64, ratio - 1 of the outliers after the bounds."""
        return after_bounds(self._bounds, self._outside, self._sums.outlier_excess, self._sums.outliers, 1.0)

    def squares(self) -> float:
        """The sum of (ratio - 1)^2 after the bounds."""
        return self._sums.small_excess2 + self.outliers.dot(self.outliers).item()

    def count(self, low: Bound, high: Bound) -> float:
        """Tokens beyond a bound."""
        outliers = self._sums.outliers
        least, most = limits(outliers.dtype, low, high)
        # In bools: floats would take less time, and be the largest temporary of a padded batch.
        beyond = [] if least is None else [outliers < least]
        beyond += [] if most is None else [outliers > most]
        return float(sum(int(torch.count_nonzero(which)) for which in beyond)) if outliers.shape[0] else 0.0

    def ends(self, ends: tuple[float, float]) -> tuple[float, float]:
        """(-minimum, maximum) of the ratio after the bounds, from those before them."""
        low, high = -ends[0], ends[1]
        bounds, dtype = self._bounds, self._sums.d.dtype
        if self._outside == "clamp" or not self.count(bounds.low, bounds.high):
            least = bounds.lower if isinstance(bounds.lower, float) else -math.inf
            most = bounds.upper if isinstance(bounds.upper, float) else math.inf
            return rounded((-min(max(low, least), most), min(max(high, least), most)), dtype)
        # Zero is the least of all; the largest is among those within the bounds.
        largest = max(math.exp(self._sums.largest_small_d()), 1.0 + self.outliers.amax().item())
        return rounded((0.0, largest), dtype)


# --- the tokens of a block ---


def read_tokens(train: Tensor, rollout: Tensor, sequences: Packed, spec: Spec, turns: Turns | None) -> Tokens:
    """`read_tokens` of the definition where all tokens are valid, with the ends of D where all are finite."""
    d = train - rollout
    if d.numel():
        low, high = (x.item() for x in torch.aminmax(d))
        if math.isfinite(low) and math.isfinite(high):
            return Tokens(sequences, train, rollout, d, None, None, None, spec.clamp, False, turns, ends=(-low, high))
    return plain.read_tokens(train, rollout, None, sequences, spec, turns)


Known = tuple[dict[str, Number], dict[str, Number]]


def take(tokens: Tokens, n_valid: Tensor, spec: Spec, bounds: WeightBounds) -> Known:
    """Take the sums of a block that need no pass over its tokens.

    Args:
        tokens: Its tokens, which get what the definition would derive.
        n_valid: [S] int64, how many there are in each sequence.
        spec: The Spec.
        bounds: Those of its weight.

    Returns:
        Sums and maxima, statistics by name.
    """
    if tokens.ends is None:
        return {}, {}
    (negated, highest), largest, derived = tokens.ends, tokens.largest, tokens.derived
    size = tokens.d.abs()
    differs_everywhere = bool(size.amin().item())
    derived["n_differing"] = n_valid if differs_everywhere else tokens.sequences.sum_integers(size.sign(), 1.0).long()
    sums: dict[str, Number] = {}
    maxima: dict[str, Number] = {"max_d": highest, "-min_d": negated}
    if largest <= tokens.clamp:
        sums["tokens_clamped"] = 0.0
    of_tokens = spec.weight is not None and spec.weight.over == "token"
    found = sums_of(tokens, size, bounds if of_tokens else OPEN)
    if found is None:
        if largest <= LARGEST_D:
            derived["size"] = size
        return sums, maxima
    series = found if isinstance(found, SeriesSums) else None
    weight = spec.weight if spec.weight is not None and spec.weight.is_token_ratio else None
    bounded = None if weight is None else BoundedSums(found, bounds, weight.outside)
    if series is not None and bounded is not None:
        derived["sum/ratio"] = n_valid + series.excess_of_sequences(tokens.sum_d, found.outlier_excess)
        if weight is not None and weight.bounded:
            derived["sum/weight"] = n_valid + series.excess_of_sequences(tokens.sum_d, bounded.outliers)
    sums |= {"abs_d": size.sum(), "d2": found.d2, "k3": found.k3}
    sums |= {"ratio": found.excess(tokens.sum_d), "ratio2": found.excess2}
    if weight is not None and bounded is not None:
        low, high = bounds.low, bounds.high
        limited = (min(max(x, -tokens.clamp), tokens.clamp) for x in (-negated, highest))
        least, most = (math.exp(x) for x in limited)
        ends = rounded((-least, most), tokens.d.dtype)
        ends_within = bounded.ends(ends)
        sums["weight_around_one2"] = bounded.squares() if weight.bounded else found.excess2
        if series is not None:
            sums["raw2"] = sums["weight2"] = series.ratio2(tokens.sum_d, found.outlier_excess)
            if weight.bounded:
                sums["weight2"] = series.ratio2(tokens.sum_d, bounded.outliers)
        sums["tokens_above"] = 0.0 if high is None else bounded.count(None, high)
        sums["tokens_below"] = 0.0 if low is None else bounded.count(low, None)
        maxima |= {"max_raw": ends[1], "-min_raw": ends[0], "max_weight": ends_within[1], "-min_weight": ends_within[0]}
    derived["k3"] = found.k3_of_tokens
    return sums, maxima


def sums_of(tokens: Tokens, size: Tensor, bounds: WeightBounds) -> SumsOfD | None:
    """Sums of small D, within the bounds of a weight of tokens, and of outliers; None where too many are outliers.

    `size` is |D|, [N].
    """
    sequences, largest = tokens.sequences, tokens.largest
    assert isinstance(sequences, Packed)
    if largest > LARGEST_D:
        return None
    if sequences.size <= SMALL:
        return ExactSums(tokens.d, tokens.clamp, largest)
    small = small_within(*(x if isinstance(x, float) else None for x in (bounds.low, bounds.high)))
    outliers = None if small is None else outliers_above(size, min(small, tokens.clamp))
    return None if outliers is None else SeriesSums(tokens.d, sequences, outliers, tokens.clamp, largest)
