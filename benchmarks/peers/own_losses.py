"""Policy losses of TRL and SkyRL, by their own statements, read from the files of the installed version.

Importing them takes a minute and everything that they train with. Their losses need torch alone, so the functions are
cut out of their files and run as they are.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# The versions whose code was read.
VERSIONS = {"trl": "1.16.0", "skyrl": "0.3.0"}

TRAINER = "trl/trainer/grpo_trainer.py"
SKYRL = "skyrl/backends/skyrl_train/utils"
SKYRL_FILES = (f"{SKYRL}/torch_utils.py", f"{SKYRL}/off_policy_correction_utils.py", f"{SKYRL}/ppo_utils.py")

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


def _text(name: str, path: str) -> str:
    return Path(str(metadata.distribution(name).locate_file(path))).read_text()


def _run(functions: Sequence[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """Define functions, without what decorates them and says their types, and give their namespace."""
    for function in functions:
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = []
        function.returns = None
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    module = ast.fix_missing_locations(ast.Module(list(functions), []))
    exec(compile(module, "<cut>", "exec"), names)
    return names


def skyrl_functions(texts: Sequence[str]) -> dict[str, Any]:
    """Give all functions of SkyRL's files by name; only what one of them calls needs to work."""
    found = [one for text in texts for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    return _run(found, {"torch": torch})


def trl_function(text: str) -> Callable[..., Tensor]:
    """Give the part of `GRPOTrainer._compute_loss` behind the model: from the advantages to loss and metrics."""
    trainer = next(one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == "GRPOTrainer")
    whole = next(one for one in trainer.body if isinstance(one, ast.FunctionDef) and one.name == "_compute_loss")
    first = next(i for i, one in enumerate(whole.body) if ast.unparse(one).startswith("advantages = inputs"))
    whole.body = whole.body[first:]
    names = ("self", "inputs", "per_token_logps", "entropies", "mask", "entropy_mask", "aux_loss")
    whole.args.args = [ast.arg(name) for name in names]
    # TRL's own ignore NaN; there is none here.
    made = _run([whole], {"torch": torch, "nanmin": torch.min, "nanmax": torch.max})["_compute_loss"]
    return made


@cache
def _of_skyrl() -> dict[str, Any]:
    return skyrl_functions([_text("skyrl", path) for path in SKYRL_FILES])


@cache
def _of_trl() -> Callable[..., Tensor]:
    return trl_function(_text("trl", TRAINER))


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
    scaled, function = advantages / trains.sum(), _of_skyrl()["ppo_policy_loss"]
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
        return function(trainer, inputs, new, entropies, trains, None, None), metrics["train"]

    return call
