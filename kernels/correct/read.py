"""The first launch: read every log-prob once, and store the sums that sequences and the batch need.

A program takes ROWS consecutive slots, part by part; slots.py defines a slot, parts.py loads it, sums.py says how parts
add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import Pair, aggregate_tokens, class_of, test_tokens
from rollout_corr.kernels.correct.measures import (
    BINS,
    COPIES,
    Ratio,
    histogram_of,
    measure_divergences,
    measure_probabilities,
    measure_tokens,
    measure_weights,
    weight_of,
)
from rollout_corr.kernels.correct.parts import (
    Inputs,
    Part,
    Shared,
    advantage_of,
    compare,
    compares_with_rollout,
    external_of,
    largest_gap,
    load_parts,
    pair_of,
    part_of,
    token_tensor,
)
from rollout_corr.kernels.correct.peers import report_tokens
from rollout_corr.kernels.io import (
    PerToken,
    contiguous,
    either,
    store_parts,
)
from rollout_corr.kernels.slots import (
    Extents,
    coverage,
    parts_of,
    positions,
    slots_of_program,
    stretch_of,
)
from rollout_corr.kernels.sums import (
    merged,
    nothing,
    places,
    put_maxima,
    put_slots,
    put_sums,
    record,
    record_count,
    record_statistic,
    record_sum,
)
from rollout_corr.kernels.tokens import (
    class_name,
    exponential,
    has_classes,
    is_finite,
    limited,
    named,
    number,
    of_pair,
    over_kept_set,
    real,
    size,
    test,
    thresholds,
)

# --- a part ---


@triton.jit
def read_part(
    part: Part, place: tl.tensor, shared: Shared, PLAN: tl.constexpr, TILING: tl.constexpr, TAME: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tuple]:
    """Measure and test one part of the tile; return what was found, and the weights and the mask to write, if any.

    TAME: D is finite and within the clamp at every valid token, which spares a sixth to a fifth of the work.
    """
    numbers = shared.numbers
    train, rollout = part.train.to(real(PLAN)), part.rollout.to(real(PLAN))
    found = nothing(PLAN)
    valid = part.mask != 0
    found = record_count(found, PLAN, "valid", valid)
    if PLAN.packed:
        # Tokens outside of sequences are counted above, and are not valid from here on.
        valid = valid & (shared.outside == 0)
    advantage = advantage_of(shared, train, place, PLAN, TILING)

    pair = compare(*over_kept_set(train, rollout, part.mass, PLAN), valid, PLAN, TAME)
    pairs = (pair,)
    for k in tl.static_range(size(PLAN, "pairs")):
        new = token_tensor(shared, PLAN.externals, place, PLAN, TILING)
        if compares_with_rollout(PLAN, k):
            pairs = pairs + (compare(*over_kept_set(new, rollout, part.mass, PLAN), valid, PLAN, False),)
        else:
            pairs = pairs + (compare(new, train, valid, PLAN, False),)
        found = record_count(found, PLAN, of_pair(k + 1, "nonfinite"), pair_of(pairs[k + 1]).nonfinite)
    found = record_count(found, PLAN, "nonfinite", pair.nonfinite)

    clamp = number(numbers, PLAN, "clamp").to(pair.d.dtype)
    log_ratio = pair.d if TAME else limited(pair.d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    ratio = Ratio(log_ratio, e, excess, k3)
    found = record(found, PLAN, "floats", "train", pair.logp)
    found = record(found, PLAN, "floats", "rollout", pair.base)
    found = record_sum(found, PLAN, "d", pair.d, TAME)
    found = measure_tokens(found, pair, ratio, clamp, PLAN, TAME)
    if PLAN.full:
        found = measure_probabilities(found, pair, PLAN)
        found = measure_divergences(found, ratio, PLAN)
        found = found[: places(PLAN) - 1] + (histogram_of(pair.d, pair.measured),)
    weight = tl.full(pair.d.shape, 1.0, pair.d.dtype)
    if PLAN.level == "token":
        log_weight, raw, bounded, weight = weight_of(ratio, numbers, PLAN)
        found = measure_weights(found, pair.measured, log_weight, raw, bounded, numbers, PLAN)

    dropped = tl.zeros_like(valid)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token":
            external = external_of(shared, pair.logp, place, test(PLAN, i), PLAN, TILING)
            compared = pair_of(pairs[test(PLAN, i).pair])
            found, dropped = test_tokens(found, compared, advantage, external, dropped, numbers, test(PLAN, i),
                                         PLAN)  # fmt: skip
    found = aggregate_part(found, pairs, place, dropped, shared, PLAN, TILING, TAME)
    if size(PLAN, "schemes") > 0:
        found = report_tokens(found, pair, survivors(pair, dropped, PLAN), ratio, weight, numbers, PLAN)
    found = count_classes(found, pairs, advantage, valid, dropped, PLAN)
    if PLAN.averages_advantages:
        counted = tl.where(valid & is_finite(advantage), advantage, 0.0)
        found = record_statistic(found, PLAN, "advantage", counted)

    weights, mask = (), ()
    if PLAN.writes_token_weights:
        carries = pair.measured
        if PLAN.rejected != "mask" and PLAN.drops_tokens:
            carries = pair.measured & (dropped == 0)
        weights = (tl.where(carries, weight, 0.0),)
    if PLAN.writes_mask:
        kept = valid
        if PLAN.edits_mask and PLAN.drops_tokens:
            kept = valid & (dropped == 0)
        mask = (tl.where(kept, part.mask, 0).to(part.mask.dtype),)
    return found, weights, mask


@triton.jit
def survivors(pair: Pair, dropped: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Select the tokens that sums over a sequence run over."""
    if PLAN.kept:
        return pair.measured & (dropped == 0)
    else:
        return pair.measured


