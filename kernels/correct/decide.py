"""The second launch: decide which sequences are rejected, weigh them, and finish the statistics.

Where `apply` does not follow, the tokens of rejected sequences are zeroed here. It reads the slots: of
`metrics_packed`, 4,096 tokens a sequence, 0.06 bytes and 0.5 PTX instructions a token, by `lab.ptx.counts`.

A unit is a sequence or a turn. Every lane has one, and a program SEQUENCES = SHAPE.sequences of them:

    i_owner           [SEQUENCES] int64, from 0; of a packed batch 0 and S + 1 are what lies before and behind sequences
    i_sequence        [SEQUENCES] int64, the number of the owner's sequence
    m_known           [SEQUENCES] bool, there is such a sequence
    i_first_slot      [SEQUENCES] int64, the first slot of each in the tables of `read`
    b_slot_count      [SEQUENCES] int64, how many slots it has; `slots` is how many the tables have
    totals            `UnitTotals`, the columns of these tables added up over the slots of each, found by name
    units             `Units`, the counts and sums that follow, [SEQUENCES] each
    m_kept_by_tokens  [SEQUENCES] bool, what criteria of tokens keep; `m_keep`: what all criteria keep
    b_state           [SEQUENCES] int32, bits for `apply`: REJECTED, WEIGHTLESS, and a `thinning_bit` of each criterion
    out               `Partials`, this program's row of the statistics
    p_statistics      the vector that is handed out, in the order of `place_of_table`; `put_mean` may append to it

planner.py names the columns and thresholds of a Spec, gather.py finds slots and adds them up, units.py has the value
of a criterion and what a failure rejects, measures.py the weights and statistics, peers.py those of other frameworks,
turns.py a sequence's turns, partials.py what programs leave to one another.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .. import gather, partials, tiles
from ..gather import Units, UnitTotals, integer
from ..partials import Partials, add, entry
from ..tables import at, kept_of, named, number, of_pair, size, thresholds
from ..tiles import Extents, edge, either
from ..tokens import exponential, limited
from . import measures
from .measures import BINS, COPIES, Ratio, weight_of
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
def decide_by_tokens(totals: UnitTotals, b_valid, b_n, m_keep, out: Partials, PLAN: tl.constexpr):
    """Reject sequences in which a token failed a criterion that drops sequences; report all criteria of tokens."""
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "token":
            b_lost = integer(totals, PLAN, named(i, "lost"))
            if criterion(PLAN, i).drop == "sequence":
                m_keep = m_keep & (b_lost == 0)
                b_lost = tl.where(b_lost > 0, b_valid, 0)
            if criterion(PLAN, i).may_be_nan:
                add(out.sums, PLAN, named(i, "units"), integer(totals, PLAN, named(i, "counted")))
            else:
                add(out.sums, PLAN, named(i, "units"), measured_of(totals, b_valid, b_n, criterion(PLAN, i).pair, PLAN))
            add(out.sums, PLAN, named(i, "tokens"), b_lost)
            add(out.sums, PLAN, named(i, "sequences"), b_lost > 0)
    return m_keep


@triton.jit
def decide_by_sequences(totals: UnitTotals, units: Units, b_advantage, m_kept_by_tokens, m_keep, out: Partials,
                        numbers: tl.tuple, PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Test sequences by their own criteria: return `keep`, the bits of criteria that thin, and vetoed sequences."""
    b_state = tl.zeros_like(units.valid).to(tl.int32)
    m_vetoed = tl.zeros_like(m_keep)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "sequence":
            b_value, m_among, m_failed, b_lost = test_units(
                totals, units, b_advantage, m_kept_by_tokens, numbers, criterion(PLAN, i), PLAN
            )
            if criterion(PLAN, i).thins:
                b_state |= tl.where(m_failed, thinning_bit(PLAN, i), 0)
            else:
                m_keep = m_keep & (m_failed == 0)
            add(out.sums, PLAN, named(i, "tokens"), b_lost)
            add(out.sums, PLAN, named(i, "sequences"), b_lost > 0)
            measures.measure_criterion(b_value, m_among, out, numbers, criterion(PLAN, i), PLAN)
            m_vetoed = report_criterion(b_value, m_failed, m_vetoed, units, out, numbers, criterion(PLAN, i), PLAN)
    return m_keep, b_state, m_vetoed


