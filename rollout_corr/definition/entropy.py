"""The entropy of tokens, which the caller brings: how it enters a loss. Nothing here makes an entropy of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..specs.terms import Objective
from .sequences import Sequences
from .tokens import select


def total_of(
    entropy: Tensor, valid: Tensor | None, trains: Tensor | None, scope: str, sequences: Sequences, objective: Objective
) -> Tensor:
    """0-d float64: the sum over tokens that the mean of a loss divides, with its gradient to the entropy.

    It is over those that train, or with scope="all" over the valid ones. A token whose entropy is NaN or infinite adds
    nothing.
    """
    kept = valid if trains is None else trains if valid is None else trains & valid
    among = kept if scope == "kept" else valid
    finite = entropy.detach().isfinite()
    each = select(finite if among is None else finite & among, entropy)
    if objective.mean.averages:
        counted = kept if objective.mean.over == "kept" else valid
        n = sequences.sum_integers(torch.ones_like(finite) if counted is None else counted)
        each = each * sequences.spread((1.0 / n.clamp(min=1).double()).to(each.dtype))
    return each.sum(dtype=torch.float64)
