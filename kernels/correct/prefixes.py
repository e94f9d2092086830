"""Prefixes: what the tokens of a sequence up to and with each of them add up to, in the pass that decides by it.

A pass before, `read` by the plan `Plan.ahead`, leaves of every slot what runs along sequences: sums on the grids of
sums that decide, maxima, and how many tokens count. A program adds up the slots that its first sequence has in the
tiles before, and then scans its steps, each with the totals of those before. Integers add up to the same whatever the
tile.

docs/kernels.md says what it costs. A token that does not count adds nothing: its prefix is that of the token before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.accumulators import place_of
from rollout_corr.kernels.correct.criteria import Pair, log_ratio_of, passes, selected, statistic, statistic_of_extremum
from rollout_corr.kernels.correct.measures import beyond_bounds, bounded_by, counted_of
from rollout_corr.kernels.correct.parts import Shared, external_of, pair_of, survivors
from rollout_corr.kernels.correct.plan import Plan, Test
from rollout_corr.kernels.correct.ranks import carried_by
from rollout_corr.kernels.correct.scans import begins_of, moves, places_by, run_along, scanned
from rollout_corr.kernels.sums import (
    nothing,
    record,
    record_count,
    record_extrema,
    record_statistic,
    record_sum,
)
from rollout_corr.kernels.tiles import of_sequences, places_of, zeros_by
from rollout_corr.kernels.tokens import (
    GRID_OF_D,
    GRID_OF_FRACTION,
    at,
    expm1,
    has,
    key_of,
    limited,
    named,
    number,
    of_key,
    of_test,
    real,
    size,
    test,
)


@triton.constexpr_function
def ahead_of(plan: Plan) -> Plan | None:
    """Take the plan of the pass before."""
    return plan if plan.carries else plan.ahead


@triton.constexpr_function
def brings(criterion: Test) -> bool:
    """Test for the first criterion that needs what runs along sequences for it."""
    return criterion.along == f"{criterion.index}/along"


@triton.constexpr_function
def rest_of(plan: Plan, i: int) -> int:
    """Find the count of failures of a criterion among all that run along sequences."""
    assert plan.ahead is not None
    return len(plan.ahead.recorded) + sum(one.drop == "rest" for one in plan.tests[:i])


# --- what runs along a sequence ---


@triton.jit
def record_prefixes(
    found: tl.tuple, pairs: tl.tuple, dropped: tl.tensor, shared: Shared, AHEAD: tl.constexpr, TILING: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Record of every token what it adds to the prefixes from it on. dropped: by criteria of tokens."""
    for k in tl.static_range(len(pairs)):
        among = survivors(pair_of(pairs[k]), dropped, AHEAD)
        found = record_count(found, AHEAD, named_places(k, "sequence"), among)
        found = record_count(found, AHEAD, named_places(k, "turn"), among)
    if AHEAD.prefix is not None:
        pair = pair_of(pairs[0])
        among = survivors(pair, dropped, AHEAD)
        d = limited_d(pair.d, shared.numbers, AHEAD)
        if AHEAD.prefix == "min":
            found = record(found, AHEAD, "peaks", "weight", key_of(tl.where(among, -d, float("-inf"))))
        else:
            found = record_sum(found, AHEAD, "weight", tl.where(among, d, 0.0))
    for i in tl.static_range(size(AHEAD, "tests")):
        if brings(test(AHEAD, i)):
            compared = pair_of(pairs[test(AHEAD, i).pair])
            external = external_of(shared, compared.logp, test(AHEAD, i), AHEAD, TILING)
            among = survivors(compared, dropped, AHEAD)
            found = record_along(found, compared, among, external, shared.numbers, test(AHEAD, i), AHEAD)
    return found


@triton.constexpr_function
def named_places(pair: int, within: str) -> str:
    """Name the count of the tokens of a pair of policies that count, along sequences or turns."""
    return f"places{pair}/turn" if within == "turn" else f"places{pair}"


@triton.jit
def limited_d(d: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr) -> tl.tensor:
    """Apply the weight's token clamp to D."""
    if PLAN.token_clamp:
        most = number(numbers, PLAN, "token_clamp").to(d.dtype)
        d = limited(d, -most, most, PLAN)
    return d


