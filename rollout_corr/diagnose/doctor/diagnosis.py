"""Name the causes of a mismatch: every known cause is looked for, and consequences of another one are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...frameworks.shared.checking import ConfigProblem
from ..measure.measurement import Measurement
from ..read.dump import Source
from . import differing, ill_labels, outlying, wrong_policies, wrong_values
from .cause import SEVERITIES, Cause, Finding, Metrics

# A cause stands before those that it hides.
CAUSES: tuple[Cause, ...] = (
    wrong_values.empty,
    wrong_values.not_log_probs,
    wrong_values.nonfinite,
    wrong_values.filled,
    wrong_values.padding,
    wrong_values.shifted,
    wrong_values.swapped,
    wrong_values.reordered,
    wrong_values.scale,
    wrong_values.turn_starts,
    wrong_values.wrong_weights,
    wrong_values.sequence_starts,
    wrong_policies.renormalized,
    wrong_policies.temperature,
    wrong_policies.stale,
    wrong_policies.drift,
    wrong_policies.penalties,
    wrong_policies.positions,
    wrong_policies.engine_alone,
    wrong_policies.trainer_varies,
    outlying.outliers,
    wrong_policies.not_the_sampler,
    wrong_policies.raw_log_probs,
    wrong_policies.different_policies,
    wrong_values.identical,
    wrong_values.bfloat16,
    wrong_policies.long_products,
)
# Asked for by --by alone: nothing in a dump says which of its columns are labels.
BY_LABEL = ill_labels.label
# Asked for by --on-policy alone: the numbers cannot tell whether two passes used the same weights.
ON_POLICY = wrong_policies.trainer_disagrees
# Asked for by --exact alone, and then equal bits are what is wanted.
EXACT = differing.not_exact


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
    if measured.bits is not None:
        hidden.add(wrong_values.identical.name)
    asked = [*([EXACT] if measured.bits is not None else []), BY_LABEL]
    for cause in (*asked, *CAUSES, *([ON_POLICY] if on_policy else [])):
        found = None if cause.name in hidden else cause.find(measured, metrics)
        if found is not None:
            findings.append(found[0])
            hidden |= found[1]
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), -finding.strength))


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether nothing worse than a note was found."""
    return all(finding.severity == "note" for finding in findings)


def condition_values(metrics: Metrics, findings: Sequence[Finding], problems: int) -> Metrics:
    """Return the names that a condition may use: metrics, each cause as 0 or 1, `findings` and `problems`."""
    found = {finding.name for finding in findings}
    causes = {cause.name: float(cause.name in found) for cause in (EXACT, BY_LABEL, *CAUSES, ON_POLICY)}
    grave = sum(finding.severity != "note" for finding in findings)
    return metrics | causes | {"findings": float(grave), "problems": float(problems)}
