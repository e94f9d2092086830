"""xtuner, SkyRL and TRL restated: our own code with the operations of theirs in their order.

Written from the published formulas, to be timed beside ours where the frameworks are not installed; tables say
"restated". Kept are the operations, their shapes and dtypes, and where the host waits.
Read at xtuner b934f46 and SkyRL a956457 (2026-08-21), and TRL 1.16.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SAFE = 20.0
TINY = 1e-8

Pair = tuple[float, float]
Clip = tuple[float, float, float]  # PPO's low, high and dual
Metrics = dict[str, float]

# The shipped recipe of xtuner: (upper, lower).
XTUNER_REASONING: dict[str, Any] = {
    "threshold": (5.0, 0.5),
    "mask_threshold": (5.0, 0.5),
    "veto_threshold": (20.0, 0.0),
}
# What SkyRL's documentation recommends: (low, high).
SKYRL_TLDR: dict[str, Any] = {
    "cap": 2.0,
    "outlier": (1e-4, 100.0),
    "token_mask": (0.5, 2.0),
    "geometric": (0.99, 1.01),
}


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked tokens; xtuner adds a little to the count."""
    return torch.where(mask, x, 0.0).mul(mask).sum() / (mask.sum() + TINY)


def _row_means(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).mul(mask).sum(-1) / (mask.sum(-1) + TINY)


def _share(x: Tensor) -> Tensor:
    return x.float().mean()


def _read(prefix: str, metrics: dict[str, Tensor]) -> Metrics:
    """Read metrics one by one, with a wait of the host for each, as the frameworks do."""
    return {f"{prefix}{key}": value.item() for key, value in metrics.items()}


# --- xtuner -----------------------------------------------------------------------------------------------------------


def _padded(packed: Tensor, num_tokens: Tensor | Sequence[int]) -> Tensor:
    """[1, N] -> [B, longest], one sequence after the other; with lengths on a device the host waits for each."""
    sizes = num_tokens.tolist() if isinstance(num_tokens, Tensor) else num_tokens
    pieces = torch.split(packed[0], sizes)
    longest = max(int(many) for many in num_tokens)  # of a tensor's elements, one wait for each
    out = torch.full((len(pieces), longest), 0.0, dtype=packed.dtype, device=packed.device)
    for i, piece in enumerate(pieces):
        out[i, : num_tokens[i]] = piece
    return out


def _packed(padded: Tensor, num_tokens: Tensor | Sequence[int]) -> Tensor:
    sizes = num_tokens.tolist() if isinstance(num_tokens, Tensor) else num_tokens
    return torch.cat([padded[i, :size] for i, size in enumerate(sizes)])[None]


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf


def xtuner(
    old: Tensor,
    rollout: Tensor,
    num_tokens: Tensor | Sequence[int],
    mask: Tensor,
    threshold: Pair,
    mask_threshold: Pair,
    veto_threshold: Pair,
) -> tuple[Tensor, Tensor, Metrics]:
    """Compute token weights in mode "both", with a veto.

    Args:
        old: [1, N] fp32.
        rollout: [1, N] fp32.
        num_tokens: [B] int32 on the device, as xtuner passes it, or a list.
        mask: [1, N] bool.
        threshold: (upper, lower) of weights.
        mask_threshold: (upper, lower) of tokens that train.
        veto_threshold: (upper, lower); a token outside rejects its sequence.

    Returns:
        fp32 weights and mask, [1, N], and metrics on the host.
    """
    metrics = _xtuner_mismatch(old, rollout, mask)
    old, rollout = _padded(old, num_tokens), _padded(rollout, num_tokens)
    mask = _padded(mask.float(), num_tokens).bool()
    upper, lower = threshold
    d = old - rollout
    weights = d.clamp(-SAFE, SAFE).exp()

    bad = ((d < _log(veto_threshold[1])) | (d > _log(veto_threshold[0]))) & mask
    vetoed = bad.any(-1, keepdim=True)
    real = mask.any(-1)
    metrics["rollout_is_veto_fraction"] = (vetoed[:, 0] & real).float().sum().item() / max(real.sum().item(), 1)
    metrics["rollout_is_catastrophic_token_fraction"] = bad.sum().item() / max(mask.sum().item(), 1)
    metrics |= _xtuner_weights(weights, mask, real, upper, lower)

    high, low = mask_threshold
    keep = (weights >= low) & (weights <= high)
    trains = mask.float() * keep.float()
    metrics["rollout_is_masked_fraction"] = _mean(1.0 - keep.float(), mask).item()
    metrics["rollout_is_seq_masked_fraction"] = _share(((~keep) & mask).any(-1)).item()
    trains = trains * (~vetoed).float()
    bounded = weights.clamp(lower, upper) * mask.float()
    named = {f"mismatch/{key}": value for key, value in metrics.items()}
    return _packed(bounded, num_tokens), _packed(trains, num_tokens), named


