"""verl: its correction and its policy losses, called as they are."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from torch import Tensor

import rollout_corr as rc
from conformance import verl_07, verl_cov, verl_replay
from conformance.batches import KINDS, Batch
from conformance.parsed import find, parsed
from conformance.rows import (
    BF16,
    CLAMP,
    LEFT_OUT,
    NO_LOWER_CLAMP,
    REJECTS,
    Declared,
    Result,
    Row,
    Side,
    among,
    both,
    configuration,
    draw,
    loss_and_gradient,
    no_number,
    preset,
    recipe,
    report,
    spec_of,
)
from conformance.sources import Source
from conformance.verl_parts import Proto, Settings, Stranger, actor, or_raises, weights_of, whole_loss
from conformance.verl_settings import MODES, OF_LOSS, clips_and_c, correction, micro_batch, of_preset
from rollout_corr.frameworks.shared.lookup import every_preset
from rollout_corr.frameworks.verl import dropin, losses

DISTRIBUTION, PACKAGE, CHECKOUT = "verl", "verl", "verl"

HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
LOSSES = "verl/trainer/ppo/core_algos.py"
CONFIG = "verl/trainer/config/algorithm.py"
PPO_LOSS = "verl/workers/utils/losses.py"
BYPASS = "compute_policy_loss_bypass_mode"
DEBUG = "verl/utils/debug/metrics.py"
MAIN = "compute_rollout_correction_and_rejection_mask"

# verl raises without a valid token.
SOME = tuple(kind for kind in KINDS if kind != "all_masked")
# It averages counts in float32, and takes spreads from differences of squares.
COUNTED = (1e-7, 2e-5)


# --- differences that the pages state ---


PADDING = Declared(
    "NaN in the padding",
    "dropins_in_depth.md",
    "NaN in the padding becomes NaN in token weights",
    among("nan_behind_mask"),
)
ICEPOP = Declared(
    "IcePop that leaves no weight",
    "dropins_in_depth.md",
    "IcePop that leaves no weight divides by zero",
    lambda given, settings: "_" in str(settings.get("rollout_is_threshold")) or "lower" in settings,
    shows=no_number,
)
WHOLE_ICEPOP = Declared(
    ICEPOP.name,
    ICEPOP.page,
    ICEPOP.says,
    lambda given, settings: ICEPOP.when(given, settings["algorithm"]["rollout_correction"]),
    shows=no_number,
)
OF_CORRECTION = (BF16, REJECTS, PADDING, ICEPOP)
TINY = Declared(
    "a correlation of tiny probabilities",
    "differences.md",
    "where all probabilities of one side are below 1e-4",
    lambda given, settings: (
        bool(given.mask.any()) and min(float(x[given.mask].max()) for x in (given.old, given.rollout)) < math.log(1e-4)
    ),
    keys=("training/rollout_actor_probs_pearson_corr",),
)

EMPTY = Declared("no token: NaN there", "differences.md", "a batch without a token (verl", among("all_masked"))
# The mean of what verl has clamped to +-20.
FAR_KL = Declared(
    "ppo_kl beyond +-20", "integrations.md", "Its `ppo_kl` does not clamp log-ratios", CLAMP.when, ("actor/ppo_kl",)
)
OF_LOSSES = (BF16, LEFT_OUT, EMPTY, FAR_KL)
# gspo, and losses of verl that have no clamp.
OWN = {"gspo": (NO_LOWER_CLAMP,), "geo_mean": (CLAMP,)}


def of_mode(mode: str, known: Declared) -> Declared:
    """Restrict a difference to configurations with one loss_mode."""

    def when(given: Batch, settings: dict[str, Any]) -> bool:
        return bool(
            settings["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == mode and known.when(given, settings)
        )

    return replace(known, when=when)


CUT = Declared(
    "shares of tokens that dppo clips",
    "dropins_in_depth.md",
    "dppo's `pg_clipfrac` counts tokens whose advantage is 0, and its `pg_clipfrac_lower` only what was not dropped",
    lambda given, settings: bool(
        (given.advantages == 0).any() | ((given.new - given.old).exp() > settings["clip_ratio_c"])[given.mask].any()
    ),
    keys=("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
)


# --- the rows ---


def rows(source: Source) -> Iterator[Row]:
    """Compare everything that verl has."""
    if verl_07.is_that_old(source):
        yield from verl_07.rows(source, OF_CORRECTION)
        return
    yield from verl_replay.rows(source)
    yield from of_presets(source)
    yield from of_correction(source)
    yield from of_losses(source)
    yield from verl_cov.rows(source, (*OF_LOSSES, CLAMP))


def of_presets(source: Source) -> Iterator[Row]:
    """Compare presets, and the recipes that they are part of, with the classmethods of verl's configuration."""
    made = source.cut(CONFIG, "RolloutCorrectionConfig")
    correct = source.cut(HELPER, MAIN, DataProto=Proto)
    both_policies = {"ActorConfig": Settings, "AlgoConfig": Stranger, MAIN: correct}
    vanilla, bypass = (
        source.cut(LOSSES, f"compute_policy_loss_{name}", **both_policies) for name in ("vanilla", "bypass_mode")
    )

    def config_of(name: str, **settings: Any) -> Any:
        names = {"upper": "threshold", "lower": "threshold_lower"}
        return getattr(made, name)(**{names.get(key, key): value for key, value in settings.items()})

    def fields(config: Any) -> dict[str, Any]:
        return {name: getattr(config, name) for name in list(inspect.signature(correct).parameters)[3:]}

    def corrected(name: str) -> Callable[..., Result]:
        def run(given: Batch, **settings: Any) -> Result:
            def call() -> Result:
                config = fields(config_of(name, **settings))
                held, mask, _ = correct(given.old, given.rollout, given.mask, **config)
                return {"mask": mask, "weights": weights_of(held)}

            return or_raises(call)

        return run

    def loss(name: str) -> Callable[..., Tensor]:
        def run(given: Batch, **settings: Any) -> Tensor:
            config = config_of(name, **settings)
            if or_raises(lambda: corrected(name)(given, **settings)).keys() == {"raises"}:
                return given.new.sum() * math.nan
            counts = {"batch_num_tokens": given.mask.sum()}
            if name.startswith("bypass"):
                whole = actor(policy_loss=Settings(rollout_correction=config), global_batch_info=counts)
                arguments = (given.rollout, given.new, given.token_advantages, given.mask, "token-mean", whole)
                # Its ratio is new/rollout, which may leave no weight where old/rollout leaves some.
                found = or_raises(lambda: {"loss": bypass(*arguments)[0]})
                value = found.get("loss", given.new.sum() * math.nan)
            else:
                held, mask, _ = correct(given.old, given.rollout, given.mask, **fields(config))
                weights = weights_of(held)
                whole = actor(global_batch_info=counts)
                arguments = (given.old, given.new, given.token_advantages, mask, "token-mean", whole, weights)
                value = vanilla(*arguments)[0]
            return value

        return run

    for found in every_preset():
        name = found.name.partition(".")[2]
        if not found.name.startswith("verl.") or not source.has(CONFIG, f"RolloutCorrectionConfig.{name}"):
            continue
        drawn = of_preset(found.settings)
        place = f"{CONFIG}: {name}, {HELPER}: {MAIN}"
        yield preset(found.name, place, corrected(name), drawn, declared=OF_CORRECTION, kinds=SOME)
        function = "bypass_mode" if name.startswith("bypass") else "vanilla"
        declared = (*OF_CORRECTION, LEFT_OUT)
        yield recipe(
            found.name,
            f"{LOSSES}: compute_policy_loss_{function}, {CONFIG}: {name}",
            loss(name),
            drawn,
            declared=declared,
            kinds=SOME,
        )


