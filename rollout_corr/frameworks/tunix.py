"""Tunix: `sampler_is="token"`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rollout_corr.frameworks.shared.preset import preset_of
from rollout_corr.frameworks.shared.recipe import (
    BOTH,
    BYPASS,
    DECOUPLED,
    NO_LOWER_CLAMP,
    SEQUENCES,
    TOKENS,
    Named,
    Recipe,
    RecipeEntry,
    aggregation,
    as_wide,
    clip,
    recipe,
)
from rollout_corr.specs.correction import Spec, Weight
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GSPO, PPO
from rollout_corr.specs.terms import KL, KLKind, Mean
from rollout_corr.specs.validate import one_of


@preset_of("Tunix 0.1.7")
def tis(threshold: float = 2.0) -> Spec:
    """w = min(exp(D), threshold), D clamped to +-20."""
    return Spec(weight=Weight.token(upper=threshold, token_clamp=20.0))


# Tunix 0.1.7 and c7d8950 (2026-08-21).
AGGREGATIONS: dict[str, Mean] = {
    "token-mean": TOKENS,
    "sequence-mean-token-mean": SEQUENCES,
    "sequence-mean-token-scale": Mean("sequence_sum"),
    "seq-mean-token-sum": Mean("sequence_sum"),
}
KL_KINDS: dict[str, KLKind] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
GRPO_NEEDS = (*BYPASS, "ref_logp")
ROLLED_OUT = "its old log-probs are the rollout's unless use_rollout_logps is off"


def _grpo(
    loss_agg_mode: str = "sequence-mean-token-mean",
    loss_algo: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
    beta: float | None = 0.04,
    kl_loss_mode: str = "kl",
    kl_clamp_value: float | None = None,
    max_tokens_to_generate: float = 64.0,
) -> Recipe:
    """`policy_loss_fn=grpo`. The scale of sequence-mean-token-scale is the width of the batch."""
    surrogate: Surrogate = clip(epsilon, epsilon_high, epsilon_c)
    if one_of("loss_algo", loss_algo, ("grpo", "gspo-token")) == "gspo-token":
        surrogate = as_wide(partial(GSPO, through="token", clamp=10.0))(epsilon, epsilon_high, epsilon_c)
    mean = aggregation("loss_agg_mode", AGGREGATIONS, loss_agg_mode)
    if loss_agg_mode == "sequence-mean-token-scale":
        mean = replace(mean, length=max_tokens_to_generate)
    kind = KL_KINDS[one_of("kl_loss_mode", kl_loss_mode, KL_KINDS)]
    return Recipe(None, Loss(surrogate, mean, KL(kind, beta, bound=kl_clamp_value) if beta else None))


def _with_tis(sampler_is_threshold: float = 2.0, **settings: Any) -> Recipe:
    """`sampler_is=token`."""
    return Recipe(tis(sampler_is_threshold), _grpo(**settings).loss)


def _sides(both: float, low: float | None, high: float | None, dual: float | None) -> PPO:
    return PPO(both if low is None else low, both if high is None else high, dual)


# The KL of `policy_loss_fn=ppo` goes into the rewards.
RECIPES = {
    "grpo": RecipeEntry(_grpo, GRPO_NEEDS, ROLLED_OUT),
    "gspo_token": RecipeEntry(partial(_grpo, loss_algo="gspo-token"), GRPO_NEEDS, NO_LOWER_CLAMP),
    "dapo": RecipeEntry(partial(_grpo, "token-mean", epsilon_high=0.28, beta=None), BYPASS, ROLLED_OUT),
    "drgrpo": RecipeEntry(
        partial(_grpo, "sequence-mean-token-scale"), GRPO_NEEDS, "max_tokens_to_generate is the rollout's"
    ),
    "tis": RecipeEntry(_with_tis, (*BOTH, "ref_logp")),
    "ppo": recipe(Named(_sides, epsilon=0.2, epsilon_low=None, epsilon_high=None, epsilon_c=None), DECOUPLED),
}
