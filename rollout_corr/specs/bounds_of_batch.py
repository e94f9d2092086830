"""Lower and upper bounds, each a number, or a rule by which the batch decides it; rules.py has the rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from .checked import Checked
from .choices import GROWTH, STRETCHES, Growth, Stretch, Unit
from .validate import bounds, choice, positive, shown

Side = Literal["lower", "upper"]

# In errors, the class that has the bound; in metrics, the label of a weight's bounds.
Owner = Literal["Criterion", "Weight"]
WEIGHT = "weight"


class OfBatch(Checked):
    """Base of the bounds that the batch decides; `Counting` ones look at an order, `KeepESS` at all weights."""

    # The sides that it can bound, and of what.
    SIDES: ClassVar[tuple[Side, ...]] = ("lower", "upper")
    OWNERS: ClassVar[tuple[Owner, ...]] = ("Criterion", "Weight")

    @property
    def by_group(self) -> bool:
        """True if each group of sequences has a bound of its own."""
        return False

    @abstractmethod
    def words(self, side: Side) -> str:
        """The bound in the words of `Spec.explain`, behind "at most" or "at least"."""

    def check(self, owner: Owner, side: Side) -> None:
        """Refuse an owner or a side that the rule cannot bound."""
        kind = type(self).__name__
        if owner not in self.OWNERS:
            raise ValueError(f"{owner}.{side}: expected a number or another rule, got {self!r}, which bounds a "
                             f"{self.OWNERS[0]} alone")  # fmt: skip
        if owner == "Weight" and self.by_group:
            raise ValueError(f"{owner}.{side}: expected a number or a rule within='batch', got {self!r}, which bounds "
                             "a Criterion alone")  # fmt: skip
        if side not in self.SIDES:
            raise ValueError(f"{owner}.{side}: expected a number or a rule for this side, got {self!r}; write "
                             f"{self.SIDES[0]}={kind}(...)")  # fmt: skip

    def check_weight(self, weight: Any) -> None:
        """Refuse what a weight with this bound asks for else."""

    def to_dict(self) -> dict[str, Any]:
        """The rule by its name, and the fields that differ from their defaults."""
        return {"rule": type(self).__name__, **super().to_dict()}


class Bounded(Checked):
    """Base of what has a lower and an upper bound, each a number, a rule or None for an open side."""

    lower: float | OfBatch | None
    upper: float | OfBatch | None
    over: Unit
    within: Stretch
    growth: Growth | None
    token_clamp: float | None

    def _check_bounds(self, owner: Owner, fixed: str, **kind: bool) -> None:
        """Check the bounds, numbers of this kind as `validate.bounds` does, and what changes them.

        `fixed` is the argument that rules out bounds that the batch decides; empty: nothing does.
        """
        if self.growth is not None:
            choice(f"{owner}.growth", self.growth, GROWTH)
        choice(f"{owner}.within", self.within, STRETCHES)
        for name, default in (("growth", None), ("within", "sequence")):
            if self.over != "prefix" and getattr(self, name) != default:
                got = shown(getattr(self, name))
                raise ValueError(f"{owner}.{name}: expected {default!r} unless over='prefix', got {got}")
        low, high = bounds(owner, self.low, self.high, **kind)
        for side, rule in self.rules.items():
            rule.check(owner, side)
            if fixed:
                raise ValueError(f"{owner}.{side}: expected a number with {fixed}, got {rule!r}")
        self._set(lower=self.rules.get("lower", low), upper=self.rules.get("upper", high))
        if self.token_clamp is not None:
            self._set(token_clamp=positive(f"{owner}.token_clamp", self.token_clamp))

    @property
    def low(self) -> float | None:
        """`lower` where it is a number."""
        return None if isinstance(self.lower, OfBatch) else self.lower

    @property
    def high(self) -> float | None:
        """`upper` where it is a number."""
        return None if isinstance(self.upper, OfBatch) else self.upper

    @property
    def rules(self) -> dict[Side, OfBatch]:
        """The bounds that the batch decides."""
        sides: tuple[tuple[Side, float | OfBatch | None], ...] = (("lower", self.lower), ("upper", self.upper))
        return {side: bound for side, bound in sides if isinstance(bound, OfBatch)}


class Place(NamedTuple):
    """A bound of a Spec: the label of its criterion, or WEIGHT, and its side."""

    label: str
    side: Side


def by_group(rules: Mapping[Side, OfBatch]) -> bool:
    """True if each group of sequences decides one of these bounds for itself."""
    return any(rule.by_group for rule in rules.values())


def check_labels(labels: Sequence[str], of_weight: Mapping[Side, OfBatch]) -> None:
    """Refuse the label of a criterion that the bounds of the weight have as metrics."""
    if WEIGHT in labels and of_weight:
        raise ValueError(
            f"Criterion.label: expected another label than {WEIGHT!r} with a weight whose bounds the batch decides, "
            "because they are metrics by that name"
        )


def in_words(bound: float | OfBatch | None, side: Side) -> str:
    """Describe a bound: its number, or its rule in words."""
    return bound.words(side) if isinstance(bound, OfBatch) else f"{bound:g}"
