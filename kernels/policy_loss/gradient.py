"""The policy loss over tokens: read every input, write the gradient, add up the statistics.

tiles.py says which tokens a program has, sums.py how they add up. A surrogate whose gradient depends on whole
sequences takes two passes over the tokens, and only the last writes; see `LossPlan.phase`.

One launch for a pass, and one of `scale` in backward; docs/kernels.md counts what they execute a token. Programs of a
second pass add up the slots of the sequences in their tile, so no launch stands between the passes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..accumulators import Tables
from ..correct.plan import Plan
from ..correct.read import correct_tokens
from ..correct.steps import Context, Step, any_marked, count_outside, load_marks
from ..correct.units import REJECTED, WEIGHTLESS
from ..gather import slot_tables
from ..partials import add_up_part, count_in, groups, reset, zero_counters
from ..sums import (
    emptied,
    empty,
    nothing,
    ordered,
    put_batch,
    put_outside,
    put_slot,
    record,
    record_extrema,
    record_statistic,
    record_sum,
    with_batch,
    with_slot,
    with_words,
)
from ..tiles import (
    Extents,
    PerToken,
    Span,
    Tile,
    contiguous,
    either,
    ends_by,
    entry_of,
    first_span,
    launched,
    load_step,
    next_span,
    of_sequences,
    places_of,
    store_step,
    tile_of_program,
    zeros_by,
)
from ..tokens import LARGEST_D, has, is_finite, limited, number, over_kept_set, real, thresholds
from .formulas import Token, penalty, penalty_factor, policy
from .plan import LossPlan
from .sequences import assumed_divisor, finish, prepare_sequences

SMALLEST_WEIGHT = tl.constexpr(1e-10)  # in a geometric mean
SMALLEST_RATIO = tl.constexpr(1e-8)  # in a product


class LossInputs(NamedTuple):
    """The tensors of a pass; one that the plan lacks is never read."""

    train: PerToken
    rollout: PerToken
    new: PerToken
    base: PerToken
    ref: PerToken
    weights: PerToken
    trains: PerToken
    mask: PerToken
    advantages: PerToken
    mass: PerToken
    scales: PerToken
    chosen: PerToken


class LossStep(NamedTuple):
    """The inputs of a step, [PARTS, LANES, VEC] each; one that the plan lacks may hold anything."""

    train: tl.tensor
    rollout: tl.tensor
    new: tl.tensor
    base: tl.tensor
    ref: tl.tensor
    weights: tl.tensor
    trains: tl.tensor
    advantages: tl.tensor
    marked: tl.tensor  # bool, by the mask
    valid: tl.tensor  # bool; False outside of sequences
    mass: tl.tensor
    scale: tl.tensor  # the factor of all that the token adds
    chosen: tl.tensor  # non-zero where the surrogate chose the token from the whole batch


class SequenceValues(NamedTuple):
    """The values of sequences, at their tokens: [PARTS, LANES, VEC]; those that the plan lacks may be anything."""

    advantage: tl.tensor
    level: tl.tensor  # the mean or the total log-ratio of a sequence
    pull: tl.tensor  # the term of a sequence in the gradient of its tokens; see formulas.Token
    inner: tl.tensor  # the factor of the sequence's loss
    numbers: tl.tuple


# --- loading ---


@triton.jit
def load_input(
    tensor: PerToken, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
    GIVEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load a step of a tensor if it is given; else return anything."""
    if GIVEN:
        return load_step(tensor, tile, first, PLAN, TILING, UNIT, WHOLE)
    else:
        return places_of(first, TILING) < tile.length


