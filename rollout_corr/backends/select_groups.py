"""Bounds that each group of sequences decides by its own values: the search of select.py, for all groups at once.

A table has a row of digits for each group. The more groups there are, the narrower are the digits, so that a table
stays small and a bound takes more rounds. Nothing is sorted and no value is read, and tables add up over blocks,
micro-batches and ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends.select import (
    CHUNK,
    FLOATS,
    GRID,
    INTEGERS,
    Values,
    as_int32,
    digit_of,
    from_keys,
    values_of,
)
from rollout_corr.definition.bounds_of_batch import SIGN
from rollout_corr.spec.bounds_of_batch import Before, Counting, Side

# Bits of the counts in a row of a table, for all groups together, as far as digits are not too narrow.
WIDEST, NARROWEST, OF_TABLE = 11, 2, 19


class GroupSearch(NamedTuple):
    """The search for the bounds of groups by a `Counting` rule between two rounds; each tensor is [groups].

    Attributes:
        rule: The rule.
        side: The side that it bounds.
        dtype: Of the values.
        groups: The number of groups.
        local: All of a group lies in this call, so that no rank has to add anything.
        round: Rounds that are over.
        prefix: int64: the digits found.
        total: int64: how many values there are; known after the first round.
        before: int64: values before those with these digits.
        whole, fraction: int64: the sum of their amounts.
        open: bool: the rule went on to the end.
    """

    rule: Counting
    side: Side
    dtype: torch.dtype
    groups: int
    local: bool
    round: int
    prefix: Tensor
    total: Tensor
    before: Tensor
    whole: Tensor
    fraction: Tensor
    open: Tensor

    def digits(self) -> tuple[int, ...]:
        """Bits of the digits, from the highest."""
        return digits_of(self.dtype, self.groups)

    def scales(self) -> Tensor | None:
        """None: amounts are added up in units of the rule."""
        return None

    def rounds(self) -> int:
        """The number of rounds until the bounds are found."""
        return len(self.digits())

    def values(self, x: Tensor, tested: Tensor | None, groups: Tensor | None, look: bool) -> Values:
        """Make ready to count; arguments as of `values_of`, and the group of each value."""
        assert groups is not None
        keys, counted, _ = values_of(self.side, x, tested, look)
        groups = groups.expand(x.shape).reshape(-1)
        if not (look and _all_below(groups, self.groups)):
            some = groups < self.groups
            counted = some if counted is None else counted & some
        return Values(keys, counted, groups)

    def left(self, values: Values) -> Values:
        """The values with the digits found, and no others: for the CPU, since how many there are decides the shape."""
        counted = values.counted
        if self.round:
            same = self._follow(values)
            counted = same if counted is None else counted & same
        if counted is None:
            return values
        return Values(values.keys[counted], None, _groups_of(values)[counted])

    def table(self, values: Values) -> Tensor:
        """[1 or 3, groups, digits] int64: counts, whole parts and fractions of amounts, of values with the prefix."""
        bits, _ = digit_of(self.digits(), self.round)
        columns, sums = self.groups << bits, self.rule.amount(self.prefix.new_zeros(0, dtype=self.dtype)) is not None
        rows = torch.zeros(3 if sums else 1, columns + 1, dtype=torch.int64, device=values.keys.device)
        if values.counted is not None:
            self._add(values, rows)
        else:
            for keys, groups in zip(values.keys.split(CHUNK), _groups_of(values).split(CHUNK), strict=True):
                self._add(Values(keys, None, groups), rows)
        return rows[:, :columns].view(rows.shape[0], self.groups, 1 << bits)

    def _add(self, values: Values, rows: Tensor) -> None:
        """Count values in the rows of a table, the last column of which is of those that take no part."""
        bits, shift = digit_of(self.digits(), self.round)
        index = (_groups_of(values) << bits) | ((values.keys >> shift) & ((1 << bits) - 1))
        if values.counted is not None:
            counted = values.counted & self._follow(values) if self.round else values.counted
            index = torch.where(counted, index, self.groups << bits)
        rows[0].index_add_(0, index, torch.ones_like(index))
        amounts = self.rule.amount(from_keys(self.side, values.keys))
        if amounts is not None:
            floor = amounts.floor()
            # The amount of a value that takes no part may be NaN.
            parts = [part.nan_to_num(0.0).long() for part in (floor, ((amounts - floor) * GRID).round())]
            for row, part in zip(rows[1:], parts, strict=True):
                row.index_add_(0, index, part)

    def narrowed(self, table: Tensor) -> GroupSearch:
        """The search after a round, from the sum of all its tables."""
        bits, _ = digit_of(self.digits(), self.round)
        total = self.total if self.round else table[0].sum(1)
        kept = self.before[:, None] + table[0].cumsum(1)
        whole = fraction = amount = None
        if table.shape[0] > 1:
            whole = self.whole[:, None] + table[1].cumsum(1)
            fraction = self.fraction[:, None] + table[2].cumsum(1)
            amount = whole + fraction // GRID
        # Before the first value every rule goes on.
        goes_on = (kept == 0) | self.rule.goes_on(Before(kept, amount, total[:, None]), self.side)
        place = goes_on.sum(1)
        is_open = self.open if self.round else place == table.shape[2]
        digit = place.clamp(max=table.shape[2] - 1)
        last = (digit - 1).clamp(min=0)[:, None]

        def up_to(running: Tensor | None, start: Tensor) -> Tensor:
            return start if running is None else torch.where(digit > 0, running.gather(1, last)[:, 0], start)

        return self._replace(
            round=self.round + 1,
            prefix=(self.prefix << bits) | digit,
            total=total,
            before=up_to(kept, self.before),
            whole=up_to(whole, self.whole),
            fraction=up_to(fraction, self.fraction),
            open=is_open,
        )

    def bound(self) -> Tensor:
        """The bounds after the last round, [groups + 1] in the dtype of the values.

        Infinite where a side is open, as that of no group is, and NaN of a group without a value.
        """
        kind, end = INTEGERS[self.dtype], SIGN[self.side] * math.inf
        keys = self.prefix if kind == torch.int64 else as_int32(self.prefix)
        found = from_keys(self.side, keys)
        if not self.rule.KEEPS_LAST:
            found = torch.where(self.before > 0, found.nextafter(found.new_full((), -end)), found)
        found = torch.where(self.total > 0, torch.where(self.open, end, found), math.nan)
        return torch.cat([found, found.new_full((1,), end)])

    def _follow(self, values: Values) -> Tensor:
        """Bool per value: it begins with the digits of its group."""
        digits = self.digits()
        below = sum(digits[self.round :])
        # An arithmetic shift fills with the sign.
        begins = (values.keys >> below) & ((1 << (sum(digits) - below)) - 1)
        prefix = torch.cat([self.prefix, self.prefix.new_full((1,), -1)])
        return begins == prefix[_groups_of(values)]


def _groups_of(values: Values) -> Tensor:
    assert values.groups is not None
    return values.groups


def _all_below(groups: Tensor, count: int) -> bool:
    """Tell whether every value is of a group, by a maximum, in a fraction of the time of choosing those that are."""
    return not groups.numel() or int(groups.max().item()) < count


def digits_of(dtype: torch.dtype, count: int) -> tuple[int, ...]:
    """Bits of the digits, from the highest, for so many groups."""
    bits = 8 * dtype.itemsize
    widest = min(WIDEST, max(NARROWEST, OF_TABLE - max(count - 1, 0).bit_length()))
    whole, rest = divmod(bits, widest)
    return (widest,) * whole + ((rest,) if rest else ())


def begin(rule: Counting, side: Side, dtype: torch.dtype, device: torch.device, count: int, local: bool) -> GroupSearch:
    """A search before its first round; arguments as of `GroupSearch`."""
    assert dtype in FLOATS.values()
    nothing = torch.zeros(count, dtype=torch.int64, device=device)
    return GroupSearch(
        rule, side, dtype, count, local, 0, nothing, nothing, nothing, nothing, nothing, nothing > 0
    )  # fmt: skip
