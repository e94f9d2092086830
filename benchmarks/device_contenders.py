"""Who computes an operation on a batch of a device: ours, the reference, and what others do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import baseline, cases, device_losses, operations, restated
from benchmarks.batches import Batch
from benchmarks.contenders import BY_HAND, COMPILED, OURS, VERL, verl_function
from benchmarks.device_contender import (
    EAGER,
    ORDER,
    SKYRL,
    TRACED,
    TRL_RESTATED,
    XTUNER,
    XTUNER_ONCE,
    Contender,
    Outcome,
    absent,
)
from benchmarks.operations import Operation
from rollout_corr.metrics.statistics import Statistics


def contenders(batch: Batch, operation: Operation) -> list[Contender]:
    """Everybody who knows the operation and does not need torch.compile, present or absent, bound to a batch."""
    found = device_losses.losses(batch, operation) if operation.part else _corrections(batch, operation)
    return sorted(found, key=lambda who: ORDER.index(who.name))


def with_compiler(batch: Batch, operation: Operation) -> list[Contender]:
    """Ours and our reference, as it is and by torch.compile."""
    if operation.part:
        return device_losses.with_compiler(batch, operation)
    return [
        _correct(OURS, batch, operation, "auto"),
        _correct(EAGER, batch, operation, "torch"),
        _traced_correct(batch, operation),
    ]


def _corrections(batch: Batch, operation: Operation) -> list[Contender]:
    found = [_correct(OURS, batch, operation, "auto"), _correct(EAGER, batch, operation, "torch")]
    if not batch.old.is_cuda:
        found += [replace(_correct(COMPILED, batch, operation, "compiled"), slow=True)]
    if operation in (operations.METRICS, operations.TOKEN):
        found += [_by_hand(batch, operation), _verl(batch, operation)]
    if operation is operations.XTUNER:
        found += _xtuner(batch)
    if operation is operations.SKYRL:
        found += [_skyrl(batch)]
    if operation is operations.TRL:
        found += [_trl(batch)]
    return found


def _correct(name: str, batch: Batch, operation: Operation, backend: str) -> Contender:
    def on_device() -> rc.Correction:
        return rc.correct(
            batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend=backend
        )

    def whole() -> Outcome:
        out = on_device()
        return Outcome(out.weights, out.mask, metrics=out.metrics(operation.scheme))

    return Contender(name, on_device, whole, capturable=name != EAGER)


def _traced_correct(batch: Batch, operation: Operation, **how: Any) -> Contender:
    spec = operation.spec

    def step(old: Tensor, rollout: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Any, ...]:
        out = rc.correct(old, rollout, mask, cu_seqlens=cu_seqlens, spec=spec, backend="torch")
        return out.weights, out.mask, out.statistics.sums, out.statistics.maxima

    # For its shapes alone, whatever was compiled before: the fastest that it can be.
    compiled = torch.compile(step, dynamic=False, **how)

    def on_device() -> tuple[Any, ...]:
        return compiled(batch.old, batch.rollout, batch.mask, batch.cu_seqlens)

    def whole() -> Outcome:
        weights, mask, sums, maxima = on_device()
        return Outcome(weights, mask, metrics=Statistics(spec, sums, maxima).metrics(operation.scheme))

    return Contender(TRACED, on_device, whole, slow=True)


def _by_hand(batch: Batch, operation: Operation) -> Contender:
    def on_device() -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
        return baseline.correct_on_device(batch.old, batch.rollout, batch.mask, batch.cu_seqlens, operation.spec)

    def whole() -> Outcome:
        weights, mask, metrics = on_device()
        return Outcome(weights, mask, metrics=baseline.on_host(metrics))

    return Contender(BY_HAND, on_device, whole)


def _verl(batch: Batch, operation: Operation) -> Contender:
    function, reason = verl_function()
    if function is None:
        return absent(VERL, reason.removeprefix("absent: "))
    if batch.cu_seqlens is not None:
        return absent(VERL, "it has no packed form")
    workload = cases.METRICS_ONLY if operation is operations.METRICS else cases.WEIGHTS_AND_REJECTION

    def whole() -> Outcome:
        weights, mask, metrics = function(batch.old, batch.rollout, batch.mask, **workload.verl)
        return Outcome(None if weights is None else weights.batch["rollout_is_weights"], mask, metrics=metrics)

    return Contender(VERL, whole, whole, capturable=False)


def _xtuner(batch: Batch) -> list[Contender]:
    assert batch.cu_seqlens is not None and batch.mask is not None
    mask, num_tokens = batch.mask[None], batch.cu_seqlens.diff()
    old, rollout = batch.old[None], batch.rollout[None]
    bounds = {"threshold": (5.0, 0.5), "mask_threshold": (5.0, 0.5), "veto_threshold": (20.0, 0.0)}

    def as_published() -> Outcome:
        weights, kept, metrics = restated.xtuner(old, rollout, num_tokens, mask, **bounds)
        return Outcome(weights[0], kept[0], metrics=metrics)

    def read_once() -> Outcome:
        weights, kept, metrics = restated.xtuner(old, rollout, num_tokens.tolist(), mask, **bounds)
        return Outcome(weights[0], kept[0], metrics=metrics)

    return [
        Contender(XTUNER, as_published, as_published, capturable=False),
        Contender(XTUNER_ONCE, read_once, read_once, "with one line changed", capturable=False),
    ]


def _skyrl(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def whole() -> Outcome:
        weights, kept, metrics = restated.skyrl(batch.old, batch.rollout, mask, **restated.SKYRL_TLDR)
        return Outcome(torch.where(mask != 0, weights, 0.0), kept, metrics=metrics)

    def on_device() -> object:
        return restated.skyrl(batch.old, batch.rollout, mask, **restated.SKYRL_TLDR)

    return Contender(SKYRL, on_device, whole, capturable=False)


def _trl(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def on_device() -> tuple[Tensor, dict[str, float]]:
        return restated.trl(batch.old, batch.rollout, mask, clip_max=3.0)

    def whole() -> Outcome:
        ratio, metrics = on_device()
        return Outcome(torch.where(mask != 0, ratio, 0.0), mask, metrics=metrics)

    return Contender(TRL_RESTATED, on_device, whole, capturable=False)
