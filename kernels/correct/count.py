"""A round of the search for bounds that the batch decides: tokens are counted by a digit of what a bound is for.

The bits of a float, turned over so that they are in the order of the floats, are an integer; backends/select.py goes
through it digit by digit. Tokens whose integer begins with the digits found so far are those of one range, within which
the next digit is a shift: so all rounds of a search are one compiled kernel. Integers are added up by atomics, to the
same table in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import selected, statistic
from rollout_corr.kernels.correct.measures import add_each
from rollout_corr.kernels.correct.parts import (
    Inputs,
    Part,
    Shared,
    advantage_of,
    compare,
    compares_with_rollout,
    external_of,
    load_part,
    token_tensor,
)
from rollout_corr.kernels.correct.plan import Searched
from rollout_corr.kernels.io import PerToken, contiguous, either
from rollout_corr.kernels.slots import Extents
from rollout_corr.kernels.tiles import ends_by, first_span, next_span, tile_of_program
from rollout_corr.kernels.tokens import limited, number, over_kept_set, real, test, thresholds

# What rules add up is saturated, and its fraction is a multiple of 1 / GRID: as in backends/select.py.
LARGEST_AMOUNT = tl.constexpr(2.0**37)
GRID = tl.constexpr(2.0**38)
# Adding it and taking it off rounds a float64 that is not negative and below it to the nearest whole number.
ROUNDS = tl.constexpr(2.0**52)
# A square that is rounded to float32 has so many bits less.
OF_NEAREST = tl.constexpr(2.0**-24)


@triton.constexpr_function
def searched(searches: tuple[Searched, ...], k: int) -> Searched:
    """Take the k-th search."""
    return searches[k]


@triton.constexpr_function
def count_of(searches: tuple[Searched, ...]) -> int:
    """Count the searches."""
    return len(searches)


@triton.constexpr_function
def rows_of(searches: tuple[Searched, ...], k: int | None = None) -> int:
    """Count the rows of the tables of the first k searches, or of all."""
    return sum(one.rows for one in searches[:k])


@triton.jit
def ordered(x: tl.tensor, UPPER: tl.constexpr) -> tl.tensor:
    """Encode floats as unsigned integers in the order in which a bound is looked for: descending for a lower one."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True)
        key = bits ^ ((bits >> 63) | -0x8000000000000000)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) | -0x80000000)
    if not UPPER:
        key = ~key
    if x.dtype == tl.float64:
        return key.to(tl.uint64, bitcast=True)
    else:
        return key.to(tl.uint32, bitcast=True)


