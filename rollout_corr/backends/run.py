"""A correction from a batch that has been read to its result: backend, exchange between ranks, normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics import native, peers, schema
from ..metrics.statistics import Statistics, sum_of
from ..specs.caches import cached
from ..specs.correction import Spec
from ..specs.operands import CorrectResult
from ..specs.weight import SMALLEST_MEAN
from . import blocks, operators, whole
from .batch import OpenBatch
from .choose import chosen, chosen_backend
from .ranks import Ranks

if TYPE_CHECKING:
    from .loss_task import LossTask

# A row of this many tokens at one end, all of one log-prob on both sides, is taken for padded.
PADDED = 8
# With fewer it is only taken for padded if that log-prob is 0.
FEWEST_ALIKE = 4
# A result in the shape of the batch, and its statistics.
Corrected = tuple[CorrectResult, Statistics]
# The functions of the runners without `Ranks.sequence`, by the names of `choose.RUNNERS`.
CORRECTIONS: dict[str, Callable[[OpenBatch, Spec], CorrectResult]] = {
    "kernels": operators.run_fused,
    "operator": operators.run_fused,
    "traced": whole.run_whole,
    "blocks": blocks.run_blocks,
    "whole": whole.run_whole,
}


def runner_of(batch: OpenBatch, spec: Spec, backend: str, split: bool = False) -> str:
    """Choose how a correction runs: a row of the table of runners. Sequences that are split lie on several ranks."""
    backend, compiling = chosen_backend(batch.train, backend), torch.compiler.is_compiling()
    beyond = operators.beyond_kernels(spec) if backend == "triton" or compiling else None
    if batch.labels and beyond is None and (split or backend == "torch"):
        # Plain torch takes the statistics of labels after the kernels, from a batch of its own.
        beyond = "labels of sequences that lie on several ranks" if split else "the operator knows no labels"
    beyond = beyond or operators.of_double(backend, batch.dtype)
    at_once = spec.asks_batch and batch.dtype == torch.float64
    return chosen(backend, beyond, batch.train.device.type == "cpu", compiling, split, at_once).name


def _before_division(spec: Spec) -> Spec:
    """The Spec that a backend runs: without self-normalization, and with rejection in the mask alone.

    It is applied, since a dry run reports by what weights would be divided.
    """
    # Asked by every call; the hash of a Spec takes longer than all of this.
    if spec.weight is None or not spec.weight.self_normalized:
        return spec
    return _undivided(spec)


@cached(maxsize=256)
def _undivided(spec: Spec) -> Spec:
    assert spec.weight is not None
    return replace(spec, weight=replace(spec.weight, normalize=None), rejected="mask", apply=True)


def run_correction(batch: OpenBatch, spec: Spec, backend: str, groups: Ranks) -> Corrected:
    """Correct a batch as it was read: choose the runner, run it, and do what comes after."""
    if groups.sequence is not None:
        _, complete = start_correction(batch, spec, backend, groups)
        return complete()
    undivided = _before_division(spec)
    name = runner_of(batch, undivided, backend)
    peers.load(undivided)
    if name in ("kernels", "operator"):
        # Nothing of it is known to autograd.
        return _finished(CORRECTIONS[name](batch, undivided), batch, spec, groups)
    with torch.no_grad():
        if spec.asks_batch:
            from .bounds_of_batch import find_bounds

            batch = replace(batch, bounds=find_bounds(batch, undivided, groups))
        return _finished(CORRECTIONS[name](batch, undivided), batch, spec, groups)


def start_correction(
    batch: OpenBatch, spec: Spec, backend: str, groups: Ranks
) -> tuple[Callable[[], bool], Callable[[], Corrected]]:
    """Start a correction, whose sums of sequences travel to the other ranks of `Ranks.sequence`.

    Returns whether all sums are there, and what waits for them and completes the correction.
    """
    if groups.sequence is None:
        found = run_correction(batch, spec, backend, groups)
        return lambda: True, lambda: found
    if spec.asks_batch:
        raise ValueError("spec: expected bounds that are numbers with ranks.sequence, got some that the batch decides")
    undivided = _before_division(spec)
    on_kernels = runner_of(batch, undivided, backend, split=True) == "split kernels"
    peers.load(spec)
    with torch.no_grad():
        if on_kernels:
            from .split_kernels import start_kernels

            done, decide = start_kernels(batch, undivided, groups.sequence)
        else:
            done, decide = whole.start_split(batch, undivided, groups.sequence)

    def complete() -> Corrected:
        with torch.no_grad():
            result, statistics = _finished(decide(), batch, spec, groups)
        return result, statistics if groups.first() else statistics.of_tokens()

    return done, complete


def _finished(result: CorrectResult, batch: OpenBatch, spec: Spec, groups: Ranks) -> Corrected:
    """Do what comes after the runners: normalization, statistics of further inputs, and the caller's tensors."""
    statistics = Statistics(spec, result.statistics)
    if batch.labels:
        from ..metrics.extra import Extra

        statistics = replace(statistics, extra=Extra(tuple([one.labels for one in batch.labels])))
    statistics = _normalized(result, statistics, batch, spec, groups)
    if batch.mask is None and batch.offsets is None and groups.sequence is None:
        statistics = count_padded(statistics, batch, spec)
    if batch.entropy is not None or batch.versions is not None or batch.bounds is not None:
        from .extras import with_extras

        statistics = with_extras(result, statistics, batch, spec, groups)
    if batch.weights_out is not None or batch.mask_out is not None:
        _put_into_outputs(result, batch)
    return result, statistics


