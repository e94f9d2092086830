"""The policy loss over tokens: read every input, write the gradient, add up the statistics.

slots.py says which tokens a program has, sums.py how its parts add up. A surrogate whose gradient depends on whole
sequences takes two passes over the tokens, the first of which writes nothing; see `LossPlan.phase`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.io import (
    PerToken,
    addresses,
    contiguous,
    either,
    load_tokens,
    of_sequence,
    store_parts,
    store_tokens,
)
from rollout_corr.kernels.policy_loss.formulas import Token, penalty, penalty_factor, policy
from rollout_corr.kernels.slots import (
    Extents,
    Stretch,
    coverage,
    inside_of,
    parts_of,
    positions,
    slots_of_program,
    stretch_of,
)
from rollout_corr.kernels.sums import (
    merged,
    nothing,
    put_maxima,
    put_slots,
    put_sums,
    record,
    record_count,
    record_extrema,
    record_statistic,
    record_sum,
)
from rollout_corr.kernels.tokens import LARGEST_D, is_finite, limited, number, over_kept_set, real, thresholds

SMALLEST_WEIGHT = tl.constexpr(1e-10)


class Inputs(NamedTuple):
    """The tensors of a pass; one that the plan lacks is never read."""

    new: PerToken
    base: PerToken
    ref: PerToken
    weights: PerToken
    trains: PerToken
    mask: PerToken
    advantages: PerToken
    mass: PerToken


class Part(NamedTuple):
    """The inputs of a part of a tile, [ROWS, LANES, VEC] each; one that the plan lacks may hold anything."""

    new: tl.tensor
    base: tl.tensor
    ref: tl.tensor
    weights: tl.tensor
    trains: tl.tensor
    advantages: tl.tensor
    valid: tl.tensor  # bool; False at tokens of other slots
    mass: tl.tensor


@triton.jit
def part_of(x: tl.tuple) -> Part:
    """Name the entries of a part: in Triton 3.5 and 3.6 a tuple that grows forgets the names within its entries."""
    return Part(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7])


class Shared(NamedTuple):
    """The values that all parts of a program share."""

    outside: tl.tensor  # [ROWS, 1, 1], slots of no sequence
    advantage: tl.tensor  # of sequences, spread like the following: [ROWS, LANES, VEC]
    level: tl.tensor  # the mean log-ratio of a sequence
    pull: tl.tensor  # the term of a sequence in the gradient of its tokens; see formulas.Token
    inner: tl.tensor  # the factor of each sequence's gradient
    numbers: tl.tuple


# --- loading ---


@triton.jit
def load_input(
    tensor: PerToken, stretch: Stretch, place: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr,
    UNIT: tl.constexpr, GIVEN: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a part of a tensor if it is given; else return anything."""
    inside = inside_of(stretch, place)
    if GIVEN:
        return load_tokens(addresses(tensor, stretch, place, PLAN, TILING, UNIT), inside, WHOLE)
    else:
        return inside


