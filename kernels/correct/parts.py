"""Loads of a program of `read`: its parts, what all parts share, and the comparison of two policies at a token."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import Pair
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.io import PerToken, addresses, contiguous, load_tokens, of_sequence
from rollout_corr.kernels.slots import Extents, Stretch, inside_of, parts_of, positions
from rollout_corr.kernels.tokens import is_finite, over_kept_set, real


class Inputs(NamedTuple):
    """The tensors of every part."""

    train: PerToken
    rollout: PerToken
    mask: PerToken
    mass: PerToken


class Part(NamedTuple):
    """The inputs of a part of a tile: [ROWS, LANES, VEC] each."""

    train: tl.tensor
    rollout: tl.tensor
    mask: tl.tensor  # as it was given; 0 at tokens of other slots
    mass: tl.tensor  # the log of the mass kept; train where the plan has none


class Shared(NamedTuple):
    """The values that all parts of a program share."""

    stretch: Stretch
    extents: Extents
    full: tl.tensor  # every slot fills its tile
    outside: tl.tensor  # [ROWS, 1, 1], slots of no sequence
    advantages: tl.tensor  # [N], [B, T] or [S]
    externals: tl.tuple  # per-token tensors: those of the criteria, then new_logp
    numbers: tl.tuple


# In Triton 3.5 and 3.6 a tuple that grows forgets the names within its entries; these two restore them.


@triton.jit
def part_of(x: tl.tuple) -> Part:
    """Name the entries of a part."""
    return Part(x[0], x[1], x[2], x[3])


@triton.jit
def pair_of(x: tl.tuple) -> Pair:
    """Name the entries of a pair."""
    return Pair(x[0], x[1], x[2], x[3], x[4])


@triton.constexpr_function
def compares_with_rollout(plan: Plan, k: int) -> bool:
    """Test whether the k-th further pair is new/rollout and not new/old."""
    return plan.pairs[k] == "new/rollout"


# --- loading ---


@triton.jit
def load_parts(
    inputs: Inputs, stretch: Stretch, PLAN: tl.constexpr, TILING: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tuple:
    """Load all parts.

    FULL: every slot fills its tile. WHOLE: every tile lies within the batch, so that it can be loaded whole, without a
    mask that would make accesses narrow.
    """
    parts = ()
    for i in tl.static_range(parts_of(TILING)):
        place = positions(i * TILING.part, TILING.lanes, TILING.vec)
        inside = inside_of(stretch, place)
        train = load_tokens(addresses(inputs.train, stretch, place, PLAN, TILING, TILING.unit), inside, WHOLE)
        rollout = load_tokens(addresses(inputs.rollout, stretch, place, PLAN, TILING, TILING.unit), inside, WHOLE)
        given = inside.to(tl.int8)
        if PLAN.masked:
            given = load_tokens(addresses(inputs.mask, stretch, place, PLAN, TILING, TILING.unit), inside, WHOLE)
            if WHOLE and not FULL:
                given = tl.where(inside, given, 0).to(given.dtype)
        elif FULL:
            given = tl.full(given.shape, 1, tl.int8)
        mass = train
        if PLAN.mass is not None:
            mass = load_tokens(addresses(inputs.mass, stretch, place, PLAN, TILING, True), inside, WHOLE)
        parts = parts + (Part(train, rollout, given, mass),)
    return parts


@triton.jit
def token_tensor(
    shared: Shared, WHICH: tl.constexpr, place: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Load extra input WHICH: the external tensors come first, then new_logp."""
    tensor = contiguous(shared.externals[WHICH], shared.extents)
    where = addresses(tensor, shared.stretch, place, PLAN, TILING, True)
    return load_tokens(where, inside_of(shared.stretch, place), shared.full).to(real(PLAN))


@triton.jit
def external_of(
    shared: Shared, default: tl.tensor, place: tl.tensor, TEST: tl.constexpr, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tl.tensor:
    """Load the external tensor of a criterion; without one return the default, which is not used."""
    if TEST.external >= 0:
        return token_tensor(shared, TEST.external, place, PLAN, TILING)
    else:
        return default


@triton.jit
def advantage_of(
    shared: Shared, like: tl.tensor, place: tl.tensor, PLAN: tl.constexpr, TILING: tl.constexpr
) -> tl.tensor:
    """Load the advantages of a part; without any return `like`, which is not used."""
    advantage = like
    if PLAN.advantages == "token":
        where = addresses(contiguous(shared.advantages, shared.extents), shared.stretch, place, PLAN, TILING, True)
        advantage = load_tokens(where, inside_of(shared.stretch, place), shared.full).to(real(PLAN))
    elif PLAN.advantages == "sequence":
        advantage = of_sequence(shared.advantages, shared.stretch, shared.extents, like)
    return advantage


# --- comparing ---


@triton.jit
def compare(logp: tl.tensor, base: tl.tensor, valid: tl.tensor, PLAN: tl.constexpr, TAME: tl.constexpr) -> Pair:
    """Compare two policies at valid tokens."""
    d = logp - base
    bad = tl.zeros_like(valid)
    if not TAME:
        bad = valid & (is_finite(d) == 0)
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = valid & (bad == 0)
    elif PLAN.nonfinite == "neutral":
        logp, base, d = tl.where(bad, 0.0, logp), tl.where(bad, 0.0, base), tl.where(bad, 0.0, d)
    logp, base = tl.where(measured, logp, 0.0), tl.where(measured, base, 0.0)
    return Pair(tl.where(measured, d, 0.0), logp, base, measured, bad)


@triton.jit
def largest_gap(parts: tl.tuple, outside: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Find the largest |D| of a program's valid tokens, as the integer of its bits, by which NaN is above all."""
    largest = tl.abs(gap_of(part_of(parts[0]), outside, PLAN))
    for i in tl.static_range(1, len(parts)):
        gap = tl.abs(gap_of(part_of(parts[i]), outside, PLAN))
        largest = tl.maximum(largest, gap, propagate_nan=tl.PropagateNan.ALL)
    if PLAN.double:
        return tl.max(tl.ravel(largest.to(tl.int64, bitcast=True)), 0)
    else:
        return tl.max(tl.ravel(largest.to(tl.int32, bitcast=True)), 0)


@triton.jit
def gap_of(part: Part, outside: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Compute D of a part, 0 where it is not valid."""
    valid = part.mask != 0
    if PLAN.packed:
        valid = valid & (outside == 0)
    train, rollout = over_kept_set(part.train.to(real(PLAN)), part.rollout.to(real(PLAN)), part.mass, PLAN)
    return tl.where(valid, train - rollout, 0.0)
