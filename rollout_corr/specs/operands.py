"""A batch as operators of torch and kernels take it: the fields of a record are the operands, in their order.

Tensors of tokens are [N] with offsets, or [B, T] without. `backends.registration` makes the schema of an operator of
these records, and `kernels` read them by name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_VERSION = 2**62


class ReadVersions(NamedTuple):
    """Versions of policies that have been read.

    Attributes:
        ids: Of those that sampled: per token in the shape of the batch, or [S], any integer dtype.
        per_sequence: They are [S].
        current: Of the one that trains.
    """

    ids: Tensor
    per_sequence: bool
    current: int

    def ages(self) -> Tensor:
        """int64: current - version; a filler at the end of int64 must not wrap around to the other sign."""
        ages: Tensor = self.current - self.ids.long().clamp(-LARGEST_VERSION, LARGEST_VERSION)
        return ages


class CorrectOperands(NamedTuple):
    """The operands of `torch.ops.rollout_corr.correct`; a Spec comes behind them.

    Attributes:
        train: The trainer's log-probs.
        rollout: The engine's log-probs.
        mask: Non-zero at valid tokens, any dtype.
        offsets: [S + 1] int32 or int64, of a packed batch.
        advantages: Per token, or [S].
        per_sequence: True if advantages are [S].
        externals: Per-token tensors of criteria over external statistics.
        new: Log-probs of the policy that trains, for criteria that compare it.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_rollout: True if it is taken from the engine's log-probs, and not from the trainer's.
        turns: [U + 1] int32 or int64, the offsets of turns among the tokens, where the Spec measures them; tokens of a
            padded batch are counted row after row.
        versions: Where the ages are not among the externals; the operator has no such operand.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    advantages: Tensor | None
    per_sequence: bool
    externals: list[Tensor]
    new: Tensor | None = None
    log_mass: Tensor | None = None
    mass_of_rollout: bool = False
    turns: Tensor | None = None
    versions: ReadVersions | None = None


class LossOperands(NamedTuple):
    """The operands of `torch.ops.rollout_corr.policy_loss`; an Objective comes behind them.

    Attributes:
        new: new_logp.
        base: The log-probs that it is compared with.
        ref: Log-probs of the reference policy.
        advantages: Per token, or [S].
        per_sequence: True if advantages are [S].
        weights: Factors of the loss.
        trains: Non-zero at tokens that train.
        mask: Non-zero at valid tokens.
        offsets: [S + 1] int32 or int64, of a packed batch.
        divisor: 0-d float64, where the caller has counted.
        scales: Per token, factors of all that it adds to the loss.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_base: True if it is taken from the base, and not from new_logp.
        double: float64 computes.
        turns: [U + 1] int32 or int64, offsets of turns among the tokens, for a surrogate of turns.
        chosen: Per token, non-zero where the surrogate chose it from the whole batch.
        differentiable: The gradient is handed back.
    """

    new: Tensor
    base: Tensor | None
    ref: Tensor | None
    advantages: Tensor
    per_sequence: bool
    weights: Tensor | None
    trains: Tensor | None
    mask: Tensor | None
    offsets: Tensor | None
    divisor: Tensor | None
    scales: Tensor | None = None
    log_mass: Tensor | None = None
    mass_of_base: bool = False
    double: bool = False
    turns: Tensor | None = None
    chosen: Tensor | None = None
    differentiable: bool = True


class ScaleOperands(NamedTuple):
    """The operands of `torch.ops.rollout_corr.scale_gradient`, which is backward.

    Attributes:
        gradient: [N] or [B, T], contiguous.
        inners: [S] in its dtype; None or empty: sequences do not matter.
        upstream: 0-d, any floating dtype, on the device of the gradient.
        divisor: 0-d float64.
        offsets: Of a packed batch.
        dtype: Of the result.
    """

    gradient: Tensor
    inners: Tensor | None
    upstream: Tensor
    divisor: Tensor
    offsets: Tensor | None
    dtype: torch.dtype
