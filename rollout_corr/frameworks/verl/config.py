"""verl's configuration, in its three generations.

cap      `actor.tis_imp_ratio_cap` and its kin (2025-08 to 2025-10): a cap on the token weight; -1 is off.
flat     `algorithm.rollout_is_level`, `rollout_is_mode` and so on (0.6.0): one ratio weighs and rejects.
nested   `algorithm.rollout_correction` (since 0.6.1): weights by `rollout_is`, rejection by `rollout_rs`.
"""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.settings import boolean, fields_of, refuse_unknown
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.frameworks.verl import options as verl_options
from rollout_corr.frameworks.verl import presets
from rollout_corr.spec.checked import expression
from rollout_corr.spec.correction import Criterion, Spec, Weight
from rollout_corr.spec.validate import one_of

CAPS = ("tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap")
SHARED = ("rollout_is", "rollout_is_threshold")
FLAT = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
NESTED = ("rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
OLD_NESTED = (
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
)
KNOWN = (*SHARED, *NESTED, *OLD_NESTED, *FLAT, *CAPS)

# These keys show that the whole of `algorithm` is given, with many keys that do not concern this package. Only
# those that begin like ours are checked for spelling.
OF_ALGORITHM = ("adv_estimator", "gamma", "lam", "kl_ctrl", "use_kl_in_reward", "norm_adv_by_std_in_grpo")
OURS = ("rollout_is", "rollout_rs", "rollout_token_veto")

LOSS_TYPES = ("ppo_clip", "reinforce")
FLAT_MODES = ("truncate", "mask", "clip")
FLAT_VETO = 1e-4
OFF = "leave it out: it is off"


def read(config: object, *, k1_bounds: str = "verl", version: str | None = None) -> Spec:
    """Read the block `rollout_correction`, the block `algorithm`, or a whole configuration, of any generation.

    Args:
        config: The configuration.
        k1_bounds: "verl" or "ratio", see `verl_options.criteria`.
        version: "0.6.0" for the flat generation as it was released: `rollout_is_mode: mask` and the veto zero weights
            there, as "clip" does. By default they edit the mask, as verl has done since.
    """
    one_of("k1_bounds", k1_bounds, verl_options.K1_BOUNDS)
    if version not in (None, "0.6.0"):
        raise ValueError(f"version: expected None or '0.6.0', got {version!r}")
    given = _block(fields_of(config))
    refuse_unknown(given, KNOWN)
    level = given.get("rollout_is")
    generations = {
        "a cap on the weight, before 0.6.0": [key for key in given if key in CAPS],
        "flat, 0.6.0": [key for key in given if key in FLAT or (key == "rollout_is" and isinstance(level, bool))],
        "nested, since 0.6.1": [
            key for key in given if key in (*NESTED, *OLD_NESTED) or (key == "rollout_is" and isinstance(level, str))
        ],
    }
    cap, flat, nested = generations.values()
    if bool(cap) + bool(flat) + bool(nested) > 1:
        mixed = " beside ".join(f"{keys[0]!r} ({name})" for name, keys in generations.items() if keys)
        raise ValueError(f"expected the keys of one generation of verl's configuration, got {mixed}")
    if cap:
        return _cap(given)
    return _flat(given, version) if flat else _nested(given, k1_bounds)


def _block(given: dict[str, Any]) -> dict[str, Any]:
    if "algorithm" in given or "actor_rollout_ref" in given:
        actor = _inner(_inner(given, "actor_rollout_ref"), "actor")
        # Configurations of later versions still hold a cap that is off.
        caps = {key: actor[key] for key in CAPS if key in actor and not _is_off(actor[key])}
        return {**caps, **_of_algorithm(_inner(given, "algorithm"), whole=True)}
    whole = any(key in given for key in OF_ALGORITHM)
    return _of_algorithm(given, whole) if whole or "rollout_correction" in given else given


def _inner(given: dict[str, Any], key: str) -> dict[str, Any]:
    return {} if given.get(key) is None else fields_of(given[key], key)


def _of_algorithm(given: dict[str, Any], whole: bool) -> dict[str, Any]:
    beside = {key: given[key] for key in given if not whole or key in KNOWN or str(key).startswith(OURS)}
    beside.pop("rollout_correction", None)
    return {**beside, **_inner(given, "rollout_correction")}


def _old(keys: list[str], instead: str) -> None:
    are = "is an old name" if len(keys) == 1 else "are old names"
    warn_once(("verl", *keys), f"verl: {', '.join(keys)} {are}; {instead}")


def _is_off(cap: object) -> bool:
    return cap is None or (isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap <= 0)


def _cap(given: dict[str, Any]) -> Spec:
    refuse_unknown(given, CAPS)
    on = {key: given[key] for key in given if not _is_off(given[key])}
    if len(on) > 1:
        raise ValueError(f"expected one cap, got {on}")
    if not on:
        _old(list(given), OFF)
        return presets.spec()
    ((key, cap),) = on.items()
    upper = verl_options.number(key, cap)
    _old([key], f'write rollout_is: "token", rollout_is_threshold: {upper!r}')
    return presets.spec(Weight("token", upper=upper))


def _flat(given: dict[str, Any], version: str | None) -> Spec:
    level = one_of("rollout_is_level", given.get("rollout_is_level", "token"), LEVELS)
    mode = one_of("rollout_is_mode", given.get("rollout_is_mode", "truncate"), FLAT_MODES)
    applied = boolean("rollout_is", given.get("rollout_is"))
    old = [key for key in given if key in FLAT] or [f"rollout_is: {str(applied).lower()}"]
    if given.get("rollout_is_threshold") is None:
        _old(old, "leave it out: without rollout_is_threshold all of it is off")
        return presets.spec()
    upper = verl_options.number("rollout_is_threshold", given["rollout_is_threshold"])
    lower = _lower("rollout_is_threshold_lower", given.get("rollout_is_threshold_lower"), upper)
    veto = given.get("rollout_is_veto_threshold", FLAT_VETO)
    criteria = () if veto is None else (verl_options.veto(veto, "rollout_is_veto_threshold"),)
    weight_level, option = LEVELS[level][0], verl_options.OLD_RS_LEVELS[level]
    zeroes = mode == "clip" or version == "0.6.0"
    if mode == "truncate":
        weight = Weight(weight_level, upper=upper)
    elif zeroes:
        weight = Weight(weight_level, lower=lower, upper=upper, outside="zero")
    else:
        weight = Weight(weight_level)
        criteria = (verl_options.ratio_criterion(option, lower, upper), *criteria)
    spec = Spec(
        weight=weight,
        criteria=criteria,
        rejected="zero" if zeroes and criteria else "mask",
        apply=applied,
        report=presets.REPORT,
    )
    line = f"write {expression(spec)}"
    if not zeroes and criteria:
        line += '; for the release 0.6.0 itself, which zeroed weights instead of editing the mask, pass version="0.6.0"'
    _old(old, line)
    return spec


def _lower(key: str, value: object, upper: float) -> float:
    if value is None:
        return 1.0 / upper
    # 0 leaves the lower side open: verl compares in ratio space.
    lower = 0.0 if value == 0 and not isinstance(value, bool) else verl_options.number(key, value)
    if lower > upper:
        raise ValueError(f"{key}: expected at most the upper bound {upper!r}, got {value!r}")
    return lower


def _nested(given: dict[str, Any], k1_bounds: str) -> Spec:
    _check_bypass(given)
    normalize = boolean("rollout_is_batch_normalize", given.get("rollout_is_batch_normalize"))
    weight = None
    if given.get("rollout_is") is not None:
        threshold = given.get("rollout_is_threshold", 2.0)
        if threshold is None:
            raise ValueError(
                "rollout_is_threshold: expected a threshold for rollout_is, got null, with which verl drops the "
                "weights without a word; write rollout_is: null for no weights"
            )
        weight = verl_options.weight(given["rollout_is"], threshold, normalize)
    return presets.spec(weight, (*_rejection(given, k1_bounds), *_veto(given)))


def _rejection(given: dict[str, Any], k1_bounds: str) -> tuple[Criterion, ...]:
    options, threshold = given.get("rollout_rs"), given.get("rollout_rs_threshold")
    lower_key = "rollout_rs_threshold_lower"
    if isinstance(options, str) and options.strip() in verl_options.OLD_RS_LEVELS:
        option = verl_options.OLD_RS_LEVELS[options.strip()]
        upper = verl_options.number("rollout_rs_threshold", _required(threshold))
        lower = _lower(lower_key, given.get(lower_key), upper)
        bounds = verl_options.text(lower, upper)
        _old(
            [f"rollout_rs: {options.strip()}", *([lower_key] if lower_key in given else [])],
            f'write rollout_rs: "{option}", rollout_rs_threshold: "{bounds}", with k1_bounds="ratio"',
        )
        return (verl_options.ratio_criterion(option, lower, upper),)
    if given.get(lower_key) is not None:
        raise ValueError(
            f"{lower_key}: expected with rollout_rs token, sequence or geometric (verl up to 0.7.0), got it with "
            f'rollout_rs: {options!r}; write both bounds as rollout_rs_threshold: "lower_upper"'
        )
    if lower_key in given:
        _old([lower_key], OFF)
    return () if options is None else verl_options.criteria(options, threshold, k1_bounds)


def _required(threshold: object) -> object:
    if threshold is None:
        raise ValueError("rollout_rs_threshold: expected a threshold for rollout_rs, got null")
    return threshold


def _veto(given: dict[str, Any]) -> tuple[Criterion, ...]:
    key = "rollout_token_veto_threshold"
    if key not in given:
        return ()
    if given[key] is None:
        _old([key], OFF)
        return ()
    criterion = verl_options.veto(given[key], key)
    _old([key], f"write {expression(criterion)} among the criteria of a Spec (verl has no veto since 0.7.1)")
    return (criterion,)


def _check_bypass(given: dict[str, Any]) -> None:
    """Check the keys that choose the loss: they are no part of the Spec, but a wrong value is an error."""
    boolean("bypass_mode", given.get("bypass_mode"))
    one_of("loss_type", given.get("loss_type", LOSS_TYPES[0]), LOSS_TYPES)
    key = "bypass_old_logprob_for_rollout"
    if key in given:
        _old([key], f"write bypass_mode: {str(boolean(key, given[key])).lower()}")
    for key in ("use_pure_rollout_correction", "use_policy_gradient"):
        if key in given:
            _old([key], f'write loss_type: "{LOSS_TYPES[boolean(key, given[key])]}"')
