"""xtuner's `RolloutImportanceSampling` and GRPOLossConfig; presets, the values in the configurations that it ships.

Pairs of bounds are (upper, lower), as in xtuner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...specs.choices import Drop, Scheme, When
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.surrogates import PPO
from ...specs.terms import KL, Mean
from ...specs.validate import not_negative, number, one_of, wrong_type, wrong_value
from ..shared.preset import HIGH, LEVELS, LOW, Alternatives, presets
from ..shared.recipe import BOTH, DECOUPLED, GLOBAL, KL_KINDS, Named, Recipe, named_recipe, of_presets, penalty
from ..shared.settings import (
    Block,
    Given,
    Setting,
    boolean,
    defaults_of,
    fields_of,
    given_in,
    maybe,
    only,
    unchecked,
    word,
)

REPORT: tuple[Scheme, ...] = ("native", "xtuner")
MODES = ("truncate", "mask", "both")
VETO_LEVELS = ("max", "geometric", "kl3")

Pair = tuple[float, float]


def pair(key: str, value: object) -> Pair:
    """(upper, lower) with upper > lower >= 0."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise wrong_type(key, "a pair (upper, lower)", value)
    if len(value) != 2:
        raise wrong_value(key, "a pair (upper, lower)", value)
    upper, lower = not_negative(key, value[0]), not_negative(key, value[1])
    if not upper > lower:
        raise wrong_value(key, "(upper, lower) with upper > lower", value, "; xtuner begins with upper")
    return upper, lower


def spec(
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: object = None,
    rollout_is_mask_threshold: object = None,
    rollout_is_veto_threshold: object = None,
    rollout_is_veto_level: str = "max",
    rollout_is_veto_negative_adv_only: bool | None = False,
) -> Spec:
    """Return the Spec of a `RolloutImportanceSampling`; the arguments are its fields, with its defaults.

    Thresholds are pairs (upper, lower); without `rollout_is_threshold`, from which the mask takes its own by default,
    everything is off, the veto too. The mode "truncate" clamps the weight on both sides, "mask" leaves it and rejects
    by the mask, "both" does both. Of xtuner#2023 are the veto's levels ("max": any token outside the bounds,
    "geometric": the mean of D, "kl3": the mean of exp(D) - 1 - D) and that it may look at negative mean advantages
    only.
    """
    negative_only = boolean("rollout_is_veto_negative_adv_only", rollout_is_veto_negative_adv_only)
    over, reduce = LEVELS[one_of("rollout_is_level", rollout_is_level, LEVELS)]
    mode = one_of("rollout_is_mode", rollout_is_mode, MODES)
    veto_level = one_of("rollout_is_veto_level", rollout_is_veto_level, VETO_LEVELS)
    # Also where no threshold switches all of it off: a wrong type is a mistake there too.
    if rollout_is_mask_threshold is not None:
        pair("rollout_is_mask_threshold", rollout_is_mask_threshold)
    if rollout_is_veto_threshold is not None:
        pair("rollout_is_veto_threshold", rollout_is_veto_threshold)
    if rollout_is_threshold is None:
        return Spec(report=REPORT)
    upper, lower = pair("rollout_is_threshold", rollout_is_threshold)
    weight = Weight(over, reduce) if mode == "mask" else Weight(over, reduce, lower=lower, upper=upper)
    criteria: list[Criterion] = []
    if mode != "truncate":
        if rollout_is_mask_threshold is not None:
            upper, lower = pair("rollout_is_mask_threshold", rollout_is_mask_threshold)
        criteria.append(Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, label="mask"))
    if rollout_is_veto_threshold is not None:
        when: When = "negative_advantage" if negative_only else "any"
        criteria += _veto(rollout_is_veto_threshold, veto_level, when)
    return Spec(weight=weight, criteria=tuple(criteria), rejected="mask", report=REPORT)


def _veto(threshold: object, level: str, when: When) -> list[Criterion]:
    upper, lower = pair("rollout_is_veto_threshold", threshold)
    if level == "geometric":
        return [Criterion("ratio", over="sequence", reduce="mean", lower=lower, upper=upper, when=when, label="veto")]
    if level == "kl3":
        return [Criterion("k3", over="sequence", reduce="mean", upper=upper, when=when, label="veto")]
    if when == "any":
        return [Criterion("ratio", lower=lower, upper=upper, drop="sequence", label="veto")]
    # xtuner selects by the mean advantage of the sequence, so the sequence has to be the unit: its extrema are tested.
    return [
        Criterion("ratio", over="sequence", reduce="min", lower=lower, when=when, label="veto_low"),
        Criterion("ratio", over="sequence", reduce="max", upper=upper, when=when, label="veto_high"),
    ]


def _stale(max_staleness: int, max_token_staleness: int | None, sync_weights_interval: int) -> Spec:
    """`Versions.ids` are `response_model_steps`; `current` is the train step: xtuner counts from the one before."""
    limits: list[tuple[int | None, Drop]] = [(max_staleness, "sequence"), (max_token_staleness, "unit")]
    criteria = [
        Criterion("age", upper=(syncs + 1) * sync_weights_interval, drop=drop)
        for syncs, drop in limits
        if syncs is not None
    ]
    return Spec(criteria=tuple(criteria))


def _token_both(threshold: Pair, mask_threshold: Pair | None, veto_threshold: Pair | None) -> Spec:
    return spec("token", "both", threshold, mask_threshold, veto_threshold)


