"""The policy loss over tokens: every input is read here, the gradient written, and what is reported added up.

See slots.py for what a program has and sums.py for how its parts add up. A surrogate whose gradient hangs on whole
sequences takes two passes, the first of which writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.policy_loss.formulas import kind_of, penalty, penalty_factor, policy
from rollout_corr.kernels.policy_loss.plan import LossPlan
from rollout_corr.kernels.slots import addresses, coverage, fetch, positions, slots_of_program, stretch_of, write
from rollout_corr.kernels.sums import (
    merged,
    nothing,
    places,
    put_maxima,
    put_slots,
    put_sums,
    record,
    record_count,
    record_extrema,
    record_statistic,
    record_sum,
)
from rollout_corr.kernels.tokens import LARGEST_D, is_finite, limited, number, real, thresholds

SMALLEST_WEIGHT = tl.constexpr(1e-10)

# Tensors of a part, in the order in which they are fetched.
INPUTS = ("new", "base", "ref", "weights", "trains", "mask", "advantages")


@triton.constexpr_function
def there(plan: LossPlan, i: int) -> bool:
    """Whether the i-th of the inputs is given per token."""
    given = (True, plan.based, plan.referred, plan.weighted, plan.trained, plan.masked, plan.advantages == "token")
    return given[i]


@triton.jit
def fetch_parts(pointers, rows, steps, sequence, tile, start, end, width, PLAN: tl.constexpr, TILE: tl.constexpr,
                LANES: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
                FULL: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """All inputs of all parts, one part after the other, and behind them which tokens are the sequence's and valid.

    FULL: every slot fills its tile. WHOLE: every tile lies within the batch, so that it can be loaded whole.
    """
    found = ()
    for first in tl.static_range(0, TILE, LANES * VEC):
        place = positions(first, LANES, VEC)
        inside = (place >= start) & (place < end)
        for i in tl.static_range(len(pointers)):
            if there(PLAN, i):
                where = addresses(pointers[i], sequence, tile, rows[i], steps[i], place, PLAN, TILE, UNIT, ALIGNED)
                found = found + (fetch(where, inside, WHOLE),)
            else:
                # Never looked at.
                found = found + (inside,)
        if PLAN.masked and not FULL:
            found = found + ((found[len(found) - 2] != 0) & inside,)
        elif PLAN.masked:
            found = found + (found[len(found) - 2] != 0,)
        else:
            found = found + (inside,)
    return found


@triton.jit
def of_sequence(table, sequence, sequences, like):
    """What a tensor has for the sequences of a program's slots, at their tokens."""
    known = (sequence >= 0) & (sequence < sequences)
    return tl.load(table + sequence, mask=known, other=0.0).to(like.dtype)[:, None, None] + tl.zeros_like(like)


@triton.jit
def loss_of_part(parts, FIRST: tl.constexpr, outside, level, pull, inner, advantage, numbers, PLAN: tl.constexpr):
    """What one part of the tile adds up, and behind it the gradient."""
    found = nothing(PLAN)
    new = parts[FIRST].to(real(PLAN))
    valid = parts[FIRST + 7]
    if PLAN.packed:
        valid = valid & (outside == 0)
    if PLAN.advantages == "token":
        advantage = parts[FIRST + 6].to(real(PLAN))
    known = is_finite(new)
    x = tl.zeros_like(new)
    if PLAN.based:
        x = new - parts[FIRST + 1].to(real(PLAN))
        whole = is_finite(x)
        if PLAN.nonfinite == "neutral":
            # A base that is not finite is read as new_logp.
            x = tl.where(whole, x, 0.0)
            known = known | whole
        else:
            known = whole
    known = known & is_finite(advantage)
    weight, k = new, new
    if PLAN.weighted:
        weight = parts[FIRST + 3].to(real(PLAN))
        known = known & is_finite(weight)
    if PLAN.referred:
        k = new - parts[FIRST + 2].to(real(PLAN))
        known = known & is_finite(k)
    among = valid
    if PLAN.nonfinite != "propagate":
        among = valid & known
    counted = among
    if PLAN.trained:
        counted = among & (parts[FIRST + 4] != 0)
    found = record_count(found, PLAN, "counts", "valid", valid)
    found = record_count(found, PLAN, "counts", "counted", counted)
    if PLAN.phase == "sum":
        return sum_of_sequence(found, x, advantage, weight, counted, numbers, PLAN) + (x,)
    else:
        return loss_of_tokens(found, new, x, k, advantage, weight, level, pull, inner, valid & (known == 0), among,
                              counted, numbers, PLAN)  # fmt: skip


