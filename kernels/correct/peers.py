"""What the peers' naming schemes report beside the native statistics; the same formulas as in rollout_corr/reports.

Each name stands in the plan if its scheme was asked for; `put` leaves out what does not. What a criterion is to a
scheme is its `role`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import statistic
from rollout_corr.kernels.correct.plan import Plan, Test
from rollout_corr.kernels.gather import integer, plain
from rollout_corr.kernels.sums import record, record_count, record_extrema
from rollout_corr.kernels.tokens import (
    LARGEST_D,
    LARGEST_STATISTIC,
    at,
    exponential,
    has,
    k3_of,
    key_of,
    limited,
    named,
    number,
    of_key,
    perplexity,
    put,
    size,
    test,
)


@triton.constexpr_function
def of_option(criterion: Test, name: str) -> str:
    """A statistic of verl's for a criterion."""
    return f"verl/{criterion.index}/{name}"


@triton.constexpr_function
def option_of_tokens(plan: Plan, i: int) -> bool:
    """Whether a criterion is an option of verl's `rollout_rs` that tests tokens."""
    return plan.tests[i].role == "option" and plan.tests[i].over == "token"


@triton.constexpr_function
def looks_for(plan: Plan, i: int) -> bool:
    """Whether a criterion is a veto of xtuner's that counts catastrophic tokens."""
    prefix = f"xtuner/{plan.tests[i].index}"
    return f"{prefix}/lower" in plan.numbers or f"{prefix}/upper" in plan.numbers


# --- on either side of bounds ---


