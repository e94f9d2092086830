"""Add the slots of each sequence up, decide which sequences are rejected, weigh them, and finish the statistics.

The second launch. Where `apply` does not follow, the tokens of rejected sequences are zeroed here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_corr.kernels.correct.criteria import passes, statistic_of_extremum
from rollout_corr.kernels.correct.finish import Leftover, add_up_bins, finish
from rollout_corr.kernels.correct.measures import (
    Rows,
    measure_criterion,
    measure_sequence_weights,
    measure_sequences,
    weigh_sequences,
)
from rollout_corr.kernels.correct.peers import report_criterion, report_sequences, report_weights
from rollout_corr.kernels.correct.plan import Plan, Test
from rollout_corr.kernels.correct.zero import zero_rejected
from rollout_corr.kernels.gather import Gathered, SlotTables, exact, gathered, integer, plain, slot_tables, slots_of
from rollout_corr.kernels.partials import Partials, add, add_up_part, groups, is_last
from rollout_corr.kernels.slots import Extents, edge
from rollout_corr.kernels.tokens import (
    at,
    class_name,
    has,
    named,
    of_key,
    of_pair,
    size,
    test,
    thresholds,
)

# The classes of tokens that each `when` selects, as indices of plan.CLASSES.
CHOSEN = {"any": (), "negative_advantage": (0, 1), "positive_advantage": (2, 3), "outward": (0, 2)}

# Bits of a sequence's state for `apply`: rejected; without weight; then one for each criterion that dropped tokens.
REJECTED = tl.constexpr(1)
WEIGHTLESS = tl.constexpr(2)


@triton.constexpr_function
def thinning_bit(plan: Plan, i: int) -> int:
    """Find the state bit of a criterion that thins sequences."""
    return 4 << [criterion.index for criterion in plan.thinning_tests].index(i)


@triton.constexpr_function
def selects(criterion: Test, which: int) -> bool:
    """Test whether a criterion's `when` selects a class of tokens."""
    return which in CHOSEN[criterion.when]


# --- the value of a criterion ---


