"""The statistics by name, in their order in `Statistics`: what tokens add, what sequences add, what a call adds.

The order is the kernels', whose phases each fill a stretch of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rollout_corr.definition.histogram import HISTOGRAM
from rollout_corr.metrics import peers
from rollout_corr.metrics.peers import Columns
from rollout_corr.spec.correction import Spec


def columns_of(spec: Spec, names: Sequence[str] | None = None) -> Columns:
    """All statistics without the histogram, the native ones first in each stretch.

    Args:
        spec: What to do.
        names: What the criteria are called in names of statistics; None: by their labels.
    """
    names = [criterion.label for criterion in spec.criteria] if names is None else names
    native = Columns(
        token_sums=_token_sums(spec, names),
        sequence_sums=_sequence_sums(spec, names),
        token_maxima=_token_maxima(spec, names),
        sequence_maxima=_sequence_maxima(spec, names),
    )
    return native.joined(peers.columns(spec, names))


def sum_names(spec: Spec) -> tuple[str, ...]:
    """All sums."""
    found = columns_of(spec)
    bins = HISTOGRAM if spec.detail == "full" else ()
    return (*found.token_sums, *found.sequence_sums, *bins, *found.call_sums)


def max_names(spec: Spec) -> tuple[str, ...]:
    """All maxima. Minima travel as maxima of the negated value."""
    found = columns_of(spec)
    return (*found.token_maxima, *found.sequence_maxima, *found.call_maxima)


class Places(NamedTuple):
    """Stretches of the statistics, from the first to before the last."""

    sums: tuple[tuple[int, int], ...]
    maxima: tuple[tuple[int, int], ...]


# Counted where they lie, though not among the sums of tokens.
SLOTS = ("tokens_outside", "skyrl/slots")


@lru_cache(maxsize=256)
def places_of_sequences(spec: Spec) -> Places:
    """Where statistics stand that are known of whole sequences alone, whichever rank holds their tokens."""
    found = columns_of(spec)
    local = {*found.token_sums, *HISTOGRAM, *SLOTS}, set(found.token_maxima)
    stretches = []
    for names, here in zip((sum_names(spec), max_names(spec)), local, strict=True):
        wanted = [name not in here for name in names]
        edges = [i for i in range(len(names) + 1) if (i < len(names) and wanted[i]) != (i > 0 and wanted[i - 1])]
        stretches.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
    return Places(*stretches)


def _token_sums(spec: Spec, criteria: Sequence[str]) -> tuple[str, ...]:
    names = ["abs_d", "d2", "k3", "ratio", "ratio2", "tokens_clamped"]
    if spec.weight is not None and spec.weight.level == "token":
        names += ["raw2", "weight2", "tokens_above", "tokens_below"]
    for criterion, own in zip(spec.criteria, criteria, strict=True):
        if criterion.over == "token":
            names += [f"{own}/{name}" for name in ("value", "value2")]
    if spec.detail == "full":
        names += ["p", "q", "p2", "q2", "pq", "abs_prob_diff"]
    return tuple(names)


def _sequence_sums(spec: Spec, criteria: Sequence[str]) -> tuple[str, ...]:
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
    for criterion, own in zip(spec.criteria, criteria, strict=True):
        names += [f"{own}/{name}" for name in ("units", "tokens", "sequences")]
        if criterion.over == "sequence":
            names += [f"{own}/{name}" for name in ("value", "value2")]
    return tuple(names)


def _token_maxima(spec: Spec, criteria: Sequence[str]) -> tuple[str, ...]:
    names = []
    if spec.weight is not None and spec.weight.level == "token":
        names += ["max_raw", "-min_raw", "max_weight", "-min_weight"]
    names += ["max_d", "-min_d"]
    names += _extrema(spec, criteria, "token")
    if spec.detail == "full":
        names += ["max_abs_prob_diff"]
    return tuple(names)


def _sequence_maxima(spec: Spec, criteria: Sequence[str]) -> tuple[str, ...]:
    names = ["max_log_ppl_diff", "-min_log_ppl_diff", "max_abs_sum_d"]
    if spec.weight is not None:
        names += ["max_sequence_raw", "-min_sequence_raw", "max_sequence_weight", "-min_sequence_weight"]
        if spec.weight.level != "token":
            names += ["max_raw", "-min_raw", "max_weight", "-min_weight"]
    return (*names, *_extrema(spec, criteria, "sequence"))


def _extrema(spec: Spec, criteria: Sequence[str], over: str) -> list[str]:
    some = [own for criterion, own in zip(spec.criteria, criteria, strict=True) if criterion.over == over]
    return [f"{side}{own}/value" for own in some for side in ("max_", "-min_")]
