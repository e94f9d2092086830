"""The verdict of `what-if`: whether any setting is needed, and the best one of each kind with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..api.selection import LOG_LENGTH, warnings_of
from ..specs.correction import Spec
from ..specs.explain import step_of_criterion, steps_of_weight
from .doctor.diagnosis import is_healthy
from .what_if import Setting, SettingResult, WhatIf

# Settings that are named, and the part of the best one's worth that each of them has at least.
MOST, LEAST = 5, 0.5
# Settings whose worth differs by less are one answer: the simplest of them, and a name before a grid point.
EQUAL = 0.01
# Standard errors between kept and rejected sequences that chance hardly makes.
SELECTED_ERRORS = 4.0
# The largest batch, in multiples of the given one, for which a setting is said to pay.
MOST_LARGER = 1024


@dataclass(frozen=True)
class BestSetting:
    """A setting that is the best of its kind."""

    setting: Setting
    worth: float  # the share of a sample without mismatch that gives the same error: 1 / (1 + variance + N bias^2)
    does: str  # the setting in words, as `Spec.explain` has them
    reason: str  # its result in words
    alike: tuple[str, ...]  # further settings with the same result on this dump


@dataclass(frozen=True)
class Verdict:
    """The verdict on a dump, before any setting is named."""

    # "broken": the doctor finds an error; "healthy": no correction is needed; "equal": no setting is better than
    # none; "better": one is.
    state: Literal["broken", "healthy", "equal", "better"]
    title: str  # the verdict in a line
    sentences: tuple[str, ...]  # why, and what to do
    best: list[BestSetting]  # the best setting of each kind, the best first
    results: list[SettingResult]  # those of all settings
    sequences: float  # number of sequences of a batch, for which variance counts


def verdict_of(tried: WhatIf, sequences: float | None = None) -> Verdict:
    """Judge a dump: its doctor's error first, then whether any setting is worth more than no correction.

    Args:
        tried: The settings over the dump.
        sequences: Number of sequences of a batch; None: as many as the dump has.
    """
    results, count = tried.results(), tried.sequences if sequences is None else sequences
    best, findings = best_settings(results, count), tried.findings()

    def verdict(state: Literal["broken", "healthy", "equal", "better"], title: str, *sentences: str) -> Verdict:
        return Verdict(state, title, sentences, best, results, count)

    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
        return verdict(
            "broken",
            f"error: {errors[0].title} [{errors[0].name}]{more}",
            f"No setting repairs this: {errors[0].advice}",
            "The ranking below is of broken data. Repair it, dump again, and ask again.",
        )
    without = next((one for one in results if one.setting.spec == Spec()), None)
    none = 0.0 if without is None else without.worth(count)
    gain = (best[0].worth if best else 0.0) - none
    keep = f"Nothing here is worth more than no correction by {_percent(EQUAL)} or more; keep the setting you have."
    if is_healthy(findings) and not tried.measured.mismatch_warnings():
        why = "The doctor finds nothing, and every metric is in its healthy range."
        return verdict("healthy", "no correction needed", why, *[keep] * (gain < EQUAL))
    warnings = [f"{finding.severity}: {finding.title} [{finding.name}]" for finding in findings[:1]]
    if gain < EQUAL:
        title = "no setting is better than no correction"
        return verdict("equal", title, *warnings, keep, *_pays_from(without, results, count))
    gained = f"The batch is worth {_percent(best[0].worth)} of an exact one with it, and {_percent(none)} without."
    return verdict("better", f"best here: {best[0].setting.name}", *warnings, gained)


def _pays_from(without: SettingResult | None, results: Sequence[SettingResult], count: float) -> list[str]:
    """Say for how large a batch a setting is worth more than none, where the bias that it takes away is sure."""
    larger = 2.0 * count
    while without is not None and without.bias_low > 0.0 and larger <= MOST_LARGER * count:
        best = best_settings(results, larger)[0]
        if best.worth - without.worth(larger) >= EQUAL:
            return [
                f"From about {larger:,.0f} sequences in a batch {best.setting.name} pays: variance averages out over "
                "them, and bias does not."
            ]
        larger *= 2.0
    return []


def best_settings(results: Iterable[SettingResult], sequences: float) -> list[BestSetting]:
    """Return the best setting of each kind of correction, by what a batch of so many sequences is worth under it.

    Bias does not average out and variance does, so the error is bias^2 + (1 + variance) / N. Settings whose products
    mean nothing on these sequences are left out, and one without effect stands for the others like it.

    Args:
        results: Those of the settings.
        sequences: N, the number of sequences of a batch.
    """
    usable = [one for one in results if math.isfinite(one.variance) and not one.too_long and one.tokens_kept > 0.0]
    by_kind: dict[object, list[SettingResult]] = {}
    for one in usable:
        by_kind.setdefault(_kind(one.setting.spec), []).append(one)
    chosen = [_simplest_of(kind, sequences) for kind in by_kind.values()]
    chosen.sort(key=lambda one: -one.worth(sequences))
    chosen = [one for one in chosen if one.worth(sequences) >= LEAST * chosen[0].worth(sequences)]
    # The simplest of those that have one result stands for them.
    found: dict[tuple[str, ...], SettingResult] = {}
    while chosen:
        one = _simplest_of(chosen, sequences)
        chosen.remove(one)
        found.setdefault(_shown(one), one)
    return [
        BestSetting(
            setting=one.setting,
            worth=one.worth(sequences),
            does=_does(one.setting.spec),
            reason=_reason(one),
            alike=tuple(other.setting.name for other in usable if other is not one and _shown(other) == shown),
        )
        for shown, one in list(found.items())[:MOST]
    ]


def _simplest_of(results: list[SettingResult], sequences: float) -> SettingResult:
    """Return the simplest of those that are worth as much as the best."""
    most = max(one.worth(sequences) for one in results)

    def order(one: SettingResult) -> tuple[int, bool, float]:
        spec = one.setting.spec
        return (spec.weight is not None) + len(spec.criteria), bool(one.setting.family), -one.worth(sequences)

    return min((one for one in results if one.worth(sequences) > most - EQUAL), key=order)


def _kind(spec: Spec) -> object:
    """Return what settings share that differ in their bounds, or in the statistic that rejects."""
    weight = spec.weight
    return (
        None if weight is None else (weight.kind, weight.outside if weight.bounded else "", weight.normalize),
        frozenset((c.over, c.reduce) for c in spec.criteria),
    )


def _shown(result: SettingResult) -> tuple[str, ...]:
    """Return the numbers of a result as they are shown."""
    values = (result.tokens_kept, result.sequences_kept, result.bias, result.variance)
    return tuple(f"{value:.3g}" if value > 1e-4 else "0" for value in values)


def _reason(result: SettingResult) -> str:
    """Say what a setting rejects, which bias remains, and which information is lost."""
    rejects = "Rejects nothing here"
    if result.tokens_kept < 1.0:
        rejects = f"Rejects {_percent(1.0 - result.tokens_kept)} of the tokens"
        if result.sequences_kept < 1.0:
            rejects += f" and {_percent(1.0 - result.sequences_kept)} of the sequences"
        # In what kept and rejected sequences differ by more than chance.
        apart = [
            f"{one.name} {one.kept:.3g} and {one.rejected:.3g}"
            for one in result.selected
            if abs(one.errors) > SELECTED_ERRORS and one.name != LOG_LENGTH
        ]
        rejects += f" (means of kept and rejected: {', '.join(apart)})" if apart else ""
    off, left = "no bias remains", "no information is lost to uneven weights"
    if result.bias_high >= 1e-4:
        interval = f"{_percent(result.bias_low)} to {_percent(result.bias_high)}"
        off = f"a weighted mean is off by {_percent(result.bias)} ({interval}) of a standard deviation"
    if result.ess <= 0.9995:
        left = f"the effective sample is {_percent(result.ess)} of the tokens"
    return ". ".join([f"{rejects}; {off}; {left}", *(f"Watch: {text}" for text in warnings_of(result.selected))]) + "."


def _percent(share: float) -> str:
    if 0.0 < share < 0.001:
        return "< 0.1 %"
    return f"{100.0 * share:.2g} %" if share < 0.095 else f"{100.0 * share:.3g} %"


def _does(spec: Spec) -> str:
    """Describe a correction: its weight, then its criteria."""
    weight = spec.weight
    steps = ["No weights."]
    if weight is not None:
        steps = steps_of_weight(weight, spec.clamp, spec.sums_over, spec.nonfinite)
    return " ".join([*steps, *(step_of_criterion(criterion, spec.sums_over) for criterion in spec.criteria)])