@triton.jit
def selected_sequences(
    found: Gathered, advantage: tl.tensor, PLAN: tl.constexpr, TEST: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Select sequences by the sign of their mean advantage; for "outward" those that hold an outward token."""
    if TEST.when == "outward":
        outward = integer(found, PLAN, of_pair(TEST.pair, "negative_outward"))
        outward += integer(found, PLAN, of_pair(TEST.pair, "positive_outward"))
        return outward > 0
    else:
        if PLAN.advantages == "token":
            mean = exact(found, PLAN, "advantage", False)
        else:
            mean = advantage.to(tl.float64)
        return mean < 0 if TEST.when == "negative_advantage" else mean > 0


@triton.jit
def class_count(found: Gathered, PLAN: tl.constexpr, TEST: tl.constexpr) -> tl.tensor:
    """Count the measured tokens that `when` selects."""
    tokens = integer(found, PLAN, "valid") * 0
    for c in tl.static_range(4):
        if selects(TEST, c):
            tokens += integer(found, PLAN, class_name(c))
    return tokens


@triton.jit
def value_of(
    found: Gathered, n: tl.tensor, numbers: tl.tuple, TEST: tl.constexpr, PLAN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute a sequence's value, and the quantity that is compared: a ratio's logarithm, |D| where that decides."""
    if has(PLAN, "peaks", named(TEST.index, "peak")):
        peak = of_key(found.peaks[at(PLAN, "peaks", named(TEST.index, "peak"))])
        if TEST.reduce == "min":
            peak = -peak
        value = statistic_of_extremum(peak, numbers, TEST, PLAN)
        value, tested = value.to(tl.float64), peak.to(tl.float64)
    else:
        if PLAN.kept and TEST.sum == "d":
            value = exact(found, PLAN, "d_kept", True)
        else:
            # Of its own, because Triton 3.5 and 3.6 pass on the text of an attribute only as a constant.
            name: tl.constexpr = TEST.sum
            value = exact(found, PLAN, name, TEST.one_limb)
        if TEST.stat == "k1" and TEST.sum == "d":
            value = -value
        if TEST.reduce == "mean":
            value = value / tl.maximum(n, 1).to(tl.float64)
        tested = value
    return tl.where(n > 0, value, 0.0), tl.where(n > 0, tested, 0.0)


@triton.jit
def measured_of(
    found: Gathered, valid: tl.tensor, n: tl.tensor, K: tl.constexpr, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Count the tokens that pair K of policies measures; n are those of the first pair, train and rollout."""
    if K > 0 and PLAN.nonfinite == "reject":
        return valid - integer(found, PLAN, of_pair(K, "nonfinite"))
    elif K > 0:
        return valid
    else:
        return n


@triton.jit
def among_of(found: Gathered, rows: Rows, keep: tl.tensor, K: tl.constexpr, PLAN: tl.constexpr) -> tl.tensor:
    """Count the tokens that sums over a sequence run over for pair K. keep: the sequences that token criteria kept."""
    if K > 0 and PLAN.kept:
        return tl.where(keep, integer(found, PLAN, of_pair(K, "survivors")), 0)
    else:
        return measured_of(found, rows.valid, rows.n_among, K, PLAN)


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
    found: Gathered, rows: Rows, advantage: tl.tensor, keep: tl.tensor, out: Partials, numbers: tl.tuple,
    PLAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Test sequences by their own criteria: return `keep`, the bits of criteria that thin, and vetoed sequences."""
    kept_by_tokens = keep
    state = tl.zeros_like(rows.valid).to(tl.int32)
    vetoed = tl.zeros_like(keep)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).over == "sequence":
            among = among_of(found, rows, kept_by_tokens, test(PLAN, i).pair, PLAN)
            value, tested = value_of(found, among, numbers, test(PLAN, i), PLAN)
            failed = (passes(tested, numbers, test(PLAN, i), PLAN) == 0) & (among > 0)
            if test(PLAN, i).thins:
                state |= tl.where(failed, thinning_bit(PLAN, i), 0)
                if test(PLAN, i).when == "any":
                    lost = tl.where(failed, rows.n, 0)
                else:
                    lost = tl.where(failed, class_count(found, PLAN, test(PLAN, i)), 0)
            else:
                if test(PLAN, i).when != "any":
                    failed = failed & selected_sequences(found, advantage, PLAN, test(PLAN, i))
                keep = keep & (failed == 0)
                lost = tl.where(failed, rows.valid, 0)
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)
            measure_criterion(value, among > 0, out, numbers, test(PLAN, i), PLAN)
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
def count_kept(
    found: Gathered, valid: tl.tensor, keep: tl.tensor, state: tl.tensor, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Count the tokens of each sequence that nothing has dropped."""
    kept = valid
    if PLAN.drops_tokens:
        kept = integer(found, PLAN, "alive")
    for c in tl.static_range(4):
        if size(PLAN, "thinning_tests") > 0:
            kept = without_class(found, kept, state, c, PLAN)
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).thins and test(PLAN, i).when == "any":
            kept = tl.where((state & thinning_bit(PLAN, i)) != 0, 0, kept)
    return tl.where(keep, kept, 0)


@triton.jit
def without_class(
    found: Gathered, kept: tl.tensor, state: tl.tensor, C: tl.constexpr, PLAN: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Subtract the tokens of class C where a criterion that selects them has failed."""
    gone = state < 0
    for i in tl.static_range(size(PLAN, "tests")):
        if test(PLAN, i).thins and selects(test(PLAN, i), C):
            gone = gone | ((state & thinning_bit(PLAN, i)) != 0)
    if PLAN.classes_of(0):
        if PLAN.drops_tokens:
            lost = integer(found, PLAN, named("alive", class_name(C)))
        else:
            lost = integer(found, PLAN, class_name(C))
        kept = kept - tl.where(gone, lost, 0)
    return kept


@triton.jit
def report_counts(rows: Rows, keep: tl.tensor, kept: tl.tensor, out: Partials, PLAN: tl.constexpr) -> None:
    """Report how many tokens and sequences there are, are measured, and are kept."""
    nonempty = rows.valid > 0
    add(out.sums, PLAN, "tokens", rows.valid)
    add(out.sums, PLAN, "tokens_measured", rows.n)
    add(out.sums, PLAN, "tokens_nonfinite", rows.nonfinite)
    add(out.sums, PLAN, "tokens_kept", kept)
    add(out.sums, PLAN, "sequences", nonempty)
    add(out.sums, PLAN, "sequences_measured", rows.n > 0)
    add(out.sums, PLAN, "sequences_kept", keep & nonempty)
    add(out.sums, PLAN, "sequences_without_survivors", keep & nonempty & (kept == 0))


# --- deciding it all ---


@triton.jit
def decide(
    tables: SlotTables, advantages: tl.tensor, sequence: tl.tensor, first: tl.tensor, many: tl.tensor, known: tl.tensor,
    slots: tl.tensor, out: Partials, numbers: tl.tuple, PLAN: tl.constexpr, SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Decide about some sequences and store their statistics; return `keep`, states, non-finite tokens, weights.

    Args:
        tables: The sums of slots.
        advantages: [S], if the plan asks for them.
        sequence: [SEQUENCES], and so are the next three.
        first: The first slot of each.
        many: How many slots each has.
        known: It is a sequence.
        slots: How many there are.
        out: Where this program's share of the statistics goes.
        numbers: The thresholds.
        PLAN: The plan.
        SHAPE: The shape.
    """
    found = gathered(tables, first, many, slots, PLAN, SHAPE)
    valid, nonfinite = integer(found, PLAN, "valid"), integer(found, PLAN, "nonfinite")
    if PLAN.packed:
        # What lies outside is counted below 0, so that a sequence with wrong offsets takes none of it for its own.
        add(out.sums, PLAN, "tokens_outside", tl.where(known, 0, -valid))
        valid = tl.where(known, tl.maximum(valid, 0), 0)
    else:
        add(out.sums, PLAN, "tokens_outside", valid * 0)
    n = valid
    if PLAN.nonfinite == "reject":
        n = valid - nonfinite
    sum_d = exact(found, PLAN, "d", True)
    keep = decide_by_tokens(found, valid, n, known, out, PLAN)
    n_among = n
    if PLAN.kept:
        n_among = tl.where(keep, integer(found, PLAN, "survivors"), 0)
    rows = Rows(valid, nonfinite, n, n_among, sum_d, plain(found, PLAN, "train"), plain(found, PLAN, "rollout"))
    advantage = sum_d
    if PLAN.advantages == "sequence":
        advantage = tl.load(advantages + sequence, mask=known, other=0.0).to(tl.float64)
    keep, state, vetoed = decide_by_sequences(found, rows, advantage, keep, out, numbers, PLAN)
    keep = without_nonfinite(found, nonfinite, keep, PLAN)

    kept = count_kept(found, valid, keep, state, PLAN)
    report_counts(rows, keep, kept, out, PLAN)
    measure_sequences(rows, out, numbers, PLAN)
    weight = sum_d
    if PLAN.level is not None:
        weights = weigh_sequences(found, rows, numbers, PLAN)
        weight = weights.weight
        measure_sequence_weights(rows, weights, out, numbers, PLAN)
        if size(PLAN, "schemes") > 0:
            report_weights(found, rows, weights, out, numbers, PLAN)
    if size(PLAN, "schemes") > 0:
        report_sequences(found, rows, kept, vetoed, out, numbers, PLAN)
    return keep, state, nonfinite, weight


# --- what follows from it ---


@triton.jit
def weightless_of(keep: tl.tensor, nonfinite: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """Select the sequences whose tokens have no weight."""
    if PLAN.rejected != "mask":
        return keep == 0
    elif PLAN.rejects_nonfinite:
        return nonfinite > 0
    else:
        return keep & (keep == 0)


@triton.jit
def store_states(
    states: tl.tensor, weights: tl.tensor, sequence: tl.tensor, known: tl.tensor, state: tl.tensor,
    rejected: tl.tensor, weightless: tl.tensor, weight: tl.tensor, PLAN: tl.constexpr,
) -> None:  # fmt: skip
    """Store for `apply` the state of each sequence and, where weights are of sequences, its weight."""
    state |= tl.where(rejected, REJECTED, 0) | tl.where(weightless, WEIGHTLESS, 0)
    tl.store(states + sequence, state, mask=known)
    if PLAN.spreads:
        weight = tl.where(weightless, 0.0, weight)
        tl.store(weights + sequence, weight.to(weights.dtype.element_ty), mask=known)


# --- the kernel ---


@triton.jit(
    do_not_specialize=[
        "tokens", "sequences", "width", "tiles", "tile_bits", "slots", "token_programs", "sequence_programs", "shares",
        "parts", "part",
    ]
)  # fmt: skip
def decide_kernel(
    numbers, advantages, offsets, counts, integers, floats, peaks, keep_out, states, sequence_weights, weights,
    mask_out, sequence_sums, sequence_maxima, token_sums, token_maxima, part_sums, part_maxima, histogram, counter,
    statistics,
    tokens: tl.int64, sequences: tl.int64, width: tl.int64, tiles: tl.int64, tile_bits: tl.int32, slots: tl.int64,
    token_programs: tl.int32, sequence_programs: tl.int32, shares: tl.int32, parts: tl.int32, part: tl.int32,
    PLAN: tl.constexpr, SHAPE: tl.constexpr, BY_OWNER: tl.constexpr,
):  # fmt: skip
    """Decide about SHAPE.sequences sequences: store `keep`, state, weight, and their share of the statistics.

    Where sequences are long so many programs (shares) come to the same decision, each to zero its part of the tokens.
    Programs behind those add up parts of what `read` has left. The last of all finishes the statistics.
    """
    numbers = thresholds(numbers, PLAN)
    program = tl.program_id(0)
    extents = Extents(tokens, sequences, width, tiles, tile_bits)
    # Where there is nothing to zero, none are launched to share it.
    shares = shares if PLAN.zeroes else 1
    share = program // sequence_programs
    owner = (program % sequence_programs).to(tl.int64) * SHAPE.sequences + tl.arange(0, SHAPE.sequences)
    sequence, first, many = slots_of(offsets, owner, extents, PLAN, BY_OWNER)
    known = (sequence >= 0) & (sequence < sequences)
    rejected, weightless = known, known
    if share < shares:
        tables = slot_tables(counts, integers, floats, peaks)
        out = Partials(sequence_sums, sequence_maxima)
        keep, state, nonfinite, weight = decide(
            tables, advantages, sequence, first, many, known, slots, out, numbers, PLAN, SHAPE
        )
        tl.store(keep_out + sequence, keep.to(tl.int8), mask=tl.where(share == 0, known, False))
        rejected, weightless = known & (keep == 0), known & weightless_of(keep, nonfinite, PLAN)
        if PLAN.applies:
            store_states(states, sequence_weights, sequence, known, state, rejected, weightless, weight, PLAN)
    elif program < sequence_programs * shares + parts * groups(PLAN):
        k = program - sequence_programs * shares
        add_up_part(k, token_sums, token_maxima, part_sums, part_maxima, token_programs, part, PLAN)
    elif PLAN.full:
        add_up_bins(histogram, statistics, PLAN)
    if is_last(counter):
        rows = Leftover(sequence_sums, sequence_maxima, part_sums, part_maxima)
        finish(statistics, rows, numbers, extents, sequence_programs, parts, PLAN)
    if PLAN.zeroes and share < shares:
        begin, end = sequence * width, (sequence + 1) * width
        if PLAN.packed:
            begin, end = edge(offsets, owner, sequences, tokens), edge(offsets, owner + 1, sequences, tokens)
        zero_rejected(weights, mask_out, begin, end, rejected, weightless, share, shares, PLAN)
