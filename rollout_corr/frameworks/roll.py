"""ROLL: `train_infer_correction`, the settings of the loss of a pipeline, and the variants of its `actor_train`.

The presets have the defaults of its weight and of its filter, both switched on. Its filter narrows the mask before
tokens and sequences are counted. A segment is a run of the mask, which is a turn with turns="runs".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..specs.choices import Unit, WeightReduce
from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.statistics import Stat
from ..specs.surrogate import Surrogate
from ..specs.surrogates import DRO, GPG, GSPO, PPO, TOPR, Score
from ..specs.terms import KL
from ..specs.validate import number, one_of
from .shared.preset import LEVELS, level_of, presets
from .shared.recipe import (
    AGGREGATIONS,
    BOTH,
    DECOUPLED,
    SEQUENCES,
    WITH_REFERENCE,
    Named,
    Recipe,
    aggregation,
    around_one,
    clip_of_sides,
    mean,
    named_recipe,
    penalty,
)
from .shared.settings import block_of, boolean, fields_of, inner, known_in, maybe, settings_of

# --- presets ---

LEVELS_HERE: dict[str, tuple[Unit, WeightReduce | None]] = LEVELS | {"segment": ("turn", "mean")}


def _weight_of(level: str, upper: float | None) -> Weight:
    return Weight(*LEVELS_HERE[level], lower=None if upper is None else 0.0, upper=upper)


def _filtered(level: str, upper: float | None, low: float | None, high: float | None) -> Spec:
    weight = Weight.token(lower=0.0, upper=upper) if level == "token" else _weight_of(level, upper)
    return Spec(weight=weight, criteria=(Criterion("ratio", *LEVELS_HERE[level], lower=low, upper=high),))


BOUNDS = {"upper_bound": maybe(1.2), "ratio_low": maybe(0.8), "ratio_high": maybe(1.2)}
presets("roll", "ROLL 8eb27cc (2026-08-18)")(
    default=(
        "w = exp(D) clamped to [0, upper_bound]; tokens outside [ratio_low, ratio_high] masked.",
        partial(_filtered, "token"),
        BOUNDS,
    ),
    segment=(
        "w = exp(mean D of the segment) clamped to [0, upper_bound]; segments outside [ratio_low, ratio_high] masked.",
        partial(_filtered, "segment"),
        BOUNDS,
    ),
)

# --- losses ---


def _clip(both: float, low: float | None, high: float | None, dual: bool) -> PPO:
    """PPO's clip, whose sides are `pg_clip` where they are not given. The dual clip has no setting of its own."""
    return clip_of_sides(both, low, high, 1.0 + 2.0 * both if dual else None)


def _clip_of_segments(both: float, low: float | None, high: float | None, dual: bool) -> GSPO:
    """PPO's clip of the ratio of a whole segment (`ratio_type: segment` in agentic pipelines)."""
    made = _clip(both, low, high, dual)
    return GSPO(made.low, made.high, made.dual, over="turn")


# The values of `actor_train.pg_variant` except PPO; TOPR needs the sign of the reward as well.
VARIANTS: dict[str, Named[Surrogate]] = {
    "vanilla": Named(GPG),
    "tis": Named(Score, tis_lower_bound=0.0, tis_upper_bound=1.0),
    "cispo": Named(around_one, cispo_epsilon_low=0.1, cispo_epsilon_high=0.1),
    "kimi15": Named(DRO, kimi15_tau=0.1),
}
TOPR_WEIGHTS = Named(
    lambda good, bad: TOPR(positive=good, negative=bad), topr_positive_weight=1.0, topr_negative_weight=1.0
)
CLIP: dict[str, Any] = {"pg_clip": 0.2, "pg_clip_low": None, "pg_clip_high": None, "dual_clip_loss": False}
COUNTED: dict[str, Any] = {"mean": mean(loss_agg_mode="seq-mean-token-mean")}
named_recipe("roll.default", Named(_clip, **CLIP), BOTH, spec="roll.default", over="kept", **COUNTED)
named_recipe(
    "roll.segment",
    Named(_clip_of_segments, **CLIP),
    BOTH,
    "an agentic pipeline's ratio_type, weight_type and agg_type: segment, a run of the mask",
    spec="roll.segment",
    over="kept",
    turns="runs",
    **COUNTED,
)
named_recipe("roll.ppo", Named(_clip, **CLIP), DECOUPLED, "without train_infer_correction", **COUNTED)
named_recipe(
    "roll.grpo",
    Named(_clip, **CLIP),
    WITH_REFERENCE,
    "without train_infer_correction, with use_kl_loss, as most of ROLL's examples of GRPO have it",
    kl=penalty(value_clamp=10.0, kl_loss_coef=0.01),
    **COUNTED,
)
named_recipe("roll.vanilla", GPG(), (), mean=SEQUENCES)
named_recipe("roll.tis", VARIANTS["tis"], DECOUPLED, mean=SEQUENCES)
named_recipe("roll.cispo", VARIANTS["cispo"], DECOUPLED, mean=SEQUENCES)
named_recipe("roll.kimi15", VARIANTS["kimi15"], DECOUPLED, "Kimi K1.5's regularizer, token by token", mean=SEQUENCES)
SIGN = "ROLL uses the sign of the reward, this package the sign of the advantage"
named_recipe("roll.topr", TOPR_WEIGHTS, DECOUPLED, SIGN, mean=SEQUENCES)

