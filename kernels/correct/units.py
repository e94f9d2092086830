"""Units, which are sequences or turns, one a lane: what their criteria compare, and what a failure rejects."""

from __future__ import annotations

import triton
import triton.language as tl

from ..gather import Units, UnitTotals, exact, integer, plain
from ..tables import at, class_name, has, named, of_pair, size
from ..tokens import of_key
from .criteria import passes, statistic_of_extremum
from .plan import Plan, PlannedCriterion, criterion

# The classes of tokens that each `when` selects, as indices of tokens.CLASSES.
CHOSEN = {"any": (), "negative_advantage": (0, 1), "positive_advantage": (2, 3), "outward": (0, 2)}

# Bits of a sequence's state for `apply`: rejected; without weight; then one for each criterion that dropped tokens.
REJECTED = tl.constexpr(1)
WEIGHTLESS = tl.constexpr(2)


@triton.constexpr_function
def thinning_bit(plan: Plan, i: int) -> int:
    """Find the state bit of a criterion that thins sequences."""
    return 4 << [each.index for each in plan.thinning_criteria].index(i)


@triton.constexpr_function
def selects(criterion: PlannedCriterion, which: int) -> bool:
    """Return whether a criterion's `when` selects a class of tokens."""
    return which in CHOSEN[criterion.when]


# --- the value of a criterion ---


@triton.jit
def selected_units(totals: UnitTotals, advantage, PLAN: tl.constexpr, CRITERION: tl.constexpr):
    """Select units by the sign of their mean advantage; for "outward" those that hold an outward token."""
    if CRITERION.when == "outward":
        outward = integer(totals, PLAN, of_pair(CRITERION.pair, "negative_outward"))
        outward += integer(totals, PLAN, of_pair(CRITERION.pair, "positive_outward"))
        return outward > 0
    else:
        if PLAN.advantages == "token":
            mean = exact(totals, PLAN, "advantage", False)
        else:
            mean = advantage.to(tl.float64)
        return mean < 0 if CRITERION.when == "negative_advantage" else mean > 0


@triton.jit
def class_count(totals: UnitTotals, PLAN: tl.constexpr, CRITERION: tl.constexpr):
    """Count the measured tokens that `when` selects."""
    tokens = integer(totals, PLAN, "valid") * 0
    for c in tl.static_range(4):
        if selects(CRITERION, c):
            tokens += integer(totals, PLAN, class_name(c))
    return tokens


