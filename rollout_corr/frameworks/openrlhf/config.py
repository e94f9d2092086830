"""OpenRLHF: level, mode and gating of `--algo.advantage.is_correction_*`, and the flags of its policy loss and KL.

OpenRLHF's "seq" is the geometric mean, and it only gates: what survives keeps its token ratio. Rejection zeroes the
weight, so no denominator changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...specs.choices import Reduce, Unit
from ...specs.correction import Criterion, Spec
from ...specs.loss import Loss
from ...specs.statistics import Stat
from ...specs.surrogate import RatioOf, Surrogate
from ...specs.surrogates import GSPO
from ...specs.terms import KL, KLKind, Mean
from ...specs.validate import number, one_of
from ..shared.preset import HIGH, LOW, gated, presets, truncated
from ..shared.recipe import (
    AGGREGATIONS,
    BOTH,
    DECOUPLED,
    GLOBAL,
    SAME_AS_PPO,
    SEQUENCES,
    TOKENS,
    Named,
    Recipe,
    clip,
    mean,
    named_recipe,
    of_presets,
)
from ..shared.settings import (
    Given,
    Setting,
    boolean,
    flags_in,
    maybe,
    or_null,
    refused,
    unchecked,
    under,
    warn_old,
    word,
)

UNITS: dict[str, tuple[Unit, Reduce | None]] = {"token": ("token", None), "seq": ("sequence", "mean")}
MODES = ("mask", "clip")
GATINGS: tuple[Stat, ...] = ("ratio", "binary_kl", "tv")
ESTIMATORS: tuple[KLKind, ...] = ("k1", "k2", "k3")
# is_correction_type before 0.11.2: level and mode.
OLD_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}


def _gate(level: str, gating: str, low: float | None, high: float | None) -> Spec:
    """Weigh tokens by their ratio, and by 0 where what gates lies outside. Probabilities are in [1e-6, 1 - 1e-6]."""
    stat = one_of("gating", gating, GATINGS)
    eps: dict[str, Any] = {} if stat == "ratio" else {"eps": 1e-6}
    return gated(Criterion(stat, *UNITS[level], lower=low, upper=high, **eps))


def _dppo_like(delta: float, gating: str) -> Spec:
    one_of("gating", gating, GATINGS[1:])
    return gated(Criterion("tv", upper=delta)) if gating == "tv" else _gate("token", gating, None, delta)


BOUNDS = {"low": maybe(0.5), "high": maybe(5.0)}
presets("openrlhf", "OpenRLHF 0.11.2")(
    tis=("w = exp(D) clamped to [low, high].", lambda low, high: truncated(high, low), BOUNDS),
    icepop=("w = exp(D) inside [low, high], else 0.", lambda low, high: _gate("token", "ratio", low, high), BOUNDS),
    seq_mask_tis=(
        "w = exp(D), and 0 for a sequence whose exp(mean D) is outside [low, high].",
        lambda low, high: _gate("seq", "ratio", low, high),
        BOUNDS,
    ),
    flash_reinforce=(
        "w = exp(D), and 0 for a sequence whose mean binary KL(rollout || train) is above delta.",
        lambda delta: _gate("seq", "binary_kl", None, delta),
        {"delta": 3e-3},
    ),
    dppo_like=(
        'w = exp(D), and 0 for a token whose binary KL (or total variation, gating="tv") is above delta.',
        _dppo_like,
        {"delta": 0.05, "gating": "binary_kl"},
    ),
)


def clipped(both: float, low_high: tuple[float, float] | None, dual: float | None) -> Surrogate:
    """Return PPO's clip."""
    return clip(*_sides(both, low_high), dual)


def gspo(both: float, low_high: tuple[float, float] | None, dual: float | None, of: RatioOf | None = None) -> Surrogate:
    """Return GSPO's clip. With a correction its ratio is new/rollout, and no weight multiplies it."""
    return GSPO(*_sides(both, low_high), dual, of=of)


def _sides(both: float, low_high: tuple[float, float] | None) -> tuple[float, float]:
    low, high = low_high or (both, both)
    return low, high


AGGREGATED = {mode: AGGREGATIONS[mode] for mode in ("token-mean", "seq-mean-token-mean")}
CLIP: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_low_high": unchecked(None), "dual_clip": None}
PARTS: dict[str, Any] = {"mean": mean(AGGREGATED, loss_agg_mode="token-mean")}
ALL_SEQUENCES = "total: sequences of all ranks"
of_presets("openrlhf", Named(clipped, **CLIP), BOTH, GLOBAL, **PARTS)
named_recipe("openrlhf.ppo", Named(clipped, **CLIP), DECOUPLED, GLOBAL, **PARTS)
named_recipe("openrlhf.grpo", Named(clipped, **CLIP), DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}", **PARTS)
named_recipe("openrlhf.gspo", Named(gspo, **CLIP), DECOUPLED, ALL_SEQUENCES, mean=SEQUENCES)

# --- the flags ---


