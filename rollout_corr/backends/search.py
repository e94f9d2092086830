"""Bounds that the batch decides, found without a sort: radix selection on integer keys.

The bits of a float, read as an integer and inverted where it is negative, are in the order of the floats. A search goes
through this integer from its highest digit. It counts the values by their digit, adds up the counts, and asks the rule
at which digit it stops. Then it does the same for the next digit of the values that have the digits found so far. A
bound takes three rounds in float32 and six in float64, whatever the number of values. A round's table is of integers:
it adds up over blocks, micro-batches and ranks in any order to the same bits, and no value is read.

Groups of sequences search at once: a table has a row of digits for each, and the digits are narrower the more groups
there are, so that a table stays small. A sample size (`KeepESS`) sums weights and their squares, which float32 keys
with one first digit make multiples of one unit: such weights lie at most a factor of 2^3 apart.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..definition.bounds import Bound, Sides
from ..definition.bounds_of_batch import BEYOND_CLAMP, SIGN, float32_above, weights_of
from ..specs.bounds_of_batch import WEIGHT, Before, Counting, KeepESS, OfBatch, Place, Side
from ..specs.correction import Criterion, Weight

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
FLOATS = {integer: floating for floating, integer in INTEGERS.items()}

# Bits of the widest and narrowest digit, and of the counts of all groups in a table while digits are not too narrow.
WIDEST, NARROWEST, OF_TABLE = 11, 2, 19
# Bits of the digits of weights: the first has the sign, the exponent and four bits of the significand of a log-ratio.
DIGITS_OF_WEIGHTS = (13, 10, 9)

# The fraction of an amount is a multiple of 1 / GRID.
GRID = 2**38


class Values(NamedTuple):
    """Values that a bound is searched among."""

    keys: Tensor  # [n] int32 or int64: in the order of the search as unsigned integers
    counted: Tensor  # [n] bool: takes part
    groups: Tensor | None = None  # [n] int64; their number is of no group; None where the batch decides


def values_of(side: Side, x: Tensor, tested: Tensor | None) -> Values:
    """Make the keys of values of any shape, those that are `tested`, or all of them; NaN takes no part."""
    x = x.reshape(-1)
    # Makes 0.0 of -0.0, which is equal and would have another key.
    ordered = x + 0.0 if side == "upper" else 0.0 - x
    counted = ~x.isnan() if tested is None else tested.reshape(-1) & ~x.isnan()
    bits = ordered.view(INTEGERS[x.dtype])
    # All bits of a negative number are inverted, of others the highest: a fifth of the time of `where` on the CPU.
    inverted = (bits >> (8 * bits.element_size() - 1)) | torch.iinfo(bits.dtype).min
    return Values(inverted ^ bits, counted)


def from_keys(side: Side, keys: Tensor) -> Tensor:
    """The values of keys, float32 or float64."""
    highest = torch.iinfo(keys.dtype).min
    bits = keys ^ (~(keys >> (8 * keys.element_size() - 1)) | highest)
    values = bits.view(FLOATS[keys.dtype])
    return values if side == "upper" else -values


class Sum(NamedTuple):
    """The sum of an amount of the values before a digit, `start + run * unit`; a float is never added to a float."""

    start: Tensor  # [groups, 1] float64: of the values with a smaller first digit, where each has a unit of its own
    run: Tensor  # [groups, 1] int64: of the others, in units
    unit: Tensor  # [groups, 1] float64; a `Counting` rule reads only `run`, in units of its own

    def value(self) -> Tensor:
        """The sum, float64."""
        return self.start + self.run * self.unit

    def through(self, row: Tensor, units: Tensor | None) -> Sum:
        """The sums up to and with each digit of a round, from those of each, [groups, digits] int64 in units.

        Units are those of first digits, [digits] float64; None: all have the same.
        """
        if units is None:
            return self._replace(run=self.run + row.cumsum(1))
        through = (row * units).cumsum(1)
        return Sum(torch.cat([through.new_zeros(len(row), 1), through[:, :-1]], 1), row, units.expand(row.shape))


class Search(NamedTuple):
    """The search for a bound, or for those of groups, between two rounds; tensors are [groups, 1], one for a batch."""

    rule: OfBatch
    side: Side
    dtype: torch.dtype | None  # of the values; None: any, each taken as a float32
    digits: tuple[int, ...]  # bits of the digits, from the highest
    groups: int | None  # their number; None where the batch decides
    local: bool  # all of a group lies in this call, so that no rank has to add anything
    round: int  # rounds that are over
    prefix: Tensor  # int64: the digits found
    total: Tensor  # int64: how many values there are; known after the first round
    before: Tensor  # int64: values before those with these digits
    sums: tuple[Sum, ...]  # of the amounts of these
    open: Tensor  # bool: the rule went on to the end, or after the last round, nothing lies beyond the bound

    def over(self) -> bool:
        """Whether the bound is found."""
        return self.round == len(self.digits)

    def values(self, x: Tensor, tested: Tensor | None, groups: Tensor | None) -> Values:
        """Make the keys of values; arguments as of `values_of`, and the group of each value."""
        keys, counted, _ = values_of(self.side, float32_above(x) if self.dtype is None else x, tested)
        if groups is None:
            return Values(keys, counted)
        assert self.groups is not None
        groups = groups.expand(x.shape).reshape(-1)
        return Values(keys, counted & (groups < self.groups), groups)

    def left(self, values: Values) -> Values:
        """The values with the digits found, and no others, where their number may be read: on the CPU."""
        if values.keys.device.type != "cpu" or torch.compiler.is_compiling():
            return values
        some = self._with_prefix(values)
        return Values(values.keys[some], some[some], None if values.groups is None else values.groups[some])

    def table(self, values: Values) -> Tensor:
        """[1 + amounts, groups, digits] int64: counts of values with the digits found, and sums of their amounts."""
        digits = 1 << self._digit()[0]
        columns = self.prefix.shape[0] * digits
        # The last column takes those that do not count.
        rows = torch.zeros(1 + len(self.sums), columns + 1, dtype=torch.int64, device=values.keys.device)
        index, amounts = self._places(values)
        place = torch.where(self._with_prefix(values), index, columns)
        rows[0].index_add_(0, place, torch.ones_like(place))
        for row, amount, unit in zip(rows[1:], amounts, self._units(), strict=True):
            # The amount of a value that does not count may be NaN.
            row.index_add_(0, place, (amount if unit is None else amount / unit[index]).nan_to_num(0.0).long())
        return rows[:, :columns].view(len(rows), self.prefix.shape[0], digits)

    def _places(self, values: Values) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[n] int64: the column of each value in the table; and its amounts."""
        bits, shift = self._digit()
        index = (values.keys >> shift) & ((1 << bits) - 1)
        if values.groups is not None:
            index = (values.groups << bits) | index
        return index.long(), _amounts(self.rule, from_keys(self.side, values.keys)) if self.sums else ()

    def _units(self) -> list[Tensor | None]:
        """[digits] float64 each: what the amounts of values with a digit are multiples of; None: of 1."""
        if not isinstance(self.rule, KeepESS):
            return [None] * len(self.sums)
        if not self.round:
            return [*_units_of_weights(self.prefix.device)]
        return [one.unit[0].expand(1 << self._digit()[0]) for one in self.sums]

    def narrowed(self, table: Tensor) -> Search:
        """The search after a round, from the sum of all its tables."""
        bits, _ = self._digit()
        count, *rows = table.unbind()
        total = self.total if self.round else count.sum(1, keepdim=True)
        kept = self.before + count.cumsum(1)
        units: list[Tensor] = []
        if isinstance(self.rule, KeepESS) and not self.round:
            units = _units_of_weights(table.device)
        sums = [one.through(row, unit) for one, row, unit in zip_longest(self.sums, rows, units)]
        place = self._goes_on(kept, sums, total).sum(1, keepdim=True)
        digit = place.clamp(max=table.shape[2] - 1)
        is_first, last = digit == 0, (digit - 1).clamp(min=0)

        def before(start: Tensor, through: Tensor) -> Tensor:
            return torch.where(is_first, start, through.gather(1, last))

        def sum_before(start: Sum, through: Sum) -> Sum:
            if units:
                return Sum(through.start.gather(1, digit), start.run, through.unit.gather(1, digit))
            return start._replace(run=before(start.run, through.run))

        is_open, first = self.open if self.round else place == table.shape[2], before(self.before, kept)
        if self.round + 1 == len(self.digits) and isinstance(self.rule, Counting) and self.rule.OPENS:
            everything = kept.gather(1, digit) == total
            is_open = is_open | (everything if self.rule.KEEPS_LAST else everything & (first == 0))
        return self._replace(
            round=self.round + 1,
            prefix=(self.prefix << bits) | digit,
            total=total,
            before=first,
            sums=tuple(map(sum_before, self.sums, sums)),
            open=is_open,
        )

    def _goes_on(self, kept: Tensor, sums: list[Sum], total: Tensor) -> Tensor:
        """[groups, digits], True or 1 up to some digit: the bound lies beyond it."""
        if isinstance(self.rule, KeepESS):
            bits, shift = self._digit()
            ends = ((self.prefix << bits) | torch.arange(1 << bits, device=kept.device)) << shift
            bound, beyond = weights_of(_log_ratios(ends | ((1 << shift) - 1))), total - kept
            first, second, rest = (x.value() for x in sums)
            second = second + rest + beyond * (bound * bound)
            # Rounding could let it be reached again behind the first place where it is not.
            return self.rule.reached(first + beyond * bound, second, total.double()).long().cumprod(1)
        assert isinstance(self.rule, Counting)
        amount = sums[0].run + sums[1].run // GRID if sums else None
        # Before the first value every rule goes on.
        return (kept == 0) | self.rule.goes_on(Before(kept, amount, total), self.side)

    def bound(self) -> Tensor:
        """The bound after the last round, in the dtype of the values: 0-d, or [groups + 1], the last of no group.

        Infinite where a side is open, as that of no group is, and NaN of a group without a value.
        """
        keys, end = self.prefix.view(-1), SIGN[self.side] * math.inf
        found = from_keys(self.side, keys if self.dtype == torch.float64 else _as_int32(keys))
        if isinstance(self.rule, KeepESS) or (isinstance(self.rule, Counting) and not self.rule.KEEPS_LAST):
            nearer = found.nextafter(found.new_full((), -end))
            # Of `KeepESS` these are the digits of the first number at which the sample size is not reached.
            found = nearer if isinstance(self.rule, KeepESS) else torch.where(self.before.view(-1) > 0, nearer, found)
        found = torch.where(self.open.view(-1), end, found)
        if self.groups is None:
            return found[0]
        return torch.cat([torch.where(self.total.view(-1) > 0, found, math.nan), found.new_full((1,), end)])

    def _digit(self) -> tuple[int, int]:
        """Bits of the digit of this round, and bits below it."""
        return self.digits[self.round], sum(self.digits[self.round + 1 :])

    def _with_prefix(self, values: Values) -> Tensor:
        """Bool per value: it takes part and begins with the digits found, those of its group."""
        if not self.round:
            return values.counted
        below = sum(self.digits[self.round :])
        # An arithmetic shift fills with the sign.
        begins = (values.keys >> below) & ((1 << (sum(self.digits) - below)) - 1)
        prefix = self.prefix.view(-1)
        if values.groups is not None:
            prefix = pad(prefix, (0, 1), value=-1)[values.groups]
        return values.counted & (begins == prefix)


