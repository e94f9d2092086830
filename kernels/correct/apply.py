"""Bring weights of sequences to their tokens, and drop those that a criterion over sequences drops one by one.

The third launch, where one of these is asked for. `read` has written token weights and most of the mask.
Of `product_geometric_padded`, 4,096 tokens a sequence, it executes 22.4 PTX instructions a token, reads 10 bytes (8 are
the int64 mask) and writes 8.75 (4 are the weights, the rest zeros in masks of rejected sequences), by `ptx.counts`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import selected
from rollout_corr.kernels.correct.verdicts import REJECTED, WEIGHTLESS, thinning_bit
from rollout_corr.kernels.io import PerToken, addresses, contiguous, either, load_tokens, of_sequence, store_tokens
from rollout_corr.kernels.slots import Extents, Stretch, inside_of, is_full, positions, slots_of_program, stretch_of
from rollout_corr.kernels.tokens import is_finite, over_kept_set, real, size, test


class Inputs(NamedTuple):
    """The tensors of a call that `apply` needs to find tokens dropped by sequence criteria."""

    train: PerToken
    rollout: PerToken
    mask: PerToken
    mass: PerToken
    advantages: tl.tensor  # [N], [B, T] or [S]


# --- the tokens ---


@triton.jit
def zero(pointers: tl.tensor, where: tl.tensor) -> None:
    """Store 0 at some tokens."""
    tl.store(pointers, tl.zeros(where.shape, pointers.dtype.element_ty), mask=where)


@triton.jit
def load_at(
    tensor: PerToken, stretch: Stretch, place: tl.tensor, interior: tl.tensor,
    PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a tile of a per-token tensor."""
    return load_tokens(addresses(tensor, stretch, place, PLAN, TILING, UNIT), inside_of(stretch, place), interior)


@triton.jit
def thinned_tokens(
    inputs: Inputs, valid: tl.tensor, states: tl.tensor, stretch: Stretch, extents: Extents, place: tl.tensor,
    interior: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find the tokens that failed criteria of their sequence drop one by one; states are [ROWS, 1, 1]."""
    train = load_at(inputs.train, stretch, place, interior, PLAN, TILING, TILING.unit).to(real(PLAN))
    rollout = load_at(inputs.rollout, stretch, place, interior, PLAN, TILING, TILING.unit).to(real(PLAN))
    if PLAN.mass is not None:
        mass = load_at(inputs.mass, stretch, place, interior, PLAN, TILING, True)
        train, rollout = over_kept_set(train, rollout, mass, PLAN)
    d = train - rollout
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = valid & is_finite(d)
    elif PLAN.nonfinite == "neutral":
        d = tl.where(is_finite(d), d, 0.0)
    advantage = d
    if PLAN.advantages == "token":
        advantages = contiguous(inputs.advantages, extents)
        advantage = load_at(advantages, stretch, place, interior, PLAN, TILING, True).to(real(PLAN))
    elif PLAN.advantages == "sequence":
        advantage = of_sequence(inputs.advantages, stretch, extents, d)
    lost = inside_of(stretch, place) & (states < 0)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).thins:
            failed = (states & thinning_bit(PLAN, i)) != 0
            lost = lost | (failed & selected(d, advantage, measured, test(PLAN, i)))
    return lost


@triton.jit
def apply_to_tokens(
    inputs: Inputs, weights: tl.tensor, mask_out: tl.tensor, sequence_weights: tl.tensor, state: tl.tensor,
    stretch: Stretch, extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights of sequences to their tokens, and zero weights and mask of what is rejected. state: [ROWS]."""
    place = positions(0, TILING.tile // TILING.vec, TILING.vec)
    inside = inside_of(stretch, place)
    interior = is_full(stretch, TILING.tile)
    thins: tl.constexpr = size(PLAN, "thinning_tests") > 0
    states = state[:, None, None]
    lost = inside & (states < 0)
    valid = inside
    if PLAN.masked and ((PLAN.spreads and not PLAN.marks) or thins):
        valid = load_at(inputs.mask, stretch, place, interior, PLAN, TILING, TILING.unit) != 0
    if thins:
        lost = thinned_tokens(inputs, valid, states, stretch, extents, place, interior, PLAN, TILING)
    if PLAN.spreads:
        where = addresses(contiguous(weights, extents), stretch, place, PLAN, TILING, True)
        if PLAN.marks:
            valid = load_tokens(where, inside, interior) != 0
        if PLAN.rejected != "mask":
            valid = valid & (lost == 0)
        known = (stretch.sequence >= 0) & (stretch.sequence < extents.sequences)
        each = tl.load(sequence_weights + stretch.sequence, mask=known, other=0.0)
        store_tokens(where, tl.where(valid, each[:, None, None], 0.0), inside, interior)
    elif PLAN.zeroes_weights:
        gone = inside & ((states & WEIGHTLESS) != 0)
        if PLAN.rejected != "mask":
            gone = gone | lost
        zero(addresses(contiguous(weights, extents), stretch, place, PLAN, TILING, True), gone)
    if PLAN.zeroes_mask:
        where = addresses(contiguous(mask_out, extents), stretch, place, PLAN, TILING, True)
        zero(where, lost | (inside & ((states & REJECTED) != 0)))


# --- the kernel ---


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "width", "tiles", "steps", "train_row", "train_step", "rollout_row", "rollout_step",
        "mask_row", "mask_step",
    ]
)  # fmt: skip
def apply_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, offsets, states, sequence_weights, weights, mask_out,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Apply what was decided to the tokens of TILING.rows slots, which are shorter than those of `read`."""
    extents = Extents(tokens, sequences, width, tiles, 0)
    slot, owner = slots_of_program(offsets, extents, steps, PLAN, TILING)
    stretch = stretch_of(offsets, owner, slot, extents, PLAN, TILING.tile)
    known = (stretch.sequence >= 0) & (stretch.sequence < sequences)
    state = tl.load(states + stretch.sequence, mask=known, other=0)
    if PLAN.spreads or tl.max(state, 0) > 0:
        inputs = Inputs(
            PerToken(train_logp, train_row, train_step),
            PerToken(rollout_logp, rollout_row, rollout_step),
            PerToken(either(mask, train_logp), mask_row, mask_step),
            contiguous(either(log_mass, train_logp), extents),
            either(advantages, train_logp),
        )
        apply_to_tokens(inputs, weights, mask_out, sequence_weights, state, stretch, extents, PLAN, TILING)
