"""The first launch: read every log-prob once, and store the sums that sequences and the batch need.

A program walks along one tile: tiles.py says which tokens these are, steps.py loads them, sums.py adds up.

Log-probs, mask and advantages are read once, in one launch. Of `metrics_packed`, 4,096 tokens a sequence, it executes
81.3 PTX instructions a token, reads 8.7 bytes (8 are the log-probs) and writes 1.05 (1 is the mask): `lab.ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import partials, sums, tiles
from ..sums import record, record_statistic, record_sum
from ..tables import class_name, has, named, number, of_pair, size, thresholds
from ..tiles import Extents, PerToken, Tiling, contiguous, either, store_step
from ..tokens import exponential, is_finite, limited, over_kept_set
from . import steps
from .criteria import aggregate_tokens, class_of, test_tokens
from .measures import Ratio, count_bins, measure_ages, measure_probabilities, measure_tokens, measure_weights, weight_of
from .peers import k3_beyond, report_tokens
from .plan import Plan, criterion, has_classes
from .steps import Context, Inputs, Step, compare, compares_with_rollout, external_of, pair_of, survivors

# --- the arithmetic of a token ---


@triton.jit
def correct_tokens(found: tl.tuple, step: Step, b_new, b_advantage, b_age, context: Context, PLAN: tl.constexpr,
                   TILING: tl.constexpr) -> tuple[tl.tuple, tl.tensor, tl.tensor]:  # fmt: skip
    """Measure and test the tokens of a step. Return the accumulators, the weights, and which tokens are kept.

    Sequences may still reject or weigh them. A plan without columns only weighs and tests.

    Args:
        found: The accumulators.
        step: The log-probs, and which tokens are valid.
        b_new: new_logp, where a criterion compares it.
        b_advantage: The advantage of each token, where a criterion asks for it.
        b_age: The age of each token, where a criterion asks for it.
        context: What else a criterion reads.
        PLAN, TILING: The plan and the tiling.
    """
    numbers = context.numbers
    b_train, b_rollout = step.train.to(tl.float32), step.rollout.to(tl.float32)
    m_valid = step.valid
    if PLAN.masked:
        found = record(found, PLAN, "counts", "valid", m_valid)

    pair = compare(*over_kept_set(b_train, b_rollout, step.mass, PLAN), m_valid, PLAN)
    pairs: tl.tuple = (pair,)
    for k in tl.static_range(size(PLAN, "pairs")):
        if compares_with_rollout(PLAN, k):
            pairs = pairs + (compare(*over_kept_set(b_new, b_rollout, step.mass, PLAN), m_valid, PLAN),)
        else:
            pairs = pairs + (compare(b_new, b_train, m_valid, PLAN),)
        found = record(found, PLAN, "counts", of_pair(k + 1, "nonfinite"), pair_of(pairs[k + 1]).finite)
    found = record(found, PLAN, "counts", "nonfinite", pair.finite)
    found = record(found, PLAN, "counts", "differing", pair.d == 0.0)

    clamp = number(numbers, PLAN, "clamp").to(pair.d.dtype)
    b_k3_more = pair.d
    if has(PLAN, "floats", "d_beyond"):
        b_k3_more = k3_beyond(pair.d, clamp, PLAN)
    b_log_ratio = limited(pair.d, -clamp, clamp, PLAN)
    b_e, b_excess, b_k3 = exponential(b_log_ratio)
    ratio = Ratio(b_log_ratio, b_e, b_excess, b_k3)
    found = record(found, PLAN, "floats", "train", pair.logp)
    found = record(found, PLAN, "floats", "rollout", pair.base)
    found = record_sum(found, PLAN, "d", pair.d)
    found = measure_tokens(found, pair, ratio, clamp, PLAN)
    if PLAN.full:
        found = measure_probabilities(found, pair, PLAN)
        count_bins(context.histogram, pair.d, pair.finite if PLAN.nonfinite == "propagate" else pair.measured, PLAN)
    b_weight = tl.full(pair.d.shape, 1.0, pair.d.dtype)
    if PLAN.weighs == "token":
        weights = weight_of(ratio, numbers, PLAN)
        found, b_weight = measure_weights(found, pair.measured, weights, numbers, PLAN), weights.weight

    m_dropped = tl.zeros_like(m_valid)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "token":
            b_external = external_of(context, b_age, criterion(PLAN, i), PLAN, TILING)
            compared = pair_of(pairs[criterion(PLAN, i).pair])
            found, m_dropped = test_tokens(found, compared, b_advantage, b_external, m_dropped, numbers,
                                           criterion(PLAN, i), PLAN)  # fmt: skip
    if size(PLAN, "recorded") > 0:
        found = aggregate_sequences(found, pairs, m_dropped, b_age, context, PLAN, TILING)
        if size(PLAN, "schemes") > 0:
            found = report_tokens(found, pair, survivors(pair, m_dropped, PLAN), ratio, b_k3_more, numbers, PLAN)
        found = count_classes(found, pairs, b_advantage, m_valid, m_dropped, PLAN)
        if PLAN.averages_advantages:
            b_counted = tl.where(m_valid & is_finite(b_advantage), b_advantage, 0.0)
            found = record_statistic(found, PLAN, "advantage", b_counted)

    if PLAN.writes_token_weights:
        m_carries = pair.measured
        if PLAN.rejected != "mask" and PLAN.drops_tokens:
            m_carries = pair.measured & (m_dropped == 0)
        b_weight = tl.where(m_carries, b_weight, 0.0)
    m_kept = m_valid
    if PLAN.edits_mask and PLAN.drops_tokens:
        m_kept = m_valid & (m_dropped == 0)
    return found, b_weight, m_kept


@triton.jit
def read_step(step: Step, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Measure and test a step; return what was found, and the weights and the mask to write, if they are written."""
    b_like, found = step.train.to(tl.float32), sums.nothing(PLAN)
    b_advantage, b_age = steps.advantage_of(context, b_like, PLAN, TILING), steps.age_of(context, b_like, PLAN, TILING)
    b_new = b_like
    if PLAN.ages is not None:
        found = measure_ages(found, b_age, step.valid, PLAN)
    if size(PLAN, "pairs") > 0:
        b_new = steps.extra(context, context.externals[PLAN.externals], PLAN, TILING)
    found, b_weight, m_kept = correct_tokens(found, step, b_new, b_advantage, b_age, context, PLAN, TILING)
    b_mask = step.mask
    if PLAN.writes_mask:
        b_mask = tl.where(m_kept, step.mask, 0).to(step.mask.dtype)
    return found, b_weight, b_mask


