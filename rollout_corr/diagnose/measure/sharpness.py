"""Tallies for the doctor of how D follows the log-prob: by how much one policy is sharper than the other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..read.chunk import ValidTokens
from .profiles import CUT, add_up

# D is clamped where it is exponentiated to +-MOST, so that no token decides.
MOST = 5.0
# Tokens below this rollout probability show a temperature: D grows with their log-prob, and certain ones agree anyway.
UNLIKELY = math.log(0.1)
# A slope needs so many of them, and so many groups of sequences.
FEWEST, FEWEST_GROUPS = 50, 4
# Sequences are dealt to so many groups, whose spread gives errors. A group that is so many median deviations off is
# left out: one broken sequence must not decide.
GROUPS, OFF = 32, 8.0
# A number is mixed by a product with this one, 2^32 over the golden ratio, whose middle bits are taken.
MIXES = 2_654_435_761
# Noise of an engine in int8 moves the slope over unlikely tokens by this much.
ROOM = 0.01


class Sharpness(NamedTuple):
    """By how much D follows the log-prob x of the rollout policy. A temperature alone makes D = slope * (x + H).

    H is an entropy of the context, and the temperature of the engine is 1 + slope times the trainer's. Two estimates
    bracket the slope. The one over unlikely tokens is drawn to 0 where their contexts differ in entropy. The one that
    uses that ratios average to 1 in every context is driven away from 0 by noise in D.

    Attributes:
        slope, error: The slope over unlikely tokens, and its standard error; inf: unknown.
        outer, outer_error: The other estimate and its standard error; inf: unknown.
    """

    slope: float
    error: float
    outer: float
    outer_error: float

    @property
    def share(self) -> float:
        """The share of the mismatch that a temperature explains, 0 to 1."""
        if math.isinf(self.error + self.outer_error) or self.slope * self.outer <= 0.0:
            return 0.0
        return min(1.0, self.slope / self.outer)

    def interval(self) -> tuple[float, float]:
        """The temperature's interval: from one estimate to the other, and twice their standard errors beyond."""
        low, high = sorted(((self.slope, self.error), (self.outer, self.outer_error)))
        return max(0.0, 1.0 + low[0] - 2.0 * low[1] - ROOM), 1.0 + high[0] + 2.0 * high[1] + ROOM


class SharpnessTally:
    """Sums over chunks, of each level and group of sequences.

    Args:
        levels: The number of levels.
        groups: The number of groups that the sequences of a level are dealt to.
    """

    def __init__(self, levels: int = 1, groups: int = GROUPS) -> None:
        self.groups = groups
        # Sums of e^D D, D, e^D x, x, e^-D D, e^-D x, e^D, e^-D and 1; over unlikely tokens of 1, x, D, x^2 and x D.
        self.all_tokens = torch.zeros(levels * groups, 9, dtype=torch.float64)
        self.unlikely = torch.zeros(levels * groups, 5, dtype=torch.float64)
        self._seen = 0

    def add(self, tokens: ValidTokens, level: Tensor | None = None) -> None:
        """Add the sequences of a chunk; [S] int64 the level of each, None: all have level 0."""
        finite = tokens.finite
        x, d = (values[finite].double().clamp(-CUT, CUT) for values in (tokens.rollout, tokens.d))
        group = (self._seen + tokens.owner[finite]) % self.groups
        if level is not None:
            # Spread without a pattern: those of a level may be every n-th sequence.
            mixed = (self._seen + tokens.owner[finite]) * MIXES >> 16
            group = mixed % self.groups + level[tokens.owner[finite]] * self.groups
        self._seen += tokens.lengths.shape[0]
        ratio = d.clamp(-MOST, MOST).exp()
        columns = (ratio * d, d, ratio * x, x, d / ratio, x / ratio, ratio, 1.0 / ratio, None)
        add_up(self.all_tokens, group, columns)
        few = x < UNLIKELY
        group, x, d = group[few], x[few], d[few]
        add_up(self.unlikely, group, (None, x, d, x * x, x * d))

    def line(self) -> tuple[float, float]:
        """Return intercept and slope of D over the log-prob of unlikely tokens."""
        n, x, d, *_ = self.unlikely.sum(0).tolist()
        slope, _ = self._slope()
        return (d - slope * x) / max(1.0, n), slope

    def of_levels(self, lowest: int) -> SharpnessTally:
        """Return the sums over all levels from one on."""
        found = SharpnessTally(groups=self.groups)
        for name in ("all_tokens", "unlikely"):
            sums = getattr(self, name)[lowest * self.groups :]
            setattr(found, name, sums.view(-1, self.groups, sums.shape[1]).sum(0))
        return found

    def found(self) -> Sharpness:
        """Return both estimates."""
        return Sharpness(*self._slope(), *self._outer())

    def _slope(self) -> tuple[float, float]:
        """Fit D = a + slope * x over unlikely tokens, with an a of each group."""
        n, x, d, xx, xd = self.unlikely.unbind(1)
        if float(n.sum()) < FEWEST:
            return 0.0, math.inf
        some = n.clamp(min=1.0)
        return _ratio(xd - x * d / some, xx - x * x / some, n > 1)

    def _outer(self) -> tuple[float, float]:
        """Solve for the slope at which (e^D / mean - 1) (D - slope * x) averages to 0.

        In a context, e^D averages to 1; to the mass that truncation kept, where it was truncated; and e^-D does where
        the trainer's policy sampled. So H, which the context alone decides, drops out.
        """
        sums = self.all_tokens
        count = float(sums[:, 8].sum())
        if not count:
            return 0.0, math.inf
        mean, inverse = float(sums[:, 6].sum()) / count, float(sums[:, 7].sum()) / count
        if abs(mean - 1.0) > 0.02 and abs(inverse - 1.0) < 0.5 * abs(mean - 1.0):
            top, bottom = sums[:, 1] - sums[:, 4] / inverse, sums[:, 3] - sums[:, 5] / inverse
        else:
            top, bottom = sums[:, 0] / mean - sums[:, 1], sums[:, 2] / mean - sums[:, 3]
        return _ratio(top, bottom, sums[:, 8] > 0)


def _ratio(top: Tensor, bottom: Tensor, used: Tensor) -> tuple[float, float]:
    """Return the ratio of two sums over groups, without groups far off, and its standard error by the others."""
    top, bottom = top[used], bottom[used]
    if top.numel() < FEWEST_GROUPS:
        return 0.0, math.inf
    ratio = (top / bottom).nanmedian()
    for _ in range(2):
        left = top - ratio * bottom
        near = left.abs() <= OFF * left.abs().median()
        ratio = top[near].sum() / bottom[near].sum()
    top, bottom = top[near], bottom[near]
    slope = float(ratio)
    error = float((top - ratio * bottom).square().sum().sqrt() / bottom.sum().abs())
    return (slope, error) if math.isfinite(slope + error) else (0.0, math.inf)
