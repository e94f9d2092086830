"""Bounds that several calls have decided together, before one of these calls applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollout_corr.backends.layouts import name_of
from rollout_corr.spec.validate import shown

if TYPE_CHECKING:
    from rollout_corr.backends.bounds_of_batch import Thresholds
    from rollout_corr.backends.sequence_groups import SequenceGroups
    from rollout_corr.spec.correction import Spec


def completed(thresholds: object, spec: Spec | None) -> Thresholds:
    """Refuse anything but all bounds of this Spec."""
    # Only who has thresholds has imported this.
    from rollout_corr.backends.bounds_of_batch import Thresholds

    if not isinstance(thresholds, Thresholds):
        raise TypeError(f"thresholds: expected Thresholds or None, got {type(thresholds).__name__} {shown(thresholds)}")
    if spec is None:
        raise ValueError("thresholds: expected None without a spec, whose bounds they are, got Thresholds")
    if thresholds.spec != spec:
        raise ValueError(f"thresholds: expected those of the same Spec {spec!r}, got those of {thresholds.spec!r}")
    if not thresholds.complete:
        raise ValueError(f"thresholds: expected complete ones, got {thresholds!r}; count another round")
    return thresholds


def check_groups(thresholds: Thresholds, groups: SequenceGroups | None) -> None:
    """Refuse other groups than those that bounds of groups were decided for."""
    counted = thresholds.group_count
    if counted is None or groups is None:
        return
    if groups.whole:
        raise ValueError(
            "group_size: expected group_index and group_count beside thresholds of groups, whose numbers they are, got "
            "group_size"
        )
    if groups.total != counted:
        raise ValueError(
            f"group_count: expected {counted}, for which the thresholds were decided, got {groups.total} groups"
        )


def check_dtype(thresholds: Thresholds, dtype: torch.dtype) -> None:
    """Refuse log-probs that compute in another dtype than those which decided bounds of tokens.

    Such a bound is one of their values, and another dtype may not have it: where it lay would depend on a rounding.
    """
    from rollout_corr.backends.bounds_of_batch import dtypes_of_tokens

    for place, decided in dtypes_of_tokens(thresholds).items():
        if decided != dtype:
            raise ValueError(
                f"thresholds: expected log-probs whose values of {place.label!r} are {name_of(decided)}, as those that "
                f"decided them, got {name_of(dtype)}"
            )
