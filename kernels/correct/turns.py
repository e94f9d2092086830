"""Turns: `decide` goes through the turns of each sequence, where `read` and `apply` treat turns as sequences.

Slots are of turns, and the slots of a sequence's turns lie side by side, so what a sequence needs is a sum over a
stretch of slots, exact as any. A thread has a sequence and walks along its turns: once, or twice where a turn can
reject its sequence. A kernel with a turn in each thread, and a second one over sequences, would be a launch more:
whether a sequence stays depends on its turns, and what a turn gets depends on its sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..gather import SlotTables, Units, UnitTotals, gather_slots, integer, plain, slots_between
from ..partials import Partials, add, largest_key, name_of, put
from ..tables import at, has, named, number, of_criterion, size, thresholds
from ..tiles import Extents
from ..tokens import expm1, key_of, limited, of_key
from . import measures
from .measures import ADDED_TERMS, SequenceWeights, term_name, weight_terms
from .plan import Plan, criterion
from .units import count_kept, store_states, test_units, thinning_bit, units_of, weightless_of


class Turns(NamedTuple):
    """The turns of the sequences of a program, and where what they get is stored."""

    low: tl.tensor  # [SEQUENCES] int64, the first of each, numbered from 1; what is before all turns is 0
    high: tl.tensor  # [SEQUENCES] int64, behind the last
    offsets: tl.tensor  # [U + 1]
    extents: Extents
    tables: SlotTables
    slots: tl.tensor  # how many there are
    keep_out: tl.tensor  # [U] bool; an empty turn is kept
    states: tl.tensor  # [U] int32; anything where the plan has no `apply`
    weights: tl.tensor  # [U], the same
    numbers: tl.tensor  # the thresholds, in memory
    bins: tl.tensor  # the histogram; anything where the plan has none


class Decisions(NamedTuple):
    """The decisions about the sequences of a program: [SEQUENCES] each."""

    kept_by_tokens: tl.tensor  # bool, kept by the criteria of tokens
    keep: tl.tensor  # bool
    state: tl.tensor  # int32
    nonfinite: tl.tensor  # int64, tokens
    advantage: tl.tensor  # float64, if given by sequence
    weight: tl.tensor  # float64, if weights are of sequences


# --- sums over turns ---


@triton.constexpr_function
def counts_turns(name: str) -> bool:
    """Return whether a sum counts turns, as int32; others are float64."""
    return name in ("turns", "turns_measured", "turns_kept", "turns_above", "turns_below") or name.endswith("/units")


@triton.constexpr_function
def of_tokens(name: str) -> str:
    """Name the extremum over tokens that follows from one over turns, as a turn's weight is its tokens' weight."""
    return name.replace("turn_", "")


@triton.constexpr_function
def drops_sequences(plan: Plan) -> bool:
    """Return whether a turn can reject its sequence."""
    return any(one.over == "turn" and one.drop == "sequence" for one in plan.criteria)


@triton.jit
def no_turns(like, PLAN: tl.constexpr, TABLE: tl.constexpr) -> tl.tuple:
    """Start the sums over turns, or the maxima, which are keys."""
    found: tl.tuple = ()
    for i in tl.static_range(size(PLAN, TABLE)):
        if TABLE == "turn_maxima":
            found = found + (key_of(tl.full(like.shape, float("-inf"), tl.float64)),)
        elif counts_turns(name_of(PLAN, TABLE, i)):
            found = found + (tl.zeros(like.shape, tl.int32),)
        else:
            found = found + (tl.zeros(like.shape, tl.float64),)
    return found


@triton.jit
def tally(sums: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x) -> tl.tuple:
    """Add x of one turn of each sequence to a sum, if the plan has it."""
    if has(PLAN, "turn_sums", name):
        before = sums[at(PLAN, "turn_sums", name)]
        more = before + (x.to(tl.int32) if x.dtype == tl.int1 else x).to(before.dtype)
        sums = sums[: at(PLAN, "turn_sums", name)] + (more,) + sums[at(PLAN, "turn_sums", name) + 1 :]
    return sums


@triton.jit
def tally_largest(maxima: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr, x, among) -> tl.tuple:
    """Update a maximum over turns with x of one turn of each sequence, if the plan has it."""
    if has(PLAN, "turn_maxima", name):
        more = tl.maximum(maxima[at(PLAN, "turn_maxima", name)], key_of(tl.where(among, x, float("-inf"))))
        maxima = maxima[: at(PLAN, "turn_maxima", name)] + (more,) + maxima[at(PLAN, "turn_maxima", name) + 1 :]
    return maxima


@triton.jit
def tally_extrema(maxima: tl.tuple, PLAN: tl.constexpr, low: tl.constexpr, high: tl.constexpr, x, among) -> tl.tuple:
    """Update the maxima of x and of -x with one turn of each sequence."""
    maxima = tally_largest(maxima, PLAN, high, x, among)
    return tally_largest(maxima, PLAN, low, -x, among)


@triton.jit
def total(sums: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr):
    """Return a sum over the turns of each sequence."""
    return sums[at(PLAN, "turn_sums", name)]


# --- one turn of each sequence ---


@triton.jit
def turn_at(turns: Turns, j, known, kept_by_tokens, PLAN: tl.constexpr, SHAPE: tl.constexpr,
            BY_OWNER: tl.constexpr) -> tuple[UnitTotals, Units]:  # fmt: skip
    """Gather the j-th turn of each sequence; of one that has no such turn, nothing."""
    low = tl.minimum(turns.low + j, turns.high)
    first_slot, slot_count = slots_between(turns.offsets, low, tl.minimum(low + 1, turns.high), turns.extents, BY_OWNER)
    totals = gather_slots(turns.tables, first_slot, slot_count, turns.slots, PLAN, SHAPE)
    valid = tl.where(known, tl.maximum(integer(totals, PLAN, "valid"), 0), 0)
    nonfinite = tl.where(known, integer(totals, PLAN, "nonfinite"), 0)
    return totals, units_of(totals, valid, nonfinite, kept_by_tokens, PLAN)


@triton.jit
def rejected_by_turns(turns: Turns, known, decisions: Decisions, numbers: tl.tuple, PLAN: tl.constexpr,
                      SHAPE: tl.constexpr, BY_OWNER: tl.constexpr):  # fmt: skip
    """Select the sequences with a turn that failed a criterion which rejects its sequence."""
    fallen = decisions.state * 0
    for j in range(tl.max(turns.high - turns.low, 0).to(tl.int32)):
        totals, units = turn_at(turns, j, known, decisions.kept_by_tokens, PLAN, SHAPE, BY_OWNER)
        for i in tl.static_range(size(PLAN, "criteria")):
            if criterion(PLAN, i).over == "turn" and criterion(PLAN, i).drop == "sequence":
                _, _, failed, _ = test_units(
                    totals, units, decisions.advantage, decisions.kept_by_tokens, numbers, criterion(PLAN, i), PLAN
                )
                fallen += failed.to(tl.int32)
    return fallen > 0


@triton.jit
def measure_turn(sums: tl.tuple, maxima: tl.tuple, units: Units, keep, numbers: tl.tuple,
                 PLAN: tl.constexpr) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Report a turn's counts and its sum of D."""
    clamp = number(numbers, PLAN, "clamp")
    some = units.n > 0
    chi2 = expm1(2.0 * limited(units.sum_d, -clamp, clamp, PLAN))
    sums = tally(sums, PLAN, "turns", units.valid > 0)
    sums = tally(sums, PLAN, "turns_measured", some)
    sums = tally(sums, PLAN, "turns_kept", keep & (units.valid > 0))
    sums = tally(sums, PLAN, "chi2_turn", tl.where(some, chi2, 0.0))
    sums = tally(sums, PLAN, "abs_sum_d_turn", tl.where(some, tl.abs(units.sum_d), 0.0))
    return sums, tally_extrema(maxima, PLAN, "-min_turn_sum_d", "max_turn_sum_d", units.sum_d, some)


