"""Groups of sequences, such as the samples of one prompt: read from an index per sequence, or from their size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends.batch import OFFSETS
from rollout_corr.backends.layouts import dtype_of, shape_of
from rollout_corr.definition.normalize import placed
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.validate import shown


class GroupsGiven(NamedTuple):
    """The groups as the caller gave them; None where an argument was not given.

    Attributes:
        numbers: `group_index`, the group of each sequence.
        size: `group_size`, the number of neighbours that are a group.
        total: `group_count`, the number of groups that can be named.
    """

    numbers: object = None
    size: object = None
    total: object = None

    def claims(self) -> dict[str, str]:
        """The parts that have to be equal on all ranks, as text by name."""
        index = "None" if self.numbers is None else "given"
        return {"group_index": index, "group_size": str(self.size), "group_count": str(self.total)}


def groups_given(numbers: object, size: object, total: object) -> GroupsGiven | None:
    """Put the three arguments of a call together; None where none is given."""
    return None if numbers is None and size is None and total is None else GroupsGiven(numbers, size, total)


def wanted_by(spec: Spec | None, surrogate: Surrogate | None = None) -> str | None:
    """Say in words what of a call needs groups; None: nothing does."""
    if surrogate is not None and surrogate.traits.sees == "groups":
        return f"the surrogate {surrogate!r}"
    if spec is None or not spec.needs_groups:
        return None
    return "a weight with normalize='group'" if spec.normalizes_groups else "a bound with within='group'"


class SequenceGroups(NamedTuple):
    """The group of each sequence of a batch.

    Attributes:
        numbers: [S] int64; outside 0 .. total - 1 they name no group.
        total: The number of groups.
        whole: Every group lies in this call, so nothing of it is on another rank of the batch group.
    """

    numbers: Tensor
    total: int
    whole: bool

    def placed(self) -> Tensor:
        """[S] int64: the numbers, and `total` for those that name no group."""
        return placed(self.numbers, self.total)


def read_groups(
    given: GroupsGiven | None, wants: str | None, sequences: int, device: torch.device, over_ranks: bool, validate: bool
) -> SequenceGroups | None:
    """Check the groups of a call, and refuse none where something needs them.

    Args:
        given: The arguments of the call.
        wants: What needs groups, in words; None: nothing does.
        sequences: How many there are in the batch.
        device: That of the batch.
        over_ranks: There is a batch group, on whose ranks the others of a group may be.
        validate: Look at the index on a device too; on the CPU that is always done.
    """
    if given is None:
        if wants is not None:
            raise ValueError(f"group_index: expected the group of each sequence, or group_size, for {wants}, got None")
        return None
    for name, x in (("group_size", given.size), ("group_count", given.total)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, int) or x < 1):
            raise ValueError(f"{name}: expected an integer above 0 or None, got {shown(x)}")
    if given.size is not None:
        return _of_size(given, sequences, device)
    if given.numbers is None:
        raise ValueError(f"group_count: expected None without group_index, got {given.total}")
    index = _checked(given.numbers, sequences, device)
    if over_ranks and given.total is None and wants is not None:
        raise ValueError(
            "group_count: expected the number of groups on all ranks beside a batch_group, whose ranks add up their "
            "groups, got None"
        )
    count = sequences if given.total is None else given.total
    assert isinstance(count, int)
    if (index.device.type == "cpu" or validate) and not torch.compiler.is_compiling() and index.numel():
        low, high = (int(x) for x in torch.aminmax(index))
        if low < 0 or high >= count:
            raise ValueError(
                f"group_index: expected numbers from 0 to {count - 1} ("
                f"{'as many as sequences' if given.total is None else 'group_count'}), got {low} to {high}"
            )
    return SequenceGroups(index, count, whole=False)


def _of_size(given: GroupsGiven, sequences: int, device: torch.device) -> SequenceGroups:
    for name, x in (("group_index", given.numbers), ("group_count", given.total)):
        if x is not None:
            raise ValueError(f"{name}: expected None beside group_size, got both")
    size = given.size
    assert isinstance(size, int)
    if sequences % size:
        raise ValueError(f"group_size: expected a divisor of the {sequences} sequences, got {size}")
    index = torch.arange(sequences, device=device) // size
    return SequenceGroups(index, sequences // size, whole=True)


def _checked(index: object, sequences: int, device: torch.device) -> Tensor:
    if not isinstance(index, Tensor):
        raise TypeError(f"group_index: expected a tensor, got {type(index).__name__}")
    if index.dtype not in OFFSETS:
        raise ValueError(f"group_index: expected int32 or int64, got {dtype_of(index)}")
    if tuple(index.shape) not in ((sequences,), (sequences, 1)):
        raise ValueError(f"group_index: expected shape [{sequences}] or [{sequences}, 1], got {shape_of(index)}")
    if index.device != device:
        raise ValueError(f"group_index: expected device {device}, got {index.device}")
    return index.detach().reshape(-1).long()