@triton.jit
def load_parts(
    inputs: Inputs, stretch: Stretch, PLAN: tl.constexpr, TILING: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tuple:
    """Load all parts.

    FULL: every slot fills its tile. WHOLE: every tile lies within the batch, so that it can be loaded whole.
    """
    parts = ()
    for i in tl.static_range(parts_of(TILING)):
        place = positions(i * TILING.part, TILING.lanes, TILING.vec)
        new = load_input(inputs.new, stretch, place, PLAN, TILING, TILING.unit, True, WHOLE)
        base = load_input(inputs.base, stretch, place, PLAN, TILING, TILING.unit, PLAN.based, WHOLE)
        ref = load_input(inputs.ref, stretch, place, PLAN, TILING, TILING.unit, PLAN.referred, WHOLE)
        weights = load_input(inputs.weights, stretch, place, PLAN, TILING, TILING.unit, PLAN.weighted, WHOLE)
        trains = load_input(inputs.trains, stretch, place, PLAN, TILING, TILING.unit, PLAN.trained, WHOLE)
        valid = load_input(inputs.mask, stretch, place, PLAN, TILING, TILING.unit, PLAN.masked, WHOLE)
        advantages = load_input(inputs.advantages, stretch, place, PLAN, TILING, True, PLAN.advantages == "token",
                                WHOLE)  # fmt: skip
        mass = load_input(inputs.mass, stretch, place, PLAN, TILING, True, PLAN.mass is not None, WHOLE)
        if PLAN.masked:
            valid = valid != 0
            if not FULL:
                valid = valid & inside_of(stretch, place)
        parts = parts + (Part(new, base, ref, weights, trains, advantages, valid, mass),)
    return parts


# --- a part ---


@triton.jit
def loss_of_part(part: Part, shared: Shared, PLAN: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:
    """Return the sums of one part of the tile, and its gradient."""
    found = nothing(PLAN)
    new = part.new.to(real(PLAN))
    valid = part.valid
    if PLAN.packed:
        valid = valid & (shared.outside == 0)
    advantage = shared.advantage
    if PLAN.advantages == "token":
        advantage = part.advantages.to(real(PLAN))
    known = is_finite(new)
    compared, x = new, tl.zeros_like(new)
    if PLAN.based:
        compared, base = over_kept_set(new, part.base.to(real(PLAN)), part.mass, PLAN)
        x = compared - base
        whole = is_finite(x)
        if PLAN.nonfinite == "neutral":
            # A base that is not finite is read as new_logp.
            x = tl.where(whole, x, 0.0)
            if PLAN.mass is not None:
                compared = tl.where(whole, compared, new)
            known = known | whole
        else:
            known = whole
    known = known & is_finite(advantage)
    weight, k = new, new
    if PLAN.weighted:
        weight = part.weights.to(real(PLAN))
        known = known & is_finite(weight)
    if PLAN.referred:
        k = new - part.ref.to(real(PLAN))
        known = known & is_finite(k)
    among = valid
    if PLAN.nonfinite != "propagate":
        among = valid & known
    counted = among
    if PLAN.trained:
        counted = among & (part.trains != 0)
    found = record_count(found, PLAN, "valid", valid)
    found = record_count(found, PLAN, "counted", counted)
    token = Token(compared, x, advantage, weight, shared.level, shared.pull)
    if PLAN.phase == "sum":
        return sum_of_sequence(found, token, counted, shared.numbers, PLAN), x
    else:
        broken = valid & (known == 0)
        return loss_of_tokens(found, token, k, broken, among, counted, shared, PLAN)


@triton.jit
def sum_of_sequence(
    found: tl.tuple, token: Token, counted: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Record the sums that the loss of a whole sequence needs."""
    x, advantage, weight = token.x, token.advantage, token.weight
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
def loss_of_tokens(
    found: tl.tuple, token: Token, k: tl.tensor, broken: tl.tensor, among: tl.tensor, counted: tl.tensor,
    shared: Shared, PLAN: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Record the loss and its statistics, and return its gradient.

    Args:
        found: The accumulators.
        token: The quantities that the loss is computed from.
        k: new_logp less the reference policy's.
        broken: Valid tokens with an input that is not finite.
        among: Valid tokens that are read; with nonfinite="propagate" all valid ones.
        counted: Those of them that train.
        shared: The values that all parts share.
        PLAN: The plan.
    """
    numbers, new, x = shared.numbers, token.new, token.x
    term = policy(token, numbers, PLAN)
    total, gradient = tl.where(counted, term.value, 0.0), tl.where(counted, term.slope, 0.0)
    found = record(found, PLAN, "token_sums", "loss_tokens_nonfinite", tl.where(broken, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "loss_policy", total)
    found = record(found, PLAN, "token_sums", "clip_low", tl.where(term.low & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "clip_high", tl.where(term.high & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "clip_dual", tl.where(term.dual & counted, 1.0, 0.0).to(new.dtype))
    found = record(found, PLAN, "token_sums", "ppo_d", tl.where(counted, limited(x, -LARGEST_D, LARGEST_D, PLAN), 0.0))
    excess = tl.where(counted, term.excess, 0.0)
    found = record(found, PLAN, "token_sums", "ppo_ratio", excess)
    found = record(found, PLAN, "token_sums", "ppo_ratio2", excess * excess)
    found = record(found, PLAN, "token_sums", "ppo_k3", tl.where(counted, term.k3, 0.0))
    found = record_extrema(found, PLAN, "-min_ppo_log_ratio", "max_ppo_log_ratio", term.used, counted)
    if PLAN.kl is not None:
        held = among if PLAN.kl_everywhere else counted
        # Of their own, because Triton 3.5 and 3.6 pass on the text of an attribute only as a constant.
        kind: tl.constexpr = PLAN.kl
        of_gradient: tl.constexpr = PLAN.kl_gradient
        value, slope = penalty(k, kind, numbers, PLAN)
        if of_gradient != kind:
            _, slope = penalty(k, of_gradient, numbers, PLAN)
        factor, factor_slope = penalty_factor(x, token.weight, numbers, PLAN)
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
        total = total * shared.inner
    found = record(found, PLAN, "token_sums", "total", total)
    return record(found, PLAN, "floats", "total", total), gradient


# --- the kernels ---


# No length and no stride is in a compile key: they are annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "steps", "new_row", "new_step", "base_row", "base_step", "ref_row",
           "ref_step", "weights_row", "weights_step", "trains_row", "trains_step", "mask_row", "mask_step"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def gradient_kernel(
    new_logp, base_logp, ref_logp, weights, trains, mask, log_mass, advantages, offsets, numbers, levels, pulls, inners,
    gradient, counts, integers, floats, token_sums, token_maxima,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    new_row: tl.int64, new_step: tl.int64, base_row: tl.int64, base_step: tl.int64,
    ref_row: tl.int64, ref_step: tl.int64, weights_row: tl.int64, weights_step: tl.int64,
    trains_row: tl.int64, trains_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Pass over TILING.rows slots: write the gradient before it is divided, its statistics, and sums of sequences."""
    extents = Extents(tokens, sequences, width, tiles)
    numbers = thresholds(numbers, PLAN)
    slots = tl.num_programs(0).to(tl.int64) * TILING.rows
    slot, owner, outside = slots_of_program(offsets, extents, steps, PLAN, TILING)
    stretch = stretch_of(offsets, owner, slot, extents, PLAN, TILING.tile)
    full, whole = coverage(stretch, extents, PLAN, TILING.tile)
    inputs = Inputs(
        PerToken(new_logp, new_row, new_step),
        PerToken(either(base_logp, new_logp), base_row, base_step),
        PerToken(either(ref_logp, new_logp), ref_row, ref_step),
        PerToken(either(weights, new_logp), weights_row, weights_step),
        PerToken(either(trains, new_logp), trains_row, trains_step),
        PerToken(either(mask, new_logp), mask_row, mask_step),
        contiguous(advantages, extents),
        contiguous(either(log_mass, new_logp), extents),
    )
    # One branch around all loads, so that all are under way before the first is needed.
    if full:
        parts = load_parts(inputs, stretch, PLAN, TILING, True, True)
    elif whole:
        parts = load_parts(inputs, stretch, PLAN, TILING, False, True)
    else:
        parts = load_parts(inputs, stretch, PLAN, TILING, False, False)
    like = part_of(parts[0]).new.to(real(PLAN))
    advantage, level, pull, inner = like, like, like, like
    if PLAN.advantages == "sequence":
        advantage = of_sequence(advantages, stretch, extents, like)
    if PLAN.phase == "write":
        if PLAN.levels:
            level = of_sequence(levels, stretch, extents, like)
        if PLAN.pulls:
            pull = of_sequence(pulls, stretch, extents, like)
        if PLAN.averages:
            inner = of_sequence(inners, stretch, extents, like)
    shared = Shared(outside, advantage, level, pull, inner, numbers)
    found, slopes = (), ()
    for i in tl.static_range(parts_of(TILING)):
        more, slope = loss_of_part(part_of(parts[i]), shared, PLAN)
        slopes = slopes + (slope,)
        if i == 0:
            found = more
        else:
            found = merged(found, more, PLAN)
    if PLAN.writes and PLAN.differentiable:
        if full:
            store_parts(contiguous(gradient, extents), slopes, stretch, PLAN, TILING, True)
        else:
            store_parts(contiguous(gradient, extents), slopes, stretch, PLAN, TILING, False)
    put_sums(found, token_sums, PLAN)
    put_slots(found, counts, slots, slot, PLAN, "counts")
    put_slots(found, floats, slots, slot, PLAN, "floats")
    put_slots(found, integers, slots, slot, PLAN, "integers")
    put_maxima(found, token_maxima, PLAN)


@triton.jit
def scale_parts(
    gradient: tl.tensor, scaled: tl.tensor, upstream: tl.tensor, divisor: tl.tensor, inners: tl.tensor,
    stretch: Stretch, extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Scale all parts of a tile."""
    factor = (tl.load(upstream).to(tl.float64) / tl.load(divisor)).to(gradient.dtype.element_ty)
    for i in tl.static_range(parts_of(TILING)):
        place = positions(i * TILING.part, TILING.lanes, TILING.vec)
        inside = inside_of(stretch, place)
        where = addresses(contiguous(gradient, extents), stretch, place, PLAN, TILING, True)
        x = load_tokens(where, inside, FULL)
        if PLAN.averages:
            x = x * of_sequence(inners, stretch, extents, x)
        where = addresses(contiguous(scaled, extents), stretch, place, PLAN, TILING, True)
        store_tokens(where, x * factor, inside, FULL)


@triton.jit(do_not_specialize=["tokens", "sequences", "width", "tiles", "steps"])
def scale_kernel(
    gradient, inners, upstream, divisor, offsets, scaled,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    PLAN: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Scale the gradient in backward: multiply by the upstream gradient and by `inners`, divide by the divisor."""
    extents = Extents(tokens, sequences, width, tiles)
    slot, owner, _ = slots_of_program(offsets, extents, steps, PLAN, TILING)
    stretch = stretch_of(offsets, owner, slot, extents, PLAN, TILING.tile)
    full, _ = coverage(stretch, extents, PLAN, TILING.tile)
    if full:
        scale_parts(gradient, scaled, upstream, divisor, inners, stretch, extents, PLAN, TILING, True)
    else:
        scale_parts(gradient, scaled, upstream, divisor, inners, stretch, extents, PLAN, TILING, False)
