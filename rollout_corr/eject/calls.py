"""The functions that frameworks call, around `correct` of correction.py: `rollout-corr eject NAME --for FRAMEWORK`.

Each takes and gives what the framework's own function does, with ten metrics under the framework's prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .correction import correct

# The framework's own settings that this file is for.
CONFIG: dict[str, Any] = {}


def _check_config(settings: dict[str, Any]) -> None:
    """Refuse other settings: a file computes what it was written for."""
    settings = {name: settings[name] for name in CONFIG if name in settings}
    if settings != CONFIG:
        raise ValueError(f"this file was written for {CONFIG}, got {settings}")


def _of_rows(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] to [B, 1]: the weight that all valid tokens of a row share; 1 without one."""
    valid = pad(mask != 0, (0, 1))
    x = torch.where(valid, pad(x, (0, 1)), 0.0)
    return torch.where(valid.any(-1, keepdim=True), x.amax(-1, keepdim=True), 1.0)


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[Any, Tensor, dict[str, float]]:
    """verl's rollout correction.

    Args:
        old_log_prob: [B, T], by the policy that trains.
        rollout_log_prob: [B, T], by the engine that sampled.
        response_mask: [B, T], 1 at valid tokens.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold: The settings
            of `algorithm.rollout_correction`; refused where they are not CONFIG.

    Returns:
        A DataProto with "rollout_is_weights", or None; the mask after rejection; metrics under "rollout_corr/".
    """
    from verl.protocol import DataProto

    if isinstance(rollout_rs_threshold, (int, float)):
        rollout_rs_threshold = str(float(rollout_rs_threshold))
    _check_config({
        "rollout_is": rollout_is,
        "rollout_is_threshold": rollout_is_threshold,
        "rollout_is_batch_normalize": rollout_is_batch_normalize,
        "rollout_rs": rollout_rs,
        "rollout_rs_threshold": rollout_rs_threshold,
    })  # fmt: skip
    out = correct(old_log_prob, rollout_log_prob, response_mask)
    proto = None
    if out.weights is not None:
        weights = out.weights.to(torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype))
        proto = DataProto.from_dict(tensors={"rollout_is_weights": weights})
    return proto, out.mask, {f"rollout_corr/{name}": value for name, value in out.metrics.items()}


def compute_off_policy_correction(
    old_log_probs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, off_policy_correction: Any
) -> tuple[Tensor | None, dict[str, float], Tensor]:
    """SkyRL's off-policy correction.

    Args:
        old_log_probs: [B, T], by the policy that trains.
        rollout_logprobs: [B, T], by the engine that sampled.
        loss_mask: [B, T], non-zero at valid tokens.
        off_policy_correction: Its config; refused where it is not CONFIG.

    Returns:
        The ratio that the loss is multiplied by, [B, T] or, of whole sequences, [B, 1]; metrics under
        "off_policy_correction/"; the loss mask after rejection.
    """
    _check_config({name: getattr(off_policy_correction, name, None) for name in CONFIG})
    out = correct(old_log_probs, rollout_logprobs, loss_mask)
    ratio = out.weights
    if ratio is not None:
        ratio = ratio.to(old_log_probs.dtype)
        if CONFIG["tis_ratio_type"] == "sequence":
            ratio = _of_rows(ratio, loss_mask)
    mask = out.mask.to(torch.promote_types(loss_mask.dtype, torch.float32))
    return ratio, {f"off_policy_correction/{name}": value for name, value in out.metrics.items()}, mask


def vllm_importance_sampling_ratio(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    mode: str,
    clip_max: float | None,
    clip_min: float | None,
) -> tuple[Tensor, dict[str, float]]:
    """The ratio that TRL's `GRPOTrainer._generate_and_score_completions` computes in its lines.

    Args:
        old_per_token_logps: [B, T], by the policy that trains.
        sampling_per_token_logps: [B, T], by vLLM.
        mask: [B, T], 1 at tokens that the model wrote.
        mode, clip_max, clip_min: The trainer's `vllm_importance_sampling_mode`, `..._clip_max` and `..._clip_min`;
            refused where they are not CONFIG.

    Returns:
        `importance_sampling_ratio`, [B, T] or, of whole sequences, [B, 1]; metrics under "sampling/".
    """
    _check_config({
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": clip_max,
        "vllm_importance_sampling_clip_min": clip_min,
    })  # fmt: skip
    out = correct(old_per_token_logps, sampling_per_token_logps, mask)
    assert out.weights is not None  # no mode of TRL's is without
    ratio = out.weights.to(torch.promote_types(old_per_token_logps.dtype, sampling_per_token_logps.dtype))
    if mode.startswith("sequence"):
        ratio = _of_rows(ratio, mask)
    return ratio, {f"sampling/{name}": value for name, value in out.metrics.items()}


def custom_tis(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's `--custom-tis-function-path`, of whole samples: not under context parallelism.

    Args:
        args: slime's arguments; none is read.
        pg_loss: [N], the policy loss of the tokens of all samples.
        train_log_probs: A 1-D tensor a sample, by the policy that trains.
        rollout_log_probs: Likewise, by the engine that sampled.
        loss_masks: Likewise, non-zero at valid tokens.
        **kwargs: What else slime passes.

    Returns:
        The loss times the weights; the masks after rejection; metrics under "tis/", at each token, as slime's reducer
        takes them.
    """
    lengths = [len(sample) for sample in train_log_probs]
    offsets = torch.tensor([0, *lengths], device=pg_loss.device).cumsum(0)
    out = correct(torch.cat(train_log_probs), torch.cat(rollout_log_probs), torch.cat(loss_masks), offsets)
    if out.weights is not None:
        pg_loss = pg_loss * out.weights
    metrics = {f"tis/{name}": torch.full_like(pg_loss, value) for name, value in out.metrics.items()}
    return pg_loss, list(out.mask.split(lengths)), metrics


def actor_importance_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, token_mask: Tensor, sample_mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The weights that NeMo RL's `ClippedPGLossFn.__call__` computes in its lines, as `importance_weights_to_use`.

    Args:
        prev_logprobs: [B, T], by the policy that trains.
        generation_logprobs: [B, T], by the engine that sampled.
        token_mask: [B, T], non-zero at valid tokens.
        sample_mask: [B], non-zero at samples that train.

    Returns:
        Weights; the mask after rejection, for `mask`; metrics under "is/".
    """
    out = correct(prev_logprobs, generation_logprobs, token_mask * sample_mask.unsqueeze(-1))
    weights = torch.ones_like(prev_logprobs) if out.weights is None else out.weights
    return weights, out.mask, {f"is/{name}": value for name, value in out.metrics.items()}
