"""Accumulators of the columns of a plan's tables: place in a walk along a tile, dtype, start, and word of counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl

# Tables that a pass over tokens fills, in the order of its accumulators.
RECORDED = ("token_sums", "floats", "counts", "integers", "peaks", "token_maxima")

# Counts of slots share words of 32 bits: a thread has at most 64 tokens of a tile, so each fits into 8 bits.
COUNTS_OF_WORD, BITS, LARGEST_COUNT = tl.constexpr(4), tl.constexpr(8), tl.constexpr(0xFF)

# Columns of probabilities, and of their squares.
PROBABILITIES = ("p", "q", "abs_prob_diff", "max_abs_prob_diff")
SQUARED = ("p2", "q2", "pq")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The columns that programs fill, by name: sums and maxima of the batch, the others of a slot."""

    token_sums: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()
    token_maxima: tuple[str, ...] = ()
    sequence_sums: tuple[str, ...] = ()  # of programs over sequences
    sequence_maxima: tuple[str, ...] = ()
    full: bool = False  # a histogram is kept behind the columns
    double: bool  # float64 computes
    packed: bool  # sequences by offsets, not as rows
    masked: bool  # a mask is given
    nonfinite: str  # `Spec.nonfinite`, or the loss's
    numbers: tuple[str, ...] = ()  # those that a kernel loads
    of_slots = ("counts", "integers", "floats", "peaks")
    # Numbers that repeat another one, and which.
    same_numbers: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash(repr(self))

    def __hash__(self) -> int:
        """Return the hash computed before: Triton looks a plan up by it."""
        return self._hash

    @property
    def derived(self) -> int:
        """The number of the first token maxima that are not kept, because they follow from others."""
        return 0

    @property
    def skips(self) -> bool:
        """Whether a step in which no token is valid loads its mask and writes zeros, and nothing else."""
        return self.masked and not self.packed

    @property
    def unreported(self) -> int:
        """The number of the last sums of sequences that are no statistics."""
        return 0

    @property
    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Every accumulator of a pass over tokens as (table, column), in order."""
        found = [(table, name) for table in RECORDED for name in getattr(self, table)]
        kept = len(found) - len(self.token_maxima)
        return (*found[:kept], *found[kept + self.derived :])

    @property
    def registers(self) -> int | None:
        """The most registers of a thread of a pass over tokens on NVIDIA; None: as many as ptxas likes."""
        return None


@triton.constexpr_function
def first_of(plan: Tables, table: str) -> int:
    """Find the accumulator of a table's first column; anything for a table without columns."""
    return next((place for place, (kept, _) in enumerate(plan.recorded) if kept == table), -1)


@triton.constexpr_function
def kept_of(plan: Tables, table: str) -> int:
    """Count the columns of a table that have accumulators."""
    return sum(kept == table for kept, _ in plan.recorded)


@triton.constexpr_function
def place_of(plan: Tables, table: str, name: str) -> int:
    """Find the accumulator of a column."""
    return plan.recorded.index((table, name))


@triton.constexpr_function
def is_of_slots(plan: Tables, place: int) -> bool:
    """Return whether an accumulator is of slots and not of the batch."""
    return plan.recorded[place][0] not in ("token_sums", "token_maxima")


@triton.constexpr_function
def is_measured(plan: Tables, place: int) -> bool:
    """Return whether an accumulator of slots is filled token by token; without a mask, bounds give the valid ones."""
    table, name = plan.recorded[place]
    return is_of_slots(plan, place) and (plan.masked or (table, name) != ("counts", "valid"))


@triton.constexpr_function
def first_of_word(plan: Tables, place: int) -> int:
    """Find the accumulator of the word of a count of slots; -1 for all else."""
    if plan.recorded[place][0] != "counts":
        return -1
    return place - (place - first_of(plan, "counts")) % COUNTS_OF_WORD.value


@triton.constexpr_function
def bit_of(plan: Tables, place: int) -> int:
    """Find the lowest bit of a count in its word."""
    return (place - first_of_word(plan, place)) * BITS.value


