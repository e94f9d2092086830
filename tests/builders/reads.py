"""Operations that wait for a device, counted."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "sort", "unique", "bincount")


class Reads(TorchDispatchMode):
    """Notes the names of operations that wait for a device, and of sorts."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        by_mask = name == "index.Tensor" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or name.startswith(WAITING):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))
