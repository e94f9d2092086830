"""What a Spec asks of the kernels: its structure as a compile-time constant. Its thresholds are data: thresholds.py.

Two Specs that differ in numbers or labels alone share their kernels. Columns of the intermediate tables are known by
name; a name that a plan does not have costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rollout_corr.definition.thresholds import threshold_of
from rollout_corr.kernels.correct.numbers import indices, numbers_of
from rollout_corr.metrics import peers
from rollout_corr.metrics.schema import columns_of
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.statistics import STATISTICS

# Tokens by the sign of their advantage and whether D has the same one: what `when` tells apart.
CLASSES = ("negative_outward", "negative_inward", "positive_outward", "positive_inward")

# Tables that `read` fills, in the order in which it keeps their columns.
RECORDED = ("token_sums", "floats", "counts", "integers", "peaks", "token_maxima")


@dataclass(frozen=True)
class Test:
    """A criterion without its numbers."""

    index: int
    stat: str
    over: str
    reduce: str | None
    when: str
    drop: str
    cut: str
    holed: bool
    token_clamp: bool
    external: int  # which of the external tensors; -1: none
    pair: int  # which two policies it compares: 0 train and rollout, k the k-th of Plan.pairs
    role: str | None  # what it is to one of the schemes reported

    @property
    def sum(self) -> str | None:
        """The column with the sum that decides, None without one."""
        if self.over != "sequence" or self.reduce not in ("sum", "mean"):
            return None
        plain = self.stat in ("ratio", "k1") and not self.token_clamp and self.pair == 0
        return "d" if plain else f"{self.index}/sum"


class Tables:
    """The columns of a plan: sums and maxima are of the batch, the others of a slot, a sequence's part of a tile."""

    token_sums: tuple[str, ...]
    floats: tuple[str, ...]
    counts: tuple[str, ...]
    integers: tuple[str, ...]
    peaks: tuple[str, ...]
    token_maxima: tuple[str, ...]
    full: bool  # a histogram is kept behind the columns
    double: bool  # float64 computes

    @property
    def derived(self) -> int:
        """How many of the first token maxima are not kept, because they follow from others."""
        return 0

    @property
    def recorded(self) -> tuple[tuple[str, str], ...]:
        """Every column that a pass over tokens keeps, with its table, in order."""
        found = [(table, name) for table in RECORDED for name in getattr(self, table)]
        kept = len(found) - len(self.token_maxima)
        return (*found[:kept], *found[kept + self.derived :])


