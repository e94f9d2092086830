"""SkyRL: its correction, its losses, and the scaling of advantages by which it averages, called as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.rows import BF16, Declared, Result, Row, configuration, loss_and_gradient, preset, recipe
from conformance.sources import Source
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


def among(*kinds: str) -> Callable[[Batch, dict[str, Any]], bool]:
    return lambda given, settings: given.kind in kinds


NONFINITE = Declared(
    "a non-finite token rejects its sequence here",
    "presets.md",
    "Most frameworks let the NaN through into the loss (verl's weights, xtuner, SkyRL",
    among("infinite", "nan_in_front"),
)
PADDING = Declared(
    "NaN in the padding",
    "integrations.md",
    "NaN or infinity behind the mask makes the ratio of the sequence NaN",
    among("nan_behind_mask"),
)
LEFT_OUT = Declared(
    "a token that is not finite is left out here",
    "losses.md",
    "NaN or infinity in front of the mask; behind it too with a sum over rows",
    among("infinite", "nan_in_front", "nan_behind_mask"),
)
SINGLE = Declared(
    "the spread of one slot is NaN there",
    "integrations.md",
    "the spread of a single slot is NaN",
    lambda given, settings: given.mask.numel() == 1,
)
OF_CORRECTION = (BF16, NONFINITE, PADDING)
OF_LOSSES = (BF16, LEFT_OUT)


class Settings(SimpleNamespace):
    """A block of the configuration."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is none."""
        return getattr(self, name, default)


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


