"""verl: its correction, called as it is; its losses are in verl_losses.py."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

import rollout_corr as rc
from conformance import verl_losses
from conformance.batches import KINDS, Batch
from conformance.declared import BF16, LEFT_OUT, REJECTS, Declared, among, no_number
from conformance.rows import Result, Row, Side, draw, preset, recipe, report, spec_of
from conformance.sources import Source
from conformance.verl_parts import Proto, Settings, Stranger, actor
from conformance.versions import CURRENT, staleness
from rollout_corr.frameworks.shared.lookup import every_preset
from rollout_corr.frameworks.verl import dropin
from rollout_corr.frameworks.verl.options import RS_OPTIONS

DISTRIBUTION, PACKAGE, CHECKOUT = "verl", "verl", "verl"

HELPER = "verl/trainer/ppo/rollout_corr_helper.py"
LOSSES = "verl/trainer/ppo/core_algos.py"
CONFIG = "verl/trainer/config/algorithm.py"
DEBUG = "verl/utils/debug/metrics.py"
BUFFER, STALE = "verl/trainer/ppo/v1/replay_buffer.py", "ReplayBufferAsync._stale_terminal_keys"
MAIN = "compute_rollout_correction_and_rejection_mask"
OTHERS = (
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
)

# verl raises without a valid token.
SOME = tuple(kind for kind in KINDS if kind != "all_masked")
# It averages counts in float32, and takes spreads from differences of squares.
COUNTED = (1e-7, 2e-5)

PADDING = Declared("NaN in the padding", "NaN in the padding becomes NaN in token weights", among("nan_behind_mask"))
ICEPOP = Declared(
    "IcePop that leaves no weight",
    "IcePop that leaves no weight divides by zero",
    lambda given, settings: "_" in str(settings.get("rollout_is_threshold")) or "lower" in settings,
    shows=no_number,
)
OF_CORRECTION = (BF16, REJECTS, PADDING, ICEPOP)
TINY = Declared(
    "a correlation of tiny probabilities",
    "where all probabilities of one side are below 1e-4",
    lambda given, settings: (
        bool(given.mask.any()) and min(float(x[given.mask].max()) for x in (given.old, given.rollout)) < math.log(1e-4)
    ),
    keys=("training/rollout_actor_probs_pearson_corr",),
)


# --- settings, drawn at random ---

# binary_kl is of verl's pull request 6800.
RS_BOUNDS = {"k1": ("0.8_1.3", "0.999_1.001", "2.0"), "k2": ("0.05", "1e-4"), "k3": ("0.04", "1e-4")}


def correction(rng: Random) -> dict[str, Any]:
    """Draw the settings of verl's correction."""
    known = [option for option in sorted(RS_OPTIONS) if option[-2:] in RS_BOUNDS]
    options = rng.sample(known, rng.choice((0, 0, 1, 2, 3)))
    return {
        "rollout_is": rng.choice((None, "token", "sequence")),
        "rollout_is_threshold": rng.choice((1.05, 2.0, "0.5_2.0", "0.2_5.0")),
        "rollout_is_batch_normalize": rng.random() < 0.3,
        "rollout_rs": ",".join(options) or None,
        "rollout_rs_threshold": ",".join(rng.choice(RS_BOUNDS[option[-2:]]) for option in options) or None,
    }


def correction_of_07(rng: Random) -> dict[str, Any]:
    """Draw the settings of 0.7's correction: levels, a lower bound and the veto."""
    level = rng.choice((None, "token", "sequence", "geometric"))
    return {
        "rollout_is": rng.choice((None, "token", "sequence")),
        "rollout_is_threshold": rng.choice((1.05, 2.0)),
        "rollout_rs": level,
        "rollout_rs_threshold": rng.choice((1.001, 1.3, 2.0)),
        "rollout_rs_threshold_lower": rng.choice((None, 0.8, 0.999)) if level else None,
        "rollout_token_veto_threshold": rng.choice((None, 1e-4, 0.7)),
        "rollout_is_batch_normalize": rng.random() < 0.3,
    }


