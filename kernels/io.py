"""What `read` loads and stores: the tensors of a tile, part by part."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Plan, Test
from rollout_corr.kernels.slots import addresses, fetch, positions, write
from rollout_corr.kernels.tokens import real


@triton.jit
def external_of(externals, default, sequence, tile, width, place, inside, full, TEST: tl.constexpr,
                PLAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """The tensor that a criterion brings along; without one, anything."""
    if TEST.external >= 0:
        return token_tensor(
            externals, external_at(TEST), sequence, tile, width, place, inside, full, PLAN, TILE, ALIGNED
        )
    else:
        return default


@triton.jit
def token_tensor(externals, WHICH: tl.constexpr, sequence, tile, width, place, inside, full, PLAN: tl.constexpr,
                 TILE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """One of the tensors that are brought along, behind the external ones the log-probs of the policy that trains."""
    where = addresses(externals[WHICH], sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
    return fetch(where, inside, full).to(real(PLAN))


@triton.constexpr_function
def external_at(criterion: Test) -> int:
    """Which of the external tensors a criterion brings along."""
    return criterion.external


@triton.constexpr_function
def size_of_externals(plan: Plan) -> int:
    """How many of them there are."""
    return plan.externals


@triton.jit
def fetch_parts(train_logp, rollout_logp, mask, sequence, tile, start, end, train_row, train_step, rollout_row,
                rollout_step, mask_row, mask_step, PLAN: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
                VEC: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """Log-probs and mask of all parts, one after the other; the mask is 0 at tokens of others.

    FULL: every slot fills its tile. WHOLE: every tile lies within the batch, so that it can be loaded whole, without a
    mask that would make accesses narrow.
    """
    found = ()
    for first in tl.static_range(0, TILE, LANES * VEC):
        place = positions(first, LANES, VEC)
        inside = (place >= start) & (place < end)
        trains = addresses(train_logp, sequence, tile, train_row, train_step, place, PLAN, TILE, UNIT, ALIGNED)
        rollouts = addresses(rollout_logp, sequence, tile, rollout_row, rollout_step, place, PLAN, TILE, UNIT, ALIGNED)
        if WHOLE:
            found = found + (tl.load(trains), tl.load(rollouts))
        else:
            found = found + (tl.load(trains, mask=inside, other=0), tl.load(rollouts, mask=inside, other=0))
        given = inside.to(tl.int8)
        if PLAN.masked:
            masks = addresses(mask, sequence, tile, mask_row, mask_step, place, PLAN, TILE, UNIT, ALIGNED)
            if WHOLE:
                given = tl.load(masks)
            else:
                given = tl.load(masks, mask=inside, other=0)
            if WHOLE and not FULL:
                given = tl.where(inside, given, 0).to(given.dtype)
        elif FULL:
            given = tl.full(given.shape, 1, tl.int8)
        found = found + (given,)
    return found


@triton.constexpr_function
def writes_token_weights(plan: Plan) -> bool:
    """Whether weights are written here."""
    return plan.writes_weights and (plan.marks or not plan.spreads)


@triton.constexpr_function
def written_at(plan: Plan, part: int, mask: bool) -> int:
    """Where the weights or the mask of a part stand in what is to be written."""
    weights = plan.writes_weights and (plan.marks or not plan.spreads)
    return part * (weights + plan.writes_mask) + (weights and mask)


@triton.jit
def write_parts(written, weights, mask_out, sequence, tile, start, end, width, PLAN: tl.constexpr, TILE: tl.constexpr,
                LANES: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Write token weights and the mask of all parts."""
    for part in tl.static_range(TILE // (LANES * VEC)):
        place = positions(part * LANES * VEC, LANES, VEC)
        inside = (place >= start) & (place < end)
        if writes_token_weights(PLAN):
            where = addresses(weights, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
            write(where, written[written_at(PLAN, part, False)], inside, FULL)
        if PLAN.writes_mask:
            where = addresses(mask_out, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
            write(where, written[written_at(PLAN, part, True)].to(mask_out.dtype.element_ty), inside, FULL)