def threshold(name: str, value: Sequence[object]) -> tuple[float, float]:
    """HIGH or LOW HIGH."""
    bounds = [number(name, bound) for bound in value]
    if len(bounds) not in (1, 2):
        raise refused(name, f"expected HIGH or LOW HIGH, got {bounds}")
    low, high = (0.0, *bounds)[-2:]
    return low, high


# The settings of the correction, with OpenRLHF's defaults.
IS: dict[str, Any] = {
    "is_correction_level": word("off", ("off", *UNITS)),
    "is_correction_mode": word("mask", MODES),
    "is_correction_gating": word("ratio", GATINGS),
    "is_correction_threshold": Setting((0.5, 5.0), threshold),
}


def spec(level: str, mode: str, gating: str, bounds: tuple[float, float]) -> Spec:
    """The correction as a Spec; the arguments are the values of `IS`."""
    if level == "off":
        return Spec()
    low, high = bounds
    if mode == "clip":
        if level == "seq" or gating != "ratio":
            raise refused("is_correction_mode", "'clip' needs is_correction_level 'token' and gating 'ratio'")
        return truncated(high, low)
    if gating != "ratio" and low > 0.0:
        why = f"expected an upper bound alone with gating {gating!r}, got {[*bounds]}"
        raise refused("is_correction_threshold", why)
    return _gate(level, gating, low if gating == "ratio" else None, high)


ADVANTAGE = "algo.advantage."
ENABLE, TYPE = f"{ADVANTAGE}is_correction_enable", f"{ADVANTAGE}is_correction_type"
TABLE: dict[str, Any] = {
    **{ADVANTAGE + name: row for name, row in IS.items()},
    **{f"actor.{name}": row for name, row in CLIP.items()},
    "actor.policy_loss_type": word("ppo", ("ppo", "gspo")),
    "actor.loss_agg_mode": word("token-mean", AGGREGATED),
    "algo.kl.use_loss": False,
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": word("k1", ESTIMATORS),
    "algo.kl.unbiased_gradient": False,
    ENABLE: Setting(None, or_null(boolean)),
    TYPE: word("tis", OLD_TYPES),
}
OTHERS = (
    *under(
        "actor",
        "adam aux_loss_coef entropy_coef freeze_visual_encoder gradient_checkpointing_enable "
        "gradient_checkpointing_reentrant lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model_name_or_path muon "
        "num_gpus_per_node num_nodes optim",
    ),
    *under("algo", "dynamic_filtering_enable dynamic_filtering_range"),
    *under("algo.advantage", "estimator gamma lambd no_std_norm"),
    *under("algo.kl", "horizon target"),
)


settings = partial(flags_in, rows=TABLE, others=OTHERS)


def read(given: Given) -> Spec:
    """Read OpenRLHF's arguments: a namespace, nested or with dots in its names, or a mapping."""
    level, mode, gating, bounds = (given[ADVANTAGE + name] for name in IS)
    enabled = given[ENABLE]
    if enabled is not None:
        level, mode = OLD_TYPES[given[TYPE]]
        level = level if enabled else "off"
        new = f"--algo.advantage.is_correction_level {level} --algo.advantage.is_correction_mode {mode}"
        warn_old("openrlhf", ("is_correction_enable", "is_correction_type"), f"write {new}")
    return spec(level, mode, gating, bounds)


_LEVEL, _MODE, _GATING, _BOUNDS = (ADVANTAGE + name for name in IS)
_GATES = {_LEVEL: tuple(UNITS), _MODE: "mask"}
WRITTEN = (
    (
        {_LEVEL: "off"},
        {_LEVEL: "token", _MODE: "clip", _GATING: "ratio", _BOUNDS: [LOW, HIGH]},
        _GATES | {_GATING: "ratio", _BOUNDS: [LOW, HIGH]},
        _GATES | {_GATING: ("binary_kl", "tv"), _BOUNDS: [0.0, LOW]},
    ),
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus. GSPO with a correction needs `rollout_logp` and has no weight."""
    found = read(given)
    both, low_high, dual = (given[f"actor.{name}"] for name in CLIP)
    if given["actor.policy_loss_type"] == "gspo":
        surrogate = gspo(both, low_high, dual, "new/rollout" if found.acts else None)
        return Recipe(None, Loss(surrogate, SEQUENCES, _kl(given, SEQUENCES)))
    average = AGGREGATED[given["actor.loss_agg_mode"]]
    return Recipe(found if found.acts else None, Loss(clipped(both, low_high, dual), average, _kl(given, average)))


def _kl(given: Given, average: Mean) -> KL | None:
    coefficient = given["algo.kl.init_coef"]
    if not given["algo.kl.use_loss"] or coefficient <= 0.0:
        return None
    if average != TOKENS:
        raise refused(
            "algo.kl.use_loss",
            "OpenRLHF divides the KL by tokens and this policy loss by sequences; compute "
            "the KL by a call of its own, as docs/losses.md shows, and set algo.kl.init_coef to 0 here",
        )
    if given["algo.kl.unbiased_gradient"]:
        raise refused("algo.kl.unbiased_gradient", "weighs the KL's gradient and not its value; no KL here does")
    kind = given["algo.kl.estimator"]
    return KL(kind, coefficient, value_clamp=10.0 if kind == "k3" else None)
