"""Statistics that the peers' naming schemes add to the native ones, by the formulas of frameworks/*/metrics.py.

Plain torch would launch 18 to 46 operations on [S] a call for skyrl's, 33 to 79 for verl's and 99 for xtuner's, counted
behind the sums of slots; here they are columns of launches that run anyway. Only this file knows peers by name. A
statistic is in the plan if its scheme was asked for; `record`, `add` and `put_extrema` leave out what is not. What a
criterion is to a scheme is its `role`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..gather import Units, UnitTotals, integer, plain
from ..partials import Partials, add, entry, put_extrema
from ..sums import record, record_extrema
from ..tables import at, has, named, number, size
from ..tokens import LARGEST_D, LARGEST_STATISTIC, exponential, k3_in_full, limited, perplexity
from .criteria import statistic
from .measures import Ratio, SequenceWeights
from .plan import Plan, PlannedCriterion, criterion
from .steps import Pair

# --- the columns and numbers of a plan that the schemes bring ---


class SlotColumns(NamedTuple):
    """Columns of the slot tables."""

    counts: tuple[str, ...]
    floats: tuple[str, ...]


def slot_columns(plan: Plan) -> SlotColumns:
    """Name the columns that `read` stores for every slot for the schemes of a plan."""
    counts = [
        f"skyrl/{each.index}/{side}"
        for each in plan.criteria
        if each.role == "outlier"
        for side in ("over_high", "under_low")
    ]
    if "skyrl" in plan.schemes and plan.weighs == "token" and plan.has_upper:
        counts.append("skyrl/clipped")
    floats = ["d_beyond"] if {"verl", "xtuner"} & {*plan.schemes} else []
    floats += [f"verl/{each.index}/row" for each in plan.criteria if each.role == "option" and each.over == "token"]
    return SlotColumns(tuple(counts), tuple(floats))


def same_numbers(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Pair bounds of schemes with those of the Spec that they repeat, so that these are compared with once.

    They are the bounds of the weight, except for a side that only a scheme has, and those of ratios of tokens. None for
    rows, where ptxas has registers for all, and spilled 32 bytes of `skyrl.tldr` for sm_100 without these.
    """
    if not plan.packed:
        return ()
    log, found = "log/token" if plan.weighs == "token" else "log", []
    for side in [side for side, there in (("lower", plan.has_lower), ("upper", plan.has_upper)) if there]:
        found += [("xtuner/ratio/" + side, side), *((f"{name}/{log}/{side}", f"log/{side}") for name in plan.schemes)]
    for each in plan.criteria:
        if each.over == "token" and each.stat == "ratio" and each.role in ("veto", "outlier"):
            for side in (f"{each.index}/lower", f"{each.index}/upper"):
                of, _, end = side.partition("/")
                found += [(f"{name}/{of}/token/{end}", side) for name in plan.schemes]
    return tuple(pair for pair in found if pair[0] in plan.numbers)


@triton.constexpr_function
def of_option(criterion: PlannedCriterion, name: str) -> str:
    """Name a statistic of verl's for a criterion."""
    return f"verl/{criterion.index}/{name}"


@triton.constexpr_function
def option_of_tokens(plan: Plan, i: int) -> bool:
    """Return whether a criterion is an option of verl's `rollout_rs` over tokens."""
    return plan.criteria[i].role == "option" and plan.criteria[i].over == "token"


@triton.constexpr_function
def looks_for(plan: Plan, i: int) -> bool:
    """Return whether a criterion is a veto of xtuner's that counts catastrophic tokens."""
    prefix = f"xtuner/{plan.criteria[i].index}"
    return f"{prefix}/lower" in plan.numbers or f"{prefix}/upper" in plan.numbers


# --- on either side of bounds ---


