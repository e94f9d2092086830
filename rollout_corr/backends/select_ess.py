"""The bound of a weight that keeps an effective sample size, found without a sort: a search like that of select.py.

It goes through the float32 log-ratios digit by digit and asks at the last number with a digit whether weights clamped
there have the sample size. That takes the sums of the weights below and of their squares, which are sums of integers:
weights with one first digit lie at most a factor of 2^3 apart, so all are multiples of one unit, a power of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends.select import Values, as_int32, digit_of, follow, from_keys, in_chunks, values_of
from rollout_corr.definition.bounds_of_batch import BEYOND_CLAMP, float32_above, weights_of
from rollout_corr.spec.bounds_of_batch import KeepESS

# Bits of the digits: the first has the sign, the exponent and four bits of the significand of a log-ratio.
DIGITS = (13, 10, 9)


class Sums(NamedTuple):
    """The sum of the weights, or of their squares, up to the digits found, as far as it is known.

    Attributes:
        start: 0-d float64: of those with a smaller first digit.
        run: 0-d int64: of the others, in units.
        unit: 0-d float64, of the first digit.
    """

    start: Tensor
    run: Tensor
    unit: Tensor

    def value(self) -> Tensor:
        """The sum, float64."""
        return self.start + self.run * self.unit

    def up_to_digits(self, row: Tensor, unit: Tensor, number: int) -> Sums:
        """The sums up to and with each digit of a round.

        Args:
            row: [digits] int64, of the weights with a digit, in units.
            unit: [digits] float64, of first digits.
            number: The round.
        """
        if number:
            return Sums(self.start, self.run + row.cumsum(0), self.unit)
        each = (row * unit).cumsum(0)
        return Sums(torch.cat([each.new_zeros(1), each[:-1]]), row, unit)

    def before(self, digit: Tensor, known: Sums, number: int) -> Sums:
        """The sum before a digit, of those up to each.

        Args:
            digit: 0-d int64.
            known: The sum before the first of them.
            number: The round.
        """
        if not number:
            return Sums(_at(self.start, digit), known.run, _at(self.unit, digit))
        return Sums(self.start, torch.where(digit > 0, _at(self.run, (digit - 1).clamp(min=0)), known.run), self.unit)


class EssSearch(NamedTuple):
    """The search for one bound between two rounds.

    Attributes:
        rule: The rule.
        round: Rounds that are over.
        prefix: 0-d int64: the digits found.
        total: 0-d int64: how many weights there are; known after the first round.
        before: 0-d int64: those before the ones with these digits.
        sums: Of what `_amounts` gives of each.
        open: 0-d bool: all weights together have the sample size.
        dtype: Of the values; None: of any, of which each takes part as a float32.
    """

    rule: KeepESS
    round: int
    prefix: Tensor
    total: Tensor
    before: Tensor
    sums: tuple[Sums, ...]
    open: Tensor
    dtype: torch.dtype | None = None

    def digits(self) -> tuple[int, ...]:
        """Bits of the digits, from the highest."""
        return DIGITS

    def scales(self) -> Tensor | None:
        """[digits] float64: by which the weights of a digit become whole numbers."""
        return 1.0 / self.units(self.prefix.device)[0]

    def rounds(self) -> int:
        """The number of rounds until the bound is found."""
        return len(self.digits())

    def values(self, x: Tensor, tested: Tensor | None, groups: Tensor | None, look: bool) -> Values:
        """Make ready to count; arguments as of `values_of`."""
        return values_of("upper", float32_above(x), tested, look)

    def left(self, values: Values) -> Values:
        """The values with the digits found, and no others: for the CPU, since how many there are decides the shape."""
        counted = values.counted
        if self.round:
            same = follow(values.keys, self.prefix, DIGITS, self.round)
            counted = same if counted is None else counted & same
        return values if counted is None else Values(values.keys[counted], None)

    def table(self, values: Values) -> Tensor:
        """[4, digits] int64: of values with the digits found the count, and the sums of `_amounts`, in units."""
        units = self.units(values.keys.device)
        return in_chunks(lambda chunk: self._table(chunk, units), values)

    def units(self, device: torch.device) -> list[Tensor]:
        """[digits] float64 each: what the sums of `_amounts` are multiples of."""
        digits = 1 << digit_of(DIGITS, self.round)[0]
        return [known.unit.expand(digits) for known in self.sums] if self.round else _units(device)

    def _table(self, values: Values, units: list[Tensor]) -> Tensor:
        bits, shift = digit_of(DIGITS, self.round)
        digits = 1 << bits
        index = (values.keys >> shift) & (digits - 1)
        each = _amounts(from_keys("upper", values.keys))
        if values.counted is None:
            # A chunk is so small that float64 adds integers of 33 bits up exactly. A device would be waited for.
            rows = [torch.bincount(index, minlength=digits)]
            rows += [(torch.bincount(index, x, digits) / unit).long() for x, unit in zip(each, units, strict=True)]
            return torch.stack(rows)
        index = index.long()
        counted = values.counted
        if self.round:
            counted = counted & follow(values.keys, self.prefix, DIGITS, self.round)
        amounts = [counted.long()]
        # A value that takes no part may be NaN.
        amounts += [torch.where(counted, x / unit[index], 0.0).long() for x, unit in zip(each, units, strict=True)]
        nothing = torch.zeros(len(amounts), digits, dtype=torch.int64, device=index.device)
        return nothing.index_add(1, index, torch.stack(amounts))

    def narrowed(self, table: Tensor) -> EssSearch:
        """The search after a round, from the sum of all its tables."""
        total = self.total if self.round else table[0].sum()
        kept = self.before + table[0].cumsum(0)
        running = [
            known.up_to_digits(row, unit, self.round)
            for known, row, unit in zip(self.sums, table[1:], self.units(table.device), strict=True)
        ]
        bits, shift = digit_of(DIGITS, self.round)
        ends = ((self.prefix << bits) | torch.arange(1 << bits, device=table.device)) << shift | ((1 << shift) - 1)
        bound, beyond = weights_of(_log_ratios(ends)), total - kept
        first, second, rest = (x.value() for x in running)
        reached = self.rule.reached(first + beyond * bound, second + rest + beyond * (bound * bound), total.double())
        # Rounding could let it be reached again behind the first place where it is not.
        digit = reached.long().cumprod(0).sum()
        is_open = self.open
        if not self.round:
            is_open = is_open | (digit == table.shape[1])
        digit = digit.clamp(max=table.shape[1] - 1)
        prefix = (self.prefix << bits) | digit
        before = torch.where(digit > 0, _at(kept, (digit - 1).clamp(min=0)), self.before)
        sums = tuple(now.before(digit, known, self.round) for now, known in zip(running, self.sums, strict=True))
        return EssSearch(self.rule, self.round + 1, prefix, total, before, sums, is_open)

    def bound(self) -> Tensor:
        """The bound after the last round, 0-d float32; infinite where the side is open."""
        # The digits are those of the first number at which the sample size is not reached.
        found = from_keys("upper", as_int32(self.prefix))
        return torch.where(self.open, math.inf, found.nextafter(found.new_full((), -math.inf)))


def begin(rule: KeepESS, device: torch.device) -> EssSearch:
    """A search before its first round; of weights of any dtype, for their upper bound."""
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    unknown = Sums(nothing.double(), nothing, nothing.double())
    return EssSearch(rule, 0, nothing, nothing, nothing, (unknown, unknown, unknown), nothing > 0)


def _amounts(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and their squares as a float32 and what that rounds away: float64 numbers of 24 bits each."""
    weight = weights_of(log_ratio)
    square = weight * weight
    nearest = square.float().double()
    return weight, nearest, square - nearest


def _at(x: Tensor, place: Tensor) -> Tensor:
    """0-d: a value of [n]; `x[place]` would be read."""
    return x.index_select(0, place[None])[0]


def _log_ratios(digits: Tensor) -> Tensor:
    """The log-ratios of keys of 32 bits, int64, each as near as there may be one."""
    found = from_keys("upper", as_int32(digits))
    # The keys at both ends are NaN.
    ends = torch.where(digits < 2**31, -BEYOND_CLAMP, BEYOND_CLAMP)
    return torch.where(found.isnan(), ends, found).clamp(-BEYOND_CLAMP, BEYOND_CLAMP)


def _units(device: torch.device) -> list[Tensor]:
    """[digits] float64 each: of which the `_amounts` of all weights with a first digit are multiples."""
    bits, shift = digit_of(DIGITS, 0)
    smallest = _log_ratios(torch.arange(1 << bits, device=device) << shift)
    exponent = (smallest.double() * math.log2(math.e)).floor().long()
    # 24 bits of a float32, 48 of its square, and one or two for roundings of the smallest.
    return [_power_of_two(x) for x in (exponent - 25, 2 * exponent - 26, 2 * exponent - 50)]


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)
