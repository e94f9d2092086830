"""The rest of a sequence behind a failure: the first slot of it that holds one, and what that one takes along.

`read` drops tokens from a failure on within its tile, and counts them by slot. Slots behind the first with a failure
are lost whole, whatever else they have counted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.gather import Gathered, SlotTables, sharers
from rollout_corr.kernels.tokens import at, size, test

# The first token that an owner loses, where it loses none.
NEVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.constexpr_function
def is_alive(plan: Plan, i: int) -> bool:
    """Test for a count of tokens that nothing has dropped one by one."""
    return plan.counts[i].split("/")[0] == "alive"


@triton.constexpr_function
def at_lost(plan: Plan, i: int) -> int:
    """Find the count of the tokens that a criterion takes."""
    return plan.counts.index(f"{i}/lost")


@triton.constexpr_function
def rest_bit(plan: Plan) -> int:
    """Find the state bit of sequences with a failure, behind those of criteria that thin; see verdicts.py."""
    return 4 << len(plan.thinning_tests)


@triton.jit
def counts_at(
    tables: SlotTables, first: tl.tensor, each: tl.tensor, known: tl.tensor, slots: tl.tensor, COLUMN: tl.constexpr
) -> tl.tensor:
    """Load a count of some slots of each sequence, [SEQUENCES, SHARERS]."""
    return tl.load(tables.counts + slots * COLUMN + first[:, None] + each, mask=known, other=0).to(tl.int64)


@triton.jit
def first_failed(
    tables: SlotTables, first: tl.tensor, many: tl.tensor, slots: tl.tensor, COLUMN: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tensor:
    """Find of each sequence, from its first slot on, which is the first with a failure: [SEQUENCES]; many: none."""
    share = tl.arange(0, sharers(SHAPE))[None, :]
    # Wrong offsets may promise more slots than there are.
    many = tl.minimum(many, slots - first)
    found = many[:, None] + share * 0
    for start in range(0, tl.max(many, 0).to(tl.int32), sharers(SHAPE)):
        each = (start + share).to(tl.int64) + first[:, None] * 0
        known = each < many[:, None]
        failed = counts_at(tables, first, each, known, slots, COLUMN) > 0
        found = tl.minimum(found, tl.where(failed, each, many[:, None]))
    return tl.min(found, 1)


@triton.jit
def lost_from(
    tables: SlotTables, first: tl.tensor, many: tl.tensor, failed: tl.tensor, slots: tl.tensor, COLUMN: tl.constexpr,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Count the valid tokens of each sequence that a criterion takes, from a failure in slot `failed` on."""
    share = tl.arange(0, sharers(SHAPE))[None, :]
    many = tl.minimum(many, slots - first)
    lost = many[:, None] * 0 + share * 0
    for start in range(0, tl.max(many, 0).to(tl.int32), sharers(SHAPE)):
        each = (start + share).to(tl.int64) + first[:, None] * 0
        known = each < many[:, None]
        here = counts_at(tables, first, each, known & (each == failed[:, None]), slots, COLUMN)
        behind = counts_at(tables, first, each, known & (each > failed[:, None]), slots, at(PLAN, "counts", "valid"))
        lost += here + behind
    return tl.sum(lost, 1)


