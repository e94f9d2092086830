"""The kernels on a batch with labels: results as without labels, and beside them the statistics of each label.

Those of labels of sequences are added up from what the kernels keep of each sequence. A label of tokens may change at
every token, so its statistics come from the definition, as all do where a compiler sees the kernels as an operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_corr.backends import operators, whole
from rollout_corr.backends.batch import Batch, Result
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.labels import Labelled
from rollout_corr.metrics.sequence_labels import PerSequence, by_label
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.kernels.correct.launch import Found


def run_labelled(batch: Batch, spec: Spec) -> Result:
    """Run the kernels on a batch that has labels."""
    operands = operators.operands_of(batch, spec)
    kept = None
    # What a sequence loses behind a failing prefix is not kept of it, nor what prefixes weigh.
    if (
        operators.is_operator(operands)
        or spec.has_prefixes
        or all(one.labels.units == "tokens" for one in batch.labels)
    ):
        result = operators.run_fused(batch, spec)
    else:
        found = operators.run_kernels(batch, operands, spec, labelled=True)
        result, kept = operators.result_of(found, spec), kept_of(found)
    result.statistics = with_labels(result.statistics, batch, spec, kept)
    return result


def kept_of(found: Found) -> PerSequence:
    """Give what the kernels kept of each sequence."""
    assert found.label_sums is not None
    assert found.label_maxima is not None
    return PerSequence(found.label_sums, found.label_maxima)


def with_labels(statistics: Statistics, batch: Batch, spec: Spec, kept: PerSequence | None) -> Statistics:
    """Append the statistics of all labels, in the order of the labels."""

    def by_definition(one: Labelled) -> bool:
        return kept is None or one.labels.units == "tokens"

    left = tuple(filter(by_definition, batch.labels))
    of_labels = iter(whole.statistics_of_labels(batch, spec, left) if left else ())
    for one in batch.labels:
        if kept is None or by_definition(one):
            found = next(of_labels)
        else:
            found = by_label(one, kept, look=False)
        statistics = statistics.beside(Extra((one.labels,)), *found)
    return statistics
