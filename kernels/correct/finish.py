"""The statistics of a call from the partial results of programs, in the order of the vector that is handed out.

The launch of `decide` does this. What programs over tokens have left is complete when it begins, and is finished by
programs of its own, one a column. Its last program over sequences finishes what these have left.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.measures import BINS, COPIES, Ratio, weight_of
from rollout_corr.kernels.correct.peers import finish_call
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.partials import add_up, largest, largest_of_rows, sum_of_rows, width_of
from rollout_corr.kernels.slots import Extents
from rollout_corr.kernels.tokens import at, exponential, limited, number, real, size

# Bins that are added up at a time.
SOME_BINS = tl.constexpr(64)


class Results(NamedTuple):
    """The partial statistics of programs over tokens, and the vector of all finished ones; float64 but for the bins."""

    token_sums: tl.tensor  # [token_sums, token programs]
    token_maxima: tl.tensor  # [token_maxima - derived, token programs]
    histogram: tl.tensor  # [COPIES, BINS] int64
    statistics: tl.tensor  # [sums and maxima]


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
def derived_maximum(
    k: tl.tensor, token_maxima: tl.tensor, numbers: tl.tuple, programs: tl.tensor, PLAN: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the k-th extremum of token weights from those of D, even k from above: a weight grows with D.

    One that becomes 0 outside its bounds does not: of it only the raw ratio is derived.
    """
    side = k % 2
    column = at(PLAN, "token_maxima", "max_d") - PLAN.derived
    extremum = largest(token_maxima, column + side, programs, CHUNK).to(real(PLAN))
    none = extremum == float("-inf")
    if PLAN.nonfinite == "propagate":
        # An infinite D is the extremum of one side alone; where there is no token both are -inf.
        other = largest(token_maxima, column + (1 - side), programs, CHUNK)
        none = none & (other == float("-inf"))
    d = tl.where(side == 0, extremum, -extremum)
    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    _, raw, bounded, _ = weight_of(Ratio(log_ratio, e, excess, k3), numbers, PLAN)
    found = tl.where(k < 2, raw, bounded)
    return tl.where(none, extremum, tl.where(side == 0, found, -found))


@triton.jit
def finish_tokens(
    k: tl.tensor, results: Results, numbers: tl.tuple, programs: tl.tensor, PLAN: tl.constexpr, CHUNK: tl.constexpr
) -> None:  # fmt: skip
    """Finish the k-th of `Plan.finishers`: a sum of tokens, a maximum of tokens, or all bins."""
    sums: tl.constexpr = size(PLAN, "token_sums")
    maxima: tl.constexpr = size(PLAN, "token_maxima")
    row = k.to(tl.int64)
    if k < sums:
        tl.store(results.statistics + row, add_up(results.token_sums, row, programs, CHUNK))
    elif k < sums + maxima:
        out = results.statistics + place_of_table(PLAN, "token_maxima") + (row - sums)
        if k < sums + PLAN.derived:
            if PLAN.derived > 0:
                tl.store(out, derived_maximum(k - sums, results.token_maxima, numbers, programs, PLAN, CHUNK))
        else:
            tl.store(out, largest(results.token_maxima, row - sums - PLAN.derived, programs, CHUNK))
    else:
        for i in tl.static_range(some_bins(PLAN)):
            each = i * SOME_BINS + tl.arange(0, SOME_BINS)
            copies = tl.load(results.histogram + (tl.arange(0, COPIES) * BINS)[:, None] + each[None, :])
            tl.store(results.statistics + place_of_table(PLAN, "bins") + each, tl.sum(copies, 0).to(tl.float64))


@triton.jit
def finish_sequences(
    statistics: tl.tensor, sequence_sums: tl.tensor, sequence_maxima: tl.tensor, extents: Extents, programs: tl.tensor,
    PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Finish the statistics of sequences and of the call, in the last program over sequences."""
    totals = sum_of_rows(sequence_sums, programs, PLAN, "sequence_sums")
    column = tl.arange(0, width_of(PLAN, "sequence_sums"))
    out = statistics + place_of_table(PLAN, "sequence_sums")
    tl.store(out + column, totals, mask=column < size(PLAN, "sequence_sums"))
    column = tl.arange(0, width_of(PLAN, "sequence_maxima"))
    out = statistics + place_of_table(PLAN, "sequence_maxima")
    found = largest_of_rows(sequence_maxima, programs, PLAN, "sequence_maxima")
    tl.store(out + column, found, mask=column < size(PLAN, "sequence_maxima"))
    finish_call(statistics + place_of_table(PLAN, "call_sums"), statistics + place_of_table(PLAN, "call_maxima"),
                totals, extents.tokens, extents.sequences, PLAN)  # fmt: skip
