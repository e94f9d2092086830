"""Trinity-RFT 0.6.0."""

from __future__ import annotations

from functools import partial

from rollout_corr.frameworks.shared.recipe import BYPASS, Named, around_one, penalty, recipe
from rollout_corr.spec.surrogates import GSPO, PPO, Reinforce

OLD_IS_ROLLOUT = "its old log-probs are the rollout's unless bypass_old_logprobs is off"
NEEDS = (*BYPASS, "ref_logp")

_KL = penalty("k2", kl_coef=0.001)


def _clip(both: float, low: float | None, high: float | None, dual: float) -> PPO:
    return PPO(both if low is None else low, both if high is None else high, dual)


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
}
