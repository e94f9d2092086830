"""The facts of all sequences of a batch, and the columns that statistics over sequences are made of."""

from __future__ import annotations

from copy import copy
from itertools import chain, product
from typing import cast

import torch
from torch import Tensor

from ..definition.bounds import OPEN, WeightBounds, above, below
from ..definition.facts import Named, SequenceFacts
from ..definition.tokens import LARGEST_LOG_PERPLEXITY, Number, select
from ..specs.bounds_of_batch import Side
from ..specs.correction import Spec
from .rows import Column
from .sums import OfBatch, OfLabels, Reducer

# Columns of sequences whose products statistics need.
PRODUCTS = ("measured", "raw", "bounded", "ratio", "weight")

# Columns of sequences by the tensors that hold several of them; the weight's follow where there is one.
COLUMNS = (
    ("train_log_ppl", "rollout_log_ppl", "gap"),
    ("train_ppl", "rollout_ppl", "ppl_ratio"),
    ("abs_gap", "size"),
    ("chi2",),
    ("d",),
)
NAMES = tuple(chain(*COLUMNS))
WITH_WEIGHT, PAIRS = NAMES + PRODUCTS, tuple(product(PRODUCTS, PRODUCTS))


def perplexity(log_perplexity: Tensor) -> Tensor:
    """Exponentiate, capped so that it stays finite."""
    return log_perplexity.clamp(max=LARGEST_LOG_PERPLEXITY).exp()


