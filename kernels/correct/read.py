"""The reduce phase: every log-prob is read here, once.

A program takes ROWS consecutive slots, part by part; see slots.py for what a slot is and sums.py for how parts add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import aggregate_tokens, class_of, judge_tokens
from rollout_corr.kernels.correct.measures import (
    BINS,
    COPIES,
    histogram_of,
    measure_probabilities,
    measure_tokens,
    measure_weights,
    weight_of,
)
from rollout_corr.kernels.correct.peers import report_tokens
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.io import (
    external_of,
    fetch_parts,
    size_of_externals,
    token_tensor,
    write_parts,
    writes_token_weights,
)
from rollout_corr.kernels.slots import addresses, coverage, fetch, positions, slots_of_program, stretch_of
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
    pair_of,
    real,
    size,
    test,
    thresholds,
)


@triton.constexpr_function
def compares_with_rollout(plan: Plan, k: int) -> bool:
    """Whether the k-th further pair is of the policy that trains and the engine's."""
    return plan.pairs[k] == "new/rollout"


@triton.jit
def compared(train, rollout, valid, PLAN: tl.constexpr, TAME: tl.constexpr):
    """D of two policies, their log-probs, which tokens are measured, and which are not finite. 0 where not measured."""
    d = train - rollout
    bad = tl.zeros_like(valid)
    if not TAME:
        bad = valid & (is_finite(d) == 0)
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = valid & (bad == 0)
    elif PLAN.nonfinite == "neutral":
        train, rollout, d = tl.where(bad, 0.0, train), tl.where(bad, 0.0, rollout), tl.where(bad, 0.0, d)
    train, rollout = tl.where(measured, train, 0.0), tl.where(measured, rollout, 0.0)
    return tl.where(measured, d, 0.0), train, rollout, measured, bad


@triton.jit
def largest_gap(parts, outside, PLAN: tl.constexpr):
    """The largest |D| of a program's valid tokens; NaN, as an integer, is above all."""
    largest = tl.abs(gap_of(parts, 0, outside, PLAN))
    for first in tl.static_range(3, len(parts), 3):
        gap = tl.abs(gap_of(parts, first, outside, PLAN))
        largest = tl.maximum(largest, gap, propagate_nan=tl.PropagateNan.ALL)
    if PLAN.double:
        return tl.max(tl.ravel(largest.to(tl.int64, bitcast=True)), 0)
    else:
        return tl.max(tl.ravel(largest.to(tl.int32, bitcast=True)), 0)


@triton.jit
def gap_of(parts, FIRST: tl.constexpr, outside, PLAN: tl.constexpr):
    """D of a part, 0 where it is not valid."""
    valid = parts[FIRST + 2] != 0
    if PLAN.packed:
        valid = valid & (outside == 0)
    return tl.where(valid, parts[FIRST].to(real(PLAN)) - parts[FIRST + 1].to(real(PLAN)), 0.0)


