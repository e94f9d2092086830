"""labs-molt's flags: `--algo.advantage.is_correction_*`, and those of its policy loss and KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_corr.frameworks.molt import presets
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, flags_of
from rollout_corr.frameworks.shared.specs import level_of
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.terms import KL, KLKind
from rollout_corr.specs.validate import number, one_of

GATES = {"seq": presets.seq, "geo": presets.geo}
GATED = {"sequence": "seq", "geometric": "geo"}
ESTIMATORS: tuple[KLKind, ...] = ("k1", "k2", "k3")


def spec(
    is_correction_level: str = "off",
    is_correction_mode: str = "mask",
    is_correction_threshold: Sequence[float] = (0.5, 5.0),
) -> Spec:
    """The correction as a Spec; the arguments are molt's, with its defaults."""
    level = one_of("is_correction_level", is_correction_level, ("off", "token", *GATES))
    mode = one_of("is_correction_mode", is_correction_mode, presets.MODES)
    if level == "off":
        return Spec()
    if len(is_correction_threshold) != 2:
        raise ValueError(f"is_correction_threshold: expected LOW HIGH, got {list(is_correction_threshold)}")
    low, high = is_correction_threshold
    if level == "token":
        return presets.token(low, high, mode)
    if mode != "mask":
        raise ValueError(f"is_correction_mode: expected 'mask' with is_correction_level {level!r}, got {mode!r}")
    return GATES[level](low, high)


ADVANTAGE = "algo.advantage."
OF_SPEC = {ADVANTAGE + name: default for name, default in defaults_of(spec).items()}
OF_LOSS: dict[str, Any] = {
    "actor.eps_clip_low_high": None,
    "actor.dual_clip": None,
    "actor.loss_mode": "ppo",
    "algo.kl.use_loss": False,
    "algo.kl.init_coef": None,
    "algo.kl.estimator": "k1",
    "algo.advantage.estimator": None,
}
OTHERS = tuple(
    f"{block}.{name}"
    for block, names in {
        "actor": "adam aux_loss_coef entropy_coef freeze_moe_router freeze_visual_encoder freezing_steps "
        "gradient_checkpoint lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model_name_or_path muon "
        "num_gpus_per_node num_nodes optim",
        "algo": "dynamic_filtering_enable dynamic_filtering_range",
        "algo.advantage": "gamma lam no_whiten",
        "algo.kl": "horizon target",
    }.items()
    for name in names.split()
)


def read(config: object) -> Spec:
    """Read molt's arguments: a namespace, nested or with dots in its names, or a mapping."""
    return _spec(flags_of(config, OF_SPEC | OF_LOSS, OTHERS))


def write(spec: Spec) -> dict[str, Any]:
    """Write the flags `--algo.advantage.is_correction_*`, by their whole names."""
    if spec.weight is None:
        return {ADVANTAGE + "is_correction_level": "off"}
    made: dict[str, Any] = {
        "is_correction_level": "token",
        "is_correction_mode": "clip" if spec.weight.low else "trunc",
    }
    bounds: Weight | Criterion = spec.weight
    if spec.criteria:
        bounds = spec.criteria[0]
        made = {"is_correction_level": GATED.get(level_of(bounds) or "", "token"), "is_correction_mode": "mask"}
    if bounds.high is not None:
        made["is_correction_threshold"] = [bounds.low or 0.0, bounds.high]
    return {ADVANTAGE + name: value for name, value in made.items()}


def recipe(config: object) -> Recipe:
    """Read the whole loss but its entropy bonus."""
    given = flags_of(config, OF_SPEC | OF_LOSS, OTHERS)
    found = _spec(given)
    return Recipe(found if found.acts else None, Loss(_surrogate(given), kl=_kl(given)))


def _spec(given: dict[str, Any]) -> Spec:
    return spec(**{name.removeprefix(ADVANTAGE): given[name] for name in OF_SPEC})


def _surrogate(given: dict[str, Any]) -> Surrogate:
    mode = one_of("actor.loss_mode", given["actor.loss_mode"], ("ppo", "cispo", "gspo"))
    sides, dual = given["actor.eps_clip_low_high"] or (0.2, 0.2), given["actor.dual_clip"]
    if mode == "ppo":
        return presets.ppo(sides, dual)
    if dual is not None:
        raise ValueError(f"actor.dual_clip: expected None with actor.loss_mode {mode!r}, as molt does, got {dual!r}")
    return presets.gspo(sides) if mode == "gspo" else presets.cispo(sides)


def _kl(given: dict[str, Any]) -> KL | None:
    # With on_policy_distill the KL to the teacher is the advantage.
    distills = given["algo.advantage.estimator"] == "on_policy_distill"
    if distills or not boolean("algo.kl.use_loss", given["algo.kl.use_loss"]):
        return None
    coefficient = given["algo.kl.init_coef"]
    coefficient = 0.01 if coefficient is None else number("algo.kl.init_coef", coefficient)
    if coefficient <= 0.0:
        return None
    kind = one_of("algo.kl.estimator", given["algo.kl.estimator"], ESTIMATORS)
    return KL(kind, coefficient, log_clamp=presets.LIMIT, value_clamp=10.0 if kind == "k3" else None)
