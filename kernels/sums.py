"""Accumulators of a walk along a tile: one for every column of the plan's tables, [LANES], kept to the end.

`found` is a tuple of what a step of tokens gives, in the order of `Tables.recorded`: columns of the batch summed over
the tokens of each lane at once, columns of slots token by token, because several sequences may share the step. `kept`
is the tuple of accumulators. Lanes, which are one warp, exchange sums when a slot or the tile ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tables import Tables, has, kept_of, named, size
from .tiles import Extents, Span, places_of
from .tokens import GRID_OF_D, GRID_OF_FRACTION, LARGEST_D, LARGEST_STATISTIC, is_finite, key_of, of_key, over_lanes

# Counts of slots share words of 32 bits: a thread has at most 64 tokens of a tile, so each fits into 8 bits.
COUNTS_OF_WORD, BITS, LARGEST_COUNT = tl.constexpr(4), tl.constexpr(8), tl.constexpr(0xFF)

# Columns of probabilities, and of their squares.
PROBABILITIES = ("p", "q", "abs_prob_diff", "max_abs_prob_diff")
SQUARED = ("p2", "q2", "pq")


@triton.constexpr_function
def first_of(plan: Tables, table: str) -> int:
    """Find the accumulator of a table's first column; anything for a table without columns."""
    return next((place for place, (kept, _) in enumerate(plan.recorded) if kept == table), -1)


@triton.constexpr_function
def place_of(plan: Tables, table: str, name: str) -> int:
    """Find the accumulator of a column."""
    return plan.recorded.index((table, name))


@triton.constexpr_function
def is_of_slots(plan: Tables, place: int) -> bool:
    """Return whether an accumulator is of slots and not of the batch."""
    return plan.recorded[place][0] not in ("token_sums", "token_maxima")


@triton.constexpr_function
def is_measured(plan: Tables, place: int) -> bool:
    """Return whether an accumulator of slots is filled token by token; without a mask, bounds give the valid ones."""
    table, name = plan.recorded[place]
    return is_of_slots(plan, place) and (plan.masked or (table, name) != ("counts", "valid"))


@triton.constexpr_function
def first_of_word(plan: Tables, place: int) -> int:
    """Find the accumulator of the word of a count of slots; -1 for all else."""
    if plan.recorded[place][0] != "counts":
        return -1
    return place - (place - first_of(plan, "counts")) % COUNTS_OF_WORD.value


@triton.constexpr_function
def bit_of(plan: Tables, place: int) -> int:
    """Find the lowest bit of a count in its word."""
    return (place - first_of_word(plan, place)) * BITS.value


@triton.constexpr_function
def one_of(plan: Tables, place: int) -> int:
    """Return a count of one at its place in the word."""
    return 1 << bit_of(plan, place)


@triton.constexpr_function
def is_added(plan: Tables, place: int) -> bool:
    """Return whether steps add to an accumulator of slots; of a word only to the first."""
    in_word = first_of_word(plan, place) >= 0
    return first_of_word(plan, place) == place if in_word else is_measured(plan, place)


@triton.constexpr_function
def counts_others(plan: Tables, i: int) -> bool:
    """Return whether the accumulator of a count of slots counts the other valid tokens: the finite, the equal ones."""
    return plan.counts[i].rpartition("/")[2] in ("nonfinite", "differing")


@triton.constexpr_function
def counts_more_than_equal(plan: Tables, place: int) -> bool:
    """Return whether a count of slots is of valid or of finite tokens, among which those of equal log-probs are."""
    return "differing" in plan.counts and plan.recorded[place] in (("counts", "valid"), ("counts", "nonfinite"))


@triton.constexpr_function
def counts_equal(plan: Tables, place: int) -> bool:
    """Return whether a count of slots is of tokens of equal log-probs."""
    return plan.recorded[place] == ("counts", "differing")


@triton.constexpr_function
def is_extremum(plan: Tables, place: int) -> bool:
    """Return whether an accumulator keeps the largest and not the sum."""
    return plan.recorded[place][0] in ("peaks", "token_maxima")


