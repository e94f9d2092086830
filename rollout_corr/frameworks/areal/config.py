"""AReaL's `RejectionSamplingConfig`, and the `PPOActorConfig` around it."""

from __future__ import annotations

from typing import Any

from rollout_corr.frameworks.areal import presets
from rollout_corr.frameworks.shared.recipe import Recipe, around_one, clip
from rollout_corr.frameworks.shared.settings import boolean, defaults_of, fields_of, settings_of
from rollout_corr.frameworks.shared.specs import LEVELS
from rollout_corr.specs.bounds_of_batch import MeanBelow
from rollout_corr.specs.choices import Reduce
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.statistics import Stat
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO, SAPO
from rollout_corr.specs.terms import Mean
from rollout_corr.specs.validate import number, one_of, positive

ACTIONS = ("mask", "clamp")
METRICS = ("ratio", *presets.METRICS, "binary_kl")
# Metrics and their statistics; the sign of kl_k1 is the other one.
STATS: dict[str, Stat] = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3_reverse"}
STATS |= {"binary_kl": "binary_kl_symmetric"}
# The settings of PPOActorConfig that make its loss, with its defaults.
ACTOR: dict[str, Any] = {
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "m2_threshold": None,
    "use_sapo_loss": False,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "use_cispo_loss": False,
    "recompute_logprob": False,
    "use_decoupled_loss": False,
    "rejection_sampling": None,
    "importance_sampling_level": "token",
    "prox_logp_method": "recompute",
    "behave_imp_weight_cap": None,
    "behave_imp_weight_mode": None,
}
# Other keys of PPOActorConfig.
OF_ACTOR = ("kl_ctl", "ppo_n_minibatches", "path", "optimizer", "backend", "group_size", "adv_norm", "reward_norm")


