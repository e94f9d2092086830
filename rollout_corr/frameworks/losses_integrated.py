"""verl, SkyRL, xtuner, TRL, Unsloth and ms-swift."""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout_corr.frameworks import registry
from rollout_corr.frameworks.call import BOTH, BYPASS, DECOUPLED, GLOBAL, SEQUENCES, Call, clip, fixed, penalty, step
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import DPPO, DRO, GMPO, GPG, GSPO, PPO, SAPO, Divergence, Reinforce, Score

# --- verl ---


def _verl(
    preset: str,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    kl_loss_coef: float = 0.0,
    **arguments: Any,
) -> dict[str, Any]:
    """`loss_mode=vanilla`; bypass with REINFORCE: -w A log pi, and without a weight -A log pi."""
    spec = registry.preset(preset, **arguments)
    surrogate: Surrogate = PPO(clip_ratio_low, clip_ratio_high, dual=clip_ratio_c)
    if preset.startswith("verl.bypass_pg"):
        surrogate = GPG() if spec.weight is None else Score()
    return step(surrogate, spec, kl=penalty(kl_loss_coef, value_clamp=10.0))


def _verl_cispo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return step(Score(1.0 - clip_ratio_low, 1.0 + clip_ratio_high))


def _verl_gspo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return step(GSPO(clip_ratio_low, clip_ratio_high, through="token", clamp=10.0), reduction=SEQUENCES)


