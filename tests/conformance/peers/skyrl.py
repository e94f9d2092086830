"""SkyRL: its correction, its losses, and the scaling of advantages by which it averages, called as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.declared import BF16, CLAMP, LEFT_OUT, NO_LOWER_CLAMP, REJECTS, Declared, among
from conformance.rows import (
    Result,
    Row,
    both,
    configuration,
    draw,
    loss_and_gradient,
    loss_of,
    of_loss,
    preset,
    recipe,
    report,
    spec_of,
)
from conformance.rows import Settings as ConformanceSettings
from conformance.sources import Source
from conformance.verl_parts import Settings
from rollout_corr.frameworks.shared.settings import Given
from rollout_corr.frameworks.skyrl import config, dropin, losses

DISTRIBUTION, PACKAGE, CHECKOUT = "skyrl", "skyrl", "skyrl"

CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
LOSSES = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
COMPUTE = "compute_off_policy_correction"
SCALE = "apply_loss_reduction_to_advantages_minibatch"
FUNCTIONS = {
    "regular": "ppo_policy_loss",
    "dual_clip": "ppo_policy_loss",
    "gspo": "gspo_policy_loss",
    "sapo": "sapo_policy_loss",
    "cispo": "compute_policy_loss_cispo",
    "rollout_is": "rollout_is_policy_loss",
    "dppo": "dppo_policy_loss",
}
# Its ratios are in float32 whatever it is given.
WITHIN = (2e-6, 2e-5)


PADDING = Declared(
    "NaN in the padding",
    "NaN or infinity at a masked token makes the ratio of the sequence NaN",
    among("nan_behind_mask"),
)
SINGLE = Declared(
    "the spread of one slot is NaN there",
    "the spread of a single slot is NaN",
    lambda given, settings: given.mask.numel() == 1,
)
OF_CORRECTION = (BF16, REJECTS, PADDING)
OF_LOSSES = (BF16, LEFT_OUT)


def settings_of(drawn: dict[str, Any]) -> Settings:
    """Make an OffPolicyCorrectionConfig."""
    return Settings(**dropin.FIELDS | drawn)


def correction(rng: Random) -> dict[str, Any]:
    """Draw an OffPolicyCorrectionConfig."""
    drawn = {
        "tis_ratio_type": rng.choice((None, "token", "sequence")),
        "token_tis_ratio_clip_high": rng.choice((1.01, 2.0)),
        "sequence_tis_ratio_clip_high": rng.choice((1.1, 5.0)),
        "sequence_mask_metric": rng.choice((None, "geometric", "product")),
        "geo_mask_high": rng.choice((1.01, 1.2)),
        "geo_mask_low": rng.choice((0.99, 0.7)),
        "product_mask_high": rng.choice((1.3, 2.0)),
        "product_mask_low": rng.choice((0.5, 0.9)),
        "outlier_token_is_threshold_low": rng.choice((None, 1e-4, 0.7)),
        "outlier_token_is_threshold_high": rng.choice((None, 100.0, 1.4)),
    }
    if rng.random() < 0.5:
        drawn |= {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": rng.choice((1.05, 2.0))}
    return drawn


def reporting(rng: Random) -> dict[str, Any]:
    """Draw settings with something on: SkyRL reports nothing where all is off."""
    drawn = correction(rng)
    on = ("tis_ratio_type", "sequence_mask_metric", *(key for key in drawn if "threshold" in key))
    return drawn if any(drawn[key] is not None for key in on) else drawn | {"tis_ratio_type": "token"}


def algorithm(rng: Random, anchored: bool = False) -> dict[str, Any]:
    """Draw an AlgorithmConfig; `anchored`: of a version with `cispo_anchor`."""
    kind = rng.choice(tuple(FUNCTIONS))
    drawn = {
        "policy_loss_type": kind,
        "loss_reduction": rng.choice(("token_mean", "sequence_mean", "seq_mean_token_sum_norm")),
        "max_seq_len": 50,
        "eps_clip_low": rng.choice((0.02, 0.2)),
        "eps_clip_high": rng.choice((0.05, 0.28)),
        "clip_ratio_c": rng.choice((1.1, 3.0)),
        "sapo": {"tau_pos": rng.choice((0.5, 1.0)), "tau_neg": 1.05},
        "cispo": {"cispo_eps_clip_low": rng.choice((0.1, 1.0)), "cispo_eps_clip_high": rng.choice((0.1, 4.0))},
        "dppo": {"dppo_type": rng.choice(("binary_tv", "binary_kl")), "delta_low": 0.02, "delta_high": 0.02},
        "use_kl_loss": False,
        "kl_loss_coef": 0.1,
        "kl_estimator_type": rng.choice(("k1", "k2", "k3", "abs")),
        "off_policy_correction": {} if kind == "dppo" else correction(rng),
    }
    if anchored and kind == "cispo" and rng.random() < 0.5:
        drawn["cispo"]["cispo_anchor"] = "rollout"
    if kind == "rollout_is" or "cispo_anchor" in drawn["cispo"]:
        drawn["off_policy_correction"]["tis_ratio_type"] = None
    drawn["use_kl_loss"] = rng.random() < 0.5
    return drawn


PRESETS: dict[str, ConformanceSettings] = {
    "token_tis": draw(clip_high=(1.01, 2.0)),
    "sequence_tis": draw(clip_high=(1.1, 5.0)),
    "geometric_mask": draw(low=(0.99, 0.7), high=(1.01, 1.2)),
    "product_mask": draw(low=(0.5, 0.9), high=(1.3, 2.0)),
    "token_mask": draw(low=(0.5, 0.9), high=(1.05, 2.0)),
    "outlier_mask": draw(low=(1e-4, 0.7), high=(1.4, 100.0)),
    "tldr": draw(geo_mask_low=(0.99, 0.7), geo_mask_high=(1.01, 1.2), token_tis_ratio_clip_high=(1.05, 2.0)),
}
# The settings of SkyRL that a preset's arguments are.
MEANS: dict[str, Callable[..., dict[str, Any]]] = {
    "token_tis": lambda clip_high: {"tis_ratio_type": "token", "token_tis_ratio_clip_high": clip_high},
    "sequence_tis": lambda clip_high: {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": clip_high},
    "geometric_mask": lambda low, high: {
        "sequence_mask_metric": "geometric",
        "geo_mask_low": low,
        "geo_mask_high": high,
    },
    "product_mask": lambda low, high: {
        "sequence_mask_metric": "product",
        "product_mask_low": low,
        "product_mask_high": high,
    },
    "token_mask": lambda low, high: {"token_mask_is_threshold_low": low, "token_mask_is_threshold_high": high},
    "outlier_mask": lambda low, high: {"outlier_token_is_threshold_low": low, "outlier_token_is_threshold_high": high},
    "tldr": lambda **given: {
        **given,
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 2.0,
        "outlier_token_is_threshold_low": 1e-4,
        "outlier_token_is_threshold_high": 100.0,
    },
}
RECIPES: dict[str, ConformanceSettings] = {
    "regular": draw(eps_clip_low=(0.02, 0.2), eps_clip_high=(0.05, 0.28)),
    "cispo": draw(cispo_eps_clip_low=(0.1, 1.0), cispo_eps_clip_high=(0.1, 4.0)),
    "sapo": draw(),
    "dppo": draw(delta_low=(0.02, 0.2), delta_high=(0.02, 0.2)),
}
RECIPES |= {
    "ppo": RECIPES["regular"],
    "grpo": both(RECIPES["regular"], draw(kl_loss_coef=(0.001, 0.1))),
    "gspo": RECIPES["regular"],
    "rollout_is": RECIPES["regular"],
    "dual_clip": both(RECIPES["regular"], draw(clip_ratio_c=(1.1, 3.0))),
}


def defaults(rows: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a table of settings."""
    return dict(Given(rows, {}))


