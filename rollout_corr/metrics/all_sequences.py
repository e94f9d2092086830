"""The facts of all sequences of a batch, and the columns that statistics over sequences are made of."""

from __future__ import annotations

from itertools import chain, product
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..definition.bounds import OPEN, WeightBounds, above, below
from ..definition.facts import Named, SequenceFacts
from ..definition.tokens import LARGEST_LOG_PERPLEXITY, Number, select
from ..specs.bounds_of_batch import Side
from ..specs.correction import Spec
from .rows import Column
from .sums import OfBatch, Reducer

# Columns of sequences whose products statistics need.
PRODUCTS = ("measured", "excess", "weight_excess", "ratio", "weight")

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


class OfColumns(NamedTuple):
    """Statistics that are sums and ends of columns."""

    sums: tuple[tuple[str, Column], ...]  # by their names
    ends: tuple[tuple[tuple[str, ...], str], ...]  # names of a maximum and a minimum


def perplexity(log_perplexity: Tensor) -> Tensor:
    """Exponentiate, capped so that it stays finite."""
    return log_perplexity.clamp(max=LARGEST_LOG_PERPLEXITY).exp()


class AllSequences:
    """The facts of all sequences of a batch, [S] each, and what several statistics derive from them.

    Columns are float64 values of each sequence by name.
    """

    def __init__(
        self, facts: SequenceFacts, tokens_outside: Number, spec: Spec, on_host: bool, bounds: WeightBounds = OPEN
    ) -> None:
        self.facts, self.tokens_outside, self.spec = facts, tokens_outside, spec
        self.bounds = bounds
        # What reduces values of sequences.
        self.by: Reducer = OfBatch(facts.d)
        self._on_host = on_host
        self._standing: Tensor | None = None
        self.count = facts.keep.shape[0]
        # [S] bool, the sequences that statistics are over; None is all.
        every = on_host and self.count > 0 and int(facts.measured.amin()) > 0
        self.counted = None if every else facts.measured > 0
        n = facts.measured if every else facts.measured.clamp(min=1)
        # The gap from the sum of D, which is exact, and not from the difference of two large sums.
        logs = torch.stack([facts.train, facts.rollout, facts.d]).neg_().div_(n)
        d = facts.d[None]
        sizes = torch.cat([logs[2:], d]).abs_()
        chi2 = d.clamp(-spec.clamp, spec.clamp).mul_(2.0).expm1_()
        self._columns: Named = {}
        self._parts = [logs, perplexity(logs), sizes, chi2, d]
        self.turns = facts.turns
        self.turns_measured = None if facts.turns is None else facts.turns.measured > 0
        # In the order in which criteria are run: over tokens, then over all others.
        run = sorted(spec.criteria, key=lambda criterion: criterion.over != "token")
        self.criteria = dict(zip([criterion.label for criterion in run], facts.criteria, strict=True))

    def read(self, columns: OfColumns) -> tuple[dict[str, Number], dict[str, Number]]:
        """Read the sums and the ends of columns, all of them at once, and say what follows from facts alone.

        On few sequences an operation costs the same whatever it does.
        """
        names, facts, parts, weighted = NAMES, self.facts, self._parts, self.spec.weight is not None
        if weighted:
            names = WITH_WEIGHT
            of_weight = facts.measured.double(), facts.excess, facts.weight_excess, facts.ratio, facts.weight
            parts = [*parts, torch.stack(of_weight)]
        joined = torch.cat(parts)
        chosen = select(self.counted, joined)
        sums: dict[Column, float] = dict(zip(names, chosen.sum(1).tolist(), strict=True))
        if self.counted is None:
            low, high = torch.aminmax(joined, dim=1)
        elif self.count:
            low = torch.where(self.counted, joined, torch.inf).amin(1)
            high = torch.where(self.counted, joined, -torch.inf).amax(1)
        else:
            low, high = joined.new_full((len(names),), torch.inf), joined.new_full((len(names),), -torch.inf)
        ends = dict(zip(names, zip(high.tolist(), low.neg().tolist(), strict=True), strict=True))
        if weighted:
            # One product of matrices takes less time than two of the many sums that it holds.
            factors = chosen[len(NAMES) :]
            sums.update(zip(PAIRS, chain(*(factors @ factors.T).tolist()), strict=True))
        read_sums: dict[str, Number] = {name: sums[column] for name, column in columns.sums}
        read_maxima: dict[str, Number] = {"max_abs_sum_d": ends["size"][0]}
        for row, column in columns.ends:
            read_maxima.update(zip(row, ends[column], strict=True))
        if ends["size"][0] <= self.spec.clamp:
            read_sums["sequences_clamped"] = 0.0
        return read_sums | self._without_a_pass(), read_maxima

    def _without_a_pass(self) -> dict[str, Number]:
        """Sums that follow from what is known of all sequences together."""
        facts, sums = self.facts, dict[str, Number]()
        counts = {"tokens": facts.tokens, "tokens_measured": facts.measured, "tokens_differing": facts.differing}
        if facts.total is not None:
            counts["tokens_kept"] = facts.kept
            sums.update((name, float(facts.total)) for name, x in counts.items() if x is facts.tokens)
        if facts.nonfinite is None:
            sums["tokens_nonfinite"] = 0.0
        if not facts.drops:
            sums["sequences_without_survivors"] = 0.0
        if self.counted is None:
            sums["sequences"] = sums["sequences_measured"] = self.count
            if facts.differing is facts.tokens:
                sums["sequences_differing"] = self.count
            if not facts.rejects:
                sums["sequences_kept"] = self.count
        sides = (("sequences_above", self.bounds.high), ("sequences_below", self.bounds.low))
        return sums | {name: 0.0 for name, bound in sides if bound is None}

    def column(self, name: Column) -> Tensor:
        """[S] float64: a column, or the product of two."""
        if not isinstance(name, str):
            first, second = (getattr(self.facts, factor) for factor in name)
            return cast("Tensor", first * second)
        if not self._columns:
            for names, part in zip(COLUMNS, self._parts, strict=True):
                self._columns.update(zip(names, part.unbind(), strict=True))
        return self._columns[name] if name in self._columns else cast("Tensor", getattr(self.facts, name))

    def ends(self, name: str) -> tuple[Number, Number]:
        """The largest and the largest negated value of a column over measured sequences; -inf when there is none."""
        return self.by.ends(self.column(name), self.counted)

    def reduce_by(self, by: Reducer) -> None:
        """Take ends of each label from here on, and no longer of the batch."""
        self.by, self._on_host, self.counted = by, False, self.measured

    @property
    def measured(self) -> Tensor:
        """[S] bool: it has a measured token."""
        return self.facts.measured > 0 if self.counted is None else self.counted

    @property
    def nonfinite(self) -> Tensor:
        """[S] int64: the tokens whose D is NaN or infinite."""
        counts = self.facts.nonfinite
        return torch.zeros_like(self.facts.tokens) if counts is None else counts

    @property
    def nonempty(self) -> Tensor:
        """[S] bool: it has a valid token."""
        return self.measured if self.facts.tokens is self.facts.measured else self.facts.tokens > 0

    @property
    def differing(self) -> Tensor:
        """[S] bool: a valid token of it differs."""
        return self.nonempty if self.facts.differing is self.facts.tokens else self.facts.differing > 0

    @property
    def standing(self) -> Tensor:
        """[S] bool: it has a valid token, and no criterion rejected it."""
        if self._standing is None:
            rejects = self.facts.rejects
            self._standing = self.facts.keep & (self.facts.tokens > 0) if rejects else self.nonempty
        return self._standing

    def sequences_clamped(self) -> Tensor:
        """[S] bool: |sum of D| is beyond the clamp."""
        return self.facts.d.abs() > self.spec.clamp

    def without_survivors(self) -> Tensor:
        """[S] bool: it stands, and criteria rejected its tokens one by one."""
        return self.standing & (self.facts.kept == 0)

    def beyond(self, side: Side) -> Tensor:
        """[S] bool: the weight before the bounds is beyond one of them."""
        bound = self.bounds.high if side == "upper" else self.bounds.low
        return (above if side == "upper" else below)(self.facts.log_weight, bound)

    def unless_all(self, which: Tensor) -> Tensor | None:
        """[S] bool, or None where values are read and all are True."""
        return None if self._on_host and bool(which.all()) else which
