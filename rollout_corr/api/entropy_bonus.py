"""The entropy bonus of a policy loss: plain torch beside whatever backend runs the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.api.loss_request import LossRequest
from rollout_corr.backends import whole
from rollout_corr.backends.loss_blocks import LossTask, finite_tokens
from rollout_corr.definition.entropy import total_of
from rollout_corr.definition.loss import both
from rollout_corr.spec.entropy_bonus import EntropyBonus


def bonus_of(request: LossRequest, bonus: EntropyBonus, task: LossTask, divisor: Tensor) -> Tensor:
    """0-d float64: the term of the loss, of this rank's tokens, with its gradient to the caller's entropy.

    Args:
        request: The call, whose entropy has its history.
        bonus: The bonus.
        task: The loss that it is a term of: a token that the loss leaves out does not train.
        divisor: 0-d, what the policy loss is divided by.
    """
    batch, objective = request.tensors.batch, request.objective
    assert request.entropy is not None
    entropy = request.entropy.to(batch.dtype)
    if request.scales is not None:
        entropy = entropy * torch.where(request.scales.isfinite(), request.scales, 0.0)
    kept = both(None if task.trains is None else task.trains != 0, finite_tokens(task))
    if request.groups.sequence is None or not objective.reduced.averages:
        sequences, valid = whole.sequences_of(batch)
        total = total_of(entropy, valid, kept, bonus.scope, sequences, objective)
    else:
        split, valid = whole.split_sequences_of(batch, request.groups.sequence)
        with torch.no_grad():
            total_of(entropy, valid, kept, bonus.scope, split, objective)
        split.start("policy_loss: the tokens of each sequence")
        split.wait()
        total = total_of(entropy, valid, kept, bonus.scope, split, objective)
    return -bonus.coef * (total / divisor.detach())
