"""SkyRL's registry of losses, with the clipped one in it."""

from __future__ import annotations

import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction


def regular(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1.0 - config.eps_clip_low, 1.0 + config.eps_clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    loss, mask, metrics = apply_off_policy_correction(
        loss, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
    )
    return (loss * mask).sum(), metrics


class PolicyLossRegistry:
    _known = {"regular": regular}  # noqa: RUF012  (one for all, as SkyRL's is)

    @classmethod
    def register(cls, name, function):
        cls._known[name] = function

    @classmethod
    def get(cls, name):
        return cls._known[name]

    @classmethod
    def list_available(cls):
        return list(cls._known)