def rows(source: Source) -> Iterator[Row]:
    """Compare everything that SkyRL has."""
    correct = source.cut(CORRECTION, COMPUTE)
    given_to_them = {
        "logger": SimpleNamespace(warning=lambda *given: None),
        "register_policy_loss": lambda name: lambda function: function,
    }
    functions = {name: source.cut(LOSSES, found, **given_to_them) for name, found in FUNCTIONS.items()}
    scale, kl = source.cut(LOSSES, SCALE), source.cut(LOSSES, "compute_approx_kl")
    masked_mean = source.cut("skyrl/backends/skyrl_train/utils/torch_utils.py", "masked_mean")

    def corrected(given: Batch, **drawn: Any) -> Result:
        weights, _, mask = correct(given.old, given.rollout, given.mask.float(), settings_of(drawn))
        return {"mask": mask, "weights": weights}

    def loss(given: Batch, **drawn: Any) -> Tensor:
        plain = {"loss_reduction": "token_mean", "max_seq_len": 50, "use_kl_loss": False}
        blocks = {
            "sapo": Settings(**defaults(config.SAPO_FIELDS) | drawn.pop("sapo", {})),
            "cispo": Settings(**defaults(config.CISPO_FIELDS) | drawn.pop("cispo", {})),
            "dppo": Settings(**defaults(config.DPPO_FIELDS) | drawn.pop("dppo", {})),
            "off_policy_correction": settings_of(drawn.pop("off_policy_correction", {})),
        }
        whole = Settings(**defaults(config.TABLE) | plain | drawn | blocks)
        mask = given.mask.float()
        advantages = scale(given.token_advantages, mask, whole.loss_reduction, len(mask), whole.max_seq_len)
        function = functions[whole.policy_loss_type]
        value = function(given.new, given.old, advantages, whole, mask, given.rollout)[0]
        if whole.use_kl_loss:
            penalty = kl(given.new, given.ref, mask, whole.kl_estimator_type)
            value = value + whole.kl_loss_coef * masked_mean(penalty, mask, dim=-1).mean()
        return value

    for name, drawn in PRESETS.items():
        means = MEANS[name]
        yield preset(
            f"skyrl.{name}",
            f"{CORRECTION}: {COMPUTE}",
            lambda given, means=means, **drawn: corrected(given, **means(**drawn)),
            drawn,
            declared=OF_CORRECTION,
            within=WITHIN,
        )
        yield recipe(
            f"skyrl.{name}",
            f"{LOSSES}: ppo_policy_loss",
            lambda given, means=means, **drawn: loss(given, off_policy_correction=means(**drawn)),
            drawn,
            declared=OF_LOSSES,
            within=WITHIN,
        )

    def of_recipe(name: str) -> Callable[..., Tensor]:
        def run(given: Batch, **drawn: Any) -> Tensor:
            drawn = {"policy_loss_type": "regular" if name in ("ppo", "grpo") else name, **drawn}
            drawn["use_kl_loss"] = name == "grpo"
            if name == "cispo":
                drawn["cispo"] = {key: drawn.pop(key) for key in list(drawn) if key.startswith("cispo_")}
            if name == "dppo":
                drawn["dppo"] = {key: drawn.pop(key) for key in ("delta_low", "delta_high")}
            return loss(given, **drawn)

        return run

    for name, drawn in RECIPES.items():
        place = f"{LOSSES}: {FUNCTIONS.get(name, 'ppo_policy_loss')}, {SCALE}"
        yield recipe(
            f"skyrl.{name}", place, of_recipe(name), drawn, declared=(*OF_LOSSES, NO_LOWER_CLAMP), within=WITHIN
        )

    def arguments(given: Batch, drawn: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Settings]:
        return given.old, given.rollout, given.mask.float(), settings_of(drawn)

    def reported(given: Batch, drawn: dict[str, Any]) -> Result:
        # Where nothing acts, SkyRL measures nothing.
        acts = rc.spec("skyrl", drawn).acts
        found: Result = correct(*arguments(given, drawn))[1]
        return found if acts else {}

    def whole(function: Any, given: Batch, drawn: dict[str, Any]) -> Result:
        with patch.object(dropin, "_say", lambda *given: None):
            weights, metrics, mask = function(*arguments(given, drawn))
        return {"mask": mask, "weights": weights, **metrics}

    def registered(function: Any, name: str, given: Batch, drawn: dict[str, Any]) -> Result:
        blocks = {"off_policy_correction": settings_of(drawn["off_policy_correction"])}
        of_all = Settings(**drawn | {"policy_loss_type": name, "sapo": Settings(**drawn["sapo"])} | blocks)
        own, mask = given.trains(), given.mask.float()
        with patch.object(dropin, "_say", lambda *given: None):
            value, metrics = function(own.new, own.old, given.token_advantages, of_all, mask, given.rollout)
        return {**loss_and_gradient(value, own), **metrics}

    place = f"{CORRECTION}: {COMPUTE}"
    more: dict[str, Any] = {"declared": (*OF_CORRECTION, SINGLE), "within": WITHIN}
    yield report("skyrl", place, partial(rc.spec, "skyrl"), reported, reporting, **more)
    yield spec_of("skyrl", place, lambda given, drawn: corrected(given, **drawn), correction, **more)
    if source.has(LOSSES, "importance_sampling_loss"):
        functions["importance_sampling"] = source.cut(LOSSES, "importance_sampling_loss", **given_to_them)
        newer = draw(
            policy_loss_type=("regular", "importance_sampling"),
            loss_reduction=("token_mean", "token_mean_legacy"),
            use_kl_loss=(True, False),
        )
        at = f"{LOSSES}: {SCALE}, importance_sampling_loss"
        yield configuration("skyrl", at, loss, newer, declared=(*OF_LOSSES, CLAMP), within=WITHIN)
    if source.says(LOSSES, "prompt_boundaries"):
        yield prompt_mean(scale, functions["regular"])
    sides = partial(whole, getattr(dropin, COMPUTE)), partial(whole, correct)
    yield Row("drop-in", f"skyrl.{COMPUTE}", place, *sides, correction, **more)
    of_losses = more | {"declared": (*more["declared"], NO_LOWER_CLAMP)}
    for name in ("regular", "dual_clip", "gspo", "sapo"):
        place = f"{LOSSES}: {FUNCTIONS[name]}"
        sides = [partial(registered, f, name) for f in (losses.LOSSES[f"rollout_corr_{name}"], functions[name])]
        yield Row("drop-in", f"skyrl.losses.{name}", place, *sides, algorithm, **of_losses)
    drawn = partial(algorithm, anchored=source.says(LOSSES, "cispo_anchor"))
    declared = (*OF_LOSSES, NO_LOWER_CLAMP)
    yield configuration("skyrl", f"{LOSSES}: {SCALE}, losses", loss, drawn, declared=declared, within=WITHIN)


