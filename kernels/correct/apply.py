"""Phase 3 of 3: bring rejections and weights of sequences to their tokens, and finish the statistics.

`read` has written token weights and most of the mask. Unless weights are of sequences, only rejected sequences are
touched again.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import selected
from rollout_corr.kernels.correct.decide import REJECTED, WEIGHTLESS, thinning_bit
from rollout_corr.kernels.correct.measures import BINS, COPIES, Ratio, weight_of
from rollout_corr.kernels.correct.peers import finish_call
from rollout_corr.kernels.io import PerToken, addresses, contiguous, either, load_tokens, of_sequence, store_tokens
from rollout_corr.kernels.partials import add_up, largest
from rollout_corr.kernels.slots import Extents, Stretch, inside_of, is_full, positions, stretch_of
from rollout_corr.kernels.tokens import (
    at,
    exponential,
    is_finite,
    limited,
    number,
    over_kept_set,
    real,
    size,
    test,
    thresholds,
)


class Results(NamedTuple):
    """The partial statistics of all programs, and the vector of the finished ones; float64 but for the histogram."""

    token_sums: tl.tensor  # [token_sums, token programs]
    sequence_sums: tl.tensor  # [sequence_sums, sequence programs]
    histogram: tl.tensor  # [COPIES, BINS] int64
    token_maxima: tl.tensor  # [token_maxima - derived, token programs]
    sequence_maxima: tl.tensor  # [sequence_maxima, sequence programs]
    statistics: tl.tensor  # [sums and maxima]


class Inputs(NamedTuple):
    """The tensors of a call that `apply` needs to find tokens dropped by sequence criteria."""

    train: PerToken
    rollout: PerToken
    mask: PerToken
    mass: PerToken
    advantages: tl.tensor  # [N], [B, T] or [S]


# --- the statistics ---


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
def finish_statistic(
    k: tl.tensor, results: Results, numbers: tl.tensor, extents: Extents, token_programs: tl.tensor,
    sequence_programs: tl.tensor, PLAN: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Finish the k-th statistic: sums of tokens, of sequences, histogram, of the call; maxima in the same order.

    The first sum of the call finishes all that is the call's own, its maxima too.
    """
    of_sequences: tl.constexpr = size(PLAN, "token_sums")
    of_bins: tl.constexpr = of_sequences + size(PLAN, "sequence_sums")
    of_call: tl.constexpr = of_bins + (BINS if PLAN.full else 0)
    maxima: tl.constexpr = of_call + size(PLAN, "call_sums")
    last: tl.constexpr = maxima + size(PLAN, "token_maxima")
    row = k.to(tl.int64)
    out = results.statistics
    if k < of_sequences:
        tl.store(out + row, add_up(results.token_sums, row, token_programs, CHUNK))
    elif k < of_bins:
        tl.store(out + row, add_up(results.sequence_sums, row - of_sequences, sequence_programs, CHUNK))
    elif k < of_call:
        if PLAN.full:
            copies = tl.load(results.histogram + tl.arange(0, COPIES) * BINS + (row - of_bins))
            tl.store(out + row, tl.sum(copies, 0).to(tl.float64))
    elif k < maxima:
        if k == of_call:
            finish_call(out + of_call, out + (last + size(PLAN, "sequence_maxima")), results.sequence_sums,
                        extents.tokens, extents.sequences, sequence_programs, PLAN, CHUNK)  # fmt: skip
    elif k < maxima + PLAN.derived:
        if PLAN.derived > 0:
            loaded = thresholds(numbers, PLAN)
            tl.store(out + row, derived_maximum(k - maxima, results.token_maxima, loaded, token_programs, PLAN, CHUNK))
    elif k < last:
        tl.store(out + row, largest(results.token_maxima, row - maxima - PLAN.derived, token_programs, CHUNK))
    else:
        tl.store(out + row, largest(results.sequence_maxima, row - last, sequence_programs, CHUNK))


# --- the tokens ---


@triton.jit
def zero(pointers: tl.tensor, where: tl.tensor) -> None:
    """Store 0 at some tokens."""
    tl.store(pointers, tl.zeros(where.shape, pointers.dtype.element_ty), mask=where)


@triton.jit
def load_at(
    tensor: PerToken, stretch: Stretch, place: tl.tensor, interior: tl.tensor,
    PLAN: tl.constexpr, TILING: tl.constexpr, UNIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a tile of a per-token tensor."""
    return load_tokens(addresses(tensor, stretch, place, PLAN, TILING, UNIT), inside_of(stretch, place), interior)


@triton.jit
def thinned_tokens(
    inputs: Inputs, valid: tl.tensor, states: tl.tensor, stretch: Stretch, extents: Extents, place: tl.tensor,
    interior: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find the tokens that failed criteria of their sequence drop one by one; states are [ROWS, 1, 1]."""
    train = load_at(inputs.train, stretch, place, interior, PLAN, TILING, TILING.unit).to(real(PLAN))
    rollout = load_at(inputs.rollout, stretch, place, interior, PLAN, TILING, TILING.unit).to(real(PLAN))
    if PLAN.mass is not None:
        mass = load_at(inputs.mass, stretch, place, interior, PLAN, TILING, True)
        train, rollout = over_kept_set(train, rollout, mass, PLAN)
    d = train - rollout
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = valid & is_finite(d)
    elif PLAN.nonfinite == "neutral":
        d = tl.where(is_finite(d), d, 0.0)
    advantage = d
    if PLAN.advantages == "token":
        advantages = contiguous(inputs.advantages, extents)
        advantage = load_at(advantages, stretch, place, interior, PLAN, TILING, True).to(real(PLAN))
    elif PLAN.advantages == "sequence":
        advantage = of_sequence(inputs.advantages, stretch, extents, d)
    lost = inside_of(stretch, place) & (states < 0)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).thins:
            failed = (states & thinning_bit(PLAN, i)) != 0
            lost = lost | (failed & selected(d, advantage, measured, test(PLAN, i)))
    return lost


