"""The first launch: read every log-prob once, and store the sums that sequences and the batch need.

A program walks along one tile: tiles.py says which tokens these are, steps.py loads them, sums.py adds up.

Log-probs, mask and advantages are read once, in one launch. Of `metrics_packed`, 4,096 tokens a sequence, it executes
81.3 PTX instructions a token, reads 8.7 bytes (8 are the log-probs) and writes 1.05 (1 is the mask): `lab.ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..accumulators import place_of
from ..partials import reset
from ..sums import (
    emptied,
    empty,
    nothing,
    put_batch,
    put_outside,
    put_slot,
    record,
    record_statistic,
    record_sum,
    with_batch,
    with_slot,
    with_words,
)
from ..tiles import (
    Extents,
    PerToken,
    Tiling,
    contiguous,
    either,
    ends_by,
    first_span,
    launched,
    next_span,
    store_step,
    tile_of_program,
)
from ..tokens import (
    class_name,
    exponential,
    has,
    is_finite,
    limited,
    named,
    number,
    of_pair,
    over_kept_set,
    real,
    size,
    thresholds,
)
from .criteria import aggregate_tokens, class_of, test_tokens
from .measures import (
    Ratio,
    count_bins,
    measure_ages,
    measure_probabilities,
    measure_tokens,
    measure_weights,
    weight_of,
)
from .peers import k3_beyond, report_tokens
from .plan import Plan, criterion, has_classes
from .steps import (
    Context,
    Inputs,
    Step,
    advantage_of,
    age_of,
    any_marked,
    compare,
    compares_with_rollout,
    count_outside,
    external_of,
    extra,
    is_whole,
    load_logps,
    load_marks,
    pair_of,
    step_of,
    survivors,
)

# --- the arithmetic of a token ---


@triton.jit
def correct_tokens(
    found: tl.tuple, step: Step, new, advantage, age, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """Measure and test the tokens of a step. Return the accumulators, the weights, and which tokens are kept.

    Sequences may still reject or weigh them. A plan without columns only weighs and tests.

    Args:
        found: The accumulators.
        step: The log-probs, and which tokens are valid.
        new: new_logp, where a criterion compares it.
        advantage: The advantage of each token, where a criterion asks for it.
        age: The age of each token, where a criterion asks for it.
        context: What else a criterion reads.
        PLAN, TILING: The plan and the tiling.
    """
    numbers = context.numbers
    train, rollout = step.train.to(real(PLAN)), step.rollout.to(real(PLAN))
    valid = step.valid
    if PLAN.masked:
        found = record(found, PLAN, "counts", "valid", valid)

    pair = compare(*over_kept_set(train, rollout, step.mass, PLAN), valid, PLAN)
    pairs: tl.tuple = (pair,)
    for k in tl.static_range(size(PLAN, "pairs")):
        if compares_with_rollout(PLAN, k):
            pairs = pairs + (compare(*over_kept_set(new, rollout, step.mass, PLAN), valid, PLAN),)
        else:
            pairs = pairs + (compare(new, train, valid, PLAN),)
        found = record(found, PLAN, "counts", of_pair(k + 1, "nonfinite"), pair_of(pairs[k + 1]).finite)
    found = record(found, PLAN, "counts", "nonfinite", pair.finite)
    found = record(found, PLAN, "counts", "differing", pair.d == 0.0)

    clamp = number(numbers, PLAN, "clamp").to(pair.d.dtype)
    k3_more = pair.d
    if has(PLAN, "floats", "d_beyond"):
        k3_more = k3_beyond(pair.d, clamp, PLAN)
    log_ratio = limited(pair.d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    ratio = Ratio(log_ratio, e, excess, k3)
    found = record(found, PLAN, "floats", "train", pair.logp)
    found = record(found, PLAN, "floats", "rollout", pair.base)
    found = record_sum(found, PLAN, "d", pair.d)
    found = measure_tokens(found, pair, ratio, clamp, PLAN)
    if PLAN.full:
        found = measure_probabilities(found, pair, PLAN)
        count_bins(context.histogram, pair.d, pair.finite if PLAN.nonfinite == "propagate" else pair.measured, PLAN)
    weight = tl.full(pair.d.shape, 1.0, pair.d.dtype)
    if PLAN.weighs == "token":
        weights = weight_of(ratio, numbers, PLAN)
        found, weight = measure_weights(found, pair.measured, weights, numbers, PLAN), weights.weight

    dropped = tl.zeros_like(valid)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "token":
            external = external_of(context, age, criterion(PLAN, i), PLAN, TILING)
            compared = pair_of(pairs[criterion(PLAN, i).pair])
            found, dropped = test_tokens(found, compared, advantage, external, dropped, numbers, criterion(PLAN, i),
                                         PLAN)  # fmt: skip
    if size(PLAN, "recorded") > 0:
        found = aggregate_sequences(found, pairs, dropped, age, context, PLAN, TILING)
        if size(PLAN, "schemes") > 0:
            found = report_tokens(found, pair, survivors(pair, dropped, PLAN), ratio, k3_more, numbers, PLAN)
        found = count_classes(found, pairs, advantage, valid, dropped, PLAN)
        if PLAN.averages_advantages:
            counted = tl.where(valid & is_finite(advantage), advantage, 0.0)
            found = record_statistic(found, PLAN, "advantage", counted)

    if PLAN.writes_token_weights:
        carries = pair.measured
        if PLAN.rejected != "mask" and PLAN.drops_tokens:
            carries = pair.measured & (dropped == 0)
        weight = tl.where(carries, weight, 0.0)
    kept = valid
    if PLAN.edits_mask and PLAN.drops_tokens:
        kept = valid & (dropped == 0)
    return found, weight, kept


@triton.jit
def read_step(
    step: Step, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """Measure and test a step; return what was found, and the weights and the mask to write, if they are written."""
    like, found = step.train.to(real(PLAN)), nothing(PLAN)
    advantage, age, new = advantage_of(context, like, PLAN, TILING), age_of(context, like, PLAN, TILING), like
    if PLAN.ages is not None:
        found = measure_ages(found, age, step.valid, PLAN)
    if size(PLAN, "pairs") > 0:
        new = extra(context, context.externals[PLAN.externals], PLAN, TILING)
    found, weight, kept = correct_tokens(found, step, new, advantage, age, context, PLAN, TILING)
    new_mask = step.mask
    if PLAN.writes_mask:
        new_mask = tl.where(kept, step.mask, 0).to(step.mask.dtype)
    return found, weight, new_mask


@triton.constexpr_function
def rounds_once(plan: Plan) -> bool:
    """Return whether D is rounded once for both its sums, which takes more registers where sequences have weights."""
    once = "d_kept" in plan.integers and plan.nonfinite != "propagate"
    return once and plan.weighs in (None, "token")


@triton.jit
def aggregate_sequences(
    found: tl.tuple, pairs: tl.tuple, dropped, age, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tl.tuple:
    """Record what sequences need: sums of D for their weights, sums and extrema for their criteria."""
    pair = pair_of(pairs[0])
    among = survivors(pair, dropped, PLAN)
    if PLAN.kept:
        found = record(found, PLAN, "counts", "survivors", among)
        if rounds_once(PLAN):
            d = found[place_of(PLAN, "integers", "d")]
            found = record(found, PLAN, "integers", "d_kept", tl.where(among, d, 0))
        else:
            found = record_sum(found, PLAN, "d_kept", tl.where(among, pair.d, 0.0))
        for k in tl.static_range(1, len(pairs)):
            found = record(found, PLAN, "counts", of_pair(k, "survivors"), survivors(pair_of(pairs[k]), dropped, PLAN))
    if PLAN.weighs != "token" and PLAN.token_clamp:
        most = number(context.numbers, PLAN, "token_clamp").to(pair.d.dtype)
        found = record_sum(found, PLAN, "weight", tl.where(among, limited(pair.d, -most, most, PLAN), 0.0))
    for i in tl.static_range(size(PLAN, "criteria")):
        if not criterion(PLAN, i).per_token:
            compared = pair_of(pairs[criterion(PLAN, i).pair])
            external = external_of(context, age, criterion(PLAN, i), PLAN, TILING)
            found = aggregate_tokens(found, compared, survivors(compared, dropped, PLAN), external, context.numbers,
                                     criterion(PLAN, i), PLAN)  # fmt: skip
    return found


@triton.jit
def count_classes(found: tl.tuple, pairs: tl.tuple, advantage, valid, dropped, PLAN: tl.constexpr) -> tl.tuple:
    """Count the tokens that are not dropped, and the tokens of each class that a criterion over sequences asks for."""
    if PLAN.drops_tokens:
        found = record(found, PLAN, "counts", "alive", valid & (dropped == 0))
    for k in tl.static_range(len(pairs)):
        if has_classes(PLAN, k):
            for c in tl.static_range(4):
                which = class_of(pair_of(pairs[k]), advantage, class_name(c))
                found = record(found, PLAN, "counts", of_pair(k, class_name(c)), which)
                if k == 0 and PLAN.drops_tokens:
                    found = record(found, PLAN, "counts", named("alive", class_name(c)), which & (dropped == 0))
    return found


@triton.jit
def write(
    weights, mask, new_weights, new_mask, context: Context, PLAN: tl.constexpr, TILING: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Write token weights and the mask of a step."""
    if PLAN.writes_token_weights:
        tensor = contiguous(weights, context.extents)
        store_step(tensor, new_weights, context.tile, context.first, PLAN, TILING, WHOLE)
    if PLAN.writes_mask:
        tensor = contiguous(mask, context.extents)
        if WHOLE and not PLAN.masked and not (PLAN.edits_mask and PLAN.drops_tokens):
            new_mask = tl.full(new_mask.shape, 1, tl.int8)
        store_step(tensor, new_mask, context.tile, context.first, PLAN, TILING, WHOLE)


