"""Recorders of the torch operations of a call and of the compile keys of its launches."""

from __future__ import annotations

import contextlib
from collections import Counter
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rollout_corr as rc
from rollout_corr.backends import first_call
from rollout_corr.kernels.launches import Launch

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")


class Operations(TorchDispatchMode):
    """Record the names of the torch operations that are called, and of those that wait for a device."""

    def __init__(self):
        super().__init__()
        self.names, self.waits = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.append(name)
        by_mask = str(func) == "aten.index.Tensor" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if by_mask or name.startswith(WAITING):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


FREE = {"promote_types", "empty", "view", "select", "detach", "slice", "as_strided", "alias", "_to_copy"}


def key(launch):
    """Give everything of a launch that a compilation depends on."""

    def kind(x):
        if isinstance(x, torch.Tensor):
            return x.dtype, x.data_ptr() % 16
        return tuple(map(kind, x)) if isinstance(x, tuple) else type(x)

    constants = {name: x for name, x in launch.arguments.items() if name.isupper()}
    others = {name: kind(x) for name, x in launch.arguments.items() if not name.isupper()}
    return launch.kernel.__name__, tuple(constants.items()), tuple(others.items())


@contextlib.contextmanager
def counted_launches():
    """Count the launches by the type of their device."""
    run, count = Launch.run, Counter()

    def counted(launch):
        run(launch)
        count[launch.device.type] += 1

    with mock.patch.object(Launch, "run", counted):
        yield count


def first_calls():
    """Let the kernels be compared with plain torch, as the first calls of a process do: the others launch their own."""
    train, rollout = (-torch.rand(4, 16, device="cuda") for _ in range(2))
    found = rc.correct(train, rollout, spec=rc.Spec(rc.Weight.token(upper=2.0)))
    rc.policy_loss(train.requires_grad_(), torch.ones(4, device="cuda"), old_logp=rollout, correction=found)
    assert {call for call, _ in first_call.COMPARED} == {"correct", "policy_loss"}
