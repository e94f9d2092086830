"""ms-swift: `rollout_importance_sampling_mode` with its threshold, and the arguments of `swift rlhf --rlhf_type grpo`.

swift's "sequence" is the geometric mean. D is clamped to +-20 per token. swift's weight also multiplies the KL term.
Rejection zeroes the weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ..backends.given import Groups
from ..specs.batch_losses import REAL
from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogates import PPO
from ..specs.terms import KL, Mean
from ..specs.validate import one_of
from .shared.checking import Checks, roles, without
from .shared.preset import HIGH, LEVELS, PRESETS, Preset, off_policy, presets, registered
from .shared.recipe import BOTH, DECOUPLED, GLOBAL, ROWS, SEQUENCES, TOKENS, WITH_REFERENCE, Recipe, add_recipe
from .shared.settings import Given, NoEquivalent, given_in, maybe, only, refused, unchecked, warn_once, word, words
from .trl.config import WHOLE_DISTRIBUTION, mean_of, surrogate

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

# loss_type: its mean. bnpo counts what the off-policy mask has left; dr_grpo is divided by max_completion_length too.
MEANS: dict[str, Mean] = {
    "grpo": ROWS,
    "bnpo": Mean(over="kept"),
    "dr_grpo": Mean("sequence_sum", over="rows"),
    "dapo": TOKENS,
    "cispo": TOKENS,
    "sapo": ROWS,
}
LOSS: dict[str, Any] = {
    "loss_type": word("grpo", MEANS),
    "epsilon": 0.2,
    "epsilon_high": None,
    "beta": 0.0,
    "importance_sampling_level": word("token", ("token", "sequence", "sequence_token")),
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "max_completion_length": maybe(512.0),
    "delta": None,
}
IS_MODE, IS_THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
OPSM = "off_policy_sequence_mask_delta"
TABLE = LOSS | {
    # Of another trainer's loss, such as DPO's, the correction is read, and no recipe.
    "loss_type": unchecked("grpo"),
    # ms-swift makes 0.04 of it.
    "beta": None,
    # Of loss_type real alone.
    "real_tau": 0.5,
    "num_generations": 8,
    IS_MODE: word(None, MODES),
    IS_THRESHOLD: 2.0,
    OPSM: None,
    "kl_in_reward": False,
    "top_entropy_quantile": only(1.0, f"{WHOLE_DISTRIBUTION}; pass a mask of your own", NoEquivalent),
    "sdar_loss_coef": only(0.0, "add this loss to the value of policy_loss"),
    "chord_sft_dataset": (),
}
# Keys that stand in whole arguments, with many that do not concern this package.
WHOLE = words(
    "rlhf_type model output_dir learning_rate dataset reward_funcs use_vllm per_device_train_batch_size "
    "gradient_accumulation_steps num_train_epochs max_steps temperature"
)

# --- losses ---


def _loss(spec: Spec | None, given: Given, beta: float) -> Recipe:
    """A loss of GRPOTrainer."""
    loss_type = given["loss_type"]
    PPO(given["epsilon"], delta=given["delta"])  # these are checked with any loss
    of_tokens = surrogate(loss_type, given, ("tau_pos", "tau_neg"))
    kl = KL("k3", beta, value_clamp=10.0, weight="weights") if beta else None
    return Recipe(spec, Loss(of_tokens, mean_of(MEANS[loss_type], loss_type, given), kl))


def _fipo(given: Given) -> Recipe:
    """The loss of FIPO, whose weights multiply the policy loss alone."""
    kl = KL("k3", given["beta"], value_clamp=10.0) if given["beta"] else None
    return Recipe(None, Loss(surrogate("fipo", given), kl=kl))


def _real(given: Given, beta: float) -> Recipe:
    """The loss of REAL, which takes the sign of advantages alone, and in which no weight has a part."""
    kl = KL("k3", beta, value_clamp=10.0, mean=Mean("token")) if beta else None
    return Recipe(None, Loss(REAL(given["real_tau"]), SEQUENCES, kl), {"groups": Groups(size=given["num_generations"])})


# A preset may have a delta of its own, the off-policy mask's.
WITHOUT_DELTA = {name: row for name, row in LOSS.items() if name != "delta"}


def _corrected(found: Preset, given: Given) -> Recipe:
    """The loss that a preset corrects, whose settings are settings too."""
    of_loss = Given(LOSS, {name: given[name] for name in WITHOUT_DELTA})
    return _loss(found.of(given), of_loss, given["beta"])


for _found in registered("swift"):
    _table = {**WITHOUT_DELTA, **_found.table}
    add_recipe(_found.name, partial(_corrected, _found), _table, BOTH, "weights multiply the KL term too")
GRPO = LOSS | {"beta": 0.04}
WITHOUT_MODE = "without rollout_importance_sampling_mode"
add_recipe("swift.grpo", lambda given: _loss(None, given, given["beta"]), GRPO, WITH_REFERENCE, WITHOUT_MODE)
FIPO = {name: LOSS[name] for name in ("epsilon", "epsilon_high", "delta", "beta", "importance_sampling_level")}
FIPO_NOTE = f"pass rc.future_kl_weights(...) as rc.Factors(weights); {GLOBAL}"
add_recipe("swift.fipo", _fipo, FIPO, DECOUPLED, FIPO_NOTE)
REAL_NOTE = "groups of num_generations sequences; rollout corrections have no part in this loss"
REAL_TABLE = {"real_tau": 0.5, "beta": 0.0, "num_generations": 8}
add_recipe("swift.real", lambda given: _real(given, given["beta"]), REAL_TABLE, DECOUPLED, REAL_NOTE)

# --- the configuration ---


def _correction(given: Given) -> Spec | None:
    mode, delta, loss_type = given[IS_MODE], given[OPSM], given["loss_type"]
    if delta is not None and loss_type == "bnpo" and str(mode).endswith("_mask"):
        raise refused(
            OPSM, "with bnpo and a mode that masks, one leaves the mask and the other has weight 0; no Spec does both"
        )
    if delta is not None and loss_type == "real":
        raise refused(
            OPSM,
            "with real a sequence that it masks stays among those with A <= 0, with a score of 0; no Spec does that",
        )
    found = None if mode is None else PRESETS[f"swift.{mode}"].of({"threshold": given[IS_THRESHOLD]})
    return found if delta is None else _with_opsm(Spec() if found is None else found, delta)


def settings(config: object) -> Given:
    """Find the arguments of `swift rlhf`."""
    given = given_in(config, TABLE, whole=WHOLE)
    if given["loss_type"] == "real" and given[IS_MODE] is not None:
        warn_once(IS_MODE, f"swift: {IS_MODE} does nothing: the loss real has no weights; leave it out", "swift")
        given = given.but(**{IS_MODE: None})
    return given


def read(given: Given) -> Spec:
    """Read `rollout_importance_sampling_*` and `off_policy_sequence_mask_delta`."""
    return _correction(given) or Spec()


WRITTEN = ({IS_MODE: None}, {IS_MODE: MODES, IS_THRESHOLD: HIGH}), ({OPSM: (None, HIGH)},)


def recipe(given: Given) -> Recipe:
    """Read the whole loss."""
    loss_type, beta = one_of("loss_type", given["loss_type"], (*MEANS, "real", "fipo")), given["beta"]
    if loss_type == "fipo":
        why = "'fipo' weighs tokens by their futures, so it is rc.recipe('swift.fipo') by name"
        raise refused("loss_type", why, NoEquivalent)
    if given["chord_sft_dataset"]:
        raise refused("chord_sft_dataset", "add this loss to the value of policy_loss")
    corrects, beta = _correction(given), 0.04 if beta is None else beta
    beta = 0.0 if given["kl_in_reward"] else beta
    return _real(given, beta) if loss_type == "real" else _loss(corrects, given, beta)


# --- mistakes ---

CHECKS = Checks(
    keys=(IS_MODE, IS_THRESHOLD, OPSM, "loss_type"),
    alike=("loss_type",),
    launchers=r"\b(swift|megatron)\s+(rlhf|rollout)\b|\bswift[./]cli[./]",
    roles=roles("", "temperature top_p top_k repetition_penalty", length="max_completion_length"),
    bounds={"weight": (IS_THRESHOLD,), "criteria": (IS_THRESHOLD,)},
    rules=without(IS_MODE, IS_THRESHOLD),
)
