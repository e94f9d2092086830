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
from rollout_corr.definition.near import SMALL
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.tokens import LARGEST_STATISTIC, Tokens, select
from rollout_corr.definition.weights import kept_tokens
from rollout_corr.metrics.aggregates import moment_values
from rollout_corr.metrics.labels import BEYOND, PLAIN, Columns, Labels, columns_of, sorted_by

# Tokens that a run of equal labels has on average for runs to be summed first, and labels over runs.
LONG_RUN = 64

# Bools of an int64.
WORD = 8


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
        look: Read values, for CPU tensors, to find runs of equal labels. Without it tokens are sorted by label, as many
            tokens with short runs are.
    """

    def __init__(self, place: Tensor, many: int, look: bool) -> None:
        self.look, self._each = look, place
        self._many, self._order, self._runs = many, None, None
        if look:
            self._runs = _runs(place)
        if self._runs is not None:
            place = place.index_select(0, self._runs.offsets[:-1])
        elif not look or place.shape[0] > SMALL:
            self._order, self._runs = sorted_by(place, many)
            place = torch.arange(many, device=place.device)
        self._place = place.long()
        self.sums: Named = {}
        self.maxima: Named = {}
        self._all: Tensor | None = None
        self._ordered: list[tuple[Tensor, Tensor]] = []
        # Sums and maxima that are of labels already, [many].
        self.done: Named = {}

    def ordered(self, x: Tensor) -> Tensor:
        """[N]: x per token, in the order in which it is reduced."""
        flat = x.reshape(-1)
        if self._order is None:
            return flat
        # The statistics of D and those of weights read the same tensors.
        for known, found in self._ordered:
            if known is x:
                return found
        self._ordered.append((x, flat.index_select(0, self._order)))
        return self._ordered[-1][1]

    def add(self, name: str, x: Tensor) -> None:
        """Sum floating x, of `ordered`."""
        self.sums[name] = x.double() if self._runs is None else self._runs.sum(x)

    def count(self, name: str, which: Tensor | None) -> None:
        """Count tokens; None: all of them."""
        if which is None:
            self.sums[name] = self._every()
        else:
            # Sums of 0 and 1 are exact, and those of floats are taken by tiles.
            self.add(name, self.ordered(which).float())

    def none(self, name: str) -> None:
        """Count no token."""
        self.sums[name] = torch.zeros((), dtype=torch.float64, device=self._place.device).expand(self._place.shape)

    def again(self, name: str, other: str) -> None:
        """Give another name the sums, their squares and the ends of the first."""
        held = [(self.sums, "{}"), (self.sums, "{}2"), (self.maxima, "max_{}"), (self.maxima, "-min_{}")]
        for table, words in held:
            if words.format(name) in table:
                table[words.format(other)] = table[words.format(name)]

    def _every(self) -> Tensor:
        """The tokens of each label; they are counted once."""
        if self._all is None:
            counts = torch.ones_like(self._place) if self._runs is None else self._runs.offsets.diff()
            self._all = counts.double()
        return self._all

    def ends(self, name: str, x: Tensor, among: Tensor | None) -> None:
        """Find the largest x and the largest -x of the chosen tokens, both of `ordered`."""
        if self._runs is None or among is not None:
            sides = (x, -x) if among is None else [torch.where(among, side, -torch.inf) for side in (x, -x)]
            found = sides if self._runs is None else [self._runs.max(side) for side in sides]
        else:
            found = self._runs.ends(x)
        self.maxima |= zip((f"max_{name}", f"-min_{name}"), found, strict=True)

    def by_unit(self, units: Packed) -> Tensor | None:
        """[many, U] float64: the tokens of each label in each unit; None where that is more than there are tokens."""
        tokens = self._each.shape[0]
        if not 0 < self._many * units.count <= tokens:
            return None
        both = self._each.long().mul_(units.count).add_(units.ids)
        return torch.bincount(both, minlength=self._many * units.count).view(self._many, units.count).double()

    def by_label(self, columns: Columns) -> PerLabel:
        """Add up what tokens, or runs of them, have: every column in one operation."""
        place, many = self._place, self._many
        names = [[name for name in held if name not in self.done] for held in (columns.sums, columns.maxima)]
        sums = torch.stack([self.sums[name] for name in names[0]])
        maxima = torch.stack([self.maxima[name] for name in names[1]]).double()
        added = sums.new_zeros(sums.shape[0], many).scatter_add_(1, place.expand_as(sums), sums)
        highest = maxima.new_full((maxima.shape[0], many), -torch.inf)
        highest.scatter_reduce_(1, place.expand_as(maxima), maxima, "amax")
        if not self.done:
            return PerLabel(added.view(-1), highest.view(-1))
        found = self.done | dict(zip(names[0], added, strict=True)) | dict(zip(names[1], highest, strict=True))
        return PerLabel(*(torch.cat([found[name] for name in held]) for held in columns[:2]))


def _runs(place: Tensor) -> Packed | None:
    """Stretches of tokens with equal labels; None where they are short."""
    size = place.shape[0]
    changes = place[1:] != place[:-1]
    if not size or LONG_RUN * int(torch.count_nonzero(changes)) > size:
        return None
    # Words of eight places: few of them are not 0, and looking for places takes longer than all else here.
    whole = changes.shape[0] // WORD * WORD
    words = changes[:whole].view(torch.int64).nonzero().squeeze(1)
    inside = changes[:whole].view(-1, WORD).index_select(0, words).nonzero()
    first = words.index_select(0, inside[:, 0]).mul_(WORD).add_(inside[:, 1])
    begins = torch.cat([first, changes[whole:].nonzero().squeeze(1) + whole]).add_(1)
    return Packed(torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), size)]), size)


def of_block(f: Findings, labels: Labels, place: Tensor, look: bool) -> PerLabel:
    """Sum the tokens of each label.

    Args:
        f: Some whole sequences.
        labels: The labels.
        place: [N] or [B, T] integers, those of their tokens, as `places_of` or `narrow_places` gives them.
        look: Read values, as `evaluate` does.
    """
    taken = ByLabel(place.reshape(-1), len(labels.every), look)
    _of_d(f, taken)
    _of_weights(f, taken)
    for outcome in f.decision.outcomes:
        _of_criterion(f, outcome, taken)
    return taken.by_label(columns_of(f.spec, "tokens"))


def _of_d(f: Findings, taken: ByLabel) -> None:
    tokens = f.tokens
    d, measured = tokens.d, tokens.measured
    taken.count("tokens", tokens.valid)
    taken.count("tokens_measured", measured)
    _count_some(taken, "tokens_nonfinite", tokens.bad)
    decision, clamped = f.decision, tokens.clamped()
    stands = not decision.rejects or (taken.look and bool(decision.keep.all()))
    stays = stands and decision.dropped is None and not _turns_go(f)
    taken.count("tokens_kept", tokens.valid if stays else kept_tokens(tokens, decision))
    _count_some(taken, "tokens_clamped", None if clamped is d else clamped != d)
    saturated, k3, excess = taken.ordered(tokens.saturated), taken.ordered(tokens.k3), _excess(f, taken)
    taken.add("d", saturated)
    taken.add("abs_d", saturated.abs())
    taken.add("d2", saturated * saturated)
    taken.add("k3", k3)
    if clamped is tokens.saturated and measured is None:
        # Each is D and k3.
        taken.sums["ratio"] = taken.sums["d"] + taken.sums["k3"]
    else:
        taken.add("ratio", excess)
    taken.add("ratio2", excess * excess)
    taken.ends("d", taken.ordered(d), None if measured is None else taken.ordered(measured))


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
    if not weight.per_token and taken.look and f.tokens.largest is not None and _of_unit_weights(f, taken):
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
        taken.add(f"{name}2", counted * counted)
        taken.ends(name, here, among)
    if weighing.ratio is not None:
        # Products of ratios can all be next to 0, where sums around 1 cancel.
        for name, x in zip(PLAIN[::2], (weighing.ratio, weighing.weight if bounded else None), strict=True):
            if x is None:
                taken.again(PLAIN[0], name)
                continue
            counted = taken.ordered(select(measured, of_tokens(x)))
            taken.add(name, counted)
            taken.add(f"{name}2", counted * counted)
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
        taken.done[name], taken.done[f"{name}2"] = counts @ x, counts @ (x * x)
    for name in ("raw", "weight"):
        for end, side_of in (("max", each[name]), ("-min", -each[name])):
            taken.done[f"{end}_{name}"] = torch.where(there, side_of, -torch.inf).amax(1)
    return True


def _is_bounded(f: Findings, look: bool) -> bool:
    """Tell whether a bound may have changed a weight: not where somebody looked, and none lies beyond."""
    weight, weighing, few = f.spec.weight, f.weighing, f.few
    if weight is None or weighing is None or not look:
        return True
    if few is not None:
        return few.count(weighing.bounds.low, weighing.bounds.high) > 0
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