@triton.constexpr_function
def is_count(plan: Tables, place: int) -> bool:
    """Return whether a sum counts tokens of the batch."""
    table, name = plan.recorded[place]
    return table == "token_sums" and name.rpartition("/")[2].startswith("tokens_")


@triton.constexpr_function
def counts_probabilities(plan: Tables) -> bool:
    """Return whether probabilities - 1 are integers: of float32 they are multiples of 2^-24, unless one may be NaN."""
    return plan.nonfinite != "propagate"


@triton.constexpr_function
def quantum_of(plan: Tables, place: int) -> float | None:
    """Return the quantum of a sum or a maximum of such integers; None for all else."""
    table, name = plan.recorded[place]
    if table not in ("token_sums", "token_maxima") or not counts_probabilities(plan):
        return None
    return 2.0**-48 if name in SQUARED else 2.0**-24 if name in PROBABILITIES else None


@triton.constexpr_function
def is_wide(plan: Tables, place: int) -> bool:
    """Return whether a sum over tokens is float64: of values far from 0 that differ little from each other."""
    name = plan.recorded[place][1].rpartition("/")[2]
    return name in (*PROBABILITIES[:2], *SQUARED, "clamped", "clamped2", "age")


@triton.constexpr_function
def is_of_loss(plan: Tables, place: int) -> bool:
    """Return whether an accumulator is an extremum of the loss by slot, which is no key of floats where none is NaN."""
    return plan.recorded[place] in (("peaks", "max_ppo_log_ratio"), ("peaks", "-min_ppo_log_ratio"))


@triton.constexpr_function
def kind_of(plan: Tables, place: int) -> tl.dtype:
    """Choose the dtype of an accumulator."""
    table = plan.recorded[place][0]
    if table == "counts":
        return tl.int32
    if quantum_of(plan, place) is not None:
        return tl.int64 if plan.recorded[place][1] in SQUARED else tl.int32
    if table == "integers":
        return tl.int64
    if plan.nonfinite == "propagate" if table == "token_maxima" or is_of_loss(plan, place) else table == "peaks":
        return tl.int32
    return tl.float64 if table == "token_sums" and is_wide(plan, place) else tl.float32


@triton.constexpr_function
def start_of(plan: Tables, place: int) -> float:
    """Choose the value from which an accumulator starts."""
    if not is_extremum(plan, place):
        return 0
    # Of keys it is the key of -inf. The smallest integer is the key of a NaN, and a program may skip every step.
    return float("-inf") if kind_of(plan, place).is_floating() else -0x7F800001


# --- one step ---


@triton.jit
def nothing(PLAN: tl.constexpr) -> tl.tuple:
    """Fill all columns with placeholders; one that is never recorded fails to compile."""
    found: tl.tuple = ()
    for _ in tl.static_range(size(PLAN, "recorded")):
        found = found + (0,)
    return found


@triton.jit
def record(found: tl.tuple, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x) -> tl.tuple:
    """Record the values of a step's tokens in a column, if the plan has it; for the batch summed over a lane's tokens.

    Those of the batch may be [LANES] already, and a sum a number for all lanes.
    """
    if has(PLAN, TABLE, name):
        if TABLE == "token_sums" and len(x.shape) == 3:
            x = tl.sum(tl.sum(x, 2), 0)
        elif TABLE == "token_maxima" and len(x.shape) == 3:
            x = tl.max(tl.max(x, 2), 0)
        found = found[: place_of(PLAN, TABLE, name)] + (x,) + found[place_of(PLAN, TABLE, name) + 1 :]
    return found