@triton.jit
def apply_to_tokens(
    inputs: Inputs, weights: tl.tensor, mask_out: tl.tensor, sequence_weights: tl.tensor, state: tl.tensor,
    stretch: Stretch, extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> None:  # fmt: skip
    """Write weights of sequences to their tokens, and zero weights and mask of what is rejected. state: [ROWS]."""
    place = positions(0, TILING.tile // TILING.vec, TILING.vec)
    inside = inside_of(stretch, place)
    interior = is_full(stretch, TILING.tile)
    thins: tl.constexpr = size(PLAN, "thinning_tests") > 0
    states = state[:, None, None]
    lost = inside & (states < 0)
    valid = inside
    if PLAN.masked and ((PLAN.spreads and not PLAN.marks) or thins):
        valid = load_at(inputs.mask, stretch, place, interior, PLAN, TILING, TILING.unit) != 0
    if thins:
        lost = thinned_tokens(inputs, valid, states, stretch, extents, place, interior, PLAN, TILING)
    if PLAN.spreads:
        where = addresses(contiguous(weights, extents), stretch, place, PLAN, TILING, True)
        if PLAN.marks:
            valid = load_tokens(where, inside, interior) != 0
        if PLAN.rejected != "mask":
            valid = valid & (lost == 0)
        known = (stretch.sequence >= 0) & (stretch.sequence < extents.sequences)
        each = tl.load(sequence_weights + stretch.sequence, mask=known, other=0.0)
        store_tokens(where, tl.where(valid, each[:, None, None], 0.0), inside, interior)
    elif PLAN.zeroes_weights:
        gone = inside & ((states & WEIGHTLESS) != 0)
        if PLAN.rejected != "mask":
            gone = gone | lost
        zero(addresses(contiguous(weights, extents), stretch, place, PLAN, TILING, True), gone)
    if PLAN.zeroes_mask:
        where = addresses(contiguous(mask_out, extents), stretch, place, PLAN, TILING, True)
        zero(where, lost | (inside & ((states & REJECTED) != 0)))


# --- the kernel ---


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "width", "tiles", "train_row", "train_step", "rollout_row", "rollout_step",
        "mask_row", "mask_step", "apply_programs", "token_programs", "sequence_programs",
    ]
)  # fmt: skip
def apply_kernel(
    train_logp, rollout_logp, mask, log_mass, advantages, offsets, numbers, owners, states, sequence_weights, weights,
    mask_out, token_sums, sequence_sums, histogram, token_maxima, sequence_maxima, statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64,
    train_row: tl.int64, train_step: tl.int64, rollout_row: tl.int64, rollout_step: tl.int64,
    mask_row: tl.int64, mask_step: tl.int64,
    apply_programs: tl.int32, token_programs: tl.int32, sequence_programs: tl.int32,
    PLAN: tl.constexpr, TILING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Apply to tokens in the first programs, which own the slots of `read`; finish one statistic in each other."""
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, tiles)
    if program >= apply_programs:
        bins = either(histogram, token_sums)
        results = Results(token_sums, sequence_sums, bins, token_maxima, sequence_maxima, statistics)
        finish_statistic(
            program - apply_programs, results, numbers, extents, token_programs, sequence_programs, PLAN, CHUNK
        )
    elif PLAN.applies:
        slot = program.to(tl.int64) * TILING.rows + tl.arange(0, TILING.rows)
        owner = slot
        if PLAN.packed:
            owner = tl.load(owners + slot).to(tl.int64)
        stretch = stretch_of(offsets, owner, slot, extents, PLAN, TILING.tile)
        known = (stretch.sequence >= 0) & (stretch.sequence < sequences)
        state = tl.load(states + stretch.sequence, mask=known, other=0)
        if PLAN.spreads or tl.max(state, 0) > 0:
            inputs = Inputs(
                PerToken(train_logp, train_row, train_step),
                PerToken(rollout_logp, rollout_row, rollout_step),
                PerToken(either(mask, train_logp), mask_row, mask_step),
                contiguous(either(log_mass, train_logp), extents),
                either(advantages, train_logp),
            )
            apply_to_tokens(inputs, weights, mask_out, sequence_weights, state, stretch, extents, PLAN, TILING)
