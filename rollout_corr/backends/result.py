"""The result of a correction by any backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout_corr.metrics.statistics import Statistics


@dataclass(eq=False, repr=False)
class Result:
    """A correction in the batch's own shape, before batch normalisation."""

    weights: Tensor | None
    mask: Tensor | None  # None: the mask given
    keep: Tensor  # [S] bool
    statistics: Statistics
    keep_turns: Tensor | None = None  # [U] bool; None without turns
