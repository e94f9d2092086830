"""ms-swift: `rollout_importance_sampling_mode` with its threshold.

swift's "sequence" is the geometric mean. D is clamped to +-20 per token. swift's weight also multiplies the KL term.
Rejection zeroes the weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rollout_corr.backends.given import Groups
from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    DECOUPLED,
    GLOBAL,
    ROWS,
    SEQUENCES,
    TOKENS,
    WITH_REFERENCE,
    Recipe,
    RecipeEntry,
)
from rollout_corr.frameworks.shared.specs import off_policy
from rollout_corr.specs.choices import Reduce, Unit
from rollout_corr.specs.correction import Criterion, Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO, PPO, REAL, SAPO, Score
from rollout_corr.specs.terms import KL, Mean
from rollout_corr.specs.validate import one_of

TOKEN_CLAMP = 20.0


def _masked(over: Unit, reduce: Reduce | None, threshold: float) -> Spec:
    criterion = Criterion("ratio", over=over, reduce=reduce, upper=threshold, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight.token(token_clamp=TOKEN_CLAMP), criteria=(criterion,), rejected="zero")


@preset_of("ms-swift 4.6.0")
def token_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(D), threshold)."""
    return Spec(weight=Weight.token(upper=threshold, token_clamp=TOKEN_CLAMP))


@preset_of("ms-swift 4.6.0")
def token_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D) up to threshold, else 0."""
    return _masked("token", None, threshold)


@preset_of("ms-swift 4.6.0")
def sequence_truncate(threshold: float = 2.0) -> Spec:
    """w = min(exp(mean D), threshold)."""
    return Spec(weight=Weight.geometric(upper=threshold, token_clamp=TOKEN_CLAMP))


@preset_of("ms-swift 4.6.0")
def sequence_mask(threshold: float = 2.0) -> Spec:
    """w = exp(D), and 0 for a sequence whose exp(mean D) is above threshold."""
    return _masked("sequence", "mean", threshold)


@preset_of("ms-swift 4.6.0")
def opsm(delta: float = 0.1, threshold: float = 2.0) -> Spec:
    """token_truncate, and a sequence with A < 0 whose mean(rollout - new) exceeds delta leaves the mask.

    `off_policy_sequence_mask_delta` has no default in ms-swift; 0.1 is Trinity's. For `policy_loss`.
    """
    criterion = off_policy(delta, token_clamp=TOKEN_CLAMP)
    return Spec(weight=Weight.token(upper=threshold, token_clamp=TOKEN_CLAMP), criteria=(criterion,))


# loss_type: its mean. bnpo counts what the off-policy mask has left; dr_grpo is divided by max_completion_length too.
MEANS: dict[str, Mean] = {
    "grpo": ROWS,
    "bnpo": Mean(over="kept"),
    "dr_grpo": Mean("sequence_sum", over="rows"),
    "dapo": TOKENS,
    "cispo": TOKENS,
    "sapo": ROWS,
}
IMPORTANCE_LEVELS = ("token", "sequence", "sequence_token")


def loss(
    spec: Spec | None,
    loss_type: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    max_completion_length: float | None = 512.0,
) -> Recipe:
    """Return a loss of GRPOTrainer."""
    mean = MEANS[one_of("loss_type", loss_type, MEANS)]
    if loss_type == "dr_grpo":
        mean = replace(mean, length=max_completion_length)
    level = one_of("importance_sampling_level", importance_sampling_level, IMPORTANCE_LEVELS)
    sides = epsilon, epsilon if epsilon_high is None else epsilon_high
    surrogate: Surrogate = PPO(*sides, delta=delta)
    if loss_type in ("cispo", "sapo"):
        if level != "token":
            raise ValueError(f"importance_sampling_level: expected 'token' with loss_type {loss_type!r}, got {level!r}")
        surrogate = SAPO(tau_pos, tau_neg) if loss_type == "sapo" else Score(upper=sides[1])
    elif level != "token":
        surrogate = GSPO(*sides, delta=delta, through="token" if level == "sequence_token" else "sequence")
    kl = KL("k3", beta, value_clamp=10.0, weight="weights") if beta else None
    return Recipe(spec, Loss(surrogate, mean, kl))


def _recipe(
    name: str,
    loss_type: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    max_completion_length: float = 512.0,
    **settings: Any,
) -> Recipe:
    """Return the loss that a preset corrects, whose settings are `settings`."""
    spec = lookup.named(f"swift.{name}", **settings)
    level, taus = importance_sampling_level, (tau_pos, tau_neg)
    return loss(spec, loss_type, epsilon, epsilon_high, None, beta, level, *taus, max_completion_length)


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
NOTE = "weights multiply the KL term too"


def _fipo(
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, beta: float = 0.0
) -> Recipe:
    """Return the loss of FIPO, whose weights multiply the policy loss alone."""
    kl = KL("k3", beta, value_clamp=10.0) if beta else None
    surrogate = PPO(epsilon, epsilon if epsilon_high is None else epsilon_high, delta=delta)
    return Recipe(None, Loss(surrogate, kl=kl))


def real(real_tau: float = 0.5, beta: float = 0.0, num_generations: int = 8) -> Recipe:
    """Return the loss of REAL, which takes the sign of advantages alone, and in which no weight has a part."""
    kl = KL("k3", beta, value_clamp=10.0, mean=Mean("token")) if beta else None
    return Recipe(None, Loss(REAL(real_tau), SEQUENCES, kl), {"groups": Groups(size=num_generations)})


RECIPES = {name: RecipeEntry(partial(_recipe, name), BOTH, NOTE) for name in (*MODES, "opsm")} | {
    "grpo": RecipeEntry(partial(loss, None, beta=0.04), WITH_REFERENCE, "without rollout_importance_sampling_mode"),
    "fipo": RecipeEntry(_fipo, DECOUPLED, f"pass rc.future_kl_weights(...) as rc.Factors(weights); {GLOBAL}"),
    "real": RecipeEntry(
        real, DECOUPLED, "groups of num_generations sequences; rollout corrections have no part in this loss"
    ),
}
