"""PPO's clip of new/old, times the weight of the framework's preset, as most have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rollout_corr.frameworks import registry
from rollout_corr.frameworks.call import (
    BOTH,
    BYPASS,
    DECOUPLED,
    GLOBAL,
    SEQUENCES,
    Call,
    aggregation,
    clip,
    penalty,
    step,
)
from rollout_corr.spec.loss import KLKind
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import DRO, GPG, GSPO, Score
from rollout_corr.spec.validate import one_of


def _openrlhf(
    preset: str,
    eps_clip: float = 0.2,
    eps_clip_low_high: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    low, high = eps_clip_low_high or (eps_clip, eps_clip)
    return step(clip(low, high, dual_clip), registry.preset(preset, **arguments))


def _areal(
    preset: str,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    return step(clip(eps_clip, eps_clip_higher, c_clip), registry.preset(preset, **arguments))


def _nemo(
    preset: str,
    ratio_clip_min: float = 0.2,
    ratio_clip_max: float = 0.2,
    ratio_clip_c: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    surrogate = clip(ratio_clip_min, ratio_clip_max, ratio_clip_c)
    denominator = "kept" if preset == "nemo.mult_err" else "original"
    return step(surrogate, registry.preset(preset, **arguments), denominator=denominator)


def _nemo_gspo(ratio_clip_min: float = 0.2, ratio_clip_max: float = 0.2) -> dict[str, Any]:
    return step(GSPO(ratio_clip_min, ratio_clip_max), registry.preset("nemo.gspo_is"))


def _open_instruct(
    preset: str, clip_lower: float = 0.2, clip_higher: float = 0.272, **arguments: Any
) -> dict[str, Any]:
    return step(clip(clip_lower, clip_higher), registry.preset(preset, **arguments))


def _slime(
    preset: str,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    return step(clip(eps_clip, eps_clip_high, eps_clip_c), registry.preset(preset, **arguments), SEQUENCES)


def _flash_rl(
    clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0, **arguments: Any
) -> dict[str, Any]:
    """The loss is that of the verl that it patches."""
    return step(clip(clip_ratio_low, clip_ratio_high, clip_ratio_c), registry.preset("flash_rl.tis", **arguments))


def _glm(epsilon_low: float = 0.2, epsilon_high: float = 0.28, **arguments: Any) -> dict[str, Any]:
    """GLM-5's report, equation 1."""
    return step(clip(epsilon_low, epsilon_high), registry.preset("glm.icepop", **arguments), SEQUENCES)


# --- ROLL 8eb27cc: `pg_variant` of its agentic pipeline, PPO elsewhere ---


def _roll(
    preset: str,
    pg_clip: float = 0.2,
    pg_clip_low: float | None = None,
    pg_clip_high: float | None = None,
    dual_clip_loss: bool = False,
    loss_agg_mode: str = "seq-mean-token-mean",
    **arguments: Any,
) -> dict[str, Any]:
    """The dual clip has no setting of its own: 1 + 2 pg_clip."""
    low, high = (pg_clip if side is None else side for side in (pg_clip_low, pg_clip_high))
    surrogate = clip(low, high, 1.0 + 2.0 * pg_clip if dual_clip_loss else None)
    return step(surrogate, registry.preset(preset, **arguments), aggregation("loss_agg_mode", loss_agg_mode))


def _roll_tis(tis_lower_bound: float = 0.0, tis_upper_bound: float = 1.0) -> dict[str, Any]:
    return step(Score(tis_lower_bound, tis_upper_bound), reduction=SEQUENCES)


def _roll_cispo(cispo_epsilon_low: float = 0.1, cispo_epsilon_high: float = 0.1) -> dict[str, Any]:
    return step(Score(1.0 - cispo_epsilon_low, 1.0 + cispo_epsilon_high), reduction=SEQUENCES)


def _roll_kimi15(kimi15_tau: float = 0.1) -> dict[str, Any]:
    return step(DRO(kimi15_tau), reduction=SEQUENCES)


# --- RLinf a3816b5 ---