@triton.jit
def above(x, among, numbers, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Beyond the upper bound, if there is one; NaN is."""
    if has(PLAN, "numbers", named(prefix, "upper")):
        return among & ((x <= number(numbers, PLAN, named(prefix, "upper")).to(x.dtype)) == 0)
    else:
        return tl.zeros_like(among)


@triton.jit
def below(x, among, numbers, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Beyond the lower bound, if there is one; NaN is."""
    if has(PLAN, "numbers", named(prefix, "lower")):
        return among & ((x >= number(numbers, PLAN, named(prefix, "lower")).to(x.dtype)) == 0)
    else:
        return tl.zeros_like(among)


@triton.jit
def between(x, centre, numbers, PLAN: tl.constexpr, prefix: tl.constexpr):
    """x, measured from the centre, clamped to the bounds that there are."""
    low, high = float("-inf"), float("inf")
    if has(PLAN, "numbers", named(prefix, "lower")):
        low = (number(numbers, PLAN, named(prefix, "lower")) - centre).to(x.dtype)
    if has(PLAN, "numbers", named(prefix, "upper")):
        high = (number(numbers, PLAN, named(prefix, "upper")) - centre).to(x.dtype)
    return limited(x, low, high, PLAN)


# --- adding up ---


@triton.jit
def put_part(table, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x):
    """What a program adds to a column."""
    put(table, PLAN, TABLE, name, tl.num_programs(0), tl.program_id(0), x)


@triton.jit
def count_tokens(found, PLAN: tl.constexpr, name: tl.constexpr, which):
    """How many tokens of the batch."""
    return record(found, PLAN, "token_sums", name, which.to(tl.float32))


@triton.jit
def add_rows(sums, PLAN: tl.constexpr, name: tl.constexpr, x):
    """The sum of x over sequences; x is 0 at those that do not count."""
    if has(PLAN, "sequence_sums", name):
        put_part(sums, PLAN, "sequence_sums", name, tl.sum(x.to(tl.float64), 0))


@triton.jit
def put_row_extrema(maxima, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among):
    """The largest of -x and of x among some sequences."""
    if has(PLAN, "sequence_maxima", high):
        least = of_key(tl.max(key_of(tl.where(among, -x, float("-inf"))), 0))
        most = of_key(tl.max(key_of(tl.where(among, x, float("-inf"))), 0))
        put_part(maxima, PLAN, "sequence_maxima", low, least)
        put_part(maxima, PLAN, "sequence_maxima", high, most)


# --- tokens ---


@triton.jit
def k3_in_full(d, PLAN: tl.constexpr):
    """k3 without any clamp: infinite where e^D is."""
    if PLAN.double:
        return k3_of(d, tl.exp(d))
    else:
        # The square of e^(D/2), because `exponential` ends where float32 does.
        root, _, _ = exponential(limited(0.5 * d, -60.0, 60.0, PLAN), PLAN)
        _, _, near = exponential(limited(d, -1.0, 1.0, PLAN), PLAN)
        return tl.where(tl.abs(d) <= 1.0, near, root * root - 1.0 - d)


@triton.jit
def report_tokens(found, d, train, rollout, measured, among, log_ratio, e, excess, k3, weight, numbers,
                  PLAN: tl.constexpr):  # fmt: skip
    """What the schemes add where the tokens are. `among`: the tokens that sums of sequences run over."""
    if has(PLAN, "floats", "d_beyond"):
        found = record(found, PLAN, "floats", "d_beyond", d - limited(d, -LARGEST_D, LARGEST_D, PLAN))
        clamp = number(numbers, PLAN, "clamp").to(d.dtype)
        more = tl.where(tl.abs(d) > clamp, k3_in_full(d, PLAN) - k3, 0.0)
        found = record(found, PLAN, "token_sums", "verl/k3_beyond", more)
        found = record(found, PLAN, "token_sums", "xtuner/k3_beyond", more)
        found = record(found, PLAN, "token_sums", "xtuner/abs_d", tl.abs(d))
    if PLAN.level == "token":
        found = report_token_weights(found, measured, among, log_ratio, e, excess, weight, numbers, PLAN)
    catastrophic = tl.zeros_like(measured).to(tl.int32)
    for i in tl.static_range(size(PLAN, "tests")):
        if option_of_tokens(PLAN, i):
            found = report_option(found, d, train, rollout, measured, numbers, test(PLAN, i), PLAN)
        if test(PLAN, i).role == "outlier":
            value = d
            if test(PLAN, i).token_clamp:
                most = number(numbers, PLAN, named(i, "token_clamp")).to(d.dtype)
                value = limited(d, -most, most, PLAN)
            over = above(value, measured, numbers, PLAN, named(named("skyrl", i), "token"))
            under = below(value, measured, numbers, PLAN, named(named("skyrl", i), "token"))
            found = record_count(found, PLAN, "counts", named(named("skyrl", i), "over_high"), over)
            found = record_count(found, PLAN, "counts", named(named("skyrl", i), "under_low"), under)
        if looks_for(PLAN, i):
            catastrophic += above(d, measured, numbers, PLAN, named(named("xtuner", i), "token")).to(tl.int32)
            catastrophic += below(d, measured, numbers, PLAN, named(named("xtuner", i), "token")).to(tl.int32)
    return count_tokens(found, PLAN, "xtuner/catastrophic", catastrophic)


@triton.jit
def report_token_weights(found, measured, among, log_ratio, e, excess, weight, numbers, PLAN: tl.constexpr):
    """What the schemes add of token weights."""
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(log_ratio.dtype)
        log_ratio = limited(log_ratio, -most, most, PLAN)
        e, excess, _ = exponential(log_ratio, PLAN)
    counted = tl.where(measured, weight, 0.0)
    found = record(found, PLAN, "token_sums", "verl/weight2", counted * counted)
    found = count_tokens(found, PLAN, "verl/tokens_below", below(log_ratio, measured, numbers, PLAN, "verl/log/token"))
    if has(PLAN, "schemes", "xtuner"):
        clamped = tl.where(measured, between(excess, 1.0, numbers, PLAN, "xtuner/ratio"), 0.0)
        bounded = tl.where(measured, between(e, 0.0, numbers, PLAN, "xtuner/ratio"), 0.0)
        over = above(log_ratio, measured, numbers, PLAN, "xtuner/log/token")
        under = below(log_ratio, measured, numbers, PLAN, "xtuner/log/token")
        found = record(found, PLAN, "token_sums", "xtuner/clamped", clamped)
        found = record(found, PLAN, "token_sums", "xtuner/clamped2", clamped * clamped)
        found = record(found, PLAN, "token_sums", "xtuner/weight2", bounded * bounded)
        found = count_tokens(found, PLAN, "xtuner/tokens_above", over)
        found = count_tokens(found, PLAN, "xtuner/tokens_below", under)
    if has(PLAN, "counts", "skyrl/clipped"):
        clipped = above(log_ratio, among, numbers, PLAN, "skyrl/log/token")
        found = record_count(found, PLAN, "counts", "skyrl/clipped", clipped)
    return found


@triton.jit
def report_option(found, d, train, rollout, measured, numbers, TEST: tl.constexpr, PLAN: tl.constexpr):
    """What verl reports of a criterion over tokens."""
    value = statistic(d, train, rollout, measured, train, numbers, TEST, PLAN)
    if TEST.stat == "ratio":
        value = -value
    bounds: tl.constexpr = named("verl", TEST.index)
    counted = limited(tl.where(measured, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)
    found = record(found, PLAN, "floats", of_option(TEST, "row"), counted)
    # Float64: what lies at the bound lies far from the centre, and its spread would drown in rounding.
    clamped = tl.where(measured, between(value, 0.0, numbers, PLAN, bounds), 0.0).to(tl.float64)
    found = record(found, PLAN, "token_sums", of_option(TEST, "clamped"), clamped)
    found = record(found, PLAN, "token_sums", of_option(TEST, "clamped2"), clamped * clamped)
    over = above(value, measured, numbers, PLAN, named(bounds, "token"))
    under = below(value, measured, numbers, PLAN, named(bounds, "token"))
    found = count_tokens(found, PLAN, of_option(TEST, "above"), over)
    found = count_tokens(found, PLAN, of_option(TEST, "below"), under)
    return record_extrema(found, PLAN, of_option(TEST, "-min_stat"), of_option(TEST, "max_stat"), value, measured)


# --- sequences ---


@triton.jit
def report_option_rows(row, some, sums, maxima, numbers, TEST: tl.constexpr, PLAN: tl.constexpr):
    """What verl reports of a criterion's values of sequences."""
    bounds: tl.constexpr = named("verl", TEST.index)
    counted = tl.where(some, row, 0.0)
    add_rows(sums, PLAN, of_option(TEST, "row"), counted)
    add_rows(sums, PLAN, of_option(TEST, "row2"), counted * counted)
    add_rows(sums, PLAN, of_option(TEST, "row_above"), above(row, some, numbers, PLAN, bounds))
    add_rows(sums, PLAN, of_option(TEST, "row_below"), below(row, some, numbers, PLAN, bounds))
    put_row_extrema(maxima, PLAN, of_option(TEST, "-min_row"), of_option(TEST, "max_row"), row, some)


@triton.jit
def report_criterion(value, failed, vetoed, n, n_among, sums, maxima, numbers, TEST: tl.constexpr, PLAN: tl.constexpr):
    """What the schemes add of a criterion over sequences; gives back what is vetoed so far."""
    some = n_among > 0
    if TEST.role == "option":
        if TEST.stat == "ratio":
            value = -value
        report_option_rows(value, some, sums, maxima, numbers, TEST, PLAN)
        clamped = between(value, 0.0, numbers, PLAN, named("verl", TEST.index))
        add_rows(sums, PLAN, of_option(TEST, "stat"), tl.where(some, n * value, 0.0))
        add_rows(sums, PLAN, of_option(TEST, "clamped"), tl.where(some, n * clamped, 0.0))
        add_rows(sums, PLAN, of_option(TEST, "clamped2"), tl.where(some, n * clamped * clamped, 0.0))
    if TEST.role == "sequence_mask":
        mask: tl.constexpr = named("skyrl", TEST.index)
        add_rows(sums, PLAN, named(mask, "over_high"), above(value, some, numbers, PLAN, mask))
        add_rows(sums, PLAN, named(mask, "under_low"), below(value, some, numbers, PLAN, mask))
    if TEST.role == "veto":
        vetoed = vetoed | failed
    return vetoed


@triton.jit
def report_weights(found, sum_d, log_ratio, raw, ratio, n, n_among, sums, maxima, numbers, PLAN: tl.constexpr):
    """What the schemes add of the weights of sequences; at token level of their means."""
    some, measured, survivors = n > 0, n.to(tl.float64), n_among > 0
    add_rows(sums, PLAN, "verl/means_above", above(log_ratio, some, numbers, PLAN, "verl/log"))
    add_rows(sums, PLAN, "verl/means_below", below(log_ratio, some, numbers, PLAN, "verl/log"))
    add_rows(sums, PLAN, "xtuner/means_above", above(log_ratio, some, numbers, PLAN, "xtuner/log"))
    add_rows(sums, PLAN, "xtuner/means_below", below(log_ratio, some, numbers, PLAN, "xtuner/log"))
    if PLAN.level == "token":
        if has(PLAN, "counts", "skyrl/clipped"):
            # Tokens of a sequence that fell as a whole do not survive either.
            clipped = tl.where(survivors, integer(found, PLAN, "skyrl/clipped"), 0)
            add_rows(sums, PLAN, "skyrl/clipped", clipped)
            add_rows(sums, PLAN, "skyrl/clippable", n_among)
    else:
        add_rows(sums, PLAN, "skyrl/clipped", above(log_ratio, survivors, numbers, PLAN, "skyrl/log"))
        add_rows(sums, PLAN, "skyrl/clippable", survivors)
        # Without Spec.clamp, as far as the sum is D's own.
        full = log_ratio
        if not (PLAN.token_clamp or PLAN.kept):
            full = sum_d
            if PLAN.level == "geometric":
                full = sum_d / tl.maximum(n, 1).to(tl.float64)
        add_rows(sums, PLAN, "verl/rows_above", above(full, some, numbers, PLAN, "verl/log"))
        add_rows(sums, PLAN, "verl/rows_below", below(full, some, numbers, PLAN, "verl/log"))
        put_row_extrema(maxima, PLAN, "verl/-min_log_weight", "verl/max_log_weight", full, some)
        put_row_extrema(maxima, PLAN, "xtuner/-min_log_weight", "xtuner/max_log_weight", full, some)
        over = above(full, some, numbers, PLAN, "xtuner/log")
        under = below(full, some, numbers, PLAN, "xtuner/log")
        add_rows(sums, PLAN, "xtuner/rows_above", over)
        add_rows(sums, PLAN, "xtuner/rows_below", under)
        add_rows(sums, PLAN, "xtuner/tokens_above", tl.where(over, n, 0))
        add_rows(sums, PLAN, "xtuner/tokens_below", tl.where(under, n, 0))
        clamped = between(raw, 1.0, numbers, PLAN, "xtuner/ratio")
        bounded = between(ratio, 0.0, numbers, PLAN, "xtuner/ratio")
        add_rows(sums, PLAN, "xtuner/clamped", measured * clamped)
        add_rows(sums, PLAN, "xtuner/clamped2", measured * clamped * clamped)
        add_rows(sums, PLAN, "xtuner/weight2", measured * bounded * bounded)


@triton.jit
def report_sequences(found, sum_d, train, rollout, valid, n, kept, vetoed, sums, maxima, numbers, PLAN: tl.constexpr):
    """What the schemes add of sequences once every criterion has spoken."""
    some, each = n > 0, tl.maximum(n, 1).to(tl.float64)
    if has(PLAN, "floats", "d_beyond"):
        difference = -sum_d - plain(found, PLAN, "d_beyond")
        gap = difference / each
        add_rows(sums, PLAN, "verl/log_difference", difference)
        add_rows(sums, PLAN, "verl/log_ppl_diff", gap)
        add_rows(sums, PLAN, "verl/log_ppl_abs_diff", tl.abs(gap))
        add_rows(sums, PLAN, "verl/ppl_ratio", tl.where(some, perplexity(gap), 0.0))
        put_row_extrema(maxima, PLAN, "verl/-min_log_ppl_diff", "verl/max_log_ppl_diff", gap, some)
        add_rows(sums, PLAN, "verl/rows_rejected", kept < valid)
        add_rows(sums, PLAN, "xtuner/log_difference", difference)
        add_rows(sums, PLAN, "xtuner/train", train)
        add_rows(sums, PLAN, "xtuner/rollout", rollout)
    outlying = tl.zeros_like(some)
    for i in tl.static_range(size(PLAN, "tests")):
        if option_of_tokens(PLAN, i):
            row = plain(found, PLAN, of_option(test(PLAN, i), "row"))
            add_rows(sums, PLAN, of_option(test(PLAN, i), "stat"), row)
            report_option_rows(row / each, some, sums, maxima, numbers, test(PLAN, i), PLAN)
        if test(PLAN, i).role == "veto" and test(PLAN, i).over == "token":
            vetoed = vetoed | (integer(found, PLAN, named(i, "lost")) > 0)
        if test(PLAN, i).role == "outlier":
            over = integer(found, PLAN, named(named("skyrl", i), "over_high")) > 0
            under = integer(found, PLAN, named(named("skyrl", i), "under_low")) > 0
            add_rows(sums, PLAN, named(named("skyrl", i), "over_high"), over)
            add_rows(sums, PLAN, named(named("skyrl", i), "under_low"), under)
            outlying = integer(found, PLAN, named(i, "lost")) > 0
    add_rows(sums, PLAN, "xtuner/vetoed", vetoed)
    add_rows(sums, PLAN, "skyrl/outlier", outlying)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).role == "token_mask":
            lost = integer(found, PLAN, named(i, "lost"))
            if test(PLAN, i).drop == "sequence":
                lost = tl.where(lost > 0, valid, 0)
            add_rows(sums, PLAN, "skyrl/token_mask", tl.where(outlying, 0, lost))
            add_rows(sums, PLAN, "skyrl/token_mask_tested", tl.where(outlying, 0, n))


# --- the call ---


@triton.jit
def put_call(sums, PLAN: tl.constexpr, name: tl.constexpr, x):
    """Store a statistic of the call, if the plan has it."""
    if has(PLAN, "call_sums", name):
        tl.store(sums + at(PLAN, "call_sums", name), tl.cast(x, tl.float64))


@triton.jit
def report_pack(train, rollout, difference, n, sums, maxima, PLAN: tl.constexpr):
    """xtuner takes a pack, a call here, as one sequence; one without a measured token adds nothing."""
    some, each = n > 0, tl.maximum(n, 1.0)
    train, rollout, gap = -train / each, -rollout / each, difference / each
    put_call(sums, PLAN, "xtuner/packs", some)
    put_call(sums, PLAN, "xtuner/training_ppl", tl.where(some, perplexity(train), 0.0))
    put_call(sums, PLAN, "xtuner/training_log_ppl", tl.where(some, train, 0.0))
    put_call(sums, PLAN, "xtuner/rollout_ppl", tl.where(some, perplexity(rollout), 0.0))
    put_call(sums, PLAN, "xtuner/rollout_log_ppl", tl.where(some, rollout, 0.0))
    put_call(sums, PLAN, "xtuner/log_ppl_diff", tl.where(some, gap, 0.0))
    put_call(sums, PLAN, "xtuner/log_ppl_abs_diff", tl.where(some, tl.abs(gap), 0.0))
    put_call(sums, PLAN, "xtuner/ppl_ratio", tl.where(some, perplexity(gap), 0.0))
    tl.store(maxima + at(PLAN, "call_maxima", "xtuner/max_log_ppl_diff"), tl.where(some, gap, float("-inf")))
    tl.store(maxima + at(PLAN, "call_maxima", "xtuner/-min_log_ppl_diff"), tl.where(some, -gap, float("-inf")))
