"""Who computes a policy loss on a batch of a device; `device_contenders` asks here."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import baseline, operations, restated
from benchmarks.batches import Batch
from benchmarks.contenders import BY_HAND, OURS, VERL, verl_function, without_checkout
from benchmarks.device_contender import (
    EAGER,
    SKYRL,
    TRACED,
    TRL,
    TRL_RESTATED,
    XTUNER,
    Contender,
    Outcome,
    absent,
)
from benchmarks.operations import Operation
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.loss import Objective


def losses(batch: Batch, operation: Operation) -> list[Contender]:
    """Everybody who knows the loss and does not need torch.compile, present or absent."""
    if operation.fused:
        ours = [_fused_loss(name, batch, operation, how) for name, how in ((OURS, "auto"), (EAGER, "torch"))]
        return [*ours, _skyrl_loss(batch, operation)]
    correction = corrected(batch, operation)
    found = [
        _loss(OURS, batch, operation, correction, "auto"),
        _loss(EAGER, batch, operation, correction, "torch"),
        _by_hand_loss(batch, operation, correction),
        _verl_loss(batch, operation, correction),
    ]
    if operation is operations.XTUNER_LOSS:
        found += [_xtuner_loss(batch, operation, correction)]
    if operation is operations.TRL_LOSS:
        found += [_trl_loss(batch, operation, correction), _trl_loss_restated(batch, operation, correction)]
    return found


def with_compiler(batch: Batch, operation: Operation) -> list[Contender]:
    """Ours and our reference, as it is and by torch.compile."""
    correction = corrected(batch, operation)
    return [
        _loss(OURS, batch, operation, correction, "auto"),
        _loss(EAGER, batch, operation, correction, "torch"),
        _traced_loss(batch, operation, correction),
    ]


def corrected(batch: Batch, operation: Operation) -> rc.Correction:
    """What a loss is given that does not correct by itself."""
    return rc.correct(
        batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend="torch"
    )


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


def _ours(batch: Batch, operation: Operation, new: Tensor, backend: str, **more: Any) -> rc.PolicyLoss:
    """Our loss of a batch, decoupled."""
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

    return _part(name, batch, operation, forward, capturable=name != EAGER)


def _traced_loss(batch: Batch, operation: Operation, correction: rc.Correction, **how: Any) -> Contender:
    def step(new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = {"weights": correction.weights, "train_mask": correction.mask, "denominator": operation.denominator}
        out = _ours(batch, operation, new, "torch", **given)
        return out.value, out.statistics.sums, out.statistics.maxima

    objective = Objective(operation.surrogate, None, None, "token_mean", operation.denominator, None)
    compiled = torch.compile(step, dynamic=False, **how)

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, sums, maxima = compiled(batch.new)
        return value, lambda: Statistics(None, sums, maxima, objective).metrics()

    return _part(TRACED, batch, operation, forward, slow=True)


def _by_hand_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = baseline.policy_loss(
            batch.new, batch.old, batch.advantages, correction.mask, correction.weights, operation.clip
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
    low, high, dual = operation.clip
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
        given = {"rollout_logp": batch.rollout, "spec": operation.spec, "reduction": "sum"}
        out = _ours(batch, operation, batch.new, backend, **given)
        return out.value, lambda: out.metrics(operation.scheme)

    return _part(name, batch, operation, forward, capturable=name != EAGER)


def _skyrl_loss(batch: Batch, operation: Operation) -> Contender:
    assert batch.mask is not None
    mask = batch.mask

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.skyrl_loss(
            batch.new, batch.old, batch.rollout, batch.advantages, mask, *operation.clip, **restated.SKYRL_TLDR
        )
        return value, lambda: metrics

    return _part(SKYRL, batch, operation, forward, capturable=False)


def _xtuner_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    mask, weights = correction.mask, correction.weights

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.xtuner_loss(batch.new, batch.old, batch.advantages, mask, weights, *operation.clip)
        return value, lambda: baseline.on_host(metrics)

    return _part(XTUNER, batch, operation, forward)


def _trl_loss_restated(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    assert batch.mask is not None
    mask, ratio = batch.mask, correction.weights
    items = mask.sum().float()

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value, metrics = restated.trl_loss(
            batch.new, batch.old, batch.advantages, mask, ratio, items, *operation.clip[:2]
        )
        return value, lambda: metrics

    return _part(TRL_RESTATED, batch, operation, forward, capturable=False)


# The version whose method was read.
TRL_VERSION = "1.16.0"


@cache
def trl_method() -> tuple[Callable[..., Any] | None, str]:
    """TRL's own `GRPOTrainer._compute_loss`, or None and why not."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return None, "trl is not installed"
    if version != TRL_VERSION:
        return None, f"trl {version} is installed, and what is known here is {TRL_VERSION}"
    with without_checkout():
        return importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss, ""


class OneProcess:
    """What TRL asks of accelerate, in one process."""

    num_processes = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def _trl_loss(batch: Batch, operation: Operation, correction: rc.Correction) -> Contender:
    method, reason = trl_method()
    if method is None:
        return absent(TRL, reason)
    assert batch.mask is not None
    low, high, _ = operation.clip
    rows, entropies = batch.new.shape[0], torch.zeros_like(batch.new, requires_grad=False)
    no_tokens = batch.mask.new_zeros(rows, 0)
    trainer = SimpleNamespace(
        # In place of a model; the prompts are empty, and so are the answers' ids.
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.new, entropies, None),
        accelerator=OneProcess(),
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_low=low,
        epsilon_high=high,
        importance_sampling_level="token",
        loss_type="dapo",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": no_tokens,
        "prompt_mask": no_tokens,
        "completion_ids": no_tokens,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "importance_sampling_ratio": correction.weights,
        "num_items_in_batch": batch.mask.sum().float(),
    }

    def forward() -> tuple[Tensor, Callable[[], Mapping[str, float]]]:
        value = method(trainer, None, inputs)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        trainer._metrics["train"].clear()
        return value, lambda: metrics

    return _part(TRL, batch, operation, forward, capturable=False)