def of_correction(source: Source) -> Iterator[Row]:
    """Compare the report, the reader, and the replaced functions of the correction."""
    theirs = {name: source.cut(HELPER, name, DataProto=Proto) for name in (MAIN, *OTHERS)}

    def precise(given: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """verl's own float32 spreads are wrong in the second digit where weights lie close together."""
        return given.old.double(), given.rollout.double(), given.mask

    def tensors(given: Batch, settings: dict[str, Any]) -> Result:
        held, mask, _ = theirs[MAIN](given.old, given.rollout, given.mask, **settings)
        return {"mask": mask, "weights": weights_of(held)}

    def metrics(given: Batch, settings: dict[str, Any]) -> Result:
        return theirs[MAIN](*precise(given), **settings)[2]

    def replaced(given: Batch, settings: dict[str, Any]) -> Result:
        with patch.multiple(dropin, proto=proto, _say=lambda *given: None):
            held, mask, metrics = getattr(dropin, MAIN)(given.old, given.rollout, given.mask, **settings)
        return {"mask": mask, "weights": weights_of(held), **metrics}

    def alone(functions: Callable[[str], Any], given: Batch, settings: dict[str, Any]) -> Result:
        """The functions that user code calls, on log-ratios."""
        old, rollout, mask = precise(given)
        found: dict[str, Any] = {}
        if settings["rollout_is"] is not None:
            names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
            chosen = {name: settings[name] for name in names}
            weights, metrics = functions("compute_rollout_correction_weights")(old - rollout, mask, **chosen)
            found |= {"plain weights": weights.where(mask, 0.0), **metrics}
        if settings["rollout_rs"] is not None:
            chosen = {name: settings[name] for name in ("rollout_rs", "rollout_rs_threshold")}
            kept, metrics = functions("compute_rollout_rejection_mask")(old - rollout, mask, **chosen)
            found |= {"mask": kept, **metrics}
        found |= functions("compute_offpolicy_metrics")(old, rollout, mask)
        return found | functions("compute_rollout_corr_metrics_from_logprobs")(old, rollout, mask)

    def checked(side: Side) -> Side:
        return lambda given, settings: or_raises(lambda: side(given, settings))

    more: dict[str, Any] = {"declared": OF_CORRECTION, "kinds": SOME, "within": COUNTED}
    place = f"{HELPER}: {MAIN}"
    yield report("verl", place, partial(rc.spec, "verl"), checked(metrics), correction, **more)
    yield spec_of("verl", place, checked(tensors), correction, **more)
    original = checked(lambda given, settings: {**tensors(given, settings), **metrics(given, settings)})
    yield Row("drop-in", f"verl.{MAIN}", place, replaced, original, correction, **more)
    sides = partial(alone, lambda name: getattr(dropin, name)), checked(partial(alone, theirs.__getitem__))
    yield Row("drop-in", "verl.compute_rollout_...", f"{HELPER}: {', '.join(OTHERS)}", *sides, correction, **more)
    debug = source.cut(DEBUG, "calculate_debug_metrics", DataProto=Proto)

    def debugged(function: Any, old: Tensor, rollout: Tensor, mask: Tensor) -> Result:
        held = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask}
        return function(Proto.from_dict(held))

    more["declared"] = (*OF_CORRECTION, TINY)
    yield Row(
        "drop-in",
        "verl.calculate_debug_metrics",
        f"{DEBUG}: calculate_debug_metrics",
        lambda given, _: debugged(dropin.calculate_debug_metrics, given.old, given.rollout, given.mask),
        lambda given, _: debugged(debug, *precise(given)),
        **more,
    )


