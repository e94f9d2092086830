"""docs/metrics.md, made from the rows: `python -m rollout_corr.metrics.docs`."""

from __future__ import annotations

import sys

from rollout_corr.metrics import loss, native
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.loss import KL, Objective, SquaredLogRatio
from rollout_corr.spec.surrogates import DEFAULT_SURROGATE

HEAD = """\
# Native metrics

Made from the rows in `rollout_corr/metrics/` by `python -m rollout_corr.metrics.docs`; do not edit.

*Measured* tokens are the valid tokens whose D is finite (all valid tokens unless `nonfinite` is `reject`); a
measured sequence has one. Empty sequences count in nothing; 0 of 0 is reported as 0. Minima and maxima of
nothing are 0. All are population statistics, merged over any split of the batch before they are computed.
"""


def markdown() -> str:
    """The page: a table for each group of metrics."""
    criterion = Criterion("k3", over="sequence", reduce="mean", upper=1.0, label="LABEL")
    objective = Objective(DEFAULT_SURROGATE, KL("k3", 0.001), SquaredLogRatio(0.001))
    parts = {
        "Always": native.ALWAYS,
        "With a `Weight`": native.weight_metrics(Spec(weight=Weight("token", normalize="batch"))),
        "For every `Criterion`, under its label": native.criterion_metrics(criterion),
        'With `detail="full"`': native.FULL_METRICS,
        "From `policy_loss`": loss.metrics_of(objective),
    }
    lines = []
    for title, rows in parts.items():
        lines += ["", f"## {title}", "", "| key | formula | unit | over | healthy |", "|---|---|---|---|---|"]
        for row in rows:
            cells = (f"`{row.key}`", row.formula, row.unit, row.over.words, row.healthy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