@triton.jit
def aggregate_part(
    found: tl.tuple, pairs: tl.tuple, place: tl.tensor, dropped: tl.tensor, shared: Shared,
    PLAN: tl.constexpr, TILING: tl.constexpr, TAME: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Record what sequences need: sums of D for their weights, sums and extrema for their criteria."""
    pair = pair_of(pairs[0])
    among = survivors(pair, dropped, PLAN)
    if PLAN.kept:
        found = record_count(found, PLAN, "survivors", among)
        found = record_sum(found, PLAN, "d_kept", tl.where(among, pair.d, 0.0), TAME)
        for k in tl.static_range(1, len(pairs)):
            found = record_count(found, PLAN, of_pair(k, "survivors"), survivors(pair_of(pairs[k]), dropped, PLAN))
    if PLAN.level != "token" and PLAN.token_clamp:
        most = number(shared.numbers, PLAN, "token_clamp").to(pair.d.dtype)
        found = record_sum(found, PLAN, "weight", tl.where(among, limited(pair.d, -most, most, PLAN), 0.0), TAME)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            compared = pair_of(pairs[test(PLAN, i).pair])
            external = external_of(shared, pair.logp, place, test(PLAN, i), PLAN, TILING)
            found = aggregate_tokens(found, compared, survivors(compared, dropped, PLAN), external, shared.numbers,
                                     test(PLAN, i), PLAN, TAME and test(PLAN, i).pair == 0)  # fmt: skip
    return found


@triton.jit
def count_classes(
    found: tl.tuple, pairs: tl.tuple, advantage: tl.tensor, valid: tl.tensor, dropped: tl.tensor, PLAN: tl.constexpr
) -> tl.tuple:
    """Count the tokens that are not dropped, and the tokens of each class that a criterion over sequences asks for."""
    if PLAN.drops_tokens:
        found = record_count(found, PLAN, "alive", valid & (dropped == 0))
    for k in tl.static_range(len(pairs)):
        if has_classes(PLAN, k):
            for c in tl.static_range(4):
                which = class_of(pair_of(pairs[k]), advantage, class_name(c))
                found = record_count(found, PLAN, of_pair(k, class_name(c)), which)
                if k == 0 and PLAN.drops_tokens:
                    found = record_count(found, PLAN, named("alive", class_name(c)), which & (dropped == 0))
    return found


@triton.jit
def read_parts(
    parts: tl.tuple, shared: Shared, PLAN: tl.constexpr, TILING: tl.constexpr, TAME: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tuple]:
    """Return the sums of all parts, and the weights and the masks of each, if they are written."""
    found, weights, masks = (), (), ()
    for i in tl.static_range(parts_of(TILING)):
        place = positions(i * TILING.part, TILING.lanes, TILING.vec)
        more, weight, mask = read_part(part_of(parts[i]), place, shared, PLAN, TILING, TAME)
        weights, masks = weights + weight, masks + mask
        if i == 0:
            found = more
        else:
            found = merged(found, more, PLAN)
    return found, weights, masks


# --- the kernel ---


@triton.jit
def write_parts(
    weights: tl.tensor, mask: tl.tensor, new_weights: tl.tuple, new_masks: tl.tuple, shared: Shared,
    PLAN: tl.constexpr, TILING: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Write token weights and the mask of all parts."""
    if PLAN.writes_token_weights:
        store_parts(contiguous(weights, shared.extents), new_weights, shared.stretch, PLAN, TILING, FULL)
    if PLAN.writes_mask:
        store_parts(contiguous(mask, shared.extents), new_masks, shared.stretch, PLAN, TILING, FULL)


# No length and no stride is in a compile key: they are annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "steps", "train_row", "train_step", "rollout_row", "rollout_step",
           "mask_row", "mask_step"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def read_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, externals, offsets, numbers,
    weights, mask_out, owners, counts, integers, floats, peaks, token_sums, token_maxima, histogram, counter,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """Read TILING.rows slots: sums of sequences go to the slot tables, those of the batch to sums and maxima.

    Writes token weights and the mask as far as tokens decide about them; what sequences decide follows later.
    """
    extents = Extents(tokens, sequences, width, tiles)
    numbers = thresholds(numbers, PLAN)
    if tl.program_id(0) == 0:
        # For the programs of `decide` to count themselves in.
        tl.store(counter, 0)
    slots = tl.num_programs(0).to(tl.int64) * TILING.rows
    slot, owner, outside = slots_of_program(offsets, extents, steps, PLAN, TILING)
    if PLAN.packed and PLAN.applies:
        tl.store(owners + slot, owner.to(tl.int32))
    stretch = stretch_of(offsets, owner, slot, extents, PLAN, TILING.tile)
    full, whole = coverage(stretch, extents, PLAN, TILING.tile)
    inputs = Inputs(
        PerToken(train_logp, train_row, train_step),
        PerToken(rollout_logp, rollout_row, rollout_step),
        PerToken(either(mask, train_logp), mask_row, mask_step),
        contiguous(either(log_mass, train_logp), extents),
    )
    # One branch around all loads, so that all are under way before the first is needed.
    if full:
        parts = load_parts(inputs, stretch, PLAN, TILING, True, True)
    elif whole:
        parts = load_parts(inputs, stretch, PLAN, TILING, False, True)
    else:
        parts = load_parts(inputs, stretch, PLAN, TILING, False, False)
    largest = largest_gap(parts, outside, PLAN)
    clamp = number(numbers, PLAN, "clamp").to(real(PLAN))
    shared = Shared(stretch, extents, full, outside, either(advantages, train_logp), externals, numbers)
    if largest <= clamp.to(largest.dtype, bitcast=True):
        found, new_weights, new_masks = read_parts(parts, shared, PLAN, TILING, True)
    else:
        found, new_weights, new_masks = read_parts(parts, shared, PLAN, TILING, False)
    if PLAN.writes_token_weights or PLAN.writes_mask:
        if full:
            write_parts(weights, mask_out, new_weights, new_masks, shared, PLAN, TILING, True)
        else:
            write_parts(weights, mask_out, new_weights, new_masks, shared, PLAN, TILING, False)
    put_sums(found, token_sums, PLAN)
    put_slots(found, counts, slots, slot, PLAN, "counts")
    put_slots(found, floats, slots, slot, PLAN, "floats")
    put_slots(found, integers, slots, slot, PLAN, "integers")
    put_slots(found, peaks, slots, slot, PLAN, "peaks")
    put_maxima(found, token_maxima, PLAN)
    if PLAN.full:
        bins = found[places(PLAN) - 1]
        copy = (tl.program_id(0) % COPIES) * BINS
        tl.atomic_add(histogram + copy + tl.arange(0, BINS), bins.to(tl.int64), mask=bins > 0, sem="relaxed")