@triton.jit
def sum_of_sequence(found, x, advantage, weight, counted, numbers, PLAN: tl.constexpr):
    """What a sequence's loss is made of, where it is one loss."""
    if PLAN.surrogate == "GMPO":
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        x = limited(x, -clamp, clamp, PLAN)
        high, low = number(numbers, PLAN, "high").to(x.dtype), number(numbers, PLAN, "low").to(x.dtype)
        x = tl.where((advantage > 0) & (x > high), high, tl.where((advantage < 0) & (x < -low), -low, x))
        if PLAN.weighted:
            log_weight = tl.log(tl.where(weight < SMALLEST_WEIGHT, SMALLEST_WEIGHT, weight))
            found = record_sum(found, PLAN, "log_weight", tl.where(counted, log_weight, 0.0), False)
        found = record_statistic(found, PLAN, "advantage", tl.where(counted, advantage, 0.0))
    elif PLAN.pulls:
        if PLAN.weighted:
            weighted = advantage * weight
        else:
            weighted = advantage
        down = advantage < 0
        found = record_statistic(found, PLAN, "down", tl.where(counted & down, weighted, 0.0))
        found = record_statistic(found, PLAN, "up", tl.where(counted & (down == 0), weighted, 0.0))
    return record_sum(found, PLAN, "level", tl.where(counted, x, 0.0), False)


