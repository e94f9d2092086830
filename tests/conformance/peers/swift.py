"""ms-swift: the statements of GRPOTrainer that make the loss, and its methods that make weights and masks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from conformance.batches import Batch
from conformance.rows import Row, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = "ms-swift", "swift", "ms-swift"

TRAINER = "swift/rlhf_trainers/grpo_trainer.py"
METHODS = (
    "_apply_rollout_importance_sampling",
    "_compute_sequence_level_ratios",
    "_compute_off_policy_sequence_mask",
)


def rows(source: Source) -> Iterator[Row]:
    """Compare the recipes."""
    body = source.lines(
        TRAINER, "GRPOTrainer._compute_loss_and_metrics", "log_ratio = ", "if self.loss_type in ['grpo'"
    )

    def loss(given: Batch, mode: str | None = "token_truncate", threshold: float = 2.0, **more: Any) -> Tensor:
        trainer = source.instance(
            TRAINER,
            "GRPOTrainer",
            METHODS,
            args=SimpleNamespace(delta=more.get("delta")),
            rollout_importance_sampling_mode=mode,
            rollout_importance_sampling_threshold=threshold,
            importance_sampling_level=more.get("importance_sampling_level", "token"),
            off_policy_sequence_mask_delta=more.get("off_policy_sequence_mask_delta"),
            loss_type=more.get("loss_type", "grpo"),
            epsilon_low=more.get("epsilon", 0.2),
            epsilon_high=more.get("epsilon", 0.2),
            beta=0.0,
            _has_teacher=False,
        )
        weights = trainer._apply_rollout_importance_sampling(given.old - given.rollout, given.mask)
        batch = SimpleNamespace(rollout_per_token_logps=given.rollout, num_items_in_batch=given.mask.sum())
        found = body(
            self=trainer,
            per_token_logps=given.new,
            old_per_token_logps=given.old,
            completion_mask=given.mask,
            advantages=given.token_advantages,
            grpo_batch=batch,
            rollout_is_weights=weights,
            entropy_mask=None,
            per_token_kl=None,
        )
        value: Tensor = found["loss"]
        return value

    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        yield recipe(
            f"swift.{mode}",
            f"{TRAINER}: _apply_rollout_importance_sampling, _compute_loss_and_metrics",
            lambda given, threshold, mode=mode: loss(given, mode, threshold),
            lambda rng: {"threshold": rng.choice((1.05, 2.0))},
        )
    yield recipe(
        "swift.opsm",
        f"{TRAINER}: _compute_off_policy_sequence_mask, _compute_loss_and_metrics",
        lambda given, delta: loss(given, off_policy_sequence_mask_delta=delta),
        lambda rng: {"delta": rng.choice((0.001, 0.1))},
    )
