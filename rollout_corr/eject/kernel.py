"""Rollout correction in two Triton launches: weights of tokens, rejection of sequences, and the sums of ten metrics.

D = train_logp - rollout_logp is the log-ratio of a token, exp(D) its importance weight. A sequence is kept if the
geometric mean of its ratios, exp(mean D), lies within bounds, if no token's ratio lies outside the veto's, and
if no D is NaN or infinite. Read from top to bottom: two kernels, what launches them, a reference in plain torch. They
need torch, and Triton 3.5 or newer.

A *tile* is a stretch of BT tokens, whatever sequences lie there; a *slot* is the part of one sequence in one tile.
Three sequences of 5, 14 and 13 tokens, with tiles of 8:

    token      0       8       16      24      32
    tile       |  t=0  |  t=1  |  t=2  |  t=3  |     a program of read_kernel, one warp
    sequence   |s=0 |     s=1     |    s=2     |     a lane of decide_kernel
    slot       | 0 |1 |   2   | 3 | 4  |   5   |     slot = s + t

From a slot to the next either s or t grows by one, so no two slots share a number, and there are fewer than sequences
and tiles together. Nothing has to be counted before the launch, and the host waits for nothing.

Why two launches: the first token of a sequence may be rejected for what another program finds at its end, a million
tokens further on. read_kernel loads every token once, writes weight and mask as if all sequences were kept, and leaves
the sums of each slot. decide_kernel adds up the slots of each sequence, decides, and zeroes the mask of those that it
rejects, which are few. Only the order of the launches hands anything over; there are no atomics.

What decides is a sum of integers: counts, and D in units of 2^-28, saturated at +-1024. So neither the order of
programs nor tiles nor neighbors in the batch change a bit of weights, mask and keep. Metrics are sums of floats in a
fixed order.

Names: p_ pointers, o_ offsets, m_ masks, b_ blocks of values, i_ the number of a program; what has no prefix is a
scalar. Shapes: N tokens, S sequences, or B rows of T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """Bounds of ratios exp(D), inclusive; None leaves a side open."""

    lower: float | None = None  # of the weight of a token
    upper: float | None = 2.0
    outside: str = "clamp"  # "clamp" | "zero": what a weight outside of its bounds becomes
    clamp: float = 20.0  # |D| is clamped to this before exp
    geometric_lower: float | None = None  # of exp(mean D) of a sequence that is kept
    geometric_upper: float | None = None
    veto_lower: float | None = None  # of each token of a sequence that is kept
    veto_upper: float | None = None


# The units in which D is added up, and the largest |D| there: 2^25 tokens of it fit into int64.
UNITS, MOST = tl.constexpr(2.0**28), tl.constexpr(2.0**10)
# A step along a tile is [BR, BV] tokens: BV neighbors, 16 bytes of fp32, belong to one of the BR threads of a warp.
BR, BV = tl.constexpr(32), tl.constexpr(4)
# decide_kernel zeroes so many tokens at a time.
BZ = tl.constexpr(512)

# --- where sequences lie ---


@triton.jit
def edge(
    p_cu: tl.tensor | None, o_s: tl.tensor, tokens: tl.tensor, sequences: tl.tensor, width: tl.tensor
) -> tl.tensor:
    """Find where sequences begin: int64. Wrong offsets are clamped, so that they cannot lead out of the batch."""
    o_s = tl.minimum(o_s, sequences)
    if p_cu is None:
        return o_s * width
    else:
        return tl.minimum(tl.maximum(tl.load(p_cu + o_s).to(tl.int64), 0), tokens)


@triton.jit
def sequence_at(
    p_cu: tl.tensor | None, token: tl.tensor, tokens: tl.tensor, sequences: tl.tensor, width: tl.tensor
) -> tl.tensor:
    """Find the last sequence that begins at a token or before it; before all of them it is the first.

    A round of the search looks at 32 sequences at once, because the latency of its loads is what takes time.
    """
    if p_cu is None:
        return token // tl.maximum(width, 1)
    else:
        s, span = token * 0, sequences
        while span > 1:
            apart = tl.cdiv(span, 32)
            o_s = s + tl.arange(0, 32) * apart
            m_begun = (o_s < s + span) & (edge(p_cu, o_s, tokens, sequences, width) <= token)
            s += tl.maximum(tl.sum(m_begun.to(tl.int32), 0) - 1, 0) * apart
            span = tl.minimum(apart, sequences - s)
        return s


@triton.jit
def in_tile(x: tl.tensor, most: tl.constexpr) -> tl.tensor:
    """Clamp a distance from the first token of a tile to [0, most]."""
    return tl.minimum(tl.maximum(x, 0), most).to(tl.int32)


@triton.constexpr_function
def log_of(bound: float, up: bool, bits: int) -> float:
    """Take the log of a bound, rounded up or down to so many bits: to compare with it is to compare with the log."""
    if bound <= 0.0:
        return -math.inf
    scale = 2.0 ** (bits - math.frexp(math.log(bound))[1])
    return (math.ceil if up else math.floor)(math.log(bound) * scale) / scale


# --- the first launch: tokens ---


@triton.jit
def load(p: tl.tensor, m_in: tl.tensor, whole: tl.tensor) -> tl.tensor:
    """Load a step. With a mask each token is a load of its own, so a step that lies whole in sequences has none."""
    if whole:
        b = tl.load(p)
    else:
        b = tl.load(p, mask=m_in, other=0)
    return b


@triton.jit
def store(p: tl.tensor, b: tl.tensor, m_in: tl.tensor, whole: tl.tensor) -> None:
    """Store a step."""
    if whole:
        tl.store(p, b)
    else:
        tl.store(p, b, mask=m_in)


@triton.jit
def put_slot(p_slot: tl.tensor, slots: tl.tensor, b_units: tl.tensor, b_counts: tl.tensor) -> None:
    """Store the sums of a slot: of D, and of the three counts that a thread has in 10 bits each."""
    tl.store(p_slot, tl.sum(b_units, 0))
    tl.store(p_slot + slots, tl.sum(b_counts & 1023, 0).to(tl.int64))
    tl.store(p_slot + slots * 2, tl.sum((b_counts >> 10) & 1023, 0).to(tl.int64))
    tl.store(p_slot + slots * 3, tl.sum(b_counts >> 20, 0).to(tl.int64))


# Sizes of a batch, which a kernel is not compiled for.
SIZES = ["tokens", "sequences", "width", "slots", "train_gap", "rollout_gap", "mask_gap", "shares"]


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    p_train: tl.tensor,  # [N] or [B, T] fp32, bf16 or fp16
    p_rollout: tl.tensor,
    p_mask: tl.tensor | None,  # like them, integers or floats; None: all are valid
    p_cu: tl.tensor | None,  # [S + 1] int32 or int64; None: the rows are the sequences
    p_weights: tl.tensor,  # out, [N] fp32
    p_mask_out: tl.tensor,  # out, [N], dtype of the mask
    p_slots: tl.tensor,  # out, [4, slots] int64: sum of D; valid, non-finite, vetoed tokens
    p_sums: tl.tensor,  # out, [tiles, 7] fp64
    tokens: tl.int64, sequences: tl.int64, width: tl.int32, slots: tl.int64,
    train_gap: tl.int64, rollout_gap: tl.int64, mask_gap: tl.int64,  # from the end of a row to the next
    GAPS: tl.constexpr, BT: tl.constexpr,  # whether any gap is not 0; tokens of a tile
    LOWER: tl.constexpr,
    UPPER: tl.constexpr,
    OUTSIDE: tl.constexpr,
    CLAMP: tl.constexpr,
    VETO_LOWER: tl.constexpr,
    VETO_UPPER: tl.constexpr,
) -> None:  # fmt: skip
    """Weigh the tokens of a tile, and add up what belongs to each of its sequences."""
    i_t = tl.program_id(0).to(tl.int64)
    first = i_t * BT
    # From here on tokens are numbered from the first of the tile. Sequences have those from low to high.
    low = in_tile(edge(p_cu, i_t * 0, tokens, sequences, width) - first, BT)
    high = in_tile(edge(p_cu, i_t * 0 + sequences, tokens, sequences, width) - first, BT)
    size = in_tile(tokens - first, BT)
    # The sequence that the walk along the tile has come to. One that goes on behind the tile ends at BT + 1.
    s = sequence_at(p_cu, first, tokens, sequences, width)
    start = size * 0
    end = in_tile(edge(p_cu, s + 1, tokens, sequences, width) - first, BT + 1)

    b_units, b_counts = tl.zeros((BR,), tl.int64), tl.zeros((BR,), tl.int32)
    b_none = tl.zeros((BR,), tl.float32)
    b_sums, b_largest = (b_none, b_none, b_none, b_none, b_none, b_none), b_none
    for o_step in range(0, BT, BR * BV):
        o_t = o_step + (tl.arange(0, BR)[:, None] * BV + tl.arange(0, BV)[None, :])  # [BR, BV], as all that follows
        m_in = (o_t >= low) & (o_t < high)
        whole = (o_step >= low) & (o_step + BR * BV <= high)
        p_t, p_r = p_train + first + o_t, p_rollout + first + o_t
        if GAPS:
            row = first // width
            b_row = row + ((first - row * width).to(tl.int32) + o_t) // width
            p_t, p_r = p_t + b_row * train_gap, p_r + b_row * rollout_gap
        b_train, b_rollout = load(p_t, m_in, whole), load(p_r, m_in, whole)
        b_mask = m_in.to(tl.int8)
        if p_mask is not None:
            p_m = p_mask + first + o_t
            if GAPS:
                p_m += b_row * mask_gap
            b_mask = load(p_m, m_in, whole)

        # What does not count is replaced and not multiplied, because NaN times 0 is NaN.
        m_valid = b_mask != 0
        b_d = b_train.to(tl.float32) - b_rollout.to(tl.float32)
        m_finite = m_valid & (tl.abs(b_d) < float("inf"))
        b_d = tl.where(m_finite, b_d, 0.0)
        b_x = tl.minimum(tl.maximum(b_d, -CLAMP), CLAMP)
        b_exp = tl.exp(b_x)
        b_w = b_exp
        if OUTSIDE == "clamp":
            if LOWER is not None:
                b_w = tl.maximum(b_w, LOWER)
            if UPPER is not None:
                b_w = tl.minimum(b_w, UPPER)
        if OUTSIDE == "zero":
            # Logs are compared, since the last bits of exp differ between devices.
            if LOWER is not None:
                b_w = tl.where(b_x >= log_of(LOWER, True, 24), b_w, 0.0)
            if UPPER is not None:
                b_w = tl.where(b_x <= log_of(UPPER, False, 24), b_w, 0.0)
        b_w = tl.where(m_finite, b_w, 0.0)
        store(p_weights + first + o_t, b_w, o_t < size, whole)
        store(p_mask_out + first + o_t, b_mask, o_t < size, whole)

        # What decides. A thread has at most 64 tokens of a tile, so three counts of it fit into an int32.
        b_sat = tl.minimum(tl.maximum(b_d, -MOST), MOST)
        b_unit = (b_sat * UNITS + tl.where(b_d < 0.0, -0.5, 0.5)).to(tl.int64)
        b_count = tl.where(m_finite, 1, tl.where(m_valid, (1 << 10) + 1, 0))
        if VETO_LOWER is not None:
            b_count += tl.where(m_finite & (b_d < log_of(VETO_LOWER, True, 24)), 1 << 20, 0)
        if VETO_UPPER is not None:
            b_count += tl.where(m_finite & (b_d > log_of(VETO_UPPER, False, 24)), 1 << 20, 0)
        while (s + 1 < sequences) & (end <= o_step + BR * BV):
            # The sequence ends in this step.
            m_s = (o_t >= start) & (o_t < end)
            b_units += tl.sum(tl.where(m_s, b_unit, 0), 1)
            b_counts += tl.sum(tl.where(m_s, b_count, 0), 1)
            put_slot(p_slots + (s + i_t), slots, b_units, b_counts)
            b_units, b_counts = tl.zeros((BR,), tl.int64), tl.zeros((BR,), tl.int32)
            s += 1
            start = end
            end = tl.maximum(in_tile(edge(p_cu, s + 1, tokens, sequences, width) - first, BT + 1), start)
        b_units += tl.sum(tl.where(o_t >= start, b_unit, 0), 1)
        b_counts += tl.sum(tl.where(o_t >= start, b_count, 0), 1)

        # e^D - 1 - D cancels where D is small, so there it is a polynomial; e^D - 1 follows from it.
        b_k3 = 1 / 24 + b_x * (1 / 120 + b_x * (1 / 720 + b_x * (1 / 5040 + b_x * (1 / 40320))))
        b_k3 = b_x * b_x * (1 / 2 + b_x * (1 / 6 + b_x * b_k3))
        b_k3 = tl.where(tl.abs(b_x) <= 0.5, b_k3, b_exp - 1.0 - b_x)
        b_ratio = b_x + b_k3
        b_sums = (
            b_sums[0] + tl.sum(tl.abs(b_sat), 1),
            b_sums[1] + tl.sum(b_k3, 1),
            b_sums[2] + tl.sum(b_ratio, 1),
            b_sums[3] + tl.sum(b_ratio * b_ratio, 1),
            b_sums[4] + tl.sum(b_w, 1),
            b_sums[5] + tl.sum(b_w * b_w, 1),
        )
        b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_d), 1))
    put_slot(p_slots + (s + i_t), slots, b_units, b_counts)
    for i in tl.static_range(6):
        tl.store(p_sums + i_t * 7 + i, tl.sum(b_sums[i], 0).to(tl.float64))
    tl.store(p_sums + i_t * 7 + 6, tl.max(b_largest, 0).to(tl.float64))


# --- the second launch: sequences ---


@triton.jit(do_not_specialize=SIZES)
def decide_kernel(
    p_cu: tl.tensor | None,  # [S + 1] int32 or int64; None: the rows are the sequences
    p_slots: tl.tensor,  # [4, slots] int64
    p_weights: tl.tensor,  # [N] fp32, zeroed in sequences with a D that is not finite
    p_mask_out: tl.tensor,  # [N], zeroed in sequences that are rejected
    p_keep: tl.tensor,  # out, [S] bytes
    p_sums: tl.tensor,  # out, [programs / shares, 7] fp64
    tokens: tl.int64, sequences: tl.int64, width: tl.int32, slots: tl.int64,
    shares: tl.int32,  # programs that decide about the same sequences, each to zero a share of their tokens
    BT: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    GEOMETRIC_LOWER: tl.constexpr,
    GEOMETRIC_UPPER: tl.constexpr,
) -> None:  # fmt: skip
    """Decide about BS sequences, BC slots of each at a time, and zero the tokens of those that are rejected."""
    i_s, i_share = tl.program_id(0).to(tl.int64) // shares, tl.program_id(0) % shares
    o_s = i_s * BS + tl.arange(0, BS)  # [BS], as all that follows
    b_begin = edge(p_cu, o_s, tokens, sequences, width)
    b_end = tl.maximum(edge(p_cu, o_s + 1, tokens, sequences, width), b_begin)
    b_first = b_begin // BT + o_s
    b_last = tl.where(b_end > b_begin, (b_end - 1) // BT + o_s, b_first - 1)

    b_units = tl.zeros((BS, BC), tl.int64)
    b_valid, b_bad, b_vetoed = b_units, b_units, b_units
    for o_c in range(0, tl.max(b_last - b_first, 0) + 1, BC):
        o_slot = b_first[:, None] + (o_c + tl.arange(0, BC)[None, :])
        m_slot = o_slot <= b_last[:, None]
        b_units += tl.load(p_slots + o_slot, mask=m_slot, other=0)
        b_valid += tl.load(p_slots + slots + o_slot, mask=m_slot, other=0)
        b_bad += tl.load(p_slots + slots * 2 + o_slot, mask=m_slot, other=0)
        b_vetoed += tl.load(p_slots + slots * 3 + o_slot, mask=m_slot, other=0)
    b_units, b_valid, b_bad, b_vetoed = tl.sum(b_units, 1), tl.sum(b_valid, 1), tl.sum(b_bad, 1), tl.sum(b_vetoed, 1)

    b_n = b_valid - b_bad
    b_mean = b_units.to(tl.float64) * (1 / UNITS) / tl.maximum(b_n, 1).to(tl.float64)
    m_keep = (b_bad == 0) & (b_vetoed == 0)
    if GEOMETRIC_LOWER is not None:
        # A block of fp64, because a number would become one of fp32; so below.
        b_low = tl.full((BS,), log_of(GEOMETRIC_LOWER, True, 53), tl.float64)
        m_keep &= (b_mean >= b_low) | (b_n == 0)
    if GEOMETRIC_UPPER is not None:
        b_high = tl.full((BS,), log_of(GEOMETRIC_UPPER, False, 53), tl.float64)
        m_keep &= (b_mean <= b_high) | (b_n == 0)
    if i_share == 0:
        tl.store(p_keep + o_s, m_keep.to(tl.uint8), mask=o_s < sequences)
        m_filled = b_valid > 0
        b_sums = (b_valid, b_bad, tl.where(m_keep, b_valid, 0), m_filled, m_keep & m_filled, b_n > 0, -b_mean)
        for i in tl.static_range(7):
            tl.store(p_sums + i_s * 7 + i, tl.sum(b_sums[i].to(tl.float64), 0))

    # One rejected sequence after the other, by its place; BS is none.
    o_i = tl.arange(0, BS)
    b_rejected = tl.where(m_keep, BS, o_i)
    i = tl.min(b_rejected, 0)
    while i < BS:
        begin, end = tl.sum(tl.where(o_i == i, b_begin, 0), 0), tl.sum(tl.where(o_i == i, b_end, 0), 0)
        bad = tl.sum(tl.where(o_i == i, b_bad, 0), 0)
        for block in range(begin // BZ + i_share, tl.cdiv(end, BZ), shares):
            o_t = block * BZ + tl.arange(0, BZ)
            m_t = (o_t >= begin) & (o_t < end)
            tl.store(p_mask_out + o_t, tl.zeros((BZ,), p_mask_out.dtype.element_ty), mask=m_t)
            if bad > 0:
                tl.store(p_weights + o_t, tl.zeros((BZ,), tl.float32), mask=m_t)
        i = tl.min(tl.where(o_i > i, b_rejected, BS), 0)


# --- launcher ---


class Correction(NamedTuple):
    """What comes of a batch."""

    weights: Tensor  # fp32, shaped like train_logp; 0 where nothing counts
    mask: Tensor  # what trains: shape and dtype of the mask given, bool without one
    keep: Tensor  # [S] bool
    of_tiles: Tensor  # [tiles, 7] fp64: sums of tokens, and in the last column the largest |D|
    of_sequences: Tensor  # [programs, 7] fp64: counts of tokens and sequences, and the sum of -mean D

    def metrics(self) -> dict[str, float]:
        """Add up the rows of sums, and copy their totals to the host: the one wait for the device."""
        sums = [self.of_tiles[:, :6].sum(0), self.of_tiles[:, 6:].amax(0), self.of_sequences.sum(0)]
        abs_d, k3, ratio, ratio2, w, w2, largest, *counts, gap = torch.cat(sums).tolist()
        tokens, bad, kept, sequences, sequences_kept, sequences_measured = counts
        n = tokens - bad

        def over(x: float, n: float) -> float:
            return x / n if n else 0.0

        return {
            "kl_rollout_train_k3": over(k3, n),
            "ratio_mean": over(n + ratio, n),
            "logratio_abs_max": largest,
            "logratio_abs_mean": over(abs_d, n),
            "chi2_train_rollout": over(ratio2 + 2.0 * ratio, n),
            "sequence_log_ppl_diff_mean": over(gap, sequences_measured),
            "tokens_kept_fraction": over(kept, tokens),
            "sequences_kept_fraction": over(sequences_kept, sequences),
            "weight_ess": over(w * w, n * w2),
            "tokens_nonfinite": bad,
        }


def check(train_logp: Tensor, rollout_logp: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuse what the kernels would read wrongly, by metadata alone."""
    shape, packed = tuple(train_logp.shape), cu_seqlens is not None
    for name, x in (("rollout_logp", rollout_logp), ("mask", mask)):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected the shape of train_logp, {shape}, got {tuple(x.shape)}")
        if x is not None and x.device != train_logp.device:
            raise ValueError(f"{name}: expected a tensor on {train_logp.device}, got one on {x.device}")
    for name, x in (("train_logp", train_logp), ("rollout_logp", rollout_logp)):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: expected float32, bfloat16 or float16, got {x.dtype}")
    if len(shape) != 2 - packed and shape[:-1] != (1,):
        raise ValueError(f"train_logp: expected [B, T], or [N] or [1, N] with cu_seqlens, got {shape}")
    if cu_seqlens is not None:
        many, kind = tuple(cu_seqlens.shape), cu_seqlens.dtype
        if len(many) != 1 or many == (0,) or kind not in (torch.int32, torch.int64):
            raise ValueError(f"cu_seqlens: expected [S + 1] int32 or int64, got {many} {kind}")