def _verl_geo_mean(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return step(GMPO(clip_ratio_low, clip_ratio_high), reduction=SEQUENCES)


def _verl_sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> dict[str, Any]:
    return step(SAPO(tau_pos, tau_neg), reduction=SEQUENCES)


def _verl_dppo(
    divergence: Divergence, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> dict[str, Any]:
    return step(DPPO(divergence, clip_ratio_low, clip_ratio_high, clip_ratio_c))


# --- SkyRL ---


def _skyrl(preset: str, eps_clip_low: float = 0.2, eps_clip_high: float = 0.2, **arguments: Any) -> dict[str, Any]:
    return step(PPO(eps_clip_low, eps_clip_high), registry.preset(preset, **arguments))


def _skyrl_regular(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return step(PPO(eps_clip_low, eps_clip_high))


def _skyrl_dual_clip(
    eps_clip_low: float = 0.2, eps_clip_high: float = 0.2, clip_ratio_c: float = 3.0
) -> dict[str, Any]:
    return step(PPO(eps_clip_low, eps_clip_high, dual=clip_ratio_c))


def _skyrl_cispo(cispo_eps_clip_low: float = 1.0, cispo_eps_clip_high: float = 4.0) -> dict[str, Any]:
    return step(Score(1.0 - cispo_eps_clip_low, 1.0 + cispo_eps_clip_high))


def _skyrl_gspo(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return step(GSPO(eps_clip_low, eps_clip_high, through="token", clamp=10.0))


def _skyrl_rollout_is(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return step(Score(1.0 - eps_clip_low, 1.0 + eps_clip_high, "zero", of="new/rollout"))


def _skyrl_dppo(delta_low: float = 0.2, delta_high: float = 0.2) -> dict[str, Any]:
    spec = registry.preset("prime_rl.default", dppo_mask_low=delta_low, dppo_mask_high=delta_high)
    return step(Reinforce(of="new/rollout"), spec)


# --- the others ---


def _xtuner(
    preset: str,
    cliprange_low: float = 0.2,
    cliprange_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    kl_loss_coef: float = 0.0,
    **arguments: Any,
) -> dict[str, Any]:
    surrogate = PPO(cliprange_low, cliprange_high, dual=clip_ratio_c)
    spec = registry.preset(preset, **arguments)
    return step(surrogate, spec, denominator="kept", kl=penalty(kl_loss_coef, value_clamp=10.0))


TRL_REDUCTIONS = {
    "grpo": SEQUENCES,
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "token_sum_norm",
    "luspo": "sequence_mean_token_sum",
    "sapo": SEQUENCES,
    "cispo": "token_mean",
}


def _trl(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    max_completion_length: float = 256.0,
    vllm_importance_sampling_mode: str = "sequence_mask",
    off_policy_mask_threshold: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    surrogate: Surrogate = clip(epsilon, epsilon_high, delta=delta)
    if loss_type == "cispo":
        surrogate = Score(upper=epsilon_high or 5.0)
    elif loss_type == "sapo":
        surrogate = SAPO()
    elif importance_sampling_level == "sequence":
        surrogate = GSPO(epsilon, epsilon if epsilon_high is None else epsilon_high, delta=delta)
    preset = f"trl.{vllm_importance_sampling_mode}"
    if off_policy_mask_threshold is not None:
        preset, arguments = "trl.opsm", arguments | {"delta": off_policy_mask_threshold}
    return step(
        surrogate,
        registry.preset(preset, **arguments),
        TRL_REDUCTIONS[loss_type],
        kl=penalty(beta, weight="ratio" if use_bias_correction_kl else None),
        max_length=max_completion_length if loss_type == "dr_grpo" else None,
    )


# luspo is an average over padding there.
UNSLOTH_LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "sapo", "cispo")


def _unsloth(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.001,
    importance_sampling_level: str = "token",
    max_completion_length: float = 256.0,
    vllm_importance_sampling_correction: bool = False,
    vllm_importance_sampling_mode: str = "sequence_mask",
    **arguments: Any,
) -> dict[str, Any]:
    """unsloth-zoo ce232d6 (2026-08-20): TRL's losses, with defaults of its own and a KL that no ratio multiplies."""
    high = 0.28 if loss_type == "dapo" else epsilon_high
    made = _trl(loss_type, epsilon, high, delta, beta, False, importance_sampling_level, max_completion_length)
    spec = registry.preset(f"unsloth.{vllm_importance_sampling_mode}", **arguments)
    return made | {"spec": spec if vllm_importance_sampling_correction else None}


def _swift(preset: str, beta: float = 0.0, epsilon: float = 0.2, **arguments: Any) -> dict[str, Any]:
    denominator = "kept" if preset == "swift.opsm" else "original"
    spec = registry.preset(preset, **arguments)
    return step(PPO(epsilon, epsilon), spec, SEQUENCES, denominator, kl=penalty(beta, weight="weights"))


def calls() -> dict[str, Call]:
    """The recipes of these frameworks, by name."""
    found: dict[str, Call] = {}
    for name in registry.names():
        framework = name.partition(".")[0]
        if framework == "verl":
            needs = BYPASS if name.startswith("verl.bypass") else BOTH
            found[name] = Call(partial(_verl, name), needs, "counts before rejection, as its engines do")
        elif framework == "skyrl":
            found[name] = Call(partial(_skyrl, name), BOTH, "its KL loss is a mean over rows: a call of its own")
        elif framework == "xtuner":
            found[name] = Call(partial(_xtuner, name), BOTH, GLOBAL + ", after rejection")
        elif framework == "swift":
            found[name] = Call(partial(_swift, name), BOTH, "weights multiply the KL term too")
    divergences: dict[str, Divergence] = {"dppo_tv": "tv", "dppo_kl": "kl"}
    for mode, divergence in divergences.items():
        note = "clip_ratio_c is ActorConfig's 3.0; the function's own 20.0 never gets there"
        found[f"verl.{mode}"] = Call(partial(_verl_dppo, divergence), DECOUPLED, note)
    found |= {
        "verl.cispo": Call(_verl_cispo, DECOUPLED),
        "verl.gspo": Call(_verl_gspo, DECOUPLED, "its log-ratio has no lower clamp, ours -10"),
        "verl.geo_mean": Call(_verl_geo_mean, DECOUPLED, "its mean is over all rows, ours over non-empty ones"),
        "verl.sapo": Call(_verl_sapo, DECOUPLED),
        "verl.gpg": Call(fixed(GPG()), ()),
        "verl.dro": Call(lambda dro_beta=0.1: step(DRO(dro_beta)), DECOUPLED, "dro_beta has no default in verl"),
        "skyrl.regular": Call(_skyrl_regular, DECOUPLED),
        "skyrl.dual_clip": Call(_skyrl_dual_clip, DECOUPLED),
        "skyrl.cispo": Call(_skyrl_cispo, DECOUPLED, 'cispo_anchor: Score(of="new/rollout")'),
        "skyrl.gspo": Call(_skyrl_gspo, DECOUPLED, "its log-ratio has no lower clamp, ours -10"),
        "skyrl.sapo": Call(fixed(SAPO()), DECOUPLED),
        "skyrl.rollout_is": Call(_skyrl_rollout_is, BYPASS, "its bounds exclude their ends, ours include them"),
        "skyrl.dppo": Call(_skyrl_dppo, BYPASS),
    }
    for loss_type in TRL_REDUCTIONS:
        note = "max_completion_length is the trainer's" if loss_type == "dr_grpo" else ""
        note = GLOBAL if loss_type in ("dapo", "cispo") else note
        found[f"trl.{loss_type}"] = Call(partial(_trl, loss_type), BOTH, note)
        if loss_type in UNSLOTH_LOSSES:
            note = "epsilon_high is set to 0.28, whatever is given" if loss_type == "dapo" else note
            found[f"unsloth.{loss_type}"] = Call(partial(_unsloth, loss_type), ("old_logp", "ref_logp"), note)
    return found
