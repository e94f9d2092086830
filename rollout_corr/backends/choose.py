"""The backend that runs a call, and the process groups that it runs over."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

from rollout_corr.backends import operators

BackendName = Literal["auto", "triton", "torch"]

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)


class Backend(NamedTuple):
    """A backend and the reason why it was chosen."""

    name: str
    reason: str


def backend_for(tensor: Tensor) -> Backend:
    """Say which backend `backend="auto"` takes for this tensor, and why.

    Args:
        tensor: Any tensor on the device in question.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    where = tensor.device.type
    if where not in operators.DEVICES:
        return Backend("torch", f"tensors on {where} run on the plain-torch reference")
    reason = operators.why_not(tensor.device)
    if reason is not None:
        return Backend("torch", reason)
    return Backend("triton", f"tensors on {where} run on the Triton kernels")


def chosen_backend(tensor: Tensor, backend: str) -> str:
    """Name the backend that runs for a tensor; raise if the one asked for cannot."""
    chosen = backend_for(tensor).name if backend == "auto" else backend
    if chosen == "triton" and (reason := operators.why_not(tensor.device)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch' for {tensor.device} tensors, got 'triton': {reason}")
    return chosen
