"""ms-swift: `rollout_importance_sampling_mode` with its threshold, and the arguments of `swift rlhf --rlhf_type grpo`.

swift's "sequence" is the geometric mean. D is clamped to +-20 per token. swift's weight also multiplies the KL term.
Rejection zeroes the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..backends.given import Groups
from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogates import PPO, REAL
from ..specs.terms import KL, Mean
from ..specs.validate import number, one_of
from .shared import lookup
from .shared.checking import Checks, without
from .shared.preset import LEVELS, is_off_policy, off_policy, presets
from .shared.recipe import BOTH, DECOUPLED, GLOBAL, ROWS, SEQUENCES, TOKENS, WITH_REFERENCE, Recipe, built_recipe
from .shared.settings import NoEquivalent, boolean, default_of, maybe, settings_of, warn_once, words
from .trl.config import mean_of, refuse_entropy, surrogate

TOKEN_CLAMP = 20.0


def _truncated(level: str, threshold: float) -> Spec:
    return Spec(weight=Weight(*LEVELS[level], upper=threshold, token_clamp=TOKEN_CLAMP))


def _masked(level: str, threshold: float) -> Spec:
    criterion = Criterion("ratio", *LEVELS[level], upper=threshold, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight.token(token_clamp=TOKEN_CLAMP), criteria=(criterion,), rejected="zero")


def _with_opsm(spec: Spec, delta: float) -> Spec:
    return replace(spec, criteria=(*spec.criteria, off_policy(delta)))


THRESHOLD = {"threshold": 2.0}
presets("swift", "ms-swift 4.6.0")(
    token_truncate=("w = min(exp(D), threshold).", partial(_truncated, "token"), THRESHOLD),
    token_mask=("w = exp(D) up to threshold, else 0.", partial(_masked, "token"), THRESHOLD),
    sequence_truncate=("w = min(exp(mean D), threshold).", partial(_truncated, "geometric"), THRESHOLD),
    sequence_mask=(
        "w = exp(D), and 0 for a sequence whose exp(mean D) is above threshold.",
        partial(_masked, "geometric"),
        THRESHOLD,
    ),
    # `off_policy_sequence_mask_delta` has no default in ms-swift; 0.1 is Trinity's.
    opsm=(
        "token_truncate, and a sequence with A < 0 whose mean(rollout - new) exceeds delta leaves the mask.",
        lambda delta, threshold: _with_opsm(_truncated("token", threshold), delta),
        {"delta": 0.1, **THRESHOLD},
    ),
)
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# --- settings ---

LOSS: dict[str, Any] = {
    "loss_type": "grpo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "max_completion_length": 512.0,
    "delta": None,
}
KNOWN = LOSS | {
    # ms-swift makes 0.04 of it.
    "beta": None,
    # Of loss_type real alone.
    "real_tau": 0.5,
    "num_generations": 8,
    "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0,
    "off_policy_sequence_mask_delta": None,
    "kl_in_reward": False,
    "top_entropy_quantile": 1.0,
    "sdar_loss_coef": 0.0,
    "chord_sft_dataset": (),
}
# Keys that stand in whole arguments, with many that do not concern this package.
WHOLE = words(
    "rlhf_type model output_dir learning_rate dataset reward_funcs use_vllm per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs max_steps temperature"
)

# loss_type: its mean. bnpo counts what the off-policy mask has left; dr_grpo is divided by max_completion_length too.
MEANS: dict[str, Mean] = {
    "grpo": ROWS,
    "bnpo": Mean(over="kept"),
    "dr_grpo": Mean("sequence_sum", over="rows"),
    "dapo": TOKENS,
    "cispo": TOKENS,
    "sapo": ROWS,
}

# --- losses ---


def _loss(spec: Spec | None, given: Mapping[str, Any]) -> Recipe:
    """A loss of GRPOTrainer."""
    mean = mean_of(MEANS, given["loss_type"], given["max_completion_length"])
    named = {**given, "sapo_temperature_pos": given["tau_pos"], "sapo_temperature_neg": given["tau_neg"]}
    PPO(given["epsilon"], delta=given["delta"])  # these are checked with any loss
    of_tokens = surrogate(given["loss_type"], named, ("token", "sequence", "sequence_token"))
    kl = KL("k3", given["beta"], value_clamp=10.0, weight="weights") if given["beta"] else None
    return Recipe(spec, Loss(of_tokens, mean, kl))


def _by_name(preset: str | None, table: Mapping[str, Any], /, **settings: Any) -> Recipe:
    """The loss that a preset corrects, whose settings are settings too."""
    given = {
        name: settings.pop(name, default_of(setting)) for name, setting in {**LOSS, **table}.items() if name in table
    }
    if preset is None and settings:
        raise TypeError(f"got an unexpected keyword argument {next(iter(settings))!r}")
    return _loss(None if preset is None else lookup.named(preset, **settings), {"delta": None, **given})


def _fipo(
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0
) -> Recipe:
    """The loss of FIPO, whose weights multiply the policy loss alone."""
    kl = KL("k3", beta, value_clamp=10.0) if beta else None
    return Recipe(None, Loss(PPO(epsilon, epsilon if epsilon_high is None else epsilon_high, delta=delta), kl=kl))


def _real(real_tau: float = 0.5, beta: float = 0.0, num_generations: int = 8) -> Recipe:
    """The loss of REAL, which takes the sign of advantages alone, and in which no weight has a part."""
    kl = KL("k3", beta, value_clamp=10.0, mean=Mean("token")) if beta else None
    return Recipe(None, Loss(REAL(real_tau), SEQUENCES, kl), {"groups": Groups(size=num_generations)})


WITHOUT_DELTA = {name: default for name, default in LOSS.items() if name != "delta"}
for _name in (*MODES, "opsm"):
    _build = partial(_by_name, f"swift.{_name}", WITHOUT_DELTA)
    built_recipe(f"swift.{_name}", _build, BOTH, "weights multiply the KL term too", WITHOUT_DELTA)
GRPO = LOSS | {"beta": 0.04, "max_completion_length": maybe(512.0)}
WITHOUT_MODE = "without rollout_importance_sampling_mode"
built_recipe("swift.grpo", partial(_by_name, None, GRPO), WITH_REFERENCE, WITHOUT_MODE, GRPO)
built_recipe("swift.fipo", _fipo, DECOUPLED, f"pass rc.future_kl_weights(...) as rc.Factors(weights); {GLOBAL}")
REAL_NOTE = "groups of num_generations sequences; rollout corrections have no part in this loss"
built_recipe("swift.real", _real, DECOUPLED, REAL_NOTE)

# --- the configuration ---

IS_MODE, IS_THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"


def _correction(given: Mapping[str, Any]) -> Spec | None:
    mode, delta, loss_type = given[IS_MODE], given["off_policy_sequence_mask_delta"], given["loss_type"]
    if delta is not None and loss_type == "bnpo" and str(mode).endswith("_mask"):
        raise ValueError(
            "off_policy_sequence_mask_delta: with bnpo and a mode that masks, one leaves the mask and the other has "
            "weight 0; no Spec does both"
        )
    if delta is not None and loss_type == "real":
        raise ValueError(
            "off_policy_sequence_mask_delta: with real a sequence that it masks stays among those with A <= 0, "
            "with a score of 0; no Spec does that"
        )
    found = None
    if mode is not None:
        one_of("rollout_importance_sampling_mode", mode, MODES, or_null=True)
        found = lookup.named(f"swift.{mode}", threshold=given[IS_THRESHOLD])
    return found if delta is None else _with_opsm(Spec() if found is None else found, delta)


def _settings(config: object) -> dict[str, Any]:
    given = settings_of(config, KNOWN, whole=WHOLE)
    if given["loss_type"] == "real" and given[IS_MODE] is not None:
        warn_once(("swift", IS_MODE), f"swift: {IS_MODE} does nothing: the loss real has no weights; leave it out")
        given[IS_MODE] = None
    return given


def read(config: object) -> Spec:
    """Read `rollout_importance_sampling_*` and `off_policy_sequence_mask_delta`."""
    return _correction(_settings(config)) or Spec()


def write(spec: Spec) -> dict[str, Any]:
    """Write `rollout_importance_sampling_*` and `off_policy_sequence_mask_delta`."""
    masked = next((c for c in spec.criteria if is_off_policy(c)), None)
    gate = next((c for c in spec.criteria if c is not masked), None)
    made: dict[str, Any] = {
        "rollout_importance_sampling_mode": None,
        "off_policy_sequence_mask_delta": None if masked is None else masked.high,
    }
    if spec.weight is None:
        return made
    mode, bounds = f"{spec.weight.over}_truncate", spec.weight.high
    if gate is not None:
        mode, bounds = f"{gate.over}_mask", gate.high
    made["rollout_importance_sampling_mode"] = mode if mode in MODES else None
    return made if bounds is None else made | {"rollout_importance_sampling_threshold": bounds}


def recipe(config: object) -> Recipe:
    """Read the whole loss."""
    given = _settings(config)
    if given["loss_type"] == "fipo":
        raise NoEquivalent("loss_type: 'fipo' weighs tokens by their futures, so it is rc.recipe('swift.fipo') by name")
    refuse_entropy(given)
    if number("sdar_loss_coef", given["sdar_loss_coef"]) != 0.0 or given["chord_sft_dataset"]:
        raise ValueError("sdar_loss_coef, chord_sft_dataset: add these losses to the value of policy_loss")
    corrects = _correction(given)
    given["beta"] = 0.04 if given["beta"] is None else number("beta", given["beta"])
    if boolean("kl_in_reward", given["kl_in_reward"]):
        given["beta"] = 0.0
    if given["loss_type"] == "real":
        return _real(given["real_tau"], given["beta"], given["num_generations"])
    return _loss(corrects, given)


# --- mistakes ---

CHECKS = Checks(
    keys=(IS_MODE, IS_THRESHOLD, "off_policy_sequence_mask_delta", "loss_type"),
    alike=("loss_type",),
    launchers=r"\b(swift|megatron)\s+(rlhf|rollout)\b|\bswift[./]cli[./]",
    temperature="temperature",
    top_p="top_p",
    top_k="top_k",
    repetition_penalty="repetition_penalty",
    length="max_completion_length",
    bounds={"weight": (IS_THRESHOLD,), "criteria": (IS_THRESHOLD,)},
    rules=without(IS_MODE, IS_THRESHOLD),
)