# --- the configuration ---

# TrainInferISWeightConfig and TrainInferFilterConfig.
WEIGHT: dict[str, Any] = {"enabled": False, "weight_type": "token", "upper_bound": 1.2, "detach": True}
FILTER: dict[str, Any] = {
    "enabled": False,
    "agg_type": "token",
    "ratio_enabled": True,
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "diff_enabled": False,
    "diff_low": -0.2,
    "diff_high": 0.2,
}
# Of the pipeline.
LOSS: dict[str, Any] = CLIP | {
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "train_infer_correction": None,
    "actor_train": None,
    "use_pg_clip_range": False,
    "importance_sampling": "token",
    "ratio_type": "token",
    "loss_agg_mode": "seq-mean-token-mean",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "rl_loss_coef": 1.0,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
}
# Keys of a pipeline that are none of the loss's.
WHOLE = ("exp_name", "pretrain", "rollout_batch_size", "adv_estimator", "actor_infer", "reference", "max_steps", "seed")
# What a filter compares, and its statistic.
KINDS: dict[str, Stat] = {"ratio": "ratio", "diff": "prob_diff"}


def read(config: object) -> Spec:
    """Read the block `train_infer_correction`, or the configuration of a pipeline."""
    given = fields_of(config)
    if "is_weight" not in given and "filters" not in given:
        given = inner(settings_of(config, LOSS, whole=WHOLE), "train_infer_correction")
    given = known_in(given, ("is_weight", "filters"))
    filters = [block_of(each, "filters", FILTER) for each in given.get("filters") or ()]
    rules = [rule for rule in filters if rule["enabled"]]
    # Filters of one kind have one name, which a Spec takes once.
    names = [f"filter_{i}_" for i in range(len(rules))] if len(rules) > 1 else [""]
    criteria = [made for name, rule in zip(names, rules, strict=False) for made in _criteria(rule, name)]
    return Spec(weight=_weight(block_of(given.get("is_weight") or {}, "is_weight", WEIGHT)), criteria=tuple(criteria))


# Where what is written stands in a configuration.
PLACE = "train_infer_correction"


def write(spec: Spec) -> dict[str, Any]:
    """Write the block `train_infer_correction`: a filter for each criterion."""
    weight: dict[str, Any] = {"enabled": False}
    if spec.weight is not None:
        weight = {"enabled": True, "weight_type": level_of(spec.weight, LEVELS_HERE), "upper_bound": spec.weight.high}
    filters = []
    for criterion in spec.criteria:
        level = level_of(criterion, LEVELS_HERE)
        kind = next((name for name, stat in KINDS.items() if stat == criterion.stat), None)
        if level is not None and kind is not None:
            made = {"enabled": True, "agg_type": level} | {f"{name}_enabled": name == kind for name in KINDS}
            filters.append(made | {f"{kind}_low": criterion.low, f"{kind}_high": criterion.high})
    return {"is_weight": weight, "filters": filters}


