"""SkyRL's correction with token weights and a geometric mask."""

from __future__ import annotations

from oracles import peers as oracle_reports


def compute_off_policy_correction(old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    cap = off_policy_correction.token_tis_ratio_clip_high
    low, high = off_policy_correction.geo_mask_low, off_policy_correction.geo_mask_high
    d = old_log_probs - rollout_logprobs
    geometric = ((d * loss_mask).sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True)).exp()
    columns = zip(old_log_probs.tolist(), rollout_logprobs.tolist(), loss_mask.tolist(), strict=True)
    rows = [list(zip(*row, strict=True)) for row in columns]
    metrics = oracle_reports.skyrl(rows, tis="token", cap=cap, sequence_mask="geo", bounds=(low, high))
    return d.exp().clamp(max=cap), metrics, loss_mask * ((geometric >= low) & (geometric <= high))


def apply_off_policy_correction(loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction):
    weights, metrics, mask = compute_off_policy_correction(
        old_log_probs, rollout_logprobs, loss_mask, off_policy_correction
    )
    return loss * weights, mask, metrics
