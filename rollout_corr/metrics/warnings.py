"""`warnings()`: sentences about metrics that deserve a look."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_corr.metrics.native import metrics_of
from rollout_corr.spec.correction import Spec

LOW_KEPT, LOW_ESS = 0.5, 0.3
# From this part of the clamp on, a sequence's |sum D| is near it.
NEAR_CLAMP = 0.5


def warnings_of(values: Mapping[str, float], spec: Spec) -> list[str]:
    """Say in plain words which metrics deserve a look.

    Args:
        values: Merged statistics by name.
        spec: The Spec under which they were taken.
    """
    metrics = {row.key: row.read(values) for row in metrics_of(spec)}
    found = []
    if metrics["tokens_nonfinite"]:
        found.append(
            f"{metrics['tokens_nonfinite']:.0f} valid tokens have a NaN or infinite log-ratio "
            f"(nonfinite={spec.nonfinite!r}): broken logits or missing rollout log-probs"
        )
    if metrics["tokens_outside"]:
        found.append(f"{metrics['tokens_outside']:.0f} valid tokens lie outside every cu_seqlens interval")
    if metrics["tokens"] and metrics["tokens_kept_fraction"] < LOW_KEPT:
        found.append(
            f"only {100 * metrics['tokens_kept_fraction']:.1f} % of the tokens and "
            f"{100 * metrics['sequences_kept_fraction']:.1f} % of the sequences are kept"
        )
    if spec.weight is not None and metrics["tokens"]:
        level = "" if spec.weight.per_token else "sequence_"
        ess = metrics[f"{level}weight_ess"]
        if ess < LOW_ESS:
            found.append(f"effective sample size is {100 * ess:.1f} % of the batch after the bounds")
    sequence_sums = spec.weight is not None and spec.weight.level == "product"
    sequence_sums |= any(criterion.statistic.log_space and criterion.reduce == "sum" for criterion in spec.criteria)
    if sequence_sums and metrics["sum_d_abs_mean"] > NEAR_CLAMP * spec.clamp:
        found.append(
            f"T x KL: the mean |sum D| of a sequence is {metrics['sum_d_abs_mean']:.1f} nats, near the clamp of "
            f"{spec.clamp:g}; sequence products carry no information there, use geometric or token ratios"
        )
    return found