def _xtuner_mismatch(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Metrics of the packed tensors, whose single row is the whole pack."""
    d = old - rollout
    train, engine = _row_means(old, mask), _row_means(rollout, mask)
    gap = engine - train
    found = {
        "training_ppl": (-train).exp().mean(),
        "training_log_ppl": (-train).mean(),
        "kl": _mean(rollout - old, mask),
        "k3_kl": _mean(d.exp() - d - 1.0, mask),
        "rollout_ppl": (-engine).exp().mean(),
        "rollout_log_ppl": (-engine).mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
        "logprob_abs_diff": _mean(d.abs(), mask),
    }
    return {"valid": mask.any().item(), **_read("mismatch_", found)}


def _xtuner_weights(weights: Tensor, mask: Tensor, real: Tensor, upper: float, lower: float) -> Metrics:
    clamped = weights.clamp(lower, upper)
    mean = _mean(clamped, mask)
    each = _row_means(weights, mask)[real]
    found = {
        "mean": _mean(weights, mask),
        "max": torch.where(mask, weights, -math.inf).max(),
        "min": torch.where(mask, weights, math.inf).min(),
        "ratio_fraction_high": _mean((weights > upper).float(), mask),
        "ratio_fraction_low": _mean((weights < lower).float(), mask),
        "std": (_mean(clamped.square(), mask) - mean.square()).clamp(min=0.0).sqrt(),
        "eff_sample_size": 1.0 / _mean((clamped / (mean + TINY)).square(), mask),
        "seq_mean": each.mean(),
        "seq_std": each.std() if each.numel() > 1 else each.new_zeros(()),
        "seq_max": each.max(),
        "seq_min": each.min(),
        "seq_max_deviation": (each - 1.0).abs().max(),
        "seq_fraction_high": _share(each > upper),
        "seq_fraction_low": _share(each < lower),
    }
    return _read("rollout_is_", found)


def xtuner_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, clip: Clip
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO with dual clip over a whole pack, where xtuner takes chunks of 512 to 1024 tokens with the LM head.

    All tensors are [N]; `new` requires grad, `mask` is what trains after rejection.

    Returns:
        The value with its graph, and metrics on the device: xtuner reads them once a step.
    """
    low, high, dual = clip
    trains = mask != 0
    count = trains.sum().clamp(min=1)
    loss_weights = torch.where(trains, 1.0, 0.0) / count * weights
    ratio = (new - old).clamp(-SAFE, SAFE).exp()
    clipped = torch.maximum(-ratio * advantages, -ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    loss = torch.where(advantages < 0, torch.minimum(clipped, -dual * advantages), clipped)
    value = (loss * loss_weights).sum()
    with torch.no_grad():
        d, ratio = (new - old).detach(), ratio.detach()

        def mean(x: Tensor) -> Tensor:
            return torch.where(trains, x, 0.0).sum() / count

        metrics = {
            "ratio_deviation": mean((ratio - 1.0).abs()),
            "kl_old_new_k1": mean(-d),
            "kl_old_new_k3": mean(ratio - 1.0 - d),
            "clip_low_fraction": mean(((ratio < 1.0 - low) & (advantages < 0)).float()),
            "clip_high_fraction": mean(((ratio > 1.0 + high) & (advantages > 0)).float()),
            "surrogate_ratio_max": torch.where(trains, ratio, -math.inf).max(),
            "surrogate_ratio_min": torch.where(trains, ratio, math.inf).min(),
        }
    return value, metrics


# --- SkyRL ------------------------------------------------------------------------------------------------------------


def _ratio(d: Tensor) -> Tensor:
    return d.float().clamp(-SAFE, SAFE).exp().to(d.dtype)


def skyrl(
    old: Tensor, rollout: Tensor, mask: Tensor, cap: float, outlier: Pair, token_mask: Pair, geometric: Pair
) -> tuple[Tensor, Tensor, Metrics]:
    """Apply outliers, the token mask, truncated token weights and the geometric mask of sequences, in this order.

    Args:
        old: [B, T].
        rollout: [B, T].
        mask: [B, T] floating.
        cap: Upper bound of weights.
        outlier: (low, high): a token outside masks its row.
        token_mask: (low, high) of tokens that stay.
        geometric: (low, high) of rows that stay.

    Returns:
        [B, T] weights, which are not masked, [B, T] mask, and metrics on the host.
    """

    def part(x: Tensor) -> Tensor:
        return (x & (mask > 0)).sum().float() / (mask > 0).sum().float().clamp(min=1.0)

    ratio = _ratio(old - rollout)
    masked = ratio * mask
    mean = masked.sum() / mask.sum().clamp(min=1.0)
    metrics = _read("is_ratio_", {"mean": mean, "std": masked.std(), "max": masked.max(), "min": masked.min()})
    ratio = _ratio(old - rollout)
    over = ((ratio > outlier[1]) & (mask > 0)).any(-1)
    under = ((ratio < outlier[0]) & (mask > 0)).any(-1)
    kept = ~(over | under)
    rows = {"masked_ratio": _share(~kept), "over_high_ratio": _share(over), "under_low_ratio": _share(under)}
    metrics |= _read("outlier_seq_", rows)
    mask = mask * kept.float()[:, None]

    ratio = _ratio(old - rollout)
    inside = (ratio >= token_mask[0]) & (ratio <= token_mask[1])
    metrics["token_mask_ratio"] = part(~inside).item()
    mask = mask * (inside | (mask == 0)).float()

    ratio = _ratio(old - rollout)
    metrics["tis_token_clip_high_ratio"] = part(ratio > cap).item()
    weights = ratio.clamp(max=cap).detach()

    row = _ratio(((old - rollout) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))
    high, low = row > geometric[1], row < geometric[0]
    rows = {"masked_ratio": _share(high | low), "over_high_ratio": _share(high), "under_low_ratio": _share(low)}
    metrics |= _read("geo_sequence_mask_", rows)
    return weights, mask * (~(high | low)).float()[:, None], metrics


def skyrl_loss(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, clip: Clip, **correction: Any
) -> tuple[Tensor, Metrics]:
    """Compute one micro-batch's loss: PPO with dual clip, corrected inside, reduced by its sum.

    All tensors are [B, T]; `new` requires grad, `advantages` are already divided by the tokens of the mini-batch,
    `mask` is floating. `correction` goes to `skyrl`.
    """
    low, high, dual = clip
    ratio = _ratio(new - old)
    plain, clipped = ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages
    clip_ratio = ((-clipped > -plain).float() * mask).sum() / mask.sum().clamp(min=1.0)
    metrics = {"clip_ratio": clip_ratio.item()}
    loss = -torch.minimum(plain, clipped)
    loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
    weights, mask, found = skyrl(old, rollout, mask, **correction)
    return (loss * weights * mask).sum(), metrics | found


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl(old: Tensor, rollout: Tensor, mask: Tensor, clip_max: float) -> tuple[Tensor, Metrics]:
    """Compute the ratio in mode "sequence_mask", TRL's default, and TRL's metrics of it, in one process.

    Args:
        old: [B, T].
        rollout: [B, T], NaN where the engine gave none.
        mask: [B, T] int64.
        clip_max: A ratio above it becomes 0.

    Returns:
        [B, 1], and metrics on the host.
    """
    d = torch.nan_to_num((old - rollout) * mask, nan=0.0)
    ratio = d.sum(dim=-1, keepdim=True).exp()
    ratio = ratio.masked_fill((ratio < -math.inf) | (ratio > clip_max), 0.0)
    delta = (old - rollout).abs()
    delta = delta[mask.bool() & ~delta.isnan()]
    rows = ratio.flatten()
    found = {
        "sampling_logp_difference/mean": delta.mean(),
        "sampling_logp_difference/max": delta.max(),
        "importance_sampling_ratio/min": rows.min(),
        "importance_sampling_ratio/mean": rows.nanmean(),
        "importance_sampling_ratio/max": rows.max(),
    }
    return ratio, _read("sampling/", found)


def trl_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, ratio: Tensor, items: Tensor, low: float, high: float
) -> tuple[Tensor, Metrics]:
    """Compute the loss of type "dapo", TRL's default, with the engine's ratio; entropies are left out.

    Args:
        new: [B, T], requires grad.
        old: [B, T].
        advantages: [B, T].
        mask: [B, T] int64.
        ratio: Broadcasts to [B, T].
        items: 0-d, the tokens of the global batch.
        low: PPO's lower clip.
        high: PPO's upper clip.
    """
    plain = (new - old).exp()
    clipped = plain.clamp(1.0 - low, 1.0 + high)
    loss = -torch.min(plain * advantages, clipped * advantages) * ratio
    value = (loss * mask).sum() / items.clamp(min=1.0)
    with torch.no_grad():
        below = ((plain < 1.0 - low) & (advantages < 0)).float()
        above = ((plain > 1.0 + high) & (advantages > 0)).float()
        metrics = {}
        for name, cut in (("low", below), ("high", above), ("region", below + above)):
            totals = torch.stack([(cut * mask).sum(), mask.sum().float()])
            metrics[f"clip_ratio/{name}_mean"] = (totals[0] / totals[1].clamp(min=1.0)).item()
        for name, cut, reduce in (("low_min", below, torch.amin), ("high_max", above, torch.amax)):
            metrics[f"clip_ratio/{name}"] = reduce((cut * mask).sum(-1) / mask.sum(-1)).item()
    return value, metrics