def begin(
    rule: OfBatch, side: Side, dtype: torch.dtype, device: torch.device, groups: int | None = None, local: bool = False
) -> Search:
    """A search before its first round; arguments as of `Search`. A sample size is that of weights of any dtype."""
    nothing = torch.zeros(1 if groups is None else groups, 1, dtype=torch.int64, device=device)
    digits: tuple[int, ...] = digits_of(dtype, 1 if groups is None else groups)
    kind: torch.dtype | None = dtype
    amounts = 2 if isinstance(rule, Counting) and type(rule).amount is not Counting.amount else 0
    if isinstance(rule, KeepESS):
        digits, kind, amounts = DIGITS_OF_WEIGHTS, None, 3
    sums = (Sum(nothing, nothing, nothing),) * amounts
    return Search(
        rule, side, kind, digits, groups, local, 0, nothing, nothing, nothing, sums, nothing > 0
    )  # fmt: skip


def digits_of(dtype: torch.dtype, groups: int) -> tuple[int, ...]:
    """Bits of the digits, from the highest, for so many groups."""
    bits = 8 * dtype.itemsize
    widest = min(WIDEST, max(NARROWEST, OF_TABLE - max(groups - 1, 0).bit_length()))
    whole, rest = divmod(bits, widest)
    return (widest,) * whole + ((rest,) if rest else ())