@dataclass(frozen=True)
class Plan(Tables):
    """What the kernels branch on, all of it known when they are compiled."""

    level: str | None
    outside: str
    bounded: bool
    has_lower: bool
    has_upper: bool
    token_clamp: bool
    tests: tuple[Test, ...]
    rejected: str
    nonfinite: str
    kept: bool  # sequence sums run over the survivors of token criteria
    full: bool
    double: bool
    packed: bool
    masked: bool
    advantages: str | None  # "token" | "sequence"
    externals: int
    writes_weights: bool
    writes_mask: bool
    edits_mask: bool  # the mask written lacks what was rejected
    schemes: tuple[str, ...]  # reported beside the native one
    pairs: tuple[str, ...]  # `Criterion.of` of those that compare the policy that trains
    # Names of columns. Sums and maxima are of the batch, the others of a slot: a sequence's part of a tile.
    token_sums: tuple[str, ...] = ()
    sequence_sums: tuple[str, ...] = ()
    call_sums: tuple[str, ...] = ()
    token_maxima: tuple[str, ...] = ()
    sequence_maxima: tuple[str, ...] = ()
    call_maxima: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    peaks: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    _hash: int = field(default=0, compare=False, repr=False)

    def __hash__(self) -> int:
        """Computed once: every launch looks the plan up."""
        return self._hash

    @property
    def halvings(self) -> int:
        """How often a tile is halved, because a token takes so many registers that a thread should have fewer."""
        if self.double or (self.full and self.schemes):
            return 2
        divergence = any(STATISTICS[test.stat].has_eps for test in self.tests)
        return 1 if self.full or self.schemes or divergence or len(self.tests) > 2 else 0

    @property
    def derived(self) -> int:
        """How many of the first token maxima follow from the extrema of D: those of weights that grow with it."""
        if self.level != "token":
            return 0
        return 2 if self.outside == "zero" else 4

    @property
    def drops_tokens(self) -> bool:
        """Whether tokens are dropped one by one where they are read."""
        return any(test.over == "token" and test.drop != "sequence" for test in self.tests)

    @property
    def late_drops(self) -> tuple[Test, ...]:
        """Criteria of sequences that drop some of their tokens."""
        return tuple(test for test in self.tests if test.over == "sequence" and test.drop == "token")

    @property
    def classes(self) -> bool:
        """Whether tokens have to be counted by `when`."""
        return self.classes_of(0)

    def classes_of(self, pair: int) -> bool:
        """The same for a pair of policies."""
        return any(test.over == "sequence" and test.when != "any" and test.pair == pair for test in self.tests)

    @property
    def averages_advantages(self) -> bool:
        """Whether the mean advantage of a sequence is taken here."""
        any_pair = any(self.classes_of(k) for k in range(len(self.pairs) + 1))
        return self.advantages == "token" and any_pair

    @property
    def rejects_nonfinite(self) -> bool:
        """Whether a non-finite token takes its sequence with it."""
        return self.nonfinite == "reject" and (self.level is not None or bool(self.tests))

    @property
    def rejects_sequences(self) -> bool:
        """Whether `keep` can be False."""
        whole = (test.drop == "sequence" or (test.drop == "unit" and test.over == "sequence") for test in self.tests)
        return self.rejects_nonfinite or any(whole)

    @property
    def spreads(self) -> bool:
        """Whether weights are of sequences, and so are written by `apply`."""
        return self.writes_weights and self.level in ("product", "geometric")

    @property
    def marks(self) -> bool:
        """Whether `read` marks in the weights which tokens have one, because the mask does not tell."""
        return self.spreads and self.rejected != "mask" and self.drops_tokens

    @property
    def zeroes_weights(self) -> bool:
        """Whether `apply` has to zero weights that `read` wrote."""
        if not self.writes_weights or self.spreads:
            return False
        return self.rejects_nonfinite or (self.rejected != "mask" and (self.rejects_sequences or bool(self.late_drops)))

    @property
    def zeroes_mask(self) -> bool:
        """Whether `apply` has to zero what `read` wrote into the mask."""
        return self.edits_mask and (self.rejects_sequences or bool(self.late_drops))

    @property
    def applies(self) -> bool:
        """Whether `apply` looks at tokens at all."""
        return self.spreads or self.zeroes_weights or self.zeroes_mask


@lru_cache(maxsize=256)
def plan_of(
    spec: Spec,
    *,
    double: bool,
    packed: bool,
    masked: bool,
    advantages: str | None,
    writes_weights: bool,
    writes_mask: bool,
    edits_mask: bool,
) -> Plan:
    """The plan of a Spec for one kind of batch.

    Args:
        spec: What to do.
        double: Compute in float64.
        packed: Sequences by offsets, not rows.
        masked: A mask is given.
        advantages: "token", "sequence" or None.
        writes_weights: Weights are handed back.
        writes_mask: A new mask is handed back.
        edits_mask: It lacks what was rejected.
    """
    tests, names = [], list(dict.fromkeys(c.name for c in spec.criteria if c.name))
    pairs = pairs_of(spec)
    for i, criterion in enumerate(spec.criteria):
        cut = threshold_of(criterion)
        tests.append(
            Test(
                index=i,
                stat=criterion.stat,
                over=criterion.over,
                reduce=criterion.reduce,
                when=criterion.when,
                drop=criterion.drop,
                cut=cut.on,
                holed=cut.hole is not None,
                token_clamp=criterion.token_clamp is not None,
                external=names.index(criterion.name) if criterion.name else -1,
                pair=1 + pairs.index(criterion.of) if criterion.of in pairs else 0,
                role=peers.role(criterion, spec),
            )
        )
    weight = spec.weight
    plan = Plan(
        level=None if weight is None else weight.level,
        outside="clamp" if weight is None else weight.outside,
        bounded=weight is not None and (weight.lower, weight.upper) != (None, None),
        has_lower=weight is not None and weight.lower is not None,
        has_upper=weight is not None and weight.upper is not None,
        token_clamp=weight is not None and weight.token_clamp is not None,
        tests=tuple(tests),
        rejected=spec.rejected,
        nonfinite=spec.nonfinite,
        kept=spec.sums_over == "kept" and any(test.over == "token" for test in tests),
        full=spec.detail == "full",
        double=double,
        packed=packed,
        masked=masked,
        advantages=advantages if any(test.when != "any" for test in tests) else None,
        externals=len(names),
        writes_weights=writes_weights,
        writes_mask=writes_mask,
        edits_mask=edits_mask,
        schemes=tuple(name for name in spec.report if name != "native"),
        pairs=pairs,
    )
    plan = replace(
        plan,
        **columns_of(spec, indices(spec))._asdict(),
        **_slot_columns(plan),
        numbers=tuple(numbers_of(spec, double)),
    )
    return replace(plan, _hash=hash(repr(plan)))


