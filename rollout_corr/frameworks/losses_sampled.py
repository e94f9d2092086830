"""Those whose ratio compares with the policy that sampled, and those whose loss is a score function."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout_corr.frameworks import registry
from rollout_corr.frameworks.call import BYPASS, DECOUPLED, GLOBAL, SEQUENCES, Call, clip, fixed, penalty, step
from rollout_corr.spec.loss import SquaredLogRatio
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import DPPO, GPG, GSPO, PPO, Divergence, Reinforce, Score
from rollout_corr.spec.validate import one_of

PER_SEQUENCE = "sequence_mean_token_sum"
OLD_IS_ROLLOUT = "its old log-probs are the rollout's unless bypass_old_logprobs is off"


def _prime_rl(preset: str, kl_tau: float = 1e-3, **arguments: Any) -> dict[str, Any]:
    return step(Reinforce(), registry.preset(preset, **arguments), regulariser=SquaredLogRatio(kl_tau, "all"))


def _prime_rl_icepop(**arguments: Any) -> dict[str, Any]:
    return step(Reinforce(), registry.preset("prime_rl.icepop", **arguments))


def _kimi(tau: float = 1e-3, **arguments: Any) -> dict[str, Any]:
    """Kimi K2.5's report, equation 1, which gives no number: tau is prime-rl's, the interval ours."""
    spec = registry.preset("kimi.interval", **arguments)
    return step(Reinforce(of="new/rollout"), spec, regulariser=SquaredLogRatio(tau, "all"))


def _glm_double_sided(epsilon_low: float = 0.2, epsilon_high: float = 0.28) -> dict[str, Any]:
    """GLM-5's report, equations 3 to 5, which give no number: these are its equation 1's."""
    return step(Score(1.0 - epsilon_low, 1.0 + epsilon_high, "zero", of="new/rollout"))


def _dppo(divergence: Divergence, delta: float, clip_ratio_c: float = 20.0) -> dict[str, Any]:
    return step(DPPO(divergence, delta, delta, clip_ratio_c, of="new/rollout"))


def _minirl(clip_low: float = 0.2, clip_high: float = 0.2, clip_ratio_c: float = 20.0) -> dict[str, Any]:
    spec = registry.preset("minirl.mask", clip_low=clip_low, clip_high=clip_high)
    return step(Score(upper=clip_ratio_c, of="new/rollout"), spec)


# --- PipelineRL 58d3934 (2026-06-19): rl_step, with the settings of conf/finetune/base.yaml ---


def _pipeline_rl(
    surrogate: Surrogate, kl_coef: float = 0.0, clamp_log_ratio_ref_new_value: float = 5.0
) -> dict[str, Any]:
    return step(surrogate, reduction=PER_SEQUENCE, kl=penalty(kl_coef, log_clamp=clamp_log_ratio_ref_new_value))


def _pipeline_rl_ppo(epsilon_low: float = 0.02, epsilon_high: float = 0.02, **settings: Any) -> dict[str, Any]:
    return _pipeline_rl(clip(epsilon_low, epsilon_high), **settings)


def _pipeline_rl_reinforce(epsilon_high: float = 0.02, **settings: Any) -> dict[str, Any]:
    return _pipeline_rl(Score(upper=1.0 + epsilon_high), **settings)


def _pipeline_rl_gspo(epsilon_low: float = 0.02, epsilon_high: float = 0.02) -> dict[str, Any]:
    """Without a KL, whatever kl_coef says."""
    return _pipeline_rl(GSPO(epsilon_low, epsilon_high))


# --- Fast-LLM 7d61a1b (2026-07-20) ---


def _fast_llm_grpo(epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> dict[str, Any]:
    return step(clip(epsilon_low, epsilon_high))


def _fast_llm_gspo(epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> dict[str, Any]:
    return step(GSPO(epsilon_low, epsilon_high), reduction=PER_SEQUENCE)


# --- ART 0.5.18 ---


def _art(epsilon: float = 1.0, epsilon_high: float | None = 4.0) -> dict[str, Any]:
    return step(Score(1.0 - epsilon, 1.0 + (epsilon if epsilon_high is None else epsilon_high)))


def _art_ppo(
    epsilon: float = 0.2, epsilon_high: float | None = None, importance_sampling_level: str = "token"
) -> dict[str, Any]:
    """`ppo=True`. The two averages of the token's and the sequence's ratio have no surrogate here."""
    high = epsilon if epsilon_high is None else epsilon_high
    level = one_of("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    return step(PPO(epsilon, high) if level == "token" else GSPO(epsilon, high))


# --- rLLM, the losses of its own since PR #741 (2026-07) ---


def _rllm_ppo_clip(eps_clip: float = 0.2, eps_clip_high: float | None = None) -> dict[str, Any]:
    return step(clip(eps_clip, eps_clip_high))


def _rllm_cispo(eps_clip: float = 0.2, eps_clip_high: float | None = None) -> dict[str, Any]:
    return step(Score(1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high)))


def _rllm_gspo(eps_clip: float = 0.2, eps_clip_high: float | None = None) -> dict[str, Any]:
    high = eps_clip if eps_clip_high is None else eps_clip_high
    return step(GSPO(eps_clip, high, through="token", clamp=10.0), reduction=SEQUENCES)


def _rllm_dppo_tv(delta_low: float = 0.2, delta_high: float = 0.2) -> dict[str, Any]:
    return step(DPPO("tv", delta_low, delta_high, None))


def _rllm_dppo_kl(delta: float = 0.2) -> dict[str, Any]:
    return step(DPPO("kl", delta, delta, None, eps=1e-6))


def _rllm_icepop(icepop_alpha: float = 0.5, icepop_beta: float = 5.0) -> dict[str, Any]:
    return step(Score(icepop_alpha, icepop_beta, "zero", of="new/rollout"))


def _rllm_reinforce_kl(ratio_clamp_min: float | None = None, ratio_clamp_max: float | None = None) -> dict[str, Any]:
    return step(Score(ratio_clamp_min, ratio_clamp_max, of="new/rollout"))


# --- Trinity-RFT 0.6.0 ---


def _trinity(surrogate: Surrogate, kl_coef: float) -> dict[str, Any]:
    return step(surrogate, kl=penalty(kl_coef, "k2"))


def _trinity_ppo(
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float = 3.0,
    kl_coef: float = 0.001,
) -> dict[str, Any]:
    low, high = (clip_range if side is None else side for side in (clip_range_low, clip_range_high))
    return _trinity(clip(low, high, clip_ratio_c), kl_coef)


def _trinity_gspo(
    clip_range_low: float = 0.0003, clip_range_high: float = 0.0004, kl_coef: float = 0.001
) -> dict[str, Any]:
    return _trinity(GSPO(clip_range_low, clip_range_high, through="token"), kl_coef)


def _trinity_cispo(
    clip_range_low: float = 1.0, clip_range_high: float = 0.28, kl_coef: float = 0.001
) -> dict[str, Any]:
    return _trinity(Score(1.0 - clip_range_low, 1.0 + clip_range_high), kl_coef)


def calls() -> dict[str, Call]:
    """The recipes of these frameworks, by name."""
    batch_size = "pass batch_size, the samples of a step, as the denominator"
    found = {
        f"prime_rl.{name}": Call(partial(_prime_rl, f"prime_rl.{name}"), BYPASS, GLOBAL)
        for name in ("default", "ipo", "kpop")
    }
    return found | {
        "prime_rl.icepop": Call(_prime_rl_icepop, BYPASS, GLOBAL),
        "prime_rl.ref_kl": Call(
            partial(_prime_rl, "prime_rl.ref_kl"), BYPASS, "the advantages are ref_logp - new_logp, detached"
        ),
        "kimi.k25": Call(_kimi, BYPASS, "outside the interval its Clip has a value, ours is 0: no gradient in either"),
        "glm.double_sided": Call(_glm_double_sided, BYPASS, "its bounds exclude their ends, ours include them"),
        "tinker.importance_sampling": Call(fixed(Reinforce(), "sum"), BYPASS),
        "tinker.ppo": Call(fixed(PPO(0.2, 0.2), "sum"), BYPASS),
        "tinker.cispo": Call(fixed(Score(0.0, 4.0), "sum"), BYPASS),
        "torchforge.default": Call(fixed(Score(0.1, 10.0)), BYPASS),
        "art.default": Call(_art, BYPASS, "it trains on tokens that have no log-prob, ours leaves them out"),
        "art.ppo": Call(_art_ppo, BYPASS, "it trains on tokens that have no log-prob, ours leaves them out"),
        "dppo.tv": Call(partial(_dppo, "tv", delta=0.15), BYPASS),
        "dppo.kl": Call(partial(_dppo, "kl", delta=0.05), BYPASS),
        "minirl.default": Call(_minirl, ("old_logp", *BYPASS), "the ratio is new/rollout, the mask is of new/old"),
        "pipeline_rl.ppo": Call(_pipeline_rl_ppo, BYPASS, batch_size),
        "pipeline_rl.reinforce": Call(_pipeline_rl_reinforce, BYPASS, batch_size),
        "pipeline_rl.gspo": Call(_pipeline_rl_gspo, BYPASS, batch_size),
        "fast_llm.grpo": Call(_fast_llm_grpo, BYPASS, GLOBAL),
        "fast_llm.gspo": Call(_fast_llm_gspo, BYPASS, "pass the documents of all ranks as the denominator"),
        "rllm.ppo_clip": Call(_rllm_ppo_clip, DECOUPLED),
        "rllm.cispo": Call(_rllm_cispo, DECOUPLED),
        "rllm.gspo": Call(_rllm_gspo, DECOUPLED, "its log-ratio has no lower clamp, ours -10"),
        "rllm.dppo_tv": Call(_rllm_dppo_tv, DECOUPLED),
        "rllm.dppo_kl": Call(_rllm_dppo_kl, DECOUPLED, "it floors p and q too, ours 1 - p and 1 - q"),
        "rllm.icepop": Call(_rllm_icepop, BYPASS),
        "rllm.reinforce": Call(fixed(GPG()), ()),
        "rllm.reinforce_kl": Call(_rllm_reinforce_kl, BYPASS, "its KLs to the sampler are off by default"),
        "trinity.ppo": Call(_trinity_ppo, (*BYPASS, "ref_logp"), OLD_IS_ROLLOUT),
        "trinity.gspo": Call(_trinity_gspo, (*BYPASS, "ref_logp"), OLD_IS_ROLLOUT),
        "trinity.cispo": Call(_trinity_cispo, (*BYPASS, "ref_logp"), OLD_IS_ROLLOUT),
        "trinity.importance_sampling": Call(fixed(Reinforce()), BYPASS, OLD_IS_ROLLOUT),
    }
