"""verl's `calculate_debug_metrics`, in float64, for code that compares two log-probs without a correction."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from ..shared.metrics import mean, squared

LOGGER = logging.getLogger("rollout_corr")

# Tokens at a time, so that a block stays in the cache of a core.
BLOCK = 1 << 16


def calculate_debug_metrics(data: Any, **switches: Any) -> dict[str, float]:
    """Compare the two probabilities of the sampled tokens: maximum, mean and spread of the difference, and correlation.

    `data` is a DataProto with "old_log_probs" and "rollout_log_probs" [B, T], "responses" [B, R], and as a mask
    "response_mask" or "attention_mask", of which the last R columns count. Without a valid token "..._valid" of verl's
    five keys is 0 and the others are NaN, as in verl.
    """
    batch = data.batch
    old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
    name = next((name for name in ("response_mask", "attention_mask") if name in batch), None)
    if name is None:
        LOGGER.warning("rollout-corr: no mask among %s, so every token counts", sorted(batch.keys()))
    mask = torch.ones_like(old) if name is None else batch[name]
    mask = mask[:, -batch["responses"].size(1) :] != 0
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=old.device)
    largest = torch.zeros((), dtype=torch.float64, device=old.device)
    rows = max(1, BLOCK // max(1, old.shape[1]))
    for x, y, chosen in zip(old.split(rows), rollout.split(rows), mask.split(rows), strict=True):
        # The probabilities of sampled tokens lie near 1, and their squares' sums cancel least around it.
        p, q = (z[chosen].to(torch.promote_types(z.dtype, torch.float32)).exp_().double().sub_(1.0) for z in (x, y))
        apart = (p - q).abs_()
        sums += torch.stack([chosen.sum(), apart.sum(), apart @ apart, p.sum(), q.sum(), p @ p, q @ q, p @ q])
        if apart.numel():
            largest = torch.maximum(largest, apart.max())
    return _debug(dict(zip(_SUMS, sums.tolist(), strict=True)), float(largest))


_SUMS = ("n", "apart", "apart2", "p", "q", "p2", "q2", "pq")


def _debug(sums: dict[str, float], largest: float) -> dict[str, float]:
    n = sums["n"]
    found = {"valid": 1, "max": largest, "mean": math.nan, "std": math.nan}
    correlation = math.nan
    if not n:
        found |= {"valid": 0, "max": math.nan}
    else:
        found["mean"] = sums["apart"] / n
        square_p, square_q = (sums[f"{x}2"] - squared(sums[x]) / n for x in "pq")
        if square_p > 0.0 and square_q > 0.0:
            correlation = mean(sums["pq"] - sums["p"] * sums["q"] / n, math.sqrt(square_p * square_q))
            correlation = max(-1.0, min(1.0, correlation))
    if n > 1:
        found["std"] = math.sqrt(max(sums["apart2"] - squared(sums["apart"]) / n, 0.0) / (n - 1))
    metrics: dict[str, float] = {f"training/rollout_probs_diff_{name}": value for name, value in found.items()}
    return metrics | {"training/rollout_actor_probs_pearson_corr": correlation}
