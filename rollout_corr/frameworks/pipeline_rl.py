"""PipelineRL 58d3934 (2026-06-19): rl_step, with the settings of conf/finetune/base.yaml."""

from __future__ import annotations

from rollout_corr.frameworks.shared.recipe import BYPASS, Named, clip, recipe
from rollout_corr.frameworks.shared.settings import boolean
from rollout_corr.specs.surrogates import GSPO, Score
from rollout_corr.specs.terms import KL, Mean

BATCH_SIZE = "pass batch_size, the samples of a step, as the total; with group_normalization scale = 1 / group_tokens"

_KL = Named(
    lambda coef, log_clamp: KL("k3", coef, log_clamp=log_clamp) if coef else None,
    kl_coef=0.0,
    clamp_log_ratio_ref_new_value=5.0,
)


def _mean(by_group: bool) -> Mean:
    """Divide by the samples of the step, or nothing where `scale` divides by the tokens of each group."""
    return Mean("sum" if boolean("group_normalization", by_group) else "sequence_sum")


PER_SEQUENCE = Named(_mean, group_normalization=False)

# GSPO has no KL, whatever kl_coef says.
RECIPES = {
    "ppo": recipe(Named(clip, epsilon_low=0.02, epsilon_high=0.02), BYPASS, BATCH_SIZE, mean=PER_SEQUENCE, kl=_KL),
    "reinforce": recipe(
        Named(lambda high: Score(upper=1.0 + high), epsilon_high=0.02),
        BYPASS,
        BATCH_SIZE,
        mean=PER_SEQUENCE,
        kl=_KL,
    ),
    "gspo": recipe(Named(GSPO, epsilon_low=0.02, epsilon_high=0.02), BYPASS, BATCH_SIZE, mean=PER_SEQUENCE),
}
