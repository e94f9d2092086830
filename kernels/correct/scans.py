"""Scans along the sequences of a tile: running sums and maxima of the columns of `Plan.ahead`, token by token.

`running` is a tuple of scalars: of each column what the sequence has come to at the end of the step before, then of
each criterion that drops the rest how many of its tokens have failed in this tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.accumulators import is_extremum, kind_of, start_of
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.slots import Extents, Tiling, edge
from rollout_corr.kernels.tiles import Span, Tile, ends_in, next_span, places_of, zeros_by
from rollout_corr.kernels.tokens import size

# Slots of a sequence whose columns are added up at a time.
SLOTS = tl.constexpr(32)


@triton.constexpr_function
def runs(plan: Plan, k: int) -> bool:
    """Test whether a column runs along sequences: all but counts of valid tokens and of what fails by itself."""
    table, name = plan.recorded[k]
    return table != "counts" or name.startswith("places")


@triton.constexpr_function
def runs_before(plan: Plan, k: int) -> bool:
    """Test for a column of which a token sees what is before it, and not itself."""
    return plan.prefix == "min" and plan.recorded[k] == ("peaks", "weight")


@triton.constexpr_function
def crosses(plan: Plan, k: int) -> bool:
    """Test for a column that goes on from one turn of a sequence to the next."""
    head, _, rest = plan.recorded[k][1].partition("/")
    if head.startswith("places"):
        return plan.turns and rest != "turn"
    return plan.turns and (plan.prefix_within if head == "weight" else plan.tests[int(head)].within) == "sequence"


@triton.constexpr_function
def table_of(plan: Plan, k: int) -> int:
    """Find the table of a column."""
    return plan.of_slots.index(plan.recorded[k][0])


@triton.constexpr_function
def row_of(plan: Plan, k: int) -> int:
    """Find a column in its table."""
    table, name = plan.recorded[k]
    return getattr(plan, table).index(name)


@triton.constexpr_function
def rests(plan: Plan) -> int:
    """Count the criteria that drop the rest."""
    return sum(one.drop == "rest" for one in plan.tests)


@triton.constexpr_function
def moves(plan: Plan, tiling: Tiling) -> bool:
    """Test whether LLVM may move operations on what a step gives to where that is used, or a branch keeps it from that.

    With prefixes on NVIDIA it would hold the float64 of weights until all else is computed, and what a step adds to the
    batch through the loop over sequences: registers that spill up to 128 bytes. Out of a branch, which a tile without
    tokens alone does not take, nothing moves. So do sums over the tokens kept of packed sequences, up to 28 bytes; of
    float64 they spill 72 with branches. AMD's threads have twice the registers, and take more with branches.
    """
    waits = plan.packed and plan.kept and plan.level in (None, "token") and not plan.double
    return tiling.lanes > 32 or not (plan.ahead is not None or waits)


# --- what comes from the tiles before ---


@triton.jit
def carried_into(
    tables: tl.tuple, slots: tl.tensor, offsets: tl.tensor, heads: tl.tensor, span: Span, tile: Tile,
    extents: Extents, AHEAD: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Add up the slots that the first sequence of a tile has in the tiles before: `running`, at the tile's start.

    They lie side by side before its slot in this tile, as do those of a turn; where a sequence has turns its slots are
    theirs, from the first on, of which `heads` has the number.
    """
    program = tl.program_id(0).to(tl.int64)
    if AHEAD.packed:
        begun = edge(offsets, span.owner, extents.sequences, extents.tokens) >> extents.tile_bits
        first, many = begun + span.owner, program - begun
    else:
        many = program % extents.tiles
        first = program - many
    first_of_all, most, longest = first, many, many
    if AHEAD.crosses_turns:
        head = tl.load(heads + span.owner)
        first_of_all = (edge(offsets, head, extents.sequences, extents.tokens) >> extents.tile_bits) + head
        most = program + span.owner - first_of_all
        longest = tl.maximum(many, most)
    kept = ()
    for k in tl.static_range(size(AHEAD, "recorded")):
        kept = kept + (tl.full((SLOTS,), start_of(AHEAD, k), kind_of(AHEAD, k)),)
    for start in range(0, tl.maximum(longest, 0).to(tl.int32), SLOTS):
        each = start + tl.arange(0, SLOTS)
        more = ()
        for k in tl.static_range(size(AHEAD, "recorded")):
            if runs(AHEAD, k):
                begun = first_of_all if crosses(AHEAD, k) else first
                known = each < (most if crosses(AHEAD, k) else many)
                where = tables[table_of(AHEAD, k)] + (slots * row_of(AHEAD, k) + begun + each)
                x = tl.load(where, mask=known, other=start_of(AHEAD, k))
                more = more + (tl.maximum(kept[k], x) if is_extremum(AHEAD, k) else kept[k] + x,)
            else:
                more = more + (kept[k],)
        kept = more
    running = ()
    for k in tl.static_range(size(AHEAD, "recorded")):
        running = running + (tl.max(kept[k], 0) if is_extremum(AHEAD, k) else tl.sum(kept[k], 0),)
    for _ in tl.static_range(rests(AHEAD)):
        # What failed in the tiles before is for `decide` to find.
        running = running + (tile.length * 0,)
    return running


# --- a step ---


@triton.jit
def places_by(like: tl.tensor, first: tl.tensor, TILING: tl.constexpr) -> tl.tensor:
    """Number the tokens of a step in their tile, [STEP], where threads have them as they have those of `like`."""
    return tl.reshape(places_of(first, TILING) + zeros_by(like), (TILING.step,))


