"""Zero the tokens of rejected sequences, in the programs that rejected them."""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens that are zeroed at a time.
BLOCK = tl.constexpr(512)


@triton.jit
def zero(tensor: tl.tensor, begin: tl.tensor, end: tl.tensor, share: tl.tensor, shares: tl.tensor) -> None:
    """Zero a share of a stretch of a contiguous tensor, in whole blocks where it has some, so that stores are wide."""
    for block in range(begin // BLOCK + share, (end + BLOCK - 1) // BLOCK, shares):
        place = block * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), tensor.dtype.element_ty)
        if (block * BLOCK >= begin) & ((block + 1) * BLOCK <= end):
            tl.store(tensor + place, nothing)
        else:
            tl.store(tensor + place, nothing, mask=(place >= begin) & (place < end))


@triton.jit
def chosen(x: tl.tensor, which: tl.tensor) -> tl.tensor:
    """Take one of some values: a scalar."""
    return tl.sum(tl.where(which, x.to(tl.int64), 0), 0)


@triton.jit
def zero_rejected(
    weights: tl.tensor, mask: tl.tensor, begin: tl.tensor, end: tl.tensor, rejected: tl.tensor, weightless: tl.tensor,
    share: tl.tensor, shares: tl.tensor, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Zero a share of each sequence that is rejected (its mask) or weightless (its weights), one after the other."""
    place = tl.arange(0, rejected.shape[0])
    left = tl.zeros_like(place)
    if PLAN.zeroes_weights:
        left |= weightless.to(tl.int32)
    if PLAN.zeroes_mask:
        left |= rejected.to(tl.int32)
    while tl.max(left, 0) > 0:
        which = place == tl.min(tl.where(left > 0, place, rejected.shape[0]), 0)
        first = chosen(begin, which)
        if PLAN.zeroes_weights:
            zero(weights, first, chosen(tl.where(weightless, end, begin), which), share, shares)
        if PLAN.zeroes_mask:
            zero(mask, first, chosen(tl.where(rejected, end, begin), which), share, shares)
        left = tl.where(which, 0, left)
