"""Partial results of programs: each program stores one entry a column, a later or the last program adds the entries up.

A table of partial results is [columns, programs] where programs pass over tokens, [programs, columns] where they pass
over sequences. Entries are added by their place and not by who came first, so a sum has the same bits from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Tables
from rollout_corr.kernels.tokens import at, has, key_of, of_key, size

# Rows that a program adds up at a time.
ROWS = tl.constexpr(16)


class Partials(NamedTuple):
    """The tables in which programs over sequences store what they add to the statistics, float64."""

    sums: tl.tensor  # [programs, sequence_sums]
    maxima: tl.tensor  # [programs, sequence_maxima]; a minimum is the maximum of what is negated


@triton.constexpr_function
def width_of(plan: Tables, table: str) -> int:
    """Round the number of columns up to what a shape can be."""
    return max(1, 1 << (len(getattr(plan, table)) - 1).bit_length())


@triton.jit
def put(table: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x: tl.tensor) -> None:
    """Store this program's entry of a column, a scalar, if the plan has the column."""
    if has(PLAN, TABLE, name):
        row = table + tl.program_id(0).to(tl.int64) * size(PLAN, TABLE)
        tl.store(row + at(PLAN, TABLE, name), x.to(table.dtype.element_ty))


@triton.jit
def add(sums: tl.tensor, PLAN: tl.constexpr, name: tl.constexpr, x: tl.tensor) -> None:
    """Add x up over the sequences of this program, [SEQUENCES]; x is 0 at those that do not count."""
    if has(PLAN, "sequence_sums", name):
        # A warp adds up int32 in one instruction.
        kind: tl.constexpr = tl.int32 if x.dtype == tl.int1 else tl.float64
        put(sums, PLAN, "sequence_sums", name, tl.sum(x.to(kind), 0))


@triton.jit
def put_extrema(
    maxima: tl.tensor, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x: tl.tensor, among: tl.tensor
) -> None:
    """Store the largest of -x and of x among some sequences of this program."""
    if has(PLAN, "sequence_maxima", low):
        least = of_key(tl.max(key_of(tl.where(among, -x, float("-inf"))), 0))
        put(maxima, PLAN, "sequence_maxima", low, least)
    if has(PLAN, "sequence_maxima", high):
        most = of_key(tl.max(key_of(tl.where(among, x, float("-inf"))), 0))
        put(maxima, PLAN, "sequence_maxima", high, most)


@triton.jit
def is_last(counter: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Count a program in and tell whether all others have been: the last one sees whatever they stored before.

    It is for it to go on with what needs them all, in an order of its own: which program is last may differ from run to
    run, so results must not depend on it.
    """
    # One thread counts, and releases what all threads of the program have stored.
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def load_rows(
    table: tl.tensor, start: tl.tensor, programs: tl.tensor, nothing: tl.constexpr, PLAN: tl.constexpr,
    TABLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load some rows of a table by sequence programs: [ROWS, WIDTH]."""
    row = (start + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, width_of(PLAN, TABLE))[None, :]
    known = (row < programs) & (column < size(PLAN, TABLE))
    return tl.load(table + row.to(tl.int64) * size(PLAN, TABLE) + column, mask=known, other=nothing)


@triton.jit
def sum_of_rows(table: tl.tensor, programs: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr) -> tl.tensor:
    """Add up all columns over the programs: [WIDTH]. A thread has its columns, and exchanges nothing."""
    found = load_rows(table, 0, programs, 0.0, PLAN, TABLE)
    for start in range(ROWS, programs, ROWS):
        found += load_rows(table, start, programs, 0.0, PLAN, TABLE)
    return tl.sum(found, 0)


@triton.jit
def largest_of_rows(table: tl.tensor, programs: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr) -> tl.tensor:
    """Find the largest entry of every column: [WIDTH]; NaN if there is one."""
    found = key_of(load_rows(table, 0, programs, float("-inf"), PLAN, TABLE))
    for start in range(ROWS, programs, ROWS):
        found = tl.maximum(found, key_of(load_rows(table, start, programs, float("-inf"), PLAN, TABLE)))
    return of_key(tl.max(found, 0))


@triton.jit
def add_up(table: tl.tensor, column: tl.tensor, programs: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Add up a column over all programs that pass over tokens."""
    return _sum_of(table + tl.cast(programs, tl.int64) * column, 1, programs, CHUNK)


@triton.jit
def add_up_rows(
    table: tl.tensor, column: tl.tensor, programs: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add up a column over all programs that pass over sequences."""
    return _sum_of(table + column, size(PLAN, TABLE), programs, CHUNK)


@triton.jit
def _sum_of(entries: tl.tensor, STEP: tl.constexpr, count: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    found = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, count, CHUNK):
        each = start + tl.arange(0, CHUNK)
        found += tl.load(entries + each.to(tl.int64) * STEP, mask=each < count, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def largest(table: tl.tensor, column: tl.tensor, programs: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Find the largest entry of a column; NaN if there is one."""
    entries = table + tl.cast(programs, tl.int64) * column
    found = key_of(tl.full((CHUNK,), float("-inf"), tl.float64))
    for start in range(0, programs, CHUNK):
        each = start + tl.arange(0, CHUNK)
        found = tl.maximum(found, key_of(tl.load(entries + each, mask=each < programs, other=float("-inf"))))
    return of_key(tl.max(found, 0))