@triton.jit
def tally_place(sums: tl.tuple, PLAN: tl.constexpr, PLACE: tl.constexpr, values: tl.tuple, here) -> tl.tuple:
    """Add what is measured of a turn to the sums of its place: `PLACE_SUMS` of it."""
    for i in tl.static_range(len(values)):
        sums = tally(sums, PLAN, of_place(PLACE, i), tl.where(here, values[i], 0.0))
    return sums


PLACE_SUMS = ("tokens", "d", "abs_d", "k3")


@triton.constexpr_function
def of_place(place: str, i: int) -> str:
    """Name a sum over the turns at a place."""
    return f"turn_{place}_{PLACE_SUMS[i]}"


@triton.jit
def measure_turn_weights(sums: tl.tuple, maxima: tl.tuple, units: Units, weights: SequenceWeights, numbers: tl.tuple,
                         PLAN: tl.constexpr) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Report a turn's weight, and what its sequence needs of it."""
    some, n = units.n > 0, units.n.to(tl.float64)
    above, below = measures.beyond_bounds(weights.log_ratio, some, numbers, PLAN)
    sums = tally(sums, PLAN, "turns_above", above)
    sums = tally(sums, PLAN, "turns_below", below)
    sums = tally(sums, PLAN, "tokens_above", tl.where(above, n, 0.0))
    sums = tally(sums, PLAN, "tokens_below", tl.where(below, n, 0.0))
    maxima = tally_extrema(maxima, PLAN, "-min_turn_raw", "max_turn_raw", weights.ratio, some)
    maxima = tally_extrema(maxima, PLAN, "-min_turn_weight", "max_turn_weight", weights.weight, some)
    terms = weight_terms(weights, some)
    for i in tl.static_range(len(terms)):
        if i < ADDED_TERMS:
            sums = tally(sums, PLAN, term_name("turn_", i), terms[i])
            sums = tally(sums, PLAN, term_name("of_sequence/", i), n * terms[i])
        sums = tally(sums, PLAN, term_name("turn_", i, "2"), terms[i] * terms[i])
        sums = tally(sums, PLAN, term_name("", i, "2"), n * terms[i] * terms[i])
    return sums, maxima


