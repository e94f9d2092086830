"""Mean |D| of groups of tokens, compared at equal probability."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rollout_corr.diagnose.measure.profiles import PROBABILITY_BINS, Profile, probability_bins

# Values are clamped to +-CUT where one token must not decide an average.
CUT = 20.0


class Excess:
    """Mean |D| of groups of tokens, compared at equal probability.

    Unlikely tokens differ more than likely ones in every group, so groups are only comparable at equal probability.
    """

    def __init__(self) -> None:
        self.profile = Profile()

    def add(self, groups: Tensor, rollout: Tensor, d: Tensor) -> None:
        """Add tokens: [M] int64 groups >= 0, [M] log-probs, [M] D."""
        self.profile.add(groups * PROBABILITY_BINS + probability_bins(rollout), d.clamp(-CUT, CUT))

    def table(self) -> tuple[Tensor, Tensor]:
        """Return counts of tokens and sums of |D|, both [groups, probability bins]."""
        sums = self.profile.sums
        groups = -(-sums.shape[0] // PROBABILITY_BINS)
        whole = torch.cat([sums, sums.new_zeros(groups * PROBABILITY_BINS - sums.shape[0], sums.shape[1])])
        whole = whole.view(groups, PROBABILITY_BINS, sums.shape[1])
        return whole[:, :, 0], whole[:, :, 2]

    def over(self, groups: list[int], base: list[int]) -> float:
        """Divide the mean |D| of some groups by that of others at equal probability; 1 if they cannot be compared."""
        return self.each_over([groups], base)[0]

    def each_over(self, many: Iterable[list[int]], base: list[int]) -> list[float]:
        """Compare each of many lists of groups with the same base, as `over` does; the base is summed up once."""
        count, magnitude = self.table()
        base = [i for i in base if i < count.shape[0]]
        usual = magnitude[base].sum(0) / count[base].sum(0)
        found = []
        for groups in many:
            some = [i for i in groups if i < count.shape[0]]
            here, tokens = magnitude[some].sum(0), count[some].sum(0)
            known = usual.isfinite() & (tokens > 0)
            expected = float((usual * tokens)[known].sum())
            found.append(float(here[known].sum()) / expected if expected > 0 else 1.0)
        return found

    def tokens(self, groups: list[int]) -> int:
        """Count the tokens of some groups."""
        count, _ = self.table()
        return int(count[[i for i in groups if i < count.shape[0]]].sum())

    def tokens_of_each(self) -> list[int]:
        """Count the tokens of every group."""
        return [int(tokens) for tokens in self.table()[0].sum(1).tolist()]
