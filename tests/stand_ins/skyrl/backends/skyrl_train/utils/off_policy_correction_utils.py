"""SkyRL's correction with token weights and a geometric mask: weights, mask, three metrics, names of the others."""

from __future__ import annotations

OF_RATIOS = ("is_ratio_mean", "is_ratio_std", "is_ratio_max", "is_ratio_min", "tis_token_clip_high_ratio")
OF_MASK = ("masked_ratio", "over_high_ratio", "under_low_ratio")


def compute_off_policy_correction(old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    cap = off_policy_correction.token_tis_ratio_clip_high
    low, high = off_policy_correction.geo_mask_low, off_policy_correction.geo_mask_high
    d = old_log_probs - rollout_logprobs
    ratio, tokens = d.exp(), loss_mask.sum()
    geometric = ((d * loss_mask).sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True)).exp()
    inside = (geometric >= low) & (geometric <= high)
    metrics = dict.fromkeys((*OF_RATIOS, *(f"geo_sequence_mask_{name}" for name in OF_MASK)), 0.0)
    metrics["is_ratio_mean"] = float((ratio * loss_mask).sum() / tokens)
    metrics["tis_token_clip_high_ratio"] = float(((ratio > cap) * loss_mask).sum() / tokens)
    metrics["geo_sequence_mask_masked_ratio"] = float((~inside).float().mean())
    return ratio.clamp(max=cap), metrics, loss_mask * inside


def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    weights, metrics, mask = compute_off_policy_correction(
        old_log_probs, rollout_logprobs, loss_mask, off_policy_correction
    )
    return loss * weights, mask, metrics
