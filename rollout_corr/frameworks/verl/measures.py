"""verl's public functions that compute metrics of given tensors, for code that calls them directly.

The drop-in of the correction does not use them: its metrics come from statistics. Everything is computed in float64.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from ..shared.metrics import EPSILON, exp, log, mean, squared
from .options import TOKEN_CLAMP

LOGGER = logging.getLogger("rollout_corr")

# Tokens at a time, so that a block stays in the cache of a core.
BLOCK = 1 << 16


def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
    **switches: Any,
) -> dict[str, float]:
    """Compute metrics of given weights.

    Args:
        rollout_is_weights: [B, T] after truncation.
        raw_rollout_is_weights: [B, T] before.
        log_ratio_for_metrics: [B, T] log-ratios, or their unclamped sums [B, 1] with rollout_is="sequence".
        response_mask: [B, T], non-zero is valid.
        rollout_is: "token" or "sequence".
        rollout_is_threshold: Upper bound.
        rollout_is_threshold_lower: Lower bound; by default 1/upper, which only fractions are counted below.
        **switches: Those of `install`; none applies here.
    """
    _some(response_mask)
    upper = rollout_is_threshold
    lower = 1.0 / upper if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    over = _Masked(response_mask)
    raw, values = over.values(raw_rollout_is_weights), over.values(rollout_is_weights)
    found = {"mean": over.mean(values)}
    if rollout_is != "token":
        sums = log_ratio_for_metrics.double()
        found["max"] = exp(min(float(sums.max()), TOKEN_CLAMP))
        found["min"] = exp(float(sums.min()))
        found["ratio_fraction_high"] = _share(sums > log(upper))
        found["ratio_fraction_low"] = _share(sums < log(lower))
    else:
        found["max"], found["min"] = over.extrema(values)
        found["ratio_fraction_high"] = over.mean(raw > upper)
        found["ratio_fraction_low"] = over.mean(raw < lower)
    clamped = values.clamp(0.0, upper)
    found["std"] = over.std(clamped)
    squares = over.mean((clamped / (over.mean(clamped) + EPSILON)).square())
    found["eff_sample_size"] = 1.0 / squares if squares else 0.0
    if rollout_is_weights.dim() > 1:
        raw_means = over.rows(raw)
        found |= _of_rows("seq", over.rows(values), 1.0)
        found["seq_fraction_high"] = _share(raw_means > upper)
        found["seq_fraction_low"] = _share(raw_means < lower)
    return {f"rollout_is_{key}": value for key, value in found.items()}


def compute_rs_metrics(
    option_name: str,
    rs_statistic: Tensor,
    response_mask: Tensor,
    seq_valid_mask: Tensor,
    *,
    level: str,
    per_sequence_values: Tensor | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
    **switches: Any,
) -> dict[str, float]:
    """Compute metrics of a given rejection statistic.

    Args:
        option_name: Part of the keys.
        rs_statistic: [B, T].
        response_mask: [B, T], non-zero is valid.
        seq_valid_mask: [B] bool, rows with a valid token.
        level: "token" or "sequence".
        per_sequence_values: [B], or None to take the mean of the statistic over each row.
        rollout_rs_threshold: Upper bound.
        rollout_rs_threshold_lower: Lower bound.
        apply_lower_threshold: Whether there is a lower bound.
        **switches: Those of `install`; none applies here.
    """
    _some(response_mask)
    over = _Masked(response_mask)
    values = over.values(rs_statistic)
    rows = over.rows(values) if per_sequence_values is None else per_sequence_values.double()
    rows = rows.reshape(rows.shape[0], -1)[:, 0][seq_valid_mask]
    lower = rollout_rs_threshold_lower if apply_lower_threshold else -math.inf
    floor = lower if apply_lower_threshold else 0.0
    by_row = level == "sequence" and rows.numel() > 0
    largest, smallest = (float(rows.max()), float(rows.min())) if by_row else over.extrema(values)
    found = {"mean": over.mean(values), "max": largest, "min": smallest}
    units = rows if by_row else values
    for name, beyond in (("high", units > rollout_rs_threshold), ("low", units < lower)):
        found[f"fraction_{name}"] = _share(beyond) if by_row else over.mean(beyond)
    found["std"] = over.std(values.clamp(floor, rollout_rs_threshold))
    found |= _of_rows("seq", rows, 0.0)
    found["seq_fraction_high"] = _share(rows > rollout_rs_threshold)
    if apply_lower_threshold or not rows.numel():
        found["seq_fraction_low"] = _share(rows < lower)
    return {f"rollout_rs_{option_name}_{name}": value for name, value in found.items()}


def calculate_debug_metrics(data: Any, **switches: Any) -> dict[str, float]:
    """Compare the two probabilities of the sampled tokens: maximum, mean and spread of the difference, and correlation.

    Args:
        data: A DataProto with "old_log_probs" and "rollout_log_probs" [B, T], "responses" [B, R], and as a mask
            "response_mask" or "attention_mask"; only their last R columns count.
        **switches: Those of `install`; none applies here.

    Returns:
        verl's five keys. Without a valid token "..._valid" is 0 and the others are NaN, as in verl.
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


class _Masked:
    """Means over the valid tokens of a batch, and over those of each row."""

    def __init__(self, mask: Tensor) -> None:
        self.chosen = mask != 0
        self.n = self.chosen.sum()
        self.of_rows = self.chosen.sum(dim=-1)

    def values(self, x: Tensor) -> Tensor:
        """[B, T] float64, 0 where not valid."""
        return torch.where(self.chosen, x.double(), 0.0)

    def mean(self, x: Tensor) -> float:
        return float(torch.where(self.chosen, x.double(), 0.0).sum() / self.n)

    def std(self, x: Tensor) -> float:
        """The population standard deviation."""
        return math.sqrt(self.mean((x - self.mean(x)).square()))

    def rows(self, x: Tensor) -> Tensor:
        """[B]: the mean of each row, 0 for an empty one."""
        return x.sum(dim=-1) / self.of_rows.clamp(min=1)

    def extrema(self, x: Tensor) -> tuple[float, float]:
        """Largest and smallest."""
        chosen = x[self.chosen]
        return float(chosen.max()), float(chosen.min())


def _some(mask: Tensor) -> None:
    if not (mask != 0).any():
        raise ValueError("response_mask must contain at least one valid token (1).")


def _share(chosen: Tensor) -> float:
    return float(chosen.double().mean()) if chosen.numel() else 0.0


def _of_rows(name: str, rows: Tensor, center: float) -> dict[str, float]:
    """Compute verl's metrics of one value per row; the spread is the unbiased one."""
    if not rows.numel():
        return {f"{name}_{what}": 0.0 for what in ("mean", "std", "max", "min", "max_deviation")}
    return {
        f"{name}_mean": float(rows.mean()),
        f"{name}_std": float(rows.std()) if rows.numel() > 1 else 0.0,
        f"{name}_max": float(rows.max()),
        f"{name}_min": float(rows.min()),
        f"{name}_max_deviation": float((rows - center).abs().max()),
    }
