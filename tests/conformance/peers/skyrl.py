"""SkyRL: its correction, its losses, and the scaling of advantages by which it averages, called as they are."""

from __future__ import annotations

from collections.abc import Iterator
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
from conformance.rows import Settings as Drawn
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


# The drawn arguments of a preset, and the settings of SkyRL that they are; others are fixed.
TLDR = {"tis_ratio_type": "token", "sequence_mask_metric": "geometric"}
TLDR |= {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
TLDR |= {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}
PRESETS: dict[str, tuple[Drawn, str, dict[str, Any]]] = {
    "token_tis": (draw(clip_high=(1.01, 2.0)), "token_tis_ratio_{}", {"tis_ratio_type": "token"}),
    "sequence_tis": (draw(clip_high=(1.1, 5.0)), "sequence_tis_ratio_{}", {"tis_ratio_type": "sequence"}),
    "geometric_mask": (draw(low=(0.99, 0.7), high=(1.01, 1.2)), "geo_mask_{}", {"sequence_mask_metric": "geometric"}),
    "product_mask": (draw(low=(0.5, 0.9), high=(1.3, 2.0)), "product_mask_{}", {"sequence_mask_metric": "product"}),
    "token_mask": (draw(low=(0.5, 0.9), high=(1.05, 2.0)), "token_mask_is_threshold_{}", {}),
    "outlier_mask": (draw(low=(1e-4, 0.7), high=(1.4, 100.0)), "outlier_token_is_threshold_{}", {}),
    "tldr": (
        draw(geo_mask_low=(0.99, 0.7), geo_mask_high=(1.01, 1.2), token_tis_ratio_clip_high=(1.05, 2.0)),
        "{}",
        TLDR,
    ),
}
CLIPS = draw(eps_clip_low=(0.02, 0.2), eps_clip_high=(0.05, 0.28))
RECIPES: dict[str, Drawn] = {
    **dict.fromkeys(("regular", "ppo", "gspo", "rollout_is"), CLIPS),
    "grpo": both(CLIPS, draw(kl_loss_coef=(0.001, 0.1))),
    "dual_clip": both(CLIPS, draw(clip_ratio_c=(1.1, 3.0))),
    "cispo": draw(cispo_eps_clip_low=(0.1, 1.0), cispo_eps_clip_high=(0.1, 4.0)),
    "sapo": draw(),
    "dppo": draw(delta_low=(0.02, 0.2), delta_high=(0.02, 0.2)),
}


def defaults(rows: dict[str, Any]) -> dict[str, Any]:
    """The defaults of a table of settings."""
    return dict(Given(rows, {}))


def rows(source: Source) -> Iterator[Row]:
    """Compare everything that SkyRL has."""
    correct, place = source.cut(CORRECTION, COMPUTE), f"{CORRECTION}: {COMPUTE}"
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
        fields = {"sapo": config.SAPO_FIELDS, "cispo": config.CISPO_FIELDS, "dppo": config.DPPO_FIELDS}
        blocks = {name: Settings(**defaults(rows) | drawn.pop(name, {})) for name, rows in fields.items()}
        blocks["off_policy_correction"] = settings_of(drawn.pop("off_policy_correction", {}))
        whole = Settings(**defaults(config.TABLE) | plain | drawn | blocks)
        mask = given.mask.float()
        advantages = scale(given.token_advantages, mask, whole.loss_reduction, len(mask), whole.max_seq_len)
        function = functions[whole.policy_loss_type]
        value = function(given.new, given.old, advantages, whole, mask, given.rollout)[0]
        if whole.use_kl_loss:
            penalty = kl(given.new, given.ref, mask, whole.kl_estimator_type)
            value = value + whole.kl_loss_coef * masked_mean(penalty, mask, dim=-1).mean()
        return value

    of_correction: dict[str, Any] = {"declared": OF_CORRECTION, "within": WITHIN}
    of_losses: dict[str, Any] = {"declared": OF_LOSSES, "within": WITHIN}

    def lose(given: Batch, **means: Any) -> Tensor:
        return loss(given, off_policy_correction=means)

    def by_names(run: Any, named: str, fixed: dict[str, Any], given: Batch, **drawn: Any) -> Any:
        return run(given, **fixed, **{named.format(name): value for name, value in drawn.items()})

    for name, (drawn, *means) in PRESETS.items():
        yield preset(f"skyrl.{name}", place, partial(by_names, corrected, *means), drawn, **of_correction)
        at = f"{LOSSES}: ppo_policy_loss"
        yield recipe(f"skyrl.{name}", at, partial(by_names, lose, *means), drawn, **of_losses)

    def of_recipe(name: str, given: Batch, **drawn: Any) -> Tensor:
        kind = "regular" if name in ("ppo", "grpo") else name
        if name in ("cispo", "dppo"):
            drawn = {name: drawn}
        return loss(given, policy_loss_type=kind, use_kl_loss=name == "grpo", **drawn)

    of_losses["declared"] = (*OF_LOSSES, NO_LOWER_CLAMP)
    for name, drawn in RECIPES.items():
        at = f"{LOSSES}: {FUNCTIONS.get(name, 'ppo_policy_loss')}, {SCALE}"
        yield recipe(f"skyrl.{name}", at, partial(of_recipe, name), drawn, **of_losses)

    def reported(given: Batch, drawn: dict[str, Any]) -> Result:
        # Where nothing acts, SkyRL measures nothing.
        found = correct(given.old, given.rollout, given.mask.float(), settings_of(drawn))[1]
        return found if rc.spec("skyrl", drawn).acts else {}

    def whole(function: Any, given: Batch, drawn: dict[str, Any]) -> Result:
        with patch.object(dropin, "_say", lambda *given: None):
            weights, metrics, mask = function(given.old, given.rollout, given.mask.float(), settings_of(drawn))
        return {"mask": mask, "weights": weights, **metrics}

    def registered(function: Any, name: str, given: Batch, drawn: dict[str, Any]) -> Result:
        blocks = {"off_policy_correction": settings_of(drawn["off_policy_correction"])}
        of_all = Settings(**drawn | {"policy_loss_type": name, "sapo": Settings(**drawn["sapo"])} | blocks)
        own, mask = given.trains(), given.mask.float()
        with patch.object(dropin, "_say", lambda *given: None):
            value, metrics = function(own.new, own.old, given.token_advantages, of_all, mask, given.rollout)
        return {**loss_and_gradient(value, own), **metrics}

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
    more["declared"] = (*more["declared"], NO_LOWER_CLAMP)
    for name in ("regular", "dual_clip", "gspo", "sapo"):
        sides = [partial(registered, f, name) for f in (losses.LOSSES[f"rollout_corr_{name}"], functions[name])]
        yield Row("drop-in", f"skyrl.losses.{name}", f"{LOSSES}: {FUNCTIONS[name]}", *sides, algorithm, **more)
    drawn = partial(algorithm, anchored=source.says(LOSSES, "cispo_anchor"))
    yield configuration("skyrl", f"{LOSSES}: {SCALE}, losses", loss, drawn, **of_losses)


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
