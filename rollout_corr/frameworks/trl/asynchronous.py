"""Drop-in for TRL's AsyncGRPOTrainer: the policy loss of its packed rows.

The trainer has no log-probs of the policy that sampled: its samples are some weight updates old. So its one ratio, of
the policy being trained to the engine, is PPO's ratio and the correction at once, and there is no second weight to
multiply by. Here the ratio is bounded, a token without a finite log-prob is left out, and a Spec rejects tokens or
completions. TRL's `compute_loss` still runs and logs TRL's metrics; the loss that trains is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...api.policy_loss import PolicyLoss, policy_loss
from ...backends.choose import BackendName
from ...backends.given import Batch
from ...metrics.statistics import Statistics
from ...specs.correction import Spec
from ...specs.loss import Loss
from ...specs.surrogates import PPO
from ..shared.dropin import DropIn, Logged, Target

MODULE = "trl.experimental.async_grpo.async_grpo_trainer"

# The one installation of this package in TRL.
DROP_IN = DropIn(
    "trl",
    ("1.16.0",),
    not_covered={"AsyncGRPOTrainer, which this TRL does not have": MODULE},
    brings=("advantages", "log-probs of the policy being trained"),
)


def packed_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    segment_id: Tensor,
    mask: Tensor | None = None,
    *,
    tokens: Tensor | float,
    clips: tuple[float, float] = (0.2, 0.2),
    spec: Spec | None = None,
    delta: float | None = None,
    backend: BackendName = "auto",
    token_ids: Tensor | None = None,
) -> PolicyLoss:
    """Compute -min(r A, clip(r) A) of a packed row, with r = exp(log_probs - old_log_probs); all tensors are [N].

    Args:
        log_probs: Of the policy being trained.
        old_log_probs: Of the engine; a token where either is NaN or infinite is left out.
        advantages: Of the tokens.
        segment_id: Which completion a token belongs to; it never falls.
        mask: Non-zero at trained tokens; None: all of them.
        tokens: Divisor of the sum: a number or a 0-d tensor.
        clips: How far r may lie below and above 1.
        spec: Its criteria reject tokens and completions by r; they stay in `tokens`.
        delta: r is at most this before anything else; TRL clips it on one side only, where A > 0.
        backend: As for `policy_loss`.
        token_ids: For the dump.
    """
    # One read of the device, after TRL's own in the same step.
    segments = int(segment_id[-1]) + 1 if segment_id.numel() else 0
    starts = torch.arange(segments + 1, device=segment_id.device, dtype=segment_id.dtype)
    offsets = torch.searchsorted(segment_id, starts)
    out = policy_loss(
        log_probs,
        advantages,
        Batch(mask=mask, cu_seqlens=offsets, total=tokens),
        Loss(PPO(*clips, delta=delta)),
        rollout_logp=old_log_probs,
        spec=spec,
        backend=backend,
    )
    DROP_IN.seen(out.metrics_async(), log_probs, old_log_probs, mask, offsets, token_ids=token_ids)
    return out


def log_spec(trainer: Any, logged: Any, statistics: Statistics, metrics: Logged) -> None:
    """Add the metrics of a Spec, of all processes, to those that a trainer logs."""
    whole = statistics.all_reduce() if trainer.accelerator.num_processes > 1 else statistics
    for name, value in whole.metrics(metrics, prefix="rollout_corr/").items():
        logged[name].append(value)


def replaced(
    original: Callable[..., Any],
    spec: Spec | None = None,
    delta: float | None = None,
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
) -> Callable[..., Any]:
    """Make the replacement of `AsyncGRPOTrainer.compute_loss`."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        made: list[Any] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            made.append(model(*args, **kwargs))
            return made[-1]

        original(self, recorded, inputs, return_outputs, num_items_in_batch)
        (outputs,) = made
        described = f"the ratio to the engine, clipped to [{1 - self.epsilon_low:g}, {1 + self.epsilon_high:g}]"
        described += "" if delta is None else f", at most {delta:g}"
        DROP_IN.say(True, described if spec is None else f"{described}, and {spec!r}")
        tokens = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        # What TRL divides by its steps has a larger divisor, so that backward has nothing to multiply.
        tokens = tokens * self.current_gradient_accumulation_steps
        clips = self.epsilon_low, self.epsilon_high
        given: dict[str, Any] = {"tokens": tokens, "clips": clips, "spec": spec, "delta": delta, "backend": backend}
        out = packed_policy_loss(**_row(inputs, outputs), **given)
        if spec is not None:
            log_spec(self, self._metrics["train"], out.statistics, metrics)
        loss = out.value
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs["aux_loss"] / self.current_gradient_accumulation_steps
        return loss

    return compute_loss


def _row(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read a row of the trainer: what belongs to a token that trains, one after another, then padding.

    Nothing is selected by value, which would wait for the device.
    """
    log_probs = outputs["log_probs"].flatten()
    if "segment_id" in inputs:
        # A position whose prediction serves several completions stands once in the row and once for each of them here.
        position = inputs["token_index"].flatten()
        labels = inputs.get("shift_labels")
        return {
            "token_ids": None if labels is None else labels.flatten()[position.clamp(min=0)],
            "log_probs": log_probs[position.clamp(min=0)],
            "old_log_probs": inputs["old_log_probs"].flatten(),
            "advantages": inputs["advantages"].flatten(),
            # The padding has segment 0.
            "segment_id": inputs["segment_id"].flatten().cummax(0).values,
            "mask": position >= 0,
        }
    # Before 1.16.0 prompts stand in the row too, and each token but the first is predicted.
    tokens = slice(1, log_probs.numel() + 1)
    begins = inputs["position_ids"].flatten() == 0
    return {
        "log_probs": log_probs,
        **{name: inputs[name].flatten()[tokens] for name in ("old_log_probs", "advantages")},
        "token_ids": inputs["input_ids"].flatten()[tokens],
        "segment_id": begins.cumsum(0)[tokens] - 1,
        "mask": inputs["completion_mask"].flatten()[tokens],
    }


TARGETS = (Target(MODULE, "AsyncGRPOTrainer.compute_loss", replaced, takes_original=True),)
