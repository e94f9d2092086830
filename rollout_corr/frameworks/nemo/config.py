"""NeMo RL's `loss_fn` (ClippedPGLossConfig), with `seq_logprob_error_threshold` of its `grpo`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_corr.frameworks.nemo.presets import clipped, geometric_gate, kl, level_mean
from rollout_corr.frameworks.shared.recipe import Recipe, around_one
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, settings_of
from rollout_corr.frameworks.shared.specs import LEVELS, level_of
from rollout_corr.specs.choices import Outside
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GPG, GSPO
from rollout_corr.specs.validate import number, one_of

TYPES = ("tis", "icepop", "seq-mask-tis")
# The settings of the loss beside those of `spec`, with the defaults of ClippedPGLossConfig.
LOSS: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
# Keys of the block `grpo`, which has many more.
OF_GRPO = ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "max_num_epochs", "adv_estimator")


def spec(
    use_importance_sampling_correction: bool = False,
    sequence_level_importance_ratios: bool = False,
    truncated_importance_sampling_type: str | None = None,
    truncated_importance_sampling_ratio: float | None = None,
    truncated_importance_sampling_ratio_min: float | None = None,
    seq_logprob_error_threshold: float | None = None,
) -> Spec:
    """The correction as a Spec; the arguments are NeMo's, with its defaults."""
    kind, ratio, least = (
        truncated_importance_sampling_type,
        truncated_importance_sampling_ratio,
        truncated_importance_sampling_ratio_min,
    )
    used = boolean("use_importance_sampling_correction", use_importance_sampling_correction)
    whole = boolean("sequence_level_importance_ratios", sequence_level_importance_ratios)
    if kind is not None:
        one_of("truncated_importance_sampling_type", kind, TYPES, or_null=True)
        if not used:
            raise ValueError("truncated_importance_sampling_type: needs use_importance_sampling_correction: true")
        if ratio is None or (least is None and kind != "tis"):
            missing = "" if ratio is None else "_min"
            raise ValueError(f"truncated_importance_sampling_ratio{missing}: expected a number with type {kind!r}")
        if kind == "seq-mask-tis" and whole:
            raise ValueError("truncated_importance_sampling_type: 'seq-mask-tis' weighs tokens, as NeMo says")
    elif ratio is not None:
        raise ValueError(
            "truncated_importance_sampling_type: expected one of "
            f"{list(TYPES)} beside truncated_importance_sampling_ratio={ratio!r}, got None"
        )
    if kind == "seq-mask-tis":
        if seq_logprob_error_threshold is not None:
            raise ValueError(
                "seq_logprob_error_threshold: masks sequences before they are counted, and 'seq-mask-tis' weighs "
                "them by 0; no Spec does both"
            )
        return geometric_gate(least, ratio)
    weight = None
    if used:
        outside: Outside = "zero" if kind == "icepop" else "clamp"
        # Without a type NeMo bounds nothing.
        lower = None if kind is None else least
        weight = Weight(*LEVELS["sequence" if whole else "token"], lower=lower, upper=ratio, outside=outside)
    criteria: tuple[Criterion, ...] = ()
    if seq_logprob_error_threshold is not None:
        criteria = (Criterion("ratio_error", over="sequence", reduce="mean", upper=seq_logprob_error_threshold),)
    return Spec(weight=weight, criteria=criteria)


OF_SPEC = defaults_of(spec)


def read(config: object) -> Spec:
    """Read the block `loss_fn`, or a configuration that holds it, with or without the block `grpo`."""
    given = _settings(config)
    return spec(**{name: given[name] for name in OF_SPEC})


def write(spec: Spec) -> dict[str, Any]:
    """Write the blocks `loss_fn` and `grpo`."""
    weight, kind = spec.weight, None
    error = next((c for c in spec.criteria if c.stat == "ratio_error"), None)
    gate = next((c for c in spec.criteria if c is not error), None)
    made: dict[str, Any] = {
        "use_importance_sampling_correction": weight is not None,
        "sequence_level_importance_ratios": weight is not None and level_of(weight) == "sequence",
    }
    ratio: Weight | Criterion | None = weight if gate is None else gate
    if gate is not None:
        kind = "seq-mask-tis" if gate.over == "sequence" else "icepop"
    elif weight is not None and weight.high is not None:
        kind = "icepop" if weight.outside == "zero" else "tis"
    made["truncated_importance_sampling_type"] = kind
    if ratio is not None and kind is not None:
        made["truncated_importance_sampling_ratio"] = ratio.high
        made["truncated_importance_sampling_ratio_min"] = ratio.low
    return {"loss_fn": made, "grpo": {"seq_logprob_error_threshold": None if error is None else error.high}}


def recipe(config: object) -> Recipe:
    """Read the whole loss. With `force_on_policy_ratio`, `old_logp` is to be `new_logp.detach()`."""
    given = _settings(config)
    found = spec(**{name: given[name] for name in OF_SPEC})
    tokens = boolean("token_level_loss", given["token_level_loss"])
    masks = given["seq_logprob_error_threshold"] is not None
    if number("positive_example_nll_weight", given["positive_example_nll_weight"]) != 0.0:
        raise ValueError("positive_example_nll_weight: add this loss to the value of policy_loss")
    mean = replace(level_mean(tokens), over="kept" if masks else "original")
    return Recipe(found if found.acts else None, Loss(_surrogate(given, tokens), mean, _kl(given)))


def _settings(config: object) -> dict[str, Any]:
    return settings_of(config, OF_SPEC | LOSS, blocks=[("loss_fn",), ("grpo",)], whole=OF_GRPO)


def _surrogate(given: dict[str, Any], tokens: bool) -> Surrogate:
    low, high, dual = given["ratio_clip_min"], given["ratio_clip_max"], given["ratio_clip_c"]
    whole, plain, forced = (
        boolean(name, given[name])
        for name in ("sequence_level_importance_ratios", "disable_ppo_ratio", "force_on_policy_ratio")
    )
    if whole and tokens:
        raise ValueError(
            "sequence_level_importance_ratios: needs token_level_loss: false, as NeMo does; the mean is then over "
            "sequences"
        )
    if boolean("use_cispo", given["use_cispo"]):
        if plain or forced or whole or dual is not None or not tokens:
            raise ValueError(
                "use_cispo: NeMo refuses it beside disable_ppo_ratio, force_on_policy_ratio, "
                "sequence_level_importance_ratios, ratio_clip_c and token_level_loss: false"
            )
        return around_one(low, high)
    if forced:
        return clipped(low, high, dual)
    if plain:
        return GPG()
    return GSPO(low, high, dual) if whole else clipped(low, high, dual)


def _kl(given: dict[str, Any]) -> Any:
    if boolean("use_kl_in_reward", given["use_kl_in_reward"]):
        return None
    coefficient = number("reference_policy_kl_penalty", given["reference_policy_kl_penalty"])
    if coefficient == 0.0:
        return None
    if given["reference_policy_kl_type"] != "k3":
        raise ValueError(
            "reference_policy_kl_type: expected 'k3', got "
            f"{given['reference_policy_kl_type']!r}: no KL of this package has the gradient that NeMo gives it"
        )
    if boolean("use_on_policy_kl_approximation", given["use_on_policy_kl_approximation"]):
        raise ValueError(
            "use_on_policy_kl_approximation: weighs the KL by new/rollout and the loss by new/old; no KL here does"
        )
    return kl(coefficient, given["kl_input_clamp_value"], given["kl_output_clamp_value"])
