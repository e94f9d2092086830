"""verl: presets by the names of RolloutCorrectionConfig's classmethods, policy losses, and its configuration.

Every preset edits the mask where it rejects, and asks for verl's own metrics. A preset of bypass mode is given the
current policy, detached, as `train_logp`. In bypass mode PPO does not multiply by the weight.

The configuration is `algorithm.rollout_correction`, since verl 0.6.1; settings of the releases before are refused.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...specs.batch_losses import ClipCov, KLCov
from ...specs.checked import expression
from ...specs.choices import Scheme
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import DPPO, DRO, GMPO, GPG, GSPO, PPO, SAPO, Score
from ...specs.terms import KL, Mean
from ...specs.validate import one_of, positive
from ..shared.preset import RENAMED, Preset, Row, presets, registered
from ..shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    KL_KINDS,
    NO_LOWER_CLAMP,
    ROWS,
    SEQUENCES,
    TOKENS,
    WITH_REFERENCE,
    Named,
    Recipe,
    add_recipe,
    around_one,
    mean,
    named_recipe,
    penalty,
)
from ..shared.settings import (
    Block,
    Given,
    boolean,
    fields_of,
    inner,
    known_in,
    maybe,
    misspelt,
    needed,
    refused,
    refused_key,
    unchecked,
    warn_old,
    word,
)
from . import options as verl_options

REPORT: tuple[Scheme, ...] = ("native", "verl")

Criteria = tuple[Criterion, ...]


def made(weight: Weight | None = None, criteria: Criteria = ()) -> Spec:
    """Return a Spec that edits the mask and reports verl's metrics."""
    return Spec(weight=weight, criteria=criteria, rejected="mask", report=REPORT)


# --- presets: a weight, a rejection or both, with the settings and the formulas of these parts ---

Part = tuple[str, Callable[..., Any], Mapping[str, Any]]


def _tis(setting: str, level: str) -> Part:
    name, ratio = {"token": ("Token", "exp(D)"), "sequence": ("Sequence", "exp(sum D)")}[level]
    weight = partial(verl_options.weight, level, key=setting)
    return f"{name} TIS: w = min({ratio}, {setting}).", weight, {setting: unchecked(2.0)}


def _icepop(upper: float, lower: float) -> Weight:
    bounds = verl_options.number("lower", lower), verl_options.number("upper", upper)
    return verl_options.weight("token", bounds, key="upper")


def _k1(name: str, threshold: str) -> Part:
    criteria = partial(verl_options.criteria, f"seq_{name}_k1", key="rs_threshold")
    about = f"Mask a sequence whose {name} of -D is outside log(rs_threshold) (seq_{name}_k1)."
    return about, criteria, {"rs_threshold": threshold, "k1_bounds": "verl"}


