"""The bounds that a batch decides, found before it is corrected, as one piece on every device and over its ranks.

Nothing of this runs for a Spec whose bounds are numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..definition.bounds_of_batch import SIGN, Sorted
from ..definition.correction import decide
from ..definition.weights import ratios_of
from ..specs.bounds_of_batch import Place
from ..specs.correction import Spec, places_of
from . import whole
from .batch import OpenBatch
from .known_bounds import KnownBounds
from .ranks import Ranks


def find_bounds(batch: OpenBatch, spec: Spec, ranks: Ranks) -> KnownBounds:
    """Find the bounds that a batch decides, over the ranks that share it, by running its criteria once."""
    groups = batch.groups

    def gather(values: Tensor, of: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if of is None:
            return ranks.gathered(values)[0], None
        if groups is not None and groups.whole:
            return values, of
        values, of = ranks.gathered(values, of)
        return values, of

    found = Sorted(0 if groups is None else groups.total, None if ranks.batch is None else gather)
    operands = whole.operands_of(batch, spec, *whole.sequences_of(batch))
    decision, weight = decide(operands._replace(bounds=found)), spec.weight
    if weight is not None and weight.rules:
        ratios = ratios_of(weight, operands.tokens, decision, spec)
        found.of_weight(weight, ratios.log, ratios.among)
    return KnownBounds(found.bounds)


def bounds_by_place(spec: Spec, found: KnownBounds) -> tuple[tuple[Place, ...], Tensor]:
    """The places of a Spec's bounds, and the smallest and largest found, [2, K] float64; infinite on an open side."""
    places = places_of(spec)
    ends = [_ends(found.bounds[place].double(), SIGN[place.side] * math.inf) for place in places]
    return places, torch.stack(ends, 1)


def _ends(bounds: Tensor, is_open: float) -> Tensor:
    """The smallest and the largest bound, of those groups that have one, [2]."""
    if not bounds.dim():
        return bounds.expand(2)
    # The last one is of no group; without it there may be none, which have no ends.
    bounds = torch.cat([bounds[:-1], bounds.new_full((1,), math.nan)])
    nothing = bounds.isnan()
    ends = torch.stack([bounds.where(~nothing, math.inf).amin(), bounds.where(~nothing, -math.inf).amax()])
    return torch.where(nothing.all(), is_open, ends)
