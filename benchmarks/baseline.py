"""What people write by hand: one torch op after the other over the whole batch. Also a reading aid for `ops.correct`.

It computes the two workloads of `benchmarks.cases` and our native metrics, for finite log-probs. Each quantity is
computed once, masked with `where`, and all metrics reach the host in one copy. It keeps none of the promises about
order of summation, non-finite tokens or merging.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr import Criterion, Spec

CLAMP = 20.0


@dataclass
class Padded:
    """Rows of [B, T] with a mask."""

    valid: Tensor  # [B, T] bool

    def lengths(self) -> Tensor:
        return self.valid.sum(1)

    def select(self, x: Tensor, other: float) -> Tensor:
        return torch.where(self.valid, x, other)

    def sum(self, x: Tensor) -> Tensor:
        return x.sum(1)

    def spread(self, x: Tensor) -> Tensor:
        return x[:, None]


@dataclass
class Packed:
    """Valid tokens in a row, [N]."""

    cu_seqlens: Tensor  # [S + 1] int64

    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()

    def select(self, x: Tensor, other: float) -> Tensor:
        return x

    def sum(self, x: Tensor) -> Tensor:
        # Four times as fast as index_add_ on a CPU.
        return torch.segment_reduce(x, "sum", lengths=self.lengths())

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.lengths())


def correct(
    train: Tensor, rollout: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, spec: Spec
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """Weights, mask and metrics of one batch.

    Args:
        train: [B, T] or [N] fp32.
        rollout: Same shape.
        mask: [B, T] int64, or None when packed.
        cu_seqlens: [S + 1] int64, or None when padded.
        spec: Nothing, or a token weight with an upper bound and the mean ratio of sequences as the one criterion.

    Returns:
        fp32 weights or None, the mask (the one given, or one with 0 at rejected tokens; bool when packed) and metrics.
    """
    layout: Padded | Packed
    if cu_seqlens is None:
        assert mask is not None
        layout = Padded(mask != 0)
    else:
        layout = Packed(cu_seqlens)
    lengths = layout.lengths()
    some = lengths > 0
    n_tokens, n_sequences = lengths.sum(), some.sum()
    counts = lengths.clamp(min=1)

    d = layout.select(train - rollout, 0.0)
    clamped = d.clamp(-CLAMP, CLAMP)
    ratio = clamped.exp()
    abs_d, d2, excess = d.abs(), d * d, layout.select(ratio - 1.0, 0.0)
    excess2 = excess * excess
    sum_d = layout.sum(d)
    train_log_ppl = -layout.sum(layout.select(train, 0.0)) / counts
    rollout_log_ppl = -layout.sum(layout.select(rollout, 0.0)) / counts
    gap = train_log_ppl - rollout_log_ppl

    def over_tokens(x: Tensor) -> Tensor:
        return x.sum() / n_tokens

    def over_sequences(x: Tensor) -> Tensor:
        return torch.where(some, x, 0.0).sum() / n_sequences

    def std(mean: Tensor, mean_square: Tensor) -> Tensor:
        return (mean_square - mean * mean).clamp(min=0.0).sqrt()

    def low(x: Tensor, chosen: Tensor | None = None) -> Tensor:
        return (layout.select(x, math.inf) if chosen is None else torch.where(chosen, x, math.inf)).amin()

    def high(x: Tensor, chosen: Tensor | None = None) -> Tensor:
        return (layout.select(x, -math.inf) if chosen is None else torch.where(chosen, x, -math.inf)).amax()

    d_mean, d2_mean = over_tokens(d), over_tokens(d2)
    excess_mean, excess2_mean = over_tokens(excess), over_tokens(excess2)
    d_min, d_max = low(d), high(d)
    size = sum_d.abs()
    metrics = {
        "tokens": n_tokens,
        "tokens_nonfinite": (~torch.isfinite(d)).sum(),
        "tokens_clamped": (abs_d > CLAMP).sum(),
        "sequences": n_sequences,
        "sequences_clamped": (size > CLAMP).sum(),
        "d_mean": d_mean,
        "d_abs_mean": over_tokens(abs_d),
        "d_std": std(d_mean, d2_mean),
        "d_abs_max": torch.maximum(d_max, -d_min),
        "d_min": d_min,
        "d_max": d_max,
        "kl_k1": -d_mean,
        "kl_k2": 0.5 * d2_mean,
        "kl_k3": over_tokens(excess - clamped),
        "ratio_mean": 1.0 + excess_mean,
        "ratio_std": std(excess_mean, excess2_mean),
        "chi2_token": excess2_mean + 2.0 * excess_mean,
        "chi2_sequence": over_sequences((2.0 * sum_d.clamp(-CLAMP, CLAMP)).exp() - 1.0),
        "sum_d_abs_mean": over_sequences(size),
        "sum_d_abs_max": high(size, some),
        "train_ppl": over_sequences(train_log_ppl.exp()),
        "rollout_ppl": over_sequences(rollout_log_ppl.exp()),
        "train_log_ppl": over_sequences(train_log_ppl),
        "rollout_log_ppl": over_sequences(rollout_log_ppl),
        "log_ppl_diff": over_sequences(gap),
        "log_ppl_abs_diff": over_sequences(gap.abs()),
        "log_ppl_diff_max": high(gap, some),
        "log_ppl_diff_min": low(gap, some),
        "ppl_ratio": over_sequences(gap.exp()),
    }

    weights = None
    if spec.weight is not None:
        upper = spec.weight.upper
        assert upper is not None
        weights = layout.select(ratio.clamp(max=upper), 0.0)
        bounded = layout.select(weights - 1.0, 0.0)
        for name, x, square in (("weight_raw", excess, excess2), ("weight", bounded, bounded * bounded)):
            mean, mean_square = over_tokens(x), over_tokens(square)
            per_sequence = layout.sum(x) / counts
            sequence_mean, sequence_mean_square = over_sequences(per_sequence), over_sequences(per_sequence.square())
            metrics |= {
                f"{name}_mean": 1.0 + mean,
                f"{name}_std": std(mean, mean_square),
                f"{name}_min": 1.0 + low(x),
                f"{name}_max": 1.0 + high(x),
                f"{name}_ess": (1.0 + mean) ** 2 / (1.0 + 2.0 * mean + mean_square),
                f"sequence_{name}_mean": 1.0 + sequence_mean,
                f"sequence_{name}_std": std(sequence_mean, sequence_mean_square),
                f"sequence_{name}_min": 1.0 + low(per_sequence, some),
                f"sequence_{name}_max": 1.0 + high(per_sequence, some),
                f"sequence_{name}_ess": (1.0 + sequence_mean) ** 2 / (1.0 + 2.0 * sequence_mean + sequence_mean_square),
            }
            if name == "weight_raw":
                metrics["weight_above_fraction"] = over_tokens(x > upper - 1.0)
                metrics["sequence_weight_above_fraction"] = over_sequences(per_sequence > upper - 1.0)

    keep = torch.ones_like(some)
    for criterion in spec.criteria:
        keep = _judge(criterion, sum_d / counts, some, metrics)
        lost = torch.where(keep, 0, lengths)
        metrics[f"{criterion.label}/rejected_tokens_fraction"] = lost.sum() / n_tokens
        metrics[f"{criterion.label}/rejected_sequences_fraction"] = (lost > 0).sum() / n_sequences
    if spec.criteria:
        kept = layout.spread(keep)
        mask = kept if mask is None else torch.where(kept, mask, 0)
    metrics["tokens_kept"] = torch.where(keep, lengths, 0).sum()
    metrics["sequences_kept"] = (keep & some).sum()
    metrics["tokens_kept_fraction"] = metrics["tokens_kept"] / n_tokens
    metrics["sequences_kept_fraction"] = metrics["sequences_kept"] / n_sequences
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return weights, mask, dict(zip(metrics, values, strict=True))


def _judge(criterion: Criterion, mean_d: Tensor, some: Tensor, metrics: dict[str, Tensor]) -> Tensor:
    """[S] bool: whose mean ratio lies within the bounds, or has no token; adds the metrics of that ratio."""
    assert criterion.lower is not None and criterion.upper is not None
    failed = (mean_d < math.log(criterion.lower)) | (mean_d > math.log(criterion.upper))
    ratio = mean_d.clamp(-CLAMP, CLAMP).expm1()
    n = some.sum()
    mean = torch.where(some, ratio, 0.0).sum() / n
    mean_square = torch.where(some, ratio * ratio, 0.0).sum() / n
    metrics |= {
        f"{criterion.label}/mean": 1.0 + mean,
        f"{criterion.label}/std": (mean_square - mean * mean).clamp(min=0.0).sqrt(),
        f"{criterion.label}/min": 1.0 + torch.where(some, ratio, math.inf).amin(),
        f"{criterion.label}/max": 1.0 + torch.where(some, ratio, -math.inf).amax(),
    }
    return ~(failed & some)
