"""SkyRL's policy losses by `rc.policy_loss`: value, gradient and metrics in one forward, under names of their own.

SkyRL hands its losses to its workers through a registry, so nothing is replaced: call `register()` where the training
script starts, before SkyRL's configuration is checked, and set `trainer.algorithm.policy_loss_type`, for example to
rollout_corr_regular. The workers need this package installed.
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


def _corrected(name: str, surrogate: Callable[[Any], Surrogate]) -> Callable[..., ValueAndMetrics]:
    """SkyRL's policy loss of that name, with the surrogate that its configuration asks for."""

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> ValueAndMetrics:
        """The sum over tokens, corrected where there are `rollout_logprobs`, and SkyRL's metrics as floats.

        Tensors are [B, T]; the gradient goes to `log_probs`. SkyRL counts what was clipped over the mask before
        rejection. So that mask says what is valid, and what was rejected has the weight 0.
        """
        mask = torch.ones_like(log_probs, dtype=torch.float32) if loss_mask is None else loss_mask
        weights, kept, metrics = None, mask, dict[str, float]()
        if rollout_logprobs is not None:
            given = old_log_probs, rollout_logprobs, mask, config.off_policy_correction
            weights, metrics, kept = compute_off_policy_correction(*given, **DROP_IN.switches)
        factor = kept.to(torch.promote_types(old_log_probs.dtype, torch.float32))
        found = policy_loss(
            log_probs,
            advantages,
            loss=Loss(surrogate(config), mean=Mean("sum")),
            mask=mask,
            old_logp=old_log_probs,
            correction=Factors(weights=factor if weights is None else factor * weights),
            backend=DROP_IN.switches.get("backend", "auto"),
        )
        ours = found.metrics()
        return found.value, {"clip_ratio": ours["clip_low_fraction"] + ours["clip_high_fraction"]} | metrics

    loss.__name__ = loss.__qualname__ = name
    return loss


def _as_configured(kind: str) -> Callable[..., ValueAndMetrics]:
    made = SURROGATES[kind]
    return _corrected(kind, lambda config: made.of({name: getattr(config, name) for name in made.settings}))


# A worker finds them by these names.
regular, dual_clip, gspo = map(_as_configured, ("regular", "dual_clip", "gspo"))
sapo = _corrected("sapo", lambda config: SAPO(config.sapo.tau_pos, config.sapo.tau_neg))

LOSSES = {f"rollout_corr_{function.__name__}": function for function in (regular, dual_clip, gspo, sapo)}


def register() -> list[str]:
    """Enter the losses into SkyRL's registry, once, and return the names to choose from as `policy_loss_type`."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    known = PolicyLossRegistry.list_available()
    for name, function in LOSSES.items():
        if name not in known:
            PolicyLossRegistry.register(name, function)
    return list(LOSSES)
