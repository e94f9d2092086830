"""The CPU's own sums: what `Packed` and `Tokens` of the definition answer, in less time, because values may be read.

1. `CpuPacked` sums long sequences along tiles of tokens, and whole numbers as floats that hold them.
2. `reader_of` gives the reader of tokens. Where all tokens are valid and finite it makes `CpuTokens`, which know the
   extrema of D: nothing is clamped that lies within, and statistics come from `SeriesSums` or `ExactSums`.
3. `known_statistics` are the statistics that these sums answer.

What decides, and every weight, is computed as the definition says: what a token gets must not depend on its neighbors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from struct import Struct
from typing import cast

import torch
from torch import Tensor

from ..definition import tokens as plain
from ..definition.bounds import Bound, Sides, WeightBounds, after_bounds, limits
from ..definition.findings import Findings
from ..definition.sequences import Packed, Sequences
from ..definition.tokens import GRID_OF_D, LARGEST_D, Number, Tokens, k3, to_grid
from ..definition.turns import Turns
from ..specs.caches import cached
from ..specs.choices import Outside
from ..specs.correction import Spec, Weight
from ..specs.thresholds import float32_at_least, float32_at_most, log_bound

# --- sums of packed tokens ---

# Tokens of a tile: stretches of equal length that packed tokens are cut into on the CPU, wherever sequences end.
TILE = 64

# What float64 holds exactly, with all integers below.
FLOAT64 = 2.0**53

# Tokens from which on that is less time than the operations which it takes more.
TILED = 65_536


class Tiles:
    """Sums of packed tokens on the CPU: along tiles, [n, TILE], then over the tiles and the ends of each sequence.

    A tile in which a sequence begins or ends is cut: it counts nothing as a whole, and its tokens are summed one by one
    with those behind the last whole tile. So nothing in one sequence touches another.
    """

    def __init__(self, offsets: Tensor, size: int) -> None:
        self._whole, self._count = size // TILE, offsets.shape[0] - 1
        tile, inside = offsets // TILE, offsets % TILE
        within = inside != 0
        self._cut = torch.unique_consecutive(tile[within & (tile < self._whole)])
        # Where each sequence begins among the tiles, and behind them among the tokens of those that are cut.
        tokens = torch.searchsorted(self._cut, tile).mul_(TILE).add_(inside)
        self._offsets = torch.cat([(tile + within).clamp_(max=self._whole), tokens.add_(self._whole)])

    def sum(self, x: Tensor) -> Tensor:
        """[N] float32 -> [S] float64. A tile is summed in float32."""
        tiles, *ends = self._cut_up(x)
        every = torch.cat([tiles.sum(1).index_fill_(0, self._cut, 0.0), *ends])
        return self._added(torch.segment_reduce(every.double(), "sum", offsets=self._offsets, unsafe=True))

    def sum_integers(self, x: Tensor, largest: float) -> Tensor:
        """[N] float32 whole numbers up to 2^38 -> [S] int64, exact; or float64 that holds every sum."""
        tiles, *ends = self._cut_up(x)
        # float64 holds the sum of a tile.
        over = tiles.double().sum(1).index_fill_(0, self._cut, 0.0)
        if held(largest, x.shape[0]):
            every = torch.cat([over, *ends])
            return self._added(torch.segment_reduce(every, "sum", offsets=self._offsets, unsafe=True))
        running = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), over, *ends]).long().cumsum_(0)
        return self._added(running.index_select(0, self._offsets).diff())

    def max(self, x: Tensor) -> Tensor:
        """[N] floating -> [S]; -inf for a sequence without tokens."""
        tiles, *ends = self._cut_up(x)
        every = torch.cat([tiles.amax(1).index_fill_(0, self._cut, -torch.inf), *ends])
        parts = torch.segment_reduce(every, "max", offsets=self._offsets, unsafe=True)
        return torch.maximum(parts[: self._count], parts[self._count + 1 :])

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N] floating -> [S] each: the largest x, and the largest -x, by one pass over the tiles that are cut."""
        tiles, *ends = self._cut_up(x)
        found = []
        for whole, of, nothing in ((tiles.amax(1), "max", -torch.inf), (tiles.amin(1), "min", torch.inf)):
            every = torch.cat([whole.index_fill_(0, self._cut, nothing), *ends])
            found.append(torch.segment_reduce(every, of, offsets=self._offsets, unsafe=True))
        (high, more_high), (low, more_low) = ((x[: self._count], x[self._count + 1 :]) for x in found)
        return torch.maximum(high, more_high), torch.minimum(low, more_low).neg_()

    def _cut_up(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tiles, the tokens of those that are cut, and the tokens behind the last."""
        tiles = x[: self._whole * TILE].view(self._whole, TILE)
        return tiles, tiles.index_select(0, self._cut).view(-1), x[self._whole * TILE :]

    def _added(self, parts: Tensor) -> Tensor:
        """Sums over tiles, one number that is no sequence's, and sums over tokens, [2 S + 1] -> [S]."""
        return parts[: self._count] + parts[self._count + 1 :]


def held(largest: float, size: int) -> bool:
    """True if float64 holds every sum of `size` whole numbers within +-largest."""
    return largest * size <= FLOAT64


class CpuPacked(Packed):
    """`Packed` for CPU tensors."""

    def __init__(self, offsets: Tensor, size: int) -> None:
        super().__init__(offsets, size)
        self._tiles: Tiles | None = None
        # Most tiles have to be whole.
        self._tiled = size >= max(TILED, 2 * TILE * self.count) and self.count > 0

    def sum(self, x: Tensor) -> Tensor:
        tiles = self._in_tiles(x)
        return super().sum(x) if tiles is None else tiles.sum(x)

    def sum_integers(self, x: Tensor, largest: float = math.inf) -> Tensor:
        """[N] int64, bool, or whole numbers as floats -> [S], exact: int64, or float64 that holds every sum.

        No |x| is above `largest`. May overwrite x unless it is bool.
        """
        if not x.is_floating_point():
            return super().sum_integers(x)
        tiles = self._in_tiles(x)
        if tiles is not None:
            return tiles.sum_integers(x, largest)
        if self.count and held(largest, self.size):
            # A third of the operations of a running sum.
            return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True)
        return super().sum_integers(x)

    def max(self, x: Tensor) -> Tensor:
        tiles = self._in_tiles(x, x.dtype)
        return super().max(x) if tiles is None else tiles.max(x)

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tiles = self._in_tiles(x, x.dtype)
        return super().ends(x) if tiles is None else tiles.ends(x)

    @property
    def ids(self) -> Tensor:
        if self._ids is None and self._lengths is None and self.count:
            # Tokens outside go with their neighbors. A search for each token would take ten times as long.
            ends = self.offsets.clone()
            ends[0], ends[-1] = 0, self.size
            self._lengths = ends.diff()
        return super().ids

    def spread(self, per_sequence: Tensor) -> Tensor:
        if per_sequence.dtype != torch.bool or self._ids is not None or not self.count:
            return super().spread(per_sequence)
        # A running sum of where it changes, in bytes: a fifth of the time of the index.
        flags = per_sequence.to(torch.int8)
        changes = torch.cat([flags[:1], flags.diff()])
        running = torch.zeros(self.size + 1, dtype=torch.int8, device="cpu")
        return running.index_add_(0, self.offsets[:-1], changes).cumsum_(0)[:-1].view(torch.bool)

    def _in_tiles(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tiles | None:
        """Tiles of a dtype; None where there are none."""
        if not self._tiled or x.dtype != dtype or x.requires_grad:
            return None
        if self._tiles is None:
            self._tiles = Tiles(self.offsets, self.size)
        return self._tiles


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


def small_up_to(spec: Spec, found: Sides) -> float | None:
    """The |D| up to which a token is small, and within the bounds of a token weight; None where 0 is outside.

    `found`: the logarithms of the bounds that the batch has decided; None for a side that it has not, or not yet.
    """
    weight = spec.weight
    if weight is None or weight.over != "token":
        return SMALL_D
    low, high = found
    if any(known is None for side, known in (("lower", low), ("upper", high)) if side in weight.rules):
        return None
    return _small_within(weight.low, weight.high, low, high)


@cached(maxsize=256)
def _small_within(lower: float | None, upper: float | None, low: float | None, high: float | None) -> float | None:
    low = log_bound(lower) if low is None else low
    high = log_bound(upper) if high is None else high
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


class SeriesSums:
    """Sums of e^D - 1 - D, e^D - 1 and their squares: of small D by a short series, of outliers one by one in float64.

    Args:
        d: [N], |D| at most 1024.
        sequences: Which tokens belong together.
        places: [k] int64, the outliers: at least those with |D| > SMALL_D.
        clamp: What limits |D| in all but the sum of D^2.
        largest: The largest |D|.

    Attributes:
        outlier_d, outliers: [k] float64, D of the outliers, and after the clamp.
        outlier_excess: [k] float64, their e^D - 1.
        small_excess2: The sum of (e^D - 1)^2 without the outliers.
        excess2: The sum of (e^D - 1)^2.
    """

    def __init__(self, d: Tensor, sequences: CpuPacked, places: Tensor, clamp: float, largest: float) -> None:
        self._sequences = sequences
        self.d, self.places = d, places
        self.outlier_d = d.index_select(0, places).double()
        self.outliers = self.outlier_d if largest <= clamp else self.outlier_d.clamp(-clamp, clamp)
        self.outlier_excess = self.outliers.expm1()
        squares = d * d
        if places.shape[0]:
            squares.index_fill_(0, places, 0.0)
        small = squares.sum().item()
        # 0 at the outliers, as their squares are.
        self._k3 = series_of_k3(d).mul_(squares)
        self.small_excess2 = small + 2.0 * torch.dot(d, self._k3).item() + torch.dot(self._k3, self._k3).item()
        self._d2 = small + self.outlier_d.dot(self.outlier_d).item()
        self.excess2 = self.small_excess2 + self.outlier_excess.dot(self.outlier_excess).item()
        self._k3_of_sequences: Tensor | None = None

    @property
    def d2(self) -> float:
        """The sum of D^2."""
        return self._d2

    def ratio2(self, sum_d: Tensor, of_outliers: Tensor) -> float:
        """The sum of e^(2 D) from the sums of D, [S] float64, where outliers have another e^D - 1, [k] float64."""
        # Small D have ratios next to 1, where nothing cancels.
        excess = (sum_d.sum() - self.outlier_d.sum()).item() + self._small_k3
        small = self.d.shape[0] - self.places.shape[0] + 2.0 * excess + self.small_excess2
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
        """The sum of k3."""
        return self._small_k3 + self._outlier_k3

    def excess(self, sum_d: Tensor) -> float:
        """The sum of e^D - 1, from the sums of D, [S] float64."""
        same = self.outliers is self.outlier_d
        outliers = self._outlier_k3 if same else (self.outlier_excess - self.outlier_d).sum().item()
        return sum_d.sum().item() + self._small_k3 + outliers

    def excess_of_sequences(self, sum_d: Tensor, of_outliers: Tensor) -> Tensor:
        """[S] float64: the sums of e^D - 1 from those of D, where outliers have another e^D - 1, [k] float64."""
        if self._k3_of_sequences is None:
            self._k3_of_sequences = self._sequences.sum(self._k3)
        totals = sum_d + self._k3_of_sequences
        if not self.places.shape[0]:
            return totals
        return totals.index_add(0, self._sequences.of(self.places), of_outliers - self.outlier_d)

    def largest_small_d(self) -> float:
        """The largest D without the outliers."""
        return self.d.index_fill(0, self.places, -torch.inf).amax().item()

    def k3_of_tokens(self) -> Tensor:
        """[N]: k3."""
        return self._k3.index_copy(0, self.places, (self.outlier_excess - self.outliers).to(self.d.dtype))


class ExactSums(SeriesSums):
    """Sums for small batches, as of `SeriesSums`: every token exactly, none by the series.

    All of them are outliers, which are not in float64: that would be twice the memory. `sum` is of D after the clamp.
    """

    def __init__(self, d: Tensor, sequences: CpuPacked, clamp: float, largest: float) -> None:
        self._sequences = sequences
        self.d = self.outlier_d = d
        self.outliers = d if largest <= clamp else d.clamp(-clamp, clamp)
        wide = self.outliers.double()
        self.sum = wide.sum().item()
        self.outlier_excess = wide.expm1() if wide is self.outliers else wide.expm1_()
        self.small_excess2 = 0.0
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

    def __init__(self, sums: SeriesSums, bounds: WeightBounds, outside: Outside) -> None:
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


# --- tokens ---


@dataclass(eq=False, repr=False)
class CpuTokens(Tokens):
    """`Tokens` of a block on the CPU, [N]: all of them valid and finite, and the extrema of D known."""

    ends: tuple[float, float] = (-math.inf, -math.inf)  # -min D and max D
    largest: float = math.inf  # the largest |D|
    small_up_to: float | None = None  # the |D| up to which a token is small; None: none is

    def limited(self, limit: float) -> Tensor:
        return self.d if self.largest <= limit else super().limited(limit)

    @cached_property
    def sums(self) -> SeriesSums | None:
        """Sums of small D and of outliers; None where too many tokens are outliers."""
        sequences = self.sequences
        if self.largest > LARGEST_D or not isinstance(sequences, CpuPacked):
            return None
        if sequences.size <= SMALL:
            return ExactSums(self.d, sequences, self.clamp, self.largest)
        if self.small_up_to is None:
            return None
        outliers = outliers_above(self.size, min(self.small_up_to, self.clamp))
        return None if outliers is None else SeriesSums(self.d, sequences, outliers, self.clamp, self.largest)

    @property
    def k3(self) -> Tensor:
        return super().k3 if self.sums is None else self.once("k3", self.sums.k3_of_tokens)

    @property
    def extrema(self) -> tuple[Number, Number]:
        return self.ends

    def count_differing(self, n_valid: Tensor) -> Tensor:
        if not self.largest:
            return torch.zeros_like(n_valid)
        # |D| as integers of its bits, in a quarter of the time of a comparison, which writes bools.
        narrow = self.d.dtype == torch.float32
        bits = self.d.abs().view(torch.int32 if narrow else torch.int64)
        if bits.amin().item():
            return n_valid
        which = bits.clamp_(max=1).to(self.d.dtype)
        sequences = self.sequences
        if isinstance(sequences, CpuPacked):
            return sequences.sum_integers(which, 1.0).long()
        return sequences.sum_integers(which)

    def sum_d_of(self, units: Sequences) -> Tensor:
        if self.d.dtype != torch.float32 or not isinstance(units, CpuPacked):
            return super().sum_d_of(units)
        largest = GRID_OF_D * min(self.largest, LARGEST_D) + 1.0
        return units.sum_integers(to_grid(self.saturated, GRID_OF_D), largest).double() / GRID_OF_D

    @property
    def sums_of_log_probs(self) -> tuple[Tensor, Tensor]:
        if self.largest > LARGEST_D:
            return super().sums_of_log_probs
        train = self.sequences.sum(self.train)
        return train, train - self.sum_d

    @property
    def series(self) -> SeriesSums | None:
        """Sums of which most tokens are small; where each is taken by itself, a weight is as exact."""
        return None if isinstance(self.sums, ExactSums) else self.sums

    def ratios_of_sequences(self, asked: Weight, ratio: Tensor) -> Tensor:
        if self.series is None or not asked.is_token_ratio:
            return super().ratios_of_sequences(asked, ratio)
        return self._ratios(self.series, self.series.outlier_excess)

    def weights_of_sequences(self, asked: Weight, bounds: WeightBounds, weight: Tensor) -> Tensor:
        found = self.bounded(asked, bounds)
        if self.series is None or found is None:
            return super().weights_of_sequences(asked, bounds, weight)
        return self._ratios(self.series, found.outliers)

    def _ratios(self, series: SeriesSums, of_outliers: Tensor) -> Tensor:
        """[S] float64: the sums of e^D, where outliers have another e^D - 1, [k] float64."""
        assert isinstance(self.sequences, CpuPacked)
        return self.sequences.offsets.diff() + series.excess_of_sequences(self.sum_d, of_outliers)

    def bounded(self, asked: Weight, bounds: WeightBounds) -> BoundedSums | None:
        """Sums of a weight after its bounds; None where too many tokens are outliers, or D is not its logarithm."""
        if not asked.is_token_ratio or self.sums is None:
            return None
        found = self.__dict__.get("_bounded")
        if found is None:
            found = self.__dict__["_bounded"] = BoundedSums(self.sums, bounds, asked.outside)
        return cast("BoundedSums", found)

    def forget(self) -> None:
        super().forget()
        for name in ("sums", "_bounded"):
            self.__dict__.pop(name, None)


def reader_of(found: Sides) -> plain.Reader:
    """The CPU's reader of tokens; `found` as of `small_up_to`."""
    return partial(_read_tokens, found=found)


def _read_tokens(
    train: Tensor,
    rollout: Tensor,
    valid: Tensor | None,
    sequences: Sequences,
    spec: Spec,
    turns: Turns | None,
    found: Sides,
) -> Tokens:
    """`read_tokens` of the definition, with the extrema of D where all tokens are valid and finite."""
    d = train - rollout
    if valid is None and d.numel():
        low, high = (x.item() for x in torch.aminmax(d))
        largest = max(-low, high)
        if math.isfinite(largest):
            read = sequences, train, rollout, d, None, None, None, spec.clamp, False, turns
            return CpuTokens(*read, ends=(-low, high), largest=largest, small_up_to=small_up_to(spec, found))
    return plain.read_tokens(train, rollout, valid, sequences, spec, turns)


# --- statistics ---

Known = tuple[dict[str, Number], dict[str, Number]]


def known_statistics(found: Findings) -> Known:
    """The sums and the maxima of a block's statistics that need no pass over its tokens, by name."""
    tokens, weighing = found.tokens, found.weighing
    if not isinstance(tokens, CpuTokens):
        return {}, {}
    negated, highest = tokens.ends
    sums: dict[str, Number] = {}
    maxima: dict[str, Number] = {"max_d": highest, "-min_d": negated}
    if tokens.largest <= tokens.clamp:
        sums["tokens_clamped"] = 0.0
    known = tokens.sums
    if known is None:
        return sums, maxima
    # |D| is not kept for its sum.
    sums["abs_d"] = (tokens.derived["size"] if "size" in tokens.derived else tokens.saturated.abs()).sum()
    sums |= {"d2": known.d2, "k3": known.k3, "ratio": known.excess(tokens.sum_d), "ratio2": known.excess2}
    bounded = None if weighing is None else tokens.bounded(weighing.asked, weighing.bounds)
    if weighing is not None and bounded is not None:
        low, high = weighing.bounds.low, weighing.bounds.high
        limited = (min(max(x, -tokens.clamp), tokens.clamp) for x in (-negated, highest))
        least, most = (math.exp(x) for x in limited)
        ends = rounded((-least, most), tokens.d.dtype)
        ends_within = bounded.ends(ends)
        sums["weight_around_one2"] = bounded.squares() if weighing.asked.bounded else known.excess2
        if tokens.series is not None:
            sums["raw2"] = sums["weight2"] = known.ratio2(tokens.sum_d, known.outlier_excess)
            if weighing.asked.bounded:
                sums["weight2"] = known.ratio2(tokens.sum_d, bounded.outliers)
        sums["tokens_above"] = 0.0 if high is None else bounded.count(None, high)
        sums["tokens_below"] = 0.0 if low is None else bounded.count(low, None)
        maxima |= {"max_raw": ends[1], "-min_raw": ends[0], "max_weight": ends_within[1], "-min_weight": ends_within[0]}
    return sums, maxima
