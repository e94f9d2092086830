"""The structure of a Spec as a compile-time constant of the kernels. Its numbers are data: see planner.py.

Two Specs that differ only in numbers or labels have equal plans and share compiled kernels. Kernels find the columns
of their tables by name; a name that a plan does not have costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ...specs.correction import Spec
from ...specs.statistics import STATISTICS
from ..tables import Tables

# Columns of a pass over padded tokens below which ptxas takes fewer than 128 registers; criteria and columns beyond
# which so many are too few, packed tokens with weights of their own apart.
LIGHT, MOST_CRITERIA, MOST_COLUMNS, MOST_COLUMNS_OF_WEIGHTS = 20, 3, 39, 31


@dataclass(frozen=True)
class PlannedCriterion:
    """A criterion without its numbers."""

    index: int
    stat: str
    over: str
    reduce: str | None
    when: str
    drop: str
    compared: str  # with the thresholds; see specs/statistics.py
    holed: bool
    token_clamp: bool
    external: int  # index of its external tensor; -1: none
    source: str  # of its values: `Statistic.source`
    pair: int  # index of the two policies it compares: 0 is train and rollout, k the k-th of Plan.pairs
    role: str | None  # what it is to one of the schemes reported; see metrics/peers.py

    @property
    def per_token(self) -> bool:
        """Whether every token is tested by itself."""
        return self.over == "token"

    @property
    def may_be_nan(self) -> bool:
        """Whether values are the caller's own, which may be anything."""
        return self.source in ("entropy", "caller")

    @property
    def thins(self) -> bool:
        """Whether this is `Criterion.thins`: a failure drops some tokens, which `apply` has to find again."""
        return not self.per_token and self.drop == "token"

    @property
    def one_limb(self) -> bool:
        """Whether this is a statistic whose sums are sums of D, on D's grid in one limb."""
        return STATISTICS[self.stat].one_limb

    @property
    def sum(self) -> str | None:
        """The column with the sum that decides; None without one."""
        if self.over == "token" or self.reduce not in ("sum", "mean"):
            return None
        plain = self.stat in ("ratio", "k1") and not self.token_clamp and self.pair == 0
        return "d" if plain else f"{self.index}/sum"


