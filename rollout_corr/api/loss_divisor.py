"""The divisor of a call of `policy_loss`, and the factors of what tokens and sequences add to the sum before it."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends import whole
from rollout_corr.backends.batch import Batch, Reader
from rollout_corr.backends.layouts import dtype_of, shape_of
from rollout_corr.spec.loss import DENOMINATORS, Counted, reduction_of
from rollout_corr.spec.validate import number, shown


def read_scales(read: Reader, batch: Batch, scale: object) -> Tensor:
    """Read factors per token or per sequence, and give each token its own."""
    found, per_sequence = read.per_token_or_sequence("scale", scale)
    found = found.to(batch.dtype)
    return whole.sequences_of(batch)[0].spread(found).expand(batch.train.shape) if per_sequence else found


class Divisor(NamedTuple):
    """A denominator as it was read.

    Attributes:
        counted: The tokens or sequences that the loss counts where nobody else has.
        known: The count that is known beforehand, 0-d float64, or None.
        of_this_rank: It is this rank's share, to be added up over the batch group.
    """

    counted: Counted
    known: Tensor | None = None
    of_this_rank: bool = False


def read_denominator(given: object, reduction: str, read: Reader, batch: Batch) -> Divisor:
    """Read the denominator of a call."""
    device = read.first.device
    if reduction == "sum" and given != "original":
        raise ValueError(
            f"denominator: expected the default with reduction='sum', which does not divide, got {shown(given)}; "
            "reduction='token_mean' divides the sum by this denominator"
        )
    if isinstance(given, str) and given == "rows":
        if reduction_of(reduction).unit != "sequences":
            raise ValueError(
                f"denominator: expected 'rows' with a reduction over sequences, got it with reduction={reduction!r}"
            )
        rows = torch.full((), batch.count, dtype=torch.float64, device=device)
        return Divisor("original", rows, of_this_rank=True)
    if isinstance(given, str) and given in DENOMINATORS:
        return Divisor("kept" if given == "kept" else "original")
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.dtype == torch.bool or given.is_complex():
            got = f"{dtype_of(given)} of shape {shape_of(given)}"
            raise ValueError(f"denominator: expected a tensor that holds one number, got {got}")
        count = given.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
        return Divisor("original", count)
    if isinstance(given, Real) and not isinstance(given, bool):
        value = number("denominator", given)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"denominator: expected a finite number >= 0, got {value!r}")
        return Divisor("original", torch.full((), value, dtype=torch.float64, device=device))
    raise ValueError(f"denominator: expected one of {list(DENOMINATORS)}, a number or a 0-d tensor, got {shown(given)}")
