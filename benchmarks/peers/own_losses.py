"""Policy losses of TRL and SkyRL, by their own statements, read from the files of the installed version.

Importing them takes a minute and everything that they train with. Their losses need torch alone, so the functions are
cut out of their files and run as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.sources import Source

# The versions whose code was read.
VERSIONS = {"trl": "1.16.0", "skyrl": "0.3.0"}

TRAINER = "trl/trainer/grpo_trainer.py"
SKYRL = "skyrl/backends/skyrl_train/utils/ppo_utils.py"

Clip = tuple[float, float, float]


def missing(name: str) -> str:
    """Say why a framework's loss is absent; "" if it is there."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    if version != VERSIONS[name]:
        return f"{name} {version} is installed, and what is known here is {VERSIONS[name]}"
    return ""


def _source(name: str) -> Source:
    return Source(name, VERSIONS[name], Path(str(metadata.distribution(name).locate_file(""))), "installed")


def skyrl_function(source: Source) -> Callable[..., Any]:
    """Cut SkyRL's PPO, without the registry that decorates it."""
    return source.cut(SKYRL, "ppo_policy_loss", register_policy_loss=lambda name: lambda function: function)


def trl_function(source: Source) -> Callable[..., Any]:
    """Cut the part of TRL's loss behind the model. Its own extrema ignore NaN; there is none here."""
    whole = "GRPOTrainer._compute_loss"
    return source.lines(TRAINER, whole, "advantages = inputs", "return loss", nanmin=torch.min, nanmax=torch.max)


@cache
def _of_skyrl() -> Callable[..., Any]:
    return skyrl_function(_source("skyrl"))


@cache
def _of_trl() -> Callable[..., Any]:
    return trl_function(_source("trl"))


def skyrl_loss(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, cap: float, clip: Clip
) -> Callable[[], tuple[Tensor, object]]:
    """Return the call of `ppo_policy_loss` with dual clip, which makes truncated token weights itself."""
    low, high, dual = clip
    correction = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": cap, "sequence_mask_metric": None}
    bounds = [f"{kind}_is_threshold_{side}" for kind in ("outlier_token", "token_mask") for side in ("low", "high")]
    config = SimpleNamespace(
        policy_loss_type="dual_clip",
        eps_clip_low=low,
        eps_clip_high=high,
        clip_ratio_c=dual,
        off_policy_correction=SimpleNamespace(**correction, **dict.fromkeys(bounds)),
    )
    trains = (mask != 0).float()
    scaled, function = advantages / trains.sum(), _of_skyrl()
    return lambda: function(new, old, scaled, config, trains, rollout)


def trl_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, low: float, high: float
) -> Callable[[], tuple[Tensor, object]]:
    """Return the call of TRL's loss of type "dapo", its default, with its metrics; entropies are zeros."""
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trains = (mask != 0).to(torch.int64)
    inputs = {
        "advantages": advantages,
        "old_per_token_logps": old,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": trains.sum().float(),
    }
    entropies, function = torch.zeros_like(old), _of_trl()

    def call() -> tuple[Tensor, object]:
        metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
        trainer = SimpleNamespace(
            args=SimpleNamespace(delta=None, steps_per_generation=1),
            model=SimpleNamespace(training=True),
            accelerator=accelerator,
            loss_type="dapo",
            epsilon_low=low,
            epsilon_high=high,
            beta=0.0,
            importance_sampling_level="token",
            off_policy_mask_threshold=None,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics=metrics,
        )
        none = {"entropy_mask": None, "aux_loss": None}
        value = function(self=trainer, inputs=inputs, per_token_logps=new, entropies=entropies, mask=trains, **none)
        return value, metrics["train"]

    return call
