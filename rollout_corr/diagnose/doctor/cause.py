"""A cause of mismatch, the signs that it is recognized by, and the finding that the user reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from ...metrics.limits import BY_KEY
from ..measure.measurement import Measurement

# error: certainly a bug; warning: worth a look, and fails a gate; note: worth knowing.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Metrics = dict[str, float]

# k3 of a healthy engine stays below this.
HEALTHY_K3 = BY_KEY["kl_rollout_train_k3"].watch
# Two engines, or old and new weights, that differ in a healthy run are worth a warning beyond this k3, else a note.
MATTERS_K3 = 0.1 * HEALTHY_K3

# A group of tokens is suspect if its mean |D| is TIMES that of equally likely tokens and at least MATTERS nats.
TIMES, MATTERS = 2.0, 5e-3


@dataclass(frozen=True)
class Signs:
    """The signs of a cause in a dump.

    Attributes:
        title: The cause in one line.
        evidence: The numbers behind it, in sentences.
        numbers: These numbers by name.
        strength: How much of the dump shows it, 0 to 1.
        severity: Replaces the severity of the cause.
        beside: Causes that it usually hides but does not explain here, so both are reported.
        advice: Replaces the advice of the cause.
    """

    title: str
    evidence: tuple[str, ...]
    numbers: dict[str, float]
    strength: float
    severity: Severity | None = None
    beside: tuple[str, ...] = ()
    advice: str | None = None


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


@dataclass(frozen=True)
class Cause:
    """A cause of mismatch that the doctor knows.

    Attributes:
        name: Short, for gates.
        severity: How bad it is, unless its signs say otherwise.
        looks_for: What a dump with it shows; docs/mismatch.md has the same words.
        advice: What to do about it.
        hides: Names of later causes that are only consequences of this one, and so not reported with it.
        recognize: Returns the signs of the cause in what was measured, or None.
    """

    name: str
    severity: Severity
    looks_for: str
    advice: str
    hides: Sequence[str]
    recognize: Callable[[Measurement, Metrics], Signs | None]

    def find(self, measured: Measurement, metrics: Metrics) -> tuple[Finding, frozenset[str]] | None:
        """Look for the cause; also return what it hides here. `metrics` are those of `measured`."""
        signs = self.recognize(measured, metrics)
        if signs is None:
            return None
        severity = signs.severity or self.severity
        finding = Finding(
            self.name,
            severity,
            signs.title,
            signs.evidence,
            signs.advice or self.advice,
            signs.strength,
            signs.numbers,
        )
        return finding, frozenset(self.hides) - frozenset(signs.beside)


def cause(
    severity: Severity,
    looks_for: str,
    advice: str,
    hides: Sequence[str] = (),
) -> Callable[[Callable[[Measurement, Metrics], Signs | None]], Cause]:
    """Turn a function that recognizes a cause into that `Cause`, named like the function."""

    def made(recognize: Callable[[Measurement, Metrics], Signs | None]) -> Cause:
        return Cause(recognize.__name__, severity, looks_for, advice, hides, recognize)

    return made


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