def rows_of(x: Tensor) -> Tensor:
    """View a tensor as rows in which neighbors lie side by side; one that has them apart is copied."""
    x = x.detach()
    x = x.view(torch.uint8) if x.dtype == torch.bool else x  # a byte of 2 is valid too
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def correct(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    settings: Settings = Settings(),
) -> Correction:
    """Correct a batch in two launches. No input is changed.

    Args:
        train_logp: [N], [1, N] or [B, T] fp32, bf16 or fp16: log-probs of the trainer. Rows may lie apart.
        rollout_logp: Shaped like it: log-probs of the engine that sampled the tokens.
        mask: Shaped like it, any dtype: a token is valid where this is not 0. None: all are.
        cu_seqlens: [S + 1] int32 or int64: where sequences begin and end in [N]. Tokens of none get weight 0 and mask
            0. None: every row of [B, T] is a sequence.
        settings: The bounds.
    """
    check(train_logp, rollout_logp, mask, cu_seqlens)
    shape, device, n = train_logp.shape, train_logp.device, train_logp.numel()
    train, rollout = rows_of(train_logp), rows_of(rollout_logp)
    valid = None if mask is None else rows_of(mask)
    if cu_seqlens is None:
        sequences, width = shape
    else:
        cu_seqlens = cu_seqlens.to(device, non_blocking=True).contiguous()
        sequences, width = len(cu_seqlens) - 1, 0
    gaps = [x.stride(0) - width if x is not None and n > width > 0 else 0 for x in (train, rollout, valid)]

    # A program takes the steps of its tile one after the other, so in a small batch tiles are shorter.
    tile = 2048 if n >= 1 << 22 else 512
    tiles = max(1, triton.cdiv(n, tile))
    # A program of decide_kernel has 128 slots at a time, of one long sequence or of 32. Others help it to zero tokens.
    at_once = 1 if n >= 8 * tile * sequences else 32
    programs = max(1, triton.cdiv(sequences, at_once))
    shares = max(1, min(64, n // programs // 32768))

    weights = torch.empty(shape, dtype=torch.float32, device=device)
    mask_out = torch.empty(shape, dtype=torch.bool if mask is None else mask.dtype, device=device)
    keep = torch.empty(sequences, dtype=torch.bool, device=device)
    slots = torch.empty((4, tiles + sequences), dtype=torch.int64, device=device)
    of_tiles = torch.empty((tiles, 7), dtype=torch.float64, device=device)
    of_sequences = torch.empty((programs, 7), dtype=torch.float64, device=device)
    sizes = n, sequences, width, slots.shape[1]
    with torch.cuda.device_of(train):
        read_kernel[(tiles,)](
            *(train, rollout, valid, cu_seqlens, weights, rows_of(mask_out), slots, of_tiles, *sizes, *gaps),
            GAPS=any(gaps),
            BT=tile,
            LOWER=settings.lower,
            UPPER=settings.upper,
            OUTSIDE=settings.outside,
            CLAMP=settings.clamp,
            VETO_LOWER=settings.veto_lower,
            VETO_UPPER=settings.veto_upper,
            num_warps=1,
        )
        decide_kernel[(programs * shares,)](
            *(cu_seqlens, slots, weights, rows_of(mask_out), rows_of(keep), of_sequences, *sizes, shares),
            BT=tile,
            BS=at_once,
            BC=128 // at_once,
            GEOMETRIC_LOWER=settings.geometric_lower,
            GEOMETRIC_UPPER=settings.geometric_upper,
            num_warps=1,
        )
    return Correction(weights, mask_out, keep, of_tiles, of_sequences)


# --- reference ---


def correct_reference(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    settings: Settings = Settings(),
) -> Correction:
    """Correct a batch in plain torch, on any device: arguments and results are those of `correct`."""
    check(train_logp, rollout_logp, mask, cu_seqlens)
    d = (train_logp.detach().float() - rollout_logp.detach().float()).flatten()
    place = torch.arange(d.numel(), device=d.device)
    if cu_seqlens is None:
        sequences, owner = train_logp.shape[0], place // max(1, train_logp.shape[1])
    else:
        sequences, edges = len(cu_seqlens) - 1, cu_seqlens.to(d.device).contiguous()
        owner = torch.searchsorted(edges, place, right=True) - 1
        owner = torch.where((owner < 0) | (owner >= sequences), sequences, owner)  # S: tokens that no sequence has
    flat = torch.ones_like(d, dtype=torch.bool) if mask is None else mask.flatten()
    valid = (owner < sequences) & (rows_of(flat) != 0)
    finite = valid & d.isfinite()
    d = torch.where(finite, d, 0.0)

    x = d.clamp(-settings.clamp, settings.clamp)
    weights = x.exp()
    if settings.outside == "clamp":
        if settings.lower is not None:
            weights = weights.clamp(min=settings.lower)
        if settings.upper is not None:
            weights = weights.clamp(max=settings.upper)
    if settings.outside == "zero":
        if settings.lower is not None:
            weights = torch.where(x >= log_of(settings.lower, True, 24), weights, 0.0)
        if settings.upper is not None:
            weights = torch.where(x <= log_of(settings.upper, False, 24), weights, 0.0)
    weights = torch.where(finite, weights, 0.0)

    def total(per_token: Tensor) -> Tensor:
        return place.new_zeros(sequences + 1).index_add_(0, owner, per_token.long())[:-1]

    near = d.clamp(-MOST.value, MOST.value)
    n, n_valid = total(finite), total(valid)
    mean = total(near * UNITS.value + 0.5 * near.sign()).double() / UNITS.value / n.clamp(min=1)
    clean = n == n_valid
    keep = clean.clone()
    if settings.veto_lower is not None:
        keep &= total(finite & (d < log_of(settings.veto_lower, True, 24))) == 0
    if settings.veto_upper is not None:
        keep &= total(finite & (d > log_of(settings.veto_upper, False, 24))) == 0
    if settings.geometric_lower is not None:
        keep &= (mean >= log_of(settings.geometric_lower, True, 53)) | (n == 0)
    if settings.geometric_upper is not None:
        keep &= (mean <= log_of(settings.geometric_upper, False, 53)) | (n == 0)

    def at_tokens(per_sequence: Tensor) -> Tensor:
        return torch.cat([per_sequence, per_sequence.new_zeros(1)])[owner]

    ratio, w = torch.expm1(x.double()), weights.double()
    sums = [each.double().sum() for each in (near.abs(), ratio - x, ratio, ratio**2, w, w**2)]
    largest = d.abs().amax() if d.numel() else d.sum()
    counts = n_valid, n_valid - n, keep * n_valid, n_valid > 0, keep & (n_valid > 0), n > 0, -mean
    return Correction(
        torch.where(at_tokens(clean), weights, 0.0).view(train_logp.shape),
        torch.where(valid & at_tokens(keep), flat, torch.zeros_like(flat)).view(train_logp.shape),
        keep,
        torch.stack([*sums, largest.double()])[None],
        torch.stack([each.double().sum() for each in counts])[None],
    )