def _rlinf(
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_func: str = "token-mean",
    kl_beta: float = 0.0,
) -> dict[str, Any]:
    """`loss_type=actor`."""
    return step(
        clip(clip_ratio_low, clip_ratio_high, clip_ratio_c),
        reduction=aggregation("loss_agg_func", loss_agg_func),
        kl=penalty(kl_beta, value_clamp=10.0),
    )


def _rlinf_is_fix(importance_sampling_clip: float = 2.0, **settings: Any) -> dict[str, Any]:
    """`importance_sampling_fix` multiplies the advantages, which is a weight."""
    return _rlinf(**settings) | {"spec": registry.preset("megatron.tis", coef=importance_sampling_clip)}


def _rlinf_decoupled(
    clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float | None = 3.0, **arguments: Any
) -> dict[str, Any]:
    spec = registry.preset("rlinf.decoupled", **arguments)
    return step(clip(clip_ratio_low, clip_ratio_high, clip_ratio_c), spec, denominator="kept")


# --- labs-molt 2d62608 ---

MOLT_LIMIT = 30.0


def _molt(
    preset: str | None = None,
    eps_clip_low_high: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    surrogate = clip(*eps_clip_low_high, dual_clip, clamp=MOLT_LIMIT)
    return step(surrogate, registry.preset(preset, **arguments) if preset else None)


def _molt_ppo(eps_clip_low_high: tuple[float, float] = (0.2, 0.2), dual_clip: float | None = None) -> dict[str, Any]:
    return _molt(None, eps_clip_low_high, dual_clip)


def _molt_gspo(eps_clip_low_high: tuple[float, float] = (0.2, 0.2)) -> dict[str, Any]:
    return step(GSPO(*eps_clip_low_high, through="token", clamp=MOLT_LIMIT))


def _molt_cispo(eps_clip_low_high: tuple[float, float] = (0.2, 1.2)) -> dict[str, Any]:
    """The second bounds the ratio itself; molt refuses its own default here, 1.2 is the example of its help."""
    return step(Score(upper=eps_clip_low_high[1], clamp=MOLT_LIMIT))


# --- Megatron-LM RL d98e8a6 (2026-08-22): calculate_grpo_loss ---


def _megatron(
    grpo_clamp_eps_lower: float = 0.01, grpo_clamp_eps_upper: float = 0.01, grpo_kl_beta: float = 0.001
) -> dict[str, Any]:
    return step(clip(grpo_clamp_eps_lower, grpo_clamp_eps_upper), kl=penalty(grpo_kl_beta))


def _megatron_tis(rl_importance_sampling_truncation_coef: float = 2.0, **settings: Any) -> dict[str, Any]:
    """With `rl_inference_logprobs_is_correction`, whose coefficient has no default."""
    spec = registry.preset("megatron.tis", coef=rl_importance_sampling_truncation_coef)
    return _megatron(**settings) | {"spec": spec}


# --- Tunix 0.1.7 and c7d8950 (2026-08-21) ---

TUNIX_AGGREGATIONS = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": SEQUENCES,
    "sequence-mean-token-scale": "token_sum_norm",
    "seq-mean-token-sum": "sequence_mean_token_sum",
}
TUNIX_KINDS: dict[str, KLKind] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


def _tunix(
    loss_agg_mode: str = "sequence-mean-token-mean",
    loss_algo: str = "grpo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
    beta: float | None = 0.04,
    kl_loss_mode: str = "kl",
    max_tokens_to_generate: float = 64.0,
) -> dict[str, Any]:
    """`policy_loss_fn=grpo`. The scale of sequence-mean-token-scale is the width of the batch."""
    surrogate: Surrogate = clip(epsilon, epsilon_high, epsilon_c)
    if one_of("loss_algo", loss_algo, ("grpo", "gspo-token")) == "gspo-token":
        high = epsilon if epsilon_high is None else epsilon_high
        surrogate = GSPO(epsilon, high, epsilon_c, through="token", clamp=10.0)
    reduction = aggregation("loss_agg_mode", loss_agg_mode, TUNIX_AGGREGATIONS)
    return step(
        surrogate,
        reduction=reduction,
        kl=penalty(beta, TUNIX_KINDS[one_of("kl_loss_mode", kl_loss_mode, TUNIX_KINDS)]),
        max_length=max_tokens_to_generate if reduction == "token_sum_norm" else None,
    )