def of_preset(settings: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Draw the arguments of a preset."""
    found = {}
    for name, default in settings.items():
        if name == "lower":
            found[name] = rng.choice((0.5, 0.9))
        elif name in ("upper", "is_threshold"):
            found[name] = rng.choice((1.05, 2.0, default))
        elif name == "rs_threshold":
            values = ("0.9_1.2", "0.999_1.001") if isinstance(default, str) else (0.01, 0.0001)
            found[name] = rng.choice(values)
    return found


# --- the rows ---


def is_that_old(source: Source) -> bool:
    """Tell whether a verl has the configuration of 0.7."""
    return source.says(HELPER, "rollout_token_veto_threshold")


def rows(source: Source) -> Iterator[Row]:
    """Compare everything that verl has."""
    correct = source.cut(HELPER, MAIN, DataProto=Proto)
    if is_that_old(source):
        yield of_spec(correct, correction_of_07, " of 0.7")
        return
    if source.has(BUFFER, STALE):
        yield of_staleness(source.cut(BUFFER, STALE))
    yield from of_presets(source, correct)
    yield from of_correction(source, correct)
    yield from verl_losses.rows(source, correct, correction, ICEPOP)


def tensors(correct: Any, given: Batch, settings: dict[str, Any]) -> Result:
    """Return weights and mask, or that verl divides by zero."""
    try:
        held, mask, _ = correct(given.old, given.rollout, given.mask, **settings)
    except ZeroDivisionError:
        return {"raises": "ZeroDivisionError"}
    return {"mask": mask, "weights": None if held is None else held.batch["rollout_is_weights"]}


def of_spec(correct: Any, settings: Callable[[Random], dict[str, Any]], which: str = "") -> Row:
    """Compare the reader of the correction."""
    more: dict[str, Any] = {"declared": OF_CORRECTION, "kinds": SOME, "within": COUNTED}
    return spec_of("verl", f"{HELPER}: {MAIN}", partial(tensors, correct), settings, which, **more)


def of_staleness(stale: Any) -> Row:
    """Compare the preset of ages with what the asynchronous replay buffer drops."""

    def run(given: Batch, versions: Tensor, max_off_policy_threshold: int) -> Tensor:
        oldest = {row: versions[row][mask].min().item() for row, mask in enumerate(given.mask) if mask.any()}
        buffer = SimpleNamespace(
            max_off_policy_strategy="drop",
            max_off_policy_threshold=max_off_policy_threshold,
            prompt_global_steps={"train": oldest},
            finished_keys={"train": set(oldest)},
        )
        kept = given.mask.clone()
        kept[sorted(stale(buffer, CURRENT, "train"))] = False
        return kept

    return staleness("verl.staleness", f"{BUFFER}: {STALE}", run, draw(max_off_policy_threshold=(1, 2, 4, 8)))


def of_presets(source: Source, correct: Any) -> Iterator[Row]:
    """Compare presets, and the recipes that they are part of, with the classmethods of verl's configuration."""
    made = source.cut(CONFIG, "RolloutCorrectionConfig")
    both_policies = {"ActorConfig": Settings, "AlgoConfig": Stranger, MAIN: correct}
    vanilla, bypass = (
        source.cut(LOSSES, f"compute_policy_loss_{name}", **both_policies) for name in ("vanilla", "bypass_mode")
    )

    def config_of(name: str, settings: dict[str, Any]) -> Any:
        names = {"upper": "threshold", "lower": "threshold_lower"}
        return getattr(made, name)(**{names.get(key, key): value for key, value in settings.items()})

    def corrected(name: str, given: Batch, **settings: Any) -> Result:
        config = config_of(name, settings)
        fields = {field: getattr(config, field) for field in list(inspect.signature(correct).parameters)[3:]}
        return tensors(correct, given, fields)

    def loss(name: str, given: Batch, **settings: Any) -> Tensor:
        found = corrected(name, given, **settings)
        nothing, counts = given.new.sum() * math.nan, {"batch_num_tokens": given.mask.sum()}
        if "raises" in found:
            return nothing
        if not name.startswith("bypass"):
            arguments = (given.old, given.new, given.token_advantages, found["mask"], "token-mean")
            value: Tensor = vanilla(*arguments, actor(global_batch_info=counts), found["weights"])[0]
            return value
        policy = Settings(rollout_correction=config_of(name, settings))
        arguments = (given.rollout, given.new, given.token_advantages, given.mask, "token-mean")
        try:
            value = bypass(*arguments, actor(policy_loss=policy, global_batch_info=counts))[0]
        except ZeroDivisionError:
            # Its ratio is new/rollout, which may leave no weight where old/rollout leaves some.
            return nothing
        return value

    for found in every_preset():
        name = found.name.partition(".")[2]
        if not found.name.startswith("verl.") or not source.has(CONFIG, f"RolloutCorrectionConfig.{name}"):
            continue
        drawn, function = partial(of_preset, found.settings), "bypass_mode" if name.startswith("bypass") else "vanilla"
        more: dict[str, Any] = {"declared": OF_CORRECTION, "kinds": SOME}
        yield preset(found.name, f"{CONFIG}: {name}, {HELPER}: {MAIN}", partial(corrected, name), drawn, **more)
        more["declared"] = (*OF_CORRECTION, LEFT_OUT)
        place = f"{LOSSES}: compute_policy_loss_{function}, {CONFIG}: {name}"
        yield recipe(found.name, place, partial(loss, name), drawn, **more)


def of_correction(source: Source, correct: Any) -> Iterator[Row]:
    """Compare the report, the reader, and the replaced functions of the correction."""
    theirs = {name: source.cut(HELPER, name, DataProto=Proto) for name in OTHERS}

    def precise(given: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """verl's own float32 spreads are wrong in the second digit where weights lie close together."""
        return given.old.double(), given.rollout.double(), given.mask

    def metrics(given: Batch, settings: dict[str, Any]) -> Result:
        found: Result = correct(*precise(given), **settings)[2]
        return found

    def replaced(given: Batch, settings: dict[str, Any]) -> Result:
        with patch.multiple(dropin, proto=proto, _say=lambda *given: None):
            held, mask, metrics = getattr(dropin, MAIN)(given.old, given.rollout, given.mask, **settings)
        return {"mask": mask, "weights": None if held is None else held.batch["rollout_is_weights"], **metrics}

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
        def run(given: Batch, settings: dict[str, Any]) -> Result:
            try:
                return side(given, settings)
            except ZeroDivisionError:
                return {"raises": "ZeroDivisionError"}

        return run

    more: dict[str, Any] = {"declared": OF_CORRECTION, "kinds": SOME, "within": COUNTED}
    place = f"{HELPER}: {MAIN}"
    yield report("verl", place, partial(rc.spec, "verl"), checked(metrics), correction, **more)
    yield of_spec(correct, correction)
    original = checked(lambda given, settings: {**tensors(correct, given, settings), **metrics(given, settings)})
    yield Row("drop-in", f"verl.{MAIN}", place, replaced, original, correction, **more)
    sides = partial(alone, lambda name: getattr(dropin, name)), checked(partial(alone, theirs.__getitem__))
    yield Row("drop-in", "verl.compute_rollout_...", f"{HELPER}: {', '.join(OTHERS)}", *sides, correction, **more)
    debug = source.cut(DEBUG, "calculate_debug_metrics", DataProto=Proto)

    def debugged(function: Any, old: Tensor, rollout: Tensor, mask: Tensor) -> Result:
        held = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask}
        return function(Proto.from_dict(held))

    yield Row(
        "drop-in",
        "verl.calculate_debug_metrics",
        f"{DEBUG}: calculate_debug_metrics",
        lambda given, _: debugged(dropin.calculate_debug_metrics, given.old, given.rollout, given.mask),
        lambda given, _: debugged(debug, *precise(given)),
        **more | {"declared": (*OF_CORRECTION, TINY)},
    )


def proto(weights: Tensor | None) -> Proto | None:
    """Stand in for the drop-in's function, which imports verl's class."""
    return None if weights is None else Proto.from_dict({"rollout_is_weights": weights})