@triton.jit
def alive_until(
    found: Gathered, tables: SlotTables, first: tl.tensor, many: tl.tensor, failed: tl.tensor, slots: tl.tensor,
    PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> Gathered:  # fmt: skip
    """Count again the tokens of each sequence that are not dropped, now with its slots up to the failed one alone."""
    until = tl.minimum(many, failed + 1)
    counts = ()
    for i in tl.static_range(size(PLAN, "counts")):
        if is_alive(PLAN, i):
            counts = counts + (sum_of_slots(tables, first, until, slots, i, SHAPE),)
        else:
            counts = counts + (found.counts[i],)
    return Gathered(counts, found.integers, found.floats, found.peaks)


@triton.jit
def sum_of_slots(
    tables: SlotTables, first: tl.tensor, many: tl.tensor, slots: tl.tensor, COLUMN: tl.constexpr, SHAPE: tl.constexpr
) -> tl.tensor:
    """Add a count up over the first slots of each sequence."""
    share = tl.arange(0, sharers(SHAPE))[None, :]
    many = tl.minimum(many, slots - first)
    total = many[:, None] * 0 + share * 0
    for start in range(0, tl.max(many, 0).to(tl.int32), sharers(SHAPE)):
        each = (start + share).to(tl.int64) + first[:, None] * 0
        total += counts_at(tables, first, each, each < many[:, None], slots, COLUMN)
    return tl.sum(total, 1)


@triton.jit
def first_of_all(
    tables: SlotTables, first: tl.tensor, many: tl.tensor, slots: tl.tensor, WITHIN: tl.constexpr, PLAN: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find of each sequence, or turn, the first slot with a failure of any criterion that drops its rest."""
    failed = tl.minimum(many, slots - first)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).drop == "rest" and test(PLAN, i).within == WITHIN:
            failed = tl.minimum(failed, first_failed(tables, first, many, slots, at_lost(PLAN, i), SHAPE))
    return failed


@triton.jit
def lose_behind(
    found: Gathered, tables: SlotTables, owner: tl.tensor, first: tl.tensor, many: tl.tensor, known: tl.tensor,
    rests: tl.tensor, slots: tl.tensor, tile_bits: tl.tensor, PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> Gathered:  # fmt: skip
    """Count again what owners lose behind failures of their own, and what is left; store where each loses the rest.

    Ranks add to it what failed on others before: backends/split_prefixes.py.
    """
    counts, failed = found.counts, tl.minimum(many, slots - first)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).drop == "rest":
            here = first_failed(tables, first, many, slots, at_lost(PLAN, i), SHAPE)
            lost = lost_from(tables, first, many, here, slots, at_lost(PLAN, i), PLAN, SHAPE)
            counts = counts[: at_lost(PLAN, i)] + (lost,) + counts[at_lost(PLAN, i) + 1 :]
            failed = tl.minimum(failed, here)
    found = Gathered(counts, found.integers, found.floats, found.peaks)
    found = alive_until(found, tables, first, many, failed, slots, PLAN, SHAPE)
    if PLAN.applies:
        fails = known & (failed < tl.minimum(many, slots - first))
        begins = begins_of_rest(tables, owner, first, failed, fails, slots, tile_bits, PLAN)
        tl.store(rests + owner, tl.where(fails, begins, NEVER), mask=known)
    return found


@triton.jit
def loses_rest(found: Gathered, PLAN: tl.constexpr) -> tl.tensor:
    """Select the owners that a criterion takes a rest of, from counts that ranks have settled."""
    lost = found.counts[at(PLAN, "counts", "valid")] * 0
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).drop == "rest":
            lost += found.counts[at_lost(PLAN, i)]
    return lost > 0


@triton.jit
def begins_of_rest(
    tables: SlotTables, sequence: tl.tensor, first: tl.tensor, failed: tl.tensor, fails: tl.tensor, slots: tl.tensor,
    tile_bits: tl.tensor, PLAN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Find the first token that sequences lose the rest from: its number in the batch or in its row.

    A turn whose sequence has failed before it, in a slot below 0, loses all.
    """
    slot = first + tl.maximum(failed, 0)
    place = -tl.load(tables.peaks + slots * at(PLAN, "peaks", "rest") + slot, mask=fails).to(tl.int64)
    # The slot of an owner has the number of its tile and that of the owner.
    tile = slot - sequence - 1 if PLAN.packed else failed
    return tl.where(failed < 0, 0, (tile << tile_bits.to(tl.int64)) + place)


@triton.jit
def store_rests(
    rests: tl.tensor, tables: SlotTables, sequence: tl.tensor, first: tl.tensor, failed: tl.tensor, fails: tl.tensor,
    slots: tl.tensor, tile_bits: tl.tensor, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Store for `apply` where sequences lose the rest."""
    begins = begins_of_rest(tables, sequence, first, failed, fails, slots, tile_bits, PLAN)
    tl.store(rests + sequence, begins, mask=fails)
