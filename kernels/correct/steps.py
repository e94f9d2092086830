"""Loads of a step of `read`, what all tokens of a step share, and the comparison of two policies at a token."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..tiles import Extents, PerToken, Span, Tile, age_at, contiguous, load_step, of_sequences, places_of
from ..tokens import is_finite
from .plan import Plan


class Inputs(NamedTuple):
    """The tensors of every Spec."""

    train: PerToken
    rollout: PerToken
    mask: PerToken
    mass: PerToken


class Step(NamedTuple):
    """The inputs of a step: [PARTS, LANES, VEC] each."""

    train: tl.tensor
    rollout: tl.tensor
    mask: tl.tensor  # as it was given
    valid: tl.tensor  # bool; False outside of sequences
    mass: tl.tensor  # the log of the mass kept; train where the plan has none


class Pair(NamedTuple):
    """Two policies compared, [PARTS, LANES, VEC] each; log-probs and D are 0 at tokens that are not measured."""

    d: tl.tensor  # logp - base
    logp: tl.tensor  # of the policy in the numerator: train, or new
    base: tl.tensor  # of the policy in the denominator: rollout, or train
    measured: tl.tensor  # tokens that are valid and, except for nonfinite="propagate", finite or read as D = 0
    finite: tl.tensor  # valid tokens whose D is finite


class Context(NamedTuple):
    """The values of a step besides its log-probs and mask."""

    tile: Tile
    span: Span
    first: tl.tensor  # token of the tile
    whole: tl.tensor  # all of the step lies within sequences
    extents: Extents
    offsets: tl.tensor
    advantages: tl.tensor  # [N], [B, T] or [S]
    externals: tl.tuple  # per-token tensors: those of the criteria, then new_logp
    versions: tl.tensor  # [N], [B, T] or [S]
    current: tl.tensor  # the version that trains
    histogram: tl.tensor  # [COPIES * BINS] int64, for detail="full"
    numbers: tl.tuple


# In Triton 3.6 a tuple that grows forgets the names within its entries; this one restores them.


@triton.jit
def pair_of(x: tl.tuple) -> Pair:
    """Name the entries of a pair."""
    return Pair(x[0], x[1], x[2], x[3], x[4])


@triton.jit
def survivors(pair: Pair, dropped, PLAN: tl.constexpr):
    """Select the tokens that sums over a sequence run over. dropped: by criteria of tokens."""
    if PLAN.kept:
        return pair.measured & (dropped == 0)
    else:
        return pair.measured


@triton.constexpr_function
def compares_with_rollout(plan: Plan, k: int) -> bool:
    """Return whether the k-th further pair is new/rollout and not new/old."""
    return plan.pairs[k] == "new/rollout"


# --- loading ---


@triton.jit
def is_whole(tile: Tile, first, TILING: tl.constexpr):
    """Return whether all of a step lies within sequences."""
    return (first >= tile.begin) & (first + TILING.step <= tile.end)


@triton.jit
def load_logps(inputs: Inputs, tile: Tile, first, PLAN: tl.constexpr,
               TILING: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Load the log-probs of a step."""
    if is_whole(tile, first, TILING):
        train = load_step(inputs.train, tile, first, PLAN, TILING, TILING.unit, True)
        rollout = load_step(inputs.rollout, tile, first, PLAN, TILING, TILING.unit, True)
    else:
        train = load_step(inputs.train, tile, first, PLAN, TILING, TILING.unit, False)
        rollout = load_step(inputs.rollout, tile, first, PLAN, TILING, TILING.unit, False)
    return train, rollout


