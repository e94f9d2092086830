"""Contenders for corrections and policy losses: ours, our reference, torch by hand, and frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases.batches import Batch
from benchmarks.cases.contender import (
    BY_HAND,
    COMPILED,
    EAGER,
    ORDER,
    OURS,
    VERL,
    VERL_METRICS,
    Contender,
    Outcome,
    absent,
)
from benchmarks.cases.operations import IN_VERL, Operation
from benchmarks.peers import by_hand
from benchmarks.peers.installed import verl_function, verl_loss
from rollout_corr.backends import whole
from rollout_corr.backends.run import CORRECTIONS


def contenders(batch: Batch, operation: Operation) -> list[Contender]:
    """Return all contenders of the GPU benchmark for an operation, absent ones too, but those by torch.compile."""
    found = _losses(batch, operation) if operation.is_loss else _corrections(batch, operation)
    return sorted(found, key=lambda who: ORDER.index(who.name))


def ours(batch: Batch, operation: Operation) -> tuple[Callable[[], object], Callable[[], Outcome]]:
    """Return our call on the device, and the whole one with metrics."""
    who = next(one for one in contenders(batch, operation) if one.name == OURS)
    assert who.on_device is not None and who.whole is not None
    return who.on_device, who.whole


def with_compiler(batch: Batch, operation: Operation) -> list[Contender]:
    """Return ours, our reference, and what is written by hand under torch.compile."""
    both = [who for who in contenders(batch, operation) if who.name in (OURS, EAGER)]
    hand = _loss_by_hand if operation.is_loss else _by_hand
    return [*both, hand(batch, operation, COMPILED)]


def on_cpu(batch: Batch, operation: Operation) -> list[Contender]:
    """Return the contenders of the CPU benchmark for a correction, absent ones too."""
    verls = rc.spec(IN_VERL[operation.spec][1])
    return [
        _correct(OURS, batch, operation),
        _correct(VERL_METRICS, batch, Operation(operation.name, verls, scheme="verl")),
        plainly(_correct(EAGER, batch, operation)),
        _by_hand(batch, operation),
        _verl(batch, operation),
    ]


@contextmanager
def whole_batches() -> Iterator[None]:
    """Let the CPU run the definition on the whole batch, as a device does, where ours takes blocks."""
    with mock.patch.dict(CORRECTIONS, blocks=whole.run_whole):
        yield


def plainly(who: Contender) -> Contender:
    """Let a contender of ours run on whole batches."""
    assert who.on_device is not None and who.whole is not None
    return replace(who, on_device=whole_batches()(who.on_device), whole=whole_batches()(who.whole))


def _of(name: str, call: Callable[[], Any], outcome: Callable[[Any], Outcome], **about: Any) -> Contender:
    return Contender(name, call, lambda: outcome(call()), **about)


# --- corrections ------------------------------------------------------------------------------------------------------


def _corrections(batch: Batch, operation: Operation) -> list[Contender]:
    found = [_correct(OURS, batch, operation), _correct(EAGER, batch, operation, "torch", capturable=False)]
    if operation.spec in IN_VERL:
        found += [_by_hand(batch, operation), _verl(batch, operation)]
    return found


def corrected(batch: Batch, spec: rc.Spec, backend: str = "auto") -> rc.Correction:
    """Correct a batch."""
    return rc.correct(
        batch.old, batch.rollout, mask=batch.mask, cu_seqlens=batch.cu_seqlens, spec=spec, backend=backend
    )


def _correct(name: str, batch: Batch, operation: Operation, backend: str = "auto", **about: Any) -> Contender:
    return _of(
        name,
        lambda: corrected(batch, operation.spec, backend),
        lambda out: Outcome(out.weights, out.mask, metrics=out.metrics(operation.scheme)),
        **about,
    )


def _by_hand(batch: Batch, operation: Operation, name: str = BY_HAND) -> Contender:
    given = (batch.old, batch.rollout, batch.mask, batch.cu_seqlens, operation.spec)
    function = _compiled(by_hand.correct, name)
    return _of(
        name,
        lambda: function(*given),
        lambda out: Outcome(out[0], out[1], metrics=by_hand.on_host(out[2])),
        slow=name == COMPILED,
    )


def _compiled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compile a function for its own shapes, whatever was compiled before, if its contender is that which compiles."""
    return torch.compile(function, dynamic=False) if name == COMPILED else function


