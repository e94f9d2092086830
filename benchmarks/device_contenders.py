"""Who computes an operation on a batch of a device: ours, the reference, and what others do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import baseline, cases, operations, restated
from benchmarks.batches import Batch
from benchmarks.contenders import BY_HAND, COMPILED, OURS, VERL, verl_function, without_checkout
from benchmarks.operations import SURROGATE, Operation
from rollout_corr.statistics import Statistics
from rollout_corr.surrogates import Objective

EAGER = "our reference"
TRACED = "our reference, torch.compile"
XTUNER = "xtuner, restated"
XTUNER_ONCE = "xtuner, restated, lengths read once"
SKYRL = "SkyRL, restated"
ORDER = (OURS, COMPILED, EAGER, TRACED, BY_HAND, VERL, XTUNER, XTUNER_ONCE, SKYRL)

# Whose reference is also compiled: it takes tens of seconds each.
TRACED_CASES = ("32k in 256", "16M")

CLIP = (SURROGATE.low, SURROGATE.high, SURROGATE.dual or 0.0)


class Outcome(NamedTuple):
    """What a call gives, in the batch's shape; None for what it does not give."""

    weights: Tensor | None = None
    mask: Tensor | None = None
    value: Tensor | None = None
    gradient: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Contender:
    """Somebody to time.

    Args:
        name: One of ORDER.
        on_device: The call without metrics on the host. What it returns is held and freed, nobody looks at it. None
            when absent.
        whole: The call with everything that it gives, metrics as floats.
        note: Why it is absent, or what is different about it.
        slow: Its first call takes tens of seconds.
        capturable: It may be put into a CUDA graph, if it turns out that the host does not wait in it.
    """

    name: str
    on_device: Callable[[], object] | None
    whole: Callable[[], Outcome] | None
    note: str = ""
    slow: bool = False
    capturable: bool = True


def absent(name: str, why: str) -> Contender:
    return Contender(name, None, None, f"absent: {why}")


def contenders(batch: Batch, operation: Operation) -> list[Contender]:
    """Everybody who knows the operation, present or absent, bound to a batch."""
    found = _losses(batch, operation) if operation.part else _corrections(batch, operation)
    return sorted(found, key=lambda who: ORDER.index(who.name))


# --- correct ---


def _corrections(batch: Batch, operation: Operation) -> list[Contender]:
    found = [_correct(OURS, batch, operation, "auto")]
    if batch.old.is_cuda:
        found += [_correct(EAGER, batch, operation, "torch")]
        if batch.case.name in TRACED_CASES and operation is operations.TOKEN:
            found += [_traced_correct(batch, operation)]
    else:
        found += [replace(_correct(COMPILED, batch, operation, "compiled"), slow=True)]
    if operation in (operations.METRICS, operations.TOKEN):
        found += [_by_hand(batch, operation), _verl(batch, operation)]
    if operation is operations.XTUNER:
        found += _xtuner(batch)
    if operation is operations.SKYRL:
        found += [_skyrl(batch)]
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

    compiled = torch.compile(step, **how)

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


SKYRL_BOUNDS = {"cap": 2.0, "outlier": (1e-4, 100.0), "token_mask": (0.5, 2.0), "geometric": (0.99, 1.01)}