class AllSequences:
    """The facts of all sequences of a batch, [S] each, and what several statistics derive from them.

    Columns are float64 values of each sequence by name. Where values are read, all columns are summed in one operation,
    and their ends found in another, because on few sequences an operation costs the same whatever it does.
    """

    def __init__(
        self, facts: SequenceFacts, tokens_outside: Number, spec: Spec, on_host: bool, bounds: WeightBounds = OPEN
    ) -> None:
        self.facts, self.tokens_outside, self.spec = facts, tokens_outside, spec
        self.bounds = bounds
        # What reduces values of sequences.
        self.by: Reducer = OfBatch(facts.d)
        self._on_host = on_host
        self._standing: Number | None = None
        self._max_size: Number | None = None
        self.count = facts.keep.shape[0]
        # What statistics are taken among: None is all.
        every = on_host and self.count > 0 and int(facts.measured.amin()) > 0
        self.among = None if every else facts.measured > 0
        n = facts.measured if every else facts.measured.clamp(min=1)
        # The gap from the sum of D, which is exact, and not from the difference of two large sums.
        logs = torch.stack([facts.train, facts.rollout, facts.d]).neg_().div_(n)
        d = facts.d[None]
        sizes = torch.cat([logs[2:], d]).abs_()
        chi2 = d.clamp(-spec.clamp, spec.clamp).mul_(2.0).expm1_()
        self._columns: Named = {}
        self._parts = parts = [logs, perplexity(logs), sizes, chi2, d]
        if on_host:
            self._join(parts)
        else:
            self._split(parts)
        self.turns = facts.turns
        self.turns_measured = None if facts.turns is None else facts.turns.measured > 0
        # In the order in which criteria are run: over tokens, then over all others.
        run = sorted(spec.criteria, key=lambda criterion: criterion.over != "token")
        self.criteria = {criterion.label: found for criterion, found in zip(run, facts.criteria, strict=True)}

    def _split(self, parts: list[Tensor]) -> None:
        """Name the columns."""
        self._columns = {}
        for names, part in zip(COLUMNS, parts, strict=True):
            self._columns.update(zip(names, part.unbind(), strict=True))

    def _join(self, parts: list[Tensor]) -> None:
        """Read the sums of all columns, and their ends."""
        names, facts, weighted = NAMES, self.facts, self.spec.weight is not None
        if weighted:
            names = WITH_WEIGHT
            of_weight = facts.measured.double(), facts.raw, facts.bounded, facts.ratio, facts.weight
            parts = [*parts, torch.stack(of_weight)]
        joined = torch.cat(parts)
        counted = select(self.among, joined)
        self._sums: dict[Column, float] = dict(zip(names, counted.sum(1).tolist(), strict=True))
        if self.among is None:
            low, high = torch.aminmax(joined, dim=1)
        elif self.count:
            low = torch.where(self.among, joined, torch.inf).amin(1)
            high = torch.where(self.among, joined, -torch.inf).amax(1)
        else:
            low, high = joined.new_full((len(names),), torch.inf), joined.new_full((len(names),), -torch.inf)
        self._ends = dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))
        if weighted:
            # One product of matrices takes less time than two of the many sums that it holds.
            factors = counted[len(NAMES) :]
            self._sums.update(zip(PAIRS, chain(*(factors @ factors.T).tolist()), strict=True))

    def column(self, name: Column) -> Number:
        """[S] float64: a column, or the product of two; or where values are read, its sum over measured sequences."""
        if self._on_host:
            return self._sums[name]
        if not isinstance(name, str):
            first, second = (getattr(self.facts, one) for one in name)
            return cast("Tensor", first * second)
        return self._columns[name] if name in self._columns else cast("Tensor", getattr(self.facts, name))

    def tokens(self, counts: Tensor) -> Number:
        """[S] int64, tokens of each sequence, as they are; or how many there are, if they are all and that is known."""
        known = self._on_host and counts is self.facts.tokens and self.facts.total is not None
        return float(self.facts.total or 0) if known else counts

    @property
    def nonfinite(self) -> Number:
        """[S] int64: the tokens whose D is NaN or infinite; or that there is none."""
        counts = self.facts.nonfinite
        if counts is None:
            return 0.0 if self._on_host else torch.zeros_like(self.facts.tokens)
        return counts

    def ends(self, name: str) -> tuple[Number, Number]:
        """The largest and the largest negated value of a column over measured sequences; -inf when there is none."""
        if self._on_host:
            low, high = self._ends[name]
            return high, -low
        column = self.column(name)
        assert isinstance(column, Tensor)
        return self.by.ends(column, self.among)

    def by_label(self, by: OfLabels) -> AllSequences:
        """A view whose values are per sequence and whose ends are of each label."""
        found = copy(self)
        found.by = by
        if self._on_host:
            found._on_host, found.among = False, self.facts.measured > 0
            found._split(self._parts)
        found._max_size = None
        return found

    @property
    def measured(self) -> Number:
        """[S] bool: it has a measured token; or how many have one."""
        return self.count if self.among is None else self.among

    @property
    def nonempty(self) -> Number:
        """[S] bool: it has a valid token; or how many have one."""
        return (
            self.measured if self.among is None or self.facts.tokens is self.facts.measured else self.facts.tokens > 0
        )

    @property
    def differing(self) -> Number:
        """[S] bool: a valid token of it differs; or how many have one."""
        return self.nonempty if self.facts.differing is self.facts.tokens else self.facts.differing > 0

    # Not by cached_property, whose lock older Pythons have and compilers cannot follow.
    @property
    def standing(self) -> Number:
        """[S] bool: it has a valid token, and no criterion rejected it; or how many do."""
        if self._on_host and not self.facts.rejects:
            return self.nonempty
        if self._standing is None:
            self._standing = self.facts.keep if self.among is None else self.facts.keep & (self.facts.tokens > 0)
        return self._standing

    @property
    def max_size(self) -> Number:
        """The largest |sum of D|."""
        if self._max_size is None:
            self._max_size = self.ends("size")[0]
        return self._max_size

    def sequences_clamped(self) -> Number:
        """[S] bool: |sum of D| is beyond the clamp; or how many are."""
        if self._on_host and float(self.max_size) <= self.spec.clamp:
            return 0.0
        return self.facts.d.abs() > self.spec.clamp

    def without_survivors(self) -> Number:
        """[S] bool: it stands, and criteria rejected its tokens one by one; or how many do."""
        if self._on_host and not self.facts.drops:
            return 0.0
        standing = self.standing
        # Where nothing rejects sequences, all of those with a token stand.
        return (standing if isinstance(standing, Tensor) else self.facts.tokens > 0) & (self.facts.kept == 0)

    def beyond(self, side: Side) -> Number:
        """[S] bool: the weight before the bounds is beyond one of them; or that none is, of an open one."""
        bound = self.bounds.high if side == "upper" else self.bounds.low
        if bound is None and self._on_host:
            return 0.0
        return (above if side == "upper" else below)(self.facts.log_weight, bound)

    def among_all(self, which: Tensor) -> Tensor | None:
        """[S] bool, or None where values are read and all are True."""
        return None if self._on_host and bool(which.all()) else which
