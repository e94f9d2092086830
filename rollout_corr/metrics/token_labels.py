"""Statistics by label of a token, such as the policy version that sampled it, or the kind of its turn.

Only what is a sum or an extremum over tokens is defined for a part of a sequence: no metric of sequences. The weight
and the rejection of a token are those that it got in its whole sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.bounds import grown
from rollout_corr.definition.correction import Outcome
from rollout_corr.definition.facts import Named
from rollout_corr.definition.findings import Findings, above, below
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.tokens import LARGEST_STATISTIC, Tokens, select
from rollout_corr.definition.weights import kept_tokens
from rollout_corr.metrics.aggregates import moment_values
from rollout_corr.metrics.labels import BEYOND, PLAIN, Labelled, columns_of, places_of, sorted_by

# Tokens that a run of equal labels has on average for runs to be summed first, and labels over runs.
LONG_RUN = 8


class PerLabel(NamedTuple):
    """Sums and maxima of the tokens of each label, in the order of `sums_of` and `maxima_of`."""

    sums: Tensor
    maxima: Tensor

    def joined(self, other: PerLabel) -> PerLabel:
        """Add those of another block."""
        return PerLabel(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


class ByLabel:
    """Sums, counts and ends of tokens by label.

    Args:
        place: [N] int64, the label of each token.
        many: How many labels there are.
        look: Read values, for CPU tensors, to find runs of equal labels. Without it tokens are sorted by label.
    """

    def __init__(self, place: Tensor, many: int, look: bool) -> None:
        self._place, self._many = place, many
        self._order: Tensor | None = None
        if look:
            self._runs = _runs(place)
            if self._runs is not None:
                self._place = place.index_select(0, self._runs.offsets[:-1])
        else:
            self._order, self._runs = sorted_by(place, many)
            self._place = torch.arange(many, device=place.device)
        self.sums: Named = {}
        self.maxima: Named = {}
        self._all: Tensor | None = None

    def _flat(self, x: Tensor) -> Tensor:
        """[N]: x per token, in the order in which it is reduced."""
        flat = x.reshape(-1)
        return flat if self._order is None else flat.index_select(0, self._order)

    def add(self, name: str, x: Tensor) -> None:
        """Sum floating x per token."""
        flat = self._flat(x)
        summed = flat.double() if self._runs is None else self._runs.sum(flat)
        self.sums[name] = summed.new_zeros(self._many).scatter_add_(0, self._place, summed)

    def count(self, name: str, which: Tensor | None) -> None:
        """Count tokens; None: all of them."""
        if which is None:
            self.sums[name] = self._every()
            return
        flat = self._flat(which)
        self.sums[name] = self._counted(flat if self._runs is None else self._runs.sum_integers(flat))

    def none(self, name: str) -> None:
        """Count no token."""
        self.sums[name] = torch.zeros(self._many, dtype=torch.float64, device=self._place.device)

    def _every(self) -> Tensor:
        """The tokens of each label; they are counted once."""
        if self._all is None:
            all_here = torch.ones_like(self._place) if self._runs is None else self._runs.offsets.diff()
            self._all = self._counted(all_here)
        return self._all

    def _counted(self, counts: Tensor) -> Tensor:
        nothing = torch.zeros(self._many, dtype=torch.float64, device=counts.device)
        return nothing.scatter_add_(0, self._place, counts.double())

    def ends(self, name: str, x: Tensor, among: Tensor | None) -> None:
        """Find the largest x and the largest -x of the chosen tokens."""
        for end, side in (("max", x), ("-min", -x)):
            flat = self._flat(side if among is None else torch.where(among, side, -torch.inf))
            found = (flat if self._runs is None else self._runs.max(flat)).double()
            nothing = found.new_full((self._many,), -torch.inf)
            self.maxima[f"{end}_{name}"] = nothing.scatter_reduce_(0, self._place, found, "amax")


def _runs(place: Tensor) -> Packed | None:
    """Stretches of tokens with equal labels; None where they are short."""
    size = place.shape[0]
    begins = (place[1:] != place[:-1]).nonzero().squeeze(1) + 1
    if LONG_RUN * (begins.shape[0] + 1) > size:
        return None
    return Packed(torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), size)]), size)


def of_block(f: Findings, labelled: Labelled, look: bool) -> PerLabel:
    """Sum the tokens of each label.

    Args:
        f: Some whole sequences.
        labelled: The labels of their tokens.
        look: Read values, as `evaluate` does.
    """
    taken = ByLabel(places_of(labelled, look).reshape(-1), len(labelled.labels.every), look)
    _of_d(f, taken)
    _of_weights(f, taken)
    for outcome in f.decision.outcomes:
        _of_criterion(f, outcome, taken)
    columns = columns_of(f.spec, "tokens")
    sums = torch.cat([taken.sums[name] for name in columns.sums])
    return PerLabel(sums, torch.cat([taken.maxima[name] for name in columns.maxima]))


def _of_d(f: Findings, taken: ByLabel) -> None:
    tokens = f.tokens
    d, measured = tokens.d, tokens.measured
    taken.count("tokens", tokens.valid)
    taken.count("tokens_measured", measured)
    _count_some(taken, "tokens_nonfinite", tokens.bad)
    decision, clamped = f.decision, tokens.clamped()
    stays = not decision.rejects and decision.dropped is None and not _turns_go(f)
    taken.count("tokens_kept", tokens.valid if stays else kept_tokens(tokens, decision))
    _count_some(taken, "tokens_clamped", None if clamped is d else clamped != d)
    excess = select(measured, tokens.excess)
    for name, x in (
        ("d", tokens.saturated),
        ("abs_d", tokens.size),
        ("d2", tokens.saturated * tokens.saturated),
        ("k3", tokens.k3),
        ("ratio", excess),
        ("ratio2", excess * excess),
    ):
        taken.add(name, x)
    taken.ends("d", d, measured)


def _turns_go(f: Findings) -> bool:
    """Tell whether a criterion may have rejected single turns."""
    return any(outcome.failed_turns is not None for outcome in f.decision.outcomes)


def _count_some(taken: ByLabel, name: str, which: Tensor | None) -> None:
    """Count tokens; None: there is none."""
    if which is None:
        taken.none(name)
    else:
        taken.count(name, which)


def _of_weights(f: Findings, taken: ByLabel) -> None:
    weight, weighing = f.spec.weight, f.weighing
    if weight is None or weighing is None:
        return
    measured = f.tokens.measured

    def of_tokens(x: Tensor) -> Tensor:
        return x if weight.per_token else f.tokens.units(weight.over).spread(x).expand(f.tokens.d.shape)

    for name, x in (("raw", of_tokens(weighing.raw)), ("weight", of_tokens(weighing.bounded))):
        counted = select(measured, x)
        taken.add(name, counted)
        taken.add(f"{name}2", counted * counted)
        taken.ends(name, x, measured)
    if weighing.ratio is not None:
        # Products of ratios can all be next to 0, where sums around 1 cancel.
        for name, x in zip(PLAIN[::2], (weighing.ratio, weighing.weight), strict=True):
            counted = select(measured, of_tokens(x))
            taken.add(name, counted)
            taken.add(f"{name}2", counted * counted)
    log_ratio = of_tokens(weighing.log_ratio)
    low, high = grown(weighing.bounds.low, weighing.bounds.high, weighing.growth)
    for name, bound, side in zip(BEYOND, (high, low), (above, below), strict=True):
        beyond = None if bound is None else side(log_ratio, bound)
        _count_some(taken, name, beyond if beyond is None or measured is None else beyond & measured)


def _of_criterion(f: Findings, outcome: Outcome, taken: ByLabel) -> None:
    criterion = outcome.criterion
    _count_some(taken, f"{criterion.label}/tokens", _lost(outcome, f.tokens))
    if criterion.per_token:
        taken.count(f"{criterion.label}/units", outcome.among)
        value, among = moment_values(criterion, outcome.value, outcome.among, f.spec)
        counted = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
        name = f"{criterion.label}/value"
        taken.add(name, counted)
        taken.add(f"{name}2", counted * counted)
        taken.ends(name, value, among)


def _lost(outcome: Outcome, tokens: Tokens) -> Tensor | None:
    """Bool per token: valid, and one criterion rejected it; None: it can reject none."""
    lost = outcome.dropped
    if lost is None and outcome.failed is not None:
        lost = tokens.sequences.spread(outcome.failed).expand(tokens.d.shape)
    elif lost is None and outcome.failed_turns is not None:
        lost = tokens.units("turn").spread(outcome.failed_turns).expand(tokens.d.shape)
    return lost if lost is None or tokens.valid is None else lost & tokens.valid