def count_padded(statistics: Statistics, batch: OpenBatch, spec: Spec) -> Statistics:
    """Count rows that begin or end with one value on both sides, as padding does, where no mask tells it apart."""
    width = batch.train.shape[1]
    few = min(PADDED, width // 4)
    if not few:
        return statistics
    # [B, 2, few]: both ends of each row.
    train, rollout = (x.unfold(1, few, width - few) for x in (batch.train, batch.rollout))
    filler = train[:, :, :1] if few >= FEWEST_ALIKE else 0.0
    padded = ((train == rollout) & (train == filler)).all(2).any(1)
    at, vector = schema.layout(spec)[0].index("sequences_padded"), statistics.vector
    # Not in place, which torch.func refuses.
    counted = torch.cat([vector[:at], padded.sum(dtype=vector.dtype)[None], vector[at + 1 :]])
    return replace(statistics, vector=counted)


def _normalized(
    result: CorrectResult, statistics: Statistics, batch: OpenBatch, spec: Spec, groups: Ranks
) -> Statistics:
    """Divide the weights by their mean where the Spec says so; gives the statistics, which may have more then."""
    weights = result.weights
    if weights is None or spec.weight is None or spec.weight.normalize is None:
        return statistics
    if spec.weight.self_normalized:
        from .normalize import divide

        return divide(result, statistics, batch, spec, groups)
    mean = result.mean
    if mean is None or groups.batch is not None:
        mean = _batch_mean(statistics, spec, groups)
    if spec.nonfinite == "propagate":
        # A NaN mean makes the weights NaN, but not the 0 at invalid tokens.
        result.weights = torch.where(weights == 0, weights, weights / mean)
    else:
        weights.div_(mean)
    return statistics


def _put_into_outputs(result: CorrectResult, batch: OpenBatch) -> None:
    """Copy what no backend wrote to the caller's tensors itself."""
    if batch.weights_out is not None and result.weights is not None and result.weights is not batch.weights_out:
        result.weights = batch.weights_out.copy_(result.weights)
    if batch.mask_out is not None and result.mask is not None and result.mask is not batch.mask_out:
        result.mask = batch.mask_out.copy_(result.mask)


def _batch_mean(statistics: Statistics, spec: Spec, groups: Ranks) -> Tensor:
    """0-d: the mean weight of the batch, or 1 where it is too small to divide by."""
    weights, units = (sum_of(statistics, name) for name in native.batch_mean(spec))
    if groups.batch is not None:
        weights, units = groups.sum(torch.stack((weights, units)))
    mean = weights / units.clamp(min=1.0)
    return mean.masked_fill(mean <= SMALLEST_MEAN, 1.0)


def mask_back(batch: OpenBatch | LossTask, edited: Tensor | None) -> Any:
    """The mask in the caller's layout; the very object that was given where nothing was edited."""
    if edited is not None:
        return batch.restore(edited)
    if batch.given_mask is not None:
        return batch.given_mask
    return batch.restore(whole.inside(batch))
