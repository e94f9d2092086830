"""verl's policy losses by `rc.policy_loss`: value, gradient and metrics in one forward, one copy to the host.

`integrations.verl.install(losses=True)` puts them in place of verl's, in its registry too. `bypass_mode` stays verl's
own function: it corrects and then calls two of these. `clip_cov` and `kl_cov` draw tokens at random or by quantile,
`geo_mean` averages over all rows whatever it is told, and all three stay verl's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollout_corr.integrations.dropin import Target
from rollout_corr.loss import PolicyLoss, policy_loss
from rollout_corr.surrogates import DPPO, DRO, GPG, GSPO, PPO, SAPO, Score, Surrogate

MODULE = "verl.trainer.ppo.core_algos"

# loss_agg_mode: the reduction, and which of `global_batch_info` counts for it.
REDUCTIONS = {
    "token-mean": ("token_mean", "batch_num_tokens"),
    "token-sum": ("sum", None),
    "seq-mean-token-sum": ("sequence_mean_token_sum", "global_batch_size"),
    "seq-mean-token-sum-norm": ("token_sum_norm", "global_batch_size"),
    "seq-mean-token-mean": ("sequence_mean_token_mean", "global_batch_size"),
}

Loss = tuple[Tensor, dict[str, float]]


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """PPO's clipped loss with dual clip, times the weights.

    Args:
        old_log_prob: [B, T] floating.
        log_prob: [B, T], of the policy that trains; the gradient goes to these.
        advantages: [B, T].
        response_mask: [B, T], non-zero is valid.
        loss_agg_mode: One of REDUCTIONS.
        config: verl's ActorConfig; read, never changed.
        rollout_is_weights: [B, T] or None.
        **switches: Those of `install`; none of them has a say here.

    Returns:
        The loss, and verl's metrics as floats.
    """
    low, high = _bounds(config)
    c = config.get("clip_ratio_c", 3.0)
    if not c > 1.0:
        raise ValueError(f"clip_ratio_c: expected a number > 1, got {c!r}")
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    found = _loss(PPO(low, high, dual=c), loss_agg_mode, config, *given)
    return _with_clipping(found, "clip_fraction_dual")


def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """DPPO with total variation; arguments as for the first."""
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return _dppo("tv", loss_agg_mode, config, *given)


def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """DPPO with the binary KL; arguments as for the first."""
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return _dppo("kl", loss_agg_mode, config, *given)


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """GSPO, with its gradient through each token; arguments as for the first."""
    surrogate = GSPO(*_bounds(config), through="token", clamp=10.0)
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return _with_clipping(_loss(surrogate, loss_agg_mode, config, *given))


def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """SAPO, a mean over sequences whatever `loss_agg_mode` says, as in verl; arguments as for the first."""
    surrogate = SAPO(_needed(config).tau_pos, config.tau_neg)
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    value, metrics = _loss(surrogate, "seq-mean-token-mean", config, *given)
    clipped = {"actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0}
    return value, clipped | {"actor/ppo_kl": metrics["ppo_kl"]}


def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """-A log pi; arguments as for the first."""
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return _loss(GPG(), loss_agg_mode, config, *given)[0], {}


def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """DRO with `policy_loss.dro_beta`; arguments as for the first."""
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    value, metrics = _loss(DRO(_needed(config).policy_loss.dro_beta), loss_agg_mode, config, *given)
    return value, {"actor/ppo_kl": metrics["ppo_kl"]}


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """CISPO: the stopped, bounded ratio times log pi; arguments as for the first."""
    low, high = _bounds(config)
    given = (old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    return _with_clipping(_loss(Score(1.0 - low, 1.0 + high), loss_agg_mode, config, *given))


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **switches: str,
) -> Loss:
    """-w A log pi, which `bypass_mode` calls; arguments as for the first, with the engine's log-probs."""
    given = (rollout_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    value, metrics = _loss(GPG(), loss_agg_mode, config, *given)
    return value, {"actor/ppo_kl": metrics["ppo_kl"]}


TARGETS = tuple(
    Target(MODULE, function.__name__, function)
    for function in (
        compute_policy_loss_vanilla,
        compute_policy_loss_dppo_tv,
        compute_policy_loss_dppo_kl,
        compute_policy_loss_gspo,
        compute_policy_loss_sapo,
        compute_policy_loss_gpg,
        compute_policy_loss_dro,
        compute_policy_loss_cispo,
        compute_policy_loss_reinforce,
    )
)


def _needed(config: Any) -> Any:
    if config is None:
        raise ValueError("config: expected verl's ActorConfig, got None")
    return config


def _bounds(config: Any) -> tuple[float, float]:
    config = _needed(config)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (config.clip_ratio if low is None else low), (config.clip_ratio if high is None else high)


def _dppo(divergence: str, loss_agg_mode: str, config: Any, *given: Any) -> Loss:
    low, high = _bounds(config)
    surrogate = DPPO(divergence, low, high, config.get("clip_ratio_c", 20.0))
    return _with_clipping(_loss(surrogate, loss_agg_mode, config, *given), "clip_fraction_dual")


def _loss(
    surrogate: Surrogate,
    loss_agg_mode: str,
    config: Any,
    old: Tensor,
    new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss as verl scales it, and our metrics of it."""
    if loss_agg_mode not in REDUCTIONS:
        raise ValueError(f"loss_agg_mode: expected one of {list(REDUCTIONS)}, got {loss_agg_mode!r}")
    reduction, counted = REDUCTIONS[loss_agg_mode]
    info: Mapping[str, Any] = _needed(config).global_batch_info
    ranks = info.get("dp_size", 1)
    count = None if counted is None else info.get(counted)
    if counted is not None and count is None and ranks > 1:
        raise ValueError(
            f"{counted}: expected the count of all ranks in global_batch_info with dp_size={ranks}, got None"
        )
    longest = None
    if reduction == "token_sum_norm":
        longest = float(info.get("loss_scale_factor") or mask.shape[-1])
    found: PolicyLoss = policy_loss(
        new,
        advantages,
        mask,
        old_logp=old,
        weights=weights,
        surrogate=surrogate,
        reduction=reduction,
        denominator="original" if count is None else count,
        max_length=longest,
    )
    value = found.value if ranks == 1 else found.value * ranks
    return value.to(torch.promote_types(new.dtype, advantages.dtype)), found.metrics()


def _with_clipping(found: tuple[Tensor, dict[str, float]], lower: str | None = None) -> Loss:
    value, metrics = found
    return value, {
        "actor/pg_clipfrac": metrics["clip_fraction_low"] + metrics["clip_fraction_high"],
        "actor/ppo_kl": metrics["ppo_kl"],
        "actor/pg_clipfrac_lower": metrics[lower] if lower else 0.0,
    }
