"""open-instruct's GRPOExperimentConfig: `rho_*`, and the settings of its loss."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.open_instruct.presets import by_divergence, by_sequence, by_token, cispo, corrected, kl
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, settings_of
from rollout_corr.frameworks.shared.specs import level_of
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import RatioOf, Surrogate
from rollout_corr.specs.surrogates import PPO
from rollout_corr.specs.validate import not_negative, one_of, positive


def spec(
    use_rho_correction: bool = True,
    rho_clamp_lower_bound: float = 0.0,
    rho_clamp_upper_bound: float = 2.0,
    rho_mask_lower_bound: float = 0.0,
    rho_mask_upper_bound: float = 0.0,
    rho_mask_sequence_level: bool = False,
    rho_mask_tv_divergence: bool = False,
) -> Spec:
    """The correction as a Spec; the arguments are open-instruct's, with its defaults. A bound of 0 is off."""
    if not boolean("use_rho_correction", use_rho_correction):
        return Spec()
    least, most = _bound("clamp_lower", rho_clamp_lower_bound), _bound("clamp_upper", rho_clamp_upper_bound)
    low, high = _bound("mask_lower", rho_mask_lower_bound), _bound("mask_upper", rho_mask_upper_bound)
    whole = boolean("rho_mask_sequence_level", rho_mask_sequence_level)
    criteria: tuple[Criterion, ...] = ()
    if low is not None or high is not None:
        if boolean("rho_mask_tv_divergence", rho_mask_tv_divergence):
            criteria = (by_divergence(low, high),)
        else:
            criteria = (by_sequence(low, high) if whole else by_token(low, high),)
    return corrected("geometric" if whole else "token", most, criteria, least)


def _bound(name: str, value: object) -> float | None:
    return not_negative(f"rho_{name}_bound", value) or None


OF_SPEC = defaults_of(spec)
OF_LOSS: dict[str, Any] = {
    "beta": 0.05,
    "clip_lower": 0.2,
    "clip_higher": 0.272,
    "kl_estimator": 2,
    "loss_denominator": "token",
    "loss_fn": "dapo",
    "load_ref_policy": True,
    "use_vllm_logprobs": False,
}
# Of the many other fields, some that show that a whole configuration is given.
WHOLE = ("alpha", "exp_name", "learning_rate", "num_epochs", "num_mini_batches", "per_device_train_batch_size", "seed")


def read(config: object) -> Spec:
    """Read GRPOExperimentConfig, or a mapping of its fields."""
    return _spec(settings_of(config, OF_SPEC | OF_LOSS, whole=WHOLE))


def write(spec: Spec) -> dict[str, Any]:
    """Write the fields `use_rho_correction` and `rho_*`."""
    weight, mask = spec.weight, next(iter(spec.criteria), None)
    if weight is None:
        return {"use_rho_correction": False}
    return {
        "use_rho_correction": True,
        **_written("clamp", weight),
        **(_written("mask", mask) if mask is not None else {"rho_mask_lower_bound": 0.0, "rho_mask_upper_bound": 0.0}),
        "rho_mask_sequence_level": level_of(weight) == "geometric",
        "rho_mask_tv_divergence": mask is not None and mask.stat == "ratio_deviation",
    }


def _written(name: str, bounds: Weight | Criterion) -> dict[str, float]:
    return {f"rho_{name}_lower_bound": bounds.low or 0.0, f"rho_{name}_upper_bound": bounds.high or 0.0}


def recipe(config: object) -> Recipe:
    """Read the whole loss. With `use_vllm_logprobs` the ratio is new/rollout."""
    given = settings_of(config, OF_SPEC | OF_LOSS, whole=WHOLE)
    found = _spec(given)
    of: RatioOf | None = None
    if boolean("use_vllm_logprobs", given["use_vllm_logprobs"]):
        if found.acts:
            raise ValueError("use_vllm_logprobs: open-instruct refuses it beside use_rho_correction")
        of = "new/rollout"
    surrogate: Surrogate = PPO(given["clip_lower"], given["clip_higher"], of=of)
    if one_of("loss_fn", given["loss_fn"], ("dapo", "cispo")) == "cispo":
        surrogate = cispo(given["clip_higher"], of)
    has_ref = boolean("load_ref_policy", given["load_ref_policy"])
    batch = {}
    if given["loss_denominator"] != "token":
        batch["total"] = positive("loss_denominator", float(given["loss_denominator"]))
    term = kl(given["beta"], given["kl_estimator"]) if has_ref else None
    return Recipe(found if found.acts else None, Loss(surrogate, kl=term), batch)


def _spec(given: dict[str, Any]) -> Spec:
    return spec(**{name: given[name] for name in OF_SPEC})