def spec(
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: Reduce = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> Spec:
    """`RejectionSamplingConfig` as a Spec; the arguments are its fields, with its defaults."""
    check(level, action, metric, agg)
    if action == "clamp":
        if level == "sequence" and agg != "mean":
            raise ValueError(
                f"agg: expected 'mean' with action 'clamp' at the level sequence, got {agg!r}: the weight is clamped "
                "by another number than itself, which no Spec does"
            )
        ratio = LEVELS["token" if level == "token" else "geometric"]
        weight = Weight(*ratio, lower=lower or None, upper=upper)
        return Spec(weight=weight, nonfinite="neutral")
    if metric == "binary_kl":
        over, reduce = presets.unit(level, agg)
        criterion = Criterion("binary_kl_symmetric", over=over, reduce=reduce, lower=lower, upper=upper)
        return Spec(weight=Weight.token(), criteria=(criterion,), rejected="both")
    if metric != "ratio":
        return presets.kl(metric=metric, level=level, agg=agg, upper=upper, lower=lower)
    if level == "token":
        return presets.token_mask(lower=lower, upper=upper)
    return presets.seq(upper=upper, lower=lower, agg=agg)


OF_SPEC = defaults_of(spec)


def check(level: str, action: str, metric: str, agg: str) -> None:
    """Refuse what AReaL refuses."""
    one_of("level", level, presets.LEVELS)
    one_of("action", action, ACTIONS)
    one_of("metric", metric, METRICS)
    one_of("agg", agg, presets.AGGREGATIONS)
    if action == "clamp" and metric != "ratio":
        raise ValueError(f"action: expected 'mask' with metric {metric!r}, as AReaL does, got 'clamp'")


def read(config: object) -> Spec:
    """Read the block `rejection_sampling`, a PPOActorConfig, or a configuration with a block `actor`."""
    keys = fields_of(config).keys()
    if keys & {"actor", *ACTOR, *OF_ACTOR}:
        return _correction(_settings(config)) or Spec()
    return spec(**settings_of(config, OF_SPEC))


# Bounds that the batch decides, and a setting of its own has.
RULES = (MeanBelow,)


def write(spec: Spec) -> dict[str, Any]:
    """Write settings of a PPOActorConfig: `rejection_sampling` or `m2_threshold`, with what they need."""
    first, weight = next(iter(spec.criteria), None), spec.weight
    if first is not None and isinstance(first.upper, MeanBelow):
        return {"use_decoupled_loss": True, "rejection_sampling": None, "m2_threshold": 2.0 * first.upper.below}
    if weight is None:
        return {"use_decoupled_loss": True, "rejection_sampling": None}
    made: dict[str, Any] = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean"}
    if first is None:
        made |= {"action": "clamp", "level": weight.over} | _written(weight)
    else:
        agg = first.reduce or "mean"
        lower, upper = first.low, first.high
        metric = next((name for name, stat in STATS.items() if stat == first.stat), "ratio")
        if metric == "kl_k1":
            # AReaL's k1 has the other sign: see `presets.kl`.
            agg = "max" if agg == "min" else agg
            lower, upper = (None if bound is None else -bound for bound in (upper, lower))
        made |= {"level": first.over, "metric": metric, "agg": agg} | _bounds(lower, upper)
    return {"use_decoupled_loss": True, "rejection_sampling": made}


def _written(weight: Weight) -> dict[str, Any]:
    return _bounds(weight.low, weight.high)


def _bounds(lower: float | None, upper: float | None) -> dict[str, Any]:
    return {"lower": lower} | ({} if upper is None else {"upper": upper})


def recipe(config: object) -> Recipe:
    """Read the whole loss from a PPOActorConfig, or from a configuration with a block `actor`.

    `old_logp` is AReaL's proximal policy: with `prox_logp_method` "loglinear" the interpolation, with
    "reuse_train_logp" `new_logp.detach()`, and without `use_decoupled_loss` or `recompute_logprob` the engine's.
    """
    given = _settings(config)
    sapo = boolean("use_sapo_loss", given["use_sapo_loss"])
    surrogate, correction = _surrogate(given, sapo), None if sapo else _correction(given)
    # What M2PO drops leaves AReaL's count of tokens, and what its rejection drops does not.
    m2po = correction is not None and given["m2_threshold"] is not None
    return Recipe(correction, Loss(surrogate, Mean(over="kept" if m2po else "original")))


def _settings(config: object) -> dict[str, Any]:
    found = settings_of(config, ACTOR, blocks=[("actor",)], whole=OF_ACTOR)
    for name in ("behave_imp_weight_cap", "behave_imp_weight_mode"):
        if found[name] is not None:
            raise ValueError(f"{name}: AReaL has removed it; write rejection_sampling: {{metric: ratio, upper: ...}}")
    return found


def _correction(given: dict[str, Any]) -> Spec | None:
    """M2PO or the rejection, of which AReaL does the one before the other."""
    rejection, threshold = _rejection(given), given["m2_threshold"]
    if threshold is None:
        return rejection
    if rejection is not None:
        raise ValueError(
            "m2_threshold: expected None beside rejection_sampling, because the loss counts what the one drops and not "
            f"what the other drops, got {threshold!r}"
        )
    m2po = presets.m2po(number("m2_threshold", threshold))
    # Without the decoupled loss AReaL compares a policy with itself.
    return m2po if boolean("use_decoupled_loss", given["use_decoupled_loss"]) else None


def _rejection(given: dict[str, Any]) -> Spec | None:
    # Without the decoupled loss AReaL compares a policy with itself.
    if given["rejection_sampling"] is None or not boolean("use_decoupled_loss", given["use_decoupled_loss"]):
        return None
    return spec(**settings_of(fields_of(given["rejection_sampling"], "rejection_sampling"), OF_SPEC))


def _surrogate(given: dict[str, Any], sapo: bool) -> Surrogate:
    level = one_of("importance_sampling_level", given["importance_sampling_level"], presets.LEVELS)
    low, high, dual = given["eps_clip"], given["eps_clip_higher"], given["c_clip"]
    if boolean("use_cispo_loss", given["use_cispo_loss"]):
        if sapo or level != "token":
            raise ValueError("use_cispo_loss: AReaL refuses it beside use_sapo_loss and the level sequence")
        return around_one(low, positive("eps_clip_higher, which use_cispo_loss needs", high))
    if sapo:
        if boolean("use_decoupled_loss", given["use_decoupled_loss"]):
            raise ValueError("use_sapo_loss: AReaL refuses it beside use_decoupled_loss")
        if level != "token":
            raise ValueError("importance_sampling_level: expected 'token' with use_sapo_loss: SAPO has no other here")
        return SAPO(given["sapo_tau_pos"], given["sapo_tau_neg"])
    if dual is not None and number("c_clip", dual) <= 1.0:
        raise ValueError(f"c_clip: expected a number > 1, got {dual!r}")
    if level == "token":
        return clip(low, high, dual)
    return GSPO(low, low if high is None else high, dual)
