"""ms-swift's arguments of `swift rlhf --rlhf_type grpo`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.settings import boolean, settings_of
from rollout_corr.frameworks.shared.specs import is_off_policy, off_policy
from rollout_corr.frameworks.swift import presets
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.validate import number, one_of

LOSS: dict[str, Any] = {
    "loss_type": "grpo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": None,
    "importance_sampling_level": "token",
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "max_completion_length": 512,
}
# Of loss_type real alone.
OF_REAL: dict[str, Any] = {"real_tau": 0.5, "num_generations": 8}
KNOWN = (
    LOSS
    | OF_REAL
    | {
        "rollout_importance_sampling_mode": None,
        "rollout_importance_sampling_threshold": 2.0,
        "off_policy_sequence_mask_delta": None,
        "kl_in_reward": False,
        "top_entropy_quantile": 1.0,
        "sdar_loss_coef": 0.0,
        "chord_sft_dataset": (),
    }
)
# Keys that stand in whole arguments, with many that do not concern this package.
WHOLE = (
    *("rlhf_type", "model", "output_dir", "learning_rate", "dataset", "reward_funcs", "use_vllm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "temperature"),
)


def spec(mode: str | None, threshold: float, delta: float | None) -> Spec | None:
    """Return the correction of a mode with its threshold, and of `off_policy_sequence_mask_delta`."""
    found = None
    if mode is not None:
        one_of("rollout_importance_sampling_mode", mode, presets.MODES, or_null=True)
        found = lookup.named(f"swift.{mode}", threshold=threshold)
    if delta is None:
        return found
    criterion = off_policy(delta, token_clamp=presets.TOKEN_CLAMP)
    found = Spec() if found is None else found
    return replace(found, criteria=(*found.criteria, criterion))


def read(config: object) -> Spec:
    """Read `rollout_importance_sampling_*` and `off_policy_sequence_mask_delta`."""
    found = recipe(config).spec
    return Spec() if found is None else found


def write(spec: Spec) -> dict[str, Any]:
    """Write `rollout_importance_sampling_*` and `off_policy_sequence_mask_delta`."""
    masked = next((c for c in spec.criteria if is_off_policy(c)), None)
    gate = next((c for c in spec.criteria if c is not masked), None)
    made: dict[str, Any] = {
        "rollout_importance_sampling_mode": None,
        "off_policy_sequence_mask_delta": None if masked is None else masked.high,
    }
    if spec.weight is None:
        return made
    mode, bounds = f"{spec.weight.over}_truncate", spec.weight.high
    if gate is not None:
        mode, bounds = f"{gate.over}_mask", gate.high
    made["rollout_importance_sampling_mode"] = mode if mode in presets.MODES else None
    return made if bounds is None else made | {"rollout_importance_sampling_threshold": bounds}


def recipe(config: object) -> Recipe:
    """Read the whole loss."""
    given = settings_of(config, KNOWN, whole=WHOLE)
    if number("top_entropy_quantile", given["top_entropy_quantile"]) < 1.0:
        raise ValueError("top_entropy_quantile: needs the whole distribution; pass a mask of your own")
    if number("sdar_loss_coef", given["sdar_loss_coef"]) != 0.0 or given["chord_sft_dataset"]:
        raise ValueError("sdar_loss_coef, chord_sft_dataset: add these losses to the value of policy_loss")
    mode, delta = given["rollout_importance_sampling_mode"], given["off_policy_sequence_mask_delta"]
    if delta is not None and given["loss_type"] == "bnpo" and str(mode).endswith("_mask"):
        raise ValueError(
            "off_policy_sequence_mask_delta: with bnpo and a mode that masks, one leaves the mask and the other has "
            "weight 0; no Spec does both"
        )
    chosen = {name: given[name] for name in LOSS}
    # 0.04 is what ms-swift makes of no beta.
    chosen["beta"] = 0.04 if given["beta"] is None else number("beta", given["beta"])
    if boolean("kl_in_reward", given["kl_in_reward"]):
        chosen["beta"] = 0.0
    if given["loss_type"] == "real":
        if delta is not None:
            raise ValueError(
                "off_policy_sequence_mask_delta: with real a sequence that it masks stays among those with A <= 0, "
                "with a score of 0; no Spec does that"
            )
        return presets.real(given["real_tau"], chosen["beta"], given["num_generations"])
    return presets.loss(spec(mode, given["rollout_importance_sampling_threshold"], delta), **chosen)
