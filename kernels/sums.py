"""What a program of `read` adds up: one accumulator for every column of its tables, kept in registers to the end.

A tile is read in parts of [ROWS, LANES, VEC] tokens: VEC neighbours belong to one thread, LANES of them make a row's
part. What a part finds is summed over its neighbours at once and added to what the parts before it found; threads
talk to each other only in the end, for up to eight columns at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Tables
from rollout_corr.kernels.tokens import (
    GRID_OF_D,
    GRID_OF_FRACTION,
    LARGEST_D,
    LARGEST_STATISTIC,
    has,
    is_finite,
    key_of,
    named,
    of_key,
    size,
)


@triton.constexpr_function
def first_of(plan: Tables, table: str) -> int:
    """The place of a table's first column."""
    return [kept for kept, _ in plan.recorded].index(table)


@triton.constexpr_function
def place_of(plan: Tables, table: str, name: str) -> int:
    """The place of a column."""
    return plan.recorded.index((table, name))


@triton.constexpr_function
def places(plan: Tables) -> int:
    """How many columns are kept; the histogram comes behind the others."""
    return len(plan.recorded) + plan.full


@triton.constexpr_function
def is_extremum(plan: Tables, place: int) -> bool:
    """Whether a column keeps the largest, and not the sum."""
    return place < len(plan.recorded) and plan.recorded[place][0] in ("peaks", "token_maxima")


@triton.constexpr_function
def group_count(many: int) -> int:
    """How many groups of 8, 4, 2 and 1 columns make so many."""
    return many // 8 + (many % 8).bit_count()


