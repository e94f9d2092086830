"""Partial results of programs: each program stores one entry a column, later programs add the entries up.

A table of partial results is [columns, programs]. Its entries are added in a fixed order, so a sum has the same bits
from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.tokens import at, has, key_of, of_key


class Partials(NamedTuple):
    """The tables in which programs over sequences store what they add to the statistics, float64."""

    sums: tl.tensor  # [sequence_sums, programs]
    maxima: tl.tensor  # [sequence_maxima, programs]; a minimum is the maximum of what is negated


@triton.jit
def put(table: tl.tensor, PLAN: tl.constexpr, TABLE: tl.constexpr, name: tl.constexpr, x: tl.tensor) -> None:
    """Store this program's entry of a column, a scalar, if the plan has the column."""
    if has(PLAN, TABLE, name):
        # Hundreds of columns of millions of programs do not fit into int32.
        column = tl.num_programs(0).to(tl.int64) * at(PLAN, TABLE, name)
        tl.store(table + (column + tl.program_id(0)), x.to(table.dtype.element_ty))


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
def add_up(table: tl.tensor, column: tl.tensor, programs: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """Add up a column over all programs."""
    entries = table + tl.cast(programs, tl.int64) * column
    found = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, programs, CHUNK):
        each = start + tl.arange(0, CHUNK)
        found += tl.load(entries + each, mask=each < programs, other=0.0)
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
