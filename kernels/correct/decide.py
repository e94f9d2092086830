"""The second launch: decide which sequences are rejected, weigh them, and finish the statistics.

Where `apply` does not follow, the tokens of rejected sequences are zeroed here. It reads the slots: of
`metrics_packed`, 4,096 tokens a sequence, 0.06 bytes and 0.5 PTX instructions a token, by `lab.ptx.counts`.

A unit is a sequence or a turn. Every lane has one, and a program SEQUENCES = SHAPE.sequences of them:

    owner           [SEQUENCES] int64, from 0; of a packed batch 0 and S + 1 are what lies before and behind sequences
    sequence        [SEQUENCES] int64, the number of the owner's sequence
    known           [SEQUENCES] bool, there is such a sequence
    first_slot      [SEQUENCES] int64, the first slot of each in the tables of `read`
    slot_count      [SEQUENCES] int64, how many slots it has; `slots` is how many the tables have
    totals          `UnitTotals`, the columns of these tables added up over the slots of each, found by name
    units           `Units`, the counts and sums that follow, [SEQUENCES] each
    kept_by_tokens  [SEQUENCES] bool, what criteria of tokens keep; `keep`: what all criteria keep
    state           [SEQUENCES] int32, bits for `apply`: REJECTED, WEIGHTLESS, and a `thinning_bit` of each criterion
    out             `Partials`, this program's row of the statistics
    statistics      the vector that is handed out, in the order of `place_of_table`; `put_mean` may append to it

planner.py names the columns and thresholds of a Spec, gather.py finds slots and adds them up, units.py has the value
of a criterion and what a failure rejects, measures.py the weights and statistics, peers.py those of other frameworks,
turns.py a sequence's turns, partials.py what programs leave to one another.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..accumulators import kept_of
from ..gather import (
    Units,
    UnitTotals,
    gather_slots,
    integer,
    slot_tables,
    slots_between,
    slots_of,
    turns_of,
)
from ..partials import (
    Partials,
    add,
    add_up_part,
    entry,
    groups,
    is_last,
    largest_of_rows,
    put_all,
    rows_left,
    sum_of_rows,
)
from ..tiles import Extents, edge, either, launched
from ..tokens import at, exponential, limited, named, number, of_pair, real, size, thresholds
from .measures import (
    BINS,
    COPIES,
    Ratio,
    count_weights,
    measure_criterion,
    measure_sequence_weights,
    measure_sequences,
    weigh_sequences,
    weight_of,
)
from .peers import finish_call, report_criterion, report_sequences, report_weights
from .plan import Plan, criterion
from .turns import (
    Decisions,
    Turns,
    drops_sequences,
    rejected_by_turns,
    report_turns,
    total,
    walk_turns,
    weights_of_turns,
)
from .units import (
    count_kept,
    measured_of,
    measured_tokens,
    store_states,
    test_units,
    thinning_bit,
    units_of,
    weightless_of,
)

# Tokens that are zeroed at a time.
BLOCK = tl.constexpr(512)
# Bins that are added up at a time.
SOME_BINS = tl.constexpr(64)

# --- deciding ---


@triton.jit
def decide_by_tokens(totals: UnitTotals, valid, n, keep, out: Partials, PLAN: tl.constexpr):
    """Reject sequences in which a token failed a criterion that drops sequences; report all criteria of tokens."""
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "token":
            lost = integer(totals, PLAN, named(i, "lost"))
            if criterion(PLAN, i).drop == "sequence":
                keep = keep & (lost == 0)
                lost = tl.where(lost > 0, valid, 0)
            if criterion(PLAN, i).may_be_nan:
                add(out.sums, PLAN, named(i, "units"), integer(totals, PLAN, named(i, "counted")))
            else:
                add(out.sums, PLAN, named(i, "units"), measured_of(totals, valid, n, criterion(PLAN, i).pair, PLAN))
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)
    return keep


@triton.jit
def decide_by_sequences(
    totals: UnitTotals, units: Units, advantage, kept_by_tokens, keep, out: Partials, numbers: tl.tuple,
    PLAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Test sequences by their own criteria: return `keep`, the bits of criteria that thin, and vetoed sequences."""
    state = tl.zeros_like(units.valid).to(tl.int32)
    vetoed = tl.zeros_like(keep)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "sequence":
            value, among, failed, lost = test_units(
                totals, units, advantage, kept_by_tokens, numbers, criterion(PLAN, i), PLAN
            )
            if criterion(PLAN, i).thins:
                state |= tl.where(failed, thinning_bit(PLAN, i), 0)
            else:
                keep = keep & (failed == 0)
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)
            measure_criterion(value, among, out, numbers, criterion(PLAN, i), PLAN)
            vetoed = report_criterion(value, failed, vetoed, units, out, numbers, criterion(PLAN, i), PLAN)
    return keep, state, vetoed