def _tunix_tis(sampler_is_threshold: float = 2.0, **settings: Any) -> dict[str, Any]:
    """`sampler_is=token`."""
    return _tunix(**settings) | {"spec": registry.preset("tunix.tis", threshold=sampler_is_threshold)}


def _tunix_ppo(
    epsilon: float = 0.2,
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
) -> dict[str, Any]:
    """`policy_loss_fn=ppo`, whose KL goes into the rewards."""
    low, high = (epsilon if side is None else side for side in (epsilon_low, epsilon_high))
    return step(clip(low, high, epsilon_c))


OF_PRESETS: dict[str, Callable[..., dict[str, Any]]] = {
    "openrlhf": _openrlhf,
    "areal": _areal,
    "nemo": _nemo,
    "open_instruct": _open_instruct,
}
ROLLED_OUT = "its old log-probs are the rollout's unless use_rollout_logps is off"


def calls() -> dict[str, Call]:
    """The recipes of these frameworks, by name."""
    found: dict[str, Call] = {}
    for name in registry.names():
        framework = name.partition(".")[0]
        if framework in OF_PRESETS:
            found[name] = Call(partial(OF_PRESETS[framework], name), BOTH, GLOBAL)
        elif framework == "slime":
            found[name] = Call(partial(_slime, name), BOTH)
        elif framework == "molt":
            found[name] = Call(partial(_molt, name), BOTH, GLOBAL)
    return found | {
        "nemo.gspo_is": Call(_nemo_gspo, BOTH, GLOBAL),
        "nemo.mult_err": Call(partial(_nemo, "nemo.mult_err"), BOTH, "samples are masked before they are counted"),
        "glm.icepop": Call(_glm, BOTH),
        "flash_rl.tis": Call(_flash_rl, BOTH, "the loss of the verl that it patches"),
        "roll.default": Call(partial(_roll, "roll.default"), BOTH),
        "roll.vanilla": Call(lambda: step(GPG(), reduction=SEQUENCES), ()),
        "roll.tis": Call(_roll_tis, DECOUPLED),
        "roll.cispo": Call(_roll_cispo, DECOUPLED),
        "roll.kimi15": Call(_roll_kimi15, DECOUPLED, "Kimi K1.5's regulariser, token by token"),
        "rlinf.actor": Call(_rlinf, DECOUPLED, "the KL of its Megatron actor; the FSDP actor swaps the two policies"),
        "rlinf.importance_sampling_fix": Call(
            _rlinf_is_fix, BOTH, "the clip has no default in RLinf, its examples say 1 or 2"
        ),
        "rlinf.decoupled": Call(_rlinf_decoupled, BOTH),
        "molt.ppo": Call(_molt_ppo, DECOUPLED, GLOBAL),
        "molt.gspo": Call(_molt_gspo, DECOUPLED, GLOBAL),
        "molt.cispo": Call(_molt_cispo, DECOUPLED, "no default in molt: the ceiling is that of its help"),
        "megatron.grpo": Call(_megatron, ("old_logp", "ref_logp")),
        "megatron.tis": Call(_megatron_tis, (*BOTH, "ref_logp"), "the coefficient has no default in Megatron"),
        "tunix.grpo": Call(_tunix, (*BYPASS, "ref_logp"), ROLLED_OUT),
        "tunix.gspo_token": Call(
            partial(_tunix, loss_algo="gspo-token"),
            (*BYPASS, "ref_logp"),
            "its log-ratio has no lower clamp, ours -10",
        ),
        "tunix.dapo": Call(partial(_tunix, "token-mean", epsilon_high=0.28, beta=None), BYPASS, ROLLED_OUT),
        "tunix.drgrpo": Call(
            partial(_tunix, "sequence-mean-token-scale"),
            (*BYPASS, "ref_logp"),
            "max_tokens_to_generate is the rollout's",
        ),
        "tunix.tis": Call(_tunix_tis, (*BOTH, "ref_logp")),
        "tunix.ppo": Call(_tunix_ppo, DECOUPLED),
    }