def _amounts(rule: OfBatch, x: Tensor) -> tuple[Tensor, ...]:
    """Amounts that a rule adds up, float64 each.

    Of `KeepESS` the weights, and their squares as a float32 and what that rounds away, numbers of 24 bits each. Of
    others the whole part of `Counting.amount` and its fraction on a grid, where the rule has one.
    """
    if isinstance(rule, KeepESS):
        weight = weights_of(x)
        square = weight * weight
        nearest = square.float().double()
        return weight, nearest, square - nearest
    assert isinstance(rule, Counting)
    amount = rule.amount(x)
    if amount is None:
        return ()
    floor = amount.floor()
    return floor, ((amount - floor) * GRID).round()


def _units_of_weights(device: torch.device) -> list[Tensor]:
    """[digits] float64 each: units whose multiples are the `_amounts` of all weights with a first digit."""
    bits, shift = DIGITS_OF_WEIGHTS[0], sum(DIGITS_OF_WEIGHTS[1:])
    smallest = _log_ratios(torch.arange(1 << bits, device=device) << shift)
    exponent = (smallest.double() * math.log2(math.e)).floor().long()
    # 24 bits of a float32, 48 of its square, and one or two for roundings of the smallest.
    exponents = (exponent - 25, 2 * exponent - 26, 2 * exponent - 50)
    return [((x + 1023) << 52).view(torch.float64) for x in exponents]


