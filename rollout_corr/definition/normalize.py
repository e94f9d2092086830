"""Self-normalized weights: the means, of a sequence or of a group of sequences, that weights are divided by.

The last step of the definition, after the bounds and before rejection zeroes anything: `totals_of` adds the weights of
each sequence up, `divisors_of` makes means of the totals of sequences or groups. Everything in between is an integer,
so a mean is the same to the bit whatever is packed around a sequence and however sequences and groups lie on ranks.

Each unit counts once: of a weight of tokens every valid token, of turns or sequences every one with a valid token; but
in the mean of one sequence turns count by their tokens. Rejected units count. Units of a sequence that a non-finite D
rejects do not, because their weights are 0 whatever `rejected` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..specs.correction import Spec
from ..specs.weight import SMALLEST_MEAN
from .sequences import Sequences
from .tokens import LARGEST_STATISTIC, truncated
from .turns import Turns

# A weight is its whole part, saturated at 2^37, and two fractions of 31 bits: exact in float32 from 2^-38 on, and room
# for 2^25 tokens of the largest weight, or for 2^31 sequences.
GRID = 2.0**31


def totals_of(
    weights: Tensor, valid: Tensor, nonfinite: Tensor | None, sequences: Sequences, turns: Turns | None, spec: Spec
) -> Tensor:
    """Add up the weights of each sequence: [6, S] int64, which groups and ranks add up further.

    The rows are the three parts of the sum, the number of units, how many of them are NaN, and how many are infinite.

    Weights are those after the bounds, 0 at invalid tokens; `nonfinite` are the tokens whose D rejects their sequence.
    """
    weight = spec.weight
    assert weight is not None
    if weight.normalize == "sequence" or weight.per_token:
        rows = [sequences.sum_integers(row) for row in _rows(weights, valid)]
    else:
        units = turns.units if weight.per_turn and turns is not None else sequences
        # All valid tokens of a unit have its weight, which is not negative.
        each = units.max(torch.where(valid, weights, -torch.inf))
        counts = units.sum_integers(valid) > 0
        rows = _rows(torch.where(counts, each, 0.0), counts)
        if weight.per_turn and turns is not None:
            rows = [turns.of_sequences.sum_integers(row) for row in rows]
    totals = torch.stack([row.long() for row in rows])
    if nonfinite is not None:
        totals = torch.where(sequences.sum_integers(nonfinite) > 0, 0, totals)
    return totals


def _rows(weights: Tensor, counts: Tensor) -> list[Tensor]:
    """The integers of each weight that are added up: floating whole numbers, or bool."""
    finite = torch.where(weights.isfinite(), weights, 0.0).clamp(max=LARGEST_STATISTIC)
    whole = truncated(finite)
    fraction = (finite - whole) * GRID
    high = truncated(fraction)
    low = ((fraction - high) * GRID).round()
    return [whole, high, low, counts, weights.isnan(), weights.isposinf()]


def totals_of_groups(totals: Tensor, index: Tensor, count: int) -> Tensor:
    """Add up the totals of the sequences of each group: [6, S] -> [6, count + 1]; the last column is for no group.

    `index` is the group of each sequence, as `placed` gives it.
    """
    found = totals.new_zeros(totals.shape[0], count + 1)
    return found.scatter_add_(1, index.expand_as(totals), totals)


def placed(index: Tensor, count: int) -> Tensor:
    """[S] int64: the group of each sequence, `count` for an index that names none."""
    return torch.where((index >= 0) & (index < count), index, count)


def means_of(totals: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each column of totals, float64, 0 where nothing counts; and bool, where it is divided by."""
    whole, high, low, units, nan, infinite = totals
    total = whole.double() + (high.double() + low.double() / GRID) / GRID
    total = torch.where(infinite > 0, torch.inf, total)
    mean = torch.where(nan > 0, torch.nan, total) / units.clamp(min=1)
    return mean, ~(mean <= SMALLEST_MEAN)