@triton.jit
def with_words(found: tl.tuple, PLAN: tl.constexpr, TILING: tl.constexpr) -> tl.tuple:
    """Pack the counts of a step: what each token adds to a word replaces the word's first count."""
    words = found
    for place in tl.static_range(size(PLAN, "recorded")):
        if first_of_word(PLAN, place) == place:
            words = words[:place] + (tl.zeros_like(places_of(0, TILING)),) + words[place + 1 :]
        if first_of_word(PLAN, place) >= 0 and is_measured(PLAN, place) and not counts_more_than_equal(PLAN, place):
            if counts_equal(PLAN, place):
                word = word_of_equal(found, place, PLAN)
            else:
                word = words[first_of_word(PLAN, place)] + tl.where(found[place], one_of(PLAN, place), 0)
            words = words[: first_of_word(PLAN, place)] + (word,) + words[first_of_word(PLAN, place) + 1 :]
    return words


@triton.jit
def word_of_equal(found: tl.tuple, place: tl.constexpr, PLAN: tl.constexpr):
    """Count equal tokens, and the finite and the valid ones around them: a choice each, and no addition."""
    finite: tl.constexpr = one_of(PLAN, place - 1)
    valid: tl.constexpr = one_of(PLAN, place - 2) if is_measured(PLAN, place - 2) else 0
    word = tl.where(found[place], one_of(PLAN, place) + finite + valid, finite + valid)
    word = tl.where(found[place - 1], word, valid)
    if is_measured(PLAN, place - 2):
        word = tl.where(found[place - 2], word, 0)
    return word


@triton.jit
def count_of(kept: tl.tuple, place: tl.constexpr, PLAN: tl.constexpr):
    """Add a count of a slot up over the lanes, taken out of its word."""
    return tl.sum((kept[first_of_word(PLAN, place)] >> bit_of(PLAN, place)) & LARGEST_COUNT, 0)


@triton.jit
def record_sum(found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x) -> tl.tuple:
    """Sum D or something bounded like it: saturated and exact on D's grid."""
    saturated = x
    if has(PLAN, "floats", named(name, "rest")):
        saturated = tl.where(is_finite(x), x, 0.0)
        found = record(found, PLAN, "floats", named(name, "rest"), x - saturated)
    saturated = tl.minimum(tl.maximum(saturated, -LARGEST_D), LARGEST_D)
    return record(found, PLAN, "integers", name, to_grid(saturated, GRID_OF_D))


@triton.jit
def record_statistic(found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x) -> tl.tuple:
    """Sum another statistic: saturated and exact in two limbs."""
    saturated = x
    if has(PLAN, "floats", named(name, "rest")):
        saturated = tl.where(is_finite(x), x, 0.0)
        found = record(found, PLAN, "floats", named(name, "rest"), x - saturated)
    saturated = tl.minimum(tl.maximum(saturated, -LARGEST_STATISTIC), LARGEST_STATISTIC)
    units = saturated.to(tl.int64)
    found = record(found, PLAN, "integers", name, units)
    fraction = to_grid(saturated - units.to(saturated.dtype), GRID_OF_FRACTION)
    return record(found, PLAN, "integers", named(name, "fraction"), fraction)


@triton.jit
def record_extrema(found: tl.tuple, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among) -> tl.tuple:
    """Keep the largest of -x and of x among some tokens; a NaN, where there may be one, is larger than anything."""
    if has(PLAN, "token_maxima", high):
        found = record(found, PLAN, "token_maxima", high, ordered(tl.where(among, x, float("-inf")), PLAN))
    if has(PLAN, "token_maxima", low):
        if PLAN.nonfinite == "propagate":
            negated = ordered(tl.where(among, -x, float("-inf")), PLAN)
        else:
            negated = -tl.min(tl.min(tl.where(among, x, float("inf")), 2), 0)
        found = record(found, PLAN, "token_maxima", low, negated)
    return found


@triton.jit
def ordered(x, PLAN: tl.constexpr):
    """Encode x as a key if it can be NaN."""
    if PLAN.nonfinite == "propagate":
        return key_of(x)
    else:
        return x


@triton.jit
def to_grid(x, grid: tl.constexpr):
    """Round to a multiple of 1/grid, as int64."""
    return (x * grid + tl.where(x < 0.0, -0.5, 0.5).to(x.dtype)).to(tl.int64)


