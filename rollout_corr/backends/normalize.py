"""Division of weights by the means of sequences or groups, over all layouts, backends and ranks.

A backend corrects by a Spec whose weights are neither divided nor zeroed by rejection (run.py), and `divide` does the
rest in plain torch: a mean must not depend on `rejected`, and the mask says what to zero afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..definition import normalize
from ..metrics.extra import Extra, divisors_of
from ..specs.correction import Spec
from . import whole

if TYPE_CHECKING:
    from ..definition.sequences import Packed, Rows
    from ..metrics.statistics import Statistics
    from ..specs.operands import CorrectResult
    from .batch import OpenBatch
    from .ranks import Ranks
    from .split import Split


def divide(result: CorrectResult, statistics: Statistics, batch: OpenBatch, spec: Spec, groups: Ranks) -> Statistics:
    """Divide the weights of a result by their means, zero what rejection zeroes, and append the divisors."""
    weights = result.weights
    assert weights is not None
    sequences, _ = whole.sequences_of(batch)
    totals = _totals(batch, weights, spec, groups)
    # The ranks of `Ranks.sequence` know the same sequences, which the first of them reports.
    counted = (totals[3] > 0) & groups.first()
    index = None
    if batch.groups is not None and spec.normalizes_groups:
        index = batch.groups.placed()
        totals = normalize.totals_of_groups(totals, index, batch.groups.total)
        if not batch.groups.whole:
            totals = groups.sum(totals)
    mean, divides = normalize.means_of(totals)
    if index is not None:
        # Sequences of no group lie in the last column.
        divides[-1] = False
        mean, divides = mean.index_select(0, index), divides.index_select(0, index)
    if not mean.shape[0]:
        # Tokens of no sequence alone, which `spread` gives 0.
        divisor = torch.ones_like(weights)
    else:
        divisor = sequences.spread(torch.where(divides, mean, 1.0).to(weights.dtype))
    if spec.nonfinite == "propagate":
        # A NaN mean makes the weights NaN, but not the 0 at invalid tokens.
        weights = torch.where(weights == 0, weights, weights / divisor)
    else:
        weights = weights / divisor
    if spec.rejected != "mask" and result.mask is not None:
        weights = torch.where(result.mask != 0, weights, 0.0)
        if spec.rejected == "zero":
            result.mask = None
    result.weights = weights
    if not spec.apply:
        result.weights = result.mask = None
    divisors = divisors_of(mean, divides, counted)
    return statistics.followed_by(Extra(divisors=True), *divisors)


def _totals(batch: OpenBatch, weights: Tensor, spec: Spec, groups: Ranks) -> Tensor:
    """The totals of each sequence, of whole sequences where ranks hold parts of them."""
    if groups.sequence is None:
        return _totals_here(batch, weights, spec, *whole.sequences_of(batch))
    sequences, valid = whole.split_sequences_of(batch, groups.sequence)
    _totals_here(batch, weights, spec, sequences, valid)
    sequences.start("correct: the weights of each sequence")
    sequences.wait()
    return _totals_here(batch, weights, spec, sequences, valid)


def _totals_here(
    batch: OpenBatch, weights: Tensor, spec: Spec, sequences: Rows | Packed | Split, valid: Tensor | None
) -> Tensor:
    turns = whole.turns_in(batch, batch.turns if spec.weighs_turns else None, sequences, valid)
    if valid is None:
        valid = torch.ones_like(weights, dtype=torch.bool)
    nonfinite = None
    if spec.nonfinite == "reject":
        train, rollout = whole.policies_of(batch, {})["train/rollout"]
        nonfinite = ~(train - rollout).isfinite() & valid
    return normalize.totals_of(weights, valid, nonfinite, sequences, turns, spec)
