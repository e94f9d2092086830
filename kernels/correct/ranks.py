"""Sequences whose tokens lie on several ranks: sums by sequence for ranks to exchange.

`gather_kernel` adds up the slots of each sequence or turn. It is one launch: of `split_packed`, 4,096 tokens a
sequence, it executes 0.05 PTX instructions a token and reads 0.02 bytes, by `ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.gather import gathered, slot_tables, slots_of
from rollout_corr.kernels.slots import Extents


@triton.jit
def put_columns(out: tl.tensor, columns: tl.tuple, owner: tl.tensor, owners: tl.tensor) -> None:
    """Write a gathered table to [columns, owners]."""
    for i in tl.static_range(len(columns)):
        tl.store(out + owners * i + owner, columns[i], mask=owner < owners)


@triton.jit(do_not_specialize=["tokens", "sequences", "tiles", "tile_bits", "slots", "unit_count"])
def gather_kernel(
    counts, integers, floats, peaks, counts_out, integers_out, floats_out, peaks_out, offsets,
    tokens: tl.int64, sequences: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    unit_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Write all tables by owner, [columns, unit_count]; the first and last owner of a packed batch are no sequence."""
    owner = tl.program_id(0).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    _, first, many = slots_of(offsets, owner, Extents(tokens, sequences, 0, tiles, tile_bits), PLAN)
    found = gathered(slot_tables(counts, integers, floats, peaks), first, many, slots, PLAN, SHAPE)
    put_columns(counts_out, found.counts, owner, unit_count)
    put_columns(integers_out, found.integers, owner, unit_count)
    put_columns(floats_out, found.floats, owner, unit_count)
    put_columns(peaks_out, found.peaks, owner, unit_count)
