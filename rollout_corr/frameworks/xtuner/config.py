"""xtuner's `RolloutImportanceSampling`. Its pairs are (upper, lower), and stay so."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_corr.frameworks.shared.settings import boolean, defaults_of, fields_of, refuse_unknown
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.spec.correction import Criterion, Scheme, Spec, Weight, When
from rollout_corr.spec.validate import not_negative, one_of

REPORT: tuple[Scheme, ...] = ("native", "xtuner")
MODES = ("truncate", "mask", "both")
VETO_LEVELS = ("max", "geometric", "kl3")

Pair = tuple[float, float]


def pair(key: str, value: object) -> Pair:
    """(upper, lower) with upper > lower >= 0."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{key}: expected a pair (upper, lower), got {type(value).__name__} {value!r}")
    if len(value) != 2:
        raise ValueError(f"{key}: expected a pair (upper, lower), got {value!r}")
    upper, lower = not_negative(key, value[0]), not_negative(key, value[1])
    if not upper > lower:
        raise ValueError(f"{key}: expected (upper, lower) with upper > lower, got {value!r}; xtuner begins with upper")
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

    Args:
        rollout_is_level: "token", "sequence" (the product) or "geometric".
        rollout_is_mode: "truncate" clamps the weight on both sides, "mask" leaves it and rejects by the mask, "both"
            does both.
        rollout_is_threshold: A pair (upper, lower). None switches everything off, the veto too.
        rollout_is_mask_threshold: A pair, by default `rollout_is_threshold`.
        rollout_is_veto_threshold: A pair, or None for no veto.
        rollout_is_veto_level: Of xtuner#2023: "max" any token outside the bounds, "geometric" the mean of D, "kl3" the
            mean of exp(D) - 1 - D above the upper bound.
        rollout_is_veto_negative_adv_only: Of xtuner#2023: only sequences with a negative mean advantage are vetoed.
    """
    negative_only = boolean("rollout_is_veto_negative_adv_only", rollout_is_veto_negative_adv_only)
    weight_level, over, reduce = LEVELS[one_of("rollout_is_level", rollout_is_level, LEVELS)]
    mode = one_of("rollout_is_mode", rollout_is_mode, MODES)
    veto_level = one_of("rollout_is_veto_level", rollout_is_veto_level, VETO_LEVELS)
    if rollout_is_threshold is None:
        return Spec(report=REPORT)
    upper, lower = pair("rollout_is_threshold", rollout_is_threshold)
    weight = Weight(weight_level) if mode == "mask" else Weight(weight_level, lower=lower, upper=upper)
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


def read(config: object) -> Spec:
    """Read `RolloutImportanceSampling`, or a loss configuration that holds it as `rollout_is`."""
    given = fields_of(config)
    if "rollout_is" in given:
        given = {} if given["rollout_is"] is None else fields_of(given["rollout_is"], "rollout_is")
    refuse_unknown(given, defaults_of(spec))
    return spec(**given)