def prompt_mean(scale: Any, function: Any) -> Row:
    """Compare `loss_reduction: prompt_mean` with a sum that is scaled by sequence."""

    def theirs(given: Batch) -> Tensor:
        mask, size = given.mask.float(), given.group_size
        bounds = [(first, first + size) for first in range(0, len(mask), size)]
        advantages = scale(given.token_advantages, mask, "prompt_mean", len(mask), None, bounds)
        whole = Settings(**defaults(config.TABLE) | {"off_policy_correction": settings_of({})})
        return function(given.new, given.old, advantages, whole, mask, given.rollout)[0]

    def ours(given: Batch) -> Tensor:
        tokens = given.mask.view(-1, given.group_size * given.mask.shape[1]).sum(1).clamp(min=1)
        scale = (1.0 / (len(tokens) * tokens)).repeat_interleave(given.group_size)
        loss = replace(rc.recipe("skyrl.regular").loss, mean=rc.Mean("sum"))
        made = rc.Recipe(None, loss, {"scale": scale})
        return loss_of(made, given, old_logp=given.old)

    place = f"{LOSSES}: {SCALE}, prompt_mean"
    return Row("recipe", "skyrl.regular", place, of_loss(ours), of_loss(theirs), declared=OF_LOSSES, within=WITHIN)
