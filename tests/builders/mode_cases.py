"""Modes of torch in which a call has to give what it gives without them, and calls whose answers compare to the bit."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import rollout_corr as rc
from builders.batches import Laid
from builders.same_bits import in_hex


@contextlib.contextmanager
def _set(change: Callable[[Any], None], value: object, before: object) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


# The meta device has no values, so that whatever is made there and used fails at once.
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: _set(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "default float64": lambda: _default_dtype(torch.float64),
    "default bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default float16": lambda: _default_dtype(torch.float16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}
# Of an inference tensor, and without a graph, there is no derivative to compare.
WITHOUT_GRADIENT = ("inference", "no_grad")


def _metrics(found: dict[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in found.items()}


def call_correct(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Weights, mask and decisions."""
    out = laid.correct(spec)
    devices = {x.device.type for x in (out.keep, out.statistics.sums)}
    weights = None if out.weights is None else in_hex(laid.read(out.weights))
    return weights, laid.read(out.mask), out.keep.tolist(), devices


def call_metrics(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Metrics, and those of two statistics merged."""
    found = laid.correct(spec).statistics
    return _metrics(found.metrics()), _metrics(rc.Statistics.sum([found, found]).metrics())


def call_policy_loss(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Value, gradient and metrics of a loss with its correction inside."""
    new = laid.train
    if gradient:
        with torch.enable_grad():
            new = [x.clone().requires_grad_() for x in new] if isinstance(new, list) else new.clone().requires_grad_()
    versions = rc.Versions(laid.versions, laid.current_version) if spec.reads_versions else None
    out = rc.policy_loss(
        new,
        laid.advantages,
        rc.Batch(mask=laid.mask, cu_seqlens=laid.cu_seqlens, external=laid.external, versions=versions),
        rc.Loss(rc.PPO()),
        old_logp=laid.train,
        rollout_logp=laid.rollout,
        spec=spec,
    )
    slopes = None
    if gradient:
        found = torch.autograd.grad(out.value, new)
        slopes = in_hex(laid.read(list(found) if isinstance(new, list) else found[0]))
    return float(out.value.detach()).hex(), slopes, _metrics(out.metrics())


def call_filter_groups(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Rewards centered by group."""
    keep = laid.correct(spec).keep
    count = keep.shape[0]
    rewards = torch.linspace(-1.0, 2.0, count, dtype=torch.float32, device="cpu")
    found = rc.filter_groups(rewards, keep, torch.arange(count, device="cpu") // 2)
    return [None if x is None else x.tolist() for x in found]


def call_dump(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """The lines and the tensors of a dump."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder, "x.jsonl"), Path(folder, "shards")):
            done = rc.dump(
                path, laid.train, laid.rollout, mask=laid.mask, cu_seqlens=laid.cu_seqlens, sequences=3, seed=1, step=2
            )
            done.result(60)
        lines = [json.loads(line) for line in Path(folder, "x.jsonl").read_text().splitlines()]
        shards = [torch.load(path, weights_only=True, map_location="cpu") for path in Path(folder).glob("shards/*.pt")]
        return repr(lines), [{name: (str(x.dtype), repr(x.tolist())) for name, x in shard.items()} for shard in shards]


CALLS: dict[str, Callable[[Laid, rc.Spec, bool], object]] = {
    "correct": call_correct,
    "metrics": call_metrics,
    "policy_loss": call_policy_loss,
    "filter_groups": call_filter_groups,
    "dump": call_dump,
}


def difference(call: str, modes: list[str], laid: Laid, spec: rc.Spec) -> str:
    """Compare a call in some modes with the call in none; empty where both answer alike."""
    gradient = not set(modes) & set(WITHOUT_GRADIENT)
    wanted = CALLS[call](laid, spec, gradient)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(MODES[mode]())
        found = CALLS[call](laid, spec, gradient)
    return "" if found == wanted else f"{call} in {modes}: {found!r:.300} for {wanted!r:.300}"
