"""A correction from a batch that has been read to its result: backend, exchange between ranks, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends import blocks, normalize, operators, whole
from rollout_corr.backends.batch import Batch, Result
from rollout_corr.backends.choose import chosen_backend
from rollout_corr.backends.groups import Groups
from rollout_corr.definition.weights import SMALLEST_MEAN
from rollout_corr.metrics import extra, native, peers
from rollout_corr.metrics.extra import Extra, entropy_of
from rollout_corr.metrics.statistics import Statistics, sum_of
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.backends import split_kernels
    from rollout_corr.definition.bounds_of_batch import BoundsOfBatch


class CorrectionRequest(NamedTuple):
    """A correction to run.

    Attributes:
        batch: The batch as it was read.
        spec: The Spec.
        backend: A backend by name, or "auto".
        groups: The process groups.
    """

    batch: Batch
    spec: Spec
    backend: str
    groups: Groups


class RunningCorrection:
    """A correction that has begun: done, or with the sums of its sequences on their way to the other ranks."""

    def __init__(self, request: CorrectionRequest) -> None:
        self._request = request
        self._found: Result | None = None
        group = request.groups.sequence
        if group is None:
            self._found = run_correction(request)
            return
        if request.spec.asks_batch:
            raise ValueError(
                "spec: expected bounds that are numbers beside a sequence_group, got some that the batch decides"
            )
        chosen = chosen_backend(request.batch.train, request.backend)
        peers.load(request.spec)
        with torch.no_grad():
            self._exchange = _exchange(request, chosen, group)

    def done(self) -> bool:
        """Tell whether `result` would return without waiting for another rank."""
        return self._found is not None or self._exchange.done()

    def result(self) -> Result:
        """Wait for the other ranks and give the result, in the shape of the batch."""
        if self._found is None:
            with torch.no_grad():
                self._found = _finished(self._exchange.result(), self._request)
                if not self._request.groups.first():
                    self._found.statistics = self._found.statistics.of_tokens()
        return self._found


def run_correction(request: CorrectionRequest) -> Result:
    """Run a correction without a sequence group."""
    batch, spec = request.batch, normalize.before_division(request.spec)
    chosen = chosen_backend(batch.train, request.backend)
    run = _runner(batch, spec, chosen)
    peers.load(spec)
    if spec.asks_batch and batch.bounds is None:
        from rollout_corr.backends.bounds_of_batch import find_bounds

        with torch.no_grad():
            batch.bounds = find_bounds(batch, spec, request.groups.sum)
    if run is operators.run_fused:
        # Nothing of it is known to autograd.
        return _finished(run(batch, spec), request)
    with torch.no_grad():
        return _finished(run(batch, spec), request)


def _runner(batch: Batch, spec: Spec, backend: str) -> Callable[[Batch, Spec], Result]:
    """Choose how a batch runs without a sequence group; a Spec beyond the kernels runs on plain torch."""
    fits = operators.beyond_kernels(spec) is None
    if backend == "triton" and fits:
        return operators.run_fused
    if batch.train.device.type != "cpu":
        return whole.run_whole
    if not torch.compiler.is_compiling():
        return blocks.run_blocks
    return operators.run_fused if fits and not batch.labels else whole.run_whole


def _exchange(
    request: CorrectionRequest, backend: str, group: Any
) -> whole.PendingSplit | split_kernels.PendingKernels:
    """Compute the sums of this rank's tokens and start to add them up over the group."""
    batch, spec = request.batch, normalize.before_division(request.spec)
    # Behind the kernels a rank could take the statistics of labels of whole sequences alone.
    if backend == "triton" and operators.beyond_kernels(spec) is None and not batch.labels:
        from rollout_corr.backends import split_kernels

        return split_kernels.PendingKernels(batch, spec, group)
    return whole.PendingSplit(batch, spec, group, request.groups.order)


def _finished(result: Result, request: CorrectionRequest) -> Result:
    """Do what comes after the backends: normalisation, ages of tokens, and the caller's tensors."""
    _normalize(result, request)
    batch, spec = request.batch, request.spec
    if batch.entropy is not None:
        result.statistics = statistics_of_entropy(batch.entropy, batch, result.statistics)
    if batch.ages is not None:
        if result.weights is not None and spec.weight is not None and spec.weight.decay is not None:
            # A version that is newer than the current one does not raise its weight.
            result.weights = result.weights * spec.weight.decay ** batch.ages.clamp(min=0.0)
        _, valid = whole.sequences_of(batch)
        result.statistics = result.statistics.beside(Extra(ages=True), *extra.ages_of(batch.ages, valid))
    if batch.bounds is not None:
        result.statistics = _with_bounds(result.statistics, batch.bounds, spec)
    _put_into_outputs(result, batch)
    return result


def _with_bounds(statistics: Statistics, bounds: BoundsOfBatch, spec: Spec) -> Statistics:
    """Append the bounds that were found."""
    from rollout_corr.backends.bounds_of_batch import Found, bounds_by_place

    if not isinstance(bounds, Found):
        return statistics
    places, found = bounds_by_place(spec, bounds)
    return statistics.beside(Extra(bounds=places), *extra.bounds_of(found))


def _normalize(result: Result, request: CorrectionRequest) -> None:
    """Divide the weights by their mean where the Spec says so."""
    spec, weights = request.spec, result.weights
    if weights is None or spec.weight is None or spec.weight.normalize is None:
        return
    if spec.weight.self_normalized:
        normalize.divide(result, request.batch, spec, request.groups)
    else:
        mean = _batch_mean(result.statistics, spec, request.groups).to(weights.dtype)
        if spec.nonfinite == "propagate":
            # A NaN mean makes the weights NaN, but not the 0 at invalid tokens.
            result.weights = torch.where(weights == 0, weights, weights / mean)
        else:
            weights.div_(mean)


def _put_into_outputs(result: Result, batch: Batch) -> None:
    """Copy what no backend wrote to the caller's tensors itself."""
    if batch.weights_out is not None and result.weights is not None and result.weights is not batch.weights_out:
        result.weights = batch.weights_out.copy_(result.weights)
    if batch.mask_out is not None and result.mask is not None and result.mask is not batch.mask_out:
        result.mask = batch.mask_out.copy_(result.mask)


def _batch_mean(statistics: Statistics, spec: Spec, groups: Groups) -> Tensor:
    """0-d: the mean weight of the batch, or 1 where it is too small to divide by."""
    weights, units, centre = native.batch_mean(spec)
    pair = groups.sum(torch.stack([sum_of(statistics, name) for name in (weights, units)]))
    mean = centre + pair[0] / pair[1].clamp(min=1.0)
    return torch.where(mean <= SMALLEST_MEAN, 1.0, mean)


def mask_back(batch: Batch, edited: Tensor | None) -> Any:
    """The mask in the caller's layout; the very object that was given where nothing was edited."""
    if edited is not None:
        return batch.restore(edited)
    if batch.given_mask is not None:
        return batch.given_mask
    return batch.restore(whole.inside(batch))


def statistics_of_entropy(entropy: Tensor, batch: Batch, beside: Statistics | None = None) -> Statistics:
    """Append the statistics of entropy to others, or make statistics of them alone.

    Args:
        entropy: Per token, in the shape of the batch, detached.
        batch: Tells which tokens are valid.
        beside: Statistics of a correction; None: there are none.
    """
    _, valid = whole.sequences_of(batch)
    sums, maxima = entropy_of(entropy.to(batch.dtype), valid)
    if beside is None:
        return Statistics(None, sums, maxima, extra=Extra(entropy=True))
    return beside.beside(Extra(entropy=True), sums, maxima)
