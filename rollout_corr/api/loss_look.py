"""The look that a surrogate of `policy_loss` takes at the whole batch, over the ranks of its batch group."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.api.loss_request import LossRequest
from rollout_corr.backends import loss_blocks, loss_operators
from rollout_corr.backends.batch import Batch
from rollout_corr.backends.layouts import shape_of
from rollout_corr.backends.loss_blocks import LossTask
from rollout_corr.backends.sequence_groups import INDEX_DTYPES
from rollout_corr.spec.surrogate import Looked


def looked_at(request: LossRequest, task: LossTask, by_kernels: bool) -> Looked:
    """Let the surrogate of a call look at the batch; kernels read the sequences where groups of them are compared."""
    ids, groups = request.ids, request.groups
    if task.objective.surrogate.by_group:
        return (loss_operators if by_kernels else loss_blocks).look_at_groups(task, groups)
    if ids is None:
        ids = torch.arange(task.batch.count, device=task.batch.train.device) + (groups.rank() << 32)
    return loss_blocks.look(task, ids, groups)


def read_ids(batch: Batch, given: object) -> Tensor:
    """Check `sequence_ids`: [S] int64."""
    if not isinstance(given, Tensor):
        raise TypeError(f"sequence_ids: expected a tensor, got {type(given).__name__}")
    if given.dtype not in INDEX_DTYPES:
        raise ValueError(f"sequence_ids: expected int32 or int64, got {str(given.dtype).removeprefix('torch.')}")
    if tuple(given.shape) not in ((batch.count,), (batch.count, 1)):
        raise ValueError(f"sequence_ids: expected shape [{batch.count}] or [{batch.count}, 1], got {shape_of(given)}")
    if given.device != batch.train.device:
        raise ValueError(f"sequence_ids: expected device {batch.train.device}, got {given.device}")
    return given.detach().reshape(-1).long()