@triton.jit
def value_of(
    part: Part, shared: Shared, advantage: tl.tensor, SEARCHED: tl.constexpr, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute what a bound is for, and which tokens decide it; NaN is none of them."""
    train, rollout = part.train.to(real(PLAN)), part.rollout.to(real(PLAN))
    if SEARCHED.of_weight:
        pair = compare(*over_kept_set(train, rollout, part.mass, PLAN), part.valid, PLAN)
        clamp = number(shared.numbers, PLAN, "clamp").to(pair.d.dtype)
        x, among = limited(pair.d, -clamp, clamp, PLAN), pair.measured
        if PLAN.token_clamp:
            most = number(shared.numbers, PLAN, "token_clamp").to(pair.d.dtype)
            x = limited(x, -most, most, PLAN)
    else:
        TEST: tl.constexpr = test(PLAN, SEARCHED.index)
        if TEST.pair == 0:
            pair = compare(*over_kept_set(train, rollout, part.mass, PLAN), part.valid, PLAN)
        else:
            new = token_tensor(shared, PLAN.externals, PLAN, TILING)
            if compares_with_rollout(PLAN, TEST.pair - 1):
                pair = compare(*over_kept_set(new, rollout, part.mass, PLAN), part.valid, PLAN)
            else:
                pair = compare(new, train, part.valid, PLAN)
        external = external_of(shared, pair.logp, TEST, PLAN, TILING)
        x = statistic(pair, pair.measured, external, shared.numbers, TEST, PLAN)
        among = selected(pair.d, advantage, pair.measured, TEST)
        if TEST.stat == "external":
            among = among & (x == x)
    if PLAN.nonfinite == "propagate":
        among = among & (x == x)
    return x, among


@triton.jit
def float32_above(x: tl.tensor) -> tl.tensor:
    """Find the smallest float32 that is not below x."""
    found = x.to(tl.float32)
    if x.dtype == tl.float64:
        bits = found.to(tl.int32, bitcast=True)
        above = tl.where(bits >= 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
        found = tl.where(found.to(tl.float64) < x, above, found)
    return found


@triton.jit
def loaded(pointer: tl.tensor, COUNT: tl.constexpr) -> tl.tuple:
    """Load the first entries of a tensor."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(pointer + k),)
    return found


@triton.jit
def count_values(
    x: tl.tensor, among: tl.tensor, first: tl.tensor, setting: tl.tensor, scales: tl.tensor, shift: tl.tensor,
    digits: tl.tensor, table: tl.tensor, SEARCHED: tl.constexpr,
) -> None:  # fmt: skip
    """Count values by their digit, and add up what the rule does."""
    if SEARCHED.sums == "weights":
        x = float32_above(tl.maximum(x, setting.to(x.dtype)))
    key = ordered(x, SEARCHED.upper)
    digit = (key - first.to(key.dtype)) >> shift.to(key.dtype)
    place = tl.where(among & (digit < digits.to(key.dtype)), digit.to(tl.int32), digits)
    counted = place < digits
    # Behind the first rounds most steps have none to count.
    if tl.min(tl.ravel(place), 0) < digits:
        add_each(table, place, counted)
        known = tl.where(counted, x, 0.0).to(tl.float64)
        if SEARCHED.sums == "amounts":
            amount = tl.minimum(tl.maximum(known / setting, -LARGEST_AMOUNT), LARGEST_AMOUNT)
            whole = tl.floor(amount)
            fraction = ((amount - whole) * GRID + ROUNDS) - ROUNDS
            add_each(table + digits, place, counted, whole.to(tl.int64))
            add_each(table + 2 * digits, place, counted, fraction.to(tl.int64))
        elif SEARCHED.sums == "weights":
            weight = tl.exp(known).to(tl.float32).to(tl.float64)
            square = weight * weight
            nearest = square.to(tl.float32).to(tl.float64)
            # All weights with a digit are multiples of one power of two; see backends/select_ess.py.
            scale = tl.load(scales + place, mask=counted)
            of_squares = scale * scale
            add_each(table + digits, place, counted, (weight * scale).to(tl.int64))
            add_each(table + 2 * digits, place, counted, (nearest * (of_squares * OF_NEAREST)).to(tl.int64))
            add_each(table + 3 * digits, place, counted, ((square - nearest) * of_squares).to(tl.int64))


# No length and no stride is in a compile key: they are annotated, and not specialised on.
RUNTIME = ["tokens", "sequences", "width", "tiles", "tile_bits", "steps", "train_row", "train_step",
           "rollout_row", "rollout_step", "mask_row", "mask_step", "shift", "digits", "copies"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def count_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, externals, offsets, numbers, settings, firsts, scales,
    tables,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, steps: tl.int32,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64, shift: tl.int32, digits: tl.int32, copies: tl.int32,
    PLAN: tl.constexpr, TILING: tl.constexpr, SEARCHES: tl.constexpr,
):  # fmt: skip
    """Count the tokens of a tile in one of the copies of the tables, [copies, rows, digits]."""
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    numbers = thresholds(numbers, PLAN)
    begins, each = loaded(firsts, count_of(SEARCHES)), loaded(settings, count_of(SEARCHES))
    tile = tile_of_program(offsets, extents, PLAN, TILING)
    span = first_span(offsets, tile, extents, steps, PLAN)
    inputs = Inputs(
        PerToken(train_logp, train_row, train_step),
        PerToken(rollout_logp, rollout_row, rollout_step),
        PerToken(either(mask, train_logp), mask_row, mask_step),
        contiguous(either(log_mass, train_logp), extents),
    )
    copy = tables + (tl.program_id(0) % copies) * (rows_of(SEARCHES) * digits)
    for first in range(0, tile.length, TILING.step):
        whole = (first >= tile.begin) & (first + TILING.step <= tile.end)
        if whole:
            part = load_part(inputs, tile, first, PLAN, TILING, True)
        else:
            part = load_part(inputs, tile, first, PLAN, TILING, False)
        shared = Shared(tile, span, first, whole, extents, offsets, offsets, (offsets,), either(advantages, train_logp),
                        externals, tables, numbers)  # fmt: skip
        advantage = advantage_of(shared, part.train.to(real(PLAN)), PLAN, TILING)
        for k in tl.static_range(count_of(SEARCHES)):
            x, among = value_of(part, shared, advantage, searched(SEARCHES, k), PLAN, TILING)
            table = copy + rows_of(SEARCHES, k) * digits
            count_values(x, among, begins[k], each[k], either(scales, settings), shift, digits, table,
                         searched(SEARCHES, k))  # fmt: skip
        if PLAN.packed and PLAN.advantages == "sequence":
            while ends_by(span, first, TILING):
                span = next_span(span, offsets, tile, extents, PLAN)