OTHERS = (
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
)


def proto(weights: Tensor | None) -> Proto | None:
    """Stand in for the drop-in's function, which imports verl's class."""
    return None if weights is None else Proto.from_dict({"rollout_is_weights": weights})


def of_losses(source: Source) -> Iterator[Row]:
    """Compare recipes and replaced losses with the functions that verl has registered."""
    given = {"ActorConfig": Settings, "AlgoConfig": Stranger}
    theirs = {name: source.cut(LOSSES, f"compute_policy_loss_{name}", **given) for name in OF_LOSS}

    def run(name: str) -> Callable[..., Tensor]:
        def loss(batch: Batch, dro_beta: float | None = None, **settings: Any) -> Tensor:
            config = actor(policy_loss=Settings(dro_beta=dro_beta), **settings)
            mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
            arguments = (batch.old, batch.new, batch.token_advantages, batch.mask, mode, config)
            return theirs[name](*arguments)[0]

        return loss

    def registered(function: Any, batch: Batch, settings: dict[str, Any]) -> Result:
        mode, info, weighted = (settings.pop(key) for key in ("mode", "info", "weighted"))
        policy = Settings(dro_beta=settings.pop("dro_beta", None))
        config = actor(policy_loss=policy, global_batch_info=info, **settings)
        weights = (batch.old - batch.rollout).exp().clamp(max=2.0) if weighted else None
        own = batch.trains()
        value, metrics = function(own.old, own.new, own.token_advantages, own.mask, mode, config, weights)
        return {**loss_and_gradient(value, own), **metrics}

    averages = source.fact("gspo reads loss_agg_mode", lambda: reads(source, "gspo", "loss_agg_mode"))
    assert source.version not in losses.AVERAGING or averages
    functions = losses.FUNCTIONS | {"gspo": losses.gspo(averages)}

    for name, settings in OF_LOSS.items():
        place = f"{LOSSES}: compute_policy_loss_{name}"
        if name not in ("vanilla", "reinforce"):
            yield recipe(f"verl.{name}", place, run(name), settings, declared=(*OF_LOSSES, *OWN.get(name, ())))
        if name in losses.FUNCTIONS:
            declared = (*OF_LOSSES, *([CUT] if "dppo" in name else OWN.get(name, ())))
            more: dict[str, Any] = {"declared": declared, "within": COUNTED}
            sides = partial(registered, functions[name]), partial(registered, theirs[name])
            yield Row("drop-in", f"verl.losses.{name}", place, *sides, micro_batch(name), **more)
    correct = source.cut(HELPER, MAIN, DataProto=Proto)
    bypass = source.cut(LOSSES, BYPASS, **given, **{MAIN: correct})

    whole = whole_loss(source, PPO_LOSS, theirs | {"bypass_mode": bypass}, correct)
    uncorrected = dict.fromkeys(("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"))
    uncorrected |= {"rollout_is_batch_normalize": False, "bypass_mode": False, "loss_type": "ppo_clip"}

    def examples(given: Batch, **settings: Any) -> Tensor:
        settings |= {"kl_loss_type": "low_var_kl", "use_kl_loss": "kl_loss_coef" in settings}
        settings |= {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "policy_loss": {"loss_mode": "vanilla"}}
        return whole(given, {"actor": settings}, {"rollout_correction": uncorrected})

    plain: dict[str, Any] = {"declared": OF_LOSSES, "kinds": SOME}
    yield recipe("verl.ppo", f"{PPO_LOSS}: ppo_loss", examples, clips_and_c, **plain)
    yield recipe(
        "verl.grpo",
        f"{PPO_LOSS}: ppo_loss, use_kl_loss",
        examples,
        both(clips_and_c, draw(kl_loss_coef=(0.001, 0.1))),
        **plain,
    )
    yield configuration(
        "verl",
        f"{PPO_LOSS}: ppo_loss, {HELPER}: {MAIN}",
        whole,
        partial(whole_configuration, gspo_averages=averages),
        old=lambda batch, settings: None if settings["algorithm"]["rollout_correction"]["bypass_mode"] else batch.old,
        declared=(*OF_LOSSES, WHOLE_ICEPOP, *(of_mode(mode, known) for mode, (known,) in OWN.items())),
        kinds=SOME,
        within=COUNTED,
    )


