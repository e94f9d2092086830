"""Sums over the tokens behind a token, and before it, within its sequence: what weights by position are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Decays below the smallest float64 add nothing.
_LEAST_LOG = -745.0


def decayed_suffix_sums(x: Tensor, sequence: Tensor, decay: float) -> Tensor:
    """Sum decay^(u - t) x_u over the tokens u at and behind t of its sequence, [N].

    In rounds of which each doubles the tokens that a sum has, until decays are 0: no value is read, and no sum depends
    on what is packed around a sequence.

    Args:
        x: [N], finite.
        sequence: [N], the sequence that each token belongs to; those of one are neighbours.
        decay: Above 0, at most 1.
    """
    reach, found = 1, x
    while reach < x.shape[0] and reach * math.log(decay) > _LEAST_LOG:
        behind = torch.where(sequence[reach:] == sequence[:-reach], found[reach:], 0.0)
        found = torch.cat((found[:-reach] + decay**reach * behind, found[-reach:]))
        reach *= 2
    return found


def sums_before(x: Tensor, sequence: Tensor) -> Tensor:
    """Sum x over the tokens before t of its sequence, [N]."""
    return decayed_suffix_sums(x.flip(0), sequence.flip(0), 1.0).flip(0) - x
