"""Drop-in for TRL: the ratio that GRPOTrainer multiplies its loss by, its off-policy mask, and AsyncGRPOTrainer's loss.

TRL forms the ratio in the middle of `_generate_and_score_completions`. That method still runs; the ratio in what it
returns is ours, by the trainer's `vllm_importance_sampling_mode` or by any Spec. GRPOTrainer's loss stays TRL's.
`asynchronous` has AsyncGRPOTrainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api.correct import Correction, correct
from ...backends.choose import BackendName
from ...specs.correction import Spec
from ...specs.validate import number
from ..shared.dropin import DumpPath, Installed, Logged, Target
from ..shared.imports import lacks
from ..shared.preset import PRESETS
from ..shared.settings import cached_spec
from . import asynchronous
from .asynchronous import DROP_IN
from .config import MODES

MODULE = "trl.trainer.grpo_trainer"

installed, uninstall = DROP_IN.installed, DROP_IN.uninstall


@DROP_IN.documents
def install(
    *,
    spec: Spec | None = None,
    delta: float | None = None,
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
    warnings: bool = True,
    dump: DumpPath = None,
    every: int = 100,
) -> Installed:
    """Replace what TRL's trainers correct with, in this process; call it before the trainer trains.

    Args:
        spec: A correction of its own. In GRPOTrainer it stands in place of `vllm_importance_sampling_mode`
            with its bounds; what it rejects gets the ratio 0. AsyncGRPOTrainer has one ratio, of the trained policy
            to the engine, and multiplies by that already: there the criteria reject by it. No denominator changes.
            Its metrics are logged too, under "rollout_corr/".
        delta: In AsyncGRPOTrainer the ratio is at most this, also where the advantage is negative and TRL has no bound.
    """
    if delta is not None and number("delta", delta) < 1.0:
        raise ValueError(f"delta: expected None or a bound of at least 1, got {delta!r}")
    targets = TARGETS if lacks(asynchronous.MODULE) else (*TARGETS, *asynchronous.TARGETS)
    return DROP_IN.install(targets, dump, every, warnings, spec=spec, delta=delta, metrics=metrics, backend=backend)


# --- the replacements ---


def importance_sampling_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
    spec: Spec | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Return the ratio that multiplies the loss of a token, by TRL's settings or by a Spec used in place of the three.

    Tensors are [B, T]. Where the engine gave NaN as log-prob the ratio is 1.

    Returns:
        [B, T], or [B, 1] in the sequence modes, of the dtype that the log-probs promote to; no gradient. What stands
        behind the mask is what TRL has there: the ratio 1, bounded.
    """
    logps = old_per_token_logps, sampling_per_token_logps
    ratio, found = _ratio(*logps, mask, (mode, clip_max, clip_min), spec, backend, None)
    DROP_IN.seen(found.metrics_async(), *logps, mask)
    return ratio


def _ratio(
    old: Tensor,
    sampling: Tensor,
    mask: Tensor,
    settings: tuple[str, float | None, float | None],
    spec: Spec | None,
    backend: BackendName,
    advantages: Tensor | None,
) -> tuple[Tensor, Correction]:
    """Return the ratio, and the correction that it is of."""
    mode, *_ = settings
    run = _spec_of(*settings) if spec is None else spec
    out = correct(old, sampling, mask=mask, spec=run, advantages=advantages, backend=backend)
    dtype = torch.promote_types(old.dtype, sampling.dtype)
    ratio = torch.ones_like(old, dtype=dtype) if out.weights is None else out.weights.to(dtype)
    valid = mask != 0
    if run.rejected != "zero":
        ratio = torch.where(valid & (out.mask == 0), 0.0, ratio)
    masked = _bounded_one(*settings) if spec is None else 1.0
    if spec is None and mode.startswith("sequence"):
        ratio, valid = ratio.amax(dim=-1, keepdim=True), valid.any(dim=-1, keepdim=True)
    return torch.where(valid, ratio, masked), out