TOKEN, SEQUENCE = _tis("upper", "token"), _tis("upper", "sequence")
TOKEN_IS, SEQUENCE_IS = _tis("is_threshold", "token"), _tis("is_threshold", "sequence")
ICEPOP: Part = ("Token IcePop: w = exp(D) inside [lower, upper], else 0.", _icepop, {"upper": 5.0, "lower": 0.5})
SUM_K1, MEAN_K1 = _k1("sum", "0.5_2.0"), _k1("mean", "0.999_1.001")
MEAN_K3: Part = (
    "Mask a sequence whose mean k3 is above rs_threshold (seq_mean_k3).",
    partial(verl_options.criteria, "seq_mean_k3", key="rs_threshold"),
    {"rs_threshold": unchecked(0.01)},
)
PARTS: dict[str, tuple[Part | None, Part | None]] = {
    "decoupled_token_is": (TOKEN, None),
    "decoupled_seq_is": (SEQUENCE, None),
    "decoupled_token_icepop": (ICEPOP, None),
    "decoupled_seq_is_rs": (SEQUENCE_IS, SUM_K1),
    "decoupled_geo_rs": (None, MEAN_K1),
    "decoupled_geo_rs_seq_tis": (SEQUENCE_IS, MEAN_K1),
    "decoupled_geo_rs_token_tis": (TOKEN_IS, MEAN_K1),
    "decoupled_k3_rs": (None, MEAN_K3),
    "decoupled_k3_rs_seq_tis": (SEQUENCE_IS, MEAN_K3),
    "decoupled_k3_rs_token_tis": (TOKEN_IS, MEAN_K3),
    "bypass_ppo_clip": (None, None),
    "bypass_ppo_clip_geo_rs": (None, MEAN_K1),
    "bypass_ppo_clip_k3_rs": (None, MEAN_K3),
    "bypass_pg_is": (SEQUENCE, None),
    "bypass_pg_token_icepop": (ICEPOP, None),
    "bypass_pg_geo_rs": (None, MEAN_K1),
    "bypass_pg_geo_rs_seq_tis": (SEQUENCE_IS, MEAN_K1),
    "bypass_pg_geo_rs_token_tis": (TOKEN_IS, MEAN_K1),
    "disabled": (None, None),
}
BYPASSES = {"bypass_ppo_clip": "Bypass, PPO.", "bypass_pg": "Bypass, REINFORCE."}


def _row(name: str, weight: Part | None, rejection: Part | None) -> Row:
    """The preset of two parts."""
    settings = {} if weight is None else weight[2]

    def make(*values: Any) -> Spec:
        first, rest = values[: len(settings)], values[len(settings) :]
        return made(None if weight is None else weight[1](*first), () if rejection is None else rejection[1](*rest))

    about = [text for start, text in BYPASSES.items() if name.startswith(start)]
    if weight is None:
        about.append("No weight." if rejection else "Metrics only.")
    about += [part[0] for part in (weight, rejection) if part is not None]
    return " ".join(about), make, {**settings, **({} if rejection is None else rejection[2])}


presets("verl", "verl 0.9.1")(**{name: _row(name, *parts) for name, parts in PARTS.items()})
# Names of verl up to 0.7.0; the veto of some is gone since.
RENAMED["verl"] = {
    "token_is": "verl.decoupled_token_is",
    "token_tis": "verl.decoupled_token_is",
    "seq_is": "verl.decoupled_seq_is",
    "seq_is_rs": "verl.decoupled_seq_is_rs",
    "seq_mis": "verl.decoupled_seq_is_rs, which has a lower bound too",
    "geo_rs": "verl.decoupled_geo_rs, which has no veto",
    "geo_mis": "verl.decoupled_geo_rs, which has no veto",
    "geo_rs_seq_tis": "verl.decoupled_geo_rs_seq_tis, which has no veto",
    "ppo_is_bypass": "verl.bypass_ppo_clip",
    "pure_is": "verl.bypass_pg_is",
    "pg_is": "verl.bypass_pg_is",
    "pg_rs": "verl.bypass_pg_geo_rs, which has no veto",
    "bypass_pg_rs": "verl.bypass_pg_geo_rs, which has no veto",
}

# --- the settings of the loss ---

SIDES: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
DUAL = SIDES | {"clip_ratio_c": maybe(3.0)}
TAUS = {"tau_pos": 1.0, "tau_neg": 1.05}
CLIP_COV = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
KL_COV = {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1}
OF_ACTOR = ("strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs", "entropy_coeff", "optim")
AVERAGES: dict[str, Mean] = {
    "token-mean": TOKENS,
    "token-sum": Mean("sum"),
    "seq-mean-token-sum": Mean("sequence_sum", over="rows"),
    "seq-mean-token-sum-norm": Mean("sequence_sum", over="rows"),
    "seq-mean-token-mean": ROWS,
}


def _clip_cov(low: float, high: float, share: float, lower: float, upper: float) -> ClipCov:
    return ClipCov(low, high, share=share, lower=lower, upper=upper)


