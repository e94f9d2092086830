"""Group baselines (GRPO, RLOO) from the samples that are kept."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..definition.sequences import Packed
from ..specs.validate import shown

Alone = Literal["reward", "zero"]


class FilteredGroups(NamedTuple):
    """Statistics of each sample's group, as a group-relative advantage needs them.

    Attributes:
        mean: [S] mean reward of the kept samples of the sample's group, its baseline; 0 where none is kept, and where
            one is kept and `alone` is "reward".
        std: [S] population standard deviation of these rewards; 0 where fewer than two are kept, but 1 where one is
            kept and `alone` is "reward".
        size: [S] int64, number of kept samples of the group.
        centered: [S] reward - mean for kept samples, 0 for rejected ones.
    """

    mean: Tensor
    std: Tensor
    size: Tensor
    centered: Tensor


def filter_groups(rewards: Tensor, keep: Tensor, group_index: Tensor, alone: Alone = "zero") -> FilteredGroups:
    """Compute group statistics of the rewards over kept samples only.

    A rejected sample does not train, so its reward must not move its siblings' baseline: if a reward of 100 is
    rejected, rewards of 1 and -1 are +-1 away from their mean, not -32 and -34. Call it with `correct(...).keep` before
    advantages are computed. It does not wait for the device.

    Args:
        rewards: [S] floating, one per sample. The value of a rejected sample (NaN too) is not read.
        keep: [S] bool, as in `Correction.keep`.
        group_index: [S] int64 or int32, the group of each sample, from 0 to S - 1. Members of a group need not be
            neighbors, and numbers may be left out; numbers outside that range are an error on the CPU and undefined
            on a device.
        alone: Treatment of a sample that is the only kept one of its group and so has no sibling to compare with:
            "zero" centers it on itself, so that it teaches nothing; "reward" takes its reward as its advantage, with
            baseline 0 and a standard deviation of 1, as some frameworks do.

    Returns:
        A `FilteredGroups` in the dtype of `rewards` promoted to at least float32.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        TypeError: An argument that is not a tensor.
    """
    if alone not in get_args(Alone):
        raise ValueError(f"alone: expected 'reward' or 'zero', got {shown(alone)}")
    for name, x in (("rewards", rewards), ("keep", keep), ("group_index", group_index)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards: expected a floating tensor of shape [S], got {rewards.dtype} {list(rewards.shape)}")
    for name, x, dtypes in (("keep", keep, (torch.bool,)), ("group_index", group_index, (torch.int64, torch.int32))):
        if x.shape != rewards.shape:
            raise ValueError(f"{name}: expected shape {list(rewards.shape)} (of rewards), got {list(x.shape)}")
        if x.dtype not in dtypes:
            raise ValueError(
                f"{name}: expected dtype {' or '.join(str(d)[6:] for d in dtypes)}, got {str(x.dtype)[6:]}"
            )
        if x.device != rewards.device:
            raise ValueError(f"{name}: expected device {rewards.device} (of rewards), got {x.device}")
    samples = rewards.shape[0]
    if (
        group_index.device.type == "cpu"
        and samples
        and not 0 <= int(group_index.min()) <= int(group_index.max()) < samples
    ):
        low, high = int(group_index.min()), int(group_index.max())
        raise ValueError(f"group_index: expected numbers from 0 to {samples - 1} (samples - 1), got {low} to {high}")
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    group = group_index.to(torch.int64)
    # Sorted by group, every sum is one run in a fixed order: no atomics, and a NaN stays in its group.
    order = group.argsort(stable=True)
    runs = Packed(torch.searchsorted(group[order], torch.arange(samples + 1, device=group.device)), samples)

    def over_group(x: Tensor) -> Tensor:
        return runs.sum(torch.where(keep, x, 0.0)[order])[group]

    given = rewards.detach().double()
    count = over_group(torch.ones_like(given))
    mean = over_group(given) / count.clamp(min=1.0)
    deviation = torch.where(keep, given - mean, 0.0)
    std = (over_group(deviation * deviation) / count.clamp(min=1.0)).sqrt()
    if alone == "reward":
        mean, std = torch.where(count > 1.0, mean, 0.0), torch.where(count == 1.0, 1.0, std)
    centered = torch.where(keep, given - mean, 0.0)
    return FilteredGroups(mean.to(dtype), std.to(dtype), count.to(torch.int64), centered.to(dtype))