@triton.jit
def load_marks(mask: PerToken, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Load a step of the mask."""
    if first + TILING.step <= tile.length:
        marks = load_step(mask, tile, first, PLAN, TILING, TILING.unit, True)
    else:
        marks = load_step(mask, tile, first, PLAN, TILING, TILING.unit, False)
    return marks


@triton.jit
def any_marked(marks):
    """Return whether a token of a step is valid."""
    return tl.max(tl.ravel((marks != 0).to(tl.int32)), 0) > 0


@triton.jit
def step_of(train, rollout, inputs: Inputs, marks: tl.tensor | None, tile: Tile, first, PLAN: tl.constexpr,
            TILING: tl.constexpr, WHOLE: tl.constexpr) -> Step:  # fmt: skip
    """Say which tokens of a step are valid. marks: its mask, if it is loaded. WHOLE: all lies within sequences."""
    place = places_of(first, TILING)
    mask = tl.full(place.shape, 1, tl.int8) if WHOLE else (place < tile.length).to(tl.int8)
    if marks is not None:
        mask = marks
    elif PLAN.masked:
        mask = load_step(inputs.mask, tile, first, PLAN, TILING, TILING.unit, WHOLE)
    mass = train
    if PLAN.mass is not None:
        mass = load_step(inputs.mass, tile, first, PLAN, TILING, True, WHOLE)
    valid = mask != 0
    if not WHOLE:
        valid = valid & (place >= tile.begin) & (place < tile.end)
    return Step(train, rollout, mask, valid, mass)


@triton.jit
def load_inputs(inputs: Inputs, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr,
                WHOLE: tl.constexpr) -> Step:  # fmt: skip
    """Load a step. WHOLE: all of it lies within sequences."""
    train = load_step(inputs.train, tile, first, PLAN, TILING, TILING.unit, WHOLE)
    rollout = load_step(inputs.rollout, tile, first, PLAN, TILING, TILING.unit, WHOLE)
    return step_of(train, rollout, inputs, None, tile, first, PLAN, TILING, WHOLE)


@triton.jit
def count_outside(marked, valid, tile: Tile, first, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Count the tokens of a step that the mask marks and no sequence has."""
    if PLAN.masked:
        return tl.sum(tl.ravel((marked & (valid == 0)).to(tl.int32)), 0)
    else:
        done = tl.minimum(first + TILING.step, tile.length)
        known = tl.minimum(done, tile.end) - tl.maximum(first, tile.begin)
        return tl.maximum(done - first, 0) - tl.maximum(known, 0)


@triton.jit
def loaded(context: Context, tensor, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Load a step of a contiguous per-token tensor."""
    if context.whole:
        x = load_step(contiguous(tensor, context.extents), context.tile, context.first, PLAN, TILING, True, True)
    else:
        x = load_step(contiguous(tensor, context.extents), context.tile, context.first, PLAN, TILING, True, False)
    return x


@triton.jit
def extra(context: Context, tensor, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Load it in the dtype that computes."""
    return loaded(context, tensor, PLAN, TILING).to(tl.float32)


@triton.jit
def external_of(context: Context, age, CRITERION: tl.constexpr, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Load the external tensor of a criterion; without one return the ages, which few criteria use."""
    if CRITERION.external >= 0:
        return extra(context, context.externals[CRITERION.external], PLAN, TILING)
    else:
        return age


@triton.jit
def age_of(context: Context, like, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Compute the ages of a step; without versions return `like`, which is not used."""
    age = like
    if PLAN.ages == "token":
        age = age_at(loaded(context, context.versions, PLAN, TILING), context.current).to(like.dtype)
    elif PLAN.ages == "sequence":
        age = of_sequences(context.versions, like, context.span, context.first, context.offsets, context.tile,
                           context.extents, PLAN, TILING, context.current)  # fmt: skip
    return age


@triton.jit
def advantage_of(context: Context, like, PLAN: tl.constexpr, TILING: tl.constexpr):
    """Load the advantages of a step; without any return `like`, which is not used."""
    advantage = like
    if PLAN.advantages == "token":
        advantage = extra(context, context.advantages, PLAN, TILING)
    elif PLAN.advantages == "sequence":
        advantage = of_sequences(context.advantages, like, context.span, context.first, context.offsets, context.tile,
                                 context.extents, PLAN, TILING)  # fmt: skip
    return advantage


# --- comparing ---


@triton.jit
def compare(logp, base, valid, PLAN: tl.constexpr) -> Pair:
    """Compare two policies at valid tokens."""
    d = logp - base
    finite = valid & is_finite(d)
    measured = valid
    if PLAN.nonfinite == "reject":
        measured = finite
    elif PLAN.nonfinite == "neutral":
        logp, base, d = tl.where(finite, logp, 0.0), tl.where(finite, base, 0.0), tl.where(finite, d, 0.0)
    logp, base = tl.where(measured, logp, 0.0), tl.where(measured, base, 0.0)
    return Pair(tl.where(measured, d, 0.0), logp, base, measured, finite)
