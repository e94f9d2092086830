"""Bring weights of sequences to their tokens, and drop those that a criterion over sequences drops one by one.

The third launch, where one of these is asked for. `read` has written token weights and most of the mask; a program
walks along the same tile. Of `split_packed`, 4,096 tokens a sequence, it executes 20.7 PTX instructions a token, reads
1.7 bytes (1 is the mask) and writes 4.6 (4 are the weights), by `lab.ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..tiles import (
    Extents,
    PerToken,
    contiguous,
    either,
    ends_by,
    entry_of,
    first_span,
    launched,
    load_step,
    next_span,
    places_of,
    pointers_to,
    store_step,
    tile_of_program,
)
from ..tokens import over_kept_set, real, size
from .criteria import selected
from .plan import criterion
from .steps import Context, Inputs, Step, advantage_of, compare, load_inputs
from .units import REJECTED, WEIGHTLESS, thinning_bit

# --- a step ---


@triton.jit
def thinned_tokens(step: Step, states, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Find the tokens that failed criteria of their sequence drop one by one."""
    train, rollout = step.train.to(real(PLAN)), step.rollout.to(real(PLAN))
    pair = compare(*over_kept_set(train, rollout, step.mass, PLAN), step.valid, PLAN)
    advantage = advantage_of(context, pair.d, PLAN, TILING)
    lost = states < 0
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).thins:
            failed = (states & thinning_bit(PLAN, i)) != 0
            lost = lost | (failed & selected(pair.d, advantage, pair.measured, criterion(PLAN, i)))
    return lost


@triton.jit
def zero(tensor, where, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr) -> None:
    """Store 0 at some tokens of a contiguous tensor."""
    place = places_of(context.first, TILING)
    pointers = pointers_to(contiguous(tensor, context.extents), context.tile, place, PLAN, TILING, True)
    tl.store(pointers, tl.zeros(where.shape, pointers.dtype.element_ty), mask=where)


@triton.jit
def apply_to_step(
    inputs: Inputs, weights, mask_out, states, any_state, weight, context: Context, PLAN: tl.constexpr,
    TILING: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights of sequences to their tokens, and zero weights and mask of what is rejected.

    Args:
        inputs: The tensors of the call.
        weights, mask_out: The results.
        states: [PARTS, LANES, VEC] int32, the state of each token's sequence.
        any_state: int32, the bits of all of these.
        weight: [PARTS, LANES, VEC], the weight of each token's sequence, if the plan has weights of sequences.
        context: The step.
        PLAN, TILING: The plan and the tiling.
        WHOLE: All of the step lies within the batch.
    """
    tile, first = context.tile, context.first
    inside = tl.full(states.shape, 1, tl.int1)
    if not WHOLE:
        inside = places_of(first, TILING) < tile.length
    valid, lost = inside, states < 0
    if size(PLAN, "thinning_criteria") > 0:
        step = load_inputs(inputs, tile, first, PLAN, TILING, WHOLE)
        valid, lost = step.valid, thinned_tokens(step, states, context, PLAN, TILING)
    elif PLAN.masked and PLAN.spreads and not PLAN.marks:
        valid = load_step(inputs.mask, tile, first, PLAN, TILING, TILING.unit, WHOLE) != 0
    if PLAN.spreads:
        tensor = contiguous(weights, context.extents)
        if PLAN.marks:
            valid = load_step(tensor, tile, first, PLAN, TILING, True, WHOLE) != 0
            # A token is not always stored by the thread that loaded it.
            tl.debug_barrier()
        if PLAN.rejected != "mask":
            valid = valid & (lost == 0)
        store_step(tensor, tl.where(valid, weight, 0.0), tile, first, PLAN, TILING, WHOLE)
    elif PLAN.zeroes_weights:
        gone = (states & WEIGHTLESS) != 0
        if PLAN.rejected != "mask":
            gone = gone | lost
        zero(weights, inside & gone, context, PLAN, TILING)
    if PLAN.zeroes_mask and any_state != 0:
        zero(mask_out, inside & (lost | ((states & REJECTED) != 0)), context, PLAN, TILING)


# --- the kernel ---


@launched
def apply_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, offsets, states, sequence_weights, weights, mask_out,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64, mask_row: tl.int64,
    mask_step: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Apply what was decided to the tokens of a tile."""
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    inputs = Inputs(
        PerToken(train_logp, train_row, train_step),
        PerToken(rollout_logp, rollout_row, rollout_step),
        PerToken(either(mask, train_logp), mask_row, mask_step),
        contiguous(either(log_mass, train_logp), extents),
    )
    advantages, of_sequences = either(advantages, train_logp), either(sequence_weights, states)
    tile = tile_of_program(offsets, extents, PLAN, TILING)
    span = first_span(offsets, tile, extents, steps, PLAN)
    begun, first, place = span, tile.length * 0, places_of(0, TILING)
    state, weight = entry_of(states, span.owner, extents, PLAN), entry_of(of_sequences, span.owner, extents, PLAN)
    any_state, each = state, tl.full(place.shape, state, state.dtype)
    spread = tl.full(place.shape, weight, weight.dtype)
    # One loop goes on to the next sequence, or to the next step. What an inner loop carried would go through shared
    # memory to the stores behind it.
    for _ in range(span.last - span.owner + (tile.length + TILING.step - 1) // TILING.step):
        if PLAN.packed:
            behind = place >= span.start - first
            each, spread = tl.where(behind, state, each), tl.where(behind, weight, spread)
        if PLAN.packed and ends_by(span, first, TILING):
            span = next_span(span, offsets, tile, extents, PLAN)
            state = entry_of(states, span.owner, extents, PLAN)
            weight = entry_of(of_sequences, span.owner, extents, PLAN)
            any_state |= state
        else:
            if PLAN.spreads or any_state != 0:
                whole = first + TILING.step <= tile.length
                context = Context(tile, begun, first, whole, extents, offsets, advantages, (), states, 0, states, ())
                if whole:
                    apply_to_step(inputs, weights, mask_out, each, any_state, spread, context, PLAN, TILING, True)
                else:
                    apply_to_step(inputs, weights, mask_out, each, any_state, spread, context, PLAN, TILING, False)
            begun, first, any_state = span, first + TILING.step, state
