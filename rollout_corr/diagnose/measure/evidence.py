"""Tallies for the doctor alone: which tokens and sequences belong together, which values repeat, which are odd."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from ...metrics.limits import sampler_error
from ..read.chunk import ValidTokens
from .bits import MOST_PLACES
from .by_label import ByLabel
from .by_sequence import BySequence
from .padding import Padding
from .pairing import Pairing
from .places import Places, Tested
from .profiles import CUT, Excess, Numbering, geometric_bins
from .sharpness import SharpnessTally

# The two log-probs that are compared.
Side = Literal["train", "rollout"]
SIDES: tuple[Side, ...] = get_args(Side)

# Rounding may lift a log-prob above 0, but not above this.
ROUNDING = 1e-3
# Beyond this |D| one policy gives a token less than 1/e of the probability that the other gives it.
FAR = 1.0
# No policy is so far from one that sampled the token: its logits were masked, or a value was filled in. Another model
# that is as far off somewhere is off by more than the second number at over twice as many tokens.
IMPOSSIBLE, UNLIKELY = 50.0, 10.0
# Repeated values are counted among tokens with |D| > FAR; this many different ones are remembered.
MOST_VALUES = 256

# Tokens that a sequence had 15 times or more are one group.
MOST_OCTAVE = 4

# D is clamped to +-MOST_AT_START where tokens are compared by their place.
MOST_AT_START = 2.0

# The most versions, and the most steps, that are counted, the first ones of a dump; each table takes up to 75 MB.
MOST_GROUPS = 65_536

# Bins of the place in a row, and parts of a sequence, in which tokens of turns are compared: of the first turn, and of
# later ones the first, second, third and all others. Each side needs so many at a place, and one so many in all.
PLACES_PER_OCTAVE, PARTS, KINDS = 4, 8, 5
FEWEST_AT_PLACE, FEWEST_COMPARED = 5, 20
# Groups of tokens by their place in a turn: the first 8, all others; and all tokens of the first turn.
TURN_OFFSETS = 8
OTHER_TURNS, FIRST_TURN = TURN_OFFSETS, TURN_OFFSETS + 1


# Numbers of `Evidence.fit`.
FITTED = ("train_mean", "train_std", "rollout_std", "log_prob_correlation")


class Evidence:
    """Tallies over chunks.

    Args:
        by: Names of further columns whose values are labels.
    """

    def __init__(self, by: Iterable[str] = ()) -> None:
        # Valid tokens; of these, with finite D, with |D| > FAR, with D = 0.
        self.tokens = self.finite = self.far = self.equal = 0
        # Per side, log-probs that are not finite, above 0, above 1; finite ones that are no power of two, and those of
        # these that are exact in bfloat16; those that are more than UNLIKELY and IMPOSSIBLE below those of the other.
        self.bad, self.positive, self.above_one, self.fractional, self.in_bfloat16, self.unlikely, self.impossible = (
            dict.fromkeys(SIDES, 0) for _ in range(7)
        )
        # Per side, counts of the most frequent values at tokens with |D| > FAR.
        self.repeated: dict[Side, Counter[float]] = {side: Counter() for side in SIDES}
        self.rows_bad = 0  # sequences with a non-finite D
        self.all_bad = Tested()  # sequences, and those without a finite D
        self.places = Places()  # files and records of the sequences
        self.pairing = Pairing()  # which log-probs belong together
        self.moments = torch.zeros(6, dtype=torch.float64)  # sums of 1, both log-probs, their squares, their product
        self.sharpness = SharpnessTally()  # how D follows the log-prob
        self.turns, self.positions = Excess(), Excess()  # |D| by place in the turn, and by octave of the position
        self.repeats = Excess()  # D by how often the sequence had the token before: never, once, by octaves; needs ids
        # |D| by place in the row, and by part of the sequence, times KINDS, plus the kind of the token: 0 in the first
        # turn, else 1 to 4 by its place in the turn.
        self.turn_places, self.turn_parts = Excess(), Excess()
        # How often each token id below MOST_PLACES occurs, and sums of both log-probs over these tokens.
        self.counts, self.counted = torch.zeros(0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        # |D| by group of a column, and the group of each value; values beyond MOST_GROUPS have none.
        self.columns = {"versions": Excess(), "steps": Excess()}
        self.values = {name: Numbering(MOST_GROUPS) for name in self.columns}
        self.by_sequence = BySequence()
        self.labels = {name: ByLabel() for name in by if name not in self.columns}
        # Over tokens that have all three: their count, sums of |new - train| and |train - rollout|, and of the squares
        # of `mean_squares`.
        self.distances = dict.fromkeys(("tokens", "new_train", "train_rollout", "train2", "new2", "apart2"), 0.0)
        self.padding = Padding()
        self.groups: Counter[int] = Counter()  # sequences of each group, up to MOST_GROUPS; -1: of none
        # Of n tokens of a sequence that have entropies, and e, the sum of entropy + train_logp over them: the sums over
        # sequences of 1, n, n^2, the entropy, e, e^2 and n e.
        self.surprise = torch.zeros(7, dtype=torch.float64)

    def add(self, tokens: ValidTokens) -> None:
        """Add the tokens of a chunk."""
        first = self.places.count
        self.tokens += tokens.d.numel()
        self.places.add(tokens.chunk)
        self._add_values(tokens, first)
        self.pairing.add(tokens, first)
        self._add_moments(tokens)
        self._add_groups(tokens)
        self._add_distances(tokens)
        self._add_entropy(tokens)
        self.padding.add(tokens)
        self.sharpness.add(tokens)
        self.by_sequence.add(tokens, first)
        for name, tally in self.labels.items():
            tally.add(tokens, tokens.column(name))

    def _add_values(self, tokens: ValidTokens, first: int) -> None:
        finite, d = tokens.finite, tokens.d
        self.finite += int(finite.sum())
        self.equal += int((finite & (d == 0)).sum())
        far = finite & (d.abs() > FAR)
        self.far += int(far.sum())
        for side in SIDES:
            logp = tokens.train if side == "train" else tokens.rollout
            below = d[finite] if side == "rollout" else -d[finite]
            self.unlikely[side] += int((below > UNLIKELY).sum())
            self.impossible[side] += int((below > IMPOSSIBLE).sum())
            self.bad[side] += int((~logp.isfinite()).sum())
            self.positive[side] += int((logp > ROUNDING).sum())
            self.above_one[side] += int((logp > 1.0 + ROUNDING).sum())
            bits = logp.float().contiguous().view(torch.int32)
            # A power of two is exact in every format, so it is no evidence for one.
            fractional = logp.isfinite() & ((bits & 0x7FFFFF) != 0)
            self.fractional[side] += int(fractional.sum())
            self.in_bfloat16[side] += int((fractional & ((bits & 0xFFFF) == 0)).sum())
            values, counts = logp[far].unique(return_counts=True)
            most = counts.topk(min(MOST_VALUES, counts.numel())).indices
            tally = self.repeated[side]
            tally.update(dict(zip(values[most].tolist(), counts[most].tolist(), strict=True)))
            if len(tally) > 2 * MOST_VALUES:
                self.repeated[side] = Counter(dict(tally.most_common(MOST_VALUES)))
        count = tokens.lengths.shape[0]
        bad = torch.bincount(tokens.owner[~finite], minlength=count)
        self.rows_bad += int((bad > 0).sum())
        whole = (bad == tokens.lengths) & (bad > 0)
        self.all_bad.add(first, (tokens.lengths > 0).nonzero().squeeze(1), whole.nonzero().squeeze(1))

    def _add_moments(self, tokens: ValidTokens) -> None:
        finite = tokens.finite
        train, rollout = (x[finite].double().clamp(-CUT, CUT) for x in (tokens.train, tokens.rollout))
        products = (torch.ones_like(train), train, rollout, train * train, rollout * rollout, train * rollout)
        self.moments += torch.stack([x.sum() for x in products])

    def _add_groups(self, tokens: ValidTokens) -> None:
        finite = tokens.finite
        rollout, d = tokens.rollout[finite], tokens.d[finite]
        starts = tokens.turn_starts
        at = torch.arange(starts.shape[0])
        offset = at - torch.where(starts, at, 0).cummax(0).values if at.numel() else at
        group = torch.where(tokens.turns == 0, FIRST_TURN, offset.clamp(max=OTHER_TURNS))
        # One token in thousands must not decide that all first tokens differ.
        bounded = d.clamp(-MOST_AT_START, MOST_AT_START)
        self.turns.add(group[finite], rollout, bounded)
        self.positions.add((tokens.position[finite] + 1).double().log2().long(), rollout, bounded)
        kind = torch.where(tokens.turns == 0, 0, 1 + offset.clamp(max=KINDS - 2))
        place = geometric_bins(tokens.slots - tokens.chunk.offsets[tokens.owner], PLACES_PER_OCTAVE)
        part = tokens.position * PARTS // tokens.lengths[tokens.owner]
        self.turn_places.add((place * KINDS + kind)[finite], rollout, bounded)
        self.turn_parts.add((part * KINDS + kind)[finite], rollout, bounded)
        ids = tokens.column("token_ids")
        if ids is not None:
            known = finite & (ids >= 0)
            octave = geometric_bins(_earlier(tokens.owner[known], ids[known]), 1)
            self.repeats.add(octave.clamp(max=MOST_OCTAVE), tokens.rollout[known], tokens.d[known].clamp(-1.0, 1.0))
            self._add_counts(tokens, ids, known & (ids < MOST_PLACES))
        for name, excess in self.columns.items():
            values = tokens.column(name)
            if values is None:
                continue
            known = values[finite] >= 0
            group = self.values[name].of_each(values[finite][known])
            told = group >= 0
            excess.add(group[told], rollout[known][told], d[known][told])

    def _add_counts(self, tokens: ValidTokens, ids: Tensor, use: Tensor) -> None:
        more = torch.bincount(ids[use], minlength=self.counts.shape[0]).double()
        more[: self.counts.shape[0]] += self.counts
        self.counts = more
        self.counted += torch.stack([x[use].double().clamp(-CUT, CUT).sum() for x in (tokens.train, tokens.rollout)])

    def is_worse_than_counts(self) -> bool:
        """Return whether one side predicts the tokens worse than their frequencies in the dump do."""
        count = self.counts[self.counts > 0]
        total = float(count.sum())
        if not total:
            return False
        # The frequencies of few tokens fit them too well, by Miller's and Madow's second term.
        entropy = float(-(count / total * (count / total).log()).sum()) + 0.5 * (count.numel() - 1) / total
        return float(-self.counted.min()) / total > entropy

    def _add_distances(self, tokens: ValidTokens) -> None:
        new = tokens.column("new_logp")
        if new is None:
            return
        new = new.to(tokens.train.dtype)
        use = tokens.finite & new.isfinite()
        train, rollout, new = (x[use].double().clamp(-CUT, CUT) for x in (tokens.train, tokens.rollout, new))
        self.distances["tokens"] += train.numel()
        self.distances["new_train"] += float((new - train).abs().sum())
        self.distances["train_rollout"] += float((train - rollout).abs().sum())
        for pair, d in (("train2", train - rollout), ("new2", new - rollout), ("apart2", new - train)):
            self.distances[pair] += float(d.clamp(-1.0, 1.0).square().sum())

    def _add_entropy(self, tokens: ValidTokens) -> None:
        entropy = tokens.column("entropy")
        if entropy is None:
            return
        use = tokens.finite & entropy.isfinite()
        owner, entropy = tokens.owner[use], entropy[use].double()
        n, own, excess = (
            torch.bincount(owner, x) for x in (None, entropy, entropy + tokens.train[use].double().clamp(-CUT, CUT))
        )
        n = n.double()
        some = (n > 0).sum().double()
        self.surprise += torch.stack([some, *(x.sum() for x in (n, n * n, own, excess, excess * excess, excess * n))])

        groups = tokens.column("group_index")
        first = (tokens.position == 0).nonzero().squeeze(1)
        seen = torch.full_like(first, -1) if groups is None else groups[first]
        for group, count in zip(*(x.tolist() for x in seen.unique(return_counts=True)), strict=True):
            self.groups[group if group in self.groups or len(self.groups) < MOST_GROUPS else -1] += count

    @property
    def groups_complete(self) -> bool:
        """Whether all groups have equally many answers, several: selecting among them would leave fewer of some."""
        sizes = set(self.groups.values())
        return len(self.groups) > 1 and len(sizes) == 1 and min(sizes) > 1 and -1 not in self.groups

    def entropy(self) -> tuple[float, float, float] | None:
        """Return the mean of `entropy`, its excess over the mean of -train_logp, and the standard error of the excess.

        None where fewer than 8 sequences have entropies.
        """
        sequences, n, n2, entropy, excess, excess2, cross = self.surprise.tolist()
        if sequences < 8:
            return None
        difference = excess / n
        return entropy / n, difference, sampler_error(excess2, cross, n2, difference, n)

    def at_one_place(self, kinds: list[int], base: list[int]) -> tuple[float, float]:
        """Divide |D| of some kinds of tokens by |D| of others at one place and probability, where both are there.

        Returns one result for places in the row and one for parts of the sequence, infinite where none can be compared.
        """
        return _compared(self.turn_places, kinds, base), _compared(self.turn_parts, kinds, base)

    def mean_distance(self, pair: Literal["new_train", "train_rollout"]) -> float | None:
        """Return the mean distance of two log-probs over tokens that have all three, or None without such tokens."""
        return self.distances[pair] / self.distances["tokens"] if self.distances["tokens"] else None

    def mean_squares(self) -> tuple[float, float, float]:
        """Return mean squares over tokens that have all three: of train - rollout, new - rollout and new - train.

        Each difference is clamped to +-1, so that no token decides.
        """
        tokens = max(1.0, self.distances["tokens"])
        of_train, of_new, apart = (self.distances[name] / tokens for name in ("train2", "new2", "apart2"))
        return of_train, of_new, apart

    @property
    def fit(self) -> dict[str, float]:
        """Mean, spread and correlation of the two log-probs."""
        n, train, rollout, train2, rollout2, joint = self.moments.tolist()
        if n < 2:
            return dict.fromkeys(FITTED, 0.0)
        var_train, var_rollout = train2 / n - (train / n) ** 2, rollout2 / n - (rollout / n) ** 2
        spread = var_train * var_rollout
        return {
            "train_mean": train / n,
            "train_std": math.sqrt(max(var_train, 0.0)),
            "rollout_std": math.sqrt(max(var_rollout, 0.0)),
            "log_prob_correlation": (joint / n - train * rollout / n**2) / math.sqrt(spread) if spread > 1e-12 else 0.0,
        }


def _compared(excess: Excess, kinds: list[int], base: list[int]) -> float:
    """Divide |D| of some kinds of tokens by |D| of others at equal probability: the lowest quarter of the places."""
    tokens = excess.tokens_of_each()
    tokens += [0] * (-len(tokens) % KINDS)
    found = []
    for at in range(0, len(tokens), KINDS):
        here, there = ([at + kind for kind in each] for each in (kinds, base))
        many = sum(tokens[i] for i in here)
        if many >= FEWEST_AT_PLACE <= sum(tokens[i] for i in there):
            found.append((excess.over(here, there), many))
    left = 0.25 * sum(many for _, many in found)
    if 4.0 * left < FEWEST_COMPARED:
        return math.inf
    # What depends on the place makes a difference only where it begins: there alone some are beyond it.
    for times, many in sorted(found):
        left -= many
        if left <= 0.0:
            return times
    return math.inf


def _earlier(owner: Tensor, ids: Tensor) -> Tensor:
    """Return [M] int64, how often the sequence had the token before."""
    _, pair = torch.stack([owner, ids]).unique(dim=1, return_inverse=True)
    order = pair.argsort(stable=True)
    first = torch.bincount(pair).cumsum(0) - torch.bincount(pair)
    return torch.empty_like(pair).scatter_(0, order, torch.arange(pair.shape[0]) - first[pair[order]])
