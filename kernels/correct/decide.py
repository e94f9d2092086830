"""Add the slots of each sequence up, decide which sequences are rejected, weigh them, and finish the statistics.

The second launch. Where `apply` does not follow, the tokens of rejected sequences are zeroed here.
It reads the slots: of `metrics_packed`, 4,096 tokens a sequence, 0.06 bytes and 0.4 PTX instructions a token, by
`ptx.counts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.finish import Leftover, add_up_bins, finish
from rollout_corr.kernels.correct.measures import (
    Rows,
    measure_criterion,
    measure_sequence_weights,
    measure_sequences,
    weigh_sequences,
)
from rollout_corr.kernels.correct.peers import report_criterion, report_sequences, report_weights
from rollout_corr.kernels.correct.turns import (
    Turns,
    Verdicts,
    drops_sequences,
    rejected_by_turns,
    report_turns,
    total,
    walk_turns,
    weights_of_turns,
)
from rollout_corr.kernels.correct.verdicts import (
    count_kept,
    measured_of,
    measured_tokens,
    rows_of,
    store_states,
    tested,
    thinning_bit,
    weightless_of,
)
from rollout_corr.kernels.gather import (
    Gathered,
    SlotTables,
    gathered,
    integer,
    slot_tables,
    slots_between,
    slots_of,
    turns_of,
)
from rollout_corr.kernels.io import either
from rollout_corr.kernels.partials import Partials, add, add_up_part, groups, is_last
from rollout_corr.kernels.tiles import Extents, edge
from rollout_corr.kernels.tokens import named, of_pair, size, test, thresholds

# Tokens that are zeroed at a time.
BLOCK = tl.constexpr(512)

# --- deciding ---


@triton.jit
def decide_by_tokens(
    found: Gathered, valid: tl.tensor, n: tl.tensor, keep: tl.tensor, out: Partials, PLAN: tl.constexpr
) -> tl.tensor:
    """Reject sequences in which a token failed a criterion that drops sequences; report all criteria of tokens."""
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "token":
            lost = integer(found, PLAN, named(i, "lost"))
            if test(PLAN, i).drop == "sequence":
                keep = keep & (lost == 0)
                lost = tl.where(lost > 0, valid, 0)
            add(out.sums, PLAN, named(i, "units"), measured_of(found, valid, n, test(PLAN, i).pair, PLAN))
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)
    return keep


@triton.jit
def decide_by_sequences(
    found: Gathered, rows: Rows, advantage: tl.tensor, kept_by_tokens: tl.tensor, keep: tl.tensor, out: Partials,
    numbers: tl.tuple, PLAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Test sequences by their own criteria: return `keep`, the bits of criteria that thin, and vetoed sequences."""
    state = tl.zeros_like(rows.valid).to(tl.int32)
    vetoed = tl.zeros_like(keep)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            value, among, failed, lost = tested(found, rows, advantage, kept_by_tokens, numbers, test(PLAN, i), PLAN)
            if test(PLAN, i).thins:
                state |= tl.where(failed, thinning_bit(PLAN, i), 0)
            else:
                keep = keep & (failed == 0)
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)
            measure_criterion(value, among, out, numbers, test(PLAN, i), PLAN)
            vetoed = report_criterion(value, failed, vetoed, rows, out, numbers, test(PLAN, i), PLAN)
    return keep, state, vetoed