def _skyrl(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def whole() -> Outcome:
        weights, kept, metrics = restated.skyrl(batch.old, batch.rollout, mask, **SKYRL_BOUNDS)
        return Outcome(torch.where(mask != 0, weights, 0.0), kept, metrics=metrics)

    def on_device() -> object:
        return restated.skyrl(batch.old, batch.rollout, mask, **SKYRL_BOUNDS)

    return Contender(SKYRL, on_device, whole, capturable=False)


# --- policy_loss ---


def _losses(batch: Batch, operation: Operation) -> list[Contender]:
    if operation.fused:
        ours = [_fused_loss(OURS, batch, operation, "auto")]
        if batch.old.is_cuda:
            ours += [_fused_loss(EAGER, batch, operation, "torch")]
        return [*ours, _skyrl_loss(batch)]
    correction = rc.correct(
        batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend="torch"
    )
    found = [_loss(OURS, batch, operation, correction, "auto"), _by_hand_loss(batch, operation, correction)]
    if batch.old.is_cuda:
        found += [_loss(EAGER, batch, operation, correction, "torch")]
        if batch.case.name in TRACED_CASES and operation is operations.BOTH:
            found += [_traced_loss(batch, operation, correction)]
    return [*found, _verl_loss(batch, operation, correction)]


Forward = Callable[[], tuple[Tensor, Callable[[], Mapping[str, float]]]]


def _part(name: str, batch: Batch, operation: Operation, forward: Forward, **about: Any) -> Contender:
    """A contender for the part of the work that the operation names.

    Args:
        name: Whose.
        batch: With `new`, which the gradient goes to.
        operation: A part of the loss.
        forward: Gives the value with its graph, and how to read the metrics.
        **about: More of the contender.
    """

    def gradient(value: Tensor, keep: bool = False) -> Tensor:
        return torch.autograd.grad(value, batch.new, retain_graph=keep)[0]

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
        # The graph is made by the first call, which nobody times.
        if not graph:
            graph.append(forward()[0])
        return gradient(graph[0], keep=True)

    # autograd runs a backward on the stream of its forward, which is not the one that captures.
    return Contender(name, backward, whole, **{**about, "capturable": False})


def _loss(name: str, batch: Batch, operation: Operation, correction: rc.Correction, backend: str) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        out = rc.policy_loss(
            batch.new,
            batch.advantages,
            batch.mask,
            old_logp=batch.old,
            correction=correction,
            cu_seqlens=batch.cu_seqlens,
            surrogate=SURROGATE,
            denominator="kept",
            backend=backend,
        )
        return out.value, out.metrics

    return _part(name, batch, operation, forward, capturable=name != EAGER)


def _traced_loss(batch: Batch, operation: Operation, correction: rc.Correction, **how: Any) -> Contender:
    def step(new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = rc.policy_loss(
            new,
            batch.advantages,
            batch.mask,
            old_logp=batch.old,
            weights=correction.weights,
            train_mask=correction.mask,
            cu_seqlens=batch.cu_seqlens,
            surrogate=SURROGATE,
            denominator="kept",
            backend="torch",
        )
        return out.value, out.statistics.sums, out.statistics.maxima

    objective = Objective(SURROGATE, None, None, "token_mean", "kept", None)
    compiled = torch.compile(step, **how)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, sums, maxima = compiled(batch.new)
        return value, lambda: Statistics(None, sums, maxima, objective).metrics()

    return _part(TRACED, batch, operation, forward, slow=True)


def _by_hand_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = baseline.policy_loss(
            batch.new, batch.old, batch.advantages, correction.mask, correction.weights, CLIP
        )
        return value, lambda: baseline.on_host(metrics)

    return _part(BY_HAND, batch, operation, forward)


def _verl_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    function, reason = verl_function()
    if function is None:
        return absent(VERL, reason.removeprefix("absent: "))
    if batch.cu_seqlens is not None:
        return absent(VERL, "it has no packed form")
    with without_checkout():
        algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
        actor = importlib.import_module("verl.workers.config").ActorConfig
    low, high, dual = CLIP
    config = actor(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = algorithms.compute_policy_loss_vanilla(
            batch.old, batch.new, batch.advantages, correction.mask, "token-mean", config, correction.weights
        )
        return value, lambda: metrics

    return _part(VERL, batch, operation, forward, capturable=False)


def _fused_loss(name: str, batch: Batch, operation: Operation, backend: str) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        out = rc.policy_loss(
            batch.new,
            batch.advantages,
            batch.mask,
            old_logp=batch.old,
            rollout_logp=batch.rollout,
            cu_seqlens=batch.cu_seqlens,
            spec=operation.spec,
            surrogate=SURROGATE,
            reduction="sum",
            backend=backend,
        )
        return out.value, lambda: out.metrics(operation.scheme)

    return _part(name, batch, operation, forward, capturable=name != EAGER)


def _skyrl_loss(batch: Batch) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.skyrl_loss(
            batch.new, batch.old, batch.rollout, batch.advantages, mask, *CLIP, **SKYRL_BOUNDS
        )
        return value, lambda: metrics

    return _part(SKYRL, batch, operations.SKYRL_STEP, forward, capturable=False)
