"""ROLL's `train_infer_correction`, and the settings of its loss: of a pipeline and of its `actor_train`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_corr.frameworks.roll.presets import RECIPES, clip, clip_of_segments
from rollout_corr.frameworks.shared.recipe import AGGREGATIONS, Recipe, aggregation
from rollout_corr.frameworks.shared.settings import boolean, fields_of, refuse_unknown, settings_of
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.specs.choices import Unit, WeightReduce
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.statistics import Stat
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO
from rollout_corr.specs.terms import KL
from rollout_corr.specs.validate import number, one_of

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
LOSS: dict[str, Any] = {
    "train_infer_correction": None,
    "actor_train": None,
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
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
# A segment is a run of the mask, which is a turn with turns="runs".
LEVELS_HERE: dict[str, tuple[Unit, WeightReduce | None]] = LEVELS | {"segment": ("turn", "mean")}
# What a filter compares, and its statistic.
KINDS: dict[str, Stat] = {"ratio": "ratio", "diff": "prob_diff"}
VARIANTS = ("vanilla", "tis", "cispo", "kimi15")


def read(config: object) -> Spec:
    """Read the block `train_infer_correction`, or the configuration of a pipeline."""
    given = fields_of(config)
    if "is_weight" not in given and "filters" not in given:
        block = settings_of(config, LOSS, whole=WHOLE)["train_infer_correction"]
        given = {} if block is None else fields_of(block, "train_infer_correction")
    refuse_unknown(given, ("is_weight", "filters"))
    rules = [rule for each in given.get("filters") or () if (rule := _block(each, FILTER, "filters"))["enabled"]]
    # Filters of one kind have one name, which a Spec takes once.
    names = [f"filter_{i}_" for i in range(len(rules))] if len(rules) > 1 else [""]
    criteria = [made for name, rule in zip(names, rules, strict=False) for made in _criteria(rule, name)]
    return Spec(weight=_weight(_block(given.get("is_weight") or {}, WEIGHT, "is_weight")), criteria=tuple(criteria))


def write(spec: Spec) -> dict[str, Any]:
    """Write the block `train_infer_correction`: a filter for each criterion."""
    weight: dict[str, Any] = {"enabled": False}
    if spec.weight is not None:
        weight = {"enabled": True, "weight_type": _name_of(spec.weight), "upper_bound": spec.weight.high}
    filters = []
    for criterion in spec.criteria:
        level = _name_of(criterion)
        kind = next((name for name, stat in KINDS.items() if stat == criterion.stat), None)
        if level is not None and kind is not None:
            made = {"enabled": True, "agg_type": level} | {f"{name}_enabled": name == kind for name in KINDS}
            filters.append(made | {f"{kind}_low": criterion.low, f"{kind}_high": criterion.high})
    return {"is_weight": weight, "filters": filters}


def _name_of(part: Weight | Criterion) -> str | None:
    return next((name for name, level in LEVELS_HERE.items() if level == (part.over, part.reduce)), None)


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
    mean = replace(aggregation("loss_agg_mode", AGGREGATIONS, given["loss_agg_mode"]), over="kept")
    kl = None
    if boolean("use_kl_loss", given["use_kl_loss"]) and number("kl_loss_coef", given["kl_loss_coef"]) != 0.0:
        kl = KL("k3", given["kl_loss_coef"], value_clamp=10.0)
    surrogate = _surrogate(given)
    turns = {"turns": "runs"} if spec.measures_turns or surrogate.mean_unit == "turn" else {}
    if surrogate.mean_unit == "turn" and any(criterion.over == "token" for criterion in spec.criteria):
        raise ValueError(
            "ratio_type: 'segment' beside a filter with agg_type 'token' takes the runs of the mask that the filter "
            "leaves, of which a segment may have several, and this package those of the mask given"
        )
    return Recipe(spec if spec.acts else None, Loss(surrogate, mean, kl), turns)


def _block(config: object, known: dict[str, Any], what: str) -> dict[str, Any]:
    given = fields_of(config, what)
    refuse_unknown(given, known)
    return known | given


def _level(name: str, value: object) -> tuple[Unit, WeightReduce | None]:
    return LEVELS_HERE[one_of(name, value, LEVELS_HERE)]


def _weight(given: dict[str, Any]) -> Weight | None:
    if not boolean("is_weight.enabled", given["enabled"]):
        return None
    if not boolean("is_weight.detach", given["detach"]):
        raise ValueError("is_weight.detach: expected true; weights have no gradient here")
    upper = given["upper_bound"]
    over, reduce = _level("is_weight.weight_type", given["weight_type"])
    return Weight(over, reduce, lower=None if upper is None else 0.0, upper=upper)


def _criteria(rule: dict[str, Any], name: str) -> list[Criterion]:
    over, reduce = _level("filters.agg_type", rule["agg_type"])
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


def _surrogate(given: dict[str, Any]) -> Surrogate:
    actor = {} if given["actor_train"] is None else fields_of(given["actor_train"], "actor_train")
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
        raise ValueError(f"ratio_type: expected 'token' beside actor_train.pg_variant {variant!r}, got 'segment'")
    if variant in VARIANTS:
        names = [name for name in ("tis_lower_bound", "tis_upper_bound") if variant == "tis"]
        names += [name for name in ("cispo_epsilon_low", "cispo_epsilon_high") if variant == "cispo"]
        names += ["kimi15_tau"] if variant == "kimi15" else []
        settings = {name: actor[name] for name in names if actor.get(name) is not None}
        return RECIPES[variant].build(**settings).loss.surrogate
    both, ranged = given["pg_clip"], boolean("use_pg_clip_range", given["use_pg_clip_range"])
    low, high = (given["pg_clip_low"], given["pg_clip_high"]) if ranged else (None, None)
    dual = boolean("dual_clip_loss", given["dual_clip_loss"])
    if of_segments:
        # Agentic workers, which alone have segments, do not read importance_sampling.
        return clip_of_segments(both, low, high, dual)
    made = clip(both, low, high, dual)
    # The worker that has variants, its "ppo" too, does not read this setting.
    if one_of("importance_sampling", given["importance_sampling"], ("token", "seq")) == "seq" and variant is None:
        return GSPO(made.low, made.high, made.dual)
    return made