@triton.jit
def without_nonfinite(found: Gathered, nonfinite: tl.tensor, keep: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Reject sequences with a token whose D, of any pair of policies, is not finite."""
    if PLAN.rejects_nonfinite:
        keep = keep & (nonfinite == 0)
        for k in tl.static_range(size(PLAN, "pairs")):
            keep = keep & (integer(found, PLAN, of_pair(k + 1, "nonfinite")) == 0)
    return keep


# --- counting ---


@triton.jit
def report_counts(rows: Rows, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences there are, and are measured."""
    add(out.sums, PLAN, "tokens", rows.valid)
    add(out.sums, PLAN, "tokens_measured", rows.n)
    add(out.sums, PLAN, "tokens_nonfinite", rows.nonfinite)
    add(out.sums, PLAN, "sequences", rows.valid > 0)
    add(out.sums, PLAN, "sequences_measured", rows.n > 0)


@triton.jit
def report_kept(rows: Rows, keep: tl.tensor, kept: tl.tensor, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences are kept."""
    nonempty = rows.valid > 0
    add(out.sums, PLAN, "tokens_kept", kept)
    add(out.sums, PLAN, "sequences_kept", keep & nonempty)
    add(out.sums, PLAN, "sequences_without_survivors", keep & nonempty & (kept == 0))


# --- deciding it all ---


@triton.jit
def decide(
    tables: SlotTables, advantages: tl.tensor, sequence: tl.tensor, first: tl.tensor, many: tl.tensor, known: tl.tensor,
    slots: tl.tensor, out: Partials, numbers: tl.tuple, turns: tl.tuple,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Decide about some sequences and store their statistics; return `keep`, states, non-finite tokens, weights.

    Args:
        tables: The sums of slots.
        advantages: [S], if the plan asks for them; [U] with turns.
        sequence: [SEQUENCES], and so are the next three.
        first: The first slot of each.
        many: How many slots each has.
        known: It is a sequence.
        slots: How many there are.
        out: Where this program's share of the statistics goes.
        numbers: The thresholds.
        turns: The `Turns`, where the plan has any.
        PLAN: The plan.
        SHAPE: The shape.
        BY_OWNER: Every turn has one slot, as in `gather.slots_of`.
    """
    found = gathered(tables, first, many, slots, PLAN, SHAPE)
    valid, nonfinite = integer(found, PLAN, "valid"), integer(found, PLAN, "nonfinite")
    if PLAN.packed:
        # What lies outside is counted below 0, so that a sequence with wrong offsets takes none of it for its own.
        add(out.sums, PLAN, "tokens_outside", tl.where(known, 0, -valid))
        valid = tl.where(known, tl.maximum(valid, 0), 0)
    else:
        add(out.sums, PLAN, "tokens_outside", valid * 0)
    keep = decide_by_tokens(found, valid, measured_tokens(valid, nonfinite, PLAN), known, out, PLAN)
    rows = rows_of(found, valid, nonfinite, keep, PLAN)
    advantage = rows.sum_d
    if PLAN.advantages == "sequence":
        place, some = sequence, known
        if PLAN.turns:
            place, some = turns.low - 1, known & (turns.low < turns.high)
        advantage = tl.load(advantages + place, mask=some).to(tl.float64)
    standing = keep
    keep, state, vetoed = decide_by_sequences(found, rows, advantage, standing, keep, out, numbers, PLAN)
    keep = without_nonfinite(found, nonfinite, keep, PLAN)

    # Ahead of the turns, whose loop would hold it all in registers until then.
    report_counts(rows, out, PLAN)
    measure_sequences(rows, out, numbers, PLAN)

    weight = rows.sum_d
    if PLAN.level is not None and not PLAN.weighs_turns:
        weights = weigh_sequences(found, rows, numbers, PLAN)
        weight = weights.weight
    if PLAN.turns:
        given = Verdicts(standing, keep, state, nonfinite, advantage, weight)
        if drops_sequences(PLAN):
            keep = keep & (rejected_by_turns(turns, known, given, numbers, PLAN, SHAPE, BY_OWNER) == 0)
            given = Verdicts(standing, keep, state, nonfinite, advantage, weight)
        sums, maxima = walk_turns(turns, known, given, PLAN, SHAPE, BY_OWNER)
        report_turns(sums, maxima, rows, out, PLAN)
        kept = total(sums, PLAN, "of_sequence/kept").to(tl.int64)
        if PLAN.weighs_turns:
            weights = weights_of_turns(sums, rows, PLAN)
    else:
        kept = count_kept(found, valid, keep, state, PLAN)
    report_kept(rows, keep, kept, out, PLAN)
    if PLAN.level is not None:
        measure_sequence_weights(rows, weights, out, numbers, PLAN)
        if size(PLAN, "schemes") > 0:
            report_weights(found, rows, weights, out, numbers, PLAN)
    if size(PLAN, "schemes") > 0:
        report_sequences(found, rows, kept, vetoed, out, numbers, PLAN)
    return keep, state, nonfinite, weight


# --- zeroing the tokens of rejected sequences, in the programs that rejected them ---


@triton.jit
def zero(tensor: tl.tensor, begin: tl.tensor, end: tl.tensor, share: tl.tensor, shares: tl.tensor) -> None:
    """Zero a share of a stretch of a contiguous tensor, in whole blocks where it has some, so that stores are wide."""
    for block in range(begin // BLOCK + share, (end + BLOCK - 1) // BLOCK, shares):
        place = block * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), tensor.dtype.element_ty)
        if (block * BLOCK >= begin) & ((block + 1) * BLOCK <= end):
            tl.store(tensor + place, nothing)
        else:
            tl.store(tensor + place, nothing, mask=(place >= begin) & (place < end))


@triton.jit
def chosen(x: tl.tensor, which: tl.tensor) -> tl.tensor:
    """Take one of some values: a scalar."""
    return tl.sum(tl.where(which, x.to(tl.int64), 0), 0)


@triton.jit
def zero_rejected(
    weights: tl.tensor, mask: tl.tensor, begin: tl.tensor, end: tl.tensor, rejected: tl.tensor, weightless: tl.tensor,
    share: tl.tensor, shares: tl.tensor, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Zero a share of each sequence that is rejected (its mask) or weightless (its weights), one after the other."""
    place = tl.arange(0, rejected.shape[0])
    left = tl.zeros_like(place)
    if PLAN.zeroes_weights:
        left |= weightless.to(tl.int32)
    if PLAN.zeroes_mask:
        left |= rejected.to(tl.int32)
    while tl.max(left, 0) > 0:
        which = place == tl.min(tl.where(left > 0, place, rejected.shape[0]), 0)
        first = chosen(begin, which)
        if PLAN.zeroes_weights:
            zero(weights, first, chosen(tl.where(weightless, end, begin), which), share, shares)
        if PLAN.zeroes_mask:
            zero(mask, first, chosen(tl.where(rejected, end, begin), which), share, shares)
        left = tl.where(which, 0, left)


# --- the kernel ---


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "width", "tiles", "tile_bits", "slots", "token_programs", "sequence_programs", "shares",
        "parts", "part", "owner_count",
    ]
)  # fmt: skip
def decide_kernel(
    numbers: tl.tensor, advantages: tl.tensor, offsets: tl.tensor, counts: tl.tensor, integers: tl.tensor,
    floats: tl.tensor, peaks: tl.tensor, keep_out: tl.tensor, states: tl.tensor, sequence_weights: tl.tensor,
    weights: tl.tensor, mask_out: tl.tensor, sequence_sums: tl.tensor, sequence_maxima: tl.tensor,
    token_sums: tl.tensor, token_maxima: tl.tensor, part_sums: tl.tensor, part_maxima: tl.tensor, histogram: tl.tensor,
    counter: tl.tensor, statistics: tl.tensor, within: tl.tensor, keep_turns_out: tl.tensor,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, shares: tl.int32, parts: tl.int32, part: tl.int32,
    owner_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr,
) -> None:  # fmt: skip
    """Decide about SHAPE.sequences sequences: store `keep`, state, weight, and their share of the statistics.

    Where sequences are long so many programs (shares) come to the same decision, each to zero its part of the tokens.
    Programs behind those add up parts of what `read` has left. The last of all finishes the statistics. With turns
    `offsets` and `sequences` are of turns, as everywhere else, and `within` says which are of which sequence.
    """
    in_memory, numbers = numbers, thresholds(numbers, PLAN)
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    # Where there is nothing to zero, none are launched to share it.
    shares = shares if PLAN.zeroes else 1
    share = program // sequence_programs
    owner = (program % sequence_programs).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    tables = slot_tables(counts, integers, floats, peaks)
    known_sequences = sequences
    turns: tl.tuple = (owner,)
    if PLAN.turns:
        known_sequences = owner_count - 2
        low, high = turns_of(within, owner, known_sequences, sequences)
        first, many = slots_between(offsets, low, high, extents, BY_OWNER)
        sequence = owner - 1
        turns = Turns(low, high, offsets, extents, tables, slots, keep_turns_out, either(states, counts),
                      either(sequence_weights, counts), in_memory)  # fmt: skip
    else:
        sequence, first, many = slots_of(offsets, owner, extents, PLAN, BY_OWNER)
    known = (sequence >= 0) & (sequence < known_sequences)
    rejected, weightless = known, known
    if share < shares:
        out = Partials(sequence_sums, sequence_maxima)
        keep, state, nonfinite, weight = decide(
            tables, advantages, sequence, first, many, known, slots, out, numbers, turns, PLAN, SHAPE, BY_OWNER
        )
        tl.store(keep_out + sequence, keep.to(tl.int8), mask=tl.where(share == 0, known, False))
        rejected, weightless = known & (keep == 0), known & weightless_of(keep, nonfinite, PLAN)
        if PLAN.applies and not PLAN.turns:
            store_states(states, sequence_weights, sequence, known, state, rejected, weightless, weight, PLAN)
    elif program < sequence_programs * shares + parts * groups(PLAN):
        k = program - sequence_programs * shares
        add_up_part(k, token_sums, token_maxima, part_sums, part_maxima, token_programs, part, PLAN)
    elif PLAN.full:
        add_up_bins(histogram, statistics, PLAN)
    if is_last(counter):
        rows = Leftover(sequence_sums, sequence_maxima, part_sums, part_maxima)
        extents = Extents(tokens, known_sequences, width, tiles, tile_bits)
        finish(statistics, rows, numbers, extents, sequence_programs, parts, PLAN)
    if PLAN.zeroes and share < shares:
        begin, end = sequence * width, (sequence + 1) * width
        if PLAN.packed:
            begin, end = edge(offsets, owner, sequences, tokens), edge(offsets, owner + 1, sequences, tokens)
        zero_rejected(weights, mask_out, begin, end, rejected, weightless, share, shares, PLAN)
