"""TRL's GRPOConfig as unsloth's trainer reads it: more modes, another `beta`, and 0.28 for dapo."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.frameworks.trl import config as trl
from rollout_corr.frameworks.unsloth.presets import loss
from rollout_corr.specs.correction import Spec

KNOWN = trl.KNOWN | {"beta": 0.001, "loss_type": "bnpo"}


def read(config: object) -> Spec:
    """Read the correction: `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
    found = recipe(config).spec
    return Spec() if found is None else found


def write(spec: Spec) -> dict[str, Any]:
    """Write `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
    return trl.written(spec, LEVELS)


def recipe(config: object) -> Recipe:
    """Read the whole loss."""
    return trl.loss(trl.settings(config, KNOWN), loss)