def column_of(pair: int, name: str) -> str:
    """A column of a pair of policies; those of train and rollout have none of their own."""
    return f"pair{pair}/{name}" if pair else name


def pairs_of(spec: Spec) -> tuple[str, ...]:
    """What its criteria compare besides train and rollout."""
    return tuple(dict.fromkeys(c.of for c in spec.criteria if c.of != "train/rollout"))


def _slot_columns(plan: Plan) -> dict[str, Any]:
    """What `read` leaves of every slot: tokens counted, integers and floats to add, keys to take the largest of."""
    counts, floats = ["valid", "nonfinite"], ["train", "rollout"]
    integers: list[str] = []
    peaks: list[str] = []
    if plan.level == "token":
        floats += ["raw", "bounded"]

    def exact(name: str, limbs: int, poisoned: bool) -> None:
        if plan.double:
            floats.append(name)
        else:
            integers.extend([name, f"{name}/fraction"][:limbs])
        if poisoned:
            floats.append(f"{name}/rest")

    propagate = plan.nonfinite == "propagate"
    exact("d", 1, propagate)
    if plan.kept:
        counts.append("survivors")
        exact("d_kept", 1, propagate)
    if plan.level in ("product", "geometric") and plan.token_clamp:
        exact("weight", 1, propagate)
    for test in plan.tests:
        if test.over == "token":
            counts.append(f"{test.index}/lost")
        elif test.reduce in ("max", "min"):
            peaks.append(f"{test.index}/peak")
        elif test.sum != "d":
            exact(f"{test.index}/sum", 1 if STATISTICS[test.stat].one_limb else 2, propagate or test.external >= 0)
    if plan.drops_tokens:
        counts.append("alive")
    if plan.classes:
        counts += CLASSES
        if plan.drops_tokens:
            counts += [f"alive/{name}" for name in CLASSES]
    if plan.averages_advantages:
        exact("advantage", 2, False)
    for k in range(1, len(plan.pairs) + 1):
        counts.append(column_of(k, "nonfinite"))
        if plan.kept:
            counts.append(column_of(k, "survivors"))
        if plan.classes_of(k):
            counts += [column_of(k, name) for name in CLASSES]
    if "verl" in plan.schemes or "xtuner" in plan.schemes:
        floats.append("d_beyond")
    for test in plan.tests:
        if test.role == "option" and test.over == "token":
            floats.append(f"verl/{test.index}/row")
        elif test.role == "outlier":
            counts += [f"skyrl/{test.index}/{side}" for side in ("over_high", "under_low")]
    if "skyrl" in plan.schemes and plan.level == "token" and plan.has_upper:
        counts.append("skyrl/clipped")
    return {"counts": tuple(counts), "integers": tuple(integers), "floats": tuple(floats), "peaks": tuple(peaks)}
