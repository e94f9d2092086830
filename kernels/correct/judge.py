"""Between the phases: every sequence is judged and weighed, from what its slots left behind."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import passes
from rollout_corr.kernels.correct.measures import bound
from rollout_corr.kernels.correct.peers import report_criterion, report_sequences, report_weights
from rollout_corr.kernels.correct.plan import Plan, Test
from rollout_corr.kernels.gather import column, exact, integer, plain, slots_of, tables_of
from rollout_corr.kernels.tokens import (
    LARGEST_SQUARED,
    LARGEST_STATISTIC,
    class_name,
    expm1,
    exponential,
    has,
    is_finite,
    key_of,
    limited,
    named,
    number,
    of_key,
    of_pair,
    of_test,
    pair_of,
    perplexity,
    put,
    size,
    test,
    thresholds,
)

# The classes of tokens that `when` asks for, in the order of plan.CLASSES.
CHOSEN = {"negative_advantage": (0, 1), "positive_advantage": (2, 3), "outward": (0, 2)}

# Bits of a sequence's state: rejected as a whole; without weight; then one for each criterion that dropped tokens.
REJECTED = tl.constexpr(1)
WEIGHTLESS = tl.constexpr(2)


@triton.constexpr_function
def late_bit(plan: Plan, i: int) -> int:
    """The bit of a criterion of sequences that drops tokens."""
    late = [criterion.index for criterion in plan.tests if criterion.over == "sequence" and criterion.drop == "token"]
    return 4 << late.index(i)


@triton.constexpr_function
def selects(criterion: Test, which: int) -> bool:
    """Whether a criterion's `when` asks for a class of tokens."""
    return which in CHOSEN[criterion.when]


@triton.constexpr_function
def sum_of(criterion: Test) -> str | None:
    """The column with the sum that decides."""
    return criterion.sum


@triton.constexpr_function
def late_selects(plan: Plan, i: int, which: int) -> bool:
    """Whether a criterion of sequences drops one of its classes of tokens."""
    criterion = plan.tests[i]
    late = criterion.over == "sequence" and criterion.drop == "token" and criterion.when != "any"
    return late and which in CHOSEN[criterion.when]


@triton.jit
def add(sums, PLAN: tl.constexpr, name: tl.constexpr, x):
    """The sum over sequences; x is 0 at those that do not count."""
    put(sums, PLAN, "sequence_sums", name, tl.num_programs(0), tl.program_id(0), tl.sum(x.to(tl.float64), 0))


