"""Contenders for a correction: ours, our reference, torch by hand, verl, and restated frameworks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases import losses, operations
from benchmarks.cases.batches import Batch
from benchmarks.cases.contender import (
    BY_HAND,
    COMPILED,
    EAGER,
    ORDER,
    OURS,
    SKYRL,
    TRACED,
    TRL,
    VERL,
    VERL_METRICS,
    XTUNER,
    XTUNER_ONCE,
    Contender,
    Outcome,
    absent,
)
from benchmarks.cases.operations import IN_VERL, Operation
from benchmarks.peers import by_hand, restated
from benchmarks.peers.installed import verl_function
from rollout_corr.metrics.statistics import Statistics


def contenders(batch: Batch, operation: Operation) -> list[Contender]:
    """Return all contenders for an operation of the GPU benchmark, absent ones too, but those by torch.compile."""
    if operation.part:
        found = losses.losses(batch, operation)
    else:
        found = [_correct(OURS, batch, operation), _reference(batch, operation)]
        if not batch.old.is_cuda:
            found += [_correct(COMPILED, batch, operation, "compiled", slow=True)]
        if operation.spec in IN_VERL:
            found += [_by_hand(batch, operation), _verl(batch, operation)]
        if operation is operations.XTUNER:
            found += [_xtuner(batch, once) for once in (False, True)]
        if operation is operations.SKYRL:
            found += [_skyrl(batch)]
        if operation is operations.TRL:
            found += [_trl(batch)]
    return sorted(found, key=lambda who: ORDER.index(who.name))


def with_compiler(batch: Batch, operation: Operation) -> list[Contender]:
    """Return ours, and our reference as it is and under torch.compile."""
    if operation.part:
        return losses.with_compiler(batch, operation)
    return [_correct(OURS, batch, operation), _reference(batch, operation), traced_correct(batch, operation)]


def on_cpu(batch: Batch, operation: Operation) -> list[Contender]:
    """Return the contenders of the CPU benchmark, absent ones too."""
    verls = rc.preset(IN_VERL[operation.spec][1])
    return [
        _correct(OURS, batch, operation),
        _correct(COMPILED, batch, operation, "compiled", slow=True),
        _correct(VERL_METRICS, batch, operation, spec=verls, scheme="verl"),
        _by_hand(batch, operation),
        _verl(batch, operation),
    ]


def _correct(
    name: str,
    batch: Batch,
    operation: Operation,
    backend: str = "auto",
    *,
    spec: rc.Spec | None = None,
    scheme: str | None = None,
    **about: Any,
) -> Contender:
    spec, scheme = spec or operation.spec, scheme or operation.scheme

    def on_device() -> rc.Correction:
        return rc.correct(batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=spec, backend=backend)

    def whole() -> Outcome:
        out = on_device()
        return Outcome(out.weights, out.mask, metrics=out.metrics(scheme))

    return Contender(name, on_device, whole, **about)


def _reference(batch: Batch, operation: Operation) -> Contender:
    return _correct(EAGER, batch, operation, "torch", capturable=False)


def traced_correct(batch: Batch, operation: Operation, **how: Any) -> Contender:
    """Return our reference under torch.compile, which is given `how`."""
    spec = operation.spec

    def step(old: Tensor, rollout: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Any, ...]:
        out = rc.correct(old, rollout, mask, cu_seqlens=cu_seqlens, spec=spec, backend="torch")
        return out.weights, out.mask, out.statistics.sums, out.statistics.maxima

    # Compiled for its own shapes, whatever was compiled before: as fast as it can be.
    compiled = torch.compile(step, dynamic=False, **how)

    def on_device() -> tuple[Any, ...]:
        return compiled(batch.old, batch.rollout, batch.mask, batch.cu_seqlens)

    def whole() -> Outcome:
        weights, mask, sums, maxima = on_device()
        return Outcome(weights, mask, metrics=Statistics(spec, sums, maxima).metrics(operation.scheme))

    return Contender(TRACED, on_device, whole, slow=True)


def _by_hand(batch: Batch, operation: Operation) -> Contender:
    def on_device() -> tuple[Tensor | None, Tensor | None, by_hand.Metrics]:
        return by_hand.correct(batch.old, batch.rollout, batch.mask, batch.cu_seqlens, operation.spec)

    def whole() -> Outcome:
        weights, mask, metrics = on_device()
        return Outcome(weights, mask, metrics=by_hand.on_host(metrics))

    return Contender(BY_HAND, on_device, whole)


def _verl(batch: Batch, operation: Operation) -> Contender:
    function, reason = verl_function()
    if function is None:
        return absent(VERL, reason)
    given = batch if batch.cu_seqlens is None else batch.padded
    if given is None:
        return absent(VERL, "it has no packed form")

    def whole() -> Outcome:
        weights, mask, metrics = function(given.old, given.rollout, given.mask, **IN_VERL[operation.spec][0])
        return Outcome(None if weights is None else weights.batch["rollout_is_weights"], mask, metrics=metrics)

    note = "" if given is batch else "on the padded tensors: it has no packed form"
    return Contender(VERL, whole, whole, note, capturable=False)


def _xtuner(batch: Batch, once: bool) -> Contender:
    """Restated xtuner, which reads the lengths of a pack many times, or once."""
    assert batch.cu_seqlens is not None and batch.mask is not None
    mask, num_tokens = batch.mask[None], batch.cu_seqlens.diff()
    old, rollout = batch.old[None], batch.rollout[None]

    def whole() -> Outcome:
        lengths = num_tokens.tolist() if once else num_tokens
        weights, kept, metrics = restated.xtuner(old, rollout, lengths, mask, **restated.XTUNER_REASONING)
        return Outcome(weights[0], kept[0], metrics=metrics)

    name, note = (XTUNER_ONCE, "with one line changed") if once else (XTUNER, "")
    return Contender(name, whole, whole, note, capturable=False)


def _skyrl(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def on_device() -> tuple[Tensor, Tensor, dict[str, float]]:
        return restated.skyrl(batch.old, batch.rollout, mask, **restated.SKYRL_TLDR)

    def whole() -> Outcome:
        weights, kept, metrics = on_device()
        return Outcome(torch.where(mask != 0, weights, 0.0), kept, metrics=metrics)

    return Contender(SKYRL, on_device, whole, capturable=False)


def _trl(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def on_device() -> tuple[Tensor, dict[str, float]]:
        return restated.trl(batch.old, batch.rollout, mask, clip_max=3.0)

    def whole() -> Outcome:
        ratio, metrics = on_device()
        return Outcome(torch.where(mask != 0, ratio, 0.0), mask, metrics=metrics)

    return Contender(TRL, on_device, whole, capturable=False)
