"""A cause of mismatch, the signs that it is recognized by, and the finding that the user reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from ..measure.measurement import Measurement

# error: certainly a bug; warning: worth a look, and fails a gate; note: worth knowing.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Metrics = dict[str, float]

# Causes that others hide: policies that differ; with sequences of their own; with ratios that do not average to 1; and
# all that is computed from D, which means nothing where D itself is wrong.
POLICIES = ("different_policies", "long_products")
TAILS = ("outliers", *POLICIES)
SAMPLED = ("not_the_sampler", *TAILS)
OF_D = (
    *("wrong_weights", "renormalized", "temperature", "turn_starts", "sequence_starts", "penalties", "positions"),
    *SAMPLED,
)

# Views of a report that are no axes.
TRAIN, WORST, DISTRIBUTION = "train", "worst", "distribution"


@dataclass(frozen=True)
class Signs:
    """The signs of a cause in a dump."""

    title: str  # the cause in one line
    evidence: tuple[str, ...]  # the numbers behind it, in sentences
    numbers: dict[str, float]  # these numbers by name
    strength: float  # how much of the dump shows it, 0 to 1
    severity: Severity | None = None  # replaces the severity of the cause
    also: tuple[str, ...] = ()  # causes that it usually hides but does not explain here, so both are reported
    advice: str | None = None  # replaces the advice of the cause


@dataclass(frozen=True)
class Finding:
    """A cause of a mismatch that was recognized.

    Attributes:
        name: The name of the cause, such as "temperature"; conditions of `--fail-if` use it.
        severity: "error": certainly a bug; "warning": worth a look, and not healthy; "note": worth knowing.
        title: The cause in one line.
        evidence: The numbers behind it, in sentences.
        advice: What to do about it.
        strength: How much of the tokens shows it, 0 to 1; findings of one severity are ranked by it.
        numbers: The numbers of `evidence` by name, such as {"slope": -0.296, ...}.
    """

    name: str
    severity: Severity
    title: str
    evidence: tuple[str, ...]
    advice: str
    strength: float
    numbers: dict[str, float] = field(hash=False)


# Looks for a cause in what was measured, and in the metrics of that.
Recognize = Callable[[Measurement, Metrics], Signs | None]


@dataclass(frozen=True)
class Cause:
    """A cause of mismatch that the doctor knows."""

    severity: Severity  # how bad it is, unless its signs say otherwise
    advice: str  # what to do about it
    hides: Sequence[str]  # names of causes that are only consequences of this one, and so not reported with it
    views: Sequence[str]  # the views of a report that show it, the best first: names of axes, and those above
    asked: str  # the option that asks for it, where the numbers alone do not show it
    # Returns its signs, or None. It has the name of the cause, which conditions use, and says what a dump with it
    # shows, as docs/mismatch.md does.
    recognize: Recognize

    @property
    def name(self) -> str:
        """Its name, short."""
        return self.recognize.__name__


def cause(
    severity: Severity,
    advice: str,
    hides: Sequence[str] = (),
    views: Sequence[str] = (TRAIN,),
    asked: str = "",
) -> Callable[[Recognize], Cause]:
    """Turn a function that recognizes a cause into that `Cause`."""
    return partial(Cause, severity, advice, hides, views, asked)


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * share:.3g} %"


def counted(count: float, noun: str) -> str:
    """Format a count with its noun, in the plural where it has to be."""
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def among(count: float, total: float, pattern: str | None, noun: str = "sequence") -> str:
    """Say how many of all are meant, and guess at a rank where they lie as one does; empty where it is nearly all.

    Args:
        count: How many.
        total: Of how many.
        pattern: How they lie in the dump, as of `Places.pattern`; None: anywhere.
        noun: What is counted.
    """
    if count > 0.6 * total:
        return ""
    guess = f": one rank or replica of several? ({pattern})" if pattern else ""
    return f" in {percent(count / max(1.0, total))} of the {noun}s{guess}"