@triton.jit
def put_extrema(maxima, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among):
    """The largest of -x and of x among some."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    if has(PLAN, "sequence_maxima", low):
        least = of_key(tl.max(key_of(tl.where(among, -x, float("-inf"))), 0))
        put(maxima, PLAN, "sequence_maxima", low, programs, program, least)
    most = of_key(tl.max(key_of(tl.where(among, x, float("-inf"))), 0))
    put(maxima, PLAN, "sequence_maxima", high, programs, program, most)


@triton.jit
def selected_sequences(found, each, PLAN: tl.constexpr, TEST: tl.constexpr):
    """The sign of the mean advantage over valid tokens; for "outward", holding an outward token."""
    if TEST.when == "outward":
        outward = integer(found, PLAN, of_pair(TEST.pair, "negative_outward"))
        outward += integer(found, PLAN, of_pair(TEST.pair, "positive_outward"))
        return outward > 0
    else:
        if PLAN.advantages == "token":
            mean = exact(found, PLAN, "advantage", False)
        else:
            mean = each.to(tl.float64)
        return mean < 0 if TEST.when == "negative_advantage" else mean > 0


@triton.jit
def class_count(found, PLAN: tl.constexpr, TEST: tl.constexpr):
    """[SEQUENCES], how many measured tokens `when` selects."""
    tokens = integer(found, PLAN, "valid") * 0
    for c in tl.static_range(4):
        if selects(TEST, c):
            tokens += integer(found, PLAN, class_name(c))
    return tokens


@triton.jit
def value_of(found, n, numbers, TEST: tl.constexpr, PLAN: tl.constexpr):
    """A sequence's value, and what is compared with the bounds: a ratio's logarithm, |D| where that decides."""
    if has(PLAN, "peaks", named(TEST.index, "peak")):
        peak = of_key(column(found[3], PLAN, "peaks", named(TEST.index, "peak"), True))
        if TEST.reduce == "min":
            peak = -peak
        value = peak
        if TEST.stat == "k2":
            value = tl.where(peak > LARGEST_SQUARED, LARGEST_SQUARED, peak)
            value = 0.5 * (value * value)
        elif TEST.stat == "ratio_error":
            clamp = number(numbers, PLAN, "clamp").to(peak.dtype)
            value, _, _ = exponential(tl.where(peak > clamp, clamp, peak), PLAN)
        value, tested = value.to(tl.float64), peak.to(tl.float64)
    else:
        if TEST.stat == "ratio" or TEST.stat == "k1" or TEST.stat == "abs":
            if PLAN.kept and TEST.sum == "d":
                value = exact(found, PLAN, "d_kept", True)
            else:
                value = exact(found, PLAN, sum_of(TEST), True)
            if TEST.stat == "k1" and TEST.sum == "d":
                value = -value
        else:
            value = exact(found, PLAN, sum_of(TEST), False)
        if TEST.reduce == "mean":
            value = value / tl.maximum(n, 1).to(tl.float64)
        tested = value
    return tl.where(n > 0, value, 0.0), tl.where(n > 0, tested, 0.0)


@triton.jit
def measure_criterion(value, among, sums, maxima, numbers, TEST: tl.constexpr, PLAN: tl.constexpr):
    """What a criterion over sequences reports."""
    if TEST.stat == "ratio":
        clamp = number(numbers, PLAN, "clamp")
        value = expm1(limited(value, -clamp, clamp, PLAN))
    add(sums, PLAN, named(TEST.index, "units"), among)
    if TEST.stat == "external":
        among = among & is_finite(value)
    counted = limited(tl.where(among, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)
    add(sums, PLAN, named(TEST.index, "value"), counted)
    add(sums, PLAN, named(TEST.index, "value2"), counted * counted)
    put_extrema(maxima, PLAN, of_test("-min", TEST.index), of_test("max", TEST.index), value, among)


@triton.jit
def measure_sequences(sum_d, train, rollout, n, some, sums, maxima, numbers, PLAN: tl.constexpr):
    """What every Spec reports of its sequences."""
    each = tl.maximum(n, 1).to(tl.float64)
    train, rollout, gap = -train / each, -rollout / each, -sum_d / each
    clamp = number(numbers, PLAN, "clamp")
    size_of_sum = tl.abs(sum_d)
    chi2 = expm1(2.0 * limited(sum_d, -clamp, clamp, PLAN))
    add(sums, PLAN, "d", tl.where(some, sum_d, 0.0))
    add(sums, PLAN, "train_ppl", tl.where(some, perplexity(train), 0.0))
    add(sums, PLAN, "rollout_ppl", tl.where(some, perplexity(rollout), 0.0))
    add(sums, PLAN, "train_log_ppl", tl.where(some, train, 0.0))
    add(sums, PLAN, "rollout_log_ppl", tl.where(some, rollout, 0.0))
    add(sums, PLAN, "log_ppl_diff", tl.where(some, gap, 0.0))
    add(sums, PLAN, "log_ppl_abs_diff", tl.where(some, tl.abs(gap), 0.0))
    add(sums, PLAN, "ppl_ratio", tl.where(some, perplexity(gap), 0.0))
    add(sums, PLAN, "chi2_sequence", tl.where(some, chi2, 0.0))
    add(sums, PLAN, "abs_sum_d", tl.where(some, size_of_sum, 0.0))
    add(sums, PLAN, "sequences_clamped", some & (size_of_sum > clamp))
    put_extrema(maxima, PLAN, "-min_log_ppl_diff", "max_log_ppl_diff", gap, some)
    put_extrema(maxima, PLAN, "", "max_abs_sum_d", size_of_sum, some)


@triton.jit
def weigh_sequences(found, sum_d, n, n_among, some, sums, maxima, numbers, PLAN: tl.constexpr):
    """The weight of every sequence, with its statistics. At token level only the statistics: of mean weights."""
    if PLAN.level == "token":
        each = tl.maximum(n, 1).to(tl.float64)
        raw, bounded = plain(found, PLAN, "raw") / each, plain(found, PLAN, "bounded") / each
        ratio, weight, log_ratio = 1.0 + raw, 1.0 + bounded, tl.log(1.0 + raw)
    else:
        if PLAN.token_clamp:
            log_ratio = exact(found, PLAN, "weight", True)
        elif PLAN.kept:
            log_ratio = exact(found, PLAN, "d_kept", True)
        else:
            log_ratio = sum_d
        if PLAN.kept:
            log_ratio = tl.where(n_among > 0, log_ratio, 0.0)
        if PLAN.level == "geometric":
            log_ratio = log_ratio / tl.maximum(n_among, 1).to(tl.float64)
        clamp = number(numbers, PLAN, "clamp")
        log_ratio = limited(log_ratio, -clamp, clamp, PLAN)
        raw, ratio = expm1(log_ratio), tl.exp(log_ratio)
        bounded, weight = bound(log_ratio, raw, ratio, numbers, PLAN)
    above, below = tl.zeros_like(some), tl.zeros_like(some)
    if PLAN.has_upper:
        above = some & ((log_ratio <= number(numbers, PLAN, "log/upper")) == 0)
    if PLAN.has_lower:
        below = some & ((log_ratio >= number(numbers, PLAN, "log/lower")) == 0)
    tokens = tl.where(some, n, 0).to(tl.float64)
    raw_some, bounded_some = tl.where(some, raw, 0.0), tl.where(some, bounded, 0.0)
    ratio_some, weight_some = tl.where(some, ratio, 0.0), tl.where(some, weight, 0.0)
    add(sums, PLAN, "raw", tokens * raw_some)
    add(sums, PLAN, "weight", tokens * bounded_some)
    add(sums, PLAN, "sequence_raw", raw_some)
    add(sums, PLAN, "sequence_raw2", raw_some * raw_some)
    add(sums, PLAN, "sequence_weight", bounded_some)
    add(sums, PLAN, "sequence_weight2", bounded_some * bounded_some)
    add(sums, PLAN, "sequences_above", above)
    add(sums, PLAN, "sequences_below", below)
    add(sums, PLAN, "sequence_raw_plain", ratio_some)
    add(sums, PLAN, "sequence_raw_plain2", ratio_some * ratio_some)
    add(sums, PLAN, "sequence_weight_plain", weight_some)
    add(sums, PLAN, "sequence_weight_plain2", weight_some * weight_some)
    put_extrema(maxima, PLAN, "-min_sequence_raw", "max_sequence_raw", raw, some)
    put_extrema(maxima, PLAN, "-min_sequence_weight", "max_sequence_weight", bounded, some)
    if PLAN.level != "token":
        add(sums, PLAN, "raw2", tokens * raw_some * raw_some)
        add(sums, PLAN, "weight2", tokens * bounded_some * bounded_some)
        add(sums, PLAN, "tokens_above", tl.where(above, n, 0))
        add(sums, PLAN, "tokens_below", tl.where(below, n, 0))
        add(sums, PLAN, "raw_plain", tokens * ratio_some)
        add(sums, PLAN, "raw_plain2", tokens * ratio_some * ratio_some)
        add(sums, PLAN, "weight_plain", tokens * weight_some)
        add(sums, PLAN, "weight_plain2", tokens * weight_some * weight_some)
        put_extrema(maxima, PLAN, "-min_raw", "max_raw", raw, some)
        put_extrema(maxima, PLAN, "-min_weight", "max_weight", bounded, some)
    if size(PLAN, "schemes") > 0:
        report_weights(found, sum_d, log_ratio, raw, ratio, n, n_among, sums, maxima, numbers, PLAN)
    return weight


@triton.jit
def measured_of(found, valid, n, K: tl.constexpr, PLAN: tl.constexpr):
    """[SEQUENCES], how many tokens a pair of policies measures; n are those of train and rollout."""
    if K > 0 and PLAN.nonfinite == "reject":
        return valid - integer(found, PLAN, of_pair(K, "nonfinite"))
    elif K > 0:
        return valid
    else:
        return n


@triton.jit
def among_of(found, valid, keep, n_among, K: tl.constexpr, PLAN: tl.constexpr):
    """[SEQUENCES], how many of them the sums of a sequence run over."""
    if K > 0 and PLAN.kept:
        return tl.where(keep, integer(found, PLAN, of_pair(K, "survivors")), 0)
    else:
        return measured_of(found, valid, n_among, K, PLAN)


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "slots"])
def judge_kernel(
    numbers, advantages, offsets, counts, integers, floats, peaks, keep_out, states, sequence_weights, sums, maxima,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, slots: tl.int64,
    PLAN: tl.constexpr, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Judge SEQUENCES sequences: `keep`, their state and weight for `apply`, and what they add to the statistics."""
    numbers = thresholds(numbers, PLAN)
    owner = tl.program_id(0).to(tl.int64) * SEQUENCES + tl.arange(0, SEQUENCES)
    sequence, first, many = slots_of(offsets, owner, sequences, tokens, tiles, PLAN, TILE)
    real_row = (sequence >= 0) & (sequence < sequences)
    found = tables_of(counts, integers, floats, peaks, first, many, slots, PLAN, SEQUENCES, CHUNK)

    valid, nonfinite = integer(found, PLAN, "valid"), integer(found, PLAN, "nonfinite")
    if PLAN.packed:
        add(sums, PLAN, "tokens_outside", tl.where(real_row, 0, valid))
        valid = tl.where(real_row, valid, 0)
    else:
        add(sums, PLAN, "tokens_outside", valid * 0)
    n = valid
    if PLAN.nonfinite == "reject":
        n = valid - nonfinite
    some = n > 0
    sum_d = exact(found, PLAN, "d", True)
    keep = real_row
    state = tl.zeros_like(sequence).to(tl.int32)
    vetoed = tl.zeros_like(keep)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token":
            lost = integer(found, PLAN, named(i, "lost"))
            if test(PLAN, i).drop == "sequence":
                keep = keep & (lost == 0)
                lost = tl.where(lost > 0, valid, 0)
            add(sums, PLAN, named(i, "units"), measured_of(found, valid, n, pair_of(PLAN, i), PLAN))
            add(sums, PLAN, named(i, "tokens"), lost)
            add(sums, PLAN, named(i, "sequences"), lost > 0)
    n_among, keep_of_tokens = n, keep
    if PLAN.kept:
        n_among = tl.where(keep, integer(found, PLAN, "survivors"), 0)
    each = sum_d
    if PLAN.advantages == "sequence":
        each = tl.load(advantages + sequence, mask=real_row, other=0.0).to(tl.float64)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            among = among_of(found, valid, keep_of_tokens, n_among, pair_of(PLAN, i), PLAN)
            value, tested = value_of(found, among, numbers, test(PLAN, i), PLAN)
            failed = (passes(tested, numbers, test(PLAN, i), PLAN) == 0) & (among > 0)
            if test(PLAN, i).drop == "token":
                state |= tl.where(failed, late_bit(PLAN, i), 0)
                if test(PLAN, i).when == "any":
                    lost = tl.where(failed, n, 0)
                else:
                    lost = tl.where(failed, class_count(found, PLAN, test(PLAN, i)), 0)
            else:
                if test(PLAN, i).when != "any":
                    failed = failed & selected_sequences(found, each, PLAN, test(PLAN, i))
                keep = keep & (failed == 0)
                lost = tl.where(failed, valid, 0)
            add(sums, PLAN, named(i, "tokens"), lost)
            add(sums, PLAN, named(i, "sequences"), lost > 0)
            measure_criterion(value, among > 0, sums, maxima, numbers, test(PLAN, i), PLAN)
            vetoed = report_criterion(value, failed, vetoed, n, n_among, sums, maxima, numbers, test(PLAN, i), PLAN)
    if PLAN.rejects_nonfinite:
        keep = keep & (nonfinite == 0)
        for k in tl.static_range(size(PLAN, "pairs")):
            keep = keep & (integer(found, PLAN, of_pair(k + 1, "nonfinite")) == 0)

    kept = valid
    if PLAN.drops_tokens:
        kept = integer(found, PLAN, "alive")
    for c in tl.static_range(4):
        if size(PLAN, "late_drops") > 0:
            kept = without_class(found, kept, state, c, PLAN)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence" and test(PLAN, i).drop == "token" and test(PLAN, i).when == "any":
            kept = tl.where((state & late_bit(PLAN, i)) != 0, 0, kept)
    kept = tl.where(keep, kept, 0)

    nonempty = valid > 0
    add(sums, PLAN, "tokens", valid)
    add(sums, PLAN, "tokens_measured", n)
    add(sums, PLAN, "tokens_nonfinite", nonfinite)
    add(sums, PLAN, "tokens_kept", kept)
    add(sums, PLAN, "sequences", nonempty)
    add(sums, PLAN, "sequences_measured", some)
    add(sums, PLAN, "sequences_kept", keep & nonempty)
    add(sums, PLAN, "sequences_without_survivors", keep & nonempty & (kept == 0))
    train, rollout = plain(found, PLAN, "train"), plain(found, PLAN, "rollout")
    measure_sequences(sum_d, train, rollout, n, some, sums, maxima, numbers, PLAN)
    weight = sum_d
    if PLAN.level is not None:
        weight = weigh_sequences(found, sum_d, n, n_among, some, sums, maxima, numbers, PLAN)
    if size(PLAN, "schemes") > 0:
        report_sequences(found, sum_d, train, rollout, valid, n, kept, vetoed, sums, maxima, numbers, PLAN)

    tl.store(keep_out + sequence, keep.to(tl.int8), mask=real_row)
    if PLAN.applies:
        weightless = tl.zeros_like(keep)
        if PLAN.rejected != "mask":
            weightless = keep == 0
        elif PLAN.rejects_nonfinite:
            weightless = nonfinite > 0
        state |= tl.where(keep, 0, REJECTED) | tl.where(weightless, WEIGHTLESS, 0)
        tl.store(states + sequence, state, mask=real_row)
        if PLAN.spreads:
            weight = tl.where(weightless, 0.0, weight)
            tl.store(sequence_weights + sequence, weight.to(sequence_weights.dtype.element_ty), mask=real_row)


@triton.jit
def without_class(found, kept, state, c: tl.constexpr, PLAN: tl.constexpr):
    """Take off the tokens of one class, where a criterion that selects them has failed."""
    gone = state < 0
    for i in tl.static_range(size(PLAN, "tests")):
        if late_selects(PLAN, i, c):
            gone = gone | ((state & late_bit(PLAN, i)) != 0)
    if PLAN.classes:
        if PLAN.drops_tokens:
            lost = integer(found, PLAN, named("alive", class_name(c)))
        else:
            lost = integer(found, PLAN, class_name(c))
        kept = kept - tl.where(gone, lost, 0)
    return kept
