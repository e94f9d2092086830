"""TRL's own loss, without a trainer and a model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

from benchmarks.cases import operations
from benchmarks.cases.contender import Outcome


class OneProcess:
    """The part of accelerate that TRL needs, in one process."""

    num_processes = 1

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def loss_of_trl(batch, correction):
    """TRL's own `GRPOTrainer._compute_loss` of version 1.16.0."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    entropies, no_tokens = torch.zeros_like(batch.new, requires_grad=False), batch.mask.new_zeros(len(batch.mask), 0)
    low, high, _ = operations.TRL_LOSS.clip
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
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return Outcome(value=value.detach(), gradient=torch.autograd.grad(value, batch.new)[0], metrics=metrics)
