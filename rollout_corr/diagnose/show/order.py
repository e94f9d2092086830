"""The picture that shows a finding, which a reader sees first, and where it was found."""

from __future__ import annotations

from collections.abc import Sequence

from ..doctor.cause import Finding

# Views of a report that are no axes.
TRAIN, WORST, DISTRIBUTION = "train", "worst", "distribution"

# The views that show a cause, the best first. Any other cause is seen in train against rollout.
SHOWN_BY = {
    "temperature": (TRAIN, "probability"),
    "renormalized": (TRAIN, "probability"),
    "stale": ("versions",),
    "drift": ("steps",),
    "positions": ("position",),
    "sequence_starts": ("position",),
    "turn_starts": ("turn", "position"),
    "outliers": (WORST,),
    "long_products": ("length",),
    "bfloat16": (DISTRIBUTION,),
    # Both sides agree: no picture has it.
    "raw_log_probs": (),
}


def views_of(finding: Finding) -> Sequence[str]:
    """Return the views that show a finding: names of axes, and those above."""
    if finding.name == "label":
        # Its numbers are called column/label/what.
        return list(dict.fromkeys(key.rsplit("/", 2)[0] for key in finding.numbers))
    return SHOWN_BY.get(finding.name, (TRAIN,))


def first_views(findings: Sequence[Finding]) -> list[str]:
    """Return the views of all findings, those of the gravest first."""
    return list(dict.fromkeys(view for finding in findings for view in views_of(finding)))
