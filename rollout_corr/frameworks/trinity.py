"""Trinity-RFT 0.6.0."""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.recipe import (
    BYPASS,
    ROWS,
    TOKENS,
    Named,
    Recipe,
    RecipeEntry,
    around_one,
    mean,
    penalty,
    recipe,
)
from rollout_corr.specs.loss import Loss
from rollout_corr.specs.signed_losses import Mask
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import GPG, GSPO, PPO, REC, SAPO, TOPR, Reinforce, Score
from rollout_corr.specs.terms import KL, SquaredLogRatio
from rollout_corr.specs.validate import number, one_of

OLD_IS_ROLLOUT = "its old log-probs are the rollout's unless bypass_old_logprobs is off"
NEEDS = (*BYPASS, "ref_logp")

_KL = penalty("k2", kl_coef=0.001)


def _clip(both: float, low: float | None, high: float | None, dual: float) -> PPO:
    return PPO(both if low is None else low, both if high is None else high, dual)


# clip_mode: the mask, and the weights that Trinity can compute with it.
_MASKS: dict[str, Mask] = {"one-side": "one_side", "gspo-one-side": "one_side", "two-side": "two_side", "ring": "ring"}
_MEAN = mean(loss_agg_mode="token-mean")


def _rec(
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    epsilon_low_prime: float = 0.6,
    epsilon_high_prime: float = 2.0,
    clip_mode: str = "none",
    weight: str = "none",
    regularizer: str = "none",
    regularizer_coef: float = 0.0,
    kl_coef: float = 0.001,
) -> Recipe:
    """`policy_loss_fn=rec`. Its weight "advantage" is a function of the advantages, which the caller brings."""
    whole = one_of("clip_mode", clip_mode, ("none", *_MASKS)) == "gspo-one-side"
    by_ratio = "gspo_importance_sampling" if whole else "importance_sampling"
    weighed = one_of("weight", weight, ("none", by_ratio)) == by_ratio
    surrogate: Surrogate = Score() if weighed else GPG()
    if clip_mode != "none":
        sides = epsilon_low, epsilon_high, epsilon_low_prime, epsilon_high_prime
        surrogate = REC(_MASKS[clip_mode], *sides, "ratio" if weighed else "one", "sequence" if whole else "token")
    if whole and number("kl_coef", kl_coef):
        raise ValueError(
            f"kl_coef: expected 0 with clip_mode 'gspo-one-side', whose KL is a mean over tokens, got {kl_coef!r}"
        )
    squares = one_of("regularizer", regularizer, ("none", "k2")) == "k2"
    kl = KL("k2", kl_coef) if number("kl_coef", kl_coef) else None
    square = SquaredLogRatio(regularizer_coef) if squares else None
    return Recipe(None, Loss(surrogate, ROWS if whole else TOKENS, kl, square))


RECIPES = {
    "ppo": recipe(
        Named(_clip, clip_range=0.2, clip_range_low=None, clip_range_high=None, clip_ratio_c=3.0),
        NEEDS,
        OLD_IS_ROLLOUT,
        kl=_KL,
    ),
    "gspo": recipe(
        Named(partial(GSPO, through="token"), clip_range_low=0.0003, clip_range_high=0.0004),
        NEEDS,
        OLD_IS_ROLLOUT,
        kl=_KL,
    ),
    "cispo": recipe(Named(around_one, clip_range_low=1.0, clip_range_high=0.28), NEEDS, OLD_IS_ROLLOUT, kl=_KL),
    "importance_sampling": recipe(Reinforce(), BYPASS, OLD_IS_ROLLOUT),
    "sapo": recipe(
        Named(partial(SAPO, gate="stopped"), tau_pos=1.0, tau_neg=1.05),
        NEEDS,
        OLD_IS_ROLLOUT,
        mean=_MEAN,
        kl=_KL,
    ),
    "topr": recipe(Named(TOPR, advantage_threshold=0.0), NEEDS, OLD_IS_ROLLOUT, mean=_MEAN, kl=_KL),
    "opmd": recipe(Named(lambda tau: GPG(coef=1.0 / (1.0 + tau)), tau=1.0), ("ref_logp",), mean=_MEAN, kl=_KL),
    "rec": RecipeEntry(_rec, NEEDS, OLD_IS_ROLLOUT),
}
