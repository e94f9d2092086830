"""verl's `calculate_debug_metrics`, in float64, for code that compares two log-probs without a correction."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

LOGGER = logging.getLogger("rollout_corr")
KEYS = (
    *(f"training/rollout_probs_diff_{name}" for name in ("valid", "max", "mean", "std")),
    "training/rollout_actor_probs_pearson_corr",
)


def calculate_debug_metrics(data: Any) -> dict[str, float]:
    """Compare the two probabilities of the sampled tokens: maximum, mean and spread of the difference, and correlation.

    `data` is a DataProto with "old_log_probs" and "rollout_log_probs" [B, T], "responses" [B, R], and as a mask
    "response_mask" or "attention_mask", whose last R columns count. Without a valid token "..._valid" of verl's
    five keys is 0 and the others are NaN, as in verl.
    """
    batch = data.batch
    old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
    name = next((name for name in ("response_mask", "attention_mask") if name in batch), None)
    if name is None:
        LOGGER.warning("rollout-corr: no mask among %s, so every token counts", sorted(batch.keys()))
    mask = torch.ones_like(old) if name is None else batch[name]
    mask = mask[:, -batch["responses"].size(1) :] != 0
    p, q = (z[mask].to(torch.promote_types(z.dtype, torch.float32)).exp().double() for z in (old, rollout))
    apart, metrics = (p - q).abs(), dict.fromkeys(KEYS, math.nan) | {KEYS[0]: int(p.numel() > 0)}
    if p.numel():
        found = [apart.max(), apart.mean()]
        # Torch warns of the spread of one number.
        found += [apart.std(), torch.corrcoef(torch.stack([p, q]))[0, 1].clamp(-1.0, 1.0)] if p.numel() > 1 else []
        metrics |= zip(KEYS[1:], torch.stack(found).tolist(), strict=False)
    return metrics
