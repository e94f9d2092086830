"""The backend of a tensor, and one table of runners for corrections and losses, whose rows `backend_for` prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.correction import Spec, no_spec
from ..specs.surrogate import Surrogate
from . import operators

BackendName = Literal["auto", "triton", "torch"]

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

VARIABLE = "ROLLOUT_CORR_BACKEND"


def wanted_by(environment: Mapping[str, str]) -> str:
    """Read the backend that an environment names for calls that say "auto"; ValueError if it names none."""
    found = environment.get(VARIABLE, "auto")
    if found not in BACKENDS:
        raise ValueError(f"{VARIABLE}: expected one of {list(BACKENDS)} in the environment, got {found!r}")
    return found


# Read at the import: compilers follow `chosen_backend`, and every call asks it.
WANTED = wanted_by(os.environ)


class Call(NamedTuple):
    """The facts that decide how a call runs."""

    backend: str  # "triton" or "torch", as `chosen_backend` names it
    beyond: str | None  # why the kernels leave it to plain torch; None: they do not
    on_cpu: bool
    compiling: bool  # a compiler follows it
    split: bool  # the tokens of its sequences lie on several ranks
    # The batch decides bounds in float64, whose sums round: a bound cuts where it was found by sums of the same order.
    at_once: bool = False


class Runner(NamedTuple):
    """A way in which calls run: `backends.run.CORRECTIONS` and `api.policy_loss.LOSSES` have its functions by name."""

    name: str
    when: Callable[[Call], bool]
    reason: str


# The first whose condition holds.
RUNNERS = (
    Runner(
        "split kernels",
        lambda call: call.split and call.backend == "triton" and call.beyond is None,
        "the Triton kernels, with one all-reduce of the sums of sequences",
    ),
    Runner("split", lambda call: call.split, "the definition twice, with one all-reduce of the sums of sequences"),
    Runner("kernels", lambda call: call.backend == "triton" and call.beyond is None, "the Triton kernels"),
    Runner(
        "operator",
        lambda call: call.compiling and call.on_cpu and call.beyond is None,
        "blocks of whole sequences, inside one operator of torch",
    ),
    Runner("traced", lambda call: call.compiling, "the definition on the whole batch, which the compiler follows"),
    Runner(
        "blocks",
        lambda call: call.on_cpu and not call.at_once,
        "the definition on blocks of whole sequences, which stay in cache",
    ),
    Runner("whole", lambda call: True, "the definition on the whole batch at once"),
)


@cached(maxsize=256)
def chosen(
    backend: str, beyond: str | None, on_cpu: bool, compiling: bool, split: bool = False, at_once: bool = False
) -> Runner:
    """The first row of the table that fits; the arguments are the fields of `Call`."""
    call = Call(backend, beyond, on_cpu, compiling, split, at_once)
    return next(runner for runner in RUNNERS if runner.when(call))


class Backend(NamedTuple):
    """A backend and the reason why it was chosen.

    Attributes:
        name: "triton" or "torch".
        runner: The row of the table of runners.
        reason: Why, in words.
    """

    name: str
    runner: str
    reason: str


def backend_for(tensor: Tensor, spec: Spec | None = None, surrogate: Surrogate | None = None) -> Backend:
    """Say which backend `backend="auto"` takes for this tensor, and why. ROLLOUT_CORR_BACKEND overrules "auto".

    Args:
        tensor: Any tensor on the device in question.
        spec: A Spec that `correct` or `policy_loss` is given; None: one that the kernels know.
        surrogate: The surrogate of a `policy_loss`; None: one that the kernels know.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    if spec is not None and not isinstance(spec, Spec):
        raise no_spec(spec, "a Spec or None")
    where = tensor.device.type
    backend = chosen_backend(tensor, "auto")
    beyond = None if spec is None else operators.beyond_kernels(spec)
    if surrogate is not None:
        beyond = beyond or _surrogate_beyond_kernels(surrogate)
    beyond = beyond or operators.of_double(backend, tensor.dtype)
    at_once = spec is not None and spec.asks_batch and tensor.dtype == torch.float64
    runner = chosen(backend, beyond, where == "cpu", torch.compiler.is_compiling(), at_once=at_once)
    reason = f"tensors on {where} run on {runner.reason}"
    if where in operators.DEVICES and runner.name != "kernels":
        forbidden = f"{VARIABLE}=torch" if WANTED == "torch" else None
        reason = f"{operators.why_not(tensor.device) or forbidden or beyond}; {reason}"
    return Backend("triton" if runner.name == "kernels" else "torch", runner.name, reason)


def _surrogate_beyond_kernels(surrogate: Surrogate) -> str | None:
    # A correction imports nothing of the loss.
    from ..specs.surrogate import Surrogate
    from ..specs.validate import shown
    from .loss_task import beyond_kernels

    if not isinstance(surrogate, Surrogate):
        raise TypeError(f"surrogate: expected a surrogate such as PPO(0.2, 0.2) or None, got {shown(surrogate)}")
    return beyond_kernels(surrogate, scaled=False)


def chosen_backend(tensor: Tensor, backend: str) -> str:
    """Name the backend that runs for a tensor; raise if the one asked for cannot."""
    device = tensor.device
    if backend == "auto":
        if WANTED == "torch":
            return WANTED
        on_gpu = device.type in operators.DEVICES
        if (on_gpu or WANTED == "triton") and (reason := operators.why_not(device)) is None:
            return "triton"
        if on_gpu and WANTED == "triton":
            raise ValueError(f"{VARIABLE}: expected 'auto' or 'torch' for {device} tensors, got 'triton': {reason}")
        return "torch"
    if backend == "triton" and (reason := operators.why_not(device)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch' for {device} tensors, got 'triton': {reason}")
    return backend
