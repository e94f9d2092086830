"""OpenRLHF's flags: `--algo.advantage.is_correction_*`, and those of its policy loss and KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_corr.frameworks.openrlhf.presets import AGGREGATED, EPS, clipped, gspo
from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.recipe import SEQUENCES, TOKENS, Recipe
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, flags_of
from rollout_corr.frameworks.shared.specs import gated
from rollout_corr.specs.choices import Reduce, Unit
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.statistics import Stat
from rollout_corr.specs.terms import KL, KLKind, Mean
from rollout_corr.specs.validate import number, one_of

UNITS: dict[str, tuple[Unit, Reduce | None]] = {"token": ("token", None), "seq": ("sequence", "mean")}
MODES = ("mask", "clip")
GATINGS: tuple[Stat, ...] = ("ratio", "binary_kl", "tv")
ESTIMATORS: tuple[KLKind, ...] = ("k1", "k2", "k3")
# is_correction_type before 0.11.2: level and mode.
OLD_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def spec(
    is_correction_level: str = "off",
    is_correction_mode: str = "mask",
    is_correction_gating: str = "ratio",
    is_correction_threshold: Sequence[float] = (0.5, 5.0),
) -> Spec:
    """The correction as a Spec; the arguments are OpenRLHF's, with its defaults."""
    level = one_of("is_correction_level", is_correction_level, ("off", *UNITS))
    mode = one_of("is_correction_mode", is_correction_mode, MODES)
    gating = one_of("is_correction_gating", is_correction_gating, GATINGS)
    if level == "off":
        return Spec()
    bounds = [number("is_correction_threshold", bound) for bound in is_correction_threshold]
    if len(bounds) not in (1, 2):
        raise ValueError(f"is_correction_threshold: expected HIGH or LOW HIGH, got {bounds}")
    low, high = (0.0, *bounds)[-2:]
    if mode == "clip":
        if level == "seq" or gating != "ratio":
            raise ValueError("is_correction_mode: 'clip' needs is_correction_level 'token' and gating 'ratio'")
        return Spec(weight=Weight.token(lower=low, upper=high))
    if gating == "ratio":
        return gated(Criterion("ratio", *UNITS[level], lower=low, upper=high))
    if low > 0.0:
        raise ValueError(f"is_correction_threshold: expected an upper bound alone with gating {gating!r}, got {bounds}")
    return gated(Criterion(gating, *UNITS[level], upper=high, eps=EPS))


ADVANTAGE = "algo.advantage."
OF_SPEC = {ADVANTAGE + name: default for name, default in defaults_of(spec).items()}
OF_LOSS: dict[str, Any] = {
    "actor.eps_clip": 0.2,
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "algo.kl.use_loss": False,
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.unbiased_gradient": False,
    "algo.advantage.is_correction_enable": None,
    "algo.advantage.is_correction_type": "tis",
}
OTHERS = tuple(
    f"{block}.{name}"
    for block, names in {
        "actor": "adam aux_loss_coef entropy_coef freeze_visual_encoder gradient_checkpointing_enable "
        "gradient_checkpointing_reentrant lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model_name_or_path muon "
        "num_gpus_per_node num_nodes optim",
        "algo": "dynamic_filtering_enable dynamic_filtering_range",
        "algo.advantage": "estimator gamma lambd no_std_norm",
        "algo.kl": "horizon target",
    }.items()
    for name in names.split()
)


def read(config: object) -> Spec:
    """Read OpenRLHF's arguments: a namespace, nested or with dots in its names, or a mapping."""
    return _spec(_flags(config))


def write(spec: Spec) -> dict[str, Any]:
    """Write the flags `--algo.advantage.is_correction_*`, by their whole names."""
    if spec.weight is None:
        return {ADVANTAGE + "is_correction_level": "off"}
    made: dict[str, Any] = {
        "is_correction_level": "token",
        "is_correction_mode": "clip",
        "is_correction_gating": "ratio",
    }
    bounds: Weight | Criterion = spec.weight
    if spec.criteria:
        bounds = spec.criteria[0]
        level = next((name for name, unit in UNITS.items() if unit == (bounds.over, bounds.reduce)), "token")
        made |= {"is_correction_level": level, "is_correction_mode": "mask"}
        made["is_correction_gating"] = bounds.stat if bounds.stat in GATINGS else "ratio"
    if bounds.high is not None:
        made["is_correction_threshold"] = [bounds.low or 0.0, bounds.high]
    return {ADVANTAGE + name: value for name, value in made.items()}


def recipe(config: object) -> Recipe:
    """Read the whole loss but its entropy bonus. GSPO with a correction needs `rollout_logp` and has no weight."""
    given = _flags(config)
    found = _spec(given)
    clip = given["actor.eps_clip"], given["actor.eps_clip_low_high"], given["actor.dual_clip"]
    mean = AGGREGATED[one_of("actor.loss_agg_mode", given["actor.loss_agg_mode"], AGGREGATED)]
    if one_of("actor.policy_loss_type", given["actor.policy_loss_type"], ("ppo", "gspo")) == "gspo":
        surrogate = gspo(*clip, "new/rollout" if found.acts else None)
        return Recipe(None, Loss(surrogate, SEQUENCES, _kl(given, SEQUENCES)))
    return Recipe(found if found.acts else None, Loss(clipped(*clip), mean, _kl(given, mean)))


def _flags(config: object) -> dict[str, Any]:
    return flags_of(config, OF_SPEC | OF_LOSS, OTHERS)


def _spec(given: dict[str, Any]) -> Spec:
    settings = {name.removeprefix(ADVANTAGE): given[name] for name in OF_SPEC}
    if given[ADVANTAGE + "is_correction_enable"] is not None:
        kind = one_of("is_correction_type", given[ADVANTAGE + "is_correction_type"], OLD_TYPES)
        level, mode = OLD_TYPES[kind]
        on = boolean("is_correction_enable", given[ADVANTAGE + "is_correction_enable"])
        warn_once(
            ("openrlhf", "is_correction_enable"),
            "openrlhf: is_correction_enable, is_correction_type are old names; write --algo.advantage."
            f"is_correction_level {level if on else 'off'} --algo.advantage.is_correction_mode {mode}",
        )
        settings |= {"is_correction_level": level if on else "off", "is_correction_mode": mode}
    return spec(**settings)


def _kl(given: dict[str, Any], mean: Mean) -> KL | None:
    coefficient = number("algo.kl.init_coef", given["algo.kl.init_coef"])
    if not boolean("algo.kl.use_loss", given["algo.kl.use_loss"]) or coefficient <= 0.0:
        return None
    if mean != TOKENS:
        raise ValueError(
            "algo.kl.use_loss: OpenRLHF divides the KL by tokens and this policy loss by sequences; compute "
            "the KL by a call of its own, as docs/losses.md shows, and set algo.kl.init_coef to 0 here"
        )
    if boolean("algo.kl.unbiased_gradient", given["algo.kl.unbiased_gradient"]):
        raise ValueError("algo.kl.unbiased_gradient: weighs the KL's gradient and not its value; no KL here does")
    kind = one_of("algo.kl.estimator", given["algo.kl.estimator"], ESTIMATORS)
    return KL(kind, coefficient, value_clamp=10.0 if kind == "k3" else None)
