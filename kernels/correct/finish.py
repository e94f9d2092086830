"""The statistics of a call from the partial results of programs, in the order of the vector that is handed out."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.measures import BINS, COPIES, Ratio, weight_of
from rollout_corr.kernels.correct.peers import finish_call
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.partials import entry, kept_maxima, largest_of_rows, put_all, sum_of_rows
from rollout_corr.kernels.tiles import Extents
from rollout_corr.kernels.tokens import at, exponential, limited, number, real, size

# Bins that are added up at a time.
SOME_BINS = tl.constexpr(64)


class Leftover(NamedTuple):
    """The partial statistics, float64."""

    sequence_sums: tl.tensor  # [sequence programs, sequence_sums]
    sequence_maxima: tl.tensor  # [sequence programs, sequence_maxima]
    part_sums: tl.tensor  # [parts, token_sums]
    part_maxima: tl.tensor  # [parts, token_maxima - derived]


@triton.constexpr_function
def place_of_table(plan: Plan, table: str) -> int:
    """Find the first statistic of a table: sums of tokens, of sequences, bins, of the call; maxima in this order."""
    tables = ("token_sums", "sequence_sums", "bins", "call_sums", "token_maxima", "sequence_maxima", "call_maxima")
    many = [BINS.value * plan.full if name == "bins" else len(getattr(plan, name)) for name in tables]
    return sum(many[: tables.index(table)])


@triton.constexpr_function
def some_bins(plan: Plan) -> int:
    """Count the steps in which all bins are added up."""
    return BINS.value // SOME_BINS.value if plan.full else 0


@triton.jit
def derived_maximum(k: tl.constexpr, found: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr) -> tl.tensor:
    """Compute the k-th extremum of token weights of the batch from those of D, even k from above."""
    column: tl.constexpr = at(PLAN, "token_maxima", "max_d") - PLAN.derived
    return weight_at(k, entry(found, column + k % 2), entry(found, column + 1 - k % 2), numbers, PLAN)


@triton.jit
def weight_at(
    k: tl.constexpr, extremum: tl.tensor, other: tl.tensor, numbers: tl.tuple, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Compute an extremum of token weights from that of D on the same side: a weight grows with D.

    One that becomes 0 outside its bounds does not: of it only the ratio before them is derived.
    """
    extremum = extremum.to(real(PLAN))
    none = extremum == float("-inf")
    if PLAN.nonfinite == "propagate":
        # An infinite D is the extremum of one side alone; where there is no token both are -inf.
        none = none & (other == float("-inf"))
    d = -extremum if k % 2 else extremum
    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    _, ratio_m1, weight_m1, _ = weight_of(Ratio(log_ratio, e, excess, k3), numbers, PLAN)
    weight = ratio_m1 if k < 2 else weight_m1
    return tl.where(none, extremum, -weight if k % 2 else weight)


@triton.jit
def add_up_bins(histogram: tl.tensor, statistics: tl.tensor, PLAN: tl.constexpr) -> None:
    """Add up the copies of the histogram."""
    for i in tl.static_range(some_bins(PLAN)):
        each = i * SOME_BINS + tl.arange(0, SOME_BINS)
        copies = tl.load(histogram + (tl.arange(0, COPIES) * BINS)[:, None] + each[None, :])
        tl.store(statistics + place_of_table(PLAN, "bins") + each, tl.sum(copies, 0).to(tl.float64))


@triton.jit
def finish(
    statistics: tl.tensor, rows: Leftover, numbers: tl.tuple, extents: Extents, sequence_programs: tl.tensor,
    parts: tl.tensor, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the rows of all programs, in the last one."""
    totals = sum_of_rows(rows.sequence_sums, sequence_programs, size(PLAN, "sequence_sums"))
    put_all(statistics + place_of_table(PLAN, "sequence_sums"), totals, size(PLAN, "sequence_sums"))
    finish_call(statistics + place_of_table(PLAN, "call_sums"), statistics + place_of_table(PLAN, "call_maxima"),
                totals, extents.tokens, extents.sequences, PLAN)  # fmt: skip
    found = largest_of_rows(rows.sequence_maxima, sequence_programs, size(PLAN, "sequence_maxima"))
    put_all(statistics + place_of_table(PLAN, "sequence_maxima"), found, size(PLAN, "sequence_maxima"))
    found = sum_of_rows(rows.part_sums, parts, size(PLAN, "token_sums"))
    put_all(statistics + place_of_table(PLAN, "token_sums"), found, size(PLAN, "token_sums"))
    found = largest_of_rows(rows.part_maxima, parts, kept_maxima(PLAN))
    out = statistics + place_of_table(PLAN, "token_maxima")
    put_all(out + PLAN.derived, found, kept_maxima(PLAN))
    many: tl.constexpr = PLAN.derived
    for k in tl.static_range(many):
        tl.store(out + k, derived_maximum(k, found, numbers, PLAN))
