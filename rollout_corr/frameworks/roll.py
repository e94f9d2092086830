"""ROLL: `train_infer_correction`, the settings of the loss of a pipeline, and the variants of its `actor_train`.

The presets have the defaults of its weight and of its filter, both switched on. Its filter narrows the mask before
tokens and sequences are counted. A segment is a run of the mask, which is a turn with turns="runs".
"""

from __future__ import annotations

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
from .shared.preset import LEVELS, level_of, presets
from .shared.recipe import (
    AGGREGATIONS,
    BOTH,
    DECOUPLED,
    SEQUENCES,
    WITH_REFERENCE,
    Named,
    Recipe,
    around_one,
    clip_of_sides,
    mean,
    named_recipe,
    penalty,
)
from .shared.settings import Block, Given, fields_of, given_in, maybe, only, refused, unchecked, word

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

# What a filter compares, and its statistic.
KINDS: dict[str, Stat] = {"ratio": "ratio", "diff": "prob_diff"}
# TrainInferISWeightConfig and TrainInferFilterConfig.
WEIGHT = {"enabled": False, "weight_type": word("token", LEVELS_HERE), "upper_bound": maybe(1.2)}
WEIGHT["detach"] = only(True, "expected true; weights have no gradient here")
FILTER: dict[str, Any] = {
    "enabled": False,
    "agg_type": word("token", LEVELS_HERE),
    "ratio_enabled": True,
    "ratio_low": maybe(0.8),
    "ratio_high": maybe(1.2),
    "diff_enabled": False,
    "diff_low": maybe(-0.2),
    "diff_high": maybe(0.2),
}
ACTOR: dict[str, Any] = {
    "pg_variant": word(None, ("ppo", *VARIANTS, "topr")),
    "cispo_use_unified_mask": only(False, "expected false"),
}
ACTOR |= {name: row for part in VARIANTS.values() for name, row in part.settings.items()}
WEIGHTS = "multiply the advantages by its weights of samples, and read the rest without it"
# Of the pipeline.
TABLE: dict[str, Any] = CLIP | {
    "pg_clip_low": maybe(0.2),
    "pg_clip_high": maybe(0.2),
    "train_infer_correction": Block({"is_weight": Block(WEIGHT), "filters": unchecked(())}),
    "actor_train": Block(ACTOR, whole=True),
    "use_pg_clip_range": False,
    "importance_sampling": word("token", ("token", "seq")),
    "ratio_type": word("token", ("token", "segment")),
    "loss_agg_mode": word("seq-mean-token-mean", (*AGGREGATIONS, "seq-mean-token-sum-norm")),
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "rl_loss_coef": only(1.0, "multiply the value of policy_loss by it, and read the rest with 1"),
    **dict.fromkeys(("difficulty_loss_weight", "length_loss_weight"), only(False, WEIGHTS)),
}
# Keys of a pipeline that are none of the loss's.
WHOLE = ("exp_name", "pretrain", "rollout_batch_size", "adv_estimator", "actor_infer", "reference", "max_steps", "seed")


def settings(config: object) -> Given:
    """Find the configuration of a pipeline, or the block `train_infer_correction` alone."""
    given = fields_of(config)
    if "is_weight" in given or "filters" in given:
        return Given(TABLE, {"train_infer_correction": given})
    return given_in(config, TABLE, whole=WHOLE)


def read(given: Given) -> Spec:
    """Read the block `train_infer_correction`."""
    block = given["train_infer_correction"]
    filters = [block.block("filters", FILTER, each) for each in block["filters"] or ()]
    rules = [rule for rule in filters if rule["enabled"]]
    # Filters of one kind have one name, which a Spec takes once.
    names = [f"filter_{i}_" for i in range(len(rules))] if len(rules) > 1 else [""]
    criteria = [made for name, rule in zip(names, rules, strict=False) for made in _criteria(rule, name)]
    return Spec(weight=_weight(block["is_weight"]), criteria=tuple(criteria))


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


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus, of the configuration of a pipeline."""
    spec, average = read(given), given["loss_agg_mode"]
    if average not in AGGREGATIONS:
        raise refused("loss_agg_mode", f"{average!r} divides by the padded length, which is not known here")
    coefficient = given["kl_loss_coef"] if given["use_kl_loss"] else 0.0
    kl = KL("k3", coefficient, value_clamp=10.0) if coefficient else None
    surrogate = _surrogate(given)
    turns = {"turns": "runs"} if spec.measures_turns or surrogate.mean_unit == "turn" else {}
    if surrogate.mean_unit == "turn" and any(criterion.over == "token" for criterion in spec.criteria):
        raise refused(
            "ratio_type",
            "'segment' together with a filter of agg_type 'token' differs: ROLL splits segments where the filter "
            "removed tokens, this package keeps the segments of the mask given",
        )
    return Recipe(spec if spec.acts else None, Loss(surrogate, replace(AGGREGATIONS[average], over="kept"), kl), turns)


def _weight(given: Given) -> Weight | None:
    if not given["enabled"]:
        return None
    _ = given["detach"]
    return _weight_of(given["weight_type"], given["upper_bound"])


def _criteria(rule: Given, name: str) -> list[Criterion]:
    over, reduce = LEVELS_HERE[rule["agg_type"]]
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
        if rule[f"{kind}_enabled"]
    ]


def _surrogate(given: Given) -> Surrogate:
    actor = given["actor_train"].without_null()
    variant = actor["pg_variant"]
    if variant == "topr":
        why = "'topr' needs the sign of the reward; rc.recipe('roll.topr') takes the advantage's"
        raise refused("actor_train.pg_variant", why)
    actor.refuse_others()
    of_segments = given["ratio_type"] == "segment"
    if of_segments and variant in VARIANTS:
        raise refused("ratio_type", f"expected 'token' with actor_train.pg_variant {variant!r}, got 'segment'")
    if variant in VARIANTS:
        return VARIANTS[variant].of(actor)
    low, high = (given["pg_clip_low"], given["pg_clip_high"]) if given["use_pg_clip_range"] else (None, None)
    sides = given["pg_clip"], low, high, given["dual_clip_loss"]
    if of_segments:
        # Agentic workers, which alone have segments, do not read importance_sampling.
        return _clip_of_segments(*sides)
    made = _clip(*sides)
    # The worker that has variants, its "ppo" too, does not read this setting.
    if given["importance_sampling"] == "seq" and variant is None:
        return GSPO(made.low, made.high, made.dual)
    return made