@triton.jit
def value_of(totals: UnitTotals, n, numbers: tl.tuple, CRITERION: tl.constexpr,
             PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Compute a sequence's value, and the quantity that is compared: a ratio's logarithm, |D| where that decides."""
    if has(PLAN, "peaks", named(CRITERION.index, "peak")):
        peak = of_key(totals.peaks[at(PLAN, "peaks", named(CRITERION.index, "peak"))])
        if CRITERION.reduce == "min":
            peak = -peak
        value = peak
        if CRITERION.compared != "value":
            value = statistic_of_extremum(peak, numbers, CRITERION, PLAN)
        value, compared = value.to(tl.float64), peak.to(tl.float64)
    else:
        if PLAN.kept and CRITERION.sum == "d":
            value = exact(totals, PLAN, "d_kept", True)
        else:
            # Of its own, because Triton 3.6 passes on the text of an attribute only as a constant.
            name: tl.constexpr = CRITERION.sum
            value = exact(totals, PLAN, name, CRITERION.one_limb)
        if CRITERION.stat == "k1" and CRITERION.sum == "d":
            value = -value
        if CRITERION.reduce == "mean":
            value = value / tl.maximum(n, 1).to(tl.float64)
        compared = value
    return tl.where(n > 0, value, 0.0), tl.where(n > 0, compared, 0.0)


@triton.jit
def measured_of(totals: UnitTotals, valid, n, K: tl.constexpr, PLAN: tl.constexpr):
    """Count the tokens that pair K of policies measures; n are those of the first pair, train and rollout."""
    if K > 0:
        return measured_tokens(valid, integer(totals, PLAN, of_pair(K, "nonfinite")), PLAN)
    else:
        return n


@triton.jit
def among_of(totals: UnitTotals, units: Units, keep, K: tl.constexpr, PLAN: tl.constexpr):
    """Count the tokens that sums over a sequence run over for pair K. keep: the sequences that token criteria kept."""
    if K > 0 and PLAN.kept:
        return tl.where(keep, integer(totals, PLAN, of_pair(K, "survivors")), 0)
    else:
        return measured_of(totals, units.valid, units.n_among, K, PLAN)


# --- one unit of a lane ---


@triton.jit
def measured_tokens(valid, nonfinite, PLAN: tl.constexpr):
    """Count the measured tokens among the valid ones."""
    if PLAN.nonfinite == "reject":
        return valid - nonfinite
    else:
        return valid


@triton.jit
def units_of(totals: UnitTotals, valid, nonfinite, keep, PLAN: tl.constexpr) -> Units:
    """Collect the counts and sums of units. keep: those whose sequences token criteria have kept."""
    n = measured_tokens(valid, nonfinite, PLAN)
    n_among = n
    if PLAN.kept:
        n_among = tl.where(keep, integer(totals, PLAN, "survivors"), 0)
    sum_d, train, rollout = exact(totals, PLAN, "d", True), plain(totals, PLAN, "train"), plain(totals, PLAN, "rollout")
    return Units(valid, nonfinite, integer(totals, PLAN, "differing"), n, n_among, sum_d, train, rollout)


@triton.jit
def test_units(totals: UnitTotals, units: Units, advantage, keep, numbers: tl.tuple, CRITERION: tl.constexpr,
               PLAN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Test units by one criterion: its value, which have one, which fail, and how many tokens these lose with it.

    keep: those whose sequences token criteria have kept.
    """
    among = among_of(totals, units, keep, CRITERION.pair, PLAN)
    value, compared = value_of(totals, among, numbers, CRITERION, PLAN)
    failed = (passes(compared, numbers, CRITERION, PLAN) == 0) & (among > 0)
    lost = units.valid
    if CRITERION.thins:
        lost = units.n
        if CRITERION.when != "any":
            lost = class_count(totals, PLAN, CRITERION)
    elif CRITERION.when != "any":
        failed = failed & selected_units(totals, advantage, PLAN, CRITERION)
    return value, among > 0, failed, tl.where(failed, lost, 0)


@triton.jit
def weightless_of(keep, nonfinite, PLAN: tl.constexpr):
    """Select the sequences whose tokens have no weight."""
    if PLAN.rejected != "mask":
        return keep == 0
    elif PLAN.rejects_nonfinite:
        return nonfinite > 0
    else:
        return keep & (keep == 0)


@triton.jit
def store_states(p_states, p_weights, sequence, known, state, rejected, weightless, weight, PLAN: tl.constexpr) -> None:
    """Store for `apply` the state of each sequence and, where weights are of sequences, its weight."""
    state |= tl.where(rejected, REJECTED, 0) | tl.where(weightless, WEIGHTLESS, 0)
    if PLAN.spreads:
        weight = tl.where(weightless, 0.0, weight).to(p_weights.dtype.element_ty)
    tl.store(p_states + sequence, state, mask=known)
    if PLAN.spreads:
        tl.store(p_weights + sequence, weight, mask=known)


# --- counting ---


@triton.jit
def count_kept(totals: UnitTotals, valid, keep, state, PLAN: tl.constexpr):
    """Count the tokens of each sequence that nothing has dropped."""
    kept = valid
    if PLAN.drops_tokens:
        kept = integer(totals, PLAN, "alive")
    for c in tl.static_range(4):
        if size(PLAN, "thinning_criteria") > 0:
            kept = without_class(totals, kept, state, c, PLAN)
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).thins and criterion(PLAN, i).when == "any":
            kept = tl.where((state & thinning_bit(PLAN, i)) != 0, 0, kept)
    return tl.where(keep, kept, 0)


@triton.jit
def without_class(totals: UnitTotals, kept, state, C: tl.constexpr, PLAN: tl.constexpr):
    """Subtract the tokens of class C where a criterion that selects them has failed."""
    gone = state < 0
    for i in tl.static_range(size(PLAN, "criteria")):
        if criterion(PLAN, i).thins and selects(criterion(PLAN, i), C):
            gone = gone | ((state & thinning_bit(PLAN, i)) != 0)
    if PLAN.classes_of(0):
        if PLAN.drops_tokens:
            lost = integer(totals, PLAN, named("alive", class_name(C)))
        else:
            lost = integer(totals, PLAN, class_name(C))
        kept = kept - tl.where(gone, lost, 0)
    return kept
