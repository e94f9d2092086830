"""Registration of specs and recipes by name, and parts of Specs that several frameworks have.

A registered spec is called a preset here. Each knows what builds it, and the framework's version that it matches.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ...specs.choices import Drop, Of, Reduce, Unit, WeightReduce
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from .settings import Given, default_of, same_kind

# A framework's level of a ratio: the `over` and `reduce` of the weight that it is, and of the criterion that tests it.
LEVELS: dict[str, tuple[Unit, WeightReduce | None]] = {
    "token": ("token", None),
    "sequence": ("sequence", "sum"),
    "geometric": ("sequence", "mean"),
}


@dataclass(frozen=True)
class Preset:
    """A registered preset, which `make` builds from its settings, by position."""

    name: str
    about: str  # its formula
    make: Callable[..., Spec]
    table: Mapping[str, Any]  # its settings and their defaults: a number by default takes numbers, None those too
    matches: str  # the version of the framework whose numbers it gives

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings, with their defaults."""
        return {name: default_of(row) for name, row in self.table.items()}

    def build(self, /, **given: object) -> Spec:
        """Make the Spec; the preset and its settings are named in errors."""
        try:
            return self.of(keywords_in(self.name, self.table, given))
        except (TypeError, ValueError) as error:
            said = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise same_kind(error, f"spec {self.name}({said}): {error}") from error

    def of(self, given: Mapping[str, Any]) -> Spec:
        """Make the Spec from settings, among which are all of its own."""
        return self.make(*[given[name] for name in self.table])


def keywords_in(name: str, table: Mapping[str, Any], given: Mapping[str, object]) -> Given:
    """Return keywords as settings of a table; an unknown one is a TypeError."""
    wrong = next((key for key in given if key not in table), None)
    if wrong is not None:
        close = difflib.get_close_matches(wrong, table, n=1)
        raise TypeError(
            f"{name.partition('.')[2]}() got an unexpected keyword argument {wrong!r}; it takes "
            f"{[*table] or 'none'}{f', did you mean {close[0]}=?' if close else ''}"
        )
    return Given(table, given)


# Filled when the module of a framework is imported; `lookup` imports the one that a name asks for.
PRESETS: dict[str, Preset] = {}
# By framework: names that it had once, and what to write instead.
RENAMED: dict[str, Mapping[str, str]] = {}


class _SpecAndLoss(NamedTuple):
    """The two values that a recipe unpacks to: its correction and its loss."""

    spec: Spec | None
    loss: Loss


class Recipe(_SpecAndLoss):
    """The whole loss of a framework's training step; `spec, loss = rc.recipe(name)` unpacks it.

    Attributes:
        spec: The correction; None: there is none.
        loss: The loss that it feeds.
        batch: Further fields that the caller's `Batch` must have, by name, such as "turns" or "groups"; mostly none.
            They are no part of a comparison.
    """

    batch: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, spec: Spec | None, loss: Loss, batch: Mapping[str, Any] | None = None) -> Recipe:
        """Make a pair that knows what it asks of the batch."""
        made = super().__new__(cls, spec, loss)
        if batch:
            made.batch = dict(batch)
        return made


class RecipeEntry(NamedTuple):
    """A registered recipe: what makes it, its settings and their defaults, the log-probs that it needs, a remark."""

    name: str
    make: Callable[[Given], Recipe]
    table: Mapping[str, Any]
    needs: tuple[str, ...]
    note: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings, with their defaults."""
        return {name: default_of(row) for name, row in self.table.items()}

    def build(self, /, **given: object) -> Recipe:
        """Make the recipe; an error names the setting."""
        settings = keywords_in(self.name, self.table, given)
        try:
            # A wrong type is a mistake also where the loss does not use the setting.
            _ = [settings[name] for name in given]
            return self.make(settings)
        except (TypeError, ValueError) as error:
            raise settings.blamed(error) from error


# Filled when the module of a framework is imported, as the presets are.
RECIPES: dict[str, RecipeEntry] = {}


# A preset's formula, what makes it from its settings, and these; and the version that it matches, if another.
Row = tuple[str, Callable[..., Spec], Mapping[str, Any]] | tuple[str, Callable[..., Spec], Mapping[str, Any], str]


def presets(framework: str, matches: str) -> Callable[..., None]:
    """Return what registers rows of presets by their names, behind the framework's; `matches` is its version."""

    def register(**rows: Row) -> None:
        for name, (about, make, table, *version) in rows.items():
            found = Preset(f"{framework}.{name}", about, make, table, version[0] if version else matches)
            PRESETS[found.name] = found

    return register


def registered(framework: str) -> list[Preset]:
    """The presets that a framework's module has registered so far."""
    return [found for found in PRESETS.values() if found.name.partition(".")[0] == framework]


# --- what can be written ---


class Mark:
    """A number of a Spec in a table `WRITTEN`, whose setting is tried with another one: see writing.py."""

    def __init__(self, trial: float) -> None:
        self.trial = trial


# A number that is tried below 1, and one that is tried above.
LOW, HIGH = Mark(0.5), Mark(2.0)
# What a framework's `WRITTEN` is: one alternative of each tuple is taken; a tuple in it stands for each of its values.
Alternatives = tuple[tuple[Mapping[str, Any], ...], ...]


# --- parts of Specs ---


def level_of(
    part: Weight | Criterion, levels: Mapping[str, tuple[Unit, Reduce | WeightReduce | None]] = LEVELS
) -> str | None:
    """The framework's name of the ratio that weighs or is tested; None: it has none."""
    return next((name for name, level in levels.items() if level == (part.over, part.reduce)), None)


def gated(criterion: Criterion) -> Spec:
    """Weigh each token by its ratio, and by 0 where it fails a criterion (IcePop and its kin)."""
    return Spec(weight=Weight.token(), criteria=(criterion,), rejected="zero")


def masked(*criteria: Criterion) -> Spec:
    """No weight, but 0 for a token that fails one of the criteria: masks of a loss with a ratio of its own."""
    return Spec(criteria=criteria, rejected="zero")


def truncated(upper: float | None, lower: float | None = None, token_clamp: float | None = None) -> Spec:
    """Weigh each token by its ratio, clamped to the bounds (TIS)."""
    return Spec(weight=Weight.token(lower=lower, upper=upper, token_clamp=token_clamp))


def off_policy(
    delta: float,
    of: Of = "new/rollout",
    drop: Drop = "unit",
    label: str = "off_policy",
) -> Criterion:
    """Reject a sequence with A < 0 whose mean of -D, of the policy being trained, exceeds delta (OPSM)."""
    return Criterion(
        "k1",
        over="sequence",
        reduce="mean",
        upper=delta,
        when="negative_advantage",
        drop=drop,
        of=of,
        label=label,
    )
