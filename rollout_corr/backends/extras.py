"""Steps behind a backend that some inputs need: statistics of entropy, ages and bounds, and weights that decay."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metrics.extra import Extra, ages_of, bounds_of, entropy_of
from ..metrics.statistics import Statistics
from ..specs.correction import Spec
from ..specs.operands import CorrectResult
from . import whole
from .batch import Laid, OpenBatch
from .ranks import Ranks


def with_extras(
    result: CorrectResult, statistics: Statistics, batch: OpenBatch, spec: Spec, groups: Ranks
) -> Statistics:
    """Append the statistics of a call's entropy, ages and bounds, and let old tokens' weights decay."""
    if batch.entropy is not None:
        tokens = batch.entropy.to(batch.dtype), batch.train.to(batch.dtype)
        statistics = statistics_of_entropy(*tokens, batch, groups, statistics)
    if batch.versions is not None:
        if result.weights is not None and spec.weight is not None and spec.weight.decay is not None:
            # A version that is newer than the current one does not raise its weight.
            result.weights = result.weights * spec.weight.decay ** batch.ages().clamp(min=0.0)
        if result.ages is None:
            found = ages_of(batch.ages(), whole.sequences_of(batch)[1])
        else:
            found = result.ages[:-2], result.ages[-2:]
        statistics = statistics.followed_by(Extra(ages=True), *found)
    if batch.bounds is not None:
        from .bounds_of_batch import bounds_by_place

        places, ends = bounds_by_place(spec, batch.bounds)
        statistics = statistics.followed_by(Extra(bounds=places), *bounds_of(ends))
    return statistics


def statistics_of_entropy(
    entropy: Tensor, train: Tensor, laid: Laid, groups: Ranks, before: Statistics | None = None
) -> Statistics:
    """Append the statistics of entropy to those of a correction, or make them alone.

    Entropy and log-probs are in the shape of the batch and the dtype that computes. Ranks that share sequences add up
    the sums of each: one more all-reduce.
    """
    if groups.sequence is None:
        sums, maxima = entropy_of(entropy, train, *whole.sequences_of(laid), True)
    else:
        sequences, valid = whole.split_sequences_of(laid, groups.sequence)
        entropy_of(entropy, train, sequences, valid, True)
        sequences.start("entropy: the sums of each sequence")
        sequences.wait()
        sums, maxima = entropy_of(entropy, train, sequences, valid, groups.first())
    if before is None:
        return Statistics(None, torch.cat([sums, maxima]), extra=Extra(entropy=True))
    return before.followed_by(Extra(entropy=True), sums, maxima)