THRESHOLDS = {"threshold": (5.0, 0.5), "mask_threshold": (5.0, 0.5), "veto_threshold": (20.0, 0.0)}
MASKS = "tokens outside mask_threshold masked; one outside veto_threshold vetoes."
shipped = presets("xtuner", "xtuner b934f46 (2026-08-21)")
shipped(
    reasoning=(f"Token weight clamped on both sides; {MASKS}", _token_both, THRESHOLDS),
    agentic=(f"Token weight clamped above; {MASKS}", _token_both, THRESHOLDS | {"threshold": (5.0, 0.0)}),
)
CLIP: dict[str, Any] = {"cliprange_low": 0.2, "cliprange_high": 0.2, "clip_ratio_c": maybe(3.0)}
ITS_KL: dict[str, Any] = {"kl": penalty(value_clamp=10.0, kl_loss_coef=0.0)}
WITH_KL = f"without rollout_is; kl_loss_coef means kl_loss_type low_var_kl; {GLOBAL}"
of_presets("xtuner", Named(PPO, **CLIP), BOTH, f"{GLOBAL}, after rejection", over="kept", **ITS_KL)
named_recipe("xtuner.ppo", Named(PPO, **CLIP), DECOUPLED, f"without rollout_is; {GLOBAL}")
named_recipe("xtuner.grpo", Named(PPO, **CLIP), DECOUPLED, WITH_KL, **ITS_KL)
# Behind the recipes of presets: this one goes with the versions of tokens, and with any loss.
shipped(
    staleness=(
        "Drop sequences with a token older than max_staleness + 1 weight syncs, and tokens older than their own limit.",
        _stale,
        {"max_staleness": 0, "max_token_staleness": None, "sync_weights_interval": 1},
    )
)

# --- the configuration ---

# The fields of RolloutImportanceSampling, checked by `spec`.
OF_SPEC = {name: unchecked(default) for name, default in defaults_of(spec).items()}
CLAMP = "the clamp of the log-ratio here"
POLICY: dict[str, Any] = {
    "loss_type": word("vanilla", ["vanilla"]),
    "cliprange_low": Setting(None, number),
    "cliprange_high": Setting(None, number),
    "clip_ratio_c": maybe(3.0),
    "log_prob_diff_min": only(-20.0, f"expected -20.0, {CLAMP}"),
    "log_prob_diff_max": only(20.0, f"expected 20.0, {CLAMP}"),
}
# The fields of GRPOLossConfig that make the loss, with its defaults; those of OREAL, which is refused, are None.
OREAL = ("positive_loss_factor", "pos_sft_loss_weight", "pos_policy_loss_weight", "negative_loss_factor")
TABLE: dict[str, Any] = {
    "policy_loss_cfg": Block(POLICY),
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_loss_type": unchecked(None),
    "rollout_is": Block(OF_SPEC),
    **dict.fromkeys(OREAL, only(None, "expected a GRPOLossConfig; OREAL's loss has no recipe")),
}
# Fields of CELossConfig, which it extends.
OF_ALL_LOSSES = ("ignore_idx", "mode", "chunk_size", "loss_reduction")


BOUNDS = [HIGH, LOW]
OF_WEIGHT = {"rollout_is_level": tuple(LEVELS), "rollout_is_threshold": BOUNDS}
OF_VETO = {"rollout_is_veto_threshold": BOUNDS, "rollout_is_veto_negative_adv_only": (False, True)}
WRITTEN: Alternatives = (
    (
        {"rollout_is_threshold": None},
        OF_WEIGHT | {"rollout_is_mode": ("truncate", "mask")},
        OF_WEIGHT | {"rollout_is_mode": "both", "rollout_is_mask_threshold": BOUNDS},
    ),
    (
        {},
        OF_VETO | {"rollout_is_veto_level": ("max", "geometric")},
        OF_VETO | {"rollout_is_veto_level": "kl3", "rollout_is_veto_threshold": [HIGH, 0.0]},
    ),
)


def settings(config: object) -> Given:
    """Find a loss configuration, which may be held as `loss_cfg`, or `RolloutImportanceSampling` alone."""
    given = fields_of(config)
    within = "loss_cfg" in given
    given = fields_of(given["loss_cfg"], "loss_cfg") if within else given
    if within or given.keys() & {*TABLE, *OF_ALL_LOSSES}:
        whole = not isinstance(config, Mapping) or any(key in given for key in OF_ALL_LOSSES)
        return given_in(given, TABLE, whole=whole)
    return Given(TABLE, {"rollout_is": given})


def read(given: Given) -> Spec:
    """Read `rollout_is`."""
    return spec(**given["rollout_is"])


# --- the whole loss ---


def recipe(given: Given) -> Recipe:
    """Read the whole loss from a GRPOLossConfig, or from a configuration that holds it as `loss_cfg`.

    The mean is over the tokens that are kept: the number of those of all ranks is the caller's to pass.
    """
    _, low, high, dual, *_ = given["policy_loss_cfg"].values()
    corrects = read(given)
    return Recipe(corrects if corrects.acts else None, Loss(PPO(low, high, dual), Mean(over="kept"), _kl(given)))


def _kl(given: Given) -> KL | None:
    coefficient = given["kl_loss_coef"]
    if not given["use_kl_loss"] or coefficient == 0.0:
        return None
    kind = KL_KINDS[one_of("kl_loss_type", given["kl_loss_type"], KL_KINDS)]
    return KL(kind, coefficient, value_clamp=10.0 if kind == "k3" else None)