@triton.constexpr_function
def group_first(many: int, i: int) -> int:
    """The first column of a group."""
    sizes = [8] * (many // 8) + [size for size in (4, 2, 1) if many % 8 & size]
    return sum(sizes[:i])


@triton.constexpr_function
def group_size(many: int, i: int) -> int:
    """How many columns a group has."""
    return ([8] * (many // 8) + [size for size in (4, 2, 1) if many % 8 & size])[i]


# --- one part of a tile ---


@triton.jit
def nothing(PLAN: tl.constexpr):
    """No column found yet. One that stays so fails to compile."""
    found = ()
    for _ in tl.static_range(places(PLAN)):
        found = found + (0,)
    return found


@triton.jit
def record(found, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x):
    """Put the sum over neighbours, or the largest of them, into a column, if the plan has it."""
    if has(PLAN, TABLE, name):
        if TABLE == "peaks" or TABLE == "token_maxima":
            x = tl.max(x, 2)
        else:
            x = tl.sum(x, 2)
        found = found[: place_of(PLAN, TABLE, name)] + (x,) + found[place_of(PLAN, TABLE, name) + 1 :]
    return found


@triton.jit
def record_count(found, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, which):
    """How many tokens."""
    return record(found, PLAN, TABLE, name, which.to(tl.int32))


@triton.jit
def record_sum(found, PLAN: tl.constexpr, name: tl.constexpr, x, TAME: tl.constexpr):
    """A sum of D or of something bounded like it: exact on D's grid, saturated; plain in float64."""
    finite = x
    if has(PLAN, "floats", named(name, "rest")):
        finite = x if TAME else tl.where(is_finite(x), x, 0.0)
        found = record(found, PLAN, "floats", named(name, "rest"), x - finite)
    if not TAME:
        finite = tl.minimum(tl.maximum(finite, -LARGEST_D), LARGEST_D)
    if PLAN.double:
        return record(found, PLAN, "floats", name, finite)
    else:
        return record(found, PLAN, "integers", name, to_grid(finite, GRID_OF_D))


@triton.jit
def record_statistic(found, PLAN: tl.constexpr, name: tl.constexpr, x):
    """A sum of another statistic, exact in two limbs; plain in float64."""
    finite = x
    if has(PLAN, "floats", named(name, "rest")):
        finite = tl.where(is_finite(x), x, 0.0)
        found = record(found, PLAN, "floats", named(name, "rest"), x - finite)
    finite = tl.minimum(tl.maximum(finite, -LARGEST_STATISTIC), LARGEST_STATISTIC)
    if PLAN.double:
        return record(found, PLAN, "floats", name, finite)
    else:
        whole = finite.to(tl.int64)
        found = record(found, PLAN, "integers", name, whole)
        fraction = to_grid(finite - whole.to(finite.dtype), GRID_OF_FRACTION)
        return record(found, PLAN, "integers", named(name, "fraction"), fraction)


@triton.jit
def record_extrema(found, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among):
    """The largest of -x and of x among some; a NaN, where there may be one, is larger than anything."""
    if has(PLAN, "token_maxima", high):
        found = record(found, PLAN, "token_maxima", high, ordered(tl.where(among, x, float("-inf")), PLAN))
    if has(PLAN, "token_maxima", low):
        found = record(found, PLAN, "token_maxima", low, ordered(tl.where(among, -x, float("-inf")), PLAN))
    return found


@triton.jit
def ordered(x, PLAN: tl.constexpr):
    """x, as a key if it can be NaN."""
    if PLAN.nonfinite == "propagate":
        return key_of(x)
    else:
        return x


@triton.jit
def to_grid(x, grid):
    """Round to a multiple of 1/grid, as int64."""
    return (x * grid + tl.where(x < 0.0, -0.5, 0.5).to(x.dtype)).to(tl.int64)


@triton.jit
def merged(found, more, PLAN: tl.constexpr):
    """What two parts found."""
    both = ()
    for place in tl.static_range(len(found)):
        if is_extremum(PLAN, place):
            both = both + (tl.maximum(found[place], more[place]),)
        else:
            both = both + (found[place] + more[place],)
    return both


# --- all parts ---


@triton.jit
def widest(found, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Something of the dtype to which some columns promote."""
    x = found[FIRST]
    for i in tl.static_range(1, SIZE):
        x = x + found[FIRST + i]
    return x


@triton.jit
def joined(found, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, LANES, 1 or 2, ...], columns side by side in the order in which they are named."""
    kind = widest(found, FIRST, SIZE).dtype
    if SIZE == 8:
        even = tl.join(pair(found, FIRST, 4, kind), pair(found, FIRST + 2, 4, kind))
        return tl.join(even, tl.join(pair(found, FIRST + 1, 4, kind), pair(found, FIRST + 3, 4, kind)))
    elif SIZE == 4:
        return tl.join(pair(found, FIRST, 2, kind), pair(found, FIRST + 1, 2, kind))
    elif SIZE == 2:
        return pair(found, FIRST, 1, kind)
    else:
        return tl.expand_dims(found[FIRST], 2)


@triton.jit
def pair(found, FIRST: tl.constexpr, STEP: tl.constexpr, kind: tl.constexpr):
    """Two columns side by side."""
    return tl.join(found[FIRST].to(kind), found[FIRST + STEP].to(kind))


@triton.jit
def of_rows(found, FIRST: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr):
    """[ROWS, SIZE], columns added up (or the largest) over each row."""
    together = joined(found, FIRST, SIZE)
    together = tl.max(together, 1) if LARGEST else tl.sum(together, 1)
    return tl.reshape(together, [together.shape[0], SIZE])


@triton.jit
def of_program(found, FIRST: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr):
    """[SIZE], columns added up (or the largest) over everything: a thread's own rows first."""
    together = joined(found, FIRST, SIZE)
    together = tl.reshape(together, [together.shape[0] * together.shape[1], SIZE])
    return tl.max(together, 0) if LARGEST else tl.sum(together, 0)


@triton.jit
def put_slots(found, table, slots, slot, PLAN: tl.constexpr, TABLE: tl.constexpr):
    """Store the columns of a table of slots."""
    for i in tl.static_range(group_count(size(PLAN, TABLE))):
        put_slot_group(found, table, slots, slot, PLAN, TABLE, group_first(size(PLAN, TABLE), i),
                       group_size(size(PLAN, TABLE), i))  # fmt: skip


@triton.jit
def put_slot_group(found, table, slots, slot, PLAN: tl.constexpr, TABLE: tl.constexpr, FIRST: tl.constexpr,
                   SIZE: tl.constexpr):  # fmt: skip
    """Store some of them."""
    x = of_rows(found, first_of(PLAN, TABLE) + FIRST, SIZE, TABLE == "peaks")
    column = FIRST + tl.arange(0, SIZE).to(tl.int64)
    tl.store(table + (column[None, :] * slots + slot[:, None]), x.to(table.dtype.element_ty))


@triton.jit
def put_sums(found, sums, PLAN: tl.constexpr):
    """Store what the program adds to the sums of the batch."""
    many: tl.constexpr = size(PLAN, "token_sums")
    for i in tl.static_range(group_count(many)):
        put_group(found, sums, first_of(PLAN, "token_sums") + group_first(many, i), group_first(many, i),
                  group_size(many, i), False)  # fmt: skip


@triton.jit
def put_maxima(found, maxima, PLAN: tl.constexpr):
    """Store the extrema of the program's tokens, without those that follow from others."""
    many: tl.constexpr = size(PLAN, "token_maxima") - PLAN.derived
    for i in tl.static_range(group_count(many)):
        put_group(found, maxima, first_of(PLAN, "token_maxima") + group_first(many, i), group_first(many, i),
                  group_size(many, i), True)  # fmt: skip


@triton.jit
def put_group(found, table, PLACE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr):
    """Store what stands from PLACE on into the columns from COLUMN on."""
    x = of_program(found, PLACE, SIZE, LARGEST)
    if LARGEST:
        x = unordered(x)
    column = COLUMN + tl.arange(0, SIZE).to(tl.int64)
    tl.store(table + (column * tl.num_programs(0) + tl.program_id(0)), x.to(tl.float64))


@triton.jit
def unordered(x):
    """The float of what may be a key."""
    if x.dtype == tl.int32 or x.dtype == tl.int64:
        return of_key(x)
    else:
        return x