# --- the walk ---


@triton.jit
def empty(PLAN: tl.constexpr, TILING: tl.constexpr) -> tl.tuple:
    """Start all accumulators."""
    kept: tl.tuple = ()
    for place in tl.static_range(size(PLAN, "recorded")):
        kept = kept + (tl.full((TILING.lanes,), start_of(PLAN, place), kind_of(PLAN, place)),)
    return kept


@triton.jit
def emptied(kept: tl.tuple, PLAN: tl.constexpr, TILING: tl.constexpr) -> tl.tuple:
    """Start the accumulators of slots again."""
    fresh: tl.tuple = ()
    for place in tl.static_range(size(PLAN, "recorded")):
        if is_of_slots(PLAN, place):
            fresh = fresh + (tl.full((TILING.lanes,), start_of(PLAN, place), kind_of(PLAN, place)),)
        else:
            fresh = fresh + (kept[place],)
    return fresh


@triton.jit
def joined(one, other, LARGEST: tl.constexpr):
    """Add two sums, or take the larger of two maxima."""
    if LARGEST:
        return tl.maximum(one, other)
    else:
        return one + other


@triton.jit
def with_batch(kept: tl.tuple, found: tl.tuple, PLAN: tl.constexpr) -> tl.tuple:
    """Add a step to the accumulators of the batch."""
    more: tl.tuple = ()
    for place in tl.static_range(size(PLAN, "recorded")):
        if is_of_slots(PLAN, place):
            more = more + (kept[place],)
        else:
            more = more + (joined(kept[place], found[place].to(kind_of(PLAN, place)), is_extremum(PLAN, place)),)
    return more