def get_off_policy_mask(
    advantages: Tensor,
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    off_policy_threshold: float,
    **switches: object,
) -> Tensor:
    """Mark the sequences that are kept: A >= 0, or a mean(sampling - current) of at most the threshold.

    Log-probs and mask are [B, T], advantages [B, 1] or [B, T]; a token whose difference is NaN or infinite counts as 0.
    Returns 1 and 0 in the dtype of the mask: [B, 1], or [B, T] for advantages per token.
    """
    # Not by `correct`, which would collect statistics that are not needed here.
    chosen = mask != 0
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    gap = sampling_per_token_logps.to(dtype) - per_token_logps.detach().to(dtype)
    gap = torch.where(chosen & gap.isfinite(), gap, 0.0)
    mean = gap.sum(dim=1, keepdim=True) / chosen.sum(dim=1, keepdim=True).clamp(min=1)
    return ((mean <= off_policy_threshold) | (advantages >= 0)).to(mask.dtype)


def _replaced(
    original: Callable[..., Any],
    spec: Spec | None = None,
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
    **switches: object,
) -> Callable[..., Any]:
    def generate_and_score_completions(self: Any, inputs: Any) -> Any:
        output = original(self, inputs)
        if "importance_sampling_ratio" not in output:
            off = "vllm_importance_sampling_correction" if self.use_vllm else "use_vllm"
            DROP_IN.say_skipped(f"{off} is off")
            return output
        mode = self.vllm_importance_sampling_mode
        clip_max, clip_min = self.vllm_importance_sampling_clip_max, self.vllm_importance_sampling_clip_min
        described = f"vllm_importance_sampling_mode {mode!r}, clip_max {clip_max!r}, clip_min {clip_min!r}"
        if spec is None:
            DROP_IN.say(True, described)
        else:
            DROP_IN.say_spec(spec)
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        logps = output["old_per_token_logps"], output["sampling_per_token_logps"]
        settings, advantages = (mode, clip_max, clip_min), output.get("advantages")
        ratio, found = _ratio(*logps, mask, settings, spec, backend, advantages)
        output["importance_sampling_ratio"] = ratio
        pending = found.metrics_async()
        _log(self, ratio, mask)
        if spec is not None:
            asynchronous.log_spec(self, _logged(self), found.statistics, metrics)
        # The metrics above were waited for, so the statistics have arrived.
        DROP_IN.seen(pending, *logps, mask, token_ids=output.get("completion_ids"))
        return output

    return generate_and_score_completions


def _logged(trainer: Any) -> Any:
    return trainer._metrics["train" if trainer.model.training else "eval"]


def _log(trainer: Any, ratio: Tensor, mask: Tensor) -> None:
    """Log the ratio in use under TRL's keys, over those of TRL's own ratio."""
    chosen = ratio.flatten() if ratio.shape != mask.shape else ratio[mask != 0]
    some = chosen if chosen.numel() else chosen.new_zeros(1)
    gathered = trainer.accelerator.gather(torch.stack([some.min(), some.mean(), some.max()])).view(-1, 3)
    ends = gathered[:, 0].min(), gathered[:, 1].mean(), gathered[:, 2].max()
    for name, value in zip(("min", "mean", "max"), torch.stack(ends).tolist(), strict=True):
        _logged(trainer)[f"sampling/importance_sampling_ratio/{name}"][-1:] = [value]


TARGETS = (
    Target(MODULE, "GRPOTrainer._generate_and_score_completions", _replaced, takes_original=True),
    Target(MODULE, "GRPOTrainer.get_off_policy_mask", get_off_policy_mask),
)


@cached_spec
def _spec_of(mode: str, clip_max: float | None, clip_min: float | None) -> Spec:
    if mode not in MODES:
        raise ValueError(f"vllm_importance_sampling_mode: expected one of {list(MODES)}, got {mode!r}")
    return PRESETS[f"trl.{mode}"].build(clip_max=clip_max, clip_min=clip_min)


def _bounded_one(mode: str, clip_max: float | None, clip_min: float | None) -> float:
    """Return the bounded ratio of a masked token, 1 before its bounds, as in TRL; VESPO takes its logarithm."""
    low, high = 0.0 if clip_min is None else clip_min, float("inf") if clip_max is None else clip_max
    bounded = min(max(1.0, low), high)
    return 0.0 if mode.endswith("mask") and bounded != 1.0 else bounded
