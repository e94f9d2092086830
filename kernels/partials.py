"""Partial results of programs: each program stores one entry a column, and the last program adds the entries up.

A table of partial results is [columns, programs] where programs pass over tokens; as these are many, other programs add
them up to parts first. Parts and what programs over sequences store are [rows, columns]. Entries are added by their
place and not by who came first, so a sum has the same bits from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .tables import Tables, at, has, kept_of, size
from .tokens import key_of, of_key, over_lanes

# ROWS: rows that the last program adds up at a time. GROUP: columns, LANES: token programs, that a part adds up at a
# time.
ROWS, GROUP, LANES = tl.constexpr(16), tl.constexpr(16), tl.constexpr(32)
# Above ROW_GROUP rows, the last program of each ROW_GROUP adds up its group first.
ROW_GROUP = tl.constexpr(64)


class Partials(NamedTuple):
    """The tables in which programs over sequences store what they add to the statistics, float64."""

    sums: tl.tensor  # [programs, sequence_sums]
    maxima: tl.tensor  # [programs, sequence_maxima]; a minimum is the maximum of what is negated


@triton.constexpr_function
def name_of(plan: Tables, table: str, i: int) -> str:
    """Name the i-th column of a table."""
    return getattr(plan, table)[i]


@triton.constexpr_function
def width_of(columns: int) -> int:
    """Round the number of columns up to what a shape can be."""
    return max(1, 1 << (columns - 1).bit_length())


@triton.constexpr_function
def groups_of_sums(plan: Tables) -> int:
    """Count the groups of columns of sums."""
    return -(-len(plan.token_sums) // GROUP.value)


@triton.constexpr_function
def groups(plan: Tables) -> int:
    """Count the groups of columns of sums and of maxima."""
    return groups_of_sums(plan) + -(-kept_of(plan, "token_maxima") // GROUP.value)


@triton.jit
def put(p_table, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x) -> None:
    """Store this program's entry of a column, a scalar, if the plan has the column."""
    if has(PLAN, TABLE, name):
        row = p_table + tl.program_id(0).to(tl.int64) * size(PLAN, TABLE)
        tl.store(row + at(PLAN, TABLE, name), x.to(p_table.dtype.element_ty))


@triton.jit
def add(p_sums, PLAN: tl.constexpr, name: tl.constexpr, x) -> None:
    """Add x up over the sequences of this program, [SEQUENCES]; x is 0 at those that do not count."""
    if has(PLAN, "sequence_sums", name):
        # A warp adds up int32 in one instruction, and int64 in two.
        kind: tl.constexpr = tl.int32 if x.dtype == tl.int1 else tl.int64 if x.dtype == tl.int64 else tl.float64
        put(p_sums, PLAN, "sequence_sums", name, over_lanes(x.to(kind)))


@triton.jit
def largest_key(key):
    """Find the largest of int64 keys by halves: each half takes a warp one instruction."""
    high, low = (key >> 32).to(tl.int32), key.to(tl.uint32)
    most = tl.max(high, 0)
    rest = tl.max(tl.where(high == most, low, tl.zeros_like(low)), 0)
    return (most.to(tl.int64) << 32) | rest.to(tl.int64)


@triton.jit
def put_extrema(p_maxima, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among) -> None:
    """Store the largest of -x and of x among some sequences of this program."""
    if has(PLAN, "sequence_maxima", low):
        least = of_key(largest_key(key_of(tl.where(among, -x, float("-inf")))))
        put(p_maxima, PLAN, "sequence_maxima", low, least)
    if has(PLAN, "sequence_maxima", high):
        most = of_key(largest_key(key_of(tl.where(among, x, float("-inf")))))
        put(p_maxima, PLAN, "sequence_maxima", high, most)


# --- parts: programs over tokens are many, so some programs add them up before the last one does ---


@triton.jit
def store_part(p_table, p_out, column, first, end, programs, COLUMNS: tl.constexpr, LARGEST: tl.constexpr) -> None:
    """Add some columns of a table [columns, programs] up over a range of programs, or take the largest."""
    nothing = float("-inf") if LARGEST else 0.0
    found = tl.full((GROUP, LANES), nothing, tl.float64)
    if LARGEST:
        found = key_of(found)
    for start in range(first, end, LANES):
        row = (start + tl.arange(0, LANES))[None, :]
        known = (column[:, None] < COLUMNS) & (row < end)
        place = column[:, None].to(tl.int64) * programs + row
        x = tl.load(p_table + place, mask=known, other=nothing)
        found = tl.maximum(found, key_of(x)) if LARGEST else found + x
    done = of_key(tl.max(found, 1)) if LARGEST else tl.sum(found, 1)
    tl.store(p_out + column, done, mask=column < COLUMNS)


@triton.jit
def add_up_part(k, p_sums, p_maxima, p_part_sums, p_part_maxima, programs, part, PLAN: tl.constexpr) -> None:
    """Add up GROUP columns of `part` programs over tokens: piece k of parts * groups."""
    number, group = k // groups(PLAN), k % groups(PLAN)
    first = number * part
    end = tl.minimum(first + part, programs)
    column = group * GROUP + tl.arange(0, GROUP)
    if group < groups_of_sums(PLAN):
        p_out = p_part_sums + number.to(tl.int64) * size(PLAN, "token_sums")
        store_part(p_sums, p_out, column, first, end, programs, size(PLAN, "token_sums"), False)
    else:
        p_out = p_part_maxima + number.to(tl.int64) * kept_of(PLAN, "token_maxima")
        column -= groups_of_sums(PLAN) * GROUP
        store_part(p_maxima, p_out, column, first, end, programs, kept_of(PLAN, "token_maxima"), True)