PRESETS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "token_tis": lambda rng: {"clip_high": rng.choice((1.01, 2.0))},
    "sequence_tis": lambda rng: {"clip_high": rng.choice((1.1, 5.0))},
    "geometric_mask": lambda rng: {"low": rng.choice((0.99, 0.7)), "high": rng.choice((1.01, 1.2))},
    "product_mask": lambda rng: {"low": rng.choice((0.5, 0.9)), "high": rng.choice((1.3, 2.0))},
    "token_mask": lambda rng: {"low": rng.choice((0.5, 0.9)), "high": rng.choice((1.05, 2.0))},
    "outlier_mask": lambda rng: {"low": rng.choice((1e-4, 0.7)), "high": rng.choice((1.4, 100.0))},
    "tldr": lambda rng: {
        "geo_mask_low": rng.choice((0.99, 0.7)),
        "geo_mask_high": rng.choice((1.01, 1.2)),
        "token_tis_ratio_clip_high": rng.choice((1.05, 2.0)),
    },
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
    "outlier_mask": lambda low, high: {
        "outlier_token_is_threshold_low": low,
        "outlier_token_is_threshold_high": high,
    },
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
RECIPES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "regular": lambda rng: {"eps_clip_low": rng.choice((0.02, 0.2)), "eps_clip_high": rng.choice((0.05, 0.28))},
    "cispo": lambda rng: {"cispo_eps_clip_low": rng.choice((0.1, 1.0)), "cispo_eps_clip_high": rng.choice((0.1, 4.0))},
    "sapo": lambda rng: {},
    "dppo": lambda rng: {"delta_low": rng.choice((0.02, 0.2)), "delta_high": rng.choice((0.02, 0.2))},
}
RECIPES |= {
    "ppo": RECIPES["regular"],
    "grpo": lambda rng: RECIPES["regular"](rng) | {"kl_loss_coef": rng.choice((0.001, 0.1))},
    "gspo": RECIPES["regular"],
    "rollout_is": RECIPES["regular"],
    "dual_clip": lambda rng: RECIPES["regular"](rng) | {"clip_ratio_c": rng.choice((1.1, 3.0))},
}


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
        return {"mask": mask} if weights is None else {"mask": mask, "weights": weights.expand_as(mask)}

    def loss(given: Batch, **drawn: Any) -> Tensor:
        defaults = {"loss_reduction": "token_mean", "max_seq_len": 50, "use_kl_loss": False}
        blocks = {
            "sapo": Settings(**config.SAPO_FIELDS | drawn.pop("sapo", {})),
            "cispo": Settings(**config.CISPO_FIELDS | drawn.pop("cispo", {})),
            "dppo": Settings(**config.DPPO_FIELDS | drawn.pop("dppo", {})),
            "off_policy_correction": settings_of(drawn.pop("off_policy_correction", {})),
        }
        whole = Settings(**config.LOSS | defaults | drawn | blocks)
        mask = given.mask.float()
        advantages = scale(given.token_advantages, mask, whole.loss_reduction, len(mask), whole.max_seq_len)
        function = functions[whole.policy_loss_type]
        value = function(given.new, given.old, advantages, whole, mask, given.rollout)[0]
        if whole.use_kl_loss:
            penalty = kl(given.new, given.ref, mask, whole.kl_estimator_type)
            value = value + whole.kl_loss_coef * masked_mean(penalty, mask, dim=-1).mean()
        return value  # type: ignore[no-any-return]  # of functions that were cut

    for name, draw in PRESETS.items():
        means = MEANS[name]
        yield preset(
            f"skyrl.{name}",
            f"{CORRECTION}: {COMPUTE}",
            lambda given, means=means, **drawn: corrected(given, **means(**drawn)),
            draw,
            declared=OF_CORRECTION,
            within=WITHIN,
        )
        yield recipe(
            f"skyrl.{name}",
            f"{LOSSES}: ppo_policy_loss",
            lambda given, means=means, **drawn: loss(given, off_policy_correction=means(**drawn)),
            draw,
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

    for name, draw in RECIPES.items():
        place = f"{LOSSES}: {FUNCTIONS.get(name, 'ppo_policy_loss')}, {SCALE}"
        yield recipe(f"skyrl.{name}", place, of_recipe(name), draw, declared=OF_LOSSES, within=WITHIN)

    def report(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        spec = rc.spec("skyrl", drawn)
        if not spec.acts:
            return {}, correct(given.old, given.rollout, given.mask.float(), settings_of(drawn))[1]
        ours = rc.correct(given.old, given.rollout, mask=given.mask, spec=spec).metrics("skyrl")
        return ours, correct(given.old, given.rollout, given.mask.float(), settings_of(drawn))[1]

    def reader(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        out = rc.correct(given.old, given.rollout, mask=given.mask, spec=rc.spec("skyrl", drawn))
        expected = dict(corrected(given, **drawn))
        return shown(out.weights, out.mask, expected["mask"]), shown(expected.get("weights"), *[expected["mask"]] * 2)

    def replaced(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        arguments = given.old, given.rollout, given.mask.float(), settings_of(drawn)
        with patch.object(dropin, "_say", lambda *given: None):
            weights, metrics, mask = getattr(dropin, COMPUTE)(*arguments)
        theirs, their_metrics, their_mask = correct(*arguments)
        ours = shown(weights, mask, their_mask) | metrics
        return ours, shown(theirs, their_mask, their_mask) | their_metrics

    def registered(name: str) -> Callable[..., tuple[Result, Result]]:
        def run(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
            blocks = {"off_policy_correction": settings_of(drawn["off_policy_correction"])}
            whole = Settings(**drawn | {"policy_loss_type": name, "sapo": Settings(**drawn["sapo"])} | blocks)

            def result(function: Any) -> Result:
                mine = given.trains()
                mask = given.mask.float()
                value, metrics = function(mine.new, mine.old, given.token_advantages, whole, mask, given.rollout)
                return {**loss_and_gradient(value, mine), **metrics}

            with patch.object(dropin, "_say", lambda *given: None):
                ours = result(losses.LOSSES[f"rollout_corr_{name}"])
            return ours, result(functions[name])

        return run

    place = f"{CORRECTION}: {COMPUTE}"
    more: dict[str, Any] = {"declared": (*OF_CORRECTION, SINGLE), "within": WITHIN}
    yield Row("report", "skyrl", place, report, correction, **more)
    yield Row("configuration", "skyrl.config", place, reader, correction, **more)
    yield Row("drop-in", f"skyrl.{COMPUTE}", place, replaced, correction, **more)
    for name in ("regular", "dual_clip", "gspo", "sapo"):
        place = f"{LOSSES}: {FUNCTIONS[name]}"
        yield Row("drop-in", f"skyrl.losses.{name}", place, registered(name), algorithm, **more)
    anchored = "cispo_anchor" in (source.root / LOSSES).read_text(encoding="utf-8")
    draw = partial(algorithm, anchored=anchored)
    yield configuration("skyrl", f"{LOSSES}: {SCALE}, losses", loss, draw, declared=OF_LOSSES, within=WITHIN)


def shown(weights: Tensor | None, mask: Tensor, at: Tensor) -> dict[str, Any]:
    """Return the mask, and the weights where `at` is set."""
    found: dict[str, Any] = {"mask": mask.bool()}
    return found if weights is None else found | {"weights": weights.expand_as(at).where(at.bool(), 0.0)}
