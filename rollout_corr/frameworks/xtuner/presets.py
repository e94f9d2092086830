"""xtuner: the values of `RolloutImportanceSampling` in the configurations that it ships.

Pairs of bounds are (upper, lower), as in xtuner.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import BOTH, GLOBAL, Named, of_presets, penalty
from rollout_corr.spec.correction import Criterion, Level, Reduce, Scheme, Spec, Unit, Weight, When
from rollout_corr.spec.surrogates import PPO
from rollout_corr.spec.validate import not_negative, one_of

REPORT: tuple[Scheme, ...] = ("native", "xtuner")
# What a level is as a weight, and as the criterion of `rollout_is_mode` mask and both.
LEVELS: dict[str, tuple[Level, Unit, Reduce | None]] = {
    "token": ("token", "token", None),
    "sequence": ("product", "sequence", "sum"),
    "geometric": ("geometric", "sequence", "mean"),
}
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
    level: str = "token",
    mode: str = "truncate",
    threshold: object = None,
    mask_threshold: object = None,
    veto_threshold: object = None,
    veto_level: str = "max",
    veto_negative_adv_only: bool = False,
) -> Spec:
    """`RolloutImportanceSampling` as a Spec.

    Args:
        level: `rollout_is_level`.
        mode: `rollout_is_mode`. "truncate" clamps the weight on both sides, "mask" leaves it and rejects by the mask,
            "both" does both.
        threshold: `rollout_is_threshold`. None switches everything off, the veto too.
        mask_threshold: `rollout_is_mask_threshold`, by default `threshold`.
        veto_threshold: `rollout_is_veto_threshold`.
        veto_level: `rollout_is_veto_level` of xtuner#2023: "max" any token outside the bounds, "geometric" the mean of
            D, "kl3" the mean of exp(D) - 1 - D above the upper bound.
        veto_negative_adv_only: `rollout_is_veto_negative_adv_only` of xtuner#2023.
    """
    one_of("rollout_is_level", level, LEVELS)
    one_of("rollout_is_mode", mode, MODES)
    one_of("rollout_is_veto_level", veto_level, VETO_LEVELS)
    if not isinstance(veto_negative_adv_only, bool):
        raise TypeError(f"rollout_is_veto_negative_adv_only: expected True or False, got {veto_negative_adv_only!r}")
    if threshold is None:
        return Spec(report=REPORT)
    upper, lower = pair("rollout_is_threshold", threshold)
    weight_level, over, reduce = LEVELS[level]
    weight = Weight(weight_level) if mode == "mask" else Weight(weight_level, lower=lower, upper=upper)
    criteria: list[Criterion] = []
    if mode != "truncate":
        if mask_threshold is not None:
            upper, lower = pair("rollout_is_mask_threshold", mask_threshold)
        criteria.append(Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, label="mask"))
    if veto_threshold is not None:
        criteria += _veto(veto_threshold, veto_level, "negative_advantage" if veto_negative_adv_only else "any")
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


@preset_of("xtuner b934f46 (2026-08-21)")
def reasoning(
    threshold: Pair = (5.0, 0.5), mask_threshold: Pair | None = (5.0, 0.5), veto_threshold: Pair | None = (20.0, 0.0)
) -> Spec:
    """Token weight clamped on both sides; tokens outside mask_threshold masked; one outside veto_threshold vetoes."""
    return spec("token", "both", threshold, mask_threshold, veto_threshold)


@preset_of("xtuner b934f46 (2026-08-21)")
def agentic(
    threshold: Pair = (5.0, 0.0), mask_threshold: Pair | None = (5.0, 0.5), veto_threshold: Pair | None = (20.0, 0.0)
) -> Spec:
    """As reasoning, with the weight's lower side open."""
    return spec("token", "both", threshold, mask_threshold, veto_threshold)


RECIPES = of_presets(
    "xtuner",
    Named(PPO, cliprange_low=0.2, cliprange_high=0.2, clip_ratio_c=3.0),
    BOTH,
    GLOBAL + ", after rejection",
    denominator="kept",
    kl=penalty(value_clamp=10.0, kl_loss_coef=0.0),
)