@triton.jit
def without_nonfinite(totals: UnitTotals, nonfinite, keep, PLAN: tl.constexpr):
    """Reject sequences with a token whose D, of any pair of policies, is not finite."""
    if PLAN.rejects_nonfinite:
        keep = keep & (nonfinite == 0)
        for k in tl.static_range(size(PLAN, "pairs")):
            keep = keep & (integer(totals, PLAN, of_pair(k + 1, "nonfinite")) == 0)
    return keep


# --- counting ---


@triton.jit
def report_counts(units: Units, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences there are, and are measured."""
    add(out.sums, PLAN, "tokens", units.valid)
    add(out.sums, PLAN, "tokens_measured", units.n)
    add(out.sums, PLAN, "tokens_nonfinite", units.nonfinite)
    add(out.sums, PLAN, "tokens_differing", units.differing)
    add(out.sums, PLAN, "sequences", units.valid > 0)
    add(out.sums, PLAN, "sequences_differing", units.differing > 0)
    add(out.sums, PLAN, "sequences_measured", units.n > 0)


@triton.jit
def report_kept(units: Units, keep, kept, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences are kept."""
    nonempty = units.valid > 0
    add(out.sums, PLAN, "tokens_kept", kept)
    add(out.sums, PLAN, "sequences_kept", keep & nonempty)
    add(out.sums, PLAN, "sequences_without_survivors", keep & nonempty & (kept == 0))


@triton.jit
def decide(
    totals: UnitTotals, advantages, sequence, known, out: Partials, bins, numbers: tl.tuple, turns: tl.tuple,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Decide about some sequences and store their statistics; return `keep`, states, non-finite tokens, weights.

    advantages: [S], if the plan asks for them; [U] with turns. turns: the `Turns`, where the plan has any. BY_OWNER:
    every turn has one slot, as in `gather.slots_of`.
    """
    valid, nonfinite = integer(totals, PLAN, "valid"), integer(totals, PLAN, "nonfinite")
    if PLAN.packed:
        # What lies outside is counted below 0, so that a sequence with wrong offsets takes none of it for its own.
        add(out.sums, PLAN, "tokens_outside", tl.where(known, 0, -valid))
        valid = tl.where(known, tl.maximum(valid, 0), 0)
    else:
        add(out.sums, PLAN, "tokens_outside", valid * 0)
    add(out.sums, PLAN, "sequences_padded", valid * 0)
    keep = decide_by_tokens(totals, valid, measured_tokens(valid, nonfinite, PLAN), known, out, PLAN)
    units = units_of(totals, valid, nonfinite, keep, PLAN)
    advantage = units.sum_d
    if PLAN.advantages == "sequence":
        place, some = sequence, known
        if PLAN.turns:
            place, some = turns.low - 1, known & (turns.low < turns.high)
        advantage = tl.load(advantages + place, mask=some).to(tl.float64)
    kept_by_tokens = keep
    keep, state, vetoed = decide_by_sequences(totals, units, advantage, kept_by_tokens, keep, out, numbers, PLAN)
    keep = without_nonfinite(totals, nonfinite, keep, PLAN)

    # Ahead of the turns, whose loop would hold it all in registers until then.
    report_counts(units, out, PLAN)
    measure_sequences(units, out, numbers, PLAN)

    weight = units.sum_d
    if PLAN.weighs is not None and not PLAN.weighs_turns:
        weights = weigh_sequences(totals, units, numbers, PLAN)
        weight = weights.weight
        # Once: where weights are of sequences nothing is zeroed here, and no program shares them.
        count_weights(bins, weights, known & (units.n > 0), PLAN)
    if PLAN.turns:
        decisions = Decisions(kept_by_tokens, keep, state, nonfinite, advantage, weight)
        if drops_sequences(PLAN):
            keep = keep & (rejected_by_turns(turns, known, decisions, numbers, PLAN, SHAPE, BY_OWNER) == 0)
            decisions = Decisions(kept_by_tokens, keep, state, nonfinite, advantage, weight)
        sums, maxima = walk_turns(turns, known, decisions, PLAN, SHAPE, BY_OWNER)
        report_turns(sums, maxima, units, out, PLAN)
        kept = total(sums, PLAN, "of_sequence/kept").to(tl.int64)
        if PLAN.weighs_turns:
            weights = weights_of_turns(sums, units, PLAN)
    else:
        kept = count_kept(totals, valid, keep, state, PLAN)
    report_kept(units, keep, kept, out, PLAN)
    if PLAN.weighs is not None:
        measure_sequence_weights(units, weights, out, numbers, PLAN)
        if size(PLAN, "schemes") > 0:
            report_weights(totals, units, weights, out, numbers, PLAN)
    if size(PLAN, "schemes") > 0:
        report_sequences(totals, units, kept, vetoed, out, numbers, PLAN)
    return keep, state, nonfinite, weight


# --- zeroing the tokens of rejected sequences, in the programs that rejected them ---


@triton.jit
def zero(tensor, begin, end, share, shares) -> None:
    """Zero a share of a stretch of a contiguous tensor, in whole blocks where it has some, so that stores are wide."""
    for block in range(begin // BLOCK + share, (end + BLOCK - 1) // BLOCK, shares):
        place = block * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), tensor.dtype.element_ty)
        if (block * BLOCK >= begin) & ((block + 1) * BLOCK <= end):
            tl.store(tensor + place, nothing)
        else:
            tl.store(tensor + place, nothing, mask=(place >= begin) & (place < end))


@triton.jit
def chosen(x, which):
    """Return one of some values: a scalar."""
    return tl.sum(tl.where(which, x.to(tl.int64), 0), 0)


@triton.jit
def zero_rejected(weights, mask, begin, end, rejected, weightless, share, shares, PLAN: tl.constexpr) -> None:
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


# --- the statistics of the call, in the order of the vector that is handed out ---


class Leftover(NamedTuple):
    """The partial statistics, float64."""

    sequence_sums: tl.tensor  # [sequence programs, sequence_sums]
    sequence_maxima: tl.tensor  # [sequence programs, sequence_maxima]
    part_sums: tl.tensor  # [parts, token_sums]
    part_maxima: tl.tensor  # [parts, token_maxima - derived]


@triton.constexpr_function
def place_of_table(plan: Plan, table: str) -> int:
    """Find the first statistic of a table: sums of tokens, of sequences, bins, of the call; maxima in this order.

    Behind them are those of ages, which are kept as the last ones of tokens, and the mean.
    """
    bins = {"bins": BINS.value * plan.full, "bins_of_weights": BINS.value * plan.bins_weights}
    sums = ("token_sums", "sequence_sums", *bins, "call_sums")
    tables = (*sums, "token_maxima", "sequence_maxima", "call_maxima", "age_sums", "age_maxima", "mean")
    many = {name: bins[name] if name in bins else len(getattr(plan, name)) for name in tables[:-1]}
    many["token_sums"] -= many["age_sums"]
    many["sequence_sums"] -= plan.unreported
    many["token_maxima"] -= many["age_maxima"]
    return sum(many[name] for name in tables[: tables.index(table)])


@triton.jit
def put_last(out, found, COLUMNS: tl.constexpr, LAST: tl.constexpr) -> None:
    """Store the last of some columns side by side."""
    for i in tl.static_range(LAST):
        tl.store(out + i, entry(found, COLUMNS - LAST + i))


@triton.constexpr_function
def some_bins(plan: Plan) -> int:
    """Count the steps in which all bins are added up."""
    return BINS.value // SOME_BINS.value if plan.full else 0


@triton.jit
def derived_maximum(k: tl.constexpr, found, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute the k-th extremum of the batch's token weights from the extrema of D, even k from above."""
    column: tl.constexpr = at(PLAN, "token_maxima", "max_d") - PLAN.derived
    return weight_at(k, entry(found, column + k % 2), entry(found, column + 1 - k % 2), numbers, PLAN)


@triton.jit
def weight_at(k: tl.constexpr, extremum, other, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute an extremum of token weights from the extremum of D on the same side: a weight grows with D.

    One that becomes 0 outside its bounds does not: of it only the ratio before them is derived.
    """
    extremum = extremum.to(real(PLAN))
    none = extremum == float("-inf")
    if PLAN.nonfinite == "propagate":
        # An infinite D is the extremum of one side alone; where there is no token both are -inf.
        none = none & (other == float("-inf"))
    d = -extremum if k % 2 else extremum
    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio, PLAN)
    weights = weight_of(Ratio(log_ratio, e, excess, k3), numbers, PLAN)
    weight = weights.ratio if k < 2 else weights.weight
    return tl.where(none, extremum, -weight if k % 2 else weight)


@triton.jit
def add_up_bins(histogram, statistics, PLAN: tl.constexpr) -> None:
    """Add up the copies of the histogram."""
    for i in tl.static_range(some_bins(PLAN)):
        each = i * SOME_BINS + tl.arange(0, SOME_BINS)
        copies = tl.load(histogram + (tl.arange(0, COPIES) * BINS)[:, None] + each[None, :])
        tl.store(statistics + place_of_table(PLAN, "bins") + each, tl.sum(copies, 0).to(tl.float64))


@triton.jit
def put_bins_of_weights(histogram, statistics, PLAN: tl.constexpr) -> None:
    """Store the bins of weights behind those of tokens."""
    each = tl.arange(0, BINS)
    counts = tl.load(histogram + COPIES * BINS + each)
    tl.store(statistics + place_of_table(PLAN, "bins_of_weights") + each, counts.to(tl.float64))


@triton.constexpr_function
def of_mean(plan: Plan, i: int) -> float:
    """Return a part of `Plan.mean`."""
    assert plan.mean is not None
    return plan.mean[i]


@triton.jit
def put_mean(statistics, PLAN: tl.constexpr) -> None:
    """Store what divides the weights behind the statistics: their mean, or 1 where that is too small."""
    # The threads of this program have stored both sums.
    tl.debug_barrier()
    weights, units = tl.load(statistics + of_mean(PLAN, 0)), tl.load(statistics + of_mean(PLAN, 1))
    mean = weights / tl.maximum(units, 1.0)
    tl.store(statistics + place_of_table(PLAN, "mean"), tl.where(mean <= of_mean(PLAN, 2), 1.0, mean))


@triton.jit
def finish(
    statistics, partials: Leftover, numbers: tl.tuple, extents: Extents, sequence_programs, parts, PLAN: tl.constexpr
) -> None:
    """Add up the rows of all programs, in the last one."""
    rows, apart = rows_left(sequence_programs)
    totals = sum_of_rows(partials.sequence_sums, rows, apart, size(PLAN, "sequence_sums"))
    reported: tl.constexpr = size(PLAN, "sequence_sums") - PLAN.unreported
    put_all(statistics + place_of_table(PLAN, "sequence_sums"), totals, reported)
    finish_call(statistics + place_of_table(PLAN, "call_sums"), statistics + place_of_table(PLAN, "call_maxima"),
                totals, extents.tokens, extents.sequences, PLAN)  # fmt: skip
    found = largest_of_rows(partials.sequence_maxima, rows, apart, size(PLAN, "sequence_maxima"))
    put_all(statistics + place_of_table(PLAN, "sequence_maxima"), found, size(PLAN, "sequence_maxima"))
    found = sum_of_rows(partials.part_sums, parts, 1, size(PLAN, "token_sums"))
    put_all(statistics + place_of_table(PLAN, "token_sums"), found, size(PLAN, "token_sums") - size(PLAN, "age_sums"))
    put_last(statistics + place_of_table(PLAN, "age_sums"), found, size(PLAN, "token_sums"), size(PLAN, "age_sums"))
    maxima: tl.constexpr = kept_of(PLAN, "token_maxima")
    found = largest_of_rows(partials.part_maxima, parts, 1, maxima)
    out = statistics + place_of_table(PLAN, "token_maxima")
    put_all(out + PLAN.derived, found, maxima - size(PLAN, "age_maxima"))
    put_last(statistics + place_of_table(PLAN, "age_maxima"), found, maxima, size(PLAN, "age_maxima"))
    many: tl.constexpr = PLAN.derived
    for k in tl.static_range(many):
        tl.store(out + k, derived_maximum(k, found, numbers, PLAN))
    if PLAN.mean is not None:
        put_mean(statistics, PLAN)


# --- the kernel ---


@launched
def decide_kernel(
    numbers, advantages, offsets, counts, integers, floats, peaks, keep_out, states, sequence_weights, weights,
    mask_out, sequence_sums, sequence_maxima, token_sums, token_maxima, part_sums, part_maxima, histogram, counter,
    statistics, within, keep_turns_out,
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
        first_slot, slot_count = slots_between(offsets, low, high, extents, BY_OWNER)
        sequence = owner - 1
        turns = Turns(low, high, offsets, extents, tables, slots, keep_turns_out, either(states, counts),
                      either(sequence_weights, counts), in_memory, either(histogram, counts))  # fmt: skip
    else:
        sequence, first_slot, slot_count = slots_of(offsets, owner, extents, PLAN, BY_OWNER)
    known = (sequence >= 0) & (sequence < known_sequences)
    rejected, weightless = known, known
    if share < shares:
        out = Partials(sequence_sums, sequence_maxima)
        totals = gather_slots(tables, first_slot, slot_count, slots, PLAN, SHAPE)
        keep, state, nonfinite, weight = decide(totals, advantages, sequence, known, out, either(histogram, counts),
                                                numbers, turns, PLAN, SHAPE, BY_OWNER)  # fmt: skip
        tl.store(keep_out + sequence, keep.to(tl.int8), mask=tl.where(share == 0, known, False))
        rejected, weightless = known & (keep == 0), known & weightless_of(keep, nonfinite, PLAN)
        if (PLAN.applies or PLAN.leaves) and not PLAN.turns:
            store_states(states, sequence_weights, sequence, known, state, rejected, weightless, weight, PLAN)
    elif program < sequence_programs * shares + parts * groups(PLAN):
        k = program - sequence_programs * shares
        add_up_part(k, token_sums, token_maxima, part_sums, part_maxima, token_programs, part, PLAN)
    elif PLAN.full:
        add_up_bins(histogram, statistics, PLAN)
    if is_last(counter, Partials(sequence_sums, sequence_maxima), program, sequence_programs, PLAN):
        partials = Leftover(sequence_sums, sequence_maxima, part_sums, part_maxima)
        extents = Extents(tokens, known_sequences, width, tiles, tile_bits)
        finish(statistics, partials, numbers, extents, sequence_programs, parts, PLAN)
        if PLAN.bins_weights:
            put_bins_of_weights(histogram, statistics, PLAN)
    if PLAN.zeroes and share < shares:
        begin, end = sequence * width, (sequence + 1) * width
        if PLAN.packed:
            begin, end = edge(offsets, owner, sequences, tokens), edge(offsets, owner + 1, sequences, tokens)
        zero_rejected(weights, mask_out, begin, end, rejected, weightless, share, shares, PLAN)