@triton.constexpr_function
def one_of(plan: Tables, place: int) -> int:
    """Return a count of one at its place in the word."""
    return 1 << bit_of(plan, place)


@triton.constexpr_function
def is_added(plan: Tables, place: int) -> bool:
    """Return whether steps add to an accumulator of slots; of a word only to the first."""
    in_word = first_of_word(plan, place) >= 0
    return first_of_word(plan, place) == place if in_word else is_measured(plan, place)


@triton.constexpr_function
def counts_others(plan: Tables, i: int) -> bool:
    """Return whether the accumulator of a count of slots counts the other valid tokens: the finite, the equal ones."""
    return plan.counts[i].rpartition("/")[2] in ("nonfinite", "differing")


@triton.constexpr_function
def counts_more_than_equal(plan: Tables, place: int) -> bool:
    """Return whether a count of slots is of valid or of finite tokens, among which those of equal log-probs are."""
    return "differing" in plan.counts and plan.recorded[place] in (("counts", "valid"), ("counts", "nonfinite"))


@triton.constexpr_function
def counts_equal(plan: Tables, place: int) -> bool:
    """Return whether a count of slots is of tokens of equal log-probs."""
    return plan.recorded[place] == ("counts", "differing")


@triton.constexpr_function
def is_extremum(plan: Tables, place: int) -> bool:
    """Return whether an accumulator keeps the largest and not the sum."""
    return plan.recorded[place][0] in ("peaks", "token_maxima")


@triton.constexpr_function
def is_count(plan: Tables, place: int) -> bool:
    """Return whether a sum counts tokens of the batch."""
    table, name = plan.recorded[place]
    return table == "token_sums" and name.rpartition("/")[2].startswith("tokens_")


@triton.constexpr_function
def counts_probabilities(plan: Tables) -> bool:
    """Return whether probabilities - 1 are integers: of float32 they are multiples of 2^-24, unless one may be NaN."""
    return not plan.double and plan.nonfinite != "propagate"


@triton.constexpr_function
def quantum_of(plan: Tables, place: int) -> float | None:
    """Return the quantum of a sum or a maximum of such integers; None for all else."""
    table, name = plan.recorded[place]
    if table not in ("token_sums", "token_maxima") or not counts_probabilities(plan):
        return None
    return 2.0**-48 if name in SQUARED else 2.0**-24 if name in PROBABILITIES else None


@triton.constexpr_function
def is_wide(plan: Tables, place: int) -> bool:
    """Return whether a sum over tokens is float64: of values far from 0 that differ little from each other."""
    name = plan.recorded[place][1].rpartition("/")[2]
    return name in (*PROBABILITIES[:2], *SQUARED, "clamped", "clamped2", "age")


@triton.constexpr_function
def is_of_loss(plan: Tables, place: int) -> bool:
    """Return whether an accumulator is an extremum of the loss by slot, which is no key of floats where none is NaN."""
    return plan.recorded[place] in (("peaks", "max_ppo_log_ratio"), ("peaks", "-min_ppo_log_ratio"))


@triton.constexpr_function
def kind_of(plan: Tables, place: int) -> tl.dtype:
    """Choose the dtype of an accumulator."""
    table = plan.recorded[place][0]
    if table == "counts":
        return tl.int32
    if quantum_of(plan, place) is not None:
        return tl.int64 if plan.recorded[place][1] in SQUARED else tl.int32
    if table == "integers":
        return tl.int64
    if plan.nonfinite == "propagate" if table == "token_maxima" or is_of_loss(plan, place) else table == "peaks":
        return tl.int64 if plan.double else tl.int32
    wide = plan.double or (table == "token_sums" and is_wide(plan, place))
    return tl.float64 if wide else tl.float32


@triton.constexpr_function
def start_of(plan: Tables, place: int) -> float:
    """Choose the value from which an accumulator starts."""
    if not is_extremum(plan, place):
        return 0
    # Of keys that of -inf. The smallest integer is the key of a NaN, and a program may skip every step.
    kind = kind_of(plan, place)
    return float("-inf") if kind.is_floating() else -0x7F800001 if kind == tl.int32 else -0x7FF0000000000001