def reads(source: Source, name: str, parameter: str) -> bool:
    """Tell whether the code of one of verl's losses reads its parameter."""
    function = find(parsed(source.root / LOSSES).tree, f"compute_policy_loss_{name}")
    assert function is not None
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(node.id == parameter for node in names)


def whole_configuration(rng: Random, gspo_averages: bool) -> dict[str, Any]:
    """Draw as much of a whole configuration as makes the loss; `gspo_averages`: GSPO obeys `loss_agg_mode`."""
    mode = rng.choice(("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "dro", "cispo"))
    block = correction(rng) | {"rollout_is_batch_normalize": False, "bypass_mode": rng.random() < 0.3}
    block["loss_type"] = rng.choice(("ppo_clip", "reinforce"))
    if mode == "geo_mean" and not block["bypass_mode"]:
        block["rollout_is"] = None
    average = rng.choice(MODES)
    if mode == "gspo" and not gspo_averages:
        average = "seq-mean-token-mean"
    if "token" in str(block["rollout_rs"]) and (
        average == "seq-mean-token-mean" or (mode in ("sapo", "geo_mean") and not block["bypass_mode"])
    ):
        # A mean over what a row has left over a count of all rows is refused.
        block |= {"rollout_rs": None, "rollout_rs_threshold": None}
    actor = {
        **clips_and_c(rng),
        "tau_pos": rng.choice((0.5, 1.0)),
        "loss_agg_mode": average,
        "loss_scale_factor": 50,
        "use_kl_loss": rng.random() < 0.5,
        "kl_loss_coef": 0.1,
        "kl_loss_type": rng.choice(("kl", "abs", "k2", "mse+", "low_var_kl", "k1+", "k3+")),
        "policy_loss": {"loss_mode": mode, "dro_beta": rng.choice((0.1, 1.0))},
    }
    if mode in ("sapo", "geo_mean"):
        # A length divides no KL loss of its own.
        actor["use_kl_loss"] &= average != "seq-mean-token-sum-norm"
    return {"actor_rollout_ref": {"actor": actor}, "algorithm": {"rollout_correction": block}}
