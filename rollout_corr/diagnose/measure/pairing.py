"""Tallies of log-probs that do not belong together: shifted, of another sequence, or in another order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..read.chunk import ValidTokens
from .places import Tested
from .profiles import CUT

# Shifts of the rollout log-probs that are tried, in tokens.
SHIFTS = (-2, -1, 0, 1, 2)
MOST_SHIFT = max(SHIFTS)
# Pairs of tokens in which a shift is seen. Shorter turns are tested together with their neighbors.
FEWEST_PAIRS = 24

# Sequences of a chunk, and tokens of each, that are compared with one another to find swapped ones. Where sequences are
# shorter, fewer tokens have to do; then they are swapped if most of them are, each with one other.
SWAP_ROWS, SWAP_TOKENS, FEWEST_SWAP_TOKENS = 64, 32, 12
# A sequence fits another one by a correlation above the second, and not its own rollout log-probs: below the first.
# Sure sequences with one unsure token each correlate by chance, up to 0.975.
OWN, OTHER = 0.6, 0.98

# Short ones that are compared, and the part of the distance to its own log-probs that another sequence has to be at.
SHORT_SWAP_ROWS, NEARER = 256, 0.1

# The values of a sequence are in another order where its mean |D| is at least so many nats, its log-probs correlate by
# less than OWN, and sorted they are apart by at most this part of it, and of what two different sequences are.
REORDERED, SORTED = 0.2, 0.3
# A sequence needs so many tokens for it.
FEWEST_SORTED = 16


class Pairing:
    """Tallies over chunks."""

    def __init__(self) -> None:
        # Turns that were tested for a shift, those of later turns, and those of these that have one.
        self.paired = self.later_paired = self.later_shifted = 0
        self.shifted = dict.fromkeys(SHIFTS, 0)  # turns that fit better after each shift
        # Sequences tested for each, and those that have it.
        self.shift, self.swap, self.order = Tested(), Tested(), Tested()
        self._short = Tested()

    def add(self, tokens: ValidTokens, first: int) -> None:
        """Add the tokens of a chunk, whose first sequence is this one of the dump."""
        train, rollout = (x.double().clamp(-CUT, CUT).where(tokens.finite, 0.0) for x in (tokens.train, tokens.rollout))
        self._add_shifts(tokens, train, rollout, first)
        self._add_swaps(tokens, train, rollout, first)
        self._add_orders(tokens, train, rollout, first)

    @property
    def swapped(self) -> Tested:
        """Sequences tested for a swap: the long ones, or where there are none the short ones."""
        return self.swap if self.swap.tested or not self._short.tested else self._short

    def _add_shifts(self, tokens: ValidTokens, train: Tensor, rollout: Tensor, first: int) -> None:
        """Correlate train[t] with rollout[t - shift] within each turn."""
        finite, turn = tokens.finite, tokens.turn_starts.cumsum(0) - 1
        starts = tokens.turn_starts.nonzero().squeeze(1)
        count, later = starts.shape[0], tokens.turns[starts] > 0
        lengths = torch.bincount(turn, minlength=count)
        pool = torch.arange(count)
        for kind in (later, ~later):
            some = kind.nonzero().squeeze(1)
            pool[some] = some[_pools(lengths[some], FEWEST_PAIRS + MOST_SHIFT)]
        found, counts = {}, []
        for shift in SHIFTS:
            a = slice(max(shift, 0), train.shape[0] + min(shift, 0))
            b = slice(max(-shift, 0), train.shape[0] - max(shift, 0))
            use = finite[a] & finite[b] & (turn[a] == turn[b])
            x, y, own = train[a][use], rollout[b][use], pool[turn[a][use]]
            found[shift], pairs = _correlations(x, y, own, count)
            counts.append(pairs)
        usable = (torch.stack(counts).amin(0) >= FEWEST_PAIRS) & torch.stack(list(found.values())).isfinite().all(0)
        moved = torch.zeros(count, dtype=torch.bool)
        for shift in SHIFTS:
            if shift:
                others = torch.stack([found[other] for other in SHIFTS if other != shift]).amax(0)
                better = (usable & (found[shift] > 0.7) & (1.0 - found[shift] < 0.25 * (1.0 - others)))[pool]
                self.shifted[shift] += int(better.sum())
                moved |= better
        tested = usable[pool]
        self.paired += int(tested.sum())
        self.later_paired += int((tested & later).sum())
        self.later_shifted += int((moved & later).sum())
        owner = tokens.owner[starts]
        self.shift.add(first, owner[tested].unique(), owner[moved].unique())

    def _add_swaps(self, tokens: ValidTokens, train: Tensor, rollout: Tensor, first: int) -> None:
        """Compare the first tokens of every sequence with those of every other one in the chunk."""
        long = (tokens.lengths >= SWAP_TOKENS).nonzero().squeeze(1)[:SWAP_ROWS]
        if long.numel() > 1:
            rows, (a, b) = _first_tokens(tokens, train, rollout, long, SWAP_TOKENS)
            a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
            norms = [x.norm(dim=1) for x in (a, b)]
            told = (norms[0] > 1e-3) & (norms[1] > 1e-3)
            if int(told.sum()) > 1:
                a, b = ((x / norm[:, None])[told] for x, norm in zip((a, b), norms, strict=True))
                fit = a @ b.T
                best = fit.clone().fill_diagonal_(-1.0).amax(1)
                self.swap.add(first, rows[told], rows[told][(fit.diagonal() < OWN) & (best > OTHER)])
        short = (tokens.lengths >= FEWEST_SWAP_TOKENS).nonzero().squeeze(1)[:SHORT_SWAP_ROWS]
        if self.swap.tested or short.numel() < 2:
            return
        rows, (a, b) = _first_tokens(tokens, train, rollout, short, FEWEST_SWAP_TOKENS)
        if rows.numel() < 2:
            return
        apart = torch.cdist(a, b, p=1.0) / FEWEST_SWAP_TOKENS
        nearest = apart.clone().fill_diagonal_(math.inf).amin(1)
        self._short.add(first, rows, rows[nearest < NEARER * apart.diagonal()])

    def _add_orders(self, tokens: ValidTokens, train: Tensor, rollout: Tensor, first: int) -> None:
        """Compare the sorted log-probs of each sequence, and those of two sequences."""
        count = tokens.lengths.shape[0]
        correlation, _ = _correlations(train, rollout, tokens.owner, count)
        apart = torch.bincount(tokens.owner, (train - rollout).abs(), minlength=count) / tokens.lengths.clamp(min=1)
        usable = (tokens.lengths >= FEWEST_SORTED) & correlation.isfinite()
        usable &= torch.bincount(tokens.owner[~tokens.finite], minlength=count) == 0
        unlike = (usable & (correlation < OWN) & (apart >= REORDERED)).nonzero().squeeze(1)[:SWAP_ROWS].tolist()
        starts = tokens.lengths.cumsum(0) - tokens.lengths
        ranked = {
            i: [x[starts[i] : starts[i] + tokens.lengths[i]].sort().values for x in (train, rollout)] for i in unlike
        }
        having = []
        for i, other in zip(unlike, [*unlike[1:], *unlike[:1]], strict=True):
            (own, mine), (_, theirs) = ranked[i], ranked[other]
            place = ((torch.arange(len(own)) + 0.5) * len(theirs) / len(own)).long()
            most = min(float(apart[i]), math.inf if i == other else float((own - theirs[place]).abs().mean()))
            if float((own - mine).abs().mean()) <= SORTED * most:
                having.append(i)
        self.order.add(first, usable.nonzero().squeeze(1), torch.tensor(having, dtype=torch.int64))


def _first_tokens(
    tokens: ValidTokens, train: Tensor, rollout: Tensor, some: Tensor, many: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the sequences, of some, whose first tokens are all finite, and both log-probs of these, [K, many]."""
    starts = tokens.lengths.cumsum(0) - tokens.lengths
    index = starts[some][:, None] + torch.arange(many)
    usable = tokens.finite[index].all(1)
    return some[usable], (train[index][usable], rollout[index][usable])


def _pools(lengths: Tensor, fewest: int) -> Tensor:
    """Return [S] the group of each sequence: itself, or where it has fewer tokens, some of the short ones around it."""
    if not lengths.numel():
        return lengths
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