def recipe(config: object) -> Recipe:
    """Read the whole loss but its entropy bonus, of the configuration of a pipeline."""
    given, spec = settings_of(config, LOSS, whole=WHOLE), read(config)
    if number("rl_loss_coef", given["rl_loss_coef"]) != 1.0:
        raise ValueError("rl_loss_coef: multiply the value of policy_loss by it, and read the rest with 1")
    for name in ("difficulty_loss_weight", "length_loss_weight"):
        if boolean(name, given[name]):
            raise ValueError(f"{name}: multiply the advantages by its weights of samples, and read the rest without it")
    if given["loss_agg_mode"] == "seq-mean-token-sum-norm":
        raise ValueError(
            "loss_agg_mode: 'seq-mean-token-sum-norm' divides by the padded length, which is not known here"
        )
    average = replace(aggregation("loss_agg_mode", AGGREGATIONS, given["loss_agg_mode"]), over="kept")
    kl = None
    if boolean("use_kl_loss", given["use_kl_loss"]) and number("kl_loss_coef", given["kl_loss_coef"]) != 0.0:
        kl = KL("k3", given["kl_loss_coef"], value_clamp=10.0)
    surrogate = _surrogate(given)
    turns = {"turns": "runs"} if spec.measures_turns or surrogate.mean_unit == "turn" else {}
    if surrogate.mean_unit == "turn" and any(criterion.over == "token" for criterion in spec.criteria):
        raise ValueError(
            "ratio_type: 'segment' together with a filter of agg_type 'token' differs: ROLL splits segments where the "
            "filter removed tokens, this package keeps the segments of the mask given"
        )
    return Recipe(spec if spec.acts else None, Loss(surrogate, average, kl), turns)


def _level(name: str, value: object) -> str:
    return one_of(name, value, LEVELS_HERE)


def _weight(given: Mapping[str, Any]) -> Weight | None:
    if not boolean("is_weight.enabled", given["enabled"]):
        return None
    if not boolean("is_weight.detach", given["detach"]):
        raise ValueError("is_weight.detach: expected true; weights have no gradient here")
    return _weight_of(_level("is_weight.weight_type", given["weight_type"]), given["upper_bound"])


def _criteria(rule: Mapping[str, Any], name: str) -> list[Criterion]:
    over, reduce = LEVELS_HERE[_level("filters.agg_type", rule["agg_type"])]
    return [
        Criterion(
            stat,
            over=over,
            reduce=reduce,
            lower=rule[f"{kind}_low"],
            upper=rule[f"{kind}_high"],
            label=f"{name}{kind}" if name else "",
        )
        for kind, stat in KINDS.items()
        if boolean(f"filters.{kind}_enabled", rule[f"{kind}_enabled"])
    ]


def _surrogate(given: Mapping[str, Any]) -> Surrogate:
    actor = inner(given, "actor_train")
    variant = actor.get("pg_variant")
    if variant == "topr":
        raise ValueError(
            "actor_train.pg_variant: 'topr' needs the sign of the reward; rc.recipe('roll.topr') takes the advantage's"
        )
    if variant is not None:
        one_of("actor_train.pg_variant", variant, ("ppo", *VARIANTS))
    if boolean("actor_train.cispo_use_unified_mask", actor.get("cispo_use_unified_mask")):
        raise ValueError("actor_train.cispo_use_unified_mask: expected false")
    of_segments = one_of("ratio_type", given["ratio_type"], ("token", "segment")) == "segment"
    if of_segments and variant in VARIANTS:
        raise ValueError(f"ratio_type: expected 'token' with actor_train.pg_variant {variant!r}, got 'segment'")
    if variant in VARIANTS:
        return VARIANTS[variant].taken_from({name: value for name, value in actor.items() if value is not None})
    ranged = boolean("use_pg_clip_range", given["use_pg_clip_range"])
    low, high = (given["pg_clip_low"], given["pg_clip_high"]) if ranged else (None, None)
    sides = given["pg_clip"], low, high, boolean("dual_clip_loss", given["dual_clip_loss"])
    if of_segments:
        # Agentic workers, which alone have segments, do not read importance_sampling.
        return _clip_of_segments(*sides)
    made = _clip(*sides)
    # The worker that has variants, its "ppo" too, does not read this setting.
    if one_of("importance_sampling", given["importance_sampling"], ("token", "seq")) == "seq" and variant is None:
        return GSPO(made.low, made.high, made.dual)
    return made
