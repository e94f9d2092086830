"""Bring weights of sequences to their tokens, and drop those that a criterion over sequences drops one by one.

The third launch, where one of these is asked for. `read` has written token weights and most of the mask; a program
walks along the same tile. Of `split_packed`, 4,096 tokens a sequence, it executes 20.7 PTX instructions a token, reads
1.7 bytes (1 is the mask) and writes 4.6 (4 are the weights), by `lab.ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tiles
from ..tables import size
from ..tiles import Extents, PerToken, contiguous, either, load_step, places_of, pointers_to, store_step
from ..tokens import over_kept_set
from .criteria import selected
from .plan import criterion
from .steps import Context, Inputs, Step, advantage_of, compare, load_inputs
from .units import REJECTED, WEIGHTLESS, thinning_bit

# --- a step ---


@triton.jit
def thinned_tokens(step: Step, b_states, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Find the tokens that failed criteria of their sequence drop one by one."""
    b_train, b_rollout = step.train.to(tl.float32), step.rollout.to(tl.float32)
    pair = compare(*over_kept_set(b_train, b_rollout, step.mass, PLAN), step.valid, PLAN)
    b_advantage = advantage_of(context, pair.d, PLAN, TILING)
    m_lost = b_states < 0
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).thins:
            m_failed = (b_states & thinning_bit(PLAN, i)) != 0
            m_lost = m_lost | (m_failed & selected(pair.d, b_advantage, pair.measured, criterion(PLAN, i)))
    return m_lost


@triton.jit
def zero(p_out, m_where, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr) -> None:
    """Store 0 at some tokens of a contiguous tensor."""
    o_place = places_of(context.first, TILING)
    p_tokens = pointers_to(contiguous(p_out, context.extents), context.tile, o_place, PLAN, TILING, True)
    tl.store(p_tokens, tl.zeros(m_where.shape, p_tokens.dtype.element_ty), mask=m_where)


@triton.jit
def apply_to_step(inputs: Inputs, p_weights, p_mask_out, b_states, any_state, b_weight, context: Context,
                  PLAN: tl.constexpr, TILING: tl.constexpr, WHOLE: tl.constexpr) -> None:  # fmt: skip
    """Write weights of sequences to their tokens, and zero weights and mask of what is rejected.

    Args:
        inputs: The tensors of the call.
        p_weights, p_mask_out: The results.
        b_states: [PARTS, LANES, VEC] int32, the state of each token's sequence.
        any_state: int32, the bits of all of these.
        b_weight: [PARTS, LANES, VEC], the weight of each token's sequence, if the plan has weights of sequences.
        context: The step.
        PLAN, TILING: The plan and the tiling.
        WHOLE: All of the step lies within the batch.
    """
    tile, first = context.tile, context.first
    m_inside = tl.full(b_states.shape, 1, tl.int1)
    if not WHOLE:
        m_inside = places_of(first, TILING) < tile.length
    m_valid, m_lost = m_inside, b_states < 0
    if size(PLAN, "thinning_criteria") > 0:
        step = load_inputs(inputs, tile, first, PLAN, TILING, WHOLE)
        m_valid, m_lost = step.valid, thinned_tokens(step, b_states, context, PLAN, TILING)
    elif PLAN.masked and PLAN.spreads and not PLAN.marks:
        m_valid = load_step(inputs.mask, tile, first, PLAN, TILING, TILING.unit, WHOLE) != 0
    if PLAN.spreads:
        tensor = contiguous(p_weights, context.extents)
        if PLAN.marks:
            m_valid = load_step(tensor, tile, first, PLAN, TILING, True, WHOLE) != 0
            # A token is not always stored by the thread that loaded it.
            tl.debug_barrier()
        if PLAN.rejected != "mask":
            m_valid = m_valid & (m_lost == 0)
        store_step(tensor, tl.where(m_valid, b_weight, 0.0), tile, first, PLAN, TILING, WHOLE)
    elif PLAN.zeroes_weights:
        m_gone = (b_states & WEIGHTLESS) != 0
        if PLAN.rejected != "mask":
            m_gone = m_gone | m_lost
        zero(p_weights, m_inside & m_gone, context, PLAN, TILING)
    if PLAN.zeroes_mask and any_state != 0:
        zero(p_mask_out, m_inside & (m_lost | ((b_states & REJECTED) != 0)), context, PLAN, TILING)


# --- the kernel ---


@tiles.launched
def apply_kernel(
    p_train_logp, p_rollout_logp, p_mask, p_log_mass, p_advantages, p_offsets, p_states, p_sequence_weights, p_weights,
    p_mask_out,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32,
    search_steps: tl.int32, train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Apply what was decided to the tokens of a tile."""
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    inputs = Inputs(
        PerToken(p_train_logp, train_row, train_step),
        PerToken(p_rollout_logp, rollout_row, rollout_step),
        PerToken(either(p_mask, p_train_logp), mask_row, mask_step),
        contiguous(either(p_log_mass, p_train_logp), extents),
    )
    p_advantages, p_of_sequences = either(p_advantages, p_train_logp), either(p_sequence_weights, p_states)
    tile = tiles.tile_of_program(p_offsets, extents, PLAN, TILING)
    span = tiles.first_span(p_offsets, tile, extents, search_steps, PLAN)
    begun, first, o_place = span, tile.length * 0, places_of(0, TILING)
    state, weight = (
        tiles.entry_of(p_states, span.owner, extents, PLAN),
        tiles.entry_of(p_of_sequences, span.owner, extents, PLAN),
    )
    any_state, b_states = state, tl.full(o_place.shape, state, state.dtype)
    b_weight = tl.full(o_place.shape, weight, weight.dtype)
    # One loop goes on to the next sequence, or to the next step. What an inner loop carried would go through shared
    # memory to the stores behind it.
    for _ in range(span.last - span.owner + (tile.length + TILING.step - 1) // TILING.step):
        if PLAN.packed:
            m_behind = o_place >= span.start - first
            b_states, b_weight = tl.where(m_behind, state, b_states), tl.where(m_behind, weight, b_weight)
        if PLAN.packed and tiles.ends_by(span, first, TILING):
            span = tiles.next_span(span, p_offsets, tile, extents, PLAN)
            state = tiles.entry_of(p_states, span.owner, extents, PLAN)
            weight = tiles.entry_of(p_of_sequences, span.owner, extents, PLAN)
            any_state |= state
        else:
            if PLAN.spreads or any_state != 0:
                whole = first + TILING.step <= tile.length
                context = Context(
                    tile, begun, first, whole, extents, p_offsets, p_advantages, (), p_states, 0, p_states, ()
                )
                if whole:
                    apply_to_step(
                        inputs, p_weights, p_mask_out, b_states, any_state, b_weight, context, PLAN, TILING, True
                    )
                else:
                    apply_to_step(
                        inputs, p_weights, p_mask_out, b_states, any_state, b_weight, context, PLAN, TILING, False
                    )
            begun, first, any_state = span, first + TILING.step, state
