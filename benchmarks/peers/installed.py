"""Functions of installed frameworks, of the one version whose code was read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VERL_VERSION = "0.9.1"


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
    """Return verl's correction, or None and why it is absent."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return None, "verl is not installed"
    if version != VERL_VERSION:
        return None, f"verl {version} is installed, and what is known here is {VERL_VERSION}"
    with without_checkout():
        helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_correction_and_rejection_mask, ""


def verl_loss(clip: tuple[float, float, float]) -> Callable[..., Any]:
    """Return verl's vanilla PPO loss for (old, new, advantages, mask, weights), clipped at low, high and dual."""
    with without_checkout():
        algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
        actor = importlib.import_module("verl.workers.config").ActorConfig
    low, high, dual = clip
    config = actor(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )

    def loss(old: Any, new: Any, advantages: Any, mask: Any, weights: Any) -> Any:
        return algorithms.compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config, weights)

    return loss
