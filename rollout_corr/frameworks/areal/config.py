"""AReaL: presets of `rejection_sampling` by its metric, losses, RejectionSamplingConfig and PPOActorConfig.

AReaL edits the mask and zeroes the weight, but divides by the original token count: the mean of its loss is over
"original". With a ratio it reads non-finite D as 0; its KL metrics are not cleaned, so there a NaN fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...specs.choices import Nonfinite, Reduce
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.rules import MeanBelow
from ...specs.statistics import Stat
from ...specs.surrogate import Surrogate
from ...specs.surrogates import GSPO, SAPO
from ...specs.terms import Mean
from ...specs.validate import number, one_of, positive
from ..shared.preset import HIGH, LOW, Alternatives, presets
from ..shared.preset import LEVELS as RATIO_LEVELS
from ..shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    SAME_AS_PPO,
    Named,
    Recipe,
    around_one,
    as_wide,
    clip,
    named_recipe,
    of_presets,
)
from ..shared.settings import (
    Block,
    Given,
    NoEquivalent,
    Setting,
    defaults_of,
    fields_of,
    given_in,
    maybe,
    needed,
    or_null,
    refused,
    unchecked,
    warn_once,
    word,
)

# --- the correction ---

LEVELS, ACTIONS = ("token", "sequence"), ("mask", "clamp")
AGGREGATIONS: tuple[Reduce, ...] = ("sum", "mean", "max")
# Metrics and their statistics; the sign of kl_k1 is the other one.
STATS: dict[str, Stat] = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3_reverse"}
STATS |= {"binary_kl": "binary_kl_symmetric"}


def spec(
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: Reduce = "mean",
    upper: float | None = 5.0,
    lower: float | None = None,
) -> Spec:
    """`RejectionSamplingConfig` as a Spec; the arguments are its fields, with its defaults."""
    check(level, action, metric, agg)
    if action == "clamp":
        if level == "sequence" and agg != "mean":
            raise refused(
                "agg",
                f"expected 'mean' with action 'clamp' at the level sequence, got {agg!r}: the weight is clamped by "
                "another number than itself, which no Spec does",
            )
        ratio = RATIO_LEVELS["token" if level == "token" else "geometric"]
        return Spec(weight=Weight(*ratio, lower=lower or None, upper=upper), nonfinite="neutral")
    reduce: Reduce | None = None if level == "token" else agg
    if metric == "kl_k1":
        # AReaL's k1 is D and ours is -D, so the bounds swap sides and a maximum becomes a minimum.
        reduce = "min" if reduce == "max" else reduce
        lower, upper = -number("upper", upper), None if lower is None else -number("lower", lower)
    weight = Weight.geometric() if metric == "ratio" and level == "sequence" else Weight.token()
    nonfinite: Nonfinite = "neutral" if metric == "ratio" else "reject"
    over = "token" if level == "token" else "sequence"
    criterion = Criterion(STATS[metric], over, reduce, lower=lower, upper=upper)  # type: ignore[arg-type]  # checked
    return Spec(weight=weight, criteria=(criterion,), rejected="both", nonfinite=nonfinite)


def check(level: str, action: str, metric: str, agg: str) -> None:
    """Refuse what AReaL refuses."""
    one_of("level", level, LEVELS)
    one_of("action", action, ACTIONS)
    one_of("metric", metric, STATS)
    one_of("agg", agg, AGGREGATIONS)
    if action == "clamp" and metric != "ratio":
        raise refused("action", f"expected 'mask' with metric {metric!r}, as AReaL does, got 'clamp'")


def m2po(m2_threshold: float) -> Spec:
    """M2PO. AReaL drops tokens of equal D^2 one by one, here they go together; its loss counts "kept" tokens."""
    half = positive("m2_threshold", m2_threshold) / 2.0
    return Spec(criteria=(Criterion("k2", upper=MeanBelow(half), label="m2po"),), nonfinite="propagate")


def _kl(metric: str, level: str, agg: Reduce, upper: float, lower: float | None) -> Spec:
    return spec(level, "mask", one_of("metric", metric, ("kl_k1", "kl_k2", "kl_k3")), agg, upper, lower)


presets("areal", "AReaL 1.0.4")(
    token_mask=(
        "w = exp(D) inside [lower, upper], else dropped (IcePop); AReaL's own default leaves the lower side open.",
        lambda lower, upper: spec(lower=lower, upper=upper),
        {"lower": maybe(0.5), "upper": maybe(5.0)},
    ),
    seq=(
        "w = exp(mean D), dropped for a sequence whose exp(agg of D) is outside the bounds.",
        lambda upper, lower, agg: spec("sequence", agg=agg, upper=upper, lower=lower),
        {"upper": maybe(5.0), "lower": None, "agg": "mean"},
    ),
    kl=(
        "w = exp(D), dropped where D, D^2/2 or exp(-D) - 1 + D (kl_k1, kl_k2, kl_k3) is outside the bounds.",
        _kl,
        {"metric": "kl_k3", "level": "token", "agg": "mean", "upper": 5.0, "lower": None},
    ),
    kpop=(
        "w = exp(D), dropped for a token whose binary KL is above upper in either direction "
        "(KPop; its paper says 0.1).",
        lambda upper: spec(metric="binary_kl", upper=upper),
        {"upper": 2.0},
        "AReaL cbff54d (2026-08-22)",
    ),
    m2po=(
        "No weight; drops the tokens with the largest D^2 until the mean of D^2 over the rest is below a threshold.",
        m2po,
        {"m2_threshold": 0.04},
        "AReaL 4aef98d (2026-05-21)",
    ),
)

# --- losses ---

CLIP: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None}
TAUS = {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}
INTERPOLATED = (
    "prox_logp_method=loglinear: old_logp is rc.proximal(new_logp, rollout_logp, batch), of a Batch with versions"
)
AVERAGED = "it averages the advantages of a sequence, which is not done here"
of_presets("areal", Named(clip, **CLIP), BOTH, GLOBAL)
named_recipe("areal.m2po", Named(clip, **CLIP), BOTH, GLOBAL, spec="areal.m2po", over="kept")
named_recipe("areal.ppo", Named(clip, **CLIP), DECOUPLED, GLOBAL)
named_recipe("areal.grpo", Named(clip, **CLIP), DECOUPLED, f"{SAME_AS_PPO}; {GLOBAL}")
named_recipe("areal.a3po", Named(clip, **CLIP), DECOUPLED, f"{INTERPOLATED}; {GLOBAL}")
named_recipe("areal.gspo", Named(as_wide(GSPO), **CLIP), DECOUPLED, f"{GLOBAL}; {AVERAGED}")
named_recipe("areal.sapo", Named(SAPO, **TAUS), DECOUPLED, GLOBAL)
named_recipe(
    "areal.cispo",
    Named(around_one, eps_clip=1.0, eps_clip_higher=4.0),
    DECOUPLED,
    f"the bounds that its help recommends; {GLOBAL}",
)

# --- the configuration ---

# The settings of RejectionSamplingConfig, checked by `spec`.
REJECTION = {name: unchecked(default) for name, default in defaults_of(spec).items()}
# What rejection_sampling was up to #1088.
OLD = ("behave_imp_weight_cap", "behav_imp_weight_cap", "behave_imp_weight_mode")
# The settings of PPOActorConfig that make its loss, with its defaults.
TABLE: dict[str, Any] = {
    **CLIP,
    **TAUS,
    "m2_threshold": Setting(None, or_null(positive)),
    "use_sapo_loss": False,
    "use_cispo_loss": False,
    "recompute_logprob": unchecked(False),
    "use_decoupled_loss": False,
    "rejection_sampling": Block(REJECTION),
    "importance_sampling_level": word("token", LEVELS),
    "prox_logp_method": "recompute",
    **dict.fromkeys(OLD, unchecked(None)),
}
# Other keys of PPOActorConfig.
OF_ACTOR = ("kl_ctl", "ppo_n_minibatches", "path", "optimizer", "backend", "group_size", "adv_norm", "reward_norm")
# Bounds that the batch decides, and a setting of its own has.
RULES = (MeanBelow,)


BOUNDS = {"lower": LOW, "upper": HIGH}
WRITTEN: Alternatives = (
    ({"use_decoupled_loss": True},),
    ({}, {"m2_threshold": HIGH}),
    (
        {"rejection_sampling": None},
        {"rejection_sampling": {"level": LEVELS, "action": "clamp"} | BOUNDS},
        {"rejection_sampling": {"level": "token", "metric": tuple(STATS)} | BOUNDS},
        {"rejection_sampling": {"level": "sequence", "metric": tuple(STATS), "agg": AGGREGATIONS} | BOUNDS},
    ),
)


def settings(config: object) -> Given:
    """Find a PPOActorConfig, in a configuration with a block `actor`, or the block `rejection_sampling` alone."""
    if not fields_of(config).keys() & {"actor", *TABLE, *OF_ACTOR}:
        alone = given_in(config, REJECTION).given
        return Given(TABLE, {"rejection_sampling": alone, "use_decoupled_loss": True})
    given = given_in(config, TABLE, blocks=[("actor",)], whole=OF_ACTOR)
    for name in OLD:
        if given.says(name):
            raise refused(name, f"a setting of AReaL before rejection_sampling; {_instead(given)}")
    if given.says("rejection_sampling") and given["use_sapo_loss"]:
        warn_once("use_sapo_loss", "areal: use_sapo_loss does not read rejection_sampling; leave that out", "areal")
    return given


def read(given: Given) -> Spec:
    """Read `rejection_sampling` and `m2_threshold`."""
    return _correction(given) or Spec()


def recipe(given: Given) -> Recipe:
    """Read the whole loss from a PPOActorConfig, or from a configuration with a block `actor`.

    `old_logp` is AReaL's proximal policy: with `prox_logp_method` "loglinear" the interpolation, with
    "reuse_train_logp" `new_logp.detach()`, and without `use_decoupled_loss` or `recompute_logprob` the engine's.
    """
    sapo = given["use_sapo_loss"]
    surrogate, correction = _surrogate(given, sapo), None if sapo else _correction(given)
    threshold = given["m2_threshold"]
    if threshold is not None and correction is not None and correction.weight is not None:
        raise refused(
            "m2_threshold",
            "expected None with rejection_sampling, because the loss counts what the one drops and not "
            f"what the other drops, got {threshold!r}; leave it out, and pass as mask the one of "
            f"rc.correct(..., spec=rc.spec('areal.m2po', m2_threshold={threshold!r}))",
            NoEquivalent,
        )
    # What M2PO drops leaves AReaL's count of tokens.
    drops = correction is not None and threshold is not None
    return Recipe(correction, Loss(surrogate, Mean(over="kept" if drops else "original")))


def _instead(given: Given) -> str:
    """Say what to write in place of a cap, which masked tokens above it unless a mode said otherwise."""
    mode = given["behave_imp_weight_mode"] or "token_mask"
    level, _, does = str(mode).partition("_")
    cap = given["behave_imp_weight_cap"] or given["behav_imp_weight_cap"]
    if mode == "disabled" or cap is None:
        return "leave it out: it is off"
    one_of("behave_imp_weight_mode", mode, [f"{level}_{does}" for level in LEVELS for does in ("mask", "truncate")])
    action = {"mask": "mask", "truncate": "clamp"}[does]
    upper = number("behave_imp_weight_cap", cap)
    return f"write rejection_sampling: {{level: {level}, action: {action}, metric: ratio, upper: {upper!r}}}"


def _correction(given: Given) -> Spec | None:
    """The tokens that M2PO drops, then the rejection among those that are left."""
    # Without the decoupled loss AReaL compares a policy with itself.
    threshold, rejects = given["m2_threshold"], given.says("rejection_sampling")
    if (threshold is None and not rejects) or not given["use_decoupled_loss"]:
        return None
    drops = None if threshold is None else m2po(threshold)
    if not rejects:
        return drops
    rejection = spec(**given["rejection_sampling"])
    if drops is None:
        return rejection
    return replace(rejection, criteria=(*drops.criteria, *rejection.criteria), rejected="both", sums_over="kept")


def _surrogate(given: Given, sapo: bool) -> Surrogate:
    level, low, high, dual = (given[name] for name in ("importance_sampling_level", *CLIP))
    if given["use_cispo_loss"]:
        if sapo or level != "token":
            why = "AReaL refuses it with use_sapo_loss or importance_sampling_level: sequence"
            raise refused("use_cispo_loss", why)
        return around_one(low, needed("eps_clip_higher", "use_cispo_loss", high))
    if sapo:
        if given["use_decoupled_loss"]:
            raise refused("use_sapo_loss", "AReaL refuses it together with use_decoupled_loss")
        if level != "token":
            raise refused("importance_sampling_level", "expected 'token' with use_sapo_loss: SAPO has no other here")
        return SAPO(*(given[name] for name in TAUS))
    if dual is not None and dual <= 1.0:
        raise refused("c_clip", f"expected a number > 1, got {dual!r}")
    return clip(low, high, dual) if level == "token" else as_wide(GSPO)(low, high, dual)
