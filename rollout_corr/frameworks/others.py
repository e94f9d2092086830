"""Frameworks and papers whose configuration is not read: presets and recipes, a few rows each.

CTPO lets a gradient through the ratio of token t alone: the gradient of log p_t times the ratio of the prefix, and 0
where the clip holds. So it is a weight and three criteria, which of them by the sign of the advantage; with `la` the
band grows as sqrt(t).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from ..specs.choices import WeightReduce, When
from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogate import Level, Surrogate
from ..specs.surrogates import DPPO, GPG, GSPO, PPO, REC, SAPO, TOPR, AveragePPO, Divergence, Mask, Reinforce, Score
from ..specs.terms import KL, KLKind, Mean, SquaredLogRatio
from ..specs.validate import one_of, positive
from .shared.preset import gated, masked, presets, truncated
from .shared.recipe import (
    BOTH,
    BYPASS,
    BYPASS_WITH_REFERENCE,
    DECOUPLED,
    GLOBAL,
    GSPO_TOKEN,
    NO_LOWER_CLAMP,
    OPEN_ENDS,
    ROWS,
    SEQUENCES,
    TOKENS,
    WITH_REFERENCE,
    Named,
    Recipe,
    add_recipe,
    anchor,
    around_one,
    as_wide,
    clip,
    clip_of_sides,
    mean,
    named_recipe,
    of_presets,
    penalty,
    preset_with,
)
from .shared.settings import Given, maybe, refused, unchecked, word

DUAL_CLIP = Named(clip, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=maybe(3.0))

# --- ART 0.5.18: its own loss, and the loss of `ppo=True` ---


def _art_ppo(epsilon: float, epsilon_high: float | None, level: Level) -> Surrogate:
    if level in ("average", "geometric_average"):
        return as_wide(partial(AveragePPO, level=level))(epsilon, epsilon_high)
    return as_wide(PPO if level == "token" else GSPO)(epsilon, epsilon_high)


def _art_cispo(epsilon: float, epsilon_high: float | None, level: Level) -> Score:
    return Score(1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high), level=level)


UNKNOWN_LOGPS = "it trains on tokens that have no log-prob, this package leaves them out"
ART = {"epsilon": 0.2, "epsilon_high": None, "importance_sampling_level": word("token", get_args(Level))}
named_recipe(
    "art.default", Named(_art_cispo, **ART | {"epsilon": 1.0, "epsilon_high": maybe(4.0)}), BYPASS, UNKNOWN_LOGPS
)
named_recipe("art.ppo", Named(_art_ppo, **ART), BYPASS, UNKNOWN_LOGPS)

# --- CTPO: PPO's clip on the ratio of each token's prefix, for `policy_loss` ---


def _ctpo(reduce: WeightReduce, grows: bool, low: float, high: float, dual: float) -> Spec:
    """The weight of a prefix and its clips. CTPO clamps every log-ratio to 20."""
    bounds = (math.exp(-low), math.exp(high), math.exp(dual)) if grows else (1.0 - low, 1.0 + high, dual)

    def prefix(label: str, when: When, **bound: float) -> Criterion:
        # A mean within b / sqrt(t) is a sum within b sqrt(t).
        of: dict[str, Any] = {"reduce": "sum" if grows else reduce, "growth": "sqrt" if grows else None, **bound}
        return Criterion("ratio", "prefix", when=when, of="new/rollout", label=label, token_clamp=20.0, **of)

    criteria = (
        prefix("clip_high", "positive_advantage", upper=bounds[1]),
        prefix("clip_low", "negative_advantage", lower=bounds[0]),
        prefix("clip_dual", "negative_advantage", upper=bounds[2]),
    )
    return Spec(Weight("prefix", token_clamp=20.0, reduce=reduce), criteria, rejected="zero")


AROUND_ONE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
GROWING = {"la_clip_low": 0.025, "la_clip_high": 0.05, "la_clip_c": 0.05}
presets("ctpo", "CTPO acc4021 (2026-06), arXiv 2605.07331")(
    cumprod=(
        "Weight of a token: the product of the ratios up to it; 0 where PPO's dual clip of that has no gradient.",
        partial(_ctpo, "sum", False),
        AROUND_ONE,
    ),
    geomean=(
        "Weight of a token: the geometric mean of the ratios up to it; "
        "0 where PPO's dual clip of that has no gradient.",
        partial(_ctpo, "mean", False),
        AROUND_ONE,
    ),
    cumprod_la=(
        "The product, clipped in log space at sqrt(t) times the bounds (clip_ratio_la_power 0.5).",
        partial(_ctpo, "sum", True),
        GROWING,
    ),
    geomean_la=(
        "The geometric mean, clipped in log space at the bounds over sqrt(t) (clip_ratio_la_power -0.5).",
        partial(_ctpo, "mean", True),
        GROWING,
    ),
)
CTPO_NOTE = "its old_log_prob is rollout_logp; where it clips, its loss has a value and no gradient, here neither"
of_presets("ctpo", Score(), BYPASS, CTPO_NOTE)

# --- DPPO's masks (Stable-RL): a token that has moved too far with its advantage does not train; for `policy_loss` ---


def _outward(stat: Divergence, delta: float) -> Spec:
    lower = -delta if stat == "tv" else None
    of: Any = {"when": "outward", "of": "new/rollout", "label": "dppo"}
    return masked(Criterion("prob_diff" if stat == "tv" else "binary_kl", lower=lower, upper=delta, **of))


def _dppo(divergence: Divergence, delta: float, clip_ratio_c: float) -> DPPO:
    return DPPO(divergence, delta, delta, clip_ratio_c, of="new/rollout")


presets("dppo", "Stable-RL (2026-03)")(
    tv=(
        "0 for a token whose probability has moved with its advantage by more than delta since it was sampled.",
        partial(_outward, "tv"),
        {"delta": 0.15},
    ),
    kl=(
        "0 for a token that has moved with its advantage and whose binary KL(rollout || new) is above delta.",
        partial(_outward, "kl"),
        {"delta": 0.05},
    ),
)
named_recipe("dppo.tv", Named(partial(_dppo, "tv"), delta=0.15, clip_ratio_c=maybe(20.0)), BYPASS)
named_recipe("dppo.kl", Named(partial(_dppo, "kl"), delta=0.05, clip_ratio_c=maybe(20.0)), BYPASS)

# --- Fast-LLM 7d61a1b (2026-07-20) ---

DOCUMENTS = "total: documents of all ranks"
named_recipe("fast_llm.grpo", Named(clip, epsilon_low=0.2, epsilon_high=0.2), BYPASS, GLOBAL)
named_recipe(
    "fast_llm.gspo", Named(GSPO, epsilon_low=0.2, epsilon_high=0.2), BYPASS, DOCUMENTS, mean=Mean("sequence_sum")
)

# --- Flash-RL: the cap of its patch to verl ---

presets("flash_rl", "Flash-RL 7c82823 (2025-11)")(
    tis=("w = min(exp(D), imp_ratio_cap); its int8 configurations use 8.", truncated, {"imp_ratio_cap": 2.0})
)
of_presets("flash_rl", DUAL_CLIP, BOTH, "the loss of the verl that it patches")

# --- GLM-5: IcePop of its reasoning RL, and the double-sided importance sampling of its agentic RL ---


def _glm(beta: float) -> Spec:
    upper = positive("beta", beta, finite=False)
    return gated(Criterion("ratio", lower=1.0 / upper, upper=upper))


presets("glm", "GLM-5 (2026-02), arXiv 2602.15763")(
    icepop=("w = exp(D) inside [1 / beta, beta], else 0.", _glm, {"beta": 2.0})
)
# Its report's equation 1, and equations 3 to 5, which give no number: the bounds are equation 1's.
GLM = {"epsilon_low": 0.2, "epsilon_high": 0.28}
of_presets("glm", Named(clip, **GLM), BOTH, mean=SEQUENCES)
named_recipe("glm.double_sided", Named(partial(around_one, outside="zero", of="new/rollout"), **GLM), BYPASS, OPEN_ENDS)

# --- Kimi K2.5's interval, for `policy_loss`: a token outside has no gradient, whatever the sign of its advantage ---

presets("kimi", "Kimi K2.5 (2026-02), arXiv 2602.02276")(
    interval=(
        "0 for a token whose ratio new/rollout is outside [lower, upper]; the report gives no bounds.",
        lambda lower, upper: masked(Criterion("ratio", lower=lower, upper=upper, of="new/rollout", label="interval")),
        {"lower": 0.5, "upper": 2.0},
    )
)
# Its report, equation 1, gives no number: tau is prime-rl's, the interval ours.
named_recipe(
    "kimi.k25",
    Reinforce(of="new/rollout"),
    BYPASS,
    "outside the interval its Clip has a value, which is 0 here: no gradient in either",
    spec="kimi.interval",
    regularizer=anchor("all", tau=1e-3),
)

# --- Megatron-LM RL: `rl_inference_logprobs_is_correction`, and calculate_grpo_loss of d98e8a6 (2026-08-22) ---

presets("megatron", "Megatron-LM RL (2026-08)")(
    tis=(
        "w = min(exp(D), coef), coef being `rl_importance_sampling_truncation_coef`; Megatron itself has no default.",
        truncated,
        {"coef": 2.0},
    )
)
MEGATRON_CLIP = Named(clip, grpo_clamp_eps_lower=0.01, grpo_clamp_eps_upper=0.01)
MEGATRON_KL = penalty(grpo_kl_beta=0.001)
named_recipe("megatron.grpo", MEGATRON_CLIP, WITH_REFERENCE, kl=MEGATRON_KL)
named_recipe(
    "megatron.tis",
    MEGATRON_CLIP,
    (*BOTH, "ref_logp"),
    "the coefficient has no default in Megatron",
    spec=preset_with("megatron.tis", rl_importance_sampling_truncation_coef=("coef", 2.0)),
    kl=MEGATRON_KL,
)

# --- MiniRL (`ppo_recompute` of Stable-RL), for `policy_loss`: PPO's clip as a mask, and a ratio new/rollout ---

presets("minirl", "Stable-RL (2026-03)")(
    mask=(
        "0 for a token whose ratio new/old has left [1 - clip_low, 1 + clip_high] with its advantage.",
        lambda low, high: masked(
            Criterion("ratio", lower=1.0 - low, upper=1.0 + high, when="outward", of="new/old", label="clip")
        ),
        {"clip_low": 0.2, "clip_high": 0.2},
    )
)
named_recipe(
    "minirl.default",
    Named(lambda upper: Score(upper=upper, of="new/rollout"), clip_ratio_c=maybe(20.0)),
    BOTH,
    "the ratio is new/rollout, the mask is of new/old",
    spec="minirl.mask",
)

# --- PipelineRL 58d3934 (2026-06-19): rl_step, with the settings of conf/finetune/base.yaml ---


def _per_sequence(by_group: bool) -> Mean:
    """Divide by the samples of the step, or nothing where `scale` divides by the tokens of each group."""
    return Mean("sum" if by_group else "sequence_sum")


BATCH_SIZE = "total: batch_size, the samples of a step; with group_normalization scale = 1 / group_tokens"
PIPELINE_MEAN: dict[str, Any] = {"mean": Named(_per_sequence, group_normalization=False)}
PIPELINE_KL = Named(
    lambda coef, log_clamp: KL("k3", coef, log_clamp=log_clamp) if coef else None,
    kl_coef=0.0,
    clamp_log_ratio_ref_new_value=5.0,
)
PIPELINE_CLIP = {"epsilon_low": 0.02, "epsilon_high": 0.02}
PIPELINE_SCORE = Named(lambda high: Score(upper=1.0 + high), epsilon_high=0.02)
named_recipe("pipeline_rl.ppo", Named(clip, **PIPELINE_CLIP), BYPASS, BATCH_SIZE, kl=PIPELINE_KL, **PIPELINE_MEAN)
named_recipe("pipeline_rl.reinforce", PIPELINE_SCORE, BYPASS, BATCH_SIZE, kl=PIPELINE_KL, **PIPELINE_MEAN)
# GSPO has no KL, whatever kl_coef says.
named_recipe("pipeline_rl.gspo", Named(GSPO, **PIPELINE_CLIP), BYPASS, BATCH_SIZE, **PIPELINE_MEAN)

# --- RLinf a3816b5: `behave_weight_threshold` of its decoupled PPO, `loss_type=actor`, `importance_sampling_fix` ---

presets("rlinf", "RLinf a3816b5 (2026-08-22)")(
    decoupled=(
        "w = exp(D); tokens above threshold (2 or 5 in its configurations) masked, and not counted by the mean.",
        lambda threshold: Spec(weight=Weight.token(), criteria=(Criterion("ratio", upper=threshold),)),
        {"threshold": 2.0},
    )
)
ACTOR: dict[str, Any] = {"mean": mean(loss_agg_func="token-mean"), "kl": penalty(value_clamp=10.0, kl_beta=0.0)}
WHICH_KL = "the KL of its Megatron actor; the FSDP actor's has `swapped=True`"
named_recipe("rlinf.actor", DUAL_CLIP, DECOUPLED, WHICH_KL, **ACTOR)
named_recipe("rlinf.ppo", DUAL_CLIP, DECOUPLED, f"loss_type actor_critic without its critic; {WHICH_KL}", **ACTOR)
named_recipe("rlinf.grpo", DUAL_CLIP, DECOUPLED, f"loss_type actor; {WHICH_KL}", **ACTOR)
named_recipe(
    "rlinf.importance_sampling_fix",
    DUAL_CLIP,
    BOTH,
    "the clip has no default in RLinf, its examples say 1 or 2",
    spec=preset_with("megatron.tis", importance_sampling_clip=("coef", 2.0)),  # it multiplies the advantages: a weight
    **ACTOR,
)
named_recipe("rlinf.decoupled", DUAL_CLIP, BOTH, spec="rlinf.decoupled", over="kept")

# --- Tinker's losses, sums over tokens; torchforge's loss ---

named_recipe("tinker.importance_sampling", Reinforce(), BYPASS, mean=Mean("sum"))
named_recipe("tinker.ppo", PPO(0.2, 0.2), BYPASS, mean=Mean("sum"))
named_recipe("tinker.cispo", Score(0.0, 4.0), BYPASS, mean=Mean("sum"))
named_recipe("torchforge.default", Score(0.1, 10.0), BYPASS)

# --- Trinity-RFT 0.6.0 ---

# clip_mode: the mask, and the weights that Trinity can compute with it.
MASKS: dict[str, Mask] = {"one-side": "one_side", "gspo-one-side": "one_side", "two-side": "two_side", "ring": "ring"}
REC_TABLE: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "epsilon_low_prime": 0.6,
    "epsilon_high_prime": 2.0,
    "clip_mode": word("none", ("none", *MASKS)),
    "weight": unchecked("none"),
    "regularizer": word("none", ("none", "k2")),
    "regularizer_coef": 0.0,
    "kl_coef": 0.001,
}


def _rec(given: Given) -> Recipe:
    """`policy_loss_fn=rec`. Its weight "advantage" is a function of the advantages, which the caller brings."""
    low, high, low_prime, high_prime, clip_mode, weight, regularizer, coefficient, kl_coef = given.values()
    whole = clip_mode == "gspo-one-side"
    by_ratio = "gspo_importance_sampling" if whole else "importance_sampling"
    weighed = one_of("weight", weight, ("none", by_ratio)) == by_ratio
    surrogate: Surrogate = Score() if weighed else GPG()
    if clip_mode != "none":
        surrogate = REC(
            MASKS[clip_mode],
            low,
            high,
            low_prime,
            high_prime,
            "ratio" if weighed else "one",
            "sequence" if whole else "token",
        )
    if whole and kl_coef:
        why = f"expected 0 with clip_mode 'gspo-one-side', whose KL is a mean over tokens, got {kl_coef!r}"
        raise refused("kl_coef", why)
    square = SquaredLogRatio(coefficient) if regularizer == "k2" else None
    return Recipe(None, Loss(surrogate, ROWS if whole else TOKENS, KL("k2", kl_coef) if kl_coef else None, square))


TRINITY_KL: dict[str, Any] = {"kl": penalty("k2", kl_coef=0.001)}
TRINITY = TRINITY_KL | {"mean": mean(loss_agg_mode="token-mean")}
TRINITY_CLIP = {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None, "clip_ratio_c": maybe(3.0)}
TRINITY_GSPO = Named(partial(GSPO, through="token"), clip_range_low=0.0003, clip_range_high=0.0004)
TRINITY_CISPO = Named(around_one, clip_range_low=1.0, clip_range_high=0.28)
TRINITY_SAPO = Named(partial(SAPO, gate="stopped"), tau_pos=1.0, tau_neg=1.05)
ROLLED_OUT = "its old log-probs are the rollout's unless bypass_old_logprobs is off"
named_recipe("trinity.ppo", Named(clip_of_sides, **TRINITY_CLIP), BYPASS_WITH_REFERENCE, ROLLED_OUT, **TRINITY_KL)
named_recipe("trinity.gspo", TRINITY_GSPO, BYPASS_WITH_REFERENCE, ROLLED_OUT, **TRINITY_KL)
named_recipe("trinity.cispo", TRINITY_CISPO, BYPASS_WITH_REFERENCE, ROLLED_OUT, **TRINITY_KL)
named_recipe("trinity.importance_sampling", Reinforce(), BYPASS, ROLLED_OUT)
named_recipe("trinity.sapo", TRINITY_SAPO, BYPASS_WITH_REFERENCE, ROLLED_OUT, **TRINITY)
named_recipe("trinity.topr", Named(TOPR, advantage_threshold=0.0), BYPASS_WITH_REFERENCE, ROLLED_OUT, **TRINITY)
named_recipe("trinity.opmd", Named(lambda tau: GPG(coef=1.0 / (1.0 + tau)), tau=1.0), ("ref_logp",), **TRINITY)
add_recipe("trinity.rec", _rec, REC_TABLE, BYPASS_WITH_REFERENCE, ROLLED_OUT)

# --- Tunix 0.1.7 and c7d8950 (2026-08-21): `sampler_is="token"`, and its losses ---

presets("tunix", "Tunix 0.1.7")(
    tis=("w = min(exp(D), threshold), D clamped to +-20.", partial(truncated, token_clamp=20.0), {"threshold": 2.0})
)
TUNIX_MEANS: dict[str, Mean] = {
    "token-mean": TOKENS,
    "sequence-mean-token-mean": SEQUENCES,
    "sequence-mean-token-scale": Mean("sequence_sum"),
    "seq-mean-token-sum": Mean("sequence_sum"),
}
TUNIX_KLS: dict[str, KLKind] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


TUNIX_LOSSES = {"grpo": clip, "gspo-token": GSPO_TOKEN}
TUNIX: dict[str, Any] = {
    "loss_agg_mode": word("sequence-mean-token-mean", TUNIX_MEANS),
    "loss_algo": word("grpo", TUNIX_LOSSES),
    "epsilon": 0.2,
    "epsilon_high": None,
    "epsilon_c": None,
    "beta": maybe(0.04),
    "kl_loss_mode": word("kl", TUNIX_KLS),
    "kl_clamp_value": None,
    "max_tokens_to_generate": 64.0,
}


def _tunix(given: Given) -> Recipe:
    """`policy_loss_fn=grpo`. The scale of sequence-mean-token-scale is the width of the batch."""
    mode, algorithm, low, high, dual, beta, kind, bound, width = (given[name] for name in TUNIX)
    mean = TUNIX_MEANS[mode]
    mean = replace(mean, length=width) if mode == "sequence-mean-token-scale" else mean
    kl = KL(TUNIX_KLS[kind], beta, bound=bound) if beta else None
    return Recipe(None, Loss(TUNIX_LOSSES[algorithm](low, high, dual), mean, kl))


def _tunix_recipe(name: str, needs: tuple[str, ...], note: str, **defaults: Any) -> None:
    """Register a loss of Tunix with other defaults."""
    add_recipe(f"tunix.{name}", _tunix, TUNIX | defaults, needs, note)


TUNIX_NOTE = "its old log-probs are the rollout's unless use_rollout_logps is off"
TUNIX_SIDES = Named(clip_of_sides, epsilon=0.2, epsilon_low=None, epsilon_high=None, epsilon_c=None)
MAX_TOKENS = "max_tokens_to_generate is the rollout's"
_tunix_recipe("grpo", BYPASS_WITH_REFERENCE, TUNIX_NOTE)
_tunix_recipe("gspo_token", BYPASS_WITH_REFERENCE, NO_LOWER_CLAMP, loss_algo=word("gspo-token", TUNIX_LOSSES))
SCALED = word("sequence-mean-token-scale", TUNIX_MEANS)
_tunix_recipe("drgrpo", BYPASS_WITH_REFERENCE, MAX_TOKENS, loss_agg_mode=SCALED)
BY_TOKENS = word("token-mean", TUNIX_MEANS)
_tunix_recipe("dapo", BYPASS, TUNIX_NOTE, loss_agg_mode=BY_TOKENS, epsilon_high=maybe(0.28), beta=None)
add_recipe(
    "tunix.tis",  # sampler_is="token"
    lambda given: _tunix(given)._replace(spec=truncated(given["sampler_is_threshold"], token_clamp=20.0)),
    TUNIX | {"sampler_is_threshold": 2.0},
    (*BOTH, "ref_logp"),
)
# The KL of `policy_loss_fn=ppo` goes into the rewards.
named_recipe("tunix.ppo", TUNIX_SIDES, DECOUPLED)
