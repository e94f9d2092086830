"""A backend's result, and which parts of it a Spec asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.correction import Spec


@dataclass
class Result:
    """A correction in the batch's own shape, before batch normalisation."""

    weights: Tensor | None
    mask: Tensor | None  # None: the mask given
    keep: Tensor  # [S] bool
    statistics: Statistics


def writes_weights(spec: Spec) -> bool:
    """Tell whether weights are handed back."""
    return spec.apply and (spec.weight is not None or spec.rejected != "mask")


def edits_mask(spec: Spec) -> bool:
    """Tell whether the mask handed back can differ from the one given."""
    rejects = len(spec.criteria) > 0 or (spec.weight is not None and spec.nonfinite == "reject")
    return spec.apply and spec.rejected != "zero" and rejects
