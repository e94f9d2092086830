"""The reduce phase: every log-prob is read here, once.

A program takes ROWS consecutive slots. A slot is one sequence's part of one aligned stretch of TILE tokens: slot
(sequence s, tile t) has number s + t, so that `N // TILE + S` slots cover any packing and a binary search over
`offsets[s] // TILE + s` finds a slot's owner, without a prefix sum. Rows of a padded batch have equally many each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.reports import report_tokens
from rollout_corr.kernels.tokens import (
    GRID_OF_D,
    GRID_OF_FRACTION,
    LARGEST_D,
    LARGEST_STATISTIC,
    accurate_exp,
    class_name,
    count,
    has,
    is_finite,
    k3_of,
    largest,
    largest_key,
    limited,
    log_ratio_of,
    named,
    near,
    number,
    of_test,
    passes,
    per_row,
    probability,
    put,
    real,
    rows_of,
    size,
    statistic,
    test,
    to_grid,
    total,
    within,
)

# Programs add their histograms into this many copies, so that they do not all wait for the same few bins.
COPIES = tl.constexpr(16)
BINS = tl.constexpr(512)
FIRST_BIN = tl.constexpr((127 - 24) << 3)


# --- which tokens ---


@triton.jit
def edge(offsets, v, sequences, tokens):
    """Where sequence v of a packed batch begins: 0 is what lies before the first, `sequences` + 1 what lies behind.

    Offsets are clamped into the batch, so that wrong ones cannot lead out of it.
    """
    known = (v > 0) & (v <= sequences + 1)
    found = tl.load(offsets + (v - 1), mask=known, other=0).to(tl.int64)
    found = tl.minimum(tl.maximum(found, 0), tokens)
    return tl.where(v > sequences + 1, tokens, found)


@triton.jit
def owner_of(offsets, slot, sequences, tokens, steps, TILE: tl.constexpr):
    """The sequence (as `edge` counts) to which a slot of a packed batch belongs."""
    low = slot * 0
    high = low + sequences + 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        reached = edge(offsets, middle, sequences, tokens) // TILE + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN: tl.constexpr, TILE: tl.constexpr):
    """The sequence of a slot, its tile, and which part of the tile is the sequence's."""
    if PLAN.packed:
        tile = slot - owner
        start = edge(offsets, owner, sequences, tokens) - tile * TILE
        end = edge(offsets, owner + 1, sequences, tokens) - tile * TILE
        sequence = owner - 1
    else:
        sequence = slot // tiles
        tile = slot % tiles
        start = slot * 0
        end = tl.where(sequence < sequences, width - tile * TILE, 0)
    start = tl.minimum(tl.maximum(start, 0), TILE)
    end = tl.minimum(tl.maximum(end, 0), TILE)
    return sequence, tile, start.to(tl.int32)[:, None, None], end.to(tl.int32)[:, None, None]