@triton.jit
def load_inputs(
    inputs: LossInputs, marks, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr, WHOLE: tl.constexpr
) -> LossStep:
    """Load a step. marks: its part of the mask, where the plan skips steps. WHOLE: all of it lies within sequences."""
    new = load_input(inputs.new, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    base = load_input(inputs.base, tile, first, PLAN, TILING, TILING.unit, PLAN.based, WHOLE)
    ref = load_input(inputs.ref, tile, first, PLAN, TILING, TILING.unit, PLAN.referred, WHOLE)
    alone: tl.constexpr = PLAN.trainer is None
    weights = load_input(inputs.weights, tile, first, PLAN, TILING, TILING.unit, PLAN.weighted and alone, WHOLE)
    trains = load_input(inputs.trains, tile, first, PLAN, TILING, TILING.unit, PLAN.trained and alone, WHOLE)
    train, rollout = new, base
    if PLAN.trainer == "own":
        train = load_input(inputs.train, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    elif PLAN.trainer == "base":
        train = base
    if PLAN.engine == "own":
        rollout = load_input(inputs.rollout, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    advantages = load_input(inputs.advantages, tile, first, PLAN, TILING, True, PLAN.advantages == "token", WHOLE)
    mass = load_input(inputs.mass, tile, first, PLAN, TILING, True, PLAN.has_mass, WHOLE)
    scale = load_input(inputs.scales, tile, first, PLAN, TILING, True, PLAN.has_scales, WHOLE)
    chosen = load_input(inputs.chosen, tile, first, PLAN, TILING, True, PLAN.chosen, WHOLE)
    marked = tl.full(new.shape, 1, tl.int1)
    if PLAN.skips:
        marked = marks != 0
    elif PLAN.masked:
        marked = load_step(inputs.mask, tile, first, PLAN, TILING, TILING.unit, WHOLE) != 0
    valid = marked
    if not WHOLE:
        place = places_of(first, TILING)
        valid = valid & (place >= tile.begin) & (place < tile.end)
    return LossStep(train, rollout, new, base, ref, weights, trains, advantages, marked, valid, mass, scale, chosen)


@triton.jit
def with_correction(step: LossStep, weight, kept, PLAN: tl.constexpr) -> LossStep:
    """Give a step the weights and the training mask of a correction in the same pass."""
    weights = kept if PLAN.gated else weight
    return LossStep(step.train, step.rollout, step.new, step.base, step.ref, weights, kept, step.advantages,
                    step.marked, step.valid, step.mass, step.scale, step.chosen)  # fmt: skip


# --- sums of the loss: of the batch, or by slot where a sequence may still be rejected ---


@triton.jit
def tally(found: tl.tuple, COLUMNS: tl.constexpr, name: tl.constexpr, x) -> tl.tuple:
    """Record a sum over tokens."""
    found = record(found, COLUMNS, "token_sums", name, x)
    return record(found, COLUMNS, "floats", name, x)


@triton.jit
def count(found: tl.tuple, COLUMNS: tl.constexpr, name: tl.constexpr, which) -> tl.tuple:
    """Record a count of tokens."""
    found = record(found, COLUMNS, "token_sums", name, tl.where(which, 1.0, 0.0).to(real(COLUMNS)))
    return record(found, COLUMNS, "counts", name, which)


@triton.jit
def bracket(found: tl.tuple, COLUMNS: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among) -> tl.tuple:
    """Record the extrema among some tokens."""
    found = record_extrema(found, COLUMNS, low, high, x, among)
    if has(COLUMNS, "peaks", high):
        found = record(found, COLUMNS, "peaks", high, ordered(tl.where(among, x, float("-inf")), COLUMNS))
        found = record(found, COLUMNS, "peaks", low, ordered(tl.where(among, -x, float("-inf")), COLUMNS))
    return found


# --- a step ---


@triton.jit
def loss_of_step(
    found: tl.tuple, step: LossStep, values: SequenceValues, PLAN: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tuple, tl.tensor]:
    """Record the sums of a step in the accumulators of COLUMNS, and return its gradient."""
    new, valid, advantage = step.new.to(real(PLAN)), step.valid, values.advantage
    known = is_finite(new)
    compared, x = new, tl.zeros_like(new)
    if PLAN.based:
        compared, base = over_kept_set(new, step.base.to(real(PLAN)), step.mass, PLAN)
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
    weight, k, scale = new, new, new
    if PLAN.has_scales:
        scale = step.scale.to(real(PLAN))
        known = known & is_finite(scale)
        if PLAN.nonfinite == "propagate":
            scale = tl.where(is_finite(scale), scale, 0.0)
    if PLAN.gated:
        weight = (step.weights != 0).to(real(PLAN))
    elif PLAN.weighted:
        weight = step.weights.to(real(PLAN))
        known = known & is_finite(weight)
    if PLAN.referred:
        k = new - step.ref.to(real(PLAN))
        known = known & is_finite(k)
    among = valid
    if PLAN.nonfinite != "propagate":
        among = valid & known
    counted = among
    if PLAN.trained:
        counted = among & (step.trains != 0)
    if PLAN.adds_up:
        if PLAN.masked:
            found = record(found, COLUMNS, "counts", "valid", valid)
        found = record(found, COLUMNS, "counts", "counted", counted)
    token = Token(new, compared, x, advantage, weight, values.level, values.pull, step.chosen)
    if PLAN.phase == "sum":
        return sum_of_sequence(found, token, scale, counted, values.numbers, PLAN), x
    else:
        broken = valid & (known == 0)
        return loss_of_tokens(found, token, k, scale, broken, among, counted, values, PLAN, COLUMNS)


@triton.jit
def sum_of_sequence(found: tl.tuple, token: Token, scale, counted, numbers: tl.tuple, PLAN: tl.constexpr) -> tl.tuple:
    """Record the sums that the loss of a whole sequence needs."""
    x, advantage, weight = token.x, token.advantage, token.weight
    if PLAN.surrogate == "GMPO":
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        x = limited(x, -clamp, clamp, PLAN)
        high, low = number(numbers, PLAN, "high").to(x.dtype), number(numbers, PLAN, "low").to(x.dtype)
        x = tl.where((advantage > 0) & (x > high), high, tl.where((advantage < 0) & (x < -low), -low, x))
        if PLAN.weighted:
            log_weight = tl.log(tl.where(weight < SMALLEST_WEIGHT, SMALLEST_WEIGHT, weight))
            found = record_sum(found, PLAN, "log_weight", tl.where(counted, log_weight, 0.0))
        found = record_statistic(found, PLAN, "advantage", tl.where(counted, advantage, 0.0))
    elif PLAN.pulls:
        if PLAN.weighted:
            weighted = advantage * weight
        else:
            weighted = advantage
        if PLAN.has_scales:
            weighted = weighted * scale
        down = advantage < 0
        found = record_statistic(found, PLAN, "down", tl.where(counted & down, weighted, 0.0))
        found = record_statistic(found, PLAN, "up", tl.where(counted & (down == 0), weighted, 0.0))
    elif PLAN.surrogate == "VESPO":
        clamp = number(numbers, PLAN, "clamp").to(x.dtype)
        x = limited(x, -clamp, clamp, PLAN)
        if PLAN.weighted:
            log_weight = tl.log(tl.where(weight < SMALLEST_RATIO, SMALLEST_RATIO, weight))
            x += tl.where(log_weight > clamp, clamp, log_weight)
    return record_sum(found, PLAN, "level", tl.where(counted, x, 0.0))


@triton.jit
def loss_of_tokens(
    found: tl.tuple, token: Token, k, scale, broken, among, counted, values: SequenceValues, PLAN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Record the loss and its statistics, and return its gradient.

    Args:
        found: The accumulators.
        token: The quantities that the loss is computed from.
        k: new_logp less the reference policy's.
        scale: The factor of all that a token adds, where the plan has it.
        broken: Valid tokens with an input that is not finite.
        among: Valid tokens that are read; with nonfinite="propagate" all valid ones.
        counted: Those of them that train.
        values: What tokens read of their sequences.
        PLAN: The plan.
        COLUMNS: The plan that has the accumulators.
    """
    numbers, new, x = values.numbers, token.new, token.x
    term = policy(token, numbers, PLAN)
    total, gradient = tl.where(counted, term.value, 0.0), tl.where(counted, term.slope, 0.0)
    pulled = gradient
    if PLAN.has_scales and PLAN.pulls:
        gradient = tl.zeros_like(gradient)
    found = count(found, COLUMNS, "loss_tokens_nonfinite", broken)
    found = tally(found, COLUMNS, "loss_policy", total)
    found = count(found, COLUMNS, "clip_low", term.low & counted)
    found = count(found, COLUMNS, "clip_high", term.high & counted)
    found = count(found, COLUMNS, "clip_dual", term.dual & counted)
    found = tally(found, COLUMNS, "ppo_d", tl.where(counted, limited(x, -LARGEST_D, LARGEST_D, PLAN), 0.0))
    excess = tl.where(counted, term.excess, 0.0)
    found = tally(found, COLUMNS, "ppo_ratio", excess)
    found = tally(found, COLUMNS, "ppo_ratio2", excess * excess)
    found = tally(found, COLUMNS, "ppo_k3", tl.where(counted, term.k3, 0.0))
    found = bracket(found, COLUMNS, "-min_ppo_log_ratio", "max_ppo_log_ratio", term.used, counted)
    if PLAN.kl is not None:
        held = among if PLAN.kl_everywhere else counted
        # Of their own, because Triton 3.6 passes on the text of an attribute only as a constant.
        kind: tl.constexpr = PLAN.kl
        of_gradient: tl.constexpr = PLAN.kl_gradient
        value, slope = penalty(k, kind, numbers, PLAN)
        if of_gradient != kind:
            _, slope = penalty(k, of_gradient, numbers, PLAN)
        factor, factor_slope = penalty_factor(x, token.weight, numbers, PLAN)
        coefficient = number(numbers, PLAN, "kl").to(new.dtype)
        total += tl.where(held, coefficient * value * factor, 0.0)
        gradient += tl.where(held, coefficient * (slope * factor + value * factor_slope), 0.0)
        found = tally(found, COLUMNS, "ref_kl", tl.where(held, value, 0.0))
    if PLAN.regularizer is not None:
        held = among if PLAN.regularizer == "all" else counted
        saturated, flows = limited(x, -LARGEST_D, LARGEST_D, PLAN), tl.abs(x) <= LARGEST_D
        coefficient = number(numbers, PLAN, "regularizer").to(new.dtype)
        total += tl.where(held, coefficient * (saturated * saturated), 0.0)
        gradient += tl.where(held & flows, 2.0 * coefficient * saturated, 0.0)
        found = tally(found, COLUMNS, "log_ratio2", tl.where(held, saturated * saturated, 0.0))
    if PLAN.has_scales:
        total = tl.where(among, total * scale, 0.0)
        gradient = tl.where(among, gradient * scale, 0.0)
        if PLAN.pulls:
            # The factors of all tokens of the sequence are in its derivative already.
            gradient += pulled
    if PLAN.averages and PLAN.phase == "write":
        total, gradient = total * values.inner, gradient * values.inner
    return tally(found, COLUMNS, "total", total), gradient


# --- one step of the walk ---


class Walk(NamedTuple):
    """The place of a program: its tile, the sequence it has come to, and the first token of a step."""

    tile: Tile
    span: Span
    first: tl.tensor
    offsets: tl.tensor
    extents: Extents


class OfUnits(NamedTuple):
    """Tables by sequence; in the last three, sequence s has entry s - `span.owner`, a slot of this tile."""

    advantages: tl.tensor
    states: tl.tensor  # what a settled correction has decided, see `correct.units`
    weights: tl.tensor  # its weights of sequences
    levels: tl.tensor
    pulls: tl.tensor
    inners: tl.tensor


@triton.jit
def at_tokens(table, like, walk: Walk, PLAN: tl.constexpr, TILING: tl.constexpr, own: tl.tensor | None = None):
    """Load a table by sequence for the tokens of a step."""
    return of_sequences(table, like, walk.span, walk.first, walk.offsets, walk.tile, walk.extents, PLAN, TILING,
                        own=own)  # fmt: skip


@triton.constexpr_function
def columns_of(plan: LossPlan, spec: Plan | None) -> Tables:
    """Return the plan whose columns a pass fills: the correction's, unless that has run before."""
    return plan if spec is None or spec.settled else spec


@triton.constexpr_function
def counts_outside(spec: Plan | None) -> bool:
    """Return whether the tokens of no sequence are counted: by the first pass of a correction."""
    return spec is not None and not spec.settled


@triton.jit
def settle(
    weight, kept, of_units: OfUnits, walk: Walk, SPEC: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Apply what was decided about sequences to the weights and the training mask of a step."""
    state = at_tokens(of_units.states, zeros_by(weight), walk, SPEC, TILING)
    if SPEC.spreads:
        # Without marks every token has the weight of its sequence.
        weight = tl.where(weight != 0.0, at_tokens(of_units.weights, weight, walk, SPEC, TILING), 0.0)
    weight = tl.where((state & WEIGHTLESS) != 0, 0.0, weight)
    if SPEC.edits_mask:
        kept = kept & ((state & REJECTED) == 0)
    return weight, kept


@triton.jit
def place_of_step(tile: Tile, first, TILING: tl.constexpr):
    """Find the entry of a step in a table of all steps."""
    return tl.program_id(0).to(tl.int64) * (tile.size // TILING.step) + first // TILING.step


@triton.jit
def take_step(
    inputs: LossInputs, marks, walk: Walk, own, of_units: OfUnits, externals: tl.tuple, numbers: tl.tuple,
    spec_numbers: tl.tuple, gradient, share, PLAN: tl.constexpr, SPEC: tl.constexpr, TILING: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Load a step, correct it where a Spec is given, and write its gradient. Return its sums, and tokens outside.

    own: The advantage of the span's owner.
    """
    COLUMNS: tl.constexpr = columns_of(PLAN, SPEC)
    tile, first, outside = walk.tile, walk.first, walk.first * 0
    whole = (first >= tile.begin) & (first + TILING.step <= tile.end)
    if whole:
        step = load_inputs(inputs, marks, tile, first, PLAN, TILING, True)
    else:
        step = load_inputs(inputs, marks, tile, first, PLAN, TILING, False)
        if counts_outside(SPEC):
            outside += count_outside(step.marked, step.valid, tile, first, PLAN, TILING)
    like, found = step.new.to(real(PLAN)), nothing(COLUMNS)
    advantage, level, pull, inner = like, like, like, like
    if PLAN.advantages == "token":
        advantage = step.advantages.to(real(PLAN))
    elif PLAN.advantages == "sequence":
        advantage = at_tokens(of_units.advantages, like, walk, PLAN, TILING, own)
    if PLAN.phase == "write":
        if PLAN.levels:
            level = at_tokens(of_units.levels, like, walk, PLAN, TILING)
        if PLAN.pulls:
            pull = at_tokens(of_units.pulls, like, walk, PLAN, TILING)
        if PLAN.averages:
            inner = at_tokens(of_units.inners, like, walk, PLAN, TILING)
    if SPEC is not None:
        context = Context(tile, walk.span, first, whole, walk.extents, walk.offsets, of_units.advantages, externals,
                          gradient, 0, gradient, spec_numbers)  # fmt: skip
        logps = Step(step.train, step.rollout, step.marked, step.valid, step.mass)
        if SPEC.settled:
            _, weight, trained = correct_tokens((), logps, like, advantage, like, context, SPEC, TILING)
            weight, trained = settle(weight, trained, of_units, walk, SPEC, TILING)
        else:
            found, weight, trained = correct_tokens(found, logps, like, advantage, like, context, SPEC, TILING)
        step = with_correction(step, weight, trained, PLAN)
    values = SequenceValues(advantage, level, pull, inner, numbers)
    found, slope = loss_of_step(found, step, values, PLAN, COLUMNS)
    if PLAN.writes and PLAN.differentiable:
        slope = slope * share
        if whole:
            store_step(contiguous(gradient, walk.extents), slope, tile, first, PLAN, TILING, True)
        else:
            store_step(contiguous(gradient, walk.extents), slope, tile, first, PLAN, TILING, False)
    return with_words(found, COLUMNS, TILING), outside


# --- the kernels ---


@launched
def gradient_kernel(
    train_logp, rollout_logp, new_logp, base_logp, ref_logp, weights, trains, mask, log_mass, scales, chosen,
    advantages, externals: tl.tuple, offsets, within, numbers, spec_numbers, states, sequence_weights, levels, pulls,
    inners, gradient, counts, integers, floats, peaks, token_sums, token_maxima, counter, part_counter, part_sums,
    part_maxima, given, value, divisor, rest, flags, before, statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    steps: tl.int32, sequence_programs: tl.int32, owner_count: tl.int64, train_row: tl.int64, train_step: tl.int64,
    rollout_row: tl.int64, rollout_step: tl.int64, new_row: tl.int64, new_step: tl.int64, base_row: tl.int64,
    base_step: tl.int64, ref_row: tl.int64, ref_step: tl.int64, weights_row: tl.int64, weights_step: tl.int64,
    trains_row: tl.int64, trains_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64, parts: tl.int32,
    part: tl.int32, sums_before: tl.int32, maxima_before: tl.int32,
    PLAN: tl.constexpr, SPEC: tl.constexpr, TILING: tl.constexpr, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Pass over a tile: write the gradient over the assumed divisor, its statistics, and sums of sequences.

    In the phase "write" the last program of a part adds it up, and the last of these finishes. SPEC is the plan of a
    correction in the same pass, with the columns of both, or with none where it has decided about sequences before;
    None: weights and masks are ready.
    """
    COLUMNS: tl.constexpr = columns_of(PLAN, SPEC)
    if tl.program_id(0) == 0:
        # For the programs that finish to count themselves in.
        if PLAN.adds_up:
            reset(counter, sequence_programs)
        if PLAN.phase == "sum":
            zero_counters(part_counter, parts)
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    numbers = thresholds(numbers, PLAN)
    tables = (counts, either(integers, counts), either(floats, counts), either(peaks, counts))
    tile = tile_of_program(offsets, extents, PLAN, TILING)
    span = first_span(offsets, tile, extents, steps, PLAN)
    states, of_weights = either(states, advantages), either(sequence_weights, advantages)
    if PLAN.phase == "write":
        prepare_sequences(slot_tables(counts, integers, floats, None), levels, pulls, inners, token_sums, offsets,
                          within, span, extents, owner_count - 2, slots, numbers, PLAN, SHAPE)  # fmt: skip
        # Each thread reads what any has stored.
        tl.debug_barrier()
        # From the number of a sequence to the slot that it has in this tile.
        place = tl.program_id(0).to(tl.int64) + (1 if PLAN.packed else -tile.row)
        of_units = OfUnits(advantages, states, of_weights, either(levels, advantages) + place,
                           either(pulls, advantages) + place, either(inners, advantages) + place)  # fmt: skip
    else:
        of_units = OfUnits(advantages, states, of_weights, advantages, advantages, advantages)
    inputs = LossInputs(
        PerToken(either(train_logp, new_logp), train_row, train_step),
        PerToken(either(rollout_logp, new_logp), rollout_row, rollout_step),
        PerToken(new_logp, new_row, new_step),
        PerToken(either(base_logp, new_logp), base_row, base_step),
        PerToken(either(ref_logp, new_logp), ref_row, ref_step),
        PerToken(either(weights, new_logp), weights_row, weights_step),
        PerToken(either(trains, new_logp), trains_row, trains_step),
        PerToken(either(mask, new_logp), mask_row, mask_step),
        contiguous(advantages, extents),
        contiguous(either(log_mass, new_logp), extents),
        contiguous(either(scales, new_logp), extents),
        contiguous(either(chosen, new_logp), extents),
    )
    share, own = extents.tokens, extents.tokens
    if PLAN.writes:
        share = (1.0 / assumed_divisor(given, offsets, extents, numbers, PLAN)).to(real(PLAN))
    if PLAN.advantages == "sequence":
        own = entry_of(advantages, span.owner, extents, PLAN)
    if SPEC is not None:
        spec_numbers = thresholds(spec_numbers, SPEC)
    first_owner, outside = span.owner, tile.length * 0
    kept = empty(COLUMNS, TILING)
    if PLAN.skips:
        ahead = load_marks(inputs.mask, tile, 0, PLAN, TILING)
    # At least one step, because owners of no token may end in a tile of none.
    for first in range(0, tl.maximum(tile.length, 1), TILING.step):
        if PLAN.skips:
            marks = ahead
            ahead = load_marks(inputs.mask, tile, first + TILING.step, PLAN, TILING)
            some = any_marked(marks)
            if PLAN.writes and PLAN.differentiable:
                tl.store(flags + place_of_step(tile, first, TILING), some.to(tl.int8))
            if some:
                found, _ = take_step(inputs, marks, Walk(tile, span, first, offsets, extents), own, of_units, externals,
                                     numbers, spec_numbers, gradient, share, PLAN, SPEC, TILING)  # fmt: skip
                kept = with_slot(with_batch(kept, found, COLUMNS), found, None, None, first, COLUMNS, TILING)
            elif PLAN.writes and PLAN.differentiable:
                store_step(contiguous(gradient, extents), tl.zeros(marks.shape, real(PLAN)), tile, first, PLAN, TILING,
                           False)  # fmt: skip
        else:
            found, more = take_step(inputs, 0, Walk(tile, span, first, offsets, extents), own, of_units, externals,
                                    numbers, spec_numbers, gradient, share, PLAN, SPEC, TILING)  # fmt: skip
            outside += more
            kept = with_batch(kept, found, COLUMNS)
            if PLAN.packed:
                while ends_by(span, first, TILING):
                    if PLAN.adds_up:
                        kept = with_slot(kept, found, span.start, span.end, first, COLUMNS, TILING)
                        put_slot(kept, tables, slots, span, COLUMNS)
                        kept = emptied(kept, COLUMNS, TILING)
                    span = next_span(span, offsets, tile, extents, PLAN)
                    if PLAN.advantages == "sequence":
                        own = entry_of(advantages, span.owner, extents, PLAN)
            if PLAN.adds_up:
                if span.start <= first:
                    kept = with_slot(kept, found, None, None, first, COLUMNS, TILING)
                else:
                    kept = with_slot(kept, found, span.start, None, first, COLUMNS, TILING)
    if PLAN.adds_up:
        put_slot(kept, tables, slots, span, COLUMNS)
    if counts_outside(SPEC) and PLAN.packed:
        put_outside(counts, outside, tile.begin, first_owner, span.last, extents)
    put_batch(kept, token_sums, token_maxima, COLUMNS)
    if PLAN.phase == "write":
        mine, programs = tl.program_id(0) // part, tl.num_programs(0)
        if count_in(part_counter + mine) == tl.minimum(part, programs - mine * part) - 1:
            for group in tl.static_range(groups(PLAN)):
                add_up_part(mine * groups(PLAN) + group, token_sums, token_maxima, part_sums, part_maxima, programs,
                            part, PLAN)  # fmt: skip
            if count_in(counter) == parts - 1:
                finish(part_sums, part_sums, part_maxima, given, value, divisor, rest, before, statistics, sums_before,
                       maxima_before, sequence_programs, parts, offsets, extents, numbers, PLAN)  # fmt: skip


@triton.jit
def scale_step(gradient, scaled, inners, factor, walk: Walk, PLAN: tl.constexpr, TILING: tl.constexpr) -> None:
    """Scale a step of the gradient."""
    tile, first = walk.tile, walk.first
    whole = first + TILING.step <= tile.length
    if whole:
        x = load_step(contiguous(gradient, walk.extents), tile, first, PLAN, TILING, True, True)
    else:
        x = load_step(contiguous(gradient, walk.extents), tile, first, PLAN, TILING, True, False)
    if PLAN.averages:
        x = x * at_tokens(inners, x, walk, PLAN, TILING)
    if whole:
        store_step(contiguous(scaled, walk.extents), x * factor, tile, first, PLAN, TILING, True)
    else:
        store_step(contiguous(scaled, walk.extents), x * factor, tile, first, PLAN, TILING, False)


@launched
def scale_kernel(
    gradient, inners, upstream, rest, offsets, flags, scaled,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, steps: tl.int32,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Scale the gradient in backward by the upstream gradient over `rest`, and by `inners` if given."""
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    factor = (tl.load(upstream).to(tl.float64) / tl.load(rest)).to(gradient.dtype.element_ty)
    tile = tile_of_program(offsets, extents, PLAN, TILING)
    span = first_span(offsets, tile, extents, steps, PLAN)
    length = tile.length
    if PLAN.in_place and not PLAN.averages:
        # Nothing is to be done where the gradient is final as it was written.
        length = tl.where(factor == 1.0, 0, length)
    for first in range(0, length, TILING.step):
        walk = Walk(tile, span, first, offsets, extents)
        if PLAN.flagged:
            if tl.load(flags + place_of_step(tile, first, TILING)) != 0:
                scale_step(gradient, scaled, either(inners, gradient), factor, walk, PLAN, TILING)
            elif not PLAN.in_place:
                nothing_there = tl.zeros(places_of(first, TILING).shape, gradient.dtype.element_ty)
                store_step(contiguous(scaled, extents), nothing_there, tile, first, PLAN, TILING, False)
        else:
            scale_step(gradient, scaled, either(inners, gradient), factor, walk, PLAN, TILING)
        if PLAN.averages and PLAN.packed:
            while ends_by(span, first, TILING):
                span = next_span(span, offsets, tile, extents, PLAN)
