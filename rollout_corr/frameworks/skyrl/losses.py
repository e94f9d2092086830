"""SkyRL's policy losses by `rc.policy_loss`: value, gradient and metrics in one forward, under names of their own.

SkyRL hands its losses to its workers through a registry, so nothing is replaced. Register ours where the training
script starts, before SkyRL's configuration is checked, and choose one in it; the workers need this package installed.

    from rollout_corr.frameworks.skyrl import losses
    losses.register()

    trainer.algorithm.policy_loss_type=rollout_corr_regular
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api.policy_loss import policy_loss
from ...backends.given import Factors
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import SAPO
from ...specs.terms import Mean
from .config import SURROGATES
from .dropin import DROP_IN, compute_off_policy_correction

ValueAndMetrics = tuple[Tensor, dict[str, float]]


def _corrected(name: str, what: str, surrogate: Callable[[Any], Surrogate]) -> Callable[..., ValueAndMetrics]:
    """SkyRL's policy loss of that name, with the surrogate that its configuration asks for."""

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> ValueAndMetrics:
        return _loss(surrogate(config), log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)

    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = f"""{what}

    Args:
        log_probs: [B, T], of the policy that trains; the gradient goes to these.
        old_log_probs: [B, T].
        advantages: [B, T], divided already by what SkyRL divides by.
        config: SkyRL's AlgorithmConfig; read, never changed.
        loss_mask: [B, T]; None: every token counts.
        rollout_logprobs: [B, T] of the engine; None: no correction.

    Returns:
        The sum over tokens, and SkyRL's metrics as floats.
    """
    return loss


def _as_configured(kind: str) -> Callable[[Any], Surrogate]:
    made = SURROGATES[kind]
    return lambda config: made.taken_from({name: getattr(config, name) for name in made.settings})


regular = _corrected("regular", "PPO's clipped loss, corrected.", _as_configured("regular"))
dual_clip = _corrected(
    "dual_clip", "PPO's loss with the dual clip at `clip_ratio_c`, corrected.", _as_configured("dual_clip")
)
gspo = _corrected("gspo", "GSPO with its gradient through each token, corrected.", _as_configured("gspo"))
sapo = _corrected("sapo", "SAPO, corrected.", lambda config: SAPO(config.sapo.tau_pos, config.sapo.tau_neg))

LOSSES = {f"rollout_corr_{function.__name__}": function for function in (regular, dual_clip, gspo, sapo)}


def register() -> list[str]:
    """Enter the losses into SkyRL's registry; a second call does nothing.

    Returns:
        The names to choose from as `policy_loss_type`.

    Raises:
        ImportError: SkyRL is not installed.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    known = PolicyLossRegistry.list_available()
    for name, function in LOSSES.items():
        if name not in known:
            PolicyLossRegistry.register(name, function)
    return list(LOSSES)


def _loss(
    surrogate: Surrogate,
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    config: Any,
    mask: Tensor | None,
    rollout: Tensor | None,
) -> ValueAndMetrics:
    """The correction, and the loss with what is left of the mask among its weights.

    SkyRL counts what was clipped over the mask before rejection. So that mask says what is valid, and what was rejected
    has the weight 0.
    """
    if mask is None:
        mask = torch.ones_like(new, dtype=torch.float32)
    weights, kept = None, mask
    metrics: dict[str, float] = {}
    if rollout is not None:
        given = old, rollout, mask, config.off_policy_correction
        weights, metrics, kept = compute_off_policy_correction(*given, **DROP_IN.switches)
    factor = kept.to(torch.promote_types(old.dtype, torch.float32))
    found = policy_loss(
        new,
        advantages,
        loss=Loss(surrogate, mean=Mean("sum")),
        mask=mask,
        old_logp=old,
        correction=Factors(weights=factor if weights is None else factor * weights),
        backend=DROP_IN.switches.get("backend", "auto"),
    )
    clipped = found.metrics()
    return found.value, {"clip_ratio": clipped["clip_low_fraction"] + clipped["clip_high_fraction"]} | metrics
