"""Bounds that the batch decides, found without a sort: radix selection on integer keys.

The bits of a float, read as an integer and turned over where it is negative, are in the order of the floats. A search
goes through this integer from its highest digit: it counts the values by their digit, adds up the counts, and asks the
rule at which digit it stops. Then it does the same for the next digit of the values that have the digits found so far.
So a bound takes three rounds in float32 and six in float64, whatever the number of values. A round's table is of
integers: it adds up over blocks, micro-batches and ranks in any order to the same bits, and no value is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.bounds_of_batch import SIGN
from rollout_corr.spec.bounds_of_batch import Before, Counting, Side

# Bits of the digits, from the highest.
DIGITS: dict[torch.dtype, tuple[int, ...]] = {torch.float32: (11, 11, 10), torch.float64: (11, 11, 11, 11, 11, 9)}
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
FLOATS = {integer: floating for floating, integer in INTEGERS.items()}

# Values whose float64 temporaries stay in cache.
CHUNK = 32_768

# The fraction of an amount is a multiple of 1 / GRID.
GRID = 2**38


class Values(NamedTuple):
    """Values that a bound is searched among.

    Attributes:
        keys: [n] int32 or int64: in the order of the search as unsigned integers.
        counted: [n] bool: takes part; None: all do, and they have the digits found (`Search.left`).
        groups: [n] int64, from 0 to the number of groups, which is of no group; None where the batch decides.
    """

    keys: Tensor
    counted: Tensor | None
    groups: Tensor | None = None


def values_of(side: Side, x: Tensor, tested: Tensor | None, look: bool = False) -> Values:
    """Make ready to count.

    Args:
        side: The side that it bounds.
        x: float32 or float64 of any shape.
        tested: Bool of the same shape: takes part; None: all do.
        look: Values may be read, as on the CPU: all that are numbers need not be told from others.
    """
    x = x.reshape(-1)
    # That -0.0 comes before 0.0 changes no verdict: a bound of either cuts at the same place.
    ordered = x if side == "upper" else -x
    counted = tested if tested is None else tested.reshape(-1)
    if not (look and _no_nan(x)):
        numbers = ~x.isnan()
        counted = numbers if counted is None else counted & numbers
    bits = ordered.view(INTEGERS[x.dtype])
    # All bits of a negative number are turned over, of others the highest: a fifth of the time of `where` on the CPU.
    turned = (bits >> (8 * bits.element_size() - 1)) | torch.iinfo(bits.dtype).min
    return Values(turned ^ bits, counted)


def _no_nan(x: Tensor) -> bool:
    """Tell whether there is no NaN, by one that reaches the minimum, in a fifth of the time of looking for it."""
    return not x.numel() or not math.isnan(torch.aminmax(x)[0].item())


def from_keys(side: Side, keys: Tensor) -> Tensor:
    """The values of keys, float32 or float64."""
    highest = torch.iinfo(keys.dtype).min
    bits = keys ^ (~(keys >> (8 * keys.element_size() - 1)) | highest)
    values = bits.view(FLOATS[keys.dtype])
    return values if side == "upper" else -values


class Search(NamedTuple):
    """The search for a bound by a `Counting` rule between two rounds.

    Attributes:
        rule: The rule.
        side: The side that it bounds.
        dtype: Of the values.
        round: Rounds that are over.
        prefix: 0-d int64: the digits found.
        total: 0-d int64: how many values there are; known after the first round.
        before: 0-d int64: values before those with these digits.
        whole, fraction: 0-d int64: the sum of their amounts.
        open: 0-d bool: the rule went on to the end.
    """

    rule: Counting
    side: Side
    dtype: torch.dtype
    round: int
    prefix: Tensor
    total: Tensor
    before: Tensor
    whole: Tensor
    fraction: Tensor
    open: Tensor

    def digits(self) -> tuple[int, ...]:
        """Bits of the digits, from the highest."""
        return DIGITS[self.dtype]

    def scales(self) -> Tensor | None:
        """None: amounts are added up in units of the rule."""
        return None

    def rounds(self) -> int:
        """The number of rounds until the bound is found."""
        return len(self.digits())

    def values(self, x: Tensor, tested: Tensor | None, groups: Tensor | None, look: bool) -> Values:
        """Make ready to count; arguments as of `values_of`."""
        return values_of(self.side, x, tested, look)

    def left(self, values: Values) -> Values:
        """The values with the digits found, and no others: for the CPU, since how many there are decides the shape."""
        counted = values.counted
        if self.round:
            same = self._follow(values.keys)
            counted = same if counted is None else counted & same
        return values if counted is None else Values(values.keys[counted], None)

    def table(self, values: Values) -> Tensor:
        """[1 or 3, digits] int64: counts, and the amounts' whole parts and fractions, of values with the prefix."""
        return in_chunks(self._table, values)

    def _table(self, values: Values) -> Tensor:
        bits, shift = self._digit()
        digits = 1 << bits
        index = ((values.keys >> shift) & (digits - 1)).long()
        counted = values.counted
        if counted is None:
            # Half the time on the CPU; a device would be waited for.
            rows = [torch.bincount(index, minlength=digits + 1)]
        else:
            index = torch.where(counted & self._follow(values.keys) if self.round else counted, index, digits)
            rows = [torch.zeros(digits + 1, dtype=torch.int64, device=index.device)]
            rows[0].index_add_(0, index, torch.ones_like(index))
        nothing = torch.zeros_like(rows[0])
        amounts = self.rule.amount(from_keys(self.side, values.keys))
        if amounts is not None:
            floor = amounts.floor()
            parts = [floor, ((amounts - floor) * GRID).round()]
            if counted is not None:
                # The amount of a value that takes no part may be NaN.
                parts = [part.nan_to_num(0.0) for part in parts]
            rows += [nothing.index_add(0, index, part.long()) for part in parts]
        return torch.stack(rows)[:, :digits]

    def narrowed(self, table: Tensor) -> Search:
        """The search after a round, from the sum of all its tables."""
        bits, _ = self._digit()
        total = self.total if self.round else table[0].sum()
        kept = self.before + table[0].cumsum(0)
        whole = fraction = amount = None
        if table.shape[0] > 1:
            whole, fraction = self.whole + table[1].cumsum(0), self.fraction + table[2].cumsum(0)
            amount = whole + fraction // GRID
        # Before the first value every rule goes on.
        goes_on = (kept == 0) | self.rule.goes_on(Before(kept, amount, total), self.side)
        place = goes_on.sum()
        is_open = self.open
        if not self.round:
            is_open = is_open | (place == table.shape[1])
        digit = place.clamp(max=table.shape[1] - 1)
        last = (digit - 1).clamp(min=0)

        def up_to(running: Tensor | None, start: Tensor) -> Tensor:
            return start if running is None else torch.where(digit > 0, running.gather(0, last[None])[0], start)

        return Search(
            self.rule, self.side, self.dtype, self.round + 1, (self.prefix << bits) | digit, total,
            up_to(kept, self.before), up_to(whole, self.whole), up_to(fraction, self.fraction), is_open,
        )  # fmt: skip

    def bound(self) -> Tensor:
        """The bound after the last round, 0-d in the dtype of the values; infinite where the side is open."""
        kind, end = INTEGERS[self.dtype], SIGN[self.side] * math.inf
        keys = self.prefix if kind == torch.int64 else as_int32(self.prefix)
        found = from_keys(self.side, keys)
        if not self.rule.KEEPS_LAST:
            found = torch.where(self.before > 0, found.nextafter(found.new_full((), -end)), found)
        return torch.where(self.open, end, found)

    def _digit(self) -> tuple[int, int]:
        return digit_of(self.digits(), self.round)

    def _follow(self, keys: Tensor) -> Tensor:
        return follow(keys, self.prefix, self.digits(), self.round)