@triton.jit
def take_step(
    train, rollout, inputs: Inputs, marks: tl.tensor | None, weights, mask_out, context: Context, PLAN: tl.constexpr,
    TILING: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Measure and test a step, and write its token weights and mask. Return its sums, and the tokens outside."""
    tile, token, outside = context.tile, context.first, context.first * 0
    if context.whole:
        step = step_of(train, rollout, inputs, marks, tile, token, PLAN, TILING, True)
    else:
        step = step_of(train, rollout, inputs, marks, tile, token, PLAN, TILING, False)
        outside += count_outside(step.mask != 0, step.valid, tile, token, PLAN, TILING)
    found, new_weights, new_mask = read_step(step, context, PLAN, TILING)
    if PLAN.writes_token_weights or PLAN.writes_mask:
        if context.whole:
            write(weights, mask_out, new_weights, new_mask, context, PLAN, TILING, True)
        else:
            write(weights, mask_out, new_weights, new_mask, context, PLAN, TILING, False)
    return with_words(found, PLAN, TILING), outside


# --- the kernel ---


@triton.constexpr_function
def moves(plan: Plan, tiling: Tiling) -> bool:
    """Return whether LLVM may move operations on a step's values to their use; else a branch prevents it.

    Sums over the tokens kept of packed sequences would go through the loop over sequences on NVIDIA, in registers that
    spill up to 28 bytes. Nothing moves out of a branch, which only a tile without tokens does not take. Of float64
    they spill 72 with branches; AMD's threads have twice the registers, and take more with branches.
    """
    waits = plan.packed and plan.kept and plan.weighs in (None, "token") and not plan.double
    return tiling.lanes > 32 or not waits


# With more accumulators a thread has no registers for a second step.
MOST_AHEAD = 21


@triton.constexpr_function
def loads_ahead(plan: Plan) -> bool:
    """Return whether the log-probs of the next step are in flight while a step is computed.

    Only where registers allow, and where no mask, whose loads would have to be ahead too, decides first.
    """
    return plan.packed and not plan.masked and not plan.double and len(plan.recorded) <= MOST_AHEAD


@launched
def read_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, versions, externals: tl.tuple, offsets, numbers, weights,
    mask_out, counts, integers, floats, peaks, token_sums, token_maxima, histogram, counter,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    steps: tl.int32, sequence_programs: tl.int32, train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64,
    rollout_step: tl.int64, mask_row: tl.int64, mask_step: tl.int64, current: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Read a tile: sums of sequences go to the slot tables, those of the batch to sums and maxima.

    Writes token weights and the mask as far as tokens decide about them; what sequences decide follows later.
    """
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    numbers = thresholds(numbers, PLAN)
    if tl.program_id(0) == 0:
        # For the programs of `decide` to count themselves in.
        reset(counter, sequence_programs)
    tables = (counts, either(integers, counts), either(floats, counts), either(peaks, counts))
    tile = tile_of_program(offsets, extents, PLAN, TILING)
    span = first_span(offsets, tile, extents, steps, PLAN)
    first_owner = span.owner
    inputs = Inputs(
        PerToken(train_logp, train_row, train_step),
        PerToken(rollout_logp, rollout_row, rollout_step),
        PerToken(either(mask, train_logp), mask_row, mask_step),
        contiguous(either(log_mass, train_logp), extents),
    )
    kept = empty(PLAN, TILING)
    outside = tile.length * 0
    if loads_ahead(PLAN):
        ahead = load_logps(inputs, tile, 0, PLAN, TILING)
    if PLAN.skips:
        ahead = load_marks(inputs.mask, tile, 0, PLAN, TILING)
    # At least one step, because owners of no token may end in a tile of none.
    for token in range(0, tl.maximum(tile.length, 1), TILING.step):
        whole = is_whole(tile, token, TILING)
        context = Context(tile, span, token, whole, extents, offsets, either(advantages, train_logp), externals,
                        either(versions, train_logp), current, either(histogram, train_logp), numbers)  # fmt: skip
        if PLAN.skips:
            marks = ahead
            ahead = load_marks(inputs.mask, tile, token + TILING.step, PLAN, TILING)
            if any_marked(marks):
                train, rollout = load_logps(inputs, tile, token, PLAN, TILING)
                found, _ = take_step(train, rollout, inputs, marks, weights, mask_out, context, PLAN, TILING)
                kept = with_slot(with_batch(kept, found, PLAN), found, None, None, token, PLAN, TILING)
            else:
                no_weight = tl.zeros(marks.shape, real(PLAN))
                write(weights, mask_out, no_weight, tl.zeros_like(marks), context, PLAN, TILING, False)
        else:
            train, rollout = ahead if loads_ahead(PLAN) else load_logps(inputs, tile, token, PLAN, TILING)
            if loads_ahead(PLAN):
                ahead = load_logps(inputs, tile, token + TILING.step, PLAN, TILING)
            found, more = take_step(train, rollout, inputs, None, weights, mask_out, context, PLAN, TILING)
            outside += more
            if moves(PLAN, TILING) or token < tile.length:
                kept = with_batch(kept, found, PLAN)
            if PLAN.packed:
                while ends_by(span, token, TILING):
                    kept = with_slot(kept, found, span.start, span.end, token, PLAN, TILING)
                    put_slot(kept, tables, slots, span, PLAN)
                    kept = emptied(kept, PLAN, TILING)
                    span = next_span(span, offsets, tile, extents, PLAN)
            if span.start <= token:
                kept = with_slot(kept, found, None, None, token, PLAN, TILING)
            else:
                kept = with_slot(kept, found, span.start, None, token, PLAN, TILING)
    put_slot(kept, tables, slots, span, PLAN)
    if PLAN.packed:
        put_outside(counts, outside, tile.begin, first_owner, span.last, extents)
    put_batch(kept, token_sums, token_maxima, PLAN)