@triton.jit
def with_slot(kept: tl.tuple, found: tl.tuple, start: tl.tensor | None, end: tl.tensor | None, first,
              PLAN: tl.constexpr, TILING: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Add the tokens of a step, which begins at first, to the accumulators of slots; from start to end if given."""
    if start is not None:
        # Counted from the step's first token, so that nothing but its bounds changes from step to step.
        place, before = places_of(0, TILING), start - first
        if end is None:
            inside = place >= before
        else:
            # One comparison for both ends: what lies below 0 is large without a sign.
            span = (end - start).to(tl.uint32, bitcast=True)
            inside = (place - before).to(tl.uint32, bitcast=True) < span
    more: tl.tuple = ()
    for place in tl.static_range(size(PLAN, "recorded")):
        if is_added(PLAN, place):
            x = found[place].to(kind_of(PLAN, place))
            if start is not None:
                x = tl.where(inside, x, start_of(PLAN, place))
            if is_extremum(PLAN, place):
                more = more + (tl.maximum(kept[place], tl.max(tl.max(x, 2), 0)),)
            else:
                more = more + (kept[place] + tl.sum(tl.sum(x, 2), 0).to(kind_of(PLAN, place)),)
        else:
            more = more + (kept[place],)
    return more


@triton.jit
def key_in(p_table, x):
    """Encode an extremum that was kept as it is, as the keys of its table are."""
    if x.dtype == p_table.dtype.element_ty:
        return x
    else:
        return key_of(x)


@triton.jit
def put_columns(kept: tl.tuple, p_table, slots, slot, PLAN: tl.constexpr, TABLE: tl.constexpr) -> None:
    """Store the columns of a table of slots, [columns, slots]."""
    entry = slot
    for i in tl.static_range(size(PLAN, TABLE)):
        x = kept[first_of(PLAN, TABLE) + i]
        x = key_in(p_table, tl.max(x, 0)) if TABLE == "peaks" else over_lanes(x)
        tl.store(p_table + entry, x.to(p_table.dtype.element_ty))
        entry += slots


@triton.jit
def put_counts(kept: tl.tuple, p_table, slots, slot, valid, PLAN: tl.constexpr) -> None:
    """Store the counts of a slot; the first is of its valid tokens."""
    entry = slot
    tl.store(p_table + entry, valid)
    for i in tl.static_range(1, size(PLAN, "counts")):
        x = count_of(kept, first_of(PLAN, "counts") + i, PLAN)
        if counts_others(PLAN, i):
            x = valid - x
        entry += slots
        tl.store(p_table + entry, x)


@triton.jit
def put_slot(kept: tl.tuple, tables: tl.tuple, slots, span: Span, PLAN: tl.constexpr) -> None:
    """Store an owner's slot."""
    slot = tl.program_id(0).to(tl.int64)
    if PLAN.packed:
        slot += span.owner
    if PLAN.masked:
        many = count_of(kept, first_of(PLAN, "counts"), PLAN)
    else:
        many = span.end - span.start
    put_counts(kept, tables[0], slots, slot, many, PLAN)
    put_columns(kept, tables[1], slots, slot, PLAN, "integers")
    put_columns(kept, tables[2], slots, slot, PLAN, "floats")
    put_columns(kept, tables[3], slots, slot, PLAN, "peaks")


@triton.jit
def put_outside(p_counts, outside, begin, first_owner, last_owner, extents: Extents) -> None:
    """Store how many valid tokens of a tile no sequence has, below 0, as the count of an owner that is none.

    begin: the first token of the tile that a sequence may have. Before it lies what belongs to owner 0, which has no
    slot where there is nothing.
    """
    owner = tl.where(begin > 0, first_owner, last_owner)
    if (outside > 0) & ((owner == 0) | (owner > extents.sequences)):
        tl.store(p_counts + tl.program_id(0).to(tl.int64) + owner, -outside)


@triton.jit
def put_batch(kept: tl.tuple, p_sums, p_maxima, PLAN: tl.constexpr) -> None:
    """Store what the program adds to sums and extrema of the batch, [columns, programs], of all that it accumulated."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for i in tl.static_range(kept_of(PLAN, "token_sums")):
        x = total_of(kept, first_of(PLAN, "token_sums") + i, PLAN)
        tl.store(p_sums + (program + i * programs), x.to(tl.float64))
    for i in tl.static_range(kept_of(PLAN, "token_maxima")):
        x = largest_of(kept, first_of(PLAN, "token_maxima") + i, PLAN)
        tl.store(p_maxima + (program + i * programs), x.to(tl.float64))


@triton.jit
def total_of(kept: tl.tuple, place: tl.constexpr, PLAN: tl.constexpr):
    """Add an accumulator of the batch up over the lanes."""
    x = kept[place]
    if quantum_of(PLAN, place) is not None:
        if x.dtype == tl.int64:
            # Squares: at most 2^48 each, 2^54 per lane; taking 1 off that changes float64 by its last bit at most.
            x = tl.minimum(x, (1 << 54) - 1)
            low, high = tl.sum((x & 0x7FFFFFF).to(tl.uint32), 0), tl.sum((x >> 27).to(tl.uint32), 0)
            x = (high.to(tl.int64) << 27) + low.to(tl.int64)
        else:
            x = over_lanes(x.to(tl.int64))
        return x.to(tl.float64) * quantum_of(PLAN, place)
    elif is_count(PLAN, place):
        # A warp adds integers in one instruction.
        return tl.sum(x.to(tl.int32), 0)
    else:
        return tl.sum(x, 0)


@triton.jit
def largest_of(kept: tl.tuple, place: tl.constexpr, PLAN: tl.constexpr):
    """Find the largest that an accumulator of the batch has in any lane."""
    x = tl.max(kept[place], 0)
    if quantum_of(PLAN, place) is not None:
        # 0 at tokens that are not measured, recognized by D.
        none = tl.max(kept[place_of(PLAN, "token_maxima", "max_d")], 0) == float("-inf")
        return tl.where(none, float("-inf"), x.to(tl.float64) * quantum_of(PLAN, place))
    else:
        return unordered(x)


@triton.jit
def unordered(x):
    """Decode what may be a key."""
    if x.dtype == tl.int32 or x.dtype == tl.int64:
        return of_key(x)
    else:
        return x