@triton.jit
def loss_of_tokens(found, new, x, k, advantage, weight, level, pull, inner, broken, among, counted, numbers,
                   PLAN: tl.constexpr):  # fmt: skip
    """The loss, its statistics and its gradient."""
    value, slope, low, high, dual, used, excess, k3 = policy(new, x, level, pull, advantage, weight, numbers, PLAN)
    total, gradient = tl.where(counted, value, 0.0), tl.where(counted, slope, 0.0)
    found = record(found, PLAN, "token_sums", "loss_tokens_nonfinite", tl.where(broken, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "loss_policy", total)
    found = record(found, PLAN, "token_sums", "clip_low", tl.where(low & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "clip_high", tl.where(high & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "clip_dual", tl.where(dual & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "ppo_d", tl.where(counted, limited(x, -LARGEST_D, LARGEST_D, PLAN), 0.0))
    excess = tl.where(counted, excess, 0.0)
    found = record(found, PLAN, "token_sums", "ppo_ratio", excess)
    found = record(found, PLAN, "token_sums", "ppo_ratio2", excess * excess)
    found = record(found, PLAN, "token_sums", "ppo_k3", tl.where(counted, k3, 0.0))
    found = record_extrema(found, PLAN, "-min_ppo_log_ratio", "max_ppo_log_ratio", used, counted)
    if PLAN.kl is not None:
        held = among if PLAN.kl_everywhere else counted
        value, slope = penalty(k, kind_of(PLAN, False), numbers, PLAN)
        if PLAN.kl_gradient != PLAN.kl:
            _, slope = penalty(k, kind_of(PLAN, True), numbers, PLAN)
        factor, factor_slope = penalty_factor(x, weight, numbers, PLAN)
        coefficient = number(numbers, PLAN, "kl").to(new.dtype)
        total += tl.where(held, coefficient * value * factor, 0.0)
        gradient += tl.where(held, coefficient * (slope * factor + value * factor_slope), 0.0)
        found = record(found, PLAN, "token_sums", "ref_kl", tl.where(held, value, 0.0))
    if PLAN.regulariser is not None:
        held = among if PLAN.regulariser == "all" else counted
        saturated, flows = limited(x, -LARGEST_D, LARGEST_D, PLAN), tl.abs(x) <= LARGEST_D
        coefficient = number(numbers, PLAN, "regulariser").to(new.dtype)
        total += tl.where(held, coefficient * (saturated * saturated), 0.0)
        gradient += tl.where(held & flows, 2.0 * coefficient * saturated, 0.0)
        found = record(found, PLAN, "token_sums", "log_ratio2", tl.where(held, saturated * saturated, 0.0))
    if PLAN.averages and PLAN.phase == "write":
        total = total * inner
    found = record(found, PLAN, "token_sums", "total", total)
    found = record(found, PLAN, "floats", "total", total)
    return found + (gradient,)


# No length and no stride in a key: annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "steps", "new_row", "new_step", "base_row", "base_step", "ref_row",
           "ref_step", "weights_row", "weights_step", "trains_row", "trains_step", "mask_row", "mask_step"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def gradient_kernel(
    new_logp, base_logp, ref_logp, weights, trains, mask, advantages, offsets, numbers, levels, pulls, inners,
    gradient, counts, integers, floats, sums, maxima,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    new_row: tl.int64, new_step: tl.int64, base_row: tl.int64, base_step: tl.int64,
    ref_row: tl.int64, ref_step: tl.int64, weights_row: tl.int64, weights_step: tl.int64,
    trains_row: tl.int64, trains_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One pass over ROWS slots: the gradient before it is divided, what it reports, and what sequences need of it."""
    numbers = thresholds(numbers, PLAN)
    slots = tl.num_programs(0).to(tl.int64) * ROWS
    slot, owner, outside = slots_of_program(offsets, sequences, tokens, steps, PLAN, ROWS, TILE)
    sequence, tile, start, end = stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN, TILE)
    full, whole = coverage(tile, start, end, tokens, PLAN, TILE)
    pointers = (new_logp, base_logp, ref_logp, weights, trains, mask, advantages)
    rows = (new_row, base_row, ref_row, weights_row, trains_row, mask_row, width)
    steps_of = (new_step, base_step, ref_step, weights_step, trains_step, mask_step, 1)
    # One branch for all, so that all are under way before the first is needed.
    if full:
        parts = fetch_parts(pointers, rows, steps_of, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, UNIT,
                            ALIGNED, True, True)  # fmt: skip
    elif whole:
        parts = fetch_parts(pointers, rows, steps_of, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, UNIT,
                            ALIGNED, False, True)  # fmt: skip
    else:
        parts = fetch_parts(pointers, rows, steps_of, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, UNIT,
                            ALIGNED, False, False)  # fmt: skip
    like = parts[0].to(real(PLAN))
    advantage, level, pull, inner = like, like, like, like
    if PLAN.advantages == "sequence":
        advantage = of_sequence(advantages, sequence, sequences, like)
    if PLAN.phase == "write":
        if PLAN.levels:
            level = of_sequence(levels, sequence, sequences, like)
        if PLAN.pulls:
            pull = of_sequence(pulls, sequence, sequences, like)
        if PLAN.averages:
            inner = of_sequence(inners, sequence, sequences, like)
    found, slopes = (), ()
    for part in tl.static_range(TILE // (LANES * VEC)):
        more = loss_of_part(parts, 8 * part, outside, level, pull, inner, advantage, numbers, PLAN)
        slopes = slopes + (more[places(PLAN)],)
        if part == 0:
            found = more[: places(PLAN)]
        else:
            found = merged(found, more[: places(PLAN)], PLAN)
    if PLAN.writes and PLAN.differentiable:
        if full:
            write_parts(slopes, gradient, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, ALIGNED, True)
        else:
            write_parts(slopes, gradient, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, ALIGNED, False)
    put_sums(found, sums, PLAN)
    put_slots(found, counts, slots, slot, PLAN, "counts")
    put_slots(found, floats, slots, slot, PLAN, "floats")
    put_slots(found, integers, slots, slot, PLAN, "integers")
    put_maxima(found, maxima, PLAN)


@triton.jit
def write_parts(slopes, gradient, sequence, tile, start, end, width, PLAN: tl.constexpr, TILE: tl.constexpr,
                LANES: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Write the gradient of all parts."""
    for part in tl.static_range(len(slopes)):
        place = positions(part * LANES * VEC, LANES, VEC)
        where = addresses(gradient, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        write(where, slopes[part], (place >= start) & (place < end), FULL)


@triton.jit(do_not_specialize=["tokens", "sequences", "width", "tiles", "steps"])
def scale_kernel(
    gradient, inners, upstream, divisor, offsets, scaled,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Backward: the gradient times what comes from upstream, over the divisor and over each sequence's own length."""
    slot, owner, _ = slots_of_program(offsets, sequences, tokens, steps, PLAN, ROWS, TILE)
    sequence, tile, start, end = stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN, TILE)
    full, _ = coverage(tile, start, end, tokens, PLAN, TILE)
    if full:
        scale_parts(gradient, inners, upstream, divisor, scaled, sequence, tile, start, end, sequences, width, PLAN,
                    TILE, LANES, VEC, ALIGNED, True)  # fmt: skip
    else:
        scale_parts(gradient, inners, upstream, divisor, scaled, sequence, tile, start, end, sequences, width, PLAN,
                    TILE, LANES, VEC, ALIGNED, False)  # fmt: skip


@triton.jit
def scale_parts(gradient, inners, upstream, divisor, scaled, sequence, tile, start, end, sequences, width,
                PLAN: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
                ALIGNED: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    """Scale all parts of a tile."""
    factor = (tl.load(upstream).to(tl.float64) / tl.load(divisor)).to(gradient.dtype.element_ty)
    for first in tl.static_range(0, TILE, LANES * VEC):
        place = positions(first, LANES, VEC)
        inside = (place >= start) & (place < end)
        where = addresses(gradient, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        x = fetch(where, inside, FULL)
        if PLAN.averages:
            x = x * of_sequence(inners, sequence, sequences, x)
        where = addresses(scaled, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        write(where, (x * factor).to(scaled.dtype.element_ty), inside, FULL)
