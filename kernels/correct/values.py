"""The values of sequences for which the batch decides a bound, from the slots that `read` has left."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.count import count_of, searched
from rollout_corr.kernels.correct.measures import Rows, weigh_sequences
from rollout_corr.kernels.correct.verdicts import (
    among_of,
    class_count,
    rows_of,
    selected_units,
    value_of,
)
from rollout_corr.kernels.gather import Gathered, gathered, integer, slot_tables, slots_of
from rollout_corr.kernels.slots import Extents
from rollout_corr.kernels.tokens import named, size, test, thresholds


@triton.jit
def value_of_sequences(
    found: Gathered, rows: Rows, advantage: tl.tensor, keep: tl.tensor, numbers: tl.tuple, SEARCHED: tl.constexpr,
    PLAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Compute what a bound is for, and which sequences decide it. keep: those that token criteria have kept."""
    if SEARCHED.of_weight:
        return weigh_sequences(found, rows, numbers, PLAN).log_ratio, rows.n_among > 0
    else:
        TEST: tl.constexpr = test(PLAN, SEARCHED.index)
        among = among_of(found, rows, keep, TEST.pair, PLAN)
        value, _ = value_of(found, among, numbers, TEST, PLAN)
        chosen = among > 0
        if TEST.thins:
            held = rows.n
            if TEST.when != "any":
                held = class_count(found, PLAN, TEST)
            chosen = chosen & (held > 0)
        elif TEST.when != "any":
            chosen = chosen & selected_units(found, advantage, PLAN, TEST)
        return value, chosen


@triton.jit(do_not_specialize=["tokens", "sequences", "width", "tiles", "tile_bits", "slots"])
def values_kernel(
    numbers, advantages, offsets, counts, integers, floats, peaks, values, chosen,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, SEARCHES: tl.constexpr,
):  # fmt: skip
    """Store the values of SHAPE.sequences sequences, and which of them decide: [searches, S] each."""
    numbers = thresholds(numbers, PLAN)
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first, many = slots_of(offsets, owner, extents, PLAN)
    known = (sequence >= 0) & (sequence < sequences)
    found = gathered(slot_tables(counts, integers, floats, peaks), first, many, slots, PLAN, SHAPE)
    valid, nonfinite = integer(found, PLAN, "valid"), integer(found, PLAN, "nonfinite")
    if PLAN.packed:
        valid = tl.where(known, tl.maximum(valid, 0), 0)
    keep = known
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token" and test(PLAN, i).drop == "sequence":
            keep = keep & (integer(found, PLAN, named(i, "lost")) == 0)
    rows = rows_of(found, valid, nonfinite, keep, PLAN)
    advantage = rows.sum_d
    if PLAN.advantages == "sequence":
        advantage = tl.load(advantages + sequence, mask=known).to(tl.float64)
    for k in tl.static_range(count_of(SEARCHES)):
        value, decides = value_of_sequences(found, rows, advantage, keep, numbers, searched(SEARCHES, k), PLAN)
        tl.store(values + sequences * k + sequence, value, mask=known)
        tl.store(chosen + sequences * k + sequence, decides.to(tl.int8), mask=known)
