"""Columns and numbers of a plan: the tables that programs fill, and how kernels find in them what they name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import triton
import triton.language as tl

# Tables that a pass over tokens fills, in the order of its accumulators.
RECORDED = ("token_sums", "floats", "counts", "integers", "peaks", "token_maxima")

# Tokens by the sign of their advantage and whether D has the same sign ("outward"), for `Criterion.when`.
CLASSES = ("negative_outward", "negative_inward", "positive_outward", "positive_inward")


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
def has(plan: Tables, table: str, name: str) -> bool:
    """Return whether a table of the plan has this column."""
    return name in getattr(plan, table)


@triton.constexpr_function
def at(plan: Tables, table: str, name: str) -> int:
    """Find the column of a table."""
    return getattr(plan, table).index(name)


@triton.constexpr_function
def size(plan: Tables, table: str) -> int:
    """Count the columns of a table, or the entries of another tuple of the plan."""
    return len(getattr(plan, table))


@triton.constexpr_function
def kept_of(plan: Tables, table: str) -> int:
    """Count the columns of a table that have accumulators."""
    return sum(kept == table for kept, _ in plan.recorded)


@triton.constexpr_function
def named(prefix: object, name: str) -> str:
    """Name a column that belongs to a criterion or to another column."""
    return f"{prefix}/{name}"


@triton.constexpr_function
def of_pair(pair: int, name: str) -> str:
    """Name a column of a pair of policies; the first pair, train and rollout, has plain names."""
    return f"pair{pair}/{name}" if pair else name


@triton.constexpr_function
def of_criterion(side: str, i: int) -> str:
    """Name the column of a criterion's largest ("max") or negated smallest ("-min") value."""
    return f"{side}_{i}/value"


@triton.constexpr_function
def class_name(i: int) -> str:
    """Name the i-th class of tokens; see CLASSES."""
    return CLASSES[i]


@triton.constexpr_function
def place_of_number(plan: Tables, i: int) -> int:
    """Find the first number that the i-th one repeats; itself if it repeats none."""
    name = plan.numbers[i]
    return plan.numbers.index(dict(plan.same_numbers).get(name, name))


@triton.jit
def thresholds(p_numbers, PLAN: tl.constexpr) -> tl.tuple:
    """Load all numbers, in float64. Once for a program: behind a store they would be loaded again."""
    found: tl.tuple = ()
    for i in tl.static_range(size(PLAN, "numbers")):
        if place_of_number(PLAN, i) < i:
            found = found + (found[place_of_number(PLAN, i)],)
        else:
            found = found + (tl.load(p_numbers + i),)
    return found


@triton.jit
def number(numbers: tl.tuple, PLAN: tl.constexpr, name: tl.constexpr):
    """Return one of the loaded numbers."""
    return numbers[at(PLAN, "numbers", name)]
