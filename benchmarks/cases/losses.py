"""Contenders for a policy loss; `benchmarks.cases.contenders` asks here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases import operations
from benchmarks.cases.batches import Batch
from benchmarks.cases.contender import (
    BY_HAND,
    EAGER,
    OURS,
    SKYRL,
    TRACED,
    TRL,
    VERL,
    XTUNER,
    Contender,
    Outcome,
    absent,
)
from benchmarks.cases.operations import Operation
from benchmarks.peers import by_hand, restated
from benchmarks.peers.installed import verl_function, verl_loss
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.loss import Objective

# A loss with its graph, and how to read its metrics.
Forward = Callable[[], tuple[Tensor, Callable[[], Mapping[str, float]]]]
Backends = ((OURS, "auto"), (EAGER, "torch"))


def losses(batch: Batch, operation: Operation) -> list[Contender]:
    """Return all contenders for a loss, absent ones too, but those by torch.compile."""
    if operation.fused:
        return [*(_fused(name, batch, operation, how) for name, how in Backends), _skyrl(batch, operation)]
    correction = corrected(batch, operation)
    found = [_loss(name, batch, operation, correction, how) for name, how in Backends]
    found += [_by_hand(batch, operation, correction), _verl(batch, operation, correction)]
    if operation is operations.XTUNER_LOSS:
        found += [_xtuner(batch, operation, correction)]
    if operation is operations.TRL_LOSS:
        found += [_trl(batch, operation, correction)]
    return found


def with_compiler(batch: Batch, operation: Operation) -> list[Contender]:
    """Return ours, and our reference as it is and under torch.compile."""
    correction = corrected(batch, operation)
    ours = [_loss(name, batch, operation, correction, how) for name, how in Backends]
    return [*ours, traced_loss(batch, operation, correction)]


def corrected(batch: Batch, operation: Operation) -> rc.Correction:
    """Compute the correction that a loss is given when it does not correct by itself."""
    return rc.correct(
        batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend="torch"
    )


def of_part(name: str, batch: Batch, operation: Operation, forward: Forward, **about: Any) -> Contender:
    """Return a contender for the part of a loss that the operation names.

    Args:
        name: Its name.
        batch: With `new`, which receives the gradient.
        operation: Forward, backward, or both.
        forward: Gives the value with its graph, and how to read the metrics.
        **about: More fields of the contender.
    """
    new = batch.new
    assert new is not None

    def gradient(value: Tensor, keep: bool = False) -> Tensor:
        return torch.autograd.grad(value, new, retain_graph=keep)[0]

    def both() -> tuple[Tensor, Tensor]:
        value, _ = forward()
        return value, gradient(value)

    def whole() -> Outcome:
        value, metrics = forward()
        found = None if operation.part == "forward" else gradient(value)
        return Outcome(value=value.detach(), gradient=found, metrics=metrics())

    if operation.part != "backward":
        return Contender(name, both if operation.part == "both" else forward, whole, **about)
    graph: list[Tensor] = []

    def backward() -> Tensor:
        # The first call, which is not timed, makes the graph.
        if not graph:
            graph.append(forward()[0])
        return gradient(graph[0], keep=True)

    # autograd runs a backward on the stream of its forward, which is not the one that captures.
    return Contender(name, backward, whole, **{**about, "capturable": False})


def _ours(batch: Batch, operation: Operation, new: Tensor | None, backend: str, **more: Any) -> rc.PolicyLoss:
    return rc.policy_loss(
        new,
        batch.advantages,
        batch.mask,
        old_logp=batch.old,
        cu_seqlens=batch.cu_seqlens,
        surrogate=operation.surrogate,
        backend=backend,
        **more,
    )


def _loss(name: str, batch: Batch, operation: Operation, correction: rc.Correction, backend: str) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        given = {"correction": correction, "denominator": operation.denominator}
        out = _ours(batch, operation, batch.new, backend, **given)
        return out.value, out.metrics

    return of_part(name, batch, operation, forward, capturable=name != EAGER)


def traced_loss(batch: Batch, operation: Operation, correction: rc.Correction, **how: Any) -> Contender:
    """Return our reference under torch.compile, which is given `how`."""

    def step(new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = {"weights": correction.weights, "train_mask": correction.mask, "denominator": operation.denominator}
        out = _ours(batch, operation, new, "torch", **given)
        return out.value, out.statistics.sums, out.statistics.maxima

    objective = Objective(operation.surrogate, None, None, "token_mean", operation.denominator, None)
    compiled = torch.compile(step, dynamic=False, **how)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, sums, maxima = compiled(batch.new)
        return value, lambda: Statistics(None, sums, maxima, objective).metrics()

    return of_part(TRACED, batch, operation, forward, slow=True)


def _fused(name: str, batch: Batch, operation: Operation, backend: str) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        given = {"rollout_logp": batch.rollout, "spec": operation.spec, "reduction": "sum"}
        out = _ours(batch, operation, batch.new, backend, **given)
        return out.value, lambda: out.metrics(operation.scheme)

    return of_part(name, batch, operation, forward, capturable=name != EAGER)


def _by_hand(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    given = (batch.new, batch.old, batch.advantages, correction.mask, correction.weights, operation.clip)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = by_hand.policy_loss(*given)
        return value, lambda: by_hand.on_host(metrics)

    return of_part(BY_HAND, batch, operation, forward)


def _verl(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    function, reason = verl_function()
    if function is None:
        return absent(VERL, reason)
    if batch.cu_seqlens is not None:
        return absent(VERL, "it has no packed form")
    loss = verl_loss(operation.clip)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = loss(batch.old, batch.new, batch.advantages, correction.mask, correction.weights)
        return value, lambda: metrics

    return of_part(VERL, batch, operation, forward, capturable=False)


def _skyrl(batch: Batch, operation: Operation) -> Contender:
    given = (batch.new, batch.old, batch.rollout, batch.advantages, batch.mask, operation.clip)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.skyrl_loss(*given, **restated.SKYRL_TLDR)
        return value, lambda: metrics

    return of_part(SKYRL, batch, operation, forward, capturable=False)


def _xtuner(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    given = (batch.new, batch.old, batch.advantages, correction.mask, correction.weights, operation.clip)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.xtuner_loss(*given)
        return value, lambda: by_hand.on_host(metrics)

    return of_part(XTUNER, batch, operation, forward)


def _trl(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    assert batch.mask is not None
    low, high, _ = operation.clip
    given = (
        batch.new,
        batch.old,
        batch.advantages,
        batch.mask,
        correction.weights,
        batch.mask.sum().float(),
        low,
        high,
    )

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.trl_loss(*given)
        return value, lambda: metrics

    return of_part(TRL, batch, operation, forward, capturable=False)