@triton.jit
def without_nonfinite(totals: UnitTotals, b_nonfinite, m_keep, PLAN: tl.constexpr):
    """Reject sequences with a token whose D, of any pair of policies, is not finite."""
    if PLAN.rejects_nonfinite:
        m_keep = m_keep & (b_nonfinite == 0)
        for k in tl.static_range(size(PLAN, "pairs")):
            m_keep = m_keep & (integer(totals, PLAN, of_pair(k + 1, "nonfinite")) == 0)
    return m_keep


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
def report_kept(units: Units, m_keep, b_kept, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences are kept."""
    m_nonempty = units.valid > 0
    add(out.sums, PLAN, "tokens_kept", b_kept)
    add(out.sums, PLAN, "sequences_kept", m_keep & m_nonempty)
    add(out.sums, PLAN, "sequences_without_survivors", m_keep & m_nonempty & (b_kept == 0))


@triton.jit
def decide(totals: UnitTotals, p_advantages, i_sequence, m_known, out: Partials, p_bins, numbers: tl.tuple,
           turns: tl.tuple, PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr):  # fmt: skip
    """Decide about some sequences and store their statistics; return `keep`, states, non-finite tokens, weights.

    p_advantages: [S], if the plan asks for them; [U] with turns. turns: the `Turns`, where the plan has any. BY_OWNER:
    every turn has one slot, as in `gather.slots_of`.
    """
    b_valid, b_nonfinite = integer(totals, PLAN, "valid"), integer(totals, PLAN, "nonfinite")
    if PLAN.packed:
        # What lies outside is counted below 0, so that a sequence with wrong offsets takes none of it for its own.
        add(out.sums, PLAN, "tokens_outside", tl.where(m_known, 0, -b_valid))
        b_valid = tl.where(m_known, tl.maximum(b_valid, 0), 0)
    else:
        add(out.sums, PLAN, "tokens_outside", b_valid * 0)
    add(out.sums, PLAN, "sequences_padded", b_valid * 0)
    m_keep = decide_by_tokens(totals, b_valid, measured_tokens(b_valid, b_nonfinite, PLAN), m_known, out, PLAN)
    units = units_of(totals, b_valid, b_nonfinite, m_keep, PLAN)
    b_advantage = units.sum_d
    if PLAN.advantages == "sequence":
        i_place, m_some = i_sequence, m_known
        if PLAN.turns:
            i_place, m_some = turns.low - 1, m_known & (turns.low < turns.high)
        b_advantage = tl.load(p_advantages + i_place, mask=m_some).to(tl.float64)
    m_kept_by_tokens = m_keep
    m_keep, b_state, m_vetoed = decide_by_sequences(
        totals, units, b_advantage, m_kept_by_tokens, m_keep, out, numbers, PLAN
    )
    m_keep = without_nonfinite(totals, b_nonfinite, m_keep, PLAN)

    # Ahead of the turns, whose loop would hold it all in registers until then.
    report_counts(units, out, PLAN)
    measures.measure_sequences(units, out, numbers, PLAN)

    b_weight = units.sum_d
    if PLAN.weighs is not None and not PLAN.weighs_turns:
        weights = measures.weigh_sequences(totals, units, numbers, PLAN)
        b_weight = weights.weight
        # Once: where weights are of sequences nothing is zeroed here, and no program shares them.
        measures.count_weights(p_bins, weights, m_known & (units.n > 0), PLAN)
    if PLAN.turns:
        decisions = Decisions(m_kept_by_tokens, m_keep, b_state, b_nonfinite, b_advantage, b_weight)
        if drops_sequences(PLAN):
            m_keep = m_keep & (rejected_by_turns(turns, m_known, decisions, numbers, PLAN, SHAPE, BY_OWNER) == 0)
            decisions = Decisions(m_kept_by_tokens, m_keep, b_state, b_nonfinite, b_advantage, b_weight)
        sums, maxima = walk_turns(turns, m_known, decisions, PLAN, SHAPE, BY_OWNER)
        report_turns(sums, maxima, units, out, PLAN)
        b_kept = total(sums, PLAN, "of_sequence/kept").to(tl.int64)
        if PLAN.weighs_turns:
            weights = weights_of_turns(sums, units, PLAN)
    else:
        b_kept = count_kept(totals, b_valid, m_keep, b_state, PLAN)
    report_kept(units, m_keep, b_kept, out, PLAN)
    if PLAN.weighs is not None:
        measures.measure_sequence_weights(units, weights, out, numbers, PLAN)
        if size(PLAN, "schemes") > 0:
            report_weights(totals, units, weights, out, numbers, PLAN)
    if size(PLAN, "schemes") > 0:
        report_sequences(totals, units, b_kept, m_vetoed, out, numbers, PLAN)
    return m_keep, b_state, b_nonfinite, b_weight


# --- zeroing the tokens of rejected sequences, in the programs that rejected them ---


@triton.jit
def zero(p_out, begin, end, share, shares) -> None:
    """Zero a share of a stretch of a contiguous tensor, in whole blocks where it has some, so that stores are wide."""
    for block in range(begin // BLOCK + share, (end + BLOCK - 1) // BLOCK, shares):
        o_place = block * BLOCK + tl.arange(0, BLOCK)
        b_nothing = tl.zeros((BLOCK,), p_out.dtype.element_ty)
        if (block * BLOCK >= begin) & ((block + 1) * BLOCK <= end):
            tl.store(p_out + o_place, b_nothing)
        else:
            tl.store(p_out + o_place, b_nothing, mask=(o_place >= begin) & (o_place < end))


@triton.jit
def chosen(b_x, m_which):
    """Return one of some values: a scalar."""
    return tl.sum(tl.where(m_which, b_x.to(tl.int64), 0), 0)


@triton.jit
def zero_rejected(p_weights, p_mask, o_begin, o_end, m_rejected, m_weightless, share, shares,
                  PLAN: tl.constexpr) -> None:  # fmt: skip
    """Zero a share of each sequence that is rejected (its mask) or weightless (its weights), one after the other."""
    i_place = tl.arange(0, m_rejected.shape[0])
    b_left = tl.zeros_like(i_place)
    if PLAN.zeroes_weights:
        b_left |= m_weightless.to(tl.int32)
    if PLAN.zeroes_mask:
        b_left |= m_rejected.to(tl.int32)
    while tl.max(b_left, 0) > 0:
        m_which = i_place == tl.min(tl.where(b_left > 0, i_place, m_rejected.shape[0]), 0)
        first = chosen(o_begin, m_which)
        if PLAN.zeroes_weights:
            zero(p_weights, first, chosen(tl.where(m_weightless, o_end, o_begin), m_which), share, shares)
        if PLAN.zeroes_mask:
            zero(p_mask, first, chosen(tl.where(m_rejected, o_end, o_begin), m_which), share, shares)
        b_left = tl.where(m_which, 0, b_left)


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
def put_last(p_out, b_found, COLUMNS: tl.constexpr, LAST: tl.constexpr) -> None:
    """Store the last of some columns side by side."""
    for i in tl.static_range(LAST):
        tl.store(p_out + i, entry(b_found, COLUMNS - LAST + i))


@triton.constexpr_function
def some_bins(plan: Plan) -> int:
    """Count the steps in which all bins are added up."""
    return BINS.value // SOME_BINS.value if plan.full else 0


@triton.jit
def derived_maximum(k: tl.constexpr, b_found, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute the k-th extremum of the batch's token weights from the extrema of D, even k from above."""
    column: tl.constexpr = at(PLAN, "token_maxima", "max_d") - PLAN.derived
    return weight_at(k, entry(b_found, column + k % 2), entry(b_found, column + 1 - k % 2), numbers, PLAN)


@triton.jit
def weight_at(k: tl.constexpr, extremum, other, numbers: tl.tuple, PLAN: tl.constexpr):
    """Compute an extremum of token weights from the extremum of D on the same side: a weight grows with D.

    One that becomes 0 outside its bounds does not: of it only the ratio before them is derived.
    """
    extremum = extremum.to(tl.float32)
    none = extremum == float("-inf")
    if PLAN.nonfinite == "propagate":
        # An infinite D is the extremum of one side alone; where there is no token both are -inf.
        none = none & (other == float("-inf"))
    d = -extremum if k % 2 else extremum
    clamp = number(numbers, PLAN, "clamp").to(d.dtype)
    log_ratio = limited(d, -clamp, clamp, PLAN)
    e, excess, k3 = exponential(log_ratio)
    weights = weight_of(Ratio(log_ratio, e, excess, k3), numbers, PLAN)
    weight = weights.ratio if k < 2 else weights.weight
    return tl.where(none, extremum, -weight if k % 2 else weight)


@triton.jit
def add_up_bins(p_histogram, p_statistics, PLAN: tl.constexpr) -> None:
    """Add up the copies of the histogram."""
    for i in tl.static_range(some_bins(PLAN)):
        o_bins = i * SOME_BINS + tl.arange(0, SOME_BINS)
        b_copies = tl.load(p_histogram + (tl.arange(0, COPIES) * BINS)[:, None] + o_bins[None, :])
        tl.store(p_statistics + place_of_table(PLAN, "bins") + o_bins, tl.sum(b_copies, 0).to(tl.float64))


@triton.jit
def put_bins_of_weights(p_histogram, p_statistics, PLAN: tl.constexpr) -> None:
    """Store the bins of weights behind those of tokens."""
    o_bins = tl.arange(0, BINS)
    b_counts = tl.load(p_histogram + COPIES * BINS + o_bins)
    tl.store(p_statistics + place_of_table(PLAN, "bins_of_weights") + o_bins, b_counts.to(tl.float64))


@triton.constexpr_function
def of_mean(plan: Plan, i: int) -> float:
    """Return a part of `Plan.mean`."""
    assert plan.mean is not None
    return plan.mean[i]


@triton.jit
def put_mean(p_statistics, PLAN: tl.constexpr) -> None:
    """Store what divides the weights behind the statistics: their mean, or 1 where that is too small."""
    # The threads of this program have stored both sums.
    tl.debug_barrier()
    weights, units = tl.load(p_statistics + of_mean(PLAN, 0)), tl.load(p_statistics + of_mean(PLAN, 1))
    mean = weights / tl.maximum(units, 1.0)
    tl.store(p_statistics + place_of_table(PLAN, "mean"), tl.where(mean <= of_mean(PLAN, 2), 1.0, mean))


@triton.jit
def finish(p_statistics, leftover: Leftover, numbers: tl.tuple, extents: Extents, sequence_programs, parts,
           PLAN: tl.constexpr) -> None:  # fmt: skip
    """Add up the rows of all programs, in the last one."""
    rows, apart = partials.rows_left(sequence_programs)
    b_totals = partials.sum_of_rows(leftover.sequence_sums, rows, apart, size(PLAN, "sequence_sums"))
    reported: tl.constexpr = size(PLAN, "sequence_sums") - PLAN.unreported
    partials.put_all(p_statistics + place_of_table(PLAN, "sequence_sums"), b_totals, reported)
    finish_call(p_statistics + place_of_table(PLAN, "call_sums"), p_statistics + place_of_table(PLAN, "call_maxima"),
                b_totals, extents.tokens, extents.sequences, PLAN)  # fmt: skip
    b_found = partials.largest_of_rows(leftover.sequence_maxima, rows, apart, size(PLAN, "sequence_maxima"))
    partials.put_all(p_statistics + place_of_table(PLAN, "sequence_maxima"), b_found, size(PLAN, "sequence_maxima"))
    b_found = partials.sum_of_rows(leftover.part_sums, parts, 1, size(PLAN, "token_sums"))
    partials.put_all(
        p_statistics + place_of_table(PLAN, "token_sums"), b_found, size(PLAN, "token_sums") - size(PLAN, "age_sums")
    )
    put_last(p_statistics + place_of_table(PLAN, "age_sums"), b_found, size(PLAN, "token_sums"), size(PLAN, "age_sums"))
    maxima: tl.constexpr = kept_of(PLAN, "token_maxima")
    b_found = partials.largest_of_rows(leftover.part_maxima, parts, 1, maxima)
    p_out = p_statistics + place_of_table(PLAN, "token_maxima")
    partials.put_all(p_out + PLAN.derived, b_found, maxima - size(PLAN, "age_maxima"))
    put_last(p_statistics + place_of_table(PLAN, "age_maxima"), b_found, maxima, size(PLAN, "age_maxima"))
    many: tl.constexpr = PLAN.derived
    for k in tl.static_range(many):
        tl.store(p_out + k, derived_maximum(k, b_found, numbers, PLAN))
    if PLAN.mean is not None:
        put_mean(p_statistics, PLAN)


# --- the kernel ---


@tiles.launched
def decide_kernel(
    p_numbers, p_advantages, p_offsets, p_counts, p_integers, p_floats, p_peaks, p_keep_out, p_states,
    p_sequence_weights, p_weights, p_mask_out, p_sequence_sums, p_sequence_maxima, p_token_sums, p_token_maxima,
    p_part_sums, p_part_maxima, p_histogram, p_counter, p_statistics, p_within, p_keep_turns_out,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, row_tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, shares: tl.int32, parts: tl.int32, part: tl.int32,
    owner_count: tl.int64,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr,
) -> None:  # fmt: skip
    """Decide about SHAPE.sequences sequences: store `keep`, state, weight, and their share of the statistics.

    Where sequences are long so many programs (shares) come to the same decision, each to zero its part of the tokens.
    Programs behind those add up parts of what `read` has left. The last of all finishes the statistics. With turns
    `p_offsets` and `sequences` are of turns, as everywhere else, and `p_within` says which are of which sequence.
    """
    numbers = thresholds(p_numbers, PLAN)
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, row_tiles, tile_bits)
    # Where there is nothing to zero, none are launched to share it.
    shares = shares if PLAN.zeroes else 1
    share = program // sequence_programs
    i_owner = (program % sequence_programs).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    tables = gather.slot_tables(p_counts, p_integers, p_floats, p_peaks)
    known_sequences = sequences
    turns: tl.tuple = (i_owner,)
    if PLAN.turns:
        known_sequences = owner_count - 2
        i_low, i_high = gather.turns_of(p_within, i_owner, known_sequences, sequences)
        i_first_slot, b_slot_count = gather.slots_between(p_offsets, i_low, i_high, extents, BY_OWNER)
        i_sequence = i_owner - 1
        turns = Turns(i_low, i_high, p_offsets, extents, tables, slots, p_keep_turns_out, either(p_states, p_counts),
                      either(p_sequence_weights, p_counts), p_numbers, either(p_histogram, p_counts))  # fmt: skip
    else:
        i_sequence, i_first_slot, b_slot_count = gather.slots_of(p_offsets, i_owner, extents, PLAN, BY_OWNER)
    m_known = (i_sequence >= 0) & (i_sequence < known_sequences)
    m_rejected, m_weightless = m_known, m_known
    if share < shares:
        out = Partials(p_sequence_sums, p_sequence_maxima)
        totals = gather.gather_slots(tables, i_first_slot, b_slot_count, slots, PLAN, SHAPE)
        m_keep, b_state, b_nonfinite, b_weight = decide(totals, p_advantages, i_sequence, m_known, out,
                                                        either(p_histogram, p_counts), numbers, turns, PLAN, SHAPE,
                                                        BY_OWNER)  # fmt: skip
        tl.store(p_keep_out + i_sequence, m_keep.to(tl.int8), mask=tl.where(share == 0, m_known, False))
        m_rejected, m_weightless = m_known & (m_keep == 0), m_known & weightless_of(m_keep, b_nonfinite, PLAN)
        if (PLAN.applies or PLAN.leaves) and not PLAN.turns:
            store_states(
                p_states, p_sequence_weights, i_sequence, m_known, b_state, m_rejected, m_weightless, b_weight, PLAN
            )
    elif program < sequence_programs * shares + parts * partials.groups(PLAN):
        k = program - sequence_programs * shares
        partials.add_up_part(k, p_token_sums, p_token_maxima, p_part_sums, p_part_maxima, token_programs, part, PLAN)
    elif PLAN.full:
        add_up_bins(p_histogram, p_statistics, PLAN)
    if partials.is_last(p_counter, Partials(p_sequence_sums, p_sequence_maxima), program, sequence_programs, PLAN):
        leftover = Leftover(p_sequence_sums, p_sequence_maxima, p_part_sums, p_part_maxima)
        extents = Extents(tokens, known_sequences, width, row_tiles, tile_bits)
        finish(p_statistics, leftover, numbers, extents, sequence_programs, parts, PLAN)
        if PLAN.bins_weights:
            put_bins_of_weights(p_histogram, p_statistics, PLAN)
    if PLAN.zeroes and share < shares:
        o_begin, o_end = i_sequence * width, (i_sequence + 1) * width
        if PLAN.packed:
            o_begin, o_end = (
                edge(p_offsets, i_owner, sequences, tokens),
                edge(p_offsets, i_owner + 1, sequences, tokens),
            )
        zero_rejected(p_weights, p_mask_out, o_begin, o_end, m_rejected, m_weightless, share, shares, PLAN)
