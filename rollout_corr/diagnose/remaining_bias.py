"""The bias that remains in a weighted mean under a setting, with an interval from a bootstrap over sequences.

The estimate of a mean of f is sum(w f) / sum(w), and the corrected one is sum(r f) / sum(r), r the exact ratio. Their
difference is the bias of f: D that is noise averages out of it, and D that goes with f does not. The result is the
largest bias over all f that are linear in `FUNCTIONS` and have a standard deviation of 1 over the tokens. A common
factor of all weights is no bias; "mean weight" shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .read.chunk import ValidTokens

# Of a token: its log-prob, and of its sequence the mean log-prob, the logarithm of the length, and the advantage.
FUNCTIONS = ("log-prob", "mean log-prob of the sequence", "log of the length", "advantage")
LOWEST_LOGP = -20.0

REPLICATES = 200
# Standard errors to either end of an interval of 95 %.
NORMAL_95 = 1.959964
# A function that the others explain except for this share of its variance adds nothing.
INDEPENDENT = 1e-6
# Rounding, as a share of a mean square: of sums in float64, and of values in float32, whose variance below it is none.
ROUNDING, CONSTANT = 1e-10, 1e-14


class Bias(NamedTuple):
    """A bias and its interval of 95 %, in standard deviations of what is averaged."""

    value: float  # the estimate; the part of its square that chance alone would give is taken off
    # The interval.
    low: float
    high: float


class TestFunctions(NamedTuple):
    """The test functions at the tokens of a chunk."""

    # [M, 1 + len(FUNCTIONS)] float64, a column of ones first, the others less a constant near their mean.
    values: Tensor
    owner: Tensor  # [M] int64, the sequence of each token
    draws: Tensor  # [S, 1 + REPLICATES] float64, how often each sequence is drawn: once, then by replicate

    def sums(self, weights: Tensor) -> Tensor:
        """Add weighted values up, for the data and every replicate: [M] -> [1 + REPLICATES, 1 + len(FUNCTIONS)]."""
        by_sequence = self.values.new_zeros(self.draws.shape[0], self.values.shape[1])
        by_sequence.index_add_(0, self.owner, weights.double()[:, None] * self.values)
        return self.draws.T @ by_sequence


class RemainingBias:
    """Sums of weighted test functions of each setting, added chunk by chunk.

    A replicate draws every sequence as often as a Poisson variable of mean 1 says, so that no sequence is kept.

    Args:
        settings: How many settings there are.
        targets: Names of the exact ratios.
    """

    def __init__(self, settings: int, targets: tuple[str, ...]) -> None:
        shape = 1 + REPLICATES, 1 + len(FUNCTIONS)
        self._weighted = torch.zeros(settings, *shape, dtype=torch.float64)
        self._exact = {name: torch.zeros(shape, dtype=torch.float64) for name in targets}
        self._products = torch.zeros(*shape, shape[1], dtype=torch.float64)
        # The means over the first tokens. Taking them off changes no bias and no variance, only the rounding.
        self._center: Tensor | None = None
        self._generator = torch.Generator().manual_seed(0)

    def begin(self, tokens: ValidTokens, ratios: Mapping[str, Tensor]) -> TestFunctions:
        """Evaluate the test functions at the tokens of a chunk, and add the exact ratios of these up."""
        count = tokens.lengths.shape[0]
        logp = tokens.rollout.double().nan_to_num(nan=0.0).clamp(LOWEST_LOGP, 0.0)
        per_sequence = torch.bincount(tokens.owner, logp, minlength=count) / tokens.lengths.clamp(min=1)
        advantages = tokens.column("advantages")
        columns = [
            torch.ones_like(logp),
            logp,
            per_sequence[tokens.owner],
            tokens.lengths.double().clamp(min=1).log()[tokens.owner],
            torch.zeros_like(logp) if advantages is None else advantages.double().nan_to_num(nan=0.0),
        ]
        values = torch.stack(columns, 1)
        if self._center is None and bool(tokens.finite.any()):
            self._center = values[tokens.finite].mean(0)
            self._center[0] = 0.0
        if self._center is not None:
            values = values - self._center
        values = values.where(tokens.finite[:, None], 0.0)
        draws = torch.poisson(torch.ones(count, REPLICATES, dtype=torch.float64), generator=self._generator)
        found = TestFunctions(values, tokens.owner, torch.cat([draws.new_ones(count, 1), draws], 1))
        for i in range(values.shape[1]):
            self._products[:, i] += found.sums(values[:, i])
        for name, sums in self._exact.items():
            sums += found.sums(ratios[name])
        return found

    def add(self, setting: int, functions: TestFunctions, weights: Tensor) -> None:
        """Add the weights of a setting at the tokens of the chunk that was begun, [M]."""
        self._weighted[setting] += functions.sums(weights)

    def bias(self, setting: int, target: str) -> Bias:
        """Return the bias that is left relative to an exact ratio; infinite where every weight is 0."""
        weighted, exact = self._weighted[setting], self._exact[target]
        if not (weighted[0, 0] > 0.0 and exact[0, 0] > 0.0):
            return Bias(math.inf, math.inf, math.inf)
        usable = (weighted[:, 0] > 0.0) & (exact[:, 0] > 0.0) & (self._products[:, 0, 0] > 0.0)
        weighted, exact, products = weighted[usable], exact[usable], self._products[usable]
        means = products[:, 0, 1:] / products[:, 0, :1]
        squares = products[:, 1:, 1:] / products[:, :1, :1]
        spread = squares - means[:, :, None] * means[:, None, :]
        moments = squares.diagonal(dim1=1, dim2=2)
        assert self._center is not None
        chosen = _independent(spread[0], CONSTANT * (moments[0] + self._center[1:] ** 2))
        if not chosen:
            return Bias(0.0, 0.0, 0.0)
        apart = (weighted[:, 1:] / weighted[:, :1] - exact[:, 1:] / exact[:, :1])[:, chosen]
        spread = spread[:, chosen][:, :, chosen]
        # A replicate may hold too few sequences for their values to be independent, or to differ but by rounding.
        spread = spread + torch.diag_embed(INDEPENDENT * spread[0].diagonal() + ROUNDING * moments[:, chosen])
        scaled = torch.linalg.solve_triangular(torch.linalg.cholesky(spread), apart[:, :, None], upper=False)[..., 0]
        return norm_of(scaled[0], scaled[1:])


def _independent(spread: Tensor, least: Tensor) -> list[int]:
    """Choose the columns of a covariance, [k, k], whose variance exceeds `least` and that others do not explain."""
    chosen: list[int] = []
    for i in range(spread.shape[0]):
        own = float(spread[i, i])
        if own <= float(least[i]):
            continue
        explained = 0.0
        if chosen:
            across = spread[chosen, i]
            explained = float(across @ torch.linalg.solve(spread[chosen][:, chosen], across))
        if own - explained > 10.0 * INDEPENDENT * own:
            chosen.append(i)
    return chosen


def norm_of(estimate: Tensor, replicates: Tensor) -> Bias:
    """Return the length of a vector that is known from an estimate, [k], and its replicates, [R, k].

    The squared length of the estimate is the vector's, plus the trace of the covariance V, plus noise of the
    variance 4 u'Vu x + 2 tr(V^2), where x is the squared length and u the direction. The interval holds every x that
    this does not exclude, as Wilson's of a share does.
    """
    covariance = (replicates - replicates.mean(0)).T @ (replicates - replicates.mean(0)) / max(1, len(replicates) - 1)
    square = float(estimate @ estimate)
    trace, trace2 = float(covariance.trace()), float((covariance * covariance).sum())
    along = float(estimate @ covariance @ estimate) / square if square > 0.0 else 0.0
    left = square - trace
    middle = left + 2.0 * NORMAL_95**2 * along
    reach = math.sqrt(max(0.0, middle**2 - left**2 + 2.0 * NORMAL_95**2 * trace2))
    low, value, high = (math.sqrt(max(0.0, x)) for x in (middle - reach, left, middle + reach))
    return Bias(value, low, max(value, high))
