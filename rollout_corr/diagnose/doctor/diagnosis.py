"""Name the causes of a mismatch: every known cause is looked for, and consequences of another one are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...frameworks.shared.checking import ConfigProblem
from ..measure.measurement import Measurement
from ..read.dump import Source
from . import differing, ill_labels, outlying, wrong_policies, wrong_values
from .cause import SEVERITIES, Cause, Finding, Metrics


def ordered(causes: Iterable[Cause]) -> dict[str, Cause]:
    """Put each cause behind all that hide it, and else in the order given.

    Raises:
        ValueError: Causes hide one another.
    """
    left, found = list(causes), dict[str, Cause]()
    while left:
        free = next((one for one in left if not any(one.name in other.hides for other in left)), None)
        if free is None:
            raise ValueError(f"causes that hide one another: {', '.join(one.name for one in left)}")
        left.remove(free)
        found[free.name] = free
    return found


# By name, in the order in which they are looked for.
CAUSES = ordered(
    one
    for module in (differing, ill_labels, wrong_values, wrong_policies, outlying)
    for one in vars(module).values()
    if isinstance(one, Cause)
)


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosed:
    """A source with its measurement and its findings: all that terminal, JSON and pages show."""

    source: Source
    measured: Measurement
    findings: tuple[Finding, ...]
    # In the configuration of the job.
    mistakes: tuple[ConfigProblem, ...] = ()


def diagnose(measured: Measurement, on_policy: bool = False) -> list[Finding]:
    """List the causes that are recognized, the gravest first; an empty list means healthy.

    Args:
        measured: The measurement of a dump.
        on_policy: `new_logp` and `train_logp` come from the same weights, so they have to be equal.
    """
    metrics = measured.metrics()
    findings: list[Finding] = []
    hidden: set[str] = set()
    for name, cause in CAUSES.items():
        if name in hidden or (cause.asked == "--on-policy" and not on_policy):
            continue
        signs = cause.recognize(measured, metrics)
        if signs is not None:
            severity, advice = signs.severity or cause.severity, signs.advice or cause.advice
            findings.append(Finding(name, severity, signs.title, signs.evidence, advice, signs.strength, signs.numbers))
            hidden |= {*cause.hides} - {*signs.also}
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.strength))


def views_of(finding: Finding) -> Sequence[str]:
    """Return the views of a report that show a finding: names of axes, and those of `cause`."""
    if finding.name == "label":
        # Its numbers are called column/label/what.
        return list(dict.fromkeys(key.rsplit("/", 2)[0] for key in finding.numbers))
    return CAUSES[finding.name].views


def first_views(findings: Sequence[Finding]) -> list[str]:
    """Return the views of all findings, those of the gravest first."""
    return list(dict.fromkeys(view for finding in findings for view in views_of(finding)))


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether nothing worse than a note was found."""
    return all(finding.severity == "note" for finding in findings)


def condition_values(metrics: Metrics, findings: Sequence[Finding], problems: int) -> Metrics:
    """Return the names that a condition may use: metrics, each cause as 0 or 1, `findings` and `problems`."""
    found = {finding.name for finding in findings}
    grave = sum(finding.severity != "note" for finding in findings)
    return (
        metrics
        | {name: float(name in found) for name in CAUSES}
        | {"findings": float(grave), "problems": float(problems)}
    )