def _dro(beta: float | None) -> DRO:
    if beta is None:
        raise refused("dro_beta", "expected a number > 0, which loss_mode 'dro' needs, got None")
    return DRO(positive("dro_beta", beta))


# The loss of a token by `loss_mode`, from these settings.
SURROGATES: dict[str, Named[Surrogate]] = {
    "vanilla": Named(PPO, **DUAL),
    "dppo_tv": Named(partial(DPPO, "tv"), **DUAL),
    "dppo_kl": Named(partial(DPPO, "kl"), **DUAL),
    "gspo": Named(partial(GSPO, through="token", clamp=10.0), **SIDES),
    "sapo": Named(SAPO, **TAUS),
    "gpg": Named(GPG),
    "geo_mean": Named(GMPO, **SIDES),
    "dro": Named(_dro, dro_beta=0.1),
    "cispo": Named(around_one, **SIDES),
    "clip_cov": Named(_clip_cov, **SIDES, **CLIP_COV),
    "kl_cov": Named(KLCov, **KL_COV),
}
MODES = (*SURROGATES, "bypass_mode")
# Of `actor`, and of its `policy_loss`.
POLICY = {
    "loss_mode": word("vanilla", MODES),
    "dro_beta": None,
    "rollout_correction": unchecked(None),
    **CLIP_COV,
    **KL_COV,
}
ACTOR: dict[str, Any] = {
    "clip_ratio": 0.2,
    **{side: maybe(default) for side, default in SIDES.items()},
    "clip_ratio_c": maybe(3.0),
    **TAUS,
    "loss_agg_mode": word("token-mean", AVERAGES),
    "loss_scale_factor": unchecked(None),
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_loss_type": unchecked("low_var_kl"),
    "policy_loss": Block(POLICY),
}

# --- recipes by name ---


def _corrected(found: Preset, given: Given) -> Recipe:
    """Return `loss_mode=vanilla`; for bypass with REINFORCE -w A log pi, and without a weight -A log pi."""
    correction, coefficient = found.of(given), given["kl_loss_coef"]
    surrogate: Surrogate = SURROGATES["vanilla"].of(given)
    if found.name.startswith("verl.bypass_pg"):
        surrogate = GPG() if correction.weight is None else Score()
    return Recipe(correction, Loss(surrogate, kl=KL("k3", coefficient, value_clamp=10.0) if coefficient else None))


COUNTS = "counts before rejection, as its engines do"
COUNTS_BOTH = f'{COUNTS}; with trainer.use_v1=false after it: Mean(over="kept")'
for _found in registered("verl"):
    _needs, _note = (BYPASS, COUNTS) if _found.name.startswith("verl.bypass") else (BOTH, COUNTS_BOTH)
    add_recipe(_found.name, partial(_corrected, _found), {**DUAL, "kl_loss_coef": 0.0, **_found.table}, _needs, _note)