@triton.jit
def decide_by_turns(sums: tl.tuple, maxima: tl.tuple, totals: UnitTotals, units: Units, decisions: Decisions,
                    numbers: tl.tuple, PLAN: tl.constexpr):  # fmt: skip
    """Test a turn of each sequence by its own criteria: return whether it stays, and the bits of those that thin."""
    keep, state = units.valid >= 0, decisions.state * 0
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "turn":
            value, among, failed, lost = test_units(
                totals, units, decisions.advantage, decisions.kept_by_tokens, numbers, criterion(PLAN, i), PLAN
            )
            if criterion(PLAN, i).thins:
                state |= tl.where(failed, thinning_bit(PLAN, i), 0)
            elif criterion(PLAN, i).drop == "unit":
                keep = keep & (failed == 0)
            sums = tally(sums, PLAN, named(i, "lost"), lost)
            value, among, counted = measures.counted_of(value, among, numbers, criterion(PLAN, i), PLAN)
            sums = tally(sums, PLAN, named(i, "units"), among)
            sums = tally(sums, PLAN, named(i, "value"), counted)
            sums = tally(sums, PLAN, named(i, "value2"), counted * counted)
            maxima = tally_extrema(maxima, PLAN, of_criterion("-min", i), of_criterion("max", i), value, among)
    return sums, maxima, keep, state


# --- all turns of the sequences of a program ---


