"""Accumulators of a pass over tokens: one for every column of the plan's tables, kept in registers to the end.

A tile is worked on in parts of [ROWS, LANES, VEC] tokens: VEC neighbours belong to one thread, LANES threads to a row.
Values of a part are summed over neighbours at once ([ROWS, LANES]) and added to the sums of earlier parts. Threads
exchange sums only at the end, for up to eight columns at a time.

`found` is the tuple of all accumulators in the order of `Tables.recorded`, with the histogram behind them.
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
    """Find the accumulator of a table's first column; anything for a table without columns."""
    return next((place for place, (kept, _) in enumerate(plan.recorded) if kept == table), -1)


@triton.constexpr_function
def place_of(plan: Tables, table: str, name: str) -> int:
    """Find the accumulator of a column."""
    return plan.recorded.index((table, name))


@triton.constexpr_function
def places(plan: Tables) -> int:
    """Count the accumulators, the histogram included."""
    return len(plan.recorded) + plan.full


@triton.constexpr_function
def is_extremum(plan: Tables, place: int) -> bool:
    """Test whether an accumulator keeps the largest and not the sum."""
    return place < len(plan.recorded) and plan.recorded[place][0] in ("peaks", "token_maxima")


@triton.constexpr_function
def group_sizes(many: int) -> tuple[int, ...]:
    """Divide so many columns into groups of 8, 4, 2 and 1, the powers of two that a join can make."""
    return (8,) * (many // 8) + tuple(size for size in (4, 2, 1) if many % 8 & size)


@triton.constexpr_function
def group_count(many: int) -> int:
    """Count the groups of so many columns."""
    return len(group_sizes(many))


@triton.constexpr_function
def group_first(many: int, i: int) -> int:
    """Find the first column of a group."""
    return sum(group_sizes(many)[:i])


@triton.constexpr_function
def group_size(many: int, i: int) -> int:
    """Count the columns of a group."""
    return group_sizes(many)[i]


# --- one part of a tile ---


@triton.jit
def nothing(PLAN: tl.constexpr) -> tl.tuple:
    """Fill all accumulators with placeholders; one that is never recorded fails to compile."""
    found = ()
    for _ in tl.static_range(places(PLAN)):
        found = found + (0,)
    return found


@triton.jit
def record(
    found: tl.tuple, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x: tl.tensor
) -> tl.tuple:  # fmt: skip
    """Put the sum of a part over neighbours, or the largest of them, into a column, if the plan has it."""
    if has(PLAN, TABLE, name):
        if TABLE == "peaks" or TABLE == "token_maxima":
            x = tl.max(x, 2)
        else:
            x = tl.sum(x, 2)
        found = found[: place_of(PLAN, TABLE, name)] + (x,) + found[place_of(PLAN, TABLE, name) + 1 :]
    return found


@triton.jit
def record_count(found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, which: tl.tensor) -> tl.tuple:
    """Count tokens of a slot."""
    return record(found, PLAN, "counts", name, which.to(tl.int32))


@triton.jit
def record_sum(
    found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x: tl.tensor, TAME: tl.constexpr
) -> tl.tuple:  # fmt: skip
    """Sum D or something bounded like it: saturated and exact on D's grid; plainly in float64."""
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
def record_statistic(found: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x: tl.tensor) -> tl.tuple:
    """Sum another statistic: saturated and exact in two limbs; plainly in float64."""
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
def record_extrema(
    found: tl.tuple, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x: tl.tensor, among: tl.tensor
) -> tl.tuple:
    """Keep the largest of -x and of x among some tokens; a NaN, where there may be one, is larger than anything."""
    if has(PLAN, "token_maxima", high):
        found = record(found, PLAN, "token_maxima", high, ordered(tl.where(among, x, float("-inf")), PLAN))
    if has(PLAN, "token_maxima", low):
        found = record(found, PLAN, "token_maxima", low, ordered(tl.where(among, -x, float("-inf")), PLAN))
    return found


@triton.jit
def ordered(x: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Encode x as a key if it can be NaN."""
    if PLAN.nonfinite == "propagate":
        return key_of(x)
    else:
        return x


@triton.jit
def to_grid(x: tl.tensor, grid: tl.constexpr) -> tl.tensor:
    """Round to a multiple of 1/grid, as int64."""
    return (x * grid + tl.where(x < 0.0, -0.5, 0.5).to(x.dtype)).to(tl.int64)


@triton.jit
def merged(found: tl.tuple, more: tl.tuple, PLAN: tl.constexpr) -> tl.tuple:
    """Merge the accumulators of two parts."""
    both = ()
    for place in tl.static_range(len(found)):
        if is_extremum(PLAN, place):
            both = both + (tl.maximum(found[place], more[place]),)
        else:
            both = both + (found[place] + more[place],)
    return both


# --- all parts ---


@triton.jit
def widest(found: tl.tuple, FIRST: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Promote some columns to their common dtype; the value is not used."""
    x = found[FIRST]
    for i in tl.static_range(1, SIZE):
        x = x + found[FIRST + i]
    return x


@triton.jit
def joined(found: tl.tuple, FIRST: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Join columns side by side in the order of their names: [ROWS, LANES, 1 or 2, ...]."""
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
def pair(found: tl.tuple, FIRST: tl.constexpr, STEP: tl.constexpr, kind: tl.constexpr) -> tl.tensor:
    """Join two columns."""
    return tl.join(found[FIRST].to(kind), found[FIRST + STEP].to(kind))


@triton.jit
def of_rows(found: tl.tuple, FIRST: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """Add columns up, or take the largest, over each row: [ROWS, SIZE]."""
    together = joined(found, FIRST, SIZE)
    together = tl.max(together, 1) if LARGEST else tl.sum(together, 1)
    return tl.reshape(together, [together.shape[0], SIZE])


@triton.jit
def of_program(found: tl.tuple, FIRST: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr) -> tl.tensor:
    """Add columns up, or take the largest, over a program, a thread's own rows first: [SIZE]."""
    together = joined(found, FIRST, SIZE)
    together = tl.reshape(together, [together.shape[0] * together.shape[1], SIZE])
    return tl.max(together, 0) if LARGEST else tl.sum(together, 0)


@triton.jit
def put_slots(
    found: tl.tuple, table: tl.tensor, slots: tl.tensor, slot: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr
) -> None:
    """Store the columns of a table of slots, [columns, slots]."""
    many: tl.constexpr = size(PLAN, TABLE)
    for i in tl.static_range(group_count(many)):
        put_slot_group(found, table, slots, slot, first_of(PLAN, TABLE) + group_first(many, i), group_first(many, i),
                       group_size(many, i), TABLE == "peaks")  # fmt: skip


@triton.jit
def put_slot_group(
    found: tl.tuple, table: tl.tensor, slots: tl.tensor, slot: tl.tensor,
    PLACE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr,
) -> None:  # fmt: skip
    """Store SIZE accumulators from PLACE on into the columns from COLUMN on."""
    x = of_rows(found, PLACE, SIZE, LARGEST)
    column = COLUMN + tl.arange(0, SIZE).to(tl.int64)
    tl.store(table + (column[None, :] * slots + slot[:, None]), x.to(table.dtype.element_ty))


@triton.jit
def put_sums(found: tl.tuple, table: tl.tensor, PLAN: tl.constexpr) -> None:
    """Store what the program adds to the sums of the batch, [columns, programs]."""
    put_groups(found, table, first_of(PLAN, "token_sums"), size(PLAN, "token_sums"), False)


@triton.jit
def put_maxima(found: tl.tuple, table: tl.tensor, PLAN: tl.constexpr) -> None:
    """Store the extrema of the program's tokens, [columns, programs], without those that follow from others."""
    put_groups(found, table, first_of(PLAN, "token_maxima"), size(PLAN, "token_maxima") - PLAN.derived, True)


@triton.jit
def put_groups(
    found: tl.tuple, table: tl.tensor, PLACE: tl.constexpr, MANY: tl.constexpr, LARGEST: tl.constexpr
) -> None:  # fmt: skip
    """Store MANY accumulators from PLACE on."""
    for i in tl.static_range(group_count(MANY)):
        put_group(found, table, PLACE + group_first(MANY, i), group_first(MANY, i), group_size(MANY, i), LARGEST)


@triton.jit
def put_group(
    found: tl.tuple, table: tl.tensor,
    PLACE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, LARGEST: tl.constexpr,
) -> None:  # fmt: skip
    """Store SIZE accumulators from PLACE on into the columns from COLUMN on."""
    x = of_program(found, PLACE, SIZE, LARGEST)
    if LARGEST:
        x = unordered(x)
    column = COLUMN + tl.arange(0, SIZE).to(tl.int64)
    tl.store(table + (column * tl.num_programs(0) + tl.program_id(0)), x.to(tl.float64))


@triton.jit
def unordered(x: tl.tensor) -> tl.tensor:
    """Decode what may be a key."""
    if x.dtype == tl.int32 or x.dtype == tl.int64:
        return of_key(x)
    else:
        return x