def _verl(batch: Batch, operation: Operation) -> Contender:
    function, reason = verl_function()
    if function is None:
        return absent(VERL, reason)
    given = batch if batch.cu_seqlens is None else batch.padded
    if given is None:
        return absent(VERL, "it has no packed form")

    def outcome(out: tuple[Any, Tensor, Mapping[str, float]]) -> Outcome:
        weights, mask, metrics = out
        return Outcome(None if weights is None else weights.batch["rollout_is_weights"], mask, metrics=metrics)

    tensors, how = (given.old, given.rollout, given.mask), IN_VERL[operation.spec][0]
    note = "" if given is batch else "on the padded tensors: it has no packed form"
    return _of(VERL, lambda: function(*tensors, **how), outcome, note=note, capturable=False)


# --- losses -----------------------------------------------------------------------------------------------------------

# A loss with its graph, and what its metrics are read from.
Forward = Callable[[], tuple[Tensor, Any]]


def _losses(batch: Batch, operation: Operation) -> list[Contender]:
    correction = corrected(batch, operation.spec, "torch")
    hand = _loss_by_hand(batch, operation)
    return [*_ours(batch, operation, correction), hand, _verl_loss(batch, operation, correction)]


def _loss_by_hand(batch: Batch, operation: Operation, name: str = BY_HAND) -> Contender:
    ready = corrected(batch, operation.spec, "torch")
    given = (batch.new, batch.old, batch.advantages, ready.mask, ready.weights, operation.clip)
    forward = partial(_compiled(by_hand.policy_loss, name), *given)
    return of_loss(name, batch, forward, by_hand.on_host, slow=name == COMPILED)


def of_loss(
    name: str,
    batch: Batch,
    forward: Forward,
    read: Callable[[Any], Mapping[str, float] | None] = dict,
    **about: Any,
) -> Contender:
    """Return a contender for a loss, forward and backward."""

    def both() -> tuple[Tensor, Tensor, Any]:
        value, metrics = forward()
        return value, torch.autograd.grad(value, batch.new)[0], metrics

    def whole() -> Outcome:
        value, gradient, metrics = both()
        return Outcome(value=value.detach(), gradient=gradient, metrics=read(metrics))

    return Contender(name, both, whole, **about)


def loss_of(
    batch: Batch, operation: Operation, new: Tensor | None, mean: rc.Mean | None = None, **more: Any
) -> rc.PolicyLoss:
    """Compute our loss of a batch, by the operation's mean if no other is given."""
    loss = rc.Loss(operation.surrogate, operation.mean if mean is None else mean)
    tokens = {"mask": batch.mask, "cu_seqlens": batch.cu_seqlens}
    return rc.policy_loss(new, batch.advantages, loss=loss, old_logp=batch.old, **tokens, **more)


def _ours(batch: Batch, operation: Operation, correction: rc.Correction) -> list[Contender]:
    """Our loss, and our reference."""

    def one(name: str, backend: str) -> Contender:
        def forward() -> tuple[Tensor, rc.PolicyLoss]:
            out = loss_of(batch, operation, batch.new, backend=backend, correction=correction)
            return out.value, out

        return of_loss(name, batch, forward, lambda out: out.metrics(operation.scheme), capturable=name != EAGER)

    return [one(OURS, "auto"), one(EAGER, "torch")]


def _verl_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    function, reason = verl_function()
    if function is None or batch.cu_seqlens is not None:
        return absent(VERL, reason or "it has no packed form")
    loss, given = verl_loss(operation.clip), (batch.old, batch.new, batch.advantages, correction.mask)
    return of_loss(VERL, batch, lambda: loss(*given, correction.weights), capturable=False)
