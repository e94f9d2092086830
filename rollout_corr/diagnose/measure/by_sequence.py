"""Tallies of whole sequences for the doctor: which differ far more than the others, which are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...metrics.limits import BY_KEY
from ..read.chunk import ValidTokens
from .places import MOST, Tested
from .profiles import CUT, PROBABILITY_BINS, add_up, probability_bins
from .sharpness import SharpnessTally
from .worst_tokens import Largest

# A token beyond such a |D| is far off: the engine and the trainer disagree about it by a factor of 150, or of 2.7.
FAR_OFF = (5.0, 1.0)
# Sequences that are kept with their place, the largest sums of k3 first.
WORST = 64
# Bins of the mean min(|D|, 1) of a sequence: BINS of them up to 1, four an octave.
BINS, PER_OCTAVE = 96, 4
LOWEST = -(BINS - 1) / PER_OCTAVE
# Sequences of a bin are dealt to so many groups, whose spread is the error of a slope.
SHARPNESS_GROUPS = 8
# Sequences stand apart if there are enough in all, they are at most this share, each has at least this mean, theirs is
# so many times the others', and they carry this share of k3.
FEWEST_SEQUENCES, MOST_APART, APART, TIMES_REST, CARRIES = (
    8,
    1.0 / 3.0,
    1.5 * BY_KEY["logratio_abs_mean"].watch,
    5.0,
    0.5,
)
# Sequences are in two groups by |D| at equal probability where these explain so much of the variance of its logarithm,
# in bins of so many an octave, and are so many times apart; the smaller one has this share, the worse one at most that.
GROUPED, GROUP_BINS, GROUPS_APART, SMALLEST, LARGEST = 0.87, 192, 4.0, 0.1, 0.7
# A sequence needs so many tokens that are not certain to be in one.
FEWEST_UNSURE, UNSURE = 16, math.log(0.9)
# A sequence needs so many tokens for a factor.
FEWEST_FOR_SCALE = 8
# One side of a sequence is a multiple of the other where this much of its square is left unexplained, and the factor
# is beyond this one.
UNEXPLAINED, FACTOR = 0.02, 1.25
# ... and a constant that is added leaves more than so many times the square of what the factor does,
AS_WELL = 2.0
# ... and D has one sign at tokens with a log-prob beyond TOLD: |signs| add up to so much of their number.
TOLD, ONE_SIGN = 0.02, 0.7
# How far the logarithm of a factor may lie from the logarithm of the length.
LENGTH_FITS = 0.25


@dataclass(frozen=True)
class WorstSequence:
    """A sequence with a large sum of k3."""

    k3: float  # sum of k3 over its tokens, D clamped to +-20
    file: str  # path of the file
    record: int  # its number in the file, from 0
    step: int | None  # its step of the training; None where the dump does not say it
    tokens: int  # number of its valid tokens with a finite D
    logratio_abs_mean: float  # mean |D| of these
    logratio_abs_max: float  # their largest |D|


@dataclass
class FarOff:
    """Tokens beyond a |D|."""

    beyond: float  # that |D|
    # How many, and their sum of k3.
    tokens: int = 0
    k3: float = 0.0
    sequences: int = 0  # those that have any

    def add(self, owner: Tensor, d: Tensor, k3: Tensor) -> None:
        """Add tokens: [M] their sequences, D and k3."""
        far = d.abs() > self.beyond
        self.tokens += int(far.sum())
        self.k3 += float(k3[far].sum())
        self.sequences += owner[far].unique().numel()


@dataclass(frozen=True)
class Part:
    """Sequences that differ far more than the others."""

    sequences: int  # how many
    k3_share: float  # their share of the sum of k3
    # Mean min(|D|, 1) of their tokens, and of all others.
    logratio_abs_mean: float
    rest_logratio_abs_mean: float
    rest_k3: float  # mean k3 of all other tokens
    lowest_bin: int  # the lowest bin of the mean min(|D|, 1) that they are in


class BySequence:
    """Tallies over chunks."""

    def __init__(self) -> None:
        # Non-empty sequences, their tokens with a finite D, and the sum of k3.
        self.sequences = self.tokens = 0
        self.k3 = 0.0
        self.far = tuple(FarOff(beyond) for beyond in FAR_OFF)
        # |D| of first tokens, and what equally likely tokens and the rest of their own sequence let expect.
        self.starts = torch.zeros(2, dtype=torch.float64)
        self.scale = Tested()  # sequences tested for a factor; those whose one side is a multiple of the other
        self.scaled_tokens = self.scaled_k3 = 0.0  # tokens of the scaled, and their sum of k3
        # How D follows the log-prob, by the mean min(|D|, 1) of the sequence.
        self.levels_sharpness = SharpnessTally(BINS, SHARPNESS_GROUPS)
        # Of the scaled: sums of log f, log f + log n and log f - log n, and of their squares; f is train over rollout,
        # n the length.
        self.factors = torch.zeros(2, 3, dtype=torch.float64)
        # Per bin of the mean min(|D|, 1), which no single token decides: sequences, tokens, sums of it and of k3.
        self._levels = torch.zeros(BINS, 4, dtype=torch.float64)
        self._groups = torch.zeros(GROUP_BINS, dtype=torch.float64)
        # [2, K] int64 of each chunk: sequences by the order of reading, and their bins of the mean.
        self._levels_at: list[Tensor] = []
        self._worst = Largest[WorstSequence](WORST)

    def add(self, tokens: ValidTokens, first: int) -> None:
        """Add the sequences of a chunk; `first` is the number of its first sequence in the dump."""
        finite, count = tokens.finite, tokens.lengths.shape[0]
        owner, d = tokens.owner[finite], tokens.d[finite].double().clamp(-CUT, CUT)
        if not d.numel():
            return

        def total(values: Tensor) -> Tensor:
            return torch.bincount(owner, values, minlength=count)

        n = torch.bincount(owner, minlength=count).double()
        k3 = torch.where(d.abs() < 1e-3, 0.5 * d * d, d.expm1() - d)
        sums = total(k3)
        self.sequences += int((n > 0).sum())
        self.tokens += d.numel()
        self.k3 += float(sums.sum())
        for far in self.far:
            far.add(owner, d, k3)
        some = (n > 0).nonzero().squeeze(1)
        bounded = total(d.abs().clamp(max=1.0))
        level = ((bounded / n.clamp(min=1))[some].clamp(min=1e-300).log2() - LOWEST) * PER_OCTAVE
        bins = level.long().clamp(0, BINS - 1)
        if first <= MOST:
            self._levels_at.append(torch.stack([some + first, bins]))
        add_up(self._levels, bins, (None, n[some], bounded[some], sums[some]))
        where = torch.zeros(count, dtype=torch.int64).index_put_((some,), bins)
        self.levels_sharpness.add(tokens, where)
        self._add_groups(tokens.rollout[finite], owner, tokens.position[finite] == 0, d.abs().clamp(max=1.0), bounded)
        self._add_worst(tokens, n, sums, total(d.abs()), owner, d)
        scaled = self._add_scales(tokens, owner, n, count, first)
        self.scaled_tokens += float(n[scaled].sum())
        self.scaled_k3 += float(sums[scaled].sum())

    def _add_groups(self, rollout: Tensor, owner: Tensor, first: Tensor, d: Tensor, bounded: Tensor) -> None:
        """Compare |D| of each sequence, and of its first token, with equally likely tokens of the chunk."""
        bins = probability_bins(rollout)
        usual = torch.bincount(bins, d, PROBABILITY_BINS) / torch.bincount(bins, minlength=PROBABILITY_BINS).clamp(
            min=1
        )
        expected = torch.bincount(owner, usual[bins], bounded.shape[0])
        start, begins = owner[first], usual[bins[first]]
        rest, rest_expected = bounded[start] - d[first], expected[start] - begins
        told = rest_expected > 0
        self.starts += torch.stack([d[first][told].sum(), (begins * rest / rest_expected)[told].sum()])
        unsure = torch.bincount(owner[rollout < UNSURE], minlength=bounded.shape[0])
        use = (unsure >= FEWEST_UNSURE) & (bounded > 0)
        level = (bounded[use] / expected[use]).log2() * 8.0 + GROUP_BINS / 2
        self._groups += torch.bincount(level.long().clamp(0, GROUP_BINS - 1), minlength=GROUP_BINS)

    def starts_over_rest(self) -> float:
        """Divide |D| of first tokens by |D| of the rest of their sequences, at equal probability."""
        here, expected = self.starts.tolist()
        return here / expected if expected > 0 else math.inf

    def groups(self) -> tuple[int, int, float] | None:
        """Return the sequences of the worse of two groups, those of both, and by what factor they differ."""
        count, at = self._groups, torch.arange(GROUP_BINS, dtype=torch.float64) / 8.0
        total, below = float(count.sum()), count.cumsum(0)[:-1]
        if total < FEWEST_SEQUENCES * 2:
            return None
        mean = float((count * at).sum()) / total
        variance = float((count * (at - mean).square()).sum())
        above = total - below
        low, high = ((count * at).cumsum(0)[:-1] / below, (count * at).flip(0).cumsum(0).flip(0)[1:] / above)
        between = (below * above / total * (high - low).square()).nan_to_num(0.0)
        cut = int(between.argmax())
        worse, times = int(above[cut]), 2.0 ** float(high[cut] - low[cut])
        apart = float(between[cut]) >= GROUPED * variance > 0 and times >= GROUPS_APART
        return (worse, int(total), times) if apart and SMALLEST <= worse / total <= LARGEST else None

    def _add_worst(
        self, tokens: ValidTokens, n: Tensor, sums: Tensor, magnitudes: Tensor, owner: Tensor, d: Tensor
    ) -> None:
        largest = torch.zeros_like(sums).scatter_reduce_(0, owner, d.abs(), "amax")
        top = sums.topk(min(WORST, sums.numel()))
        steps, begins = tokens.chunk.columns.get("steps"), tokens.chunk.offsets

        def found(value: float, i: int) -> WorstSequence:
            step = -1 if steps is None else int(steps[begins[i]])
            return WorstSequence(
                k3=value,
                file=tokens.chunk.file_of(i),
                record=int(tokens.chunk.records[i]),
                step=step if step >= 0 else None,
                tokens=int(n[i]),
                logratio_abs_mean=float(magnitudes[i] / n[i]),
                logratio_abs_max=float(largest[i]),
            )

        for value, i in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            if not self._worst.add(value, partial(found, value, i)):
                break

    def _add_scales(self, tokens: ValidTokens, owner: Tensor, n: Tensor, count: int, first: int) -> Tensor:
        """Fit train = f * rollout within each sequence; return [S] bool, where one side is a multiple of the other."""
        train, rollout = (x[tokens.finite].double() for x in (tokens.train, tokens.rollout))
        xy, xx, yy = (
            torch.bincount(owner, x, minlength=count) for x in (train * rollout, rollout * rollout, train * train)
        )
        # Under a temperature D has both signs, one for tokens that are certain enough.
        d, told = train - rollout, torch.maximum(train.abs(), rollout.abs()) > TOLD
        signs, tested = (torch.bincount(owner[told], x, minlength=count) for x in (d[told].sign(), None))
        one_sign = signs.abs() > ONE_SIGN * tested
        usable = (n >= FEWEST_FOR_SCALE) & (xx > 1e-12) & (yy > 1e-12) & (tested >= FEWEST_FOR_SCALE)
        factor, unexplained = xy / xx, 1.0 - xy * xy / (xx * yy)
        # Where log-probs hardly vary, a constant explains D as well as a factor does.
        dd, sums = (torch.bincount(owner, x, minlength=count) for x in (d * d, d))
        varies = (dd - sums * sums / n.clamp(min=1)) > AS_WELL * unexplained * yy
        scaled = (
            usable
            & one_sign
            & varies
            & (factor > 0)
            & (unexplained < UNEXPLAINED)
            & (factor.clamp(min=1e-300).log().abs() > math.log(FACTOR))
        )
        log, length = factor[scaled].log(), n[scaled].log()
        self.scale.add(first, usable.nonzero().squeeze(1), scaled.nonzero().squeeze(1))
        columns = torch.stack([log, log + length, log - length], 1)
        self.factors += torch.stack([columns.sum(0), columns.square().sum(0)])
        return scaled

    @property
    def worst(self) -> list[WorstSequence]:
        """Sequences with the largest sums of k3, the worst first."""
        return self._worst.ranked()

    def part(self) -> Part | None:
        """Return the sequences that stand apart from all others by their mean |D|, or None."""
        if self.sequences < FEWEST_SEQUENCES or not self.k3:
            return None
        from_top = self._levels.flip(0).cumsum(0)
        everything = from_top[-1].tolist()
        best: Part | None = None
        for i, (sequences, tokens, magnitude, k3) in enumerate(from_top.tolist()):
            low = 2.0 ** (LOWEST + (BINS - 1 - i) / PER_OCTAVE)
            if low < APART or sequences > MOST_APART * self.sequences:
                break
            if not sequences or (best is not None and sequences == best.sequences):
                continue
            rest = everything[1] - tokens
            part = Part(
                sequences=int(sequences),
                k3_share=k3 / everything[3],
                logratio_abs_mean=magnitude / tokens,
                rest_logratio_abs_mean=(everything[2] - magnitude) / max(1.0, rest),
                rest_k3=(everything[3] - k3) / max(1.0, rest),
                lowest_bin=BINS - 1 - i,
            )
            if part.k3_share >= CARRIES and part.logratio_abs_mean >= TIMES_REST * part.rest_logratio_abs_mean:
                best = part
        return best

    def apart(self, part: Part) -> Tested:
        """Return all sequences, and those of the part."""
        found = Tested()
        for at, bins in self._levels_at:
            found.add(0, at, at[bins >= part.lowest_bin])
        return found

    def scaled_stand_out(self, times: float) -> bool:
        """Return whether the mean k3 of scaled sequences is at least `times` the mean k3 of all others."""
        rest = (self.k3 - self.scaled_k3) / max(1.0, self.tokens - self.scaled_tokens)
        return self.scaled_k3 >= times * rest * self.scaled_tokens

    def factor(self) -> tuple[float, float]:
        """Return the geometric mean of the factors of scaled sequences, and the deviation of their logarithm."""
        mean, deviation = self._factor(0)
        return math.exp(mean), deviation

    def divided(self) -> str | None:
        """Return the side whose log-probs were divided by the length of their sequence, or None."""
        for side, column in (("train", 1), ("rollout", 2)):
            mean, deviation = self._factor(column)
            if self.scale.having and abs(mean) < LENGTH_FITS and deviation < LENGTH_FITS:
                return side
        return None

    def _factor(self, column: int) -> tuple[float, float]:
        """Return mean and standard deviation of a column of `factors`."""
        mean, square = (self.factors[:, column] / max(1, self.scale.having)).tolist()
        return mean, math.sqrt(max(square - mean * mean, 0.0))
