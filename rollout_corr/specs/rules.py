"""Bounds that the batch decides: each a rule that chooses a bound when all values of the batch are known.

Values are put in order from the end that a bound keeps: ascending for `upper`, descending for `lower`. A rule looks at
the values before a place of this order and says whether the bound may lie further on. Equal values share their fate.
`definition/bounds_of_batch.py` says what that means.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from .bounds_of_batch import OfBatch, Owner, Side
from .checked import arguments_of, keywords_meant
from .validate import choice, number, positive, shown

# The values that decide a bound: all of the batch, or of each group of sequences.
Within = Literal["batch", "group"]
WITHIN: tuple[Within, ...] = ("batch", "group")

# What a rule adds up of a value is saturated: 2^25 of them fit into int64.
LARGEST_AMOUNT = 2.0**37
# Values are counted in int64.
LARGEST_COUNT = 2**63 - 1
# A sample size is rounded, so that equal weights may seem to have one a little below 1.
LARGEST_FLOOR = 0.999999


class Before(NamedTuple):
    """The values up to and with a place in the order, at every place that is looked at."""

    kept: Tensor  # int64, how many there are
    amount: Tensor | None  # int64, the sum of their `Counting.amount`, rounded down; None where the rule has none
    all: Tensor  # int64, broadcasts: how many values there are altogether


class Counting(OfBatch):
    """Base of the rules that stop at a place in the order of the values."""

    # The value at which a rule stops is kept. Where it is not, the first value of all is kept nevertheless.
    KEEPS_LAST: ClassVar[bool] = True

    @abstractmethod
    def goes_on(self, before: Before, side: Side) -> Tensor:
        """Bool per place: the bound lies beyond it. True up to some place, and False from there on."""

    def amount(self, x: Tensor) -> Tensor | None:
        """A number of each value that the rule adds up, in float64; None where counting is enough."""
        return None


class Grouped(Counting):
    """Base of the rules that each group of sequences can follow by itself."""

    within: Within

    @property
    def by_group(self) -> bool:
        return self.within == "group"


@keywords_meant(quantile="q=", share="q=", p="q=")
@dataclass(frozen=True, repr=False)
class Quantile(Grouped):
    """The value that at most a share of the batch lies beyond.

    As `upper` it is the smallest value with at least a share of `q` of the values at or below it; as `lower` the
    largest with at most a share of `q` below it.

    Args:
        q: The quantile, above 0 and below 1.
        within: The "batch" decides one bound, or for a criterion each "group" of sequences its own.
    """

    q: float
    within: Within = "batch"

    def __post_init__(self) -> None:
        choice("Quantile.within", self.within, WITHIN)
        self._set(q=_share("Quantile.q", self.q))

    def goes_on(self, before: Before, side: Side) -> Tensor:
        """As long as too few are kept. Quotients are compared: 7 / 100 is the float 0.07, 0.07 * 100 is above 7."""
        if side == "upper":
            return before.kept / before.all.double() < self.q
        return (before.all - before.kept) / before.all.double() > self.q

    def words(self, side: Side) -> str:
        return f"the quantile {self.q:g} of {_whose(self)}"


@dataclass(frozen=True, repr=False)
class _Ends(Grouped):
    """So many values, or such a share of them, from one end."""

    count: int | None = None
    share: float | None = None
    within: Within = "batch"

    def __post_init__(self) -> None:
        name = type(self).__name__
        choice(f"{name}.within", self.within, WITHIN)
        if (self.count is None) == (self.share is None):
            raise ValueError(f"{name}: expected count or share, got count={self.count!r}, share={self.share!r}")
        if self.share is not None:
            self._set(share=_share(f"{name}.share", self.share))
        elif isinstance(self.count, bool) or not isinstance(self.count, int):
            raise TypeError(f"{name}.count: expected a whole number, got {type(self.count).__name__} "
                            f"{shown(self.count)}")  # fmt: skip
        elif not 1 <= self.count <= LARGEST_COUNT:
            limit = "" if self.count < 1 else f" and <= {LARGEST_COUNT}"
            raise ValueError(f"{name}.count: expected a number >= 1{limit}, got {shown(self.count)}")

    def goes_on(self, before: Before, side: Side) -> Tensor:
        if self.share is not None:
            return before.kept / before.all.double() < self.share
        assert self.count is not None
        return before.kept < self.count

    def words(self, side: Side) -> str:
        end = "smallest" if side == "upper" else "largest"
        if self.share is not None:
            return f"the {end} value that a share of {self.share:g} of {_whose(self)} reaches"
        return f"number {self.count} from the {end} value of {_whose(self)}"


@keywords_meant(k="count=", n="count=", q="share=", fraction="share=")
@dataclass(frozen=True, repr=False)
class Bottom(_Ends):
    """Keep the smallest values, as `upper`: a number of them, and all that equal the last of these.

    Args:
        count: How many, at least 1; where there are fewer values all are kept.
        share: Or a share of all values, above 0 and below 1.
        within: The "batch" decides one bound, or for a criterion each "group" of sequences its own.
    """

    SIDES: ClassVar[tuple[Side, ...]] = ("upper",)


@keywords_meant(k="count=", n="count=", q="share=", fraction="share=")
@dataclass(frozen=True, repr=False)
class TopK(_Ends):
    """Keep the largest values, as `lower`: a number of them, and all that equal the last of these.

    Args:
        count: How many, at least 1; where there are fewer values all are kept.
        share: Or a share of all values, above 0 and below 1.
        within: The "batch" decides one bound, or for a criterion each "group" of sequences its own.
    """

    SIDES: ClassVar[tuple[Side, ...]] = ("lower",)


@keywords_meant(threshold="below=", mean="below=")
@dataclass(frozen=True, repr=False)
class MeanBelow(Grouped):
    """A bound for the mean, for `upper`: drops the largest values until the mean of the rest is below a number (M2PO).

    Values that are equal are dropped together. The smallest value is kept even if it is not below.

    Args:
        below: The mean of what is kept is below it; above 0.
        within: The "batch" decides one bound, or each "group" of sequences its own.
    """

    below: float
    within: Within = "batch"

    SIDES: ClassVar[tuple[Side, ...]] = ("upper",)
    OWNERS: ClassVar[tuple[Owner, ...]] = ("Criterion",)
    KEEPS_LAST: ClassVar[bool] = False

    def __post_init__(self) -> None:
        choice("MeanBelow.within", self.within, WITHIN)
        self._set(below=positive("MeanBelow.below", self.below))

    def goes_on(self, before: Before, side: Side) -> Tensor:
        """As long as the mean in units of `below` is less than 1: a sum is below a count where its floor is."""
        assert before.amount is not None
        return before.amount < before.kept

    def amount(self, x: Tensor) -> Tensor | None:
        """The value in units of `below`."""
        return (x.double() / self.below).clamp(-LARGEST_AMOUNT, LARGEST_AMOUNT)

    def words(self, side: Side) -> str:
        whose = " of its group" if self.by_group else ""
        return f"so small that the mean of what is kept{whose} is below {self.below:g}"


@keywords_meant(ess="floor=", share="floor=", above="floor=")
@dataclass(frozen=True, repr=False)
class KeepESS(OfBatch):
    """The loosest upper bound of a weight at which the effective sample size stays at or above a floor.

    The effective sample size is (sum of w)^2 / (n sum of w^2) over all n weights that the bound is for, clamped at it.
    It can only fall as the bound rises, so there is one such bound.

    Args:
        floor: A fraction of the batch, above 0 and at most 0.999999: beyond that rounding decides, not the batch.
    """

    floor: float

    SIDES: ClassVar[tuple[Side, ...]] = ("upper",)
    OWNERS: ClassVar[tuple[Owner, ...]] = ("Weight",)

    def __post_init__(self) -> None:
        self._set(floor=positive("KeepESS.floor", self.floor, LARGEST_FLOOR))

    def check_weight(self, weight: Any) -> None:
        """Refuse a weight whose sample size may rise with the bound."""
        if weight.outside == "zero":
            raise ValueError(
                f"Weight.upper: expected outside='clamp' with {self!r}, got 'zero': where weights above the "
                "bound become 0 the effective sample size may rise and fall with it"
            )
        if "lower" in weight.rules:
            raise ValueError(f"Weight.lower: expected a number or None with upper={self!r}, got {weight.lower!r}")

    def reached(self, first: Tensor, second: Tensor, n: Tensor) -> Tensor:
        """Bool: n weights have that sample size, from their sum and the sum of their squares, in float64."""
        return first * first >= self.floor * n * second

    def words(self, side: Side) -> str:
        return f"the loosest bound at which the effective sample size is still {self.floor:g} of the batch"


RULES: dict[str, type[OfBatch]] = {kind.__name__: kind for kind in (Quantile, Bottom, TopK, MeanBelow, KeepESS)}


def _whose(rule: OfBatch) -> str:
    return "its group" if rule.by_group else "the batch"


def _share(name: str, value: object) -> float:
    share = number(name, value)
    if not 0.0 < share < 1.0:
        raise ValueError(f"{name}: expected a number above 0 and below 1, got {share!r}")
    return share


def with_rules(arguments: dict[str, Any], owner: str) -> dict[str, Any]:
    """The arguments of a criterion or a weight, with the rules that stand in them as plain data."""
    sides = [side for side in ("lower", "upper") if side in arguments]
    return arguments | {side: _read(f"{owner}.{side}", arguments[side]) for side in sides}


def _read(name: str, bound: Any) -> Any:
    """A rule from plain data, {"rule": "Quantile", "q": 0.99}; anything else as it came."""
    if not isinstance(bound, dict):
        return bound
    fields = dict(bound)
    rule = fields.pop("rule", None)
    kind = RULES.get(rule) if isinstance(rule, str) else None
    if kind is None:
        raise ValueError(f"{name}: expected a number or the key 'rule' with one of {list(RULES)}, got {shown(bound)}")
    return kind(**arguments_of(kind, fields, f"{name} ({rule})"))