def _log_ratios(digits: Tensor) -> Tensor:
    """The log-ratios of keys of 32 bits, int64, each as near as there may be one."""
    found = from_keys("upper", _as_int32(digits))
    # The keys at both ends are NaN.
    ends = torch.where(digits < 2**31, -BEYOND_CLAMP, BEYOND_CLAMP)
    return torch.where(found.isnan(), ends, found).clamp(-BEYOND_CLAMP, BEYOND_CLAMP)


def _as_int32(digits: Tensor) -> Tensor:
    """The key of 32 bits of digits, which may be above the largest int32."""
    return ((digits + 2**31) % 2**32 - 2**31).to(torch.int32)


# --- what is found ---


class KnownBounds:
    """The bounds found, by place; what has bounds that are not known yet is not bounded by them.

    They are of criteria, and of the logarithms of weights: 0-d each, or [groups + 1] of each group, and the last of
    none; infinite where a side is open.
    """

    def __init__(self, bounds: dict[Place, Tensor]) -> None:
        self.bounds = bounds
        self._numbers: Sides | None = None

    def of(
        self, criterion: Criterion, value: Tensor, tested: Tensor | None, groups: Tensor | None
    ) -> tuple[Bound, Bound]:
        """Look the bounds of a criterion up."""
        low, high = (
            x if x is None or not x.dim() or groups is None else x[groups] for x in self._sides(criterion.label)
        )
        return low, high

    def of_weight(self, weight: Weight, log_ratio: Tensor, among: Tensor | None) -> tuple[Bound, Bound]:
        """Look the bounds of the weight up: as numbers, None for an open side, where values may be read."""
        low, high = self.known_of_weight()
        if low is None and high is None:
            return self._sides(WEIGHT)
        return None if low == -math.inf else low, None if high == math.inf else high

    def known_of_weight(self) -> Sides:
        """Read the bounds of the weight once, where values may be read."""
        sides = self._sides(WEIGHT)
        if torch.compiler.is_compiling() or any(x is not None and x.device.type != "cpu" for x in sides):
            return None, None
        if self._numbers is None:
            low, high = (None if x is None else x.item() for x in sides)
            self._numbers = low, high
        return self._numbers

    def _sides(self, label: str) -> tuple[Tensor | None, Tensor | None]:
        return self.bounds.get(Place(label, "lower")), self.bounds.get(Place(label, "upper"))