@triton.jit
def read_part(train, rollout, given, advantages, externals, sequence, tile, place, inside, full, outside, width,
              sequences, numbers, PLAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
              TAME: tl.constexpr):  # fmt: skip
    """Measure and test one part of the tile; gives back what was found, and then the weights and mask to write.

    TAME: D is finite and within the clamp at every valid token, which spares a sixth to a fifth of the work.
    """
    train, rollout = train.to(real(PLAN)), rollout.to(real(PLAN))
    found = nothing(PLAN)
    valid = given != 0
    found = record_count(found, PLAN, "counts", "valid", valid)
    if PLAN.packed:
        # Counted, and from here on as if they were not there.
        valid = valid & (outside == 0)
    advantage = train
    if PLAN.advantages == "token":
        where = addresses(advantages, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        advantage = fetch(where, inside, full).to(real(PLAN))
    elif PLAN.advantages == "sequence":
        known = (sequence >= 0) & (sequence < sequences)
        each = tl.load(advantages + sequence, mask=known, other=0.0)
        advantage = each.to(real(PLAN))[:, None, None] + tl.zeros_like(train)

    views = compared(train, rollout, valid, PLAN, TAME)
    for k in tl.static_range(size(PLAN, "pairs")):
        new = token_tensor(externals, size_of_externals(PLAN), sequence, tile, width, place, inside, full, PLAN, TILE,
                           ALIGNED)  # fmt: skip
        if compares_with_rollout(PLAN, k):
            views = views + compared(new, rollout, valid, PLAN, False)
        else:
            views = views + compared(new, train, valid, PLAN, False)
        found = record_count(found, PLAN, "counts", of_pair(k + 1, "nonfinite"), views[5 * k + 9])
    d, train, rollout, measured = views[0], views[1], views[2], views[3]
    found = record_count(found, PLAN, "counts", "nonfinite", views[4])

    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = d if TAME else limited(d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    found = record(found, PLAN, "floats", "train", train)
    found = record(found, PLAN, "floats", "rollout", rollout)
    found = record_sum(found, PLAN, "d", d, TAME)
    found = measure_tokens(found, d, excess, k3, measured, clamp, PLAN, TAME)
    if PLAN.full:
        found = measure_probabilities(found, train, rollout, measured, PLAN)
        found = found[: places(PLAN) - 1] + (histogram_of(d, measured),)
    weight = tl.full(d.shape, 1.0, d.dtype)
    if PLAN.level == "token":
        log_weight, raw, bounded, weight = weight_of(d, log_ratio, e, excess, numbers, PLAN)
        found = measure_weights(found, measured, log_weight, raw, bounded, numbers, PLAN)

    dropped = tl.zeros_like(measured)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token":
            external = external_of(externals, train, sequence, tile, width, place, inside, full, test(PLAN, i), PLAN,
                                   TILE, ALIGNED)  # fmt: skip
            found, dropped = judge_tokens(found, views[5 * pair_of(PLAN, i)], views[5 * pair_of(PLAN, i) + 1],
                                          views[5 * pair_of(PLAN, i) + 2], views[5 * pair_of(PLAN, i) + 3], advantage,
                                          external, dropped, numbers, test(PLAN, i), PLAN)  # fmt: skip
    among = measured
    if PLAN.kept:
        among = measured & (dropped == 0)
        found = record_count(found, PLAN, "counts", "survivors", among)
        found = record_sum(found, PLAN, "d_kept", tl.where(among, d, 0.0), TAME)
    others = ()
    for k in tl.static_range(size(PLAN, "pairs")):
        if PLAN.kept:
            others = others + (views[5 * k + 8] & (dropped == 0),)
            found = record_count(found, PLAN, "counts", of_pair(k + 1, "survivors"), others[k])
        else:
            others = others + (views[5 * k + 8],)
    if PLAN.level != "token" and PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(d.dtype)
        found = record_sum(found, PLAN, "weight", tl.where(among, limited(d, -most, most, PLAN), 0.0), TAME)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            external = external_of(externals, train, sequence, tile, width, place, inside, full, test(PLAN, i), PLAN,
                                   TILE, ALIGNED)  # fmt: skip
            if pair_of(PLAN, i) == 0:
                found = aggregate_tokens(found, d, train, rollout, among, external, numbers, test(PLAN, i), PLAN, TAME)
            else:
                found = aggregate_tokens(found, views[5 * pair_of(PLAN, i)], views[5 * pair_of(PLAN, i) + 1],
                                         views[5 * pair_of(PLAN, i) + 2], others[pair_of(PLAN, i) - 1], external,
                                         numbers, test(PLAN, i), PLAN, False)  # fmt: skip
    if size(PLAN, "schemes") > 0:
        found = report_tokens(found, d, train, rollout, measured, among, log_ratio, e, excess, k3, weight, numbers,
                              PLAN)  # fmt: skip
    if PLAN.drops_tokens:
        found = record_count(found, PLAN, "counts", "alive", valid & (dropped == 0))
    if PLAN.classes:
        for c in tl.static_range(4):
            which = class_of(d, advantage, measured, class_name(c))
            found = record_count(found, PLAN, "counts", class_name(c), which)
            if PLAN.drops_tokens:
                found = record_count(found, PLAN, "counts", named("alive", class_name(c)), which & (dropped == 0))
    for k in tl.static_range(size(PLAN, "pairs")):
        if has_classes(PLAN, k + 1):
            for c in tl.static_range(4):
                which = class_of(views[5 * k + 5], advantage, views[5 * k + 8], class_name(c))
                found = record_count(found, PLAN, "counts", of_pair(k + 1, class_name(c)), which)
    if PLAN.averages_advantages:
        counted = tl.where(valid & is_finite(advantage), advantage, 0.0)
        found = record_statistic(found, PLAN, "advantage", counted)

    if writes_token_weights(PLAN):
        carries = measured
        if PLAN.rejected != "mask" and PLAN.drops_tokens:
            carries = measured & (dropped == 0)
        found = found + (tl.where(carries, weight, 0.0),)
    if PLAN.writes_mask:
        kept = valid
        if PLAN.edits_mask and PLAN.drops_tokens:
            kept = valid & (dropped == 0)
        found = found + (tl.where(kept, given, 0).to(given.dtype),)
    return found


@triton.jit
def read_parts(parts, advantages, externals, sequence, tile, start, end, full, outside, width, sequences, numbers,
               PLAN: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ALIGNED: tl.constexpr,
               TAME: tl.constexpr):  # fmt: skip
    """What all parts found together, and then what each wants to write."""
    found, written = (), ()
    for part in tl.static_range(TILE // (LANES * VEC)):
        place = positions(part * LANES * VEC, LANES, VEC)
        inside = (place >= start) & (place < end)
        more = read_part(parts[3 * part], parts[3 * part + 1], parts[3 * part + 2], advantages, externals, sequence,
                         tile, place, inside, full, outside, width, sequences, numbers, PLAN, TILE, ALIGNED,
                         TAME)  # fmt: skip
        written = written + more[places(PLAN) :]
        if part == 0:
            found = more[: places(PLAN)]
        else:
            found = merged(found, more[: places(PLAN)], PLAN)
    return found + written


# No length and no stride in a key: annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "steps", "train_row", "train_step", "rollout_row", "rollout_step",
           "mask_row", "mask_step"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def read_kernel(
    train_logp, rollout_logp, mask, advantages, externals, offsets, numbers,
    weights, mask_out, owners, counts, integers, floats, peaks, sums, maxima, histogram,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Read ROWS slots: what their sequences need goes to the slot tables, what the batch reports to sums and maxima.

    Writes token weights and the mask as far as they do not hang on a sequence's verdict, which `apply` adds.
    """
    numbers = thresholds(numbers, PLAN)
    slots = tl.num_programs(0).to(tl.int64) * ROWS
    slot, owner, outside = slots_of_program(offsets, sequences, tokens, steps, PLAN, ROWS, TILE)
    if PLAN.packed and PLAN.applies:
        tl.store(owners + slot, owner.to(tl.int32))
    sequence, tile, start, end = stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN, TILE)
    full, whole = coverage(tile, start, end, tokens, PLAN, TILE)
    # One branch for all, so that all are under way before the first is needed.
    if full:
        parts = fetch_parts(train_logp, rollout_logp, mask, sequence, tile, start, end, train_row, train_step,
                            rollout_row, rollout_step, mask_row, mask_step, PLAN, TILE, LANES, VEC, UNIT, ALIGNED,
                            True, True)  # fmt: skip
    elif whole:
        parts = fetch_parts(train_logp, rollout_logp, mask, sequence, tile, start, end, train_row, train_step,
                            rollout_row, rollout_step, mask_row, mask_step, PLAN, TILE, LANES, VEC, UNIT, ALIGNED,
                            False, True)  # fmt: skip
    else:
        parts = fetch_parts(train_logp, rollout_logp, mask, sequence, tile, start, end, train_row, train_step,
                            rollout_row, rollout_step, mask_row, mask_step, PLAN, TILE, LANES, VEC, UNIT, ALIGNED,
                            False, False)  # fmt: skip
    largest = largest_gap(parts, outside, PLAN)
    clamp = number(numbers, PLAN, "clamp").to(real(PLAN))
    if largest <= clamp.to(largest.dtype, bitcast=True):
        found = read_parts(parts, advantages, externals, sequence, tile, start, end, full, outside, width, sequences,
                           numbers, PLAN, TILE, LANES, VEC, ALIGNED, True)  # fmt: skip
    else:
        found = read_parts(parts, advantages, externals, sequence, tile, start, end, full, outside, width, sequences,
                           numbers, PLAN, TILE, LANES, VEC, ALIGNED, False)  # fmt: skip
    if writes_token_weights(PLAN) or PLAN.writes_mask:
        written = found[places(PLAN) :]
        if full:
            write_parts(written, weights, mask_out, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, ALIGNED,
                        True)  # fmt: skip
        else:
            write_parts(written, weights, mask_out, sequence, tile, start, end, width, PLAN, TILE, LANES, VEC, ALIGNED,
                        False)  # fmt: skip
    put_sums(found, sums, PLAN)
    put_slots(found, counts, slots, slot, PLAN, "counts")
    put_slots(found, floats, slots, slot, PLAN, "floats")
    put_slots(found, integers, slots, slot, PLAN, "integers")
    put_slots(found, peaks, slots, slot, PLAN, "peaks")
    put_maxima(found, maxima, PLAN)
    if PLAN.full:
        bins = found[places(PLAN) - 1]
        copy = (tl.program_id(0) % COPIES) * BINS
        tl.atomic_add(histogram + copy + tl.arange(0, BINS), bins.to(tl.int64), mask=bins > 0, sem="relaxed")