@triton.jit
def record_along(
    found: tl.tuple, pair: Pair, among: tl.tensor, external: tl.tensor, numbers: tl.tuple,
    TEST: tl.constexpr, AHEAD: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Record what a token adds to the prefixes of a criterion, among some tokens."""
    x = statistic(pair, among, external, numbers, TEST, AHEAD)
    # Of its own, because Triton 3.5 and 3.6 pass on the text of an attribute only as a constant.
    name: tl.constexpr = TEST.along
    if has(AHEAD, "peaks", name):
        if TEST.compared == "abs_d" or TEST.compared == "clamped_abs_d":
            # These statistics grow with |D|, so its extremum decides, and gives theirs.
            x = tl.abs(log_ratio_of(pair.d, numbers, TEST, AHEAD))
        x = x if TEST.reduce == "max" else -x
        found = record(found, AHEAD, "peaks", name, key_of(tl.where(among, x, float("-inf"))))
    elif TEST.one_limb:
        found = record_sum(found, AHEAD, name, tl.where(among, x, 0.0))
    else:
        found = record_statistic(found, AHEAD, name, tl.where(among, x, 0.0))
    return found


# --- the prefix of every token ---


@triton.jit
def places_along(
    reached: tl.tuple, like: tl.tensor, K: tl.constexpr, WITHIN: tl.constexpr, AHEAD: tl.constexpr
) -> tl.tensor:
    """Take the place of every token among those that count, float64 from 1; 1 before the first of them too."""
    if has(AHEAD, "counts", named_places(K, WITHIN)):
        return tl.maximum(reached[place_of(AHEAD, "counts", named_places(K, WITHIN))], 1).to(tl.float64)
    else:
        return tl.full(like.shape, 1.0, tl.float64)


@triton.jit
def total_along(reached: tl.tuple, name: tl.constexpr, OF_D: tl.constexpr, AHEAD: tl.constexpr) -> tl.tensor:
    """Take the running sum of every token, float64, as `gather.exact` does that of a sequence."""
    if AHEAD.double:
        x = reached[place_of(AHEAD, "floats", name)]
    elif OF_D:
        x = reached[place_of(AHEAD, "integers", name)].to(tl.float64) / GRID_OF_D
    else:
        fraction = reached[place_of(AHEAD, "integers", named(name, "fraction"))].to(tl.float64) / GRID_OF_FRACTION
        x = reached[place_of(AHEAD, "integers", name)].to(tl.float64) + fraction
    if has(AHEAD, "floats", named(name, "rest")):
        x += reached[place_of(AHEAD, "floats", named(name, "rest"))].to(tl.float64)
    return x


# --- weights ---


@triton.jit
def weigh_prefixes(
    found: tl.tuple, pair: Pair, among: tl.tensor, standing: tl.tensor, reached: tl.tuple, shared: Shared,
    PLAN: tl.constexpr, TILING: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Compute every token's weight, and record the statistics of all."""
    zero, none = tl.zeros_like(pair.d), tl.zeros_like(among)
    raw, bounded, ratio, weight, above, below = zero, zero, zero, zero, none, none
    # Of the smallest D they take less registers without a branch.
    if PLAN.prefix == "min" or moves(PLAN, TILING) or shared.first < shared.tile.length:
        raw, bounded, ratio, weight, above, below = weights_of(reached, pair, among, standing, shared.numbers, PLAN)
    found = measure_prefix_weights(found, pair.measured, raw, bounded, ratio, weight, above, below, PLAN)
    return found, weight


@triton.jit
def weights_of(
    reached: tl.tuple, pair: Pair, among: tl.tensor, standing: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Compute weights in float64, as those of sequences; also give which lie above and below their bounds.

    Of the ratio too: around 1 and as it is, each before bounds and within them.
    """
    AHEAD: tl.constexpr = ahead_of(PLAN)
    within: tl.constexpr = PLAN.prefix_within
    places = places_along(reached, pair.d, 0, within, AHEAD)
    if PLAN.prefix == "min":
        before = of_key(reached[place_of(AHEAD, "peaks", "weight")]).to(tl.float64)
        counted = reached[place_of(AHEAD, "counts", named_places(0, within))]
        some = counted > among.to(tl.int32)
        d = tl.where(among, limited_d(pair.d, numbers, PLAN), 0.0).to(tl.float64)
        log_ratio = d - tl.where(some, before, 0.0)
    else:
        log_ratio = total_along(reached, "weight", True, AHEAD)
        if PLAN.prefix == "mean":
            log_ratio = log_ratio / places
    clamp = number(numbers, PLAN, "clamp")
    log_ratio = limited(log_ratio, -clamp, clamp, PLAN)
    if PLAN.rejects_before:
        log_ratio, places = tl.where(standing, log_ratio, 0.0), tl.where(standing, places, 1.0)
    raw, ratio = expm1(log_ratio), tl.exp(log_ratio)
    low, high = number(numbers, PLAN, "log/lower"), number(numbers, PLAN, "log/upper")
    lower, upper = number(numbers, PLAN, "lower"), number(numbers, PLAN, "upper")
    if PLAN.grows:
        low, high = low * tl.sqrt(places), high * tl.sqrt(places)
        lower, upper = tl.exp(low), tl.exp(high)
    bounded, weight = raw, ratio
    if PLAN.bounded:
        if PLAN.outside == "zero":
            inside = (log_ratio >= low) & (log_ratio <= high)
            bounded, weight = tl.where(inside, raw, -1.0), tl.where(inside, ratio, 0.0)
        else:
            bounded = bounded_by(raw, lower - 1.0, upper - 1.0, PLAN)
            weight = bounded_by(ratio, lower, upper, PLAN)
    above, below = beyond_bounds(log_ratio, low, high, pair.measured, PLAN)
    kind: tl.constexpr = real(PLAN)
    return raw.to(kind), bounded.to(kind), ratio.to(kind), weight.to(kind), above, below


@triton.jit
def measure_prefix_weights(
    found: tl.tuple, measured: tl.tensor, raw: tl.tensor, bounded: tl.tensor, ratio: tl.tensor, weight: tl.tensor,
    above: tl.tensor, below: tl.tensor, PLAN: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Record the statistics of the weights of prefixes."""
    found = record_extrema(found, PLAN, "-min_raw", "max_raw", raw, measured)
    found = record_extrema(found, PLAN, "-min_weight", "max_weight", bounded, measured)
    raw, bounded = tl.where(measured, raw, 0.0), tl.where(measured, bounded, 0.0)
    ratio, weight = tl.where(measured, ratio, 0.0), tl.where(measured, weight, 0.0)
    found = record(found, PLAN, "floats", "raw", raw)
    found = record(found, PLAN, "floats", "bounded", bounded)
    found = record(found, PLAN, "token_sums", "raw2", raw * raw)
    found = record(found, PLAN, "token_sums", "weight2", bounded * bounded)
    found = record(found, PLAN, "token_sums", "tokens_above", tl.where(above, 1.0, 0.0).to(raw.dtype))
    found = record(found, PLAN, "token_sums", "tokens_below", tl.where(below, 1.0, 0.0).to(raw.dtype))
    found = record(found, PLAN, "token_sums", "raw_plain", ratio)
    found = record(found, PLAN, "token_sums", "raw_plain2", ratio * ratio)
    found = record(found, PLAN, "token_sums", "weight_plain", weight)
    return record(found, PLAN, "token_sums", "weight_plain2", weight * weight)


# --- criteria ---


@triton.jit
def value_along(
    reached: tl.tuple, like: tl.tensor, numbers: tl.tuple, TEST: tl.constexpr, PLAN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute a criterion's value of every prefix, and the quantity that is compared, float64."""
    AHEAD: tl.constexpr = ahead_of(PLAN)
    name: tl.constexpr = TEST.along
    if has(AHEAD, "peaks", name):
        peak = of_key(reached[place_of(AHEAD, "peaks", name)])
        if TEST.reduce == "min":
            peak = -peak
        value = peak
        if TEST.compared != "value":
            value = statistic_of_extremum(peak, numbers, TEST, PLAN)
        return value.to(tl.float64), peak.to(tl.float64)
    else:
        value = total_along(reached, name, TEST.one_limb, AHEAD)
        if TEST.reduce == "mean":
            within: tl.constexpr = TEST.within
            value = value / places_along(reached, like, TEST.pair, within, AHEAD)
        return value, value


@triton.jit
def fails_along(
    tested: tl.tensor, reached: tl.tuple, like: tl.tensor, numbers: tl.tuple, TEST: tl.constexpr, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Test which values of prefixes lie outside their bounds, which may grow."""
    if TEST.grows:
        within: tl.constexpr = TEST.within
        growth = tl.sqrt(places_along(reached, like, TEST.pair, within, ahead_of(PLAN)))
        lower = number(numbers, PLAN, named(TEST.index, "lower")) * growth
        upper = number(numbers, PLAN, named(TEST.index, "upper")) * growth
        return ((tested >= lower) & (tested <= upper)) == 0
    else:
        return passes(tested, numbers, TEST, PLAN) == 0


@triton.jit
def test_prefixes(
    found: tl.tuple, reached: tl.tuple, pair: Pair, among: tl.tensor, advantage: tl.tensor, numbers: tl.tuple,
    TEST: tl.constexpr, PLAN: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:  # fmt: skip
    """Test the prefix of every token of `among`; return the accumulators and the tokens that fail."""
    value, tested = value_along(reached, pair.d, numbers, TEST, PLAN)
    fails = fails_along(tested, reached, pair.d, numbers, TEST, PLAN)
    fails = fails & selected(pair.d, advantage, among, TEST)
    value, some, counted = counted_of(value, among, numbers, TEST, PLAN)
    value, counted = value.to(real(PLAN)), counted.to(real(PLAN))
    found = record(found, PLAN, "token_sums", named(TEST.index, "value"), counted)
    found = record(found, PLAN, "token_sums", named(TEST.index, "value2"), counted * counted)
    found = record_extrema(found, PLAN, of_test("-min", TEST.index), of_test("max", TEST.index), value, some)
    return found, fails


# --- a step ---


@triton.jit
def standing_of(shared: Shared, like: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr) -> tl.tensor:
    """Select the tokens of sequences that no token has rejected, here or on another tile or rank."""
    stands = zeros_by(like) == 0
    owners = shared.extents.sequences + 2 if PLAN.packed else shared.extents.sequences
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).rejects_early:
            of_owners = shared.carries[0] + owners * at(ahead_of(PLAN), "counts", named(i, "lost"))
            lost = of_sequences(of_owners + PLAN.packed, like, shared.span, shared.first, shared.offsets, shared.tile,
                                 shared.extents, PLAN, TILING)  # fmt: skip
            stands = stands & (lost == 0)
    return stands


@triton.jit
def decide_prefixes(
    found: tl.tuple, running: tl.tuple, pairs: tl.tuple, advantage: tl.tensor, valid: tl.tensor, weight: tl.tensor,
    dropped: tl.tensor, shared: Shared, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple, tl.tensor, tl.tensor]:  # fmt: skip
    """Weigh and test the prefixes of a step; return accumulators, `running`, weights, and all tokens dropped so far.

    A criterion that drops the rest does so here from the first failure in the tile on, and `apply` from the first of
    the sequence.
    """
    AHEAD: tl.constexpr = ahead_of(PLAN)
    given = record_prefixes(nothing(AHEAD), pairs, dropped, shared, AHEAD, TILING)
    pair = pair_of(pairs[0])
    place = places_by(pair.d, shared.first, TILING)
    begins = begins_of(place, shared.span, shared.first, shared.offsets, shared.heads, shared.tile, shared.extents,
                       PLAN, TILING)  # fmt: skip
    carried = ()
    if AHEAD.joins:
        carried = carried_by(shared.carries, place, shared.span, shared.first, shared.offsets, shared.heads,
                             shared.tile, shared.extents, PLAN, AHEAD, TILING)  # fmt: skip
    reached, running = run_along(given, running, begins, carried, AHEAD, TILING)
    standing = valid
    if PLAN.rejects_before:
        standing = standing_of(shared, pair.d, PLAN, TILING)
    if PLAN.level == "prefix":
        among = survivors(pair, dropped, PLAN)
        found, weight = weigh_prefixes(found, pair, among, standing, reached, shared, PLAN, TILING)
    by_tokens = dropped
    rest = valid & (valid == 0)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "prefix":
            compared = pair_of(pairs[test(PLAN, i).pair])
            among = survivors(compared, by_tokens, PLAN)
            if PLAN.rejects_before:
                among = among & standing
            found, fails = test_prefixes(found, reached, compared, among, advantage, shared.numbers, test(PLAN, i),
                                         PLAN)  # fmt: skip
            if test(PLAN, i).drop == "rest":
                each = begins[1] if test(PLAN, i).within == "sequence" else begins[0]
                failures, last = scanned(fails.to(tl.int32), running[rest_of(PLAN, i)], each, False, TILING)
                running = running[: rest_of(PLAN, i)] + (last,) + running[rest_of(PLAN, i) + 1 :]
                fails = valid & (failures > 0)
                rest = rest | fails
            found = record_count(found, PLAN, named(i, "lost"), fails)
            if test(PLAN, i).drop != "sequence":
                dropped = dropped | fails
    if PLAN.rests:
        # The first of a slot; the key of a maximum.
        kind: tl.constexpr = tl.int64 if PLAN.double else tl.int32
        first = tl.where(rest, -places_of(shared.first, TILING), -0x80000000).to(kind)
        found = record(found, PLAN, "peaks", "rest", first)
    return found, running, weight, dropped
