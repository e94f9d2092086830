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
from rollout_corr.metrics.labels import BEYOND, PLAIN, Columns, Labels, columns_of
from rollout_corr.metrics.sums_by_label import Sorted, Tiled


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
        place: [N] integers, the label of each token.
        many: How many labels there are.
        look: Read values, for CPU tensors.

    Attributes:
        sums, maxima: [many] float64, by name.
    """

    def __init__(self, place: Tensor, many: int, look: bool) -> None:
        self.look, self._each, self._many = look, place, many
        self._tokens = Tiled(place, many) if look else Sorted(place, many)
        self.ordered = self._tokens.ordered
        self._all: Tensor | None = None
        self._few: Tensor | None = None
        self.sums: Named = {}
        self.maxima: Named = {}

    def add(self, name: str, x: Tensor) -> None:
        """Sum floating x, of `ordered`."""
        self.sums[name] = self._tokens.sum(x)

    def add_squares(self, name: str, x: Tensor) -> None:
        """Sum the squares of floating x, of `ordered`."""
        self.sums[name] = self._tokens.sum_squares(x)

    def count(self, name: str, which: Tensor | None) -> None:
        """Count tokens; None: all of them."""
        if which is None:
            if self._all is None:
                self._all = self._tokens.counts()
            self.sums[name] = self._all
        else:
            # Sums of 0 and 1 are exact, and those of floats are taken by tiles.
            self.add(name, self.ordered(which).float())

    def none(self, name: str) -> None:
        """Count no token."""
        self.sums[name] = torch.zeros(self._many, dtype=torch.float64, device=self._each.device)

    def again(self, name: str, other: str) -> None:
        """Give another name the sums, their squares and the ends of the first."""
        for table, words in ((self.sums, ("{}", "{}2")), (self.maxima, ("max_{}", "-min_{}"))):
            table |= {word.format(other): table[word.format(name)] for word in words if word.format(name) in table}

    def ends(self, name: str, x: Tensor, among: Tensor | None) -> None:
        """Find the largest x and the largest -x of the chosen tokens, both of `ordered`."""
        sides = (x, x) if among is None else [torch.where(among, x, end) for end in (-torch.inf, torch.inf)]
        self.maxima |= zip((f"max_{name}", f"-min_{name}"), self._tokens.ends(*sides), strict=True)

    def by_unit(self, units: Packed) -> Tensor | None:
        """[many, U] float64: the tokens of each label in each unit; None where that is more than there are tokens."""
        tokens = self._each.shape[0]
        if not 0 < self._many * units.count <= tokens:
            return None
        both = self._each.long().mul_(units.count).add_(units.ids)
        return torch.bincount(both, minlength=self._many * units.count).view(self._many, units.count).double()

    def by_label(self, columns: Columns) -> PerLabel:
        """Give all sums and maxima in order."""
        return PerLabel(
            torch.cat([self.sums[name] for name in columns.sums]),
            torch.cat([self.maxima[name].double() for name in columns.maxima]),
        )


def of_block(f: Findings, labels: Labels, place: Tensor, look: bool) -> PerLabel:
    """Sum the tokens of each label.

    Args:
        f: Some whole sequences.
        labels: The labels.
        place: [N] or [B, T] integers, those of their tokens, as `places_of` or `narrow_places` gives them.
        look: Read values, as `evaluate` does.
    """
    taken = ByLabel(place.reshape(-1), len(labels.every), look)
    _of_valid(f, taken)
    _of_d(f, taken)
    _of_weights(f, taken)
    for outcome in f.decision.outcomes:
        _of_criterion(f, outcome, taken)
    return taken.by_label(columns_of(f.spec, "tokens"))


def _of_valid(f: Findings, taken: ByLabel) -> None:
    tokens, decision = f.tokens, f.decision
    taken.count("tokens", tokens.valid)
    taken.count("tokens_measured", tokens.measured)
    _count_some(taken, "tokens_nonfinite", tokens.bad)
    stands = not decision.rejects or (taken.look and bool(decision.keep.all()))
    stays = stands and decision.dropped is None and not _turns_go(f)
    taken.count("tokens_kept", tokens.valid if stays else kept_tokens(tokens, decision))


def _of_d(f: Findings, taken: ByLabel) -> None:
    tokens = f.tokens
    d, measured, clamped = tokens.d, tokens.measured, tokens.clamped()
    _count_some(taken, "tokens_clamped", None if clamped is d else clamped != d)
    saturated, k3, excess = taken.ordered(tokens.saturated), taken.ordered(tokens.k3), _excess(f, taken)
    taken.add("d", saturated)
    taken.add("abs_d", saturated.abs())
    taken.add_squares("d2", saturated)
    taken.add("k3", k3)
    taken.add_squares("ratio2", excess)
    taken.ends("d", taken.ordered(d), None if measured is None else taken.ordered(measured))
    if clamped is tokens.saturated and measured is None:
        # Each is D and k3.
        taken.sums["ratio"] = taken.sums["d"] + taken.sums["k3"]
    else:
        taken.add("ratio", excess)


def _excess(f: Findings, taken: ByLabel) -> Tensor:
    """e^D - 1 of measured tokens, in the order in which it is reduced."""
    tokens = f.tokens
    found = taken.ordered(tokens.clamped()) + taken.ordered(tokens.k3)
    return found if tokens.measured is None else select(taken.ordered(tokens.measured), found)


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
    if not weight.per_token and taken.look and measured is None and _of_unit_weights(f, taken):
        return

    def of_tokens(x: Tensor) -> Tensor:
        return x if weight.per_token else f.tokens.units(weight.over).spread(x).expand(f.tokens.d.shape)

    among = None if measured is None else taken.ordered(measured)
    bounded = _is_bounded(f, taken.look)
    for name, x in (("raw", weighing.raw), ("weight", weighing.bounded if bounded else None)):
        if x is None:
            taken.again("raw", name)
            continue
        here = taken.ordered(of_tokens(x))
        counted = select(among, here)
        taken.add(name, counted)
        taken.add_squares(f"{name}2", counted)
        taken.ends(name, here, among)
    if weighing.ratio is not None:
        # Products of ratios can all be next to 0, where sums around 1 cancel.
        for name, x in zip(PLAIN[::2], (weighing.ratio, weighing.weight if bounded else None), strict=True):
            if x is None:
                taken.again(PLAIN[0], name)
                continue
            counted = taken.ordered(select(measured, of_tokens(x)))
            taken.add(name, counted)
            taken.add_squares(f"{name}2", counted)
    if not bounded:
        for name in BEYOND:
            taken.none(name)
        return
    log_ratio = of_tokens(weighing.log_ratio)
    low, high = grown(weighing.bounds.low, weighing.bounds.high, weighing.growth)
    for name, bound, side in zip(BEYOND, (high, low), (above, below), strict=True):
        beyond = None if bound is None else side(log_ratio, bound)
        _count_some(taken, name, beyond if beyond is None or measured is None else beyond & measured)


def _of_unit_weights(f: Findings, taken: ByLabel) -> bool:
    """Sum the weights of turns or sequences over their tokens, all of them measured; False where that takes longer."""
    weight, weighing = f.spec.weight, f.weighing
    assert weight is not None
    assert weighing is not None
    assert weighing.ratio is not None
    units = f.tokens.units(weight.over)
    counts = taken.by_unit(units) if isinstance(units, Packed) else None
    if counts is None:
        return False
    there = counts > 0.0
    each = {"raw": weighing.raw, "weight": weighing.bounded, PLAIN[0]: weighing.ratio, PLAIN[2]: weighing.weight}
    bounds = weighing.bounds
    for name, bound, side in zip(BEYOND, (bounds.high, bounds.low), (above, below), strict=True):
        each[name] = side(weighing.log_ratio, bound).double()
    for name, x in each.items():
        taken.sums[name], taken.sums[f"{name}2"] = counts @ x, counts @ (x * x)
    for name in ("raw", "weight"):
        for end, side_of in (("max", each[name]), ("-min", -each[name])):
            taken.maxima[f"{end}_{name}"] = torch.where(there, side_of, -torch.inf).amax(1)
    return True


def _is_bounded(f: Findings, look: bool) -> bool:
    """Tell whether a bound may have changed a weight: not where somebody looked, and none lies beyond."""
    weight, weighing = f.spec.weight, f.weighing
    if weight is None or weighing is None or not look:
        return True
    return weight.per_token or not torch.equal(weighing.raw, weighing.bounded)


def _of_criterion(f: Findings, outcome: Outcome, taken: ByLabel) -> None:
    criterion = outcome.criterion
    failed = outcome.failed if outcome.dropped is None else None
    spares = taken.look and failed is not None and not bool(failed.any())
    _count_some(taken, f"{criterion.label}/tokens", None if spares else _lost(outcome, f.tokens))
    if criterion.per_token:
        taken.count(f"{criterion.label}/units", outcome.among)
        value, among = moment_values(criterion, outcome.value, outcome.among, f.spec)
        value, among = taken.ordered(value), None if among is None else taken.ordered(among)
        counted = select(among, value).clamp(-LARGEST_STATISTIC, LARGEST_STATISTIC)
        name = f"{criterion.label}/value"
        taken.add(name, counted)
        taken.add_squares(f"{name}2", counted)
        taken.ends(name, value, among)


def _lost(outcome: Outcome, tokens: Tokens) -> Tensor | None:
    """Bool per token: valid, and one criterion rejected it; None: it can reject none."""
    lost = outcome.dropped
    if lost is None and outcome.failed is not None:
        lost = tokens.sequences.spread(outcome.failed).expand(tokens.d.shape)
    elif lost is None and outcome.failed_turns is not None:
        lost = tokens.units("turn").spread(outcome.failed_turns).expand(tokens.d.shape)
    return lost if lost is None or tokens.valid is None else lost & tokens.valid