@triton.constexpr_function
def rounds_once(plan: Plan) -> bool:
    """Return whether D is rounded once for both its sums, which takes more registers where sequences have weights."""
    once = "d_kept" in plan.integers and plan.nonfinite != "propagate"
    return once and plan.weighs in (None, "token")


@triton.jit
def aggregate_sequences(found: tl.tuple, pairs: tl.tuple, m_dropped, b_age, context: Context, PLAN: tl.constexpr,
                        TILING: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record what sequences need: sums of D for their weights, sums and extrema for their criteria."""
    pair = pair_of(pairs[0])
    m_among = survivors(pair, m_dropped, PLAN)
    if PLAN.kept:
        found = record(found, PLAN, "counts", "survivors", m_among)
        if rounds_once(PLAN):
            b_d = found[sums.place_of(PLAN, "integers", "d")]
            found = record(found, PLAN, "integers", "d_kept", tl.where(m_among, b_d, 0))
        else:
            found = record_sum(found, PLAN, "d_kept", tl.where(m_among, pair.d, 0.0))
        for k in tl.static_range(1, len(pairs)):
            found = record(
                found, PLAN, "counts", of_pair(k, "survivors"), survivors(pair_of(pairs[k]), m_dropped, PLAN)
            )
    if PLAN.weighs != "token" and PLAN.token_clamp:
        most = number(context.numbers, PLAN, "token_clamp").to(pair.d.dtype)
        found = record_sum(found, PLAN, "weight", tl.where(m_among, limited(pair.d, -most, most, PLAN), 0.0))
    for i in tl.static_range(size(PLAN, "criteria")):
        if not criterion(PLAN, i).per_token:
            compared = pair_of(pairs[criterion(PLAN, i).pair])
            b_external = external_of(context, b_age, criterion(PLAN, i), PLAN, TILING)
            found = aggregate_tokens(found, compared, survivors(compared, m_dropped, PLAN), b_external, context.numbers,
                                     criterion(PLAN, i), PLAN)  # fmt: skip
    return found


@triton.jit
def count_classes(found: tl.tuple, pairs: tl.tuple, b_advantage, m_valid, m_dropped, PLAN: tl.constexpr) -> tl.tuple:
    """Count the tokens that are not dropped, and the tokens of each class that a criterion over sequences asks for."""
    if PLAN.drops_tokens:
        found = record(found, PLAN, "counts", "alive", m_valid & (m_dropped == 0))
    for k in tl.static_range(len(pairs)):
        if has_classes(PLAN, k):
            for c in tl.static_range(4):
                m_which = class_of(pair_of(pairs[k]), b_advantage, class_name(c))
                found = record(found, PLAN, "counts", of_pair(k, class_name(c)), m_which)
                if k == 0 and PLAN.drops_tokens:
                    found = record(found, PLAN, "counts", named("alive", class_name(c)), m_which & (m_dropped == 0))
    return found


@triton.jit
def write(p_weights, p_mask_out, b_weight, b_mask, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr,
          WHOLE: tl.constexpr) -> None:  # fmt: skip
    """Write token weights and the mask of a step."""
    if PLAN.writes_token_weights:
        tensor = contiguous(p_weights, context.extents)
        store_step(tensor, b_weight, context.tile, context.first, PLAN, TILING, WHOLE)
    if PLAN.writes_mask:
        tensor = contiguous(p_mask_out, context.extents)
        if WHOLE and not PLAN.masked and not (PLAN.edits_mask and PLAN.drops_tokens):
            b_mask = tl.full(b_mask.shape, 1, tl.int8)
        store_step(tensor, b_mask, context.tile, context.first, PLAN, TILING, WHOLE)


@triton.jit
def take_step(b_train, b_rollout, inputs: Inputs, b_marks: tl.tensor | None, p_weights, p_mask_out, context: Context,
              PLAN: tl.constexpr, TILING: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Measure and test a step, and write its token weights and mask. Return its sums, and the tokens outside."""
    tile, token, outside = context.tile, context.first, context.first * 0
    if context.whole:
        step = steps.step_of(b_train, b_rollout, inputs, b_marks, tile, token, PLAN, TILING, True)
    else:
        step = steps.step_of(b_train, b_rollout, inputs, b_marks, tile, token, PLAN, TILING, False)
        outside += steps.count_outside(step.mask != 0, step.valid, tile, token, PLAN, TILING)
    found, b_weight, b_mask = read_step(step, context, PLAN, TILING)
    if PLAN.writes_token_weights or PLAN.writes_mask:
        if context.whole:
            write(p_weights, p_mask_out, b_weight, b_mask, context, PLAN, TILING, True)
        else:
            write(p_weights, p_mask_out, b_weight, b_mask, context, PLAN, TILING, False)
    return sums.with_words(found, PLAN, TILING), outside


# --- the kernel ---


@triton.constexpr_function
def moves(plan: Plan, tiling: Tiling) -> bool:
    """Return whether LLVM may move operations on a step's values to their use; else a branch prevents it.

    Sums over the tokens kept of packed sequences would go through the loop over sequences on NVIDIA, in registers that
    spill up to 28 bytes. Nothing moves out of a branch, which only a tile without tokens does not take. AMD's
    threads have twice the registers, and take more with branches.
    """
    waits = plan.packed and plan.kept and plan.weighs in (None, "token")
    return tiling.lanes > 32 or not waits


# With more accumulators a thread has no registers for a second step.
MOST_AHEAD = 21


@triton.constexpr_function
def loads_ahead(plan: Plan) -> bool:
    """Return whether the log-probs of the next step are in flight while a step is computed.

    Only where registers allow, and where no mask, whose loads would have to be ahead too, decides first.
    """
    return plan.packed and not plan.masked and len(plan.recorded) <= MOST_AHEAD


@tiles.launched
def read_kernel(
    p_train_logp, p_rollout_logp, p_mask, p_log_mass, p_advantages, p_versions, p_externals: tl.tuple, p_offsets,
    p_numbers, p_weights, p_mask_out, p_counts, p_integers, p_floats, p_peaks, p_token_sums, p_token_maxima,
    p_histogram, p_counter,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    search_steps: tl.int32, sequence_programs: tl.int32, train_row: tl.int64, train_step: tl.int64,
    rollout_row: tl.int64, rollout_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64, current: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Read a tile: sums of sequences go to the slot tables, those of the batch to sums and maxima.

    Writes token weights and the mask as far as tokens decide about them; what sequences decide follows later.
    """
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    numbers = thresholds(p_numbers, PLAN)
    if tl.program_id(0) == 0:
        # For the programs of `decide` to count themselves in.
        partials.reset(p_counter, sequence_programs)
    tables = (p_counts, either(p_integers, p_counts), either(p_floats, p_counts), either(p_peaks, p_counts))
    tile = tiles.tile_of_program(p_offsets, extents, PLAN, TILING)
    span = tiles.first_span(p_offsets, tile, extents, search_steps, PLAN)
    first_owner = span.owner
    inputs = Inputs(
        PerToken(p_train_logp, train_row, train_step),
        PerToken(p_rollout_logp, rollout_row, rollout_step),
        PerToken(either(p_mask, p_train_logp), mask_row, mask_step),
        contiguous(either(p_log_mass, p_train_logp), extents),
    )
    kept = sums.empty(PLAN, TILING)
    outside = tile.length * 0
    if loads_ahead(PLAN):
        ahead = steps.load_logps(inputs, tile, 0, PLAN, TILING)
    if PLAN.skips:
        ahead = steps.load_marks(inputs.mask, tile, 0, PLAN, TILING)
    # At least one step, because owners of no token may end in a tile of none.
    for token in range(0, tl.maximum(tile.length, 1), TILING.step):
        whole = steps.is_whole(tile, token, TILING)
        context = Context(tile, span, token, whole, extents, p_offsets, either(p_advantages, p_train_logp), p_externals,
                          either(p_versions, p_train_logp), current, either(p_histogram, p_train_logp),
                          numbers)  # fmt: skip
        if PLAN.skips:
            b_marks = ahead
            ahead = steps.load_marks(inputs.mask, tile, token + TILING.step, PLAN, TILING)
            if steps.any_marked(b_marks):
                b_train, b_rollout = steps.load_logps(inputs, tile, token, PLAN, TILING)
                found, _ = take_step(b_train, b_rollout, inputs, b_marks, p_weights, p_mask_out, context, PLAN, TILING)
                kept = sums.with_slot(sums.with_batch(kept, found, PLAN), found, None, None, token, PLAN, TILING)
            else:
                b_nothing = tl.zeros(b_marks.shape, tl.float32)
                write(p_weights, p_mask_out, b_nothing, tl.zeros_like(b_marks), context, PLAN, TILING, False)
        else:
            b_train, b_rollout = ahead if loads_ahead(PLAN) else steps.load_logps(inputs, tile, token, PLAN, TILING)
            if loads_ahead(PLAN):
                ahead = steps.load_logps(inputs, tile, token + TILING.step, PLAN, TILING)
            found, more = take_step(b_train, b_rollout, inputs, None, p_weights, p_mask_out, context, PLAN, TILING)
            outside += more
            if moves(PLAN, TILING) or token < tile.length:
                kept = sums.with_batch(kept, found, PLAN)
            if PLAN.packed:
                while tiles.ends_by(span, token, TILING):
                    kept = sums.with_slot(kept, found, span.start, span.end, token, PLAN, TILING)
                    sums.put_slot(kept, tables, slots, span, PLAN)
                    kept = sums.emptied(kept, PLAN, TILING)
                    span = tiles.next_span(span, p_offsets, tile, extents, PLAN)
            if span.start <= token:
                kept = sums.with_slot(kept, found, None, None, token, PLAN, TILING)
            else:
                kept = sums.with_slot(kept, found, span.start, None, token, PLAN, TILING)
    sums.put_slot(kept, tables, slots, span, PLAN)
    if PLAN.packed:
        sums.put_outside(p_counts, outside, tile.begin, first_owner, span.last, extents)
    sums.put_batch(kept, p_token_sums, p_token_maxima, PLAN)