ITS_KL: dict[str, Any] = {"kl": penalty(kl_loss_coef=0.001, value_clamp=10.0), "mean": mean(loss_agg_mode="token-mean")}
GRPO_NOTE = "loss_mode vanilla with use_kl_loss, as verl's examples of GRPO have it"
DPPO_NOTE = "clip_ratio_c is ActorConfig's 3.0; the function's own 20.0 never gets there"
DRAWS = "draws by ClipCov.seed and sequence_ids, verl by torch.randperm; give every step another seed"
named_recipe("verl.ppo", SURROGATES["vanilla"], DECOUPLED, "loss_mode vanilla, without correction")
named_recipe("verl.grpo", SURROGATES["vanilla"], WITH_REFERENCE, GRPO_NOTE, **ITS_KL)
named_recipe("verl.dppo_tv", SURROGATES["dppo_tv"], DECOUPLED, DPPO_NOTE)
named_recipe("verl.dppo_kl", SURROGATES["dppo_kl"], DECOUPLED, DPPO_NOTE)
named_recipe("verl.cispo", SURROGATES["cispo"], DECOUPLED)
named_recipe("verl.gspo", SURROGATES["gspo"], DECOUPLED, NO_LOWER_CLAMP, mean=SEQUENCES)
named_recipe("verl.geo_mean", SURROGATES["geo_mean"], DECOUPLED, mean=ROWS)
named_recipe("verl.sapo", SURROGATES["sapo"], DECOUPLED, mean=SEQUENCES)
named_recipe("verl.gpg", SURROGATES["gpg"], ())
named_recipe("verl.clip_cov", SURROGATES["clip_cov"], DECOUPLED, DRAWS)
named_recipe("verl.kl_cov", SURROGATES["kl_cov"], DECOUPLED)
named_recipe("verl.dro", SURROGATES["dro"], DECOUPLED, "dro_beta has no default in verl")
# Behind the recipes of presets: this one goes with the versions of sequences, and with any loss. `Versions.ids` are the
# steps of the prompts, `Versions.current` is global_steps.
presets("verl", "verl 1dda039 (2026-08-22)")(
    staleness=(
        'Drop sequences whose prompt was sent max_off_policy_threshold or more steps ago (strategy "drop").',
        lambda threshold: Spec(criteria=(Criterion("age", over="sequence", reduce="max", upper=threshold - 1),)),
        {"max_off_policy_threshold": 8},
    )
)

# --- the correction ---

LOSS_TYPES = ("ppo_clip", "reinforce")
# The second line is of verl up to 0.7.1; debug_rollout_actor_probs, of verl#7196, makes metrics alone.
CORRECTION: dict[str, Any] = {
    "rollout_is": unchecked(None),
    "rollout_is_threshold": unchecked(2.0),
    "rollout_is_batch_normalize": False,
    "rollout_rs": unchecked(None),
    "rollout_rs_threshold": unchecked(None),
    "bypass_mode": False,
    "loss_type": word("ppo_clip", LOSS_TYPES),
    "rollout_rs_threshold_lower": unchecked(None),
    "rollout_token_veto_threshold": unchecked(None),
    "bypass_old_logprob_for_rollout": False,
    "use_pure_rollout_correction": False,
    "use_policy_gradient": False,
    "debug_rollout_actor_probs": unchecked(None),
}
# Of 0.6.0 and before, in `algorithm` and in `actor`.
FLAT = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
CAPS = ("tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap")

# These keys show that the whole of `algorithm` is given, with many keys that do not concern this package. Only
# those that begin like ours are checked for spelling.
OF_ALGORITHM = ("adv_estimator", "gamma", "lam", "kl_ctrl", "use_kl_in_reward", "norm_adv_by_std_in_grpo")
OURS = ("rollout_is", "rollout_rs", "rollout_token_veto")
AROUND = ("rollout_correction", *FLAT, *CAPS, *OF_ALGORITHM)

OFF = "leave it out: it is off"
TABLE = {"actor": Block(ACTOR, (*OF_ACTOR, *CAPS)), "rollout_correction": Block(CORRECTION)}


def settings(config: object) -> Given:
    """Find a whole configuration, its block `actor`, `algorithm` or `rollout_correction`."""
    given = fields_of(config)
    if "actor_rollout_ref" in given or "algorithm" in given:
        actor: object = inner(inner(given, "actor_rollout_ref"), "actor")
        whole = True
    elif given.keys() & {*ACTOR, *OF_ACTOR}:
        actor, whole = config, False
    else:
        known = (*CORRECTION, *AROUND)
        if given.keys() & {*OF_ALGORITHM}:
            ours = [key for key in given if key in known or str(key).startswith(OURS) or misspelt(key, known)]
            given = {key: given[key] for key in ours}
        return Given(TABLE, {"rollout_correction": _block(known_in(given, known))})
    return Given(TABLE, {"actor": actor} | ({"rollout_correction": _block(given)} if whole else {}))


