"""The native statistics by name, in their order in `Statistics`: what tokens add, then what sequences add.

The order is the kernels', whose phases each fill a stretch of it.
"""

from __future__ import annotations

from rollout_corr.histogram import HISTOGRAM
from rollout_corr.spec import Spec


def token_sums(spec: Spec) -> tuple[str, ...]:
    """Sums taken where the tokens are, without the histogram."""
    names = ["abs_d", "d2", "k3", "ratio", "ratio2", "tokens_clamped"]
    if spec.weight is not None and spec.weight.level == "token":
        names += ["raw2", "weight2", "tokens_above", "tokens_below"]
    for criterion in spec.criteria:
        if criterion.over == "token":
            names += [f"{criterion.label}/{name}" for name in ("value", "value2")]
    if spec.detail == "full":
        names += ["p", "q", "p2", "q2", "pq", "abs_prob_diff"]
    return tuple(names)


def sequence_sums(spec: Spec) -> tuple[str, ...]:
    """Sums taken once, from what is known of every sequence."""
    names = ["tokens", "tokens_outside", "tokens_measured", "tokens_nonfinite", "tokens_kept"]
    names += ["sequences", "sequences_measured", "sequences_kept", "sequences_without_survivors"]
    names += ["d", "train_ppl", "rollout_ppl", "train_log_ppl", "rollout_log_ppl", "log_ppl_diff"]
    names += ["log_ppl_abs_diff", "ppl_ratio"]
    names += ["chi2_sequence", "abs_sum_d", "sequences_clamped"]
    if spec.weight is not None:
        names += ["raw", "weight"]
        names += ["sequence_raw", "sequence_raw2", "sequence_weight", "sequence_weight2"]
        names += ["sequences_above", "sequences_below"]
        # Products of ratios can all be next to 0, where sums around 1 cancel; the sample size needs plain ones.
        names += [f"sequence_{name}_plain{power}" for name in ("raw", "weight") for power in ("", "2")]
        if spec.weight.level != "token":
            names += ["raw2", "weight2", "tokens_above", "tokens_below"]
            names += [f"{name}_plain{power}" for name in ("raw", "weight") for power in ("", "2")]
    for criterion in spec.criteria:
        names += [f"{criterion.label}/{name}" for name in ("units", "tokens", "sequences")]
        if criterion.over == "sequence":
            names += [f"{criterion.label}/{name}" for name in ("value", "value2")]
    return tuple(names)


def sum_names(spec: Spec) -> tuple[str, ...]:
    """All native sums."""
    return (*token_sums(spec), *sequence_sums(spec), *(HISTOGRAM if spec.detail == "full" else ()))


def token_maxima(spec: Spec) -> tuple[str, ...]:
    """Maxima taken where the tokens are. Minima travel as maxima of the negated value."""
    names = ["max_d", "-min_d"]
    if spec.weight is not None and spec.weight.level == "token":
        names += ["max_raw", "-min_raw", "max_weight", "-min_weight"]
    names += _criteria(spec, "token")
    if spec.detail == "full":
        names += ["max_abs_prob_diff"]
    return tuple(names)


def sequence_maxima(spec: Spec) -> tuple[str, ...]:
    """Maxima over sequences."""
    names = ["max_log_ppl_diff", "-min_log_ppl_diff", "max_abs_sum_d"]
    if spec.weight is not None:
        names += ["max_sequence_raw", "-min_sequence_raw", "max_sequence_weight", "-min_sequence_weight"]
        if spec.weight.level != "token":
            names += ["max_raw", "-min_raw", "max_weight", "-min_weight"]
    return (*names, *_criteria(spec, "sequence"))


def max_names(spec: Spec) -> tuple[str, ...]:
    """All native maxima."""
    return (*token_maxima(spec), *sequence_maxima(spec))


def _criteria(spec: Spec, over: str) -> list[str]:
    sides = ("max_", "-min_")
    return [f"{side}{criterion.label}/value" for criterion in spec.criteria if criterion.over == over for side in sides]