@triton.jit
def above(x, among, numbers: tl.tuple, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Select values above the upper bound, if there is one, and NaN."""
    if has(PLAN, "numbers", named(prefix, "upper")):
        return among & ((x <= number(numbers, PLAN, named(prefix, "upper")).to(x.dtype)) == 0)
    else:
        return tl.zeros_like(among)


@triton.jit
def below(x, among, numbers: tl.tuple, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Select values below the lower bound, if there is one, and NaN."""
    if has(PLAN, "numbers", named(prefix, "lower")):
        return among & ((x >= number(numbers, PLAN, named(prefix, "lower")).to(x.dtype)) == 0)
    else:
        return tl.zeros_like(among)


@triton.jit
def between(x, center, numbers: tl.tuple, PLAN: tl.constexpr, prefix: tl.constexpr):
    """Clamp x, measured from the center, to the bounds that there are."""
    low, high = float("-inf"), float("inf")
    if has(PLAN, "numbers", named(prefix, "lower")):
        low = (number(numbers, PLAN, named(prefix, "lower")) - center).to(x.dtype)
    if has(PLAN, "numbers", named(prefix, "upper")):
        high = (number(numbers, PLAN, named(prefix, "upper")) - center).to(x.dtype)
    return limited(x, low, high, PLAN)


# --- tokens ---


@triton.jit
def count_tokens(found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, which) -> tl.tuple:
    """Count tokens of the batch."""
    return record(found, PLAN, "token_sums", name, which.to(tl.float32))


@triton.jit
def k3_beyond(d, clamp, PLAN: tl.constexpr):
    """Sum over each lane's tokens, [LANES], how much larger k3 is without the clamp; rarely is there such a token.

    Called before a step has much else in registers: behind the rest ptxas spills 40 bytes for sm_100.
    """
    beyond = tl.abs(d) > clamp
    some = tl.max(tl.max(tl.max(beyond.to(tl.int32), 2), 0), 0)
    more = tl.full((d.shape[1],), 0.0, d.dtype)
    if some > 0:
        _, _, k3 = exponential(limited(d, -clamp, clamp, PLAN))
        more = tl.sum(tl.sum(tl.where(beyond, k3_in_full(d, PLAN) - k3, 0.0), 2), 0)
    return more


@triton.jit
def report_tokens(found: tl.tuple, pair: Pair, among, ratio: Ratio, k3_more, numbers: tl.tuple,
                  PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record what the schemes report of tokens.

    `among`: the tokens that sums over a sequence run over. `k3_more`: of `k3_beyond`, where it is reported.
    """
    d, measured = pair.d, pair.measured
    if has(PLAN, "floats", "d_beyond"):
        found = record(found, PLAN, "floats", "d_beyond", d - limited(d, -LARGEST_D, LARGEST_D, PLAN))
        found = record(found, PLAN, "token_sums", "verl/k3_beyond", k3_more)
        found = record(found, PLAN, "token_sums", "xtuner/k3_beyond", k3_more)
        found = record(found, PLAN, "token_sums", "xtuner/abs_d", tl.abs(d))
    if PLAN.weighs == "token":
        found = report_token_weights(found, measured, among, ratio, numbers, PLAN)
    catastrophic = tl.zeros_like(measured).to(tl.int32)
    for i in tl.static_range(size(PLAN, "criteria")):
        if option_of_tokens(PLAN, i):
            found = report_option(found, pair, numbers, criterion(PLAN, i), PLAN)
        if criterion(PLAN, i).role == "outlier":
            value = d
            if criterion(PLAN, i).token_clamp:
                most = number(numbers, PLAN, named(i, "token_clamp")).to(d.dtype)
                value = limited(d, -most, most, PLAN)
            over = above(value, measured, numbers, PLAN, named(named("skyrl", i), "token"))
            under = below(value, measured, numbers, PLAN, named(named("skyrl", i), "token"))
            found = record(found, PLAN, "counts", named(named("skyrl", i), "over_high"), over)
            found = record(found, PLAN, "counts", named(named("skyrl", i), "under_low"), under)
        if looks_for(PLAN, i):
            catastrophic += above(d, measured, numbers, PLAN, named(named("xtuner", i), "token")).to(tl.int32)
            catastrophic += below(d, measured, numbers, PLAN, named(named("xtuner", i), "token")).to(tl.int32)
    return count_tokens(found, PLAN, "xtuner/catastrophic", catastrophic)


@triton.jit
def report_token_weights(found: tl.tuple, measured, among, ratio: Ratio, numbers: tl.tuple,
                         PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record what the schemes report of token weights."""
    log_ratio, e, excess = ratio.log_ratio, ratio.e, ratio.excess
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(log_ratio.dtype)
        log_ratio = limited(log_ratio, -most, most, PLAN)
        e, excess, _ = exponential(log_ratio)
    found = count_tokens(found, PLAN, "verl/tokens_below", below(log_ratio, measured, numbers, PLAN, "verl/log/token"))
    if has(PLAN, "schemes", "xtuner"):
        clamped = tl.where(measured, between(excess, 1.0, numbers, PLAN, "xtuner/ratio"), 0.0)
        bounded = tl.where(measured, between(e, 0.0, numbers, PLAN, "xtuner/ratio"), 0.0)
        over = above(log_ratio, measured, numbers, PLAN, "xtuner/log/token")
        under = below(log_ratio, measured, numbers, PLAN, "xtuner/log/token")
        found = record(found, PLAN, "token_sums", "xtuner/weight", bounded)
        found = record(found, PLAN, "token_sums", "xtuner/weight2", bounded * bounded)
        found = record(found, PLAN, "token_sums", "xtuner/weight_around_one2", clamped * clamped)
        found = count_tokens(found, PLAN, "xtuner/tokens_above", over)
        found = count_tokens(found, PLAN, "xtuner/tokens_below", under)
    if has(PLAN, "counts", "skyrl/clipped"):
        clipped = above(log_ratio, among, numbers, PLAN, "skyrl/log/token")
        found = record(found, PLAN, "counts", "skyrl/clipped", clipped)
    return found


@triton.jit
def report_option(found: tl.tuple, pair: Pair, numbers: tl.tuple, CRITERION: tl.constexpr,
                  PLAN: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Record what verl reports of a criterion over tokens."""
    measured = pair.measured
    value = statistic(pair, measured, pair.d, numbers, CRITERION, PLAN)
    if CRITERION.stat == "ratio":
        value = -value
    bounds: tl.constexpr = named("verl", CRITERION.index)
    counted = limited(tl.where(measured, value, 0.0), -LARGEST_STATISTIC, LARGEST_STATISTIC, PLAN)
    found = record(found, PLAN, "floats", of_option(CRITERION, "row"), counted)
    # Float64: what lies at the bound lies far from the center, and its spread would drown in rounding.
    clamped = tl.where(measured, between(value, 0.0, numbers, PLAN, bounds), 0.0).to(tl.float64)
    found = record(found, PLAN, "token_sums", of_option(CRITERION, "clamped"), clamped)
    found = record(found, PLAN, "token_sums", of_option(CRITERION, "clamped2"), clamped * clamped)
    over = above(value, measured, numbers, PLAN, named(bounds, "token"))
    under = below(value, measured, numbers, PLAN, named(bounds, "token"))
    found = count_tokens(found, PLAN, of_option(CRITERION, "above"), over)
    found = count_tokens(found, PLAN, of_option(CRITERION, "below"), under)
    return record_extrema(
        found, PLAN, of_option(CRITERION, "-min_stat"), of_option(CRITERION, "max_stat"), value, measured
    )


# --- sequences ---


@triton.jit
def report_option_rows(row, some, out: Partials, numbers: tl.tuple, CRITERION: tl.constexpr,
                       PLAN: tl.constexpr) -> None:  # fmt: skip
    """Report a criterion's values of sequences as verl does."""
    bounds: tl.constexpr = named("verl", CRITERION.index)
    counted = tl.where(some, row, 0.0)
    add(out.sums, PLAN, of_option(CRITERION, "row"), counted)
    add(out.sums, PLAN, of_option(CRITERION, "row2"), counted * counted)
    add(out.sums, PLAN, of_option(CRITERION, "row_above"), above(row, some, numbers, PLAN, bounds))
    add(out.sums, PLAN, of_option(CRITERION, "row_below"), below(row, some, numbers, PLAN, bounds))
    put_extrema(out.maxima, PLAN, of_option(CRITERION, "-min_row"), of_option(CRITERION, "max_row"), row, some)


@triton.jit
def report_criterion(value, failed, vetoed, units: Units, out: Partials, numbers: tl.tuple, CRITERION: tl.constexpr,
                     PLAN: tl.constexpr):  # fmt: skip
    """Report a criterion over sequences as the schemes do, and return the sequences vetoed so far."""
    n, some = units.n, units.n_among > 0
    if CRITERION.role == "option":
        if CRITERION.stat == "ratio":
            value = -value
        report_option_rows(value, some, out, numbers, CRITERION, PLAN)
        clamped = between(value, 0.0, numbers, PLAN, named("verl", CRITERION.index))
        add(out.sums, PLAN, of_option(CRITERION, "stat"), tl.where(some, n * value, 0.0))
        add(out.sums, PLAN, of_option(CRITERION, "clamped"), tl.where(some, n * clamped, 0.0))
        add(out.sums, PLAN, of_option(CRITERION, "clamped2"), tl.where(some, n * clamped * clamped, 0.0))
    if CRITERION.role == "sequence_mask":
        mask: tl.constexpr = named("skyrl", CRITERION.index)
        add(out.sums, PLAN, named(mask, "over_high"), above(value, some, numbers, PLAN, mask))
        add(out.sums, PLAN, named(mask, "under_low"), below(value, some, numbers, PLAN, mask))
    if CRITERION.role == "veto":
        vetoed = vetoed | failed
    return vetoed


@triton.jit
def report_weights(totals: UnitTotals, units: Units, weights: SequenceWeights, out: Partials, numbers: tl.tuple,
                   PLAN: tl.constexpr) -> None:  # fmt: skip
    """Report the weights of sequences, at token level their means, as the schemes do."""
    n, n_among, sum_d = units.n, units.n_among, units.sum_d
    log_ratio, excess, ratio = weights.log_ratio, weights.excess, weights.ratio
    some, measured, survivors = n > 0, n.to(tl.float64), n_among > 0
    add(out.sums, PLAN, "verl/means_above", above(log_ratio, some, numbers, PLAN, "verl/log"))
    add(out.sums, PLAN, "verl/means_below", below(log_ratio, some, numbers, PLAN, "verl/log"))
    add(out.sums, PLAN, "xtuner/means_above", above(log_ratio, some, numbers, PLAN, "xtuner/log"))
    add(out.sums, PLAN, "xtuner/means_below", below(log_ratio, some, numbers, PLAN, "xtuner/log"))
    if PLAN.weighs == "token":
        if has(PLAN, "counts", "skyrl/clipped"):
            # Tokens of a sequence that was rejected as a whole do not survive either.
            clipped = tl.where(survivors, integer(totals, PLAN, "skyrl/clipped"), 0)
            add(out.sums, PLAN, "skyrl/clipped", clipped)
            add(out.sums, PLAN, "skyrl/clippable", n_among)
    else:
        add(out.sums, PLAN, "skyrl/clipped", above(log_ratio, survivors, numbers, PLAN, "skyrl/log"))
        add(out.sums, PLAN, "skyrl/clippable", survivors)
        # Without Spec.clamp, as far as the sum is D's own.
        full = log_ratio
        if not (PLAN.token_clamp or PLAN.kept):
            full = sum_d
            if PLAN.geometric:
                full = sum_d / tl.maximum(n, 1).to(tl.float64)
        add(out.sums, PLAN, "verl/rows_above", above(full, some, numbers, PLAN, "verl/log"))
        add(out.sums, PLAN, "verl/rows_below", below(full, some, numbers, PLAN, "verl/log"))
        put_extrema(out.maxima, PLAN, "verl/-min_log_weight", "verl/max_log_weight", full, some)
        put_extrema(out.maxima, PLAN, "xtuner/-min_log_weight", "xtuner/max_log_weight", full, some)
        over = above(full, some, numbers, PLAN, "xtuner/log")
        under = below(full, some, numbers, PLAN, "xtuner/log")
        add(out.sums, PLAN, "xtuner/rows_above", over)
        add(out.sums, PLAN, "xtuner/rows_below", under)
        add(out.sums, PLAN, "xtuner/tokens_above", tl.where(over, n, 0))
        add(out.sums, PLAN, "xtuner/tokens_below", tl.where(under, n, 0))
        clamped = between(excess, 1.0, numbers, PLAN, "xtuner/ratio")
        bounded = between(ratio, 0.0, numbers, PLAN, "xtuner/ratio")
        add(out.sums, PLAN, "xtuner/weight", measured * bounded)
        add(out.sums, PLAN, "xtuner/weight2", measured * bounded * bounded)
        add(out.sums, PLAN, "xtuner/weight_around_one2", measured * clamped * clamped)


@triton.jit
def report_sequences(totals: UnitTotals, units: Units, kept, vetoed, out: Partials, numbers: tl.tuple,
                     PLAN: tl.constexpr) -> None:  # fmt: skip
    """Report sequences as the schemes do, once every criterion has decided. kept: tokens kept of each."""
    sum_d, valid, n = units.sum_d, units.valid, units.n
    some, each = n > 0, tl.maximum(n, 1).to(tl.float64)
    if has(PLAN, "floats", "d_beyond"):
        difference = -sum_d - plain(totals, PLAN, "d_beyond")
        gap = difference / each
        add(out.sums, PLAN, "verl/log_difference", difference)
        add(out.sums, PLAN, "verl/log_ppl_diff", gap)
        add(out.sums, PLAN, "verl/log_ppl_abs_diff", tl.abs(gap))
        add(out.sums, PLAN, "verl/ppl_ratio", tl.where(some, perplexity(gap), 0.0))
        put_extrema(out.maxima, PLAN, "verl/-min_log_ppl_diff", "verl/max_log_ppl_diff", gap, some)
        add(out.sums, PLAN, "verl/rows_rejected", kept < valid)
        add(out.sums, PLAN, "xtuner/log_difference", difference)
        add(out.sums, PLAN, "xtuner/train", units.train)
        add(out.sums, PLAN, "xtuner/rollout", units.rollout)
    outlying = tl.zeros_like(some)
    for i in tl.static_range(size(PLAN, "criteria")):
        if option_of_tokens(PLAN, i):
            row = plain(totals, PLAN, of_option(criterion(PLAN, i), "row"))
            add(out.sums, PLAN, of_option(criterion(PLAN, i), "stat"), row)
            report_option_rows(row / each, some, out, numbers, criterion(PLAN, i), PLAN)
        if criterion(PLAN, i).role == "veto" and criterion(PLAN, i).over == "token":
            vetoed = vetoed | (integer(totals, PLAN, named(i, "lost")) > 0)
        if criterion(PLAN, i).role == "outlier":
            over = integer(totals, PLAN, named(named("skyrl", i), "over_high")) > 0
            under = integer(totals, PLAN, named(named("skyrl", i), "under_low")) > 0
            add(out.sums, PLAN, named(named("skyrl", i), "over_high"), over)
            add(out.sums, PLAN, named(named("skyrl", i), "under_low"), under)
            outlying = integer(totals, PLAN, named(i, "lost")) > 0
    add(out.sums, PLAN, "xtuner/vetoed", vetoed)
    add(out.sums, PLAN, "skyrl/outlier", outlying)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).role == "token_mask":
            lost = integer(totals, PLAN, named(i, "lost"))
            if criterion(PLAN, i).drop == "sequence":
                lost = tl.where(lost > 0, valid, 0)
            add(out.sums, PLAN, "skyrl/token_mask", tl.where(outlying, 0, lost))
            add(out.sums, PLAN, "skyrl/token_mask_tested", tl.where(outlying, 0, n))


# --- the call ---


@triton.jit
def put_call(p_sums, PLAN: tl.constexpr, name: tl.constexpr, x) -> None:
    """Store a sum of the call, if the plan has it."""
    if has(PLAN, "call_sums", name):
        tl.store(p_sums + at(PLAN, "call_sums", name), tl.cast(x, tl.float64))


@triton.jit
def put_call_maximum(p_maxima, PLAN: tl.constexpr, name: tl.constexpr, x) -> None:
    """Store a maximum of the call."""
    tl.store(p_maxima + at(PLAN, "call_maxima", name), x)


@triton.jit
def finish_call(p_sums, p_maxima, totals, tokens, sequences, PLAN: tl.constexpr) -> None:
    """Store the statistics of the call as a whole: its size, and xtuner's packs. totals: the sums of sequences."""
    put_call(p_sums, PLAN, "verl/rows", sequences)
    put_call(p_sums, PLAN, "xtuner/rows", sequences)
    put_call(p_sums, PLAN, "skyrl/rows", sequences)
    put_call(p_sums, PLAN, "skyrl/slots", tokens)
    if has(PLAN, "schemes", "xtuner"):
        # xtuner takes a pack, which is a call here, as one sequence; one without a measured token adds nothing.
        n = entry(totals, at(PLAN, "sequence_sums", "tokens_measured"))
        train = entry(totals, at(PLAN, "sequence_sums", "xtuner/train"))
        rollout = entry(totals, at(PLAN, "sequence_sums", "xtuner/rollout"))
        difference = entry(totals, at(PLAN, "sequence_sums", "xtuner/log_difference"))
        some, each = n > 0, tl.maximum(n, 1.0)
        train, rollout, gap = -train / each, -rollout / each, difference / each
        put_call(p_sums, PLAN, "xtuner/packs", some)
        put_call(p_sums, PLAN, "xtuner/training_ppl", tl.where(some, perplexity(train), 0.0))
        put_call(p_sums, PLAN, "xtuner/training_log_ppl", tl.where(some, train, 0.0))
        put_call(p_sums, PLAN, "xtuner/rollout_ppl", tl.where(some, perplexity(rollout), 0.0))
        put_call(p_sums, PLAN, "xtuner/rollout_log_ppl", tl.where(some, rollout, 0.0))
        put_call(p_sums, PLAN, "xtuner/log_ppl_diff", tl.where(some, gap, 0.0))
        put_call(p_sums, PLAN, "xtuner/log_ppl_abs_diff", tl.where(some, tl.abs(gap), 0.0))
        put_call(p_sums, PLAN, "xtuner/ppl_ratio", tl.where(some, perplexity(gap), 0.0))
        put_call_maximum(p_maxima, PLAN, "xtuner/max_log_ppl_diff", tl.where(some, gap, float("-inf")))
        put_call_maximum(p_maxima, PLAN, "xtuner/-min_log_ppl_diff", tl.where(some, -gap, float("-inf")))