def in_chunks(table: Callable[[Values], Tensor], values: Values) -> Tensor:
    """The table of values, in chunks where all of them count, as on the CPU."""
    if values.counted is not None or values.keys.shape[0] <= CHUNK:
        return table(values)
    return torch.stack([table(Values(keys, None)) for keys in values.keys.split(CHUNK)]).sum(0)


def as_int32(digits: Tensor) -> Tensor:
    """The key of 32 bits of digits, which may be above the largest int32."""
    return ((digits + 2**31) % 2**32 - 2**31).to(torch.int32)


def digit_of(bits: tuple[int, ...], number: int) -> tuple[int, int]:
    """Bits of the digit of a round, and bits below it."""
    return bits[number], sum(bits[number + 1 :])


def follow(keys: Tensor, prefix: Tensor, bits: tuple[int, ...], number: int) -> Tensor:
    """Bool per key: it begins with the digits that the rounds before one have found."""
    below = sum(bits[number:])
    # An arithmetic shift fills with the sign.
    return ((keys >> below) & ((1 << (sum(bits) - below)) - 1)) == prefix


def begin(rule: Counting, side: Side, dtype: torch.dtype, device: torch.device) -> Search:
    """A search before its first round."""
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return Search(rule, side, dtype, 0, nothing, nothing, nothing, nothing, nothing, nothing > 0)