def read(given: Given, *, k1_bounds: str = "verl") -> Spec:
    """Read `rollout_correction`.

    Args:
        given: The settings.
        k1_bounds: "verl" or "ratio", see `verl_options.criteria`.
    """
    if "rollout_correction" not in given.given:
        raise refused_key(next(iter(given["actor"].given)), f", expected some of {[*CORRECTION]}")
    return _read(given["rollout_correction"], k1_bounds)


def _read(given: Given, k1_bounds: str) -> Spec:
    one_of("k1_bounds", k1_bounds, verl_options.K1_BOUNDS)
    _check_bypass(given)
    weight, normalize = None, given["rollout_is_batch_normalize"]
    if given["rollout_is"] is not None:
        if given["rollout_is_threshold"] is None:
            raise refused(
                "rollout_is_threshold",
                "expected a threshold for rollout_is, got null, for which verl silently "
                "drops the weights; if you want no weights, write rollout_is: null",
            )
        weight = verl_options.weight(given["rollout_is"], given["rollout_is_threshold"], normalize)
    return made(weight, (*_rejection(given, k1_bounds), *_veto(given)))


def _block(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of `rollout_correction` in it, in `algorithm` or in a whole configuration."""
    actor = inner(inner(given, "actor_rollout_ref"), "actor")
    whole = "algorithm" in given or "actor_rollout_ref" in given
    given = inner(given, "algorithm") if whole else given
    whole = whole or any(key in given for key in OF_ALGORITHM)
    if whole or "rollout_correction" in given:
        around = {key: given[key] for key in given if not whole or key in CORRECTION or str(key).startswith(OURS)}
        around.pop("rollout_correction", None)
        given = {**around, **inner(given, "rollout_correction")}
    # Configurations of later versions still hold a cap that is off.
    capped = {**actor, **given}
    for key in CAPS:
        if capped.get(key) not in (None, -1):
            cap = {"rollout_is": "token", "rollout_is_threshold": verl_options.number(key, capped[key])}
            raise refused(key, f"a setting of verl up to 0.6.0; write {_as_block(cap)}")
    old = [key for key in FLAT if key in given] + ["rollout_is"] * isinstance(given.get("rollout_is"), bool)
    if old:
        raise refused(old[0], f"a setting of verl up to 0.6.0; {_instead(given)}")
    return {key: given[key] for key in given if key not in CAPS}


def _as_block(settings: Mapping[str, Any]) -> str:
    """Write a block of settings in one line of YAML."""
    return f"{PLACE}: {{{', '.join(f'{key}: {json.dumps(value)}' for key, value in settings.items())}}}"


def _instead(given: Mapping[str, Any]) -> str:
    """Say what to write in place of the settings of 0.6.0, in which one ratio weighed and rejected."""
    level, mode = given.get("rollout_is_level", "token"), given.get("rollout_is_mode", "truncate")
    option = verl_options.OLD_RS_LEVELS[one_of("rollout_is_level", level, verl_options.OLD_RS_LEVELS)]
    one_of("rollout_is_mode", mode, ("truncate", "mask", "clip"))
    if not boolean("rollout_is", given.get("rollout_is")) or given.get("rollout_is_threshold") is None:
        return f"write {_as_block({'rollout_is': None})}: it only measured, without rollout_is and its threshold"
    upper = verl_options.number("rollout_is_threshold", given["rollout_is_threshold"])
    least = given.get("rollout_is_threshold_lower")
    lower = 1.0 / upper if least is None else verl_options.number("rollout_is_threshold_lower", least)
    bounds = verl_options.text(lower, upper)
    if level == "geometric":
        outside = {"truncate": f"upper={upper!r}", "clip": f"lower={lower:g}, upper={upper!r}, outside='zero'"}
        also = {"rollout_rs": option, "rollout_rs_threshold": verl_options.text(1.0 / upper, 1.0 / lower)}
        block = f" and {_as_block(also)}" if mode == "mask" else ""
        line = f"write rc.Weight.geometric({outside.get(mode, '')}), which verl has no more{block}"
    else:
        new: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": bounds if mode == "clip" else upper}
        if mode == "mask":
            # verl compares -log r with the logarithms of these.
            new |= {"rollout_rs": option, "rollout_rs_threshold": verl_options.text(1.0 / upper, 1.0 / lower)}
        line = f"write {_as_block(new)}"
    veto = given.get("rollout_is_veto_threshold", 1e-4)
    if veto is None:
        return line
    return f'{line}; for its veto, rc.Criterion("ratio", lower={veto!r}, drop="sequence", label="veto")'


_old = partial(warn_old, "verl")


def _rejection(given: Given, k1_bounds: str) -> tuple[Criterion, ...]:
    options, threshold = given["rollout_rs"], given["rollout_rs_threshold"]
    lower_key = "rollout_rs_threshold_lower"
    least = given[lower_key]
    level = options.strip() if isinstance(options, str) else ""
    if level in verl_options.OLD_RS_LEVELS:
        if threshold is None:
            raise refused("rollout_rs_threshold", "expected a threshold for rollout_rs, got null")
        option, upper = verl_options.OLD_RS_LEVELS[level], verl_options.number("rollout_rs_threshold", threshold)
        lower = 1.0 / upper if least is None else 0.0
        if least is not None and (least != 0 or isinstance(least, bool)):
            lower = verl_options.number(lower_key, least)
        if lower > upper:
            raise refused(lower_key, f"expected at most the upper bound {upper!r}, got {least!r}")
        _old(
            [f"rollout_rs: {level}", *([lower_key] if lower_key in given.given else [])],
            f'write rollout_rs: "{option}", rollout_rs_threshold: "{verl_options.text(lower, upper)}", with '
            'k1_bounds="ratio"',
        )
        return (verl_options.ratio_criterion(option, lower, upper),)
    if least is not None:
        raise refused(
            lower_key,
            "expected with rollout_rs token, sequence or geometric (verl up to 0.7.0), got it with "
            f'rollout_rs: {options!r}; write both bounds as rollout_rs_threshold: "lower_upper"',
        )
    if lower_key in given.given:
        _old([lower_key], OFF)
    return () if options is None else verl_options.criteria(options, threshold, k1_bounds)


def _veto(given: Given) -> tuple[Criterion, ...]:
    key = "rollout_token_veto_threshold"
    if key not in given.given:
        return ()
    if given[key] is None:
        _old([key], OFF)
        return ()
    criterion = verl_options.veto(given[key], key)
    _old([key], f"write {expression(criterion)} among the criteria of a Spec (verl has no veto since 0.7.1)")
    return (criterion,)


def _check_bypass(given: Given) -> None:
    """Check the keys that choose the loss: they are no part of the Spec, but a wrong value is an error."""
    _ = given["bypass_mode"], given["loss_type"]
    key = "bypass_old_logprob_for_rollout"
    if key in given.given:
        _old([key], f"write bypass_mode: {str(given[key]).lower()}")
    for key in ("use_pure_rollout_correction", "use_policy_gradient"):
        if key in given.given:
            _old([key], f'write loss_type: "{LOSS_TYPES[given[key]]}"')


# Where what is written stands in a configuration.
PLACE = "algorithm.rollout_correction"


def write(spec: Spec, *, k1_bounds: str = "verl") -> dict[str, Any]:
    """Write the block `rollout_correction`, without the keys that choose the loss."""
    one_of("k1_bounds", k1_bounds, verl_options.K1_BOUNDS)
    weight = {"rollout_is": None} if spec.weight is None else verl_options.written_weight(spec.weight)
    return {**weight, **verl_options.written_criteria(spec.criteria, k1_bounds)}


# --- the whole loss ---


def recipe(given: Given, *, k1_bounds: str = "verl", version: str | None = None) -> Recipe:
    """Read the whole loss from `actor_rollout_ref.actor` and `algorithm.rollout_correction`, or from `actor` alone.

    Means are over the tokens or rows of the mini-batch before rejection, as verl's engines count them. In bypass mode
    `policy_loss` is given `rollout_logp` and no `old_logp`.

    Args:
        given: The settings.
        k1_bounds: As for `read`.
        version: "0.9.0" for gspo as it is up to that release and on verl's main branch: a mean over sequences, whatever
            `loss_agg_mode` says. By default that is obeyed, as in 0.9.1.
    """
    if version not in (None, "0.9.0"):
        raise ValueError(f"version: expected None or '0.9.0', got {version!r}")
    actor, block = given["actor"], given["rollout_correction"]
    policy = actor["policy_loss"]
    mode = policy["loss_mode"]
    if block["bypass_mode"]:
        mode = "bypass_mode"
    elif mode == "bypass_mode":
        block = policy.block("rollout_correction", CORRECTION, policy["rollout_correction"])
    corrects = _read(block, k1_bounds)
    sides = {f"clip_ratio_{side}": actor[f"clip_ratio_{side}"] for side in ("low", "high")}
    sides = {name: actor["clip_ratio"] if side is None else side for name, side in sides.items()}
    if mode != "bypass_mode":
        surrogate = SURROGATES[mode].of(ChainMap(sides, policy, actor))
    elif block["loss_type"] == "ppo_clip":
        # PPO with the ratio new/rollout and no weight, or REINFORCE with one.
        surrogate, corrects = (
            PPO(sides["clip_ratio_low"], sides["clip_ratio_high"], actor["clip_ratio_c"]),
            replace(corrects, weight=None),
        )
    else:
        surrogate = GPG() if corrects.weight is None else Score()
    if mode == "geo_mean" and corrects.weight is not None:
        why = "expected no rollout_is with 'geo_mean', which takes a geometric mean of the weights"
        raise refused("loss_mode", why)
    average, kl = actor["loss_agg_mode"], _kl(actor, everywhere=mode == "bypass_mode")
    if mode in ("sapo", "geo_mean") or (mode == "gspo" and version == "0.9.0"):
        if kl is not None and average != "seq-mean-token-mean":
            kl = _apart(kl, average)
        average = "seq-mean-token-mean"
    mean = AVERAGES[average]
    if mean == ROWS and any(c.over == "token" and c.drop == "unit" for c in corrects.criteria):
        raise refused(
            "rollout_rs",
            f"with {average} verl divides by a row's tokens after rejection, and counts rows before it; "
            "no recipe does both for an option of tokens",
        )
    if average == "seq-mean-token-sum-norm":
        mean = replace(mean, length=needed("loss_scale_factor", average, actor["loss_scale_factor"]))
    return Recipe(corrects if corrects.acts else None, Loss(surrogate, mean, kl))


def _apart(kl: KL, average: str) -> KL:
    """Give the KL loss its own average, where the policy loss is always a mean over sequences."""
    if average == "seq-mean-token-sum-norm":
        why = f"the policy loss is a mean over sequences, the KL loss by {average}: two calls"
        raise refused("use_kl_loss", why)
    return replace(kl, mean=AVERAGES[average])


def _kl(given: Given, everywhere: bool) -> KL | None:
    """The KL loss: of the tokens that are left, in bypass mode of those that only its policy loss rejects too."""
    coefficient = given["kl_loss_coef"]
    if not given["use_kl_loss"] or coefficient == 0.0:
        return None
    name = str(given["kl_loss_type"])
    kind = KL_KINDS[one_of("kl_loss_type", name.removesuffix("+"), KL_KINDS)]
    return KL(
        kind,
        coefficient,
        gradient="k2" if name.endswith("+") and kind != "k2" else None,
        value_clamp=10.0 if kind == "k3" else None,
        scope="all" if everywhere else "kept",
    )