@triton.jit
def begins_of(
    place: tl.tensor, span: Span, first: tl.tensor, offsets: tl.tensor, heads: tl.tensor, tile: Tile,
    extents: Extents, PLAN: tl.constexpr, TILING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Mark the tokens of a step with which another owner begins than that with which the tile does: [STEP] int32.

    And those with which another sequence does, where owners are turns. place: Of the tokens in the tile, [STEP], by
    `places_by`. The span is that of the step's first token, or what is before it.
    """
    begins = (place == span.start) & (first > 0)
    sequences = begins
    if PLAN.crosses_turns:
        sequences = begins & begins_sequence(span, offsets, heads, extents)
    if PLAN.packed:
        for _ in range(ends_in(span, first, offsets, tile, extents, PLAN, TILING)):
            span = next_span(span, offsets, tile, extents, PLAN)
            begins = begins | (place == span.start)
            if PLAN.crosses_turns:
                sequences = sequences | ((place == span.start) & begins_sequence(span, offsets, heads, extents))
    if PLAN.crosses_turns:
        return begins.to(tl.int32), sequences.to(tl.int32)
    else:
        return begins.to(tl.int32), begins.to(tl.int32)


@triton.jit
def begins_sequence(span: Span, offsets: tl.tensor, heads: tl.tensor, extents: Extents) -> tl.tensor:
    """Test whether the owner of a span begins where its sequence does: turns of no token may come before it."""
    begun = edge(offsets, tl.load(heads + span.owner), extents.sequences, extents.tokens)
    return begun == edge(offsets, span.owner, extents.sequences, extents.tokens)


@triton.jit
def added(begun: tl.tensor, x: tl.tensor, begins: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Join sums of neighbouring stretches, with whether a sequence begins in each."""
    return begun | begins, tl.where(begins != 0, y, x + y)


@triton.jit
def largest(begun: tl.tensor, x: tl.tensor, begins: tl.tensor, y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Join maxima of neighbouring stretches."""
    return begun | begins, tl.where(begins != 0, y, tl.maximum(x, y))


@triton.jit
def largest_before(
    begun: tl.tensor, before: tl.tensor, x: tl.tensor, begins: tl.tensor, after: tl.tensor, y: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Join maxima of neighbouring stretches, each with that of all but its last token."""
    joined = begins != 0
    return begun | begins, tl.where(joined, after, tl.maximum(x, after)), tl.where(joined, y, tl.maximum(x, y))


@triton.jit
def last_of(x: tl.tensor) -> tl.tensor:
    """Take the last entry: a scalar."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == x.shape[0] - 1, x, 0), 0)


@triton.jit
def scanned(
    x: tl.tensor, carry: tl.tensor, begins: tl.tensor, LARGEST: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Run along a step from a carry: the totals up to and with each token, and the last of them."""
    flat = tl.reshape(x, (TILING.step,))
    if LARGEST:
        begun, found = tl.associative_scan((begins, flat), 0, largest)
        found = tl.where(begun != 0, found, tl.maximum(carry, found))
    else:
        begun, found = tl.associative_scan((begins, flat), 0, added)
        found = tl.where(begun != 0, found, carry + found)
    return tl.reshape(found, x.shape), last_of(found)


@triton.jit
def scanned_before(
    x: tl.tensor, carry: tl.tensor, begins: tl.tensor, nothing: tl.tensor, TILING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Run along a step from a carry: the largest before each token, and the largest of all up to the last.

    nothing: What is before a sequence, of its first token: [STEP].
    """
    flat = tl.reshape(x, (TILING.step,))
    begun, before, found = tl.associative_scan((begins, nothing, flat), 0, largest_before)
    before = tl.where(begun != 0, before, tl.maximum(carry, before))
    found = tl.where(begun != 0, found, tl.maximum(carry, found))
    return tl.reshape(before, x.shape), last_of(found)


@triton.jit
def run_along(
    given: tl.tuple, running: tl.tuple, begins: tl.tuple, carried: tl.tuple, AHEAD: tl.constexpr, TILING: tl.constexpr
) -> tuple[tl.tuple, tl.tuple]:
    """Run along a step with all columns; the results stand where the columns do.

    Args:
        given: What each token adds.
        running: What a step begins with.
        begins: Of owners, of sequences.
        carried: What each token brings of those on the ranks before, where there are any: [STEP] each.
        AHEAD: The plan of the pass before.
        TILING: The tiling.
    """
    reached = ()
    for k in tl.static_range(size(AHEAD, "recorded")):
        if runs(AHEAD, k):
            x = given[k].to(kind_of(AHEAD, k))
            each = begins[1] if crosses(AHEAD, k) else begins[0]
            if runs_before(AHEAD, k):
                nothing = tl.full((TILING.step,), start_of(AHEAD, k), x.dtype)
                if AHEAD.joins:
                    nothing = carried[k]
                    x = tl.maximum(x, tl.reshape(nothing, x.shape))
                x, last = scanned_before(x, running[k], each, nothing, TILING)
            else:
                if AHEAD.joins:
                    brought = tl.reshape(carried[k], x.shape)
                    x = tl.maximum(x, brought) if is_extremum(AHEAD, k) else x + brought
                x, last = scanned(x, running[k], each, is_extremum(AHEAD, k), TILING)
            reached = reached + (x,)
            running = running[:k] + (last,) + running[k + 1 :]
        else:
            reached = reached + (0,)
    return reached, running
