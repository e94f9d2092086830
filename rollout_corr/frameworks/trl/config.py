"""TRL's GRPOConfig."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.settings import boolean, settings_of
from rollout_corr.frameworks.shared.specs import is_off_policy, level_of
from rollout_corr.frameworks.trl import presets
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.validate import number, one_of

# Settings of the loss, by TRL's names and with its defaults.
LOSS: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "importance_sampling_level": "token",
    "max_completion_length": 512,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "off_policy_mask_threshold": None,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
KNOWN = LOSS | {
    "loss_type": "dapo",
    # False in TRL, where nothing is corrected then: whoever reads a few settings of the correction means it.
    "use_vllm": True,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
# Keys that stand in a whole GRPOConfig, with many that do not concern this package.
WHOLE = (
    *(
        "output_dir",
        "learning_rate",
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "model_init_kwargs",
    ),
    *("gradient_accumulation_steps", "num_generations", "num_iterations", "temperature", "scale_rewards", "vllm_mode"),
    *("generation_batch_size", "steps_per_generation", "mask_truncated_completions", "bf16", "model_name_or_path"),
)
OLD_CAP, CLIP_MAX = "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"


def read(config: object) -> Spec:
    """Read the correction: `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
    found = loss(settings(config)).spec
    return Spec() if found is None else found


def write(spec: Spec) -> dict[str, Any]:
    """Write `vllm_importance_sampling_*` and `off_policy_mask_threshold`."""
    return written(spec, ("token", "sequence"))


def written(spec: Spec, levels: Collection[str]) -> dict[str, Any]:
    """Write the settings, with the levels of weights that a framework has."""
    masked = next((c for c in spec.criteria if is_off_policy(c)), None)
    gate = next((c for c in spec.criteria if c is not masked), None)
    made: dict[str, Any] = {
        "vllm_importance_sampling_correction": spec.weight is not None,
        "off_policy_mask_threshold": None if masked is None else masked.high,
    }
    level = None if spec.weight is None else level_of(spec.weight)
    if spec.weight is None or level is None or level not in levels:
        return made
    bounds: Weight | Criterion = spec.weight if gate is None else gate
    return made | {
        "vllm_importance_sampling_mode": f"{level}_{'truncate' if gate is None else 'mask'}",
        CLIP_MAX: bounds.high,
        "vllm_importance_sampling_clip_min": bounds.low,
    }


def recipe(config: object) -> Recipe:
    """Read the whole loss."""
    return loss(settings(config))


def settings(config: object, known: dict[str, Any] = KNOWN) -> dict[str, Any]:
    """Read the settings of a GRPOConfig, or of a mapping or namespace with its names."""
    given = settings_of(config, known, whole=WHOLE)
    if given[OLD_CAP] is not None:
        warn_once(("trl", OLD_CAP), f"trl: {OLD_CAP} is an old name; write {CLIP_MAX}: {given[OLD_CAP]!r}")
        given[CLIP_MAX] = given[OLD_CAP]
    return given


def loss(given: dict[str, Any], build: Callable[..., Recipe] = presets.loss) -> Recipe:
    """Return the loss that settings of TRL ask for, which `build` makes."""
    loss_type = given["loss_type"]
    one_of("loss_type", loss_type, presets.MEANS)
    if number("top_entropy_quantile", given["top_entropy_quantile"]) < 1.0:
        raise ValueError("top_entropy_quantile: needs the whole distribution; pass a mask of your own")
    if number("entropy_coef", given["entropy_coef"]) != 0.0 or boolean(
        "use_adaptive_entropy", given["use_adaptive_entropy"]
    ):
        raise ValueError("entropy_coef: needs the whole distribution; add the bonus to the value of policy_loss")
    chosen = {name: given[name] for name in LOSS}
    corrected = boolean("vllm_importance_sampling_correction", given["vllm_importance_sampling_correction"])
    chosen["vllm_importance_sampling_correction"] = corrected and boolean("use_vllm", given["use_vllm"])
    if loss_type == "cispo" and given["epsilon_high"] is None:
        # The recipe's default is the 5.0 that TRL recommends; TRL itself takes epsilon.
        chosen["epsilon_high"] = given["epsilon"]
    return build(
        loss_type,
        **chosen,
        clip_max=given[CLIP_MAX],
        clip_min=given["vllm_importance_sampling_clip_min"],
    )