# --- rows: what the last program adds up, and of many rows neighbors before it ---


@triton.jit
def load_rows(p_table, start, rows, apart, nothing: tl.constexpr, COLUMNS: tl.constexpr):
    """Load some of `rows` rows of a table [rows, columns], each `apart` behind the one before: [ROWS, WIDTH]."""
    row = (start + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, width_of(COLUMNS))[None, :]
    place = row.to(tl.int64) * apart * COLUMNS + column
    return tl.load(p_table + place, mask=(row < rows) & (column < COLUMNS), other=nothing)


@triton.jit
def sum_of_rows(p_table, rows, apart, COLUMNS: tl.constexpr):
    """Add up all columns: [WIDTH]. A thread has its columns, and exchanges nothing."""
    found = load_rows(p_table, 0, rows, apart, 0.0, COLUMNS)
    for start in range(ROWS, rows, ROWS):
        found += load_rows(p_table, start, rows, apart, 0.0, COLUMNS)
    return tl.sum(found, 0)


@triton.jit
def largest_of_rows(p_table, rows, apart, COLUMNS: tl.constexpr):
    """Find the largest entry of every column: [WIDTH]; NaN if there is one."""
    found = key_of(load_rows(p_table, 0, rows, apart, float("-inf"), COLUMNS))
    for start in range(ROWS, rows, ROWS):
        found = tl.maximum(found, key_of(load_rows(p_table, start, rows, apart, float("-inf"), COLUMNS)))
    return of_key(tl.max(found, 0))


@triton.jit
def entry(found, column: tl.constexpr):
    """Return one column: a scalar."""
    return tl.sum(tl.where(tl.arange(0, found.shape[0]) == column, found, 0.0), 0)


@triton.jit
def put_all(p_out, found, COLUMNS: tl.constexpr) -> None:
    """Store the first of some columns side by side: all of them, as a rule."""
    column = tl.arange(0, found.shape[0])
    tl.store(p_out + column, found, mask=column < COLUMNS)


@triton.jit
def copy(p_source, p_out, many) -> None:
    """Copy so many numbers."""
    for first in range(0, many, LANES):
        place = first + tl.arange(0, LANES)
        tl.store(p_out + place, tl.load(p_source + place, mask=place < many), mask=place < many)


# --- who comes last ---


@triton.jit
def zero_counters(p_counters, many) -> None:
    """Zero so many counters."""
    for first in range(0, many, ROW_GROUP):
        place = first + tl.arange(0, ROW_GROUP)
        tl.store(p_counters + place, tl.zeros((ROW_GROUP,), tl.int32), mask=place < many)


@triton.jit
def reset(p_counter, rows) -> None:
    """Zero the counters of a call, in a launch before: one of all programs, and one of each group of rows."""
    tl.store(p_counter, 0)
    if rows > ROW_GROUP:
        zero_counters(p_counter + 1, rows // ROW_GROUP + 1)


@triton.jit
def count_in(p_counter):
    """Count a program in, and return how many came before, all of whose stores it sees from now on."""
    # One thread counts, and releases what all threads of the program have stored.
    tl.debug_barrier()
    return tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def add_up_neighbors(p_counter, out: Partials, program, rows, PLAN: tl.constexpr):
    """Add up the rows of a group in its last program. Return whether this program is that one."""
    first = program // ROW_GROUP * ROW_GROUP
    many = tl.minimum(rows - first, ROW_GROUP)
    last = count_in(p_counter + 1 + program // ROW_GROUP) == many - 1
    if last:
        p_sums = out.sums + first.to(tl.int64) * size(PLAN, "sequence_sums")
        found = sum_of_rows(p_sums, many, 1, size(PLAN, "sequence_sums"))
        # Some threads may still read what others are about to replace.
        tl.debug_barrier()
        put_all(p_sums, found, size(PLAN, "sequence_sums"))
        if size(PLAN, "sequence_maxima") > 0:
            p_maxima = out.maxima + first.to(tl.int64) * size(PLAN, "sequence_maxima")
            most = largest_of_rows(p_maxima, many, 1, size(PLAN, "sequence_maxima"))
            tl.debug_barrier()
            put_all(p_maxima, most, size(PLAN, "sequence_maxima"))
    return last


@triton.jit
def is_last(p_counter, out: Partials, program, rows, PLAN: tl.constexpr):
    """Count a program in and return whether it is the last, which sees whatever the others stored before.

    The programs before `rows` have stored a row each. Which program is last may differ from run to run, so results must
    not depend on it.
    """
    waiting, counts, last = tl.num_programs(0), program >= 0, program < 0
    if rows > ROW_GROUP:
        waiting += (rows + ROW_GROUP - 1) // ROW_GROUP - rows
        if program < rows:
            counts = add_up_neighbors(p_counter, out, program, rows, PLAN)
    if counts:
        last = count_in(p_counter) == waiting - 1
    return last


@triton.jit
def rows_left(rows) -> tuple[tl.tensor, tl.tensor]:
    """Return how many rows the last program adds up, and how far they lie apart."""
    grouped = rows > ROW_GROUP
    return tl.where(grouped, (rows + ROW_GROUP - 1) // ROW_GROUP, rows), tl.where(grouped, ROW_GROUP, 1)