@triton.jit
def positions(TILE: tl.constexpr, VEC: tl.constexpr):
    """[1, TILE // VEC, VEC], the place of each token in its tile."""
    group = tl.arange(0, TILE // VEC)[None, :, None]
    return group * VEC + tl.arange(0, VEC)[None, None, :]


@triton.jit
def row_start(sequence, tile, stride, PLAN: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """[ROWS, 1, 1] int64, where a slot's tile begins in a tensor whose rows are `stride` apart."""
    start = tile.to(tl.int64) * TILE
    if not PLAN.packed:
        rows = sequence.to(tl.int64) * stride
        if ALIGNED:
            rows = tl.multiple_of(rows, 16)
        start += rows
    return start[:, None, None]


@triton.jit
def addresses(pointer, sequence, tile, stride, step, place, PLAN: tl.constexpr, TILE: tl.constexpr,
              UNIT: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Where the tokens of a tile lie in a per-token tensor with these strides."""
    if UNIT:
        return pointer + (row_start(sequence, tile, stride, PLAN, TILE, ALIGNED) + place)
    else:
        where = ((tile.to(tl.int64) * TILE)[:, None, None] + place) * step
        if not PLAN.packed:
            where += (sequence.to(tl.int64) * stride)[:, None, None]
        return pointer + where


@triton.jit
def fetch(pointers, inside, interior):
    """Load a tile; without a mask where every slot fills its tile, so that the access can be wide."""
    if interior:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=inside, other=0)
    return x


@triton.jit
def write(pointers, x, inside, interior):
    """Store a tile."""
    if interior:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=inside)


# --- what a slot leaves behind ---


@triton.jit
def put_sum(tables, PLAN: tl.constexpr, name: tl.constexpr, slots, slot, x):
    """[ROWS] sums of D or of something bounded like it: exact on D's grid, saturated; plain in float64."""
    integers, floats, _ = tables
    if has(PLAN, "integers", name) or has(PLAN, "floats", name):
        finite = x
        if has(PLAN, "floats", named(name, "rest")):
            finite = finite_part(x)
            put(floats, PLAN, "floats", named(name, "rest"), slots, slot, per_row(x - finite))
        finite = tl.minimum(tl.maximum(finite, -LARGEST_D), LARGEST_D)
        if PLAN.double:
            put(floats, PLAN, "floats", name, slots, slot, per_row(finite))
        else:
            put(integers, PLAN, "integers", name, slots, slot, per_row(to_grid(finite, GRID_OF_D)))


@triton.jit
def put_statistic(tables, PLAN: tl.constexpr, name: tl.constexpr, slots, slot, x):
    """[ROWS] sums of another statistic, exact in two limbs."""
    integers, floats, _ = tables
    finite = x
    if has(PLAN, "floats", named(name, "rest")):
        finite = finite_part(x)
        put(floats, PLAN, "floats", named(name, "rest"), slots, slot, per_row(x - finite))
    finite = tl.minimum(tl.maximum(finite, -LARGEST_STATISTIC), LARGEST_STATISTIC)
    if PLAN.double:
        put(floats, PLAN, "floats", name, slots, slot, per_row(finite))
    else:
        whole = finite.to(tl.int64)
        fraction = to_grid(finite - whole.to(finite.dtype), GRID_OF_FRACTION)
        put(integers, PLAN, "integers", name, slots, slot, per_row(whole))
        put(integers, PLAN, "integers", named(name, "fraction"), slots, slot, per_row(fraction))


@triton.jit
def finite_part(x):
    """x, and 0 where it is NaN or infinite."""
    return tl.where(is_finite(x), x, 0.0)


# --- what a program adds to the statistics ---


@triton.jit
def put_extrema(maxima, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among, NAN: tl.constexpr):
    """The largest of -x and of x."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    if has(PLAN, "token_maxima", high):
        put(maxima, PLAN, "token_maxima", high, programs, program, largest(x, among, NAN))
    if has(PLAN, "token_maxima", low):
        put(maxima, PLAN, "token_maxima", low, programs, program, largest(-x, among, NAN))


@triton.jit
def add(sums, PLAN: tl.constexpr, name: tl.constexpr, x):
    """The sum of x over the tile; x is 0 at what does not count."""
    put(sums, PLAN, "token_sums", name, tl.num_programs(0), tl.program_id(0), total(x))


@triton.jit
def put_rows(values, sums, floats, slots, slot, PLAN: tl.constexpr, OF_BATCH: tl.constexpr, ROWS: tl.constexpr):
    """Sums over tiles: the first OF_BATCH are the batch's, the others go to the first columns of `floats`."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    for first in tl.static_range(0, len(values), 8):
        found = rows_of(values, first, ROWS)
        column = first + tl.arange(0, 8)
        where = sums + column.to(tl.int64) * programs + program
        tl.store(where, tl.sum(found, 0).to(tl.float64), mask=column < OF_BATCH)
        if first + 8 > OF_BATCH:
            where = floats + (column.to(tl.int64) - OF_BATCH)[None, :] * slots + slot[:, None]
            mine = ((column >= OF_BATCH) & (column < len(values)))[None, :]
            tl.store(where, found.to(tl.float64), mask=mine & (slot >= 0)[:, None])


@triton.jit
def extremes(d, measured, PLAN: tl.constexpr):
    """The largest and the smallest D of a program; -inf and inf without any."""
    if PLAN.nonfinite == "propagate":
        return largest(d, measured, True), -largest(-d, measured, True)
    else:
        both = tl.join(
            tl.max(tl.where(measured, d, float("-inf")), 2), tl.max(tl.where(measured, -d, float("-inf")), 2)
        )
        high, low = tl.split(tl.max(tl.max(both, 1), 0))
        return high, -low


@triton.jit
def measure_tokens(d, log_ratio, excess, k3, high, low, clamp, PLAN: tl.constexpr):
    """What every Spec reports of its tokens, in the order of columns.token_sums."""
    saturated = limited(d, -LARGEST_D, LARGEST_D, PLAN)
    clamped = tl.zeros_like(d)
    # Hardly ever, unless a NaN has to be looked for.
    if (PLAN.nonfinite == "propagate") | (high > clamp) | (low < -clamp):
        clamped = tl.where(log_ratio - d != 0.0, 1.0, 0.0).to(d.dtype)
    return (near(tl.abs(saturated)), near(saturated * saturated), near(k3), near(excess), near(excess * excess),
            near(clamped))  # fmt: skip


@triton.jit
def measure_probabilities(d, train, rollout, measured, sums, maxima, histogram, PLAN: tl.constexpr):
    """What only detail="full" reports."""
    p = tl.where(measured, probability(rollout) - 1.0, 0.0)
    q = tl.where(measured, probability(train) - 1.0, 0.0)
    gap = tl.abs(p - q)
    add(sums, PLAN, "abs_prob_diff", gap)
    put_extrema(maxima, PLAN, "", "max_abs_prob_diff", gap, measured, PLAN.nonfinite == "propagate")
    p, q = p.to(tl.float64), q.to(tl.float64)
    add(sums, PLAN, "p", p)
    add(sums, PLAN, "q", q)
    add(sums, PLAN, "p2", p * p)
    add(sums, PLAN, "q2", q * q)
    add(sums, PLAN, "pq", p * q)
    bits = d.to(tl.float32).to(tl.int32, bitcast=True)
    bins = tl.minimum(tl.maximum(((bits & 0x7FFFFFFF) >> 20) - FIRST_BIN, 0), 255) + tl.where(bits < 0, 256, 0)
    found = tl.histogram(tl.ravel(bins), BINS, mask=tl.ravel(measured & is_finite(d)))
    copy = (tl.program_id(0) % COPIES) * BINS
    tl.atomic_add(histogram + copy + tl.arange(0, BINS), found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit
def weight_of(d, log_ratio, e, k3, numbers, PLAN: tl.constexpr):
    """The log-ratio of a weight, ratio - 1 before and after the bounds, and the weight."""
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(d.dtype)
        log_ratio = limited(log_ratio, -most, most, PLAN)
        e = accurate_exp(log_ratio, PLAN)
        k3 = k3_of(log_ratio, e, PLAN.double)
    raw = log_ratio + k3
    bounded, weight = raw, e
    if PLAN.bounded:
        if PLAN.outside == "zero":
            inside = within(log_ratio, numbers, PLAN, "log")
            bounded, weight = tl.where(inside, raw, -1.0), tl.where(inside, e, 0.0)
        else:
            lower, upper = number(numbers, PLAN, "lower"), number(numbers, PLAN, "upper")
            bounded = limited(raw, (lower - 1.0).to(d.dtype), (upper - 1.0).to(d.dtype), PLAN)
            weight = limited(e, lower.to(d.dtype), upper.to(d.dtype), PLAN)
    return log_ratio, raw, bounded, weight


@triton.jit
def measure_weights(measured, log_ratio, raw, bounded, numbers, PLAN: tl.constexpr):
    """What a token weight reports, in the order of columns.token_sums, and then its columns of `floats`."""
    bounded = tl.where(measured, bounded, 0.0)
    above, below = tl.zeros_like(raw), tl.zeros_like(raw)
    if PLAN.has_upper:
        inside = log_ratio <= number(numbers, PLAN, "log/upper").to(raw.dtype)
        above = tl.where(measured & (inside == 0), 1.0, 0.0).to(raw.dtype)
    if PLAN.has_lower:
        inside = log_ratio >= number(numbers, PLAN, "log/lower").to(raw.dtype)
        below = tl.where(measured & (inside == 0), 1.0, 0.0).to(raw.dtype)
    return (near(raw * raw), near(bounded * bounded), near(above), near(below)), (near(raw), near(bounded))


@triton.jit
def put_weight_extrema(high, low, some, measured, bounded, maxima, numbers, PLAN: tl.constexpr):
    """Extrema of token weights. A weight grows with D, unless it becomes 0 outside its bounds."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    clamp = number(numbers, PLAN, "clamp").to(high.dtype)
    for i in tl.static_range(2):
        d = low if i == 0 else high
        log_ratio = limited(d, -clamp, clamp, PLAN)
        e = accurate_exp(log_ratio, PLAN)
        _, raw, end, _ = weight_of(d, log_ratio, e, k3_of(log_ratio, e, PLAN.double), numbers, PLAN)
        raw, end = (-raw, -end) if i == 0 else (raw, end)
        put(maxima, PLAN, "token_maxima", "-min_raw" if i == 0 else "max_raw", programs, program,
            tl.where(some, raw, float("-inf")))  # fmt: skip
        if PLAN.outside != "zero":
            put(maxima, PLAN, "token_maxima", "-min_weight" if i == 0 else "max_weight", programs, program,
                tl.where(some, end, float("-inf")))  # fmt: skip
    if PLAN.outside == "zero":
        put_extrema(maxima, PLAN, "-min_weight", "max_weight", bounded, measured, PLAN.nonfinite == "propagate")


# --- criteria ---


@triton.jit
def class_of(d, advantage, measured, WHICH: tl.constexpr):
    """Tokens of one class of `when`; see plan.CLASSES."""
    if WHICH == "negative_outward":
        return measured & (advantage < 0) & (d < 0)
    elif WHICH == "negative_inward":
        return measured & (advantage < 0) & ((d < 0) == 0)
    elif WHICH == "positive_outward":
        return measured & (advantage > 0) & (d > 0)
    else:
        return measured & (advantage > 0) & ((d > 0) == 0)


@triton.jit
def selected(d, advantage, measured, WHEN: tl.constexpr):
    """What `when` asks for. A NaN advantage is not selected, nor is 0."""
    if WHEN == "any":
        return measured
    elif WHEN == "negative_advantage":
        return measured & (advantage < 0)
    elif WHEN == "positive_advantage":
        return measured & (advantage > 0)
    else:
        return measured & (((advantage < 0) & (d < 0)) | ((advantage > 0) & (d > 0)))


@triton.jit
def judge_tokens(d, train, rollout, measured, advantage, external, dropped, tables, slots, slot, sums, maxima, numbers,
                 TEST: tl.constexpr, PLAN: tl.constexpr):  # fmt: skip
    """Test every measured token that `when` selects; gives back what is dropped so far, and two sums to report."""
    value = statistic(d, train, rollout, measured, external, numbers, TEST, PLAN)
    if TEST.cut == "value":
        tested = value
    else:
        tested = log_ratio_of(d, numbers, TEST, PLAN)
    fails = selected(d, advantage, measured, TEST.when) & (passes(tested, numbers, TEST, PLAN) == 0)
    put(tables[0], PLAN, "integers", named(TEST.index, "lost"), slots, slot, count(fails))
    among = measured
    if TEST.stat == "ratio":
        clamp = number(numbers, PLAN, "clamp").to(d.dtype)
        value = limited(value, -clamp, clamp, PLAN)
        value = value + k3_of(value, accurate_exp(value, PLAN), PLAN.double)
    if TEST.stat == "external":
        among = among & is_finite(value)
    counted = limited(tl.where(among, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)
    put_extrema(
        maxima,
        PLAN,
        of_test("-min", TEST.index),
        of_test("max", TEST.index),
        value,
        among,
        PLAN.nonfinite == "propagate" or TEST.stat == "external",
    )
    if TEST.drop != "sequence":
        dropped = dropped | fails
    return dropped, (near(counted), near(counted * counted))


@triton.jit
def aggregate_tokens(d, train, rollout, among, external, tables, slots, slot, numbers, TEST: tl.constexpr,
                     PLAN: tl.constexpr):  # fmt: skip
    """What a criterion over sequences needs of a slot."""
    if has(PLAN, "peaks", named(TEST.index, "peak")):
        if TEST.cut == "abs_d" or TEST.cut == "clamped_abs_d":
            # These statistics grow with |D|, so its extremum decides, and gives theirs.
            x = tl.abs(log_ratio_of(d, numbers, TEST, PLAN))
        else:
            x = statistic(d, train, rollout, among, external, numbers, TEST, PLAN)
        peak = largest_key(x if TEST.reduce == "max" else -x, among)
        put(tables[2], PLAN, "peaks", named(TEST.index, "peak"), slots, slot, peak)
    elif TEST.sum != "d":
        x = tl.where(among, statistic(d, train, rollout, among, external, numbers, TEST, PLAN), 0.0)
        if TEST.stat == "ratio" or TEST.stat == "k1" or TEST.stat == "abs":
            put_sum(tables, PLAN, named(TEST.index, "sum"), slots, slot, x)
        else:
            put_statistic(tables, PLAN, named(TEST.index, "sum"), slots, slot, x)


# --- the kernel ---


# No length and no stride in a key: annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "steps", "train_row", "train_step", "rollout_row", "rollout_step",
           "mask_row", "mask_step"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def read_kernel(
    train_logp, rollout_logp, mask, advantages, externals, offsets, numbers,
    weights, mask_out, owners, integers, floats, peaks, sums, maxima, histogram,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    PLAN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, VEC: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Read ROWS slots: what their sequences need goes to the slot tables, what the batch reports to sums and maxima.

    Writes token weights and the mask as far as they do not hang on a sequence's verdict, which `apply` adds.
    """
    slots = tl.num_programs(0).to(tl.int64) * ROWS
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    owner = slot
    outside = (slot < 0)[:, None, None]
    if PLAN.packed:
        owner = owner_of(offsets, slot, sequences, tokens, steps, TILE)
        outside = ((owner == 0) | (owner == sequences + 1))[:, None, None]
        if PLAN.applies:
            tl.store(owners + slot, owner.to(tl.int32))
    sequence, tile, start, end = stretch_of(offsets, owner, slot, sequences, tokens, width, tiles, PLAN, TILE)
    place = positions(TILE, VEC)
    inside = (place >= start) & (place < end)
    interior = tl.min(tl.min(end - start, 0)) == TILE
    trains = addresses(train_logp, sequence, tile, train_row, train_step, place, PLAN, TILE, UNIT, ALIGNED)
    rollouts = addresses(rollout_logp, sequence, tile, rollout_row, rollout_step, place, PLAN, TILE, UNIT, ALIGNED)
    # One branch for all, so that all are under way before the first is needed.
    if PLAN.masked:
        masks = addresses(mask, sequence, tile, mask_row, mask_step, place, PLAN, TILE, UNIT, ALIGNED)
        if interior:
            train, rollout, given = tl.load(trains), tl.load(rollouts), tl.load(masks)
        else:
            train = tl.load(trains, mask=inside, other=0)
            rollout = tl.load(rollouts, mask=inside, other=0)
            given = tl.load(masks, mask=inside, other=0)
        valid = given != 0
    else:
        if interior:
            train, rollout = tl.load(trains), tl.load(rollouts)
        else:
            train, rollout = tl.load(trains, mask=inside, other=0), tl.load(rollouts, mask=inside, other=0)
        given = inside.to(tl.int8)
        valid = inside
    train, rollout = train.to(real(PLAN)), rollout.to(real(PLAN))
    tables = (integers, floats, peaks)
    counts = valid.to(tl.int32)
    if PLAN.packed:
        # Counted, and from here on as if they were not there.
        valid = valid & (outside == 0)
    advantage = train
    if PLAN.advantages == "token":
        where = addresses(advantages, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        advantage = fetch(where, inside, interior).to(real(PLAN))
    elif PLAN.advantages == "sequence":
        known = (sequence >= 0) & (sequence < sequences)
        each = tl.load(advantages + sequence, mask=known, other=0.0)
        advantage = each.to(real(PLAN))[:, None, None] + tl.zeros_like(train)

    d = train - rollout
    bad = valid & (is_finite(d) == 0)
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = valid & (bad == 0)
    elif PLAN.nonfinite == "neutral":
        train, rollout, d = tl.where(bad, 0.0, train), tl.where(bad, 0.0, rollout), tl.where(bad, 0.0, d)
    train, rollout = tl.where(measured, train, 0.0), tl.where(measured, rollout, 0.0)
    d = tl.where(measured, d, 0.0)

    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e = accurate_exp(log_ratio, PLAN)
    k3 = k3_of(log_ratio, e, PLAN.double)
    # Two counts in one sum: a tile has less than 2^16 tokens.
    counts = per_row(counts + tl.where(bad, 1 << 16, 0))
    put(integers, PLAN, "integers", "valid", slots, slot, counts & 0xFFFF)
    put(integers, PLAN, "integers", "nonfinite", slots, slot, counts >> 16)
    put_sum(tables, PLAN, "d", slots, slot, d)
    high, low = extremes(d, measured, PLAN)
    put(maxima, PLAN, "token_maxima", "max_d", tl.num_programs(0), tl.program_id(0), high)
    put(maxima, PLAN, "token_maxima", "-min_d", tl.num_programs(0), tl.program_id(0), -low)
    found = measure_tokens(d, log_ratio, log_ratio + k3, k3, high, low, clamp, PLAN)
    of_slots = (near(train), near(rollout))
    if PLAN.full:
        measure_probabilities(d, train, rollout, measured, sums, maxima, histogram, PLAN)
    weight = tl.full(d.shape, 1.0, d.dtype)
    if PLAN.level == "token":
        log_weight, raw, bounded, weight = weight_of(d, log_ratio, e, k3, numbers, PLAN)
        more, of_weights = measure_weights(measured, log_weight, raw, bounded, numbers, PLAN)
        found = found + more
        of_slots = of_slots + of_weights
        some = tl.max(tl.max(tl.max(measured.to(tl.int32), 2), 1), 0) > 0
        put_weight_extrema(high, low, some, measured, bounded, maxima, numbers, PLAN)

    dropped = tl.zeros_like(measured)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token":
            external = train
            if test(PLAN, i).external >= 0:
                where = addresses(externals[test(PLAN, i).external], sequence, tile, width, 1, place, PLAN, TILE,
                                  True, ALIGNED)  # fmt: skip
                external = fetch(where, inside, interior).to(real(PLAN))
            dropped, more = judge_tokens(d, train, rollout, measured, advantage, external, dropped, tables, slots, slot,
                                   sums, maxima, numbers, test(PLAN, i), PLAN)  # fmt: skip
            found = found + more
    put_rows(found + of_slots, sums, floats, slots, slot, PLAN, len(found), ROWS)
    among = measured
    if PLAN.kept:
        among = measured & (dropped == 0)
        put(integers, PLAN, "integers", "survivors", slots, slot, count(among))
        put_sum(tables, PLAN, "d_kept", slots, slot, tl.where(among, d, 0.0))
    if PLAN.level != "token" and PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(d.dtype)
        put_sum(tables, PLAN, "weight", slots, slot, tl.where(among, limited(d, -most, most, PLAN), 0.0))
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            external = train
            if test(PLAN, i).external >= 0:
                where = addresses(externals[test(PLAN, i).external], sequence, tile, width, 1, place, PLAN, TILE,
                                  True, ALIGNED)  # fmt: skip
                external = fetch(where, inside, interior).to(real(PLAN))
            aggregate_tokens(d, train, rollout, among, external, tables, slots, slot, numbers, test(PLAN, i), PLAN)
    if size(PLAN, "schemes") > 0:
        report_tokens(d, train, rollout, measured, among, log_ratio, e, k3, weight, tables, slots, slot, sums, maxima,
                      numbers, PLAN)  # fmt: skip
    if PLAN.drops_tokens:
        put(integers, PLAN, "integers", "alive", slots, slot, count(valid & (dropped == 0)))
    if PLAN.classes:
        for c in tl.static_range(4):
            found = class_of(d, advantage, measured, class_name(c))
            put(integers, PLAN, "integers", class_name(c), slots, slot, count(found))
            if PLAN.drops_tokens:
                alive = count(found & (dropped == 0))
                put(integers, PLAN, "integers", named("alive", class_name(c)), slots, slot, alive)
        if PLAN.advantages == "token":
            counted = tl.where(valid & is_finite(advantage), advantage, 0.0)
            put_statistic(tables, PLAN, "advantage", slots, slot, counted)

    if PLAN.writes_weights and (PLAN.marks or not PLAN.spreads):
        carries = measured
        if PLAN.rejected != "mask" and PLAN.drops_tokens:
            carries = measured & (dropped == 0)
        where = addresses(weights, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        write(where, tl.where(carries, weight, 0.0), inside, interior)
    if PLAN.writes_mask:
        kept = valid
        if PLAN.edits_mask and PLAN.drops_tokens:
            kept = valid & (dropped == 0)
        where = addresses(mask_out, sequence, tile, width, 1, place, PLAN, TILE, True, ALIGNED)
        write(where, tl.where(kept, given, 0).to(mask_out.dtype.element_ty), inside, interior)