@triton.jit
def walk_turns(turns: Turns, known, decisions: Decisions, PLAN: tl.constexpr, SHAPE: tl.constexpr,
               BY_OWNER: tl.constexpr) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Decide about every turn, store what it gets, and add up their sums and maxima."""
    sums, maxima = no_turns(decisions.keep, PLAN, "turn_sums"), no_turns(decisions.keep, PLAN, "turn_maxima")
    met = decisions.nonfinite * 0  # turns with a measured token
    nothing = tl.zeros(met.shape, tl.float64)
    # Of the last one so far that is not the first: a later one makes it one in the middle.
    tokens, d, abs_d, k3 = nothing, nothing, nothing, nothing
    for j in range(tl.max(turns.high - turns.low, 0).to(tl.int32)):
        # Loaded again for each turn: held together with the sums they would take too many registers.
        numbers = thresholds(turns.numbers, PLAN)
        totals, units = turn_at(turns, j, known, decisions.kept_by_tokens, PLAN, SHAPE, BY_OWNER)
        sums, maxima, keep, state = decide_by_turns(sums, maxima, totals, units, decisions, numbers, PLAN)
        stays, state = keep & decisions.keep, state | decisions.state
        turn = turns.low + j - 1
        real = (turn >= 0) & (turn < turns.extents.sequences) & (turn + 1 < turns.high)
        sums = tally(sums, PLAN, "of_sequence/kept", count_kept(totals, units.valid, stays, state, PLAN))
        sums, maxima = measure_turn(sums, maxima, units, stays, numbers, PLAN)

        some = units.n > 0
        here = units.n.to(tl.float64), units.sum_d, plain(totals, PLAN, "abs_d"), plain(totals, PLAN, "k3")
        sums = tally_place(sums, PLAN, "first", here, some & (met == 0))
        later = some & (met > 0)
        sums = tally_place(sums, PLAN, "middle", (tokens, d, abs_d, k3), later)
        tokens, d = tl.where(later, here[0], tokens), tl.where(later, here[1], d)
        abs_d, k3 = tl.where(later, here[2], abs_d), tl.where(later, here[3], k3)
        met += some.to(tl.int64)

        weight = decisions.weight
        if PLAN.weighs_turns:
            weights = measures.weigh_sequences(totals, units, numbers, PLAN)
            sums, maxima = measure_turn_weights(sums, maxima, units, weights, numbers, PLAN)
            measures.count_weights(turns.bins, weights, real & some, PLAN)
            weight = weights.weight
        tl.store(turns.keep_out + turn, (stays | (units.valid == 0)).to(tl.int8), mask=real)
        if PLAN.applies:
            rejected = known & (stays == 0)
            weightless = known & weightless_of(stays, decisions.nonfinite, PLAN)
            store_states(turns.states, turns.weights, turn, real, state, rejected, weightless, weight, PLAN)
    return tally_place(sums, PLAN, "last", (tokens, d, abs_d, k3), met > 1), maxima


@triton.jit
def report_turns(sums: tl.tuple, maxima: tl.tuple, units: Units, out: Partials, PLAN: tl.constexpr) -> None:
    """Store what turns add to the statistics."""
    for k in tl.static_range(size(PLAN, "turn_sums")):
        add(out.sums, PLAN, name_of(PLAN, "turn_sums", k), sums[k])
    for k in tl.static_range(size(PLAN, "turn_maxima")):
        most = of_key(largest_key(maxima[k]))
        put(out.maxima, PLAN, "sequence_maxima", name_of(PLAN, "turn_maxima", k), most)
        put(out.maxima, PLAN, "sequence_maxima", of_tokens(name_of(PLAN, "turn_maxima", k)), most)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).over == "turn":
            lost = total(sums, PLAN, named(i, "lost"))
            if criterion(PLAN, i).drop == "sequence":
                lost = tl.where(lost > 0, units.valid, 0).to(tl.float64)
            add(out.sums, PLAN, named(i, "tokens"), lost)
            add(out.sums, PLAN, named(i, "sequences"), lost > 0)


@triton.jit
def weights_of_turns(sums: tl.tuple, units: Units, PLAN: tl.constexpr) -> SequenceWeights:
    """Compute the weights of sequences: the means of their turns' weights over tokens."""
    return measures.mean_weights(total(sums, PLAN, "of_sequence/raw"), total(sums, PLAN, "of_sequence/weight"), units)
