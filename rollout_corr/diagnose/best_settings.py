"""The settings of `what-if` to look at first: the best one of each kind, with a reason in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..specs.bounds_of_batch import OfBatch, Side
from ..specs.bounds_of_batch import in_words as bound_in_words
from ..specs.correction import Criterion, Spec, Weight
from .what_if import Setting, SettingResult

Outcome = tuple[Setting, SettingResult]

# Settings that are named.
MOST = 5
# Errors within this part of one another are equal: the lesser variance decides, and a name before a grid point.
EQUAL = 0.02
# What a sequence's tokens are reduced to, in words.
VALUES = {
    ("ratio", "mean"): "geometric mean ratio",
    ("ratio", "sum"): "product of ratios",
    ("ratio", "min"): "smallest ratio",
    ("ratio", "max"): "largest ratio",
}


@dataclass(frozen=True)
class BestSetting:
    """A setting that is the best of its kind.

    Attributes:
        setting: The setting.
        outcome: Its result.
        error: bias^2 + (1 + variance) / sequences.
        does: The setting in words.
        reason: Its result in words.
        alike: Further settings with the same result on this dump.
    """

    setting: Setting
    outcome: SettingResult
    error: float
    does: str
    reason: str
    alike: tuple[str, ...]


def best_settings(outcomes: Iterable[Outcome], sequences: float) -> list[BestSetting]:
    """Return the best setting of each kind of correction, by the error of an average over the sequences of the dump.

    Bias does not average out and variance does, so the error is bias^2 + (1 + variance) / sequences. Settings whose
    products mean nothing on these sequences are left out, and one without effect stands for the others like it.

    Args:
        outcomes: Settings with their results.
        sequences: Number of the dump's sequences.
    """
    usable = [(s, o) for s, o in outcomes if math.isfinite(o.variance) and not o.note and o.tokens_kept > 0.0]
    by_kind: dict[object, list[Outcome]] = {}
    for setting, outcome in usable:
        by_kind.setdefault(_kind(setting.spec), []).append((setting, outcome))
    chosen = [_best_of(kind, sequences) for kind in by_kind.values()]
    # The simplest of those that have one result stands for them.
    chosen.sort(key=lambda one: (_error(one[1], sequences), len(one[0].spec.criteria), bool(one[0].family)))
    found: dict[tuple[str, ...], Outcome] = {}
    for setting, outcome in chosen:
        found.setdefault(_result(outcome), (setting, outcome))
    return [
        BestSetting(
            setting=setting,
            outcome=outcome,
            error=_error(outcome, sequences),
            does=in_words(setting.spec),
            reason=_reason(setting, outcome),
            alike=tuple(s.name for s, o in usable if s is not setting and _result(o) == _result(outcome)),
        )
        for setting, outcome in list(found.values())[:MOST]
    ]


def _error(outcome: SettingResult, sequences: float) -> float:
    return outcome.bias**2 + (1.0 + outcome.variance) / max(1.0, sequences)


def _kind(spec: Spec) -> object:
    """Return what settings share that differ in their bounds, or in the statistic that rejects."""
    weight = spec.weight
    return (
        None if weight is None else (weight.kind, weight.outside if weight.bounded else "", weight.normalize),
        frozenset((c.over, c.reduce) for c in spec.criteria),
    )


def _best_of(kind: list[Outcome], sequences: float) -> Outcome:
    least = min(_error(outcome, sequences) for _, outcome in kind)
    equal = [one for one in kind if _error(one[1], sequences) <= (1.0 + EQUAL) * least]
    return min(equal, key=lambda one: (bool(one[0].family), one[1].variance))


def _result(outcome: SettingResult) -> tuple[str, ...]:
    """Return the numbers of a result as they are shown."""
    values = (outcome.tokens_kept, outcome.sequences_kept, outcome.bias, outcome.variance)
    return tuple(f"{value:.3g}" if value > 1e-4 else "0" for value in values)


def _reason(setting: Setting, outcome: SettingResult) -> str:
    if outcome.tokens_kept == 1.0:
        rejects = "Rejects nothing here"
    else:
        rejects = f"Rejects {_percent(1.0 - outcome.tokens_kept)} of the tokens"
        if outcome.sequences_kept < 1.0:
            rejects += f" and {_percent(1.0 - outcome.sequences_kept)} of the sequences"
    off = (
        "weights are the exact ratios"
        if outcome.bias < 1e-4
        else f"{'a weight of 1' if setting.spec.weight is None else 'a weight'} is {_percent(outcome.bias)} away from "
        "its ratio on average"
    )
    left = (
        "no information is lost to uneven weights"
        if outcome.ess > 0.9995
        else f"the batch is worth {_percent(outcome.ess)} of its tokens"
    )
    return f"{rejects}; {off}; {left}."


def _percent(share: float) -> str:
    if 0.0 < share < 0.001:
        return "less than 0.1 %"
    return f"{100.0 * share:.3g} %"


def in_words(spec: Spec) -> str:
    """Describe a correction in a line: its weight, then its criteria."""
    parts = ["no weights" if spec.weight is None else _weight(spec.weight)]
    return "; ".join([*parts, *map(_criterion, spec.criteria)])


def _weight(weight: Weight) -> str:
    said = f"{weight.kind} weights"
    if weight.bounded and weight.outside == "zero":
        said += f", 0 {_outside(weight.lower, weight.upper)}"
    elif weight.bounded:
        said += f", cut to {_said(weight.lower, weight.upper, ('at least', 'at most'), ' and ', '')}"
    return said + (", divided by their mean" if weight.normalize is not None else "")


def _criterion(criterion: Criterion) -> str:
    value = VALUES.get((criterion.stat, criterion.reduce or ""))
    if value is None:
        value = f"{criterion.reduce} of {criterion.stat}" if criterion.reduce else criterion.stat
    units = "sequences" if criterion.over == "sequence" else "tokens"
    if criterion.over == "token" and criterion.drop == "sequence":
        units = "sequences with a token"
    when = "" if criterion.when == "any" else f" (only {criterion.when.replace('_', ' ')})"
    return f"rejects {units} whose {value} is {_outside(criterion.lower, criterion.upper)}{when}"


def _outside(lower: float | OfBatch | None, upper: float | OfBatch | None) -> str:
    return _said(lower, upper, ("below", "above"), " or ", "outside ")


def _said(
    lower: float | OfBatch | None, upper: float | OfBatch | None, words: tuple[str, str], join: str, both: str
) -> str:
    """Say two bounds: numbers as a range behind the word for both, others one by one."""
    if isinstance(lower, (float, int)) and isinstance(upper, (float, int)):
        return f"{both}{lower:.4g} to {upper:.4g}"
    sides: tuple[tuple[str, Side, float | OfBatch | None], ...] = (
        (words[0], "lower", lower),
        (words[1], "upper", upper),
    )
    return join.join(f"{word} {bound_in_words(bound, side)}" for word, side, bound in sides if bound is not None)
