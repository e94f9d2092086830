"""Groups of sequences, such as the samples of one prompt: read from an index per sequence, or from their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batch import OFFSETS, SequenceGroups
from .layouts import dtype_of, shape_of

if TYPE_CHECKING:
    from .given import Groups


def read_groups(
    given: Groups | None, wants: str | None, sequences: int, device: torch.device, over_ranks: bool, validate: bool
) -> SequenceGroups | None:
    """Check the groups of a call, and refuse none where something needs them: `wants`, in words.

    With `over_ranks` there is a batch group, on whose ranks the others of a group may be; `validate` checks the values
    of an index on a device too.
    """
    if given is None:
        if wants is not None:
            raise ValueError(f"groups: expected rc.Groups(index=...) or rc.Groups(size=...) for {wants}, got None")
        return None
    if given.size is not None:
        return _of_size(given.size, sequences, device)
    index = _checked(given.index, sequences, device)
    if over_ranks and given.count is None and wants is not None:
        raise ValueError(
            "groups.count: expected the number of groups on all ranks of ranks.batch, which add up their groups, got "
            "None"
        )
    count = sequences if given.count is None else given.count
    if (index.device.type == "cpu" or validate) and not torch.compiler.is_compiling() and index.numel():
        low, high = (int(x) for x in torch.aminmax(index))
        if low < 0 or high >= count:
            raise ValueError(
                f"groups.index: expected numbers from 0 to {count - 1} ("
                f"{'as many as sequences' if given.count is None else 'groups.count'}), got {low} to {high}"
            )
    return SequenceGroups(index, count, whole=False)


def _of_size(size: int, sequences: int, device: torch.device) -> SequenceGroups:
    if sequences % size:
        raise ValueError(f"groups.size: expected a divisor of the {sequences} sequences, got {size}")
    index = torch.arange(sequences, device=device) // size
    return SequenceGroups(index, sequences // size, whole=True)


def _checked(index: object, sequences: int, device: torch.device) -> Tensor:
    if not isinstance(index, Tensor):
        raise TypeError(f"groups.index: expected a tensor, got {type(index).__name__}")
    if index.dtype not in OFFSETS:
        raise ValueError(f"groups.index: expected int32 or int64, got {dtype_of(index)}")
    if tuple(index.shape) not in ((sequences,), (sequences, 1)):
        raise ValueError(f"groups.index: expected shape [{sequences}] or [{sequences}, 1], got {shape_of(index)}")
    if index.device != device:
        raise ValueError(f"groups.index: expected device {device}, got {index.device}")
    return index.detach().reshape(-1).long()