@dataclass(frozen=True, kw_only=True)
class Plan(Tables):
    """Everything the kernels of `correct` branch on."""

    weighs: str | None  # the unit that has a weight: "token" | "turn" | "sequence"
    geometric: bool  # the weight of a turn or a sequence is the geometric mean of its ratios, and not their product
    outside: str
    bounded: bool
    has_lower: bool
    has_upper: bool
    token_clamp: bool
    criteria: tuple[PlannedCriterion, ...]
    rejected: str
    kept: bool  # sums over a sequence run over the survivors of token criteria
    advantages: str | None  # "token" | "sequence"
    externals: int
    writes_weights: bool  # weights are handed back
    writes_mask: bool  # a new mask is handed back
    edits_mask: bool  # rejected tokens are 0 in the mask written
    schemes: tuple[str, ...]  # peers whose statistics are reported too
    pairs: tuple[str, ...]  # values of `Criterion.of` that compare the policy that trains
    mass: str | None = None  # whose log-probs the kept mass is taken from: "train" | "rollout"; None: there is none
    ages: str | None = None  # versions, from which ages are computed, are per "token" | "sequence"
    age_sums: tuple[str, ...] = ()  # the last of token_sums
    age_maxima: tuple[str, ...] = ()  # and of token_maxima
    turns: bool  # turns are measured: slots are of turns, and the offsets that the kernels see are theirs
    # Where the statistics have the sum of weights and their number, and the smallest mean that divides them; None: no
    # mean of the batch does.
    mean: tuple[int, int, float] | None = None
    # Further columns of the batch.
    call_sums: tuple[str, ...] = ()
    call_maxima: tuple[str, ...] = ()
    # What is added up over the turns of a sequence: statistics by their names, and what the sequence needs.
    turn_sums: tuple[str, ...] = ()
    turn_maxima: tuple[str, ...] = ()
    # What is decided about sequences is left for the pass of a loss, which weighs and tests tokens again.
    leaves: bool = False
    settled: bool = False  # this is the plan of that pass: without columns

    __hash__ = Tables.__hash__

    @property
    def derived(self) -> int:
        """The number of the first token maxima that follow from the extrema of D, as weights that grow with it do."""
        if self.weighs != "token":
            return 0
        return 2 if self.outside == "zero" else 4

    @property
    def registers(self) -> int | None:
        """The most registers of a thread of `read` on NVIDIA: for 16 warps of a multiprocessor, 15, 12 or 11.

        None is as many as ptxas likes: so few that it needs no cap, or so many that a cap spills hundreds of bytes. The
        bounds follow from its own counts for sm_90, see docs/kernels.md.
        """
        criterion_count, columns = len(self.criteria) * (1 if self.advantages is None else 2), len(self.recorded)
        light = not self.packed and columns < LIGHT
        if light or criterion_count > MOST_CRITERIA:
            return None
        if self.full and not self.packed:
            # With all columns 168 spill 72 bytes on sm_80; with few 120 are taken without a cap.
            return 200 if columns > MOST_COLUMNS and self.nonfinite != "propagate" else None
        many = self.full or columns > MOST_COLUMNS or (self.packed and self.advantages is not None)
        if many:
            return 168
        # Of two criteria over tokens 128 spill 20 bytes on sm_100, 4 on sm_90 and sm_80; 136 none. Of rows with a k3
        # beyond the clamp 128 spill 28 bytes in loops, 32 on sm_80, with advantages 20; 136 spill 4, and none.
        of_rows = "d_beyond" in self.floats or self.advantages is not None
        heavy = columns > MOST_COLUMNS_OF_WEIGHTS if self.packed else of_rows
        return 136 if self.weighs == "token" and heavy else 128

    @property
    def drops_tokens(self) -> bool:
        """Whether `read` drops single tokens."""
        return any(each.per_token and each.drop != "sequence" for each in self.criteria)

    @property
    def thinning_criteria(self) -> tuple[PlannedCriterion, ...]:
        """The criteria that drop single tokens of a sequence that fails."""
        return tuple(each for each in self.criteria if each.thins)

    def classes_of(self, pair: int) -> bool:
        """Whether tokens of a pair of policies have to be counted by class."""
        return any(not each.per_token and each.when != "any" and each.pair == pair for each in self.criteria)

    @property
    def averages_advantages(self) -> bool:
        """Whether the mean advantage of a sequence is computed here."""
        any_pair = any(self.classes_of(k) for k in range(1 + len(self.pairs)))
        return self.advantages == "token" and any_pair

    @property
    def rejects_nonfinite(self) -> bool:
        """Whether a non-finite token rejects its sequence."""
        return self.nonfinite == "reject" and (self.weighs is not None or bool(self.criteria))

    @property
    def rejects_sequences(self) -> bool:
        """Whether `keep` can be False."""
        whole = (each.drop == "sequence" or (each.drop == "unit" and each.over == "sequence") for each in self.criteria)
        return self.rejects_nonfinite or any(whole)

    @property
    def rejects_turns(self) -> bool:
        """Whether a turn can be dropped whole."""
        return any(each.over == "turn" and each.drop == "unit" for each in self.criteria)

    @property
    def rejects_units(self) -> bool:
        """Whether a sequence or a turn, or some tokens of one, can be dropped."""
        return self.rejects_sequences or self.rejects_turns or bool(self.thinning_criteria)

    @property
    def weighs_turns(self) -> bool:
        """Whether all tokens of a turn have its weight."""
        return self.weighs == "turn"

    @property
    def bins_weights(self) -> bool:
        """Whether the weights of turns or sequences have a histogram of their own."""
        return self.full and self.weighs in ("turn", "sequence")

    @property
    def spreads(self) -> bool:
        """Whether weights are of turns or sequences, so that `apply` writes them."""
        return self.writes_weights and self.weighs in ("turn", "sequence")

    @property
    def marks(self) -> bool:
        """Whether `read` marks in the weights, by 0 or 1, which tokens have one: the mask alone does not say."""
        return self.spreads and self.rejected != "mask" and self.drops_tokens

    @property
    def writes_token_weights(self) -> bool:
        """Whether `read` writes weights."""
        return self.writes_weights and not self.leaves and (self.marks or not self.spreads)

    @property
    def zeroes_weights(self) -> bool:
        """Whether weights that `read` wrote have to be zeroed."""
        if not self.writes_weights or self.spreads:
            return False
        return self.rejects_nonfinite or (self.rejected != "mask" and self.rejects_units)

    @property
    def zeroes_mask(self) -> bool:
        """Whether what `read` wrote into the mask has to be zeroed."""
        return self.edits_mask and self.rejects_units

    @property
    def zeroes(self) -> bool:
        """Whether `decide` zeroes what `read` wrote of rejected sequences."""
        return not self.applies and not self.leaves and (self.zeroes_weights or self.zeroes_mask)

    @property
    def applies(self) -> bool:
        """Whether `apply` is launched: it looks at every token again."""
        late = self.turns or bool(self.thinning_criteria)
        if self.leaves:
            return False
        return self.spreads or (late and (self.zeroes_weights or self.zeroes_mask))


def pairs_of(spec: Spec) -> tuple[str, ...]:
    """List what the criteria compare besides train and rollout."""
    return tuple(dict.fromkeys(c.of for c in spec.criteria if c.of != "train/rollout"))


@triton.constexpr_function
def criterion(plan: Plan, i: int) -> PlannedCriterion:
    """Return the i-th criterion."""
    return plan.criteria[i]


@triton.constexpr_function
def has_classes(plan: Plan, pair: int) -> bool:
    """Return whether tokens of a pair of policies have to be counted by class."""
    return plan.classes_of(pair)
