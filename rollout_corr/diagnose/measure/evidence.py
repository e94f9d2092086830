"""Tallies for the doctor alone: which tokens and sequences belong together, which values repeat, which are odd."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from ..read.chunk import ValidTokens
from .by_label import ByLabel
from .by_sequence import BySequence
from .padding import Padding
from .profiles import CUT, Excess, geometric_bins
from .sharpness import SharpnessTally

# The two log-probs that are compared.
Side = Literal["train", "rollout"]
SIDES: tuple[Side, ...] = get_args(Side)

# Shifts of the rollout log-probs that are tried, in tokens.
SHIFTS = (-2, -1, 0, 1, 2)
MOST_SHIFT = max(SHIFTS)
# Pairs of tokens in which a shift is seen. Shorter sequences are tested together with their neighbors.
FEWEST_PAIRS = 24
# Sequences of a chunk, and tokens of each, that are compared with one another to find swapped ones.
SWAP_ROWS, SWAP_TOKENS = 64, 32

# A sequence fits another one by a correlation above the second, and not its own rollout log-probs: below the first.
# Sure sequences with one unsure token each correlate by chance, up to 0.975.
OWN, OTHER = 0.6, 0.98

# Rounding may lift a log-prob above 0, but not above this.
ROUNDING = 1e-3
# Beyond this |D| one policy gives a token less than 1/e of the probability that the other gives it.
FAR = 1.0
# Repeated values are counted among tokens with |D| > FAR; this many different ones are remembered.
MOST_VALUES = 256

# Tokens that a sequence had 15 times or more are one group.
MOST_OCTAVE = 4

# D is clamped to +-MOST_AT_START where tokens are compared by their place.
MOST_AT_START = 2.0

# So many versions and so many steps are told apart, those that a dump has first; the tables of each take up to 75 MB.
MOST_GROUPS = 65_536

# Groups of tokens by their place in a turn: the first 8, all others; and all tokens of the first turn.
TURN_OFFSETS = 8
OTHER_TURNS, FIRST_TURN = TURN_OFFSETS, TURN_OFFSETS + 1


# Numbers of `Evidence.fit`.
FITTED = ("train_mean", "train_std", "rollout_std", "log_prob_correlation")


class Evidence:
    """Tallies over chunks.

    Args:
        by: Names of further columns whose values are labels.

    Attributes:
        tokens, finite, far, equal: Valid tokens; of these, with finite D, with |D| > FAR, with D = 0.
        bad, positive, above_one: Per side, log-probs that are not finite, above 0, above 1.
        fractional, in_bfloat16: Per side, finite log-probs that are no power of two, and those exact in bfloat16.
        repeated: Per side, counts of the most frequent values at tokens with |D| > FAR.
        rows_bad, rows_all_bad: Sequences with a non-finite D, and with no other.
        paired, shifted: Sequences that were tested for a shift; those that fit better after each shift.
        swap_tested, swapped: Sequences tested for a swap; those that fit another one better.
        moments: Sums of 1, both log-probs, their squares and their product.
        sharpness: How D follows the log-prob.
        turns, positions: |D| by place in the turn, and by octave of the position.
        repeats: D of tokens by how often the sequence had them before: never, once, by octaves; needs ids.
        columns, values: |D| by group of a column, and the group of each value; values beyond MOST_GROUPS have none.
        by_sequence: Tallies of whole sequences.
        labels: Tallies by each of the further columns that were asked for.
        distances: Sums of |new - train| and |train - rollout| over tokens that have all three, and their count.
        padding: Tallies of log-probs that are 0 on both sides.
        surprise: Of n tokens of a sequence that have entropies, and e, the sum of entropy + train_logp over them: the
            sums over sequences of 1, n, n^2, the entropy, e, e^2 and n e.
    """

    def __init__(self, by: Iterable[str] = ()) -> None:
        self.tokens = self.finite = self.far = self.equal = 0
        self.bad, self.positive, self.above_one, self.fractional, self.in_bfloat16 = (
            dict.fromkeys(SIDES, 0) for _ in range(5)
        )
        self.repeated: dict[Side, Counter[float]] = {side: Counter() for side in SIDES}
        self.rows_bad = self.rows_all_bad = 0
        self.paired = 0
        self.shifted = dict.fromkeys(SHIFTS, 0)
        self.swap_tested = self.swapped = 0
        self.moments = torch.zeros(6, dtype=torch.float64)
        self.sharpness = SharpnessTally()
        self.turns, self.positions, self.repeats = Excess(), Excess(), Excess()
        self.columns = {"versions": Excess(), "steps": Excess()}
        self.values: dict[str, dict[int, int]] = {"versions": {}, "steps": {}}
        self.by_sequence = BySequence()
        self.labels = {name: ByLabel() for name in by if name not in self.columns}
        self.distances = dict.fromkeys(("tokens", "new_train", "train_rollout"), 0.0)
        self.padding = Padding()
        self.surprise = torch.zeros(7, dtype=torch.float64)

    def add(self, tokens: ValidTokens) -> None:
        """Add the tokens of a chunk."""
        self.tokens += tokens.d.numel()
        self._add_values(tokens)
        self._add_pairs(tokens)
        self._add_swaps(tokens)
        self._add_moments(tokens)
        self._add_groups(tokens)
        self._add_distances(tokens)
        self._add_entropy(tokens)
        self.padding.add(tokens)
        self.sharpness.add(tokens)
        self.by_sequence.add(tokens)
        for name, tally in self.labels.items():
            tally.add(tokens, tokens.column(name))

    def _add_values(self, tokens: ValidTokens) -> None:
        finite, d = tokens.finite, tokens.d
        self.finite += int(finite.sum())
        self.equal += int((finite & (d == 0)).sum())
        far = finite & (d.abs() > FAR)
        self.far += int(far.sum())
        for side in SIDES:
            logp = tokens.train if side == "train" else tokens.rollout
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
        if not bool(finite.all()):
            count = tokens.lengths.shape[0]
            bad = torch.bincount(tokens.owner[~finite], minlength=count)
            self.rows_bad += int((bad > 0).sum())
            self.rows_all_bad += int(((bad == tokens.lengths) & (bad > 0)).sum())

    def _add_pairs(self, tokens: ValidTokens) -> None:
        """Correlate train[t] with rollout[t - shift] within each sequence."""
        train, rollout = (x.double().clamp(-CUT, CUT).where(tokens.finite, 0.0) for x in (tokens.train, tokens.rollout))
        finite, owner, count = tokens.finite, tokens.owner, tokens.lengths.shape[0]
        pool = _pools(tokens.lengths, FEWEST_PAIRS + MOST_SHIFT)
        found, counts = {}, []
        for shift in SHIFTS:
            a = slice(max(shift, 0), train.shape[0] + min(shift, 0))
            b = slice(max(-shift, 0), train.shape[0] - max(shift, 0))
            use = finite[a] & finite[b] & (owner[a] == owner[b])
            x, y, own = train[a][use], rollout[b][use], pool[owner[a][use]]
            found[shift], pairs = _correlations(x, y, own, count)
            counts.append(pairs)
        usable = (torch.stack(counts).amin(0) >= FEWEST_PAIRS) & torch.stack(list(found.values())).isfinite().all(0)
        rows = torch.bincount(pool, (tokens.lengths > 0).double(), minlength=count)
        self.paired += int(rows[usable].sum())
        for shift in SHIFTS:
            if shift:
                others = torch.stack([found[other] for other in SHIFTS if other != shift]).amax(0)
                better = (found[shift] > 0.7) & (1.0 - found[shift] < 0.25 * (1.0 - others))
                self.shifted[shift] += int(rows[usable & better].sum())

    def _add_swaps(self, tokens: ValidTokens) -> None:
        """Correlate the first tokens of every sequence with those of every other one in the chunk."""
        starts = tokens.lengths.cumsum(0) - tokens.lengths
        long = (tokens.lengths >= SWAP_TOKENS).nonzero().squeeze(1)[:SWAP_ROWS]
        if long.numel() < 2:
            return
        index = starts[long][:, None] + torch.arange(SWAP_TOKENS)
        rows = [x.double().clamp(-CUT, CUT)[index] for x in (tokens.train, tokens.rollout)]
        usable = tokens.finite[index].all(1)
        rows = [x - x.mean(1, keepdim=True) for x in rows]
        norms = [x.norm(dim=1) for x in rows]
        usable &= (norms[0] > 1e-3) & (norms[1] > 1e-3)
        if int(usable.sum()) < 2:
            return
        a, b = ((x / norm[:, None])[usable] for x, norm in zip(rows, norms, strict=True))
        fit = a @ b.T
        own = fit.diagonal()
        best = fit.clone().fill_diagonal_(-1.0).amax(1)
        self.swap_tested += own.numel()
        self.swapped += int(((own < OWN) & (best > OTHER)).sum())

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
        ids = tokens.column("token_ids")
        if ids is not None:
            known = finite & (ids >= 0)
            octave = geometric_bins(_earlier(tokens.owner[known], ids[known]), 1)
            self.repeats.add(octave.clamp(max=MOST_OCTAVE), tokens.rollout[known], tokens.d[known].clamp(-1.0, 1.0))
        for name, excess in self.columns.items():
            values = tokens.column(name)
            if values is None:
                continue
            known = values[finite] >= 0
            unique, index = values[finite][known].unique(return_inverse=True)
            seen = self.values[name]
            for value in unique.tolist():
                if len(seen) < MOST_GROUPS:
                    seen.setdefault(value, len(seen))
            groups = torch.tensor([seen.get(value, -1) for value in unique.tolist()], dtype=torch.int64)
            if groups.numel():
                group = groups[index]
                told = group >= 0
                excess.add(group[told], rollout[known][told], d[known][told])

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

    def entropy(self) -> tuple[float, float, float] | None:
        """Return the mean of `entropy`, by how much it is above that of -train_logp, and the standard error of that.

        None where fewer than 8 sequences have entropies.
        """
        sequences, n, n2, entropy, excess, excess2, cross = self.surprise.tolist()
        if sequences < 8:
            return None
        difference = excess / n
        # Of a ratio of sums over sequences.
        squares = excess2 - 2.0 * difference * cross + difference * difference * n2
        return entropy / n, difference, math.sqrt(max(squares, 0.0)) / n

    def mean_distance(self, pair: Literal["new_train", "train_rollout"]) -> float | None:
        """Return the mean distance of two log-probs over tokens that have all three, or None without such tokens."""
        return self.distances[pair] / self.distances["tokens"] if self.distances["tokens"] else None

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


def _earlier(owner: Tensor, ids: Tensor) -> Tensor:
    """Return [M] int64, how often the sequence had the token before."""
    _, pair = torch.stack([owner, ids]).unique(dim=1, return_inverse=True)
    order = pair.argsort(stable=True)
    first = torch.bincount(pair).cumsum(0) - torch.bincount(pair)
    return torch.empty_like(pair).scatter_(0, order, torch.arange(pair.shape[0]) - first[pair[order]])


def _pools(lengths: Tensor, fewest: int) -> Tensor:
    """Return [S] the group of each sequence: itself, or where it has fewer tokens, some of the short ones around it."""
    short = lengths < fewest
    # Twice as many: each of them loses pairs at its ends. What is left over belongs to the last group.
    running = (lengths * short).cumsum(0)
    groups = (running // (2 * fewest)).clamp(max=(running.amax() // (2 * fewest) - 1).clamp(min=0))
    place = torch.arange(lengths.shape[0])
    # A group is numbered by its first sequence.
    first = torch.full_like(place, lengths.shape[0]).scatter_reduce_(0, groups[short], place[short], "amin")
    return torch.where(short, first[groups], place)


def _correlations(x: Tensor, y: Tensor, owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return [count] Pearson correlations within each sequence, NaN where one side is constant; and [count] pairs."""

    def total(values: Tensor) -> Tensor:
        return torch.bincount(owner, values, minlength=count)

    n = torch.bincount(owner, minlength=count)
    some = n.clamp(min=1)
    x = x - (total(x) / some)[owner]
    y = y - (total(y) / some)[owner]
    variances = total(x * x) * total(y * y)
    floor = 1e-6 * some.double().square()
    return torch.where(variances > floor, total(x * y) / variances.clamp(min=1e-300).sqrt(), torch.nan), n
