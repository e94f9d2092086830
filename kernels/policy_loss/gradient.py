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

from .. import partials, sums, tiles
from ..correct import steps
from ..correct.plan import Plan
from ..correct.read import correct_tokens
from ..correct.steps import Context, Step
from ..correct.units import REJECTED, WEIGHTLESS
from ..gather import slot_tables
from ..sums import ordered, record, record_extrema, record_statistic, record_sum
from ..tables import Tables, has, number, thresholds
from ..tiles import Extents, PerToken, Span, Tile, contiguous, either, load_step, places_of, store_step
from ..tokens import LARGEST_D, is_finite, limited, over_kept_set
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
def load_input(tensor: PerToken, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
               GIVEN: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Load a step of a tensor if it is given; else return anything."""
    if GIVEN:
        return load_step(tensor, tile, first, PLAN, TILING, UNIT, WHOLE)
    else:
        return places_of(first, TILING) < tile.length


@triton.jit
def load_inputs(inputs: LossInputs, b_marks, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr,
                WHOLE: tl.constexpr) -> LossStep:  # fmt: skip
    """Load a step. marks: its part of the mask, where the plan skips steps. WHOLE: all of it lies within sequences."""
    b_new = load_input(inputs.new, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    b_base = load_input(inputs.base, tile, first, PLAN, TILING, TILING.unit, PLAN.based, WHOLE)
    b_ref = load_input(inputs.ref, tile, first, PLAN, TILING, TILING.unit, PLAN.referred, WHOLE)
    alone: tl.constexpr = PLAN.trainer is None
    b_weights = load_input(inputs.weights, tile, first, PLAN, TILING, TILING.unit, PLAN.weighted and alone, WHOLE)
    b_trains = load_input(inputs.trains, tile, first, PLAN, TILING, TILING.unit, PLAN.trained and alone, WHOLE)
    b_train, b_rollout = b_new, b_base
    if PLAN.trainer == "own":
        b_train = load_input(inputs.train, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    elif PLAN.trainer == "base":
        b_train = b_base
    if PLAN.engine == "own":
        b_rollout = load_input(inputs.rollout, tile, first, PLAN, TILING, TILING.unit, True, WHOLE)
    b_advantages = load_input(inputs.advantages, tile, first, PLAN, TILING, True, PLAN.advantages == "token", WHOLE)
    b_mass = load_input(inputs.mass, tile, first, PLAN, TILING, True, PLAN.has_mass, WHOLE)
    b_scale = load_input(inputs.scales, tile, first, PLAN, TILING, True, PLAN.has_scales, WHOLE)
    b_chosen = load_input(inputs.chosen, tile, first, PLAN, TILING, True, PLAN.chosen, WHOLE)
    m_marked = tl.full(b_new.shape, 1, tl.int1)
    if PLAN.skips:
        m_marked = b_marks != 0
    elif PLAN.masked:
        m_marked = load_step(inputs.mask, tile, first, PLAN, TILING, TILING.unit, WHOLE) != 0
    m_valid = m_marked
    if not WHOLE:
        o_place = places_of(first, TILING)
        m_valid = m_valid & (o_place >= tile.begin) & (o_place < tile.end)
    return LossStep(b_train, b_rollout, b_new, b_base, b_ref, b_weights, b_trains, b_advantages, m_marked, m_valid,
                    b_mass, b_scale, b_chosen)  # fmt: skip


@triton.jit
def with_correction(step: LossStep, b_weight, m_kept, PLAN: tl.constexpr) -> LossStep:
    """Give a step the weights and the training mask of a correction in the same pass."""
    b_weights = m_kept if PLAN.gated else b_weight
    return LossStep(step.train, step.rollout, step.new, step.base, step.ref, b_weights, m_kept, step.advantages,
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
    found = record(found, COLUMNS, "token_sums", name, tl.where(which, 1.0, 0.0).to(tl.float32))
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
def loss_of_step(found: tl.tuple, step: LossStep, values: SequenceValues, PLAN: tl.constexpr,
                 COLUMNS: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Record the sums of a step in the accumulators of COLUMNS, and return its gradient."""
    b_new, m_valid, b_advantage = step.new.to(tl.float32), step.valid, values.advantage
    m_known = is_finite(b_new)
    b_compared, b_x = b_new, tl.zeros_like(b_new)
    if PLAN.based:
        b_compared, b_base = over_kept_set(b_new, step.base.to(tl.float32), step.mass, PLAN)
        b_x = b_compared - b_base
        m_whole = is_finite(b_x)
        if PLAN.nonfinite == "neutral":
            # A base that is not finite is read as new_logp.
            b_x = tl.where(m_whole, b_x, 0.0)
            if PLAN.mass is not None:
                b_compared = tl.where(m_whole, b_compared, b_new)
            m_known = m_known | m_whole
        else:
            m_known = m_whole
    m_known = m_known & is_finite(b_advantage)
    b_weight, b_k, b_scale = b_new, b_new, b_new
    if PLAN.has_scales:
        b_scale = step.scale.to(tl.float32)
        m_known = m_known & is_finite(b_scale)
        if PLAN.nonfinite == "propagate":
            b_scale = tl.where(is_finite(b_scale), b_scale, 0.0)
    if PLAN.gated:
        b_weight = (step.weights != 0).to(tl.float32)
    elif PLAN.weighted:
        b_weight = step.weights.to(tl.float32)
        m_known = m_known & is_finite(b_weight)
    if PLAN.referred:
        b_k = b_new - step.ref.to(tl.float32)
        m_known = m_known & is_finite(b_k)
    m_among = m_valid
    if PLAN.nonfinite != "propagate":
        m_among = m_valid & m_known
    m_counted = m_among
    if PLAN.trained:
        m_counted = m_among & (step.trains != 0)
    if PLAN.adds_up:
        if PLAN.masked:
            found = record(found, COLUMNS, "counts", "valid", m_valid)
        found = record(found, COLUMNS, "counts", "counted", m_counted)
    token = Token(b_new, b_compared, b_x, b_advantage, b_weight, values.level, values.pull, step.chosen)
    if PLAN.phase == "sum":
        return sum_of_sequence(found, token, b_scale, m_counted, values.numbers, PLAN), b_x
    else:
        m_broken = m_valid & (m_known == 0)
        return loss_of_tokens(found, token, b_k, b_scale, m_broken, m_among, m_counted, values, PLAN, COLUMNS)


@triton.jit
def sum_of_sequence(found: tl.tuple, token: Token, b_scale, m_counted, numbers: tl.tuple,
                    PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record the sums that the loss of a whole sequence needs."""
    b_x, b_advantage, b_weight = token.x, token.advantage, token.weight
    if PLAN.surrogate == "GMPO":
        clamp = number(numbers, PLAN, "clamp").to(b_x.dtype)
        b_x = limited(b_x, -clamp, clamp, PLAN)
        high, low = number(numbers, PLAN, "high").to(b_x.dtype), number(numbers, PLAN, "low").to(b_x.dtype)
        b_x = tl.where((b_advantage > 0) & (b_x > high), high, tl.where((b_advantage < 0) & (b_x < -low), -low, b_x))
        if PLAN.weighted:
            b_log_weight = tl.log(tl.where(b_weight < SMALLEST_WEIGHT, SMALLEST_WEIGHT, b_weight))
            found = record_sum(found, PLAN, "log_weight", tl.where(m_counted, b_log_weight, 0.0))
        found = record_statistic(found, PLAN, "advantage", tl.where(m_counted, b_advantage, 0.0))
    elif PLAN.pulls:
        if PLAN.weighted:
            b_weighted = b_advantage * b_weight
        else:
            b_weighted = b_advantage
        if PLAN.has_scales:
            b_weighted = b_weighted * b_scale
        m_down = b_advantage < 0
        found = record_statistic(found, PLAN, "down", tl.where(m_counted & m_down, b_weighted, 0.0))
        found = record_statistic(found, PLAN, "up", tl.where(m_counted & (m_down == 0), b_weighted, 0.0))
    elif PLAN.surrogate == "VESPO":
        clamp = number(numbers, PLAN, "clamp").to(b_x.dtype)
        b_x = limited(b_x, -clamp, clamp, PLAN)
        if PLAN.weighted:
            b_log_weight = tl.log(tl.where(b_weight < SMALLEST_RATIO, SMALLEST_RATIO, b_weight))
            b_x += tl.where(b_log_weight > clamp, clamp, b_log_weight)
    return record_sum(found, PLAN, "level", tl.where(m_counted, b_x, 0.0))


@triton.jit
def loss_of_tokens(found: tl.tuple, token: Token, b_k, b_scale, m_broken, m_among, m_counted, values: SequenceValues,
                   PLAN: tl.constexpr, COLUMNS: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Record the loss and its statistics, and return its gradient.

    Args:
        found: The accumulators.
        token: The quantities that the loss is computed from.
        b_k: new_logp less the reference policy's.
        b_scale: The factor of all that a token adds, where the plan has it.
        m_broken: Valid tokens with an input that is not finite.
        m_among: Valid tokens that are read; with nonfinite="propagate" all valid ones.
        m_counted: Those of them that train.
        values: What tokens read of their sequences.
        PLAN: The plan.
        COLUMNS: The plan that has the accumulators.
    """
    numbers, b_new, b_x = values.numbers, token.new, token.x
    term = policy(token, numbers, PLAN)
    b_total, b_gradient = tl.where(m_counted, term.value, 0.0), tl.where(m_counted, term.slope, 0.0)
    b_pulled = b_gradient
    if PLAN.has_scales and PLAN.pulls:
        b_gradient = tl.zeros_like(b_gradient)
    found = count(found, COLUMNS, "loss_tokens_nonfinite", m_broken)
    found = tally(found, COLUMNS, "loss_policy", b_total)
    found = count(found, COLUMNS, "clip_low", term.low & m_counted)
    found = count(found, COLUMNS, "clip_high", term.high & m_counted)
    found = count(found, COLUMNS, "clip_dual", term.dual & m_counted)
    found = tally(found, COLUMNS, "ppo_d", tl.where(m_counted, limited(b_x, -LARGEST_D, LARGEST_D, PLAN), 0.0))
    b_excess = tl.where(m_counted, term.excess, 0.0)
    found = tally(found, COLUMNS, "ppo_ratio", b_excess)
    found = tally(found, COLUMNS, "ppo_ratio2", b_excess * b_excess)
    found = tally(found, COLUMNS, "ppo_k3", tl.where(m_counted, term.k3, 0.0))
    found = bracket(found, COLUMNS, "-min_ppo_log_ratio", "max_ppo_log_ratio", term.used, m_counted)
    if PLAN.kl is not None:
        m_held = m_among if PLAN.kl_everywhere else m_counted
        # Of their own, because Triton 3.6 passes on the text of an attribute only as a constant.
        kind: tl.constexpr = PLAN.kl
        of_gradient: tl.constexpr = PLAN.kl_gradient
        b_value, b_slope = penalty(b_k, kind, numbers, PLAN)
        if of_gradient != kind:
            _, b_slope = penalty(b_k, of_gradient, numbers, PLAN)
        b_factor, b_factor_slope = penalty_factor(b_x, token.weight, numbers, PLAN)
        coefficient = number(numbers, PLAN, "kl").to(b_new.dtype)
        b_total += tl.where(m_held, coefficient * b_value * b_factor, 0.0)
        b_gradient += tl.where(m_held, coefficient * (b_slope * b_factor + b_value * b_factor_slope), 0.0)
        found = tally(found, COLUMNS, "ref_kl", tl.where(m_held, b_value, 0.0))
    if PLAN.regularizer is not None:
        m_held = m_among if PLAN.regularizer == "all" else m_counted
        b_saturated, m_flows = limited(b_x, -LARGEST_D, LARGEST_D, PLAN), tl.abs(b_x) <= LARGEST_D
        coefficient = number(numbers, PLAN, "regularizer").to(b_new.dtype)
        b_total += tl.where(m_held, coefficient * (b_saturated * b_saturated), 0.0)
        b_gradient += tl.where(m_held & m_flows, 2.0 * coefficient * b_saturated, 0.0)
        found = tally(found, COLUMNS, "log_ratio2", tl.where(m_held, b_saturated * b_saturated, 0.0))
    if PLAN.has_scales:
        b_total = tl.where(m_among, b_total * b_scale, 0.0)
        b_gradient = tl.where(m_among, b_gradient * b_scale, 0.0)
        if PLAN.pulls:
            # The factors of all tokens of the sequence are in its derivative already.
            b_gradient += b_pulled
    if PLAN.averages and PLAN.phase == "write":
        b_total, b_gradient = b_total * values.inner, b_gradient * values.inner
    return tally(found, COLUMNS, "total", b_total), b_gradient


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
def at_tokens(p_table, b_like, walk: Walk, PLAN: tl.constexpr, TILING: tl.constexpr, own: tl.tensor | None = None):
    """Load a table by sequence for the tokens of a step."""
    return tiles.of_sequences(p_table, b_like, walk.span, walk.first, walk.offsets, walk.tile, walk.extents, PLAN,
                              TILING, own=own)  # fmt: skip


@triton.constexpr_function
def columns_of(plan: LossPlan, spec: Plan | None) -> Tables:
    """Return the plan whose columns a pass fills: the correction's, unless that has run before."""
    return plan if spec is None or spec.settled else spec


@triton.constexpr_function
def counts_outside(spec: Plan | None) -> bool:
    """Return whether the tokens of no sequence are counted: by the first pass of a correction."""
    return spec is not None and not spec.settled


@triton.jit
def settle(b_weight, m_kept, of_units: OfUnits, walk: Walk, SPEC: tl.constexpr,
           TILING: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Apply what was decided about sequences to the weights and the training mask of a step."""
    b_state = at_tokens(of_units.states, tiles.zeros_by(b_weight), walk, SPEC, TILING)
    if SPEC.spreads:
        # Without marks every token has the weight of its sequence.
        b_weight = tl.where(b_weight != 0.0, at_tokens(of_units.weights, b_weight, walk, SPEC, TILING), 0.0)
    b_weight = tl.where((b_state & WEIGHTLESS) != 0, 0.0, b_weight)
    if SPEC.edits_mask:
        m_kept = m_kept & ((b_state & REJECTED) == 0)
    return b_weight, m_kept


@triton.jit
def place_of_step(tile: Tile, first, TILING: tl.constexpr):
    """Find the entry of a step in a table of all steps."""
    return tl.program_id(0).to(tl.int64) * (tile.size // TILING.step) + first // TILING.step


@triton.jit
def take_step(inputs: LossInputs, b_marks, walk: Walk, own, of_units: OfUnits, p_externals, numbers, spec_numbers,
              p_gradient, share, PLAN: tl.constexpr, SPEC: tl.constexpr, TILING: tl.constexpr):  # fmt: skip
    """Load a step, correct it where a Spec is given, and write its gradient. Return its sums, and tokens outside.

    own: The advantage of the span's owner.
    """
    COLUMNS: tl.constexpr = columns_of(PLAN, SPEC)
    tile, first, outside = walk.tile, walk.first, walk.first * 0
    whole = (first >= tile.begin) & (first + TILING.step <= tile.end)
    if whole:
        step = load_inputs(inputs, b_marks, tile, first, PLAN, TILING, True)
    else:
        step = load_inputs(inputs, b_marks, tile, first, PLAN, TILING, False)
        if counts_outside(SPEC):
            outside += steps.count_outside(step.marked, step.valid, tile, first, PLAN, TILING)
    b_like, found = step.new.to(tl.float32), sums.nothing(COLUMNS)
    b_advantage, b_level, b_pull, b_inner = b_like, b_like, b_like, b_like
    if PLAN.advantages == "token":
        b_advantage = step.advantages.to(tl.float32)
    elif PLAN.advantages == "sequence":
        b_advantage = at_tokens(of_units.advantages, b_like, walk, PLAN, TILING, own)
    if PLAN.phase == "write":
        if PLAN.levels:
            b_level = at_tokens(of_units.levels, b_like, walk, PLAN, TILING)
        if PLAN.pulls:
            b_pull = at_tokens(of_units.pulls, b_like, walk, PLAN, TILING)
        if PLAN.averages:
            b_inner = at_tokens(of_units.inners, b_like, walk, PLAN, TILING)
    if SPEC is not None:
        context = Context(tile, walk.span, first, whole, walk.extents, walk.offsets, of_units.advantages, p_externals,
                          p_gradient, 0, p_gradient, spec_numbers)  # fmt: skip
        logps = Step(step.train, step.rollout, step.marked, step.valid, step.mass)
        if SPEC.settled:
            _, b_weight, m_trained = correct_tokens((), logps, b_like, b_advantage, b_like, context, SPEC, TILING)
            b_weight, m_trained = settle(b_weight, m_trained, of_units, walk, SPEC, TILING)
        else:
            found, b_weight, m_trained = correct_tokens(
                found, logps, b_like, b_advantage, b_like, context, SPEC, TILING
            )
        step = with_correction(step, b_weight, m_trained, PLAN)
    values = SequenceValues(b_advantage, b_level, b_pull, b_inner, numbers)
    found, b_slope = loss_of_step(found, step, values, PLAN, COLUMNS)
    if PLAN.writes and PLAN.differentiable:
        b_slope = b_slope * share
        if whole:
            store_step(contiguous(p_gradient, walk.extents), b_slope, tile, first, PLAN, TILING, True)
        else:
            store_step(contiguous(p_gradient, walk.extents), b_slope, tile, first, PLAN, TILING, False)
    return sums.with_words(found, COLUMNS, TILING), outside


# --- the kernels ---


@tiles.launched
def gradient_kernel(
    p_train_logp, p_rollout_logp, p_new_logp, p_base_logp, p_ref_logp, p_weights, p_trains, p_mask, p_log_mass,
    p_scales, p_chosen, p_advantages, p_externals: tl.tuple, p_offsets, p_within, p_numbers, p_spec_numbers, p_states,
    p_sequence_weights, p_levels, p_pulls, p_inners, p_gradient, p_counts, p_integers, p_floats, p_peaks, p_token_sums,
    p_token_maxima, p_counter, p_part_counter, p_part_sums, p_part_maxima, p_given, p_value, p_divisor, p_rest, p_flags,
    p_before, p_statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    search_steps: tl.int32, sequence_programs: tl.int32, owner_count: tl.int64, train_row: tl.int64,
    train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64, new_row: tl.int64, new_step: tl.int64,
    base_row: tl.int64, base_step: tl.int64, ref_row: tl.int64, ref_step: tl.int64, weights_row: tl.int64,
    weights_step: tl.int64, trains_row: tl.int64, trains_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64,
    parts: tl.int32, part: tl.int32, sums_before: tl.int32, maxima_before: tl.int32,
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
            partials.reset(p_counter, sequence_programs)
        if PLAN.phase == "sum":
            partials.zero_counters(p_part_counter, parts)
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    numbers = thresholds(p_numbers, PLAN)
    tables = (p_counts, either(p_integers, p_counts), either(p_floats, p_counts), either(p_peaks, p_counts))
    tile = tiles.tile_of_program(p_offsets, extents, PLAN, TILING)
    span = tiles.first_span(p_offsets, tile, extents, search_steps, PLAN)
    p_states, p_of_weights = either(p_states, p_advantages), either(p_sequence_weights, p_advantages)
    if PLAN.phase == "write":
        prepare_sequences(slot_tables(p_counts, p_integers, p_floats, None), p_levels, p_pulls, p_inners, p_token_sums,
                          p_offsets, p_within, span, extents, owner_count - 2, slots, numbers, PLAN, SHAPE)  # fmt: skip
        # Each thread reads what any has stored.
        tl.debug_barrier()
        # From the number of a sequence to the slot that it has in this tile.
        place = tl.program_id(0).to(tl.int64) + (1 if PLAN.packed else -tile.row)
        of_units = OfUnits(p_advantages, p_states, p_of_weights, either(p_levels, p_advantages) + place,
                           either(p_pulls, p_advantages) + place, either(p_inners, p_advantages) + place)  # fmt: skip
    else:
        of_units = OfUnits(p_advantages, p_states, p_of_weights, p_advantages, p_advantages, p_advantages)
    inputs = LossInputs(
        PerToken(either(p_train_logp, p_new_logp), train_row, train_step),
        PerToken(either(p_rollout_logp, p_new_logp), rollout_row, rollout_step),
        PerToken(p_new_logp, new_row, new_step),
        PerToken(either(p_base_logp, p_new_logp), base_row, base_step),
        PerToken(either(p_ref_logp, p_new_logp), ref_row, ref_step),
        PerToken(either(p_weights, p_new_logp), weights_row, weights_step),
        PerToken(either(p_trains, p_new_logp), trains_row, trains_step),
        PerToken(either(p_mask, p_new_logp), mask_row, mask_step),
        contiguous(p_advantages, extents),
        contiguous(either(p_log_mass, p_new_logp), extents),
        contiguous(either(p_scales, p_new_logp), extents),
        contiguous(either(p_chosen, p_new_logp), extents),
    )
    share, own = extents.tokens, extents.tokens
    if PLAN.writes:
        share = (1.0 / assumed_divisor(p_given, p_offsets, extents, numbers, PLAN)).to(tl.float32)
    if PLAN.advantages == "sequence":
        own = tiles.entry_of(p_advantages, span.owner, extents, PLAN)
    spec_numbers = () if SPEC is None else thresholds(p_spec_numbers, SPEC)
    first_owner, outside = span.owner, tile.length * 0
    kept = sums.empty(COLUMNS, TILING)
    if PLAN.skips:
        ahead = steps.load_marks(inputs.mask, tile, 0, PLAN, TILING)
    # At least one step, because owners of no token may end in a tile of none.
    for first in range(0, tl.maximum(tile.length, 1), TILING.step):
        if PLAN.skips:
            b_marks = ahead
            ahead = steps.load_marks(inputs.mask, tile, first + TILING.step, PLAN, TILING)
            some = steps.any_marked(b_marks)
            if PLAN.writes and PLAN.differentiable:
                tl.store(p_flags + place_of_step(tile, first, TILING), some.to(tl.int8))
            if some:
                found, _ = take_step(inputs, b_marks, Walk(tile, span, first, p_offsets, extents), own, of_units,
                                     p_externals, numbers, spec_numbers, p_gradient, share, PLAN, SPEC,
                                     TILING)  # fmt: skip
                kept = sums.with_slot(sums.with_batch(kept, found, COLUMNS), found, None, None, first, COLUMNS, TILING)
            elif PLAN.writes and PLAN.differentiable:
                store_step(contiguous(p_gradient, extents), tl.zeros(b_marks.shape, tl.float32), tile, first, PLAN,
                           TILING, False)  # fmt: skip
        else:
            found, more = take_step(inputs, 0, Walk(tile, span, first, p_offsets, extents), own, of_units, p_externals,
                                    numbers, spec_numbers, p_gradient, share, PLAN, SPEC, TILING)  # fmt: skip
            outside += more
            kept = sums.with_batch(kept, found, COLUMNS)
            if PLAN.packed:
                while tiles.ends_by(span, first, TILING):
                    if PLAN.adds_up:
                        kept = sums.with_slot(kept, found, span.start, span.end, first, COLUMNS, TILING)
                        sums.put_slot(kept, tables, slots, span, COLUMNS)
                        kept = sums.emptied(kept, COLUMNS, TILING)
                    span = tiles.next_span(span, p_offsets, tile, extents, PLAN)
                    if PLAN.advantages == "sequence":
                        own = tiles.entry_of(p_advantages, span.owner, extents, PLAN)
            if PLAN.adds_up:
                if span.start <= first:
                    kept = sums.with_slot(kept, found, None, None, first, COLUMNS, TILING)
                else:
                    kept = sums.with_slot(kept, found, span.start, None, first, COLUMNS, TILING)
    if PLAN.adds_up:
        sums.put_slot(kept, tables, slots, span, COLUMNS)
    if counts_outside(SPEC) and PLAN.packed:
        sums.put_outside(p_counts, outside, tile.begin, first_owner, span.last, extents)
    sums.put_batch(kept, p_token_sums, p_token_maxima, COLUMNS)
    if PLAN.phase == "write":
        mine, programs = tl.program_id(0) // part, tl.num_programs(0)
        if partials.count_in(p_part_counter + mine) == tl.minimum(part, programs - mine * part) - 1:
            for group in tl.static_range(partials.groups(PLAN)):
                partials.add_up_part(mine * partials.groups(PLAN) + group, p_token_sums, p_token_maxima, p_part_sums,
                                     p_part_maxima, programs, part, PLAN)  # fmt: skip
            if partials.count_in(p_counter) == parts - 1:
                finish(p_part_sums, p_part_sums, p_part_maxima, p_given, p_value, p_divisor, p_rest, p_before,
                       p_statistics, sums_before, maxima_before, sequence_programs, parts, p_offsets, extents, numbers,
                       PLAN)  # fmt: skip


@triton.jit
def scale_step(p_gradient, p_scaled, p_inners, factor, walk: Walk, PLAN: tl.constexpr, TILING: tl.constexpr) -> None:
    """Scale a step of the gradient."""
    tile, first = walk.tile, walk.first
    whole = first + TILING.step <= tile.length
    if whole:
        b_x = load_step(contiguous(p_gradient, walk.extents), tile, first, PLAN, TILING, True, True)
    else:
        b_x = load_step(contiguous(p_gradient, walk.extents), tile, first, PLAN, TILING, True, False)
    if PLAN.averages:
        b_x = b_x * at_tokens(p_inners, b_x, walk, PLAN, TILING)
    if whole:
        store_step(contiguous(p_scaled, walk.extents), b_x * factor, tile, first, PLAN, TILING, True)
    else:
        store_step(contiguous(p_scaled, walk.extents), b_x * factor, tile, first, PLAN, TILING, False)


@tiles.launched
def scale_kernel(
    p_gradient, p_inners, p_upstream, p_rest, p_offsets, p_flags, p_scaled,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32,
    search_steps: tl.int32,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Scale the gradient in backward by the upstream gradient over `p_rest`, and by `p_inners` if given."""
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    factor = (tl.load(p_upstream).to(tl.float64) / tl.load(p_rest)).to(p_gradient.dtype.element_ty)
    tile = tiles.tile_of_program(p_offsets, extents, PLAN, TILING)
    span = tiles.first_span(p_offsets, tile, extents, search_steps, PLAN)
    length = tile.length
    if PLAN.in_place and not PLAN.averages:
        # Nothing is to be done where the gradient is final as it was written.
        length = tl.where(factor == 1.0, 0, length)
    for first in range(0, length, TILING.step):
        walk = Walk(tile, span, first, p_offsets, extents)
        if PLAN.flagged:
            if tl.load(p_flags + place_of_step(tile, first, TILING)) != 0:
                scale_step(p_gradient, p_scaled, either(p_inners, p_gradient), factor, walk, PLAN, TILING)
            elif not PLAN.in_place:
                b_nothing = tl.zeros(places_of(first, TILING).shape, p_gradient.dtype.element_ty)
                store_step(contiguous(p_scaled, extents), b_nothing, tile, first, PLAN, TILING, False)
        else:
            scale_step(p_gradient, p_scaled, either(p_inners, p_gradient), factor, walk, PLAN, TILING)
        if PLAN.averages and PLAN.packed:
            while tiles.ends_by(span, first, TILING):
                span = tiles.next_span(span, p_offsets, tile, extents, PLAN)
