"""Who runs: ours, ours compiled, ours with verl's metrics, the hand-written torch version, and verl itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import rollout_corr as rc
from benchmarks import baseline
from benchmarks.cases import Inputs, Workload
from rollout_corr.backends.choose import BACKENDS

ROOT = Path(__file__).resolve().parent.parent

OURS = "rollout-corr"
COMPILED = "rollout-corr, compiled"
VERL_METRICS = "rollout-corr, verl's metrics"
BY_HAND = "torch by hand"
VERL = "verl"
ORDER = (OURS, COMPILED, VERL_METRICS, BY_HAND, VERL)

# The version whose function was read and whose metrics the gate knows.
VERL_VERSION = "0.9.1"


class Outcome(NamedTuple):
    """What one call gives back. `layout` is the layout of the tensors in it."""

    weights: Tensor | None
    mask: Tensor | None
    metrics: Mapping[str, float]
    layout: str


@dataclass(frozen=True)
class Contender:
    """Somebody to time.

    Args:
        name: One of ORDER.
        call: Runs once, outputs and metrics on the host included; None when absent.
        note: Why it is absent, or what is different about it.
    """

    name: str
    call: Callable[[], Outcome] | None
    note: str = ""


@contextmanager
def without_checkout() -> Iterator[None]:
    """Hide the root of the checkout from imports: its `kernels` is not the `kernels` that transformers looks for."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != ROOT]
    try:
        yield
    finally:
        sys.path[:] = before


@cache
def verl_function() -> tuple[Callable[..., Any] | None, str]:
    """verl's own function, or None and why not."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return None, "absent: verl is not installed"
    if version != VERL_VERSION:
        return None, f"absent: verl {version} is installed, and what is known here is {VERL_VERSION}"
    with without_checkout():
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_correction_and_rejection_mask, ""


def contenders(inputs: Inputs, layout: str, workload: Workload) -> list[Contender]:
    """Everybody, present or absent, bound to a batch."""
    return [
        _ours(OURS, inputs, layout, workload.spec),
        _compiled(inputs, layout, workload),
        _ours(VERL_METRICS, inputs, layout, rc.preset(workload.preset), names="verl"),
        _by_hand(inputs, layout, workload),
        _verl(inputs, layout, workload),
    ]


def _arguments(inputs: Inputs, layout: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(train, rollout, mask, cu_seqlens) in a layout."""
    if layout == "padded":
        return inputs.train, inputs.rollout, inputs.mask, None
    return inputs.packed_train, inputs.packed_rollout, None, inputs.cu_seqlens


def _ours(
    name: str, inputs: Inputs, layout: str, spec: rc.Spec, backend: str = "auto", names: str = "native"
) -> Contender:
    train, rollout, mask, cu_seqlens = _arguments(inputs, layout)

    def call() -> Outcome:
        out = rc.correct(train, rollout, mask, cu_seqlens=cu_seqlens, spec=spec, backend=backend)
        return Outcome(out.weights, out.mask, out.metrics(names), layout)

    return Contender(name, call)


def _compiled(inputs: Inputs, layout: str, workload: Workload) -> Contender:
    if "compiled" not in BACKENDS:
        return Contender(COMPILED, None, 'absent: this version has no backend="compiled"')
    return _ours(COMPILED, inputs, layout, workload.spec, backend="compiled")


def _by_hand(inputs: Inputs, layout: str, workload: Workload) -> Contender:
    train, rollout, mask, cu_seqlens = _arguments(inputs, layout)

    def call() -> Outcome:
        return Outcome(*baseline.correct(train, rollout, mask, cu_seqlens, workload.spec), layout)

    return Contender(BY_HAND, call)


def _verl(inputs: Inputs, layout: str, workload: Workload) -> Contender:
    function, reason = verl_function()
    if function is None:
        return Contender(VERL, None, reason)

    def call() -> Outcome:
        weights, mask, metrics = function(inputs.train, inputs.rollout, inputs.mask, **workload.verl)
        return Outcome(None if weights is None else weights.batch["rollout_is_weights"], mask, metrics, "padded")

    note = "" if layout == "padded" else "on the padded tensors: it has no packed form"
    return Contender(VERL, call, note)
