"""A correction and a policy loss as people write them by hand: one torch op after the other over the whole batch.

Computes the two workloads of the CPU benchmark with our native metrics, for finite log-probs, and PPO's policy loss.
Each quantity is computed once, masked with `where`, and all metrics reach the host in one copy. It promises nothing
about the order of summation, non-finite tokens or merging. Also an introduction to `rollout_corr.correct`. The same in
short have the metrics that a loop without a library logs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr import Criterion, Spec

CLAMP = 20.0

Metrics = dict[str, Tensor]


@dataclass
class Padded:
    """Reductions per sequence for rows of [B, T] with a mask."""

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
    """Reductions per sequence for tokens in a row, [N], each inside a sequence."""

    cu_seqlens: Tensor  # [S + 1] int
    valid: Tensor | None  # [N] bool, None: all
    size: int

    def slots(self) -> Tensor:
        return self.cu_seqlens.diff()

    def lengths(self) -> Tensor:
        return self.slots() if self.valid is None else self.sum(self.valid.float()).long()

    def select(self, x: Tensor, other: float) -> Tensor:
        return x if self.valid is None else torch.where(self.valid, x, other)

    def sum(self, x: Tensor) -> Tensor:
        # Four times as fast as index_add_ on a CPU. Unsafe, because on a GPU the check would make the host wait.
        return torch.segment_reduce(x, "sum", lengths=self.slots(), unsafe=True)

    def spread(self, x: Tensor) -> Tensor:
        # With output_size the host need not wait for the sum of the lengths.
        return x.repeat_interleave(self.slots(), output_size=self.size)


def layout_of(mask: Tensor | None, cu_seqlens: Tensor | None, size: int) -> Padded | Packed:
    """Return the reductions for a mask and offsets as `correct` takes them."""
    if cu_seqlens is not None:
        return Packed(cu_seqlens, None if mask is None else mask != 0, size)
    assert mask is not None
    return Padded(mask != 0)


def together(metrics: Metrics) -> Tensor:
    """Put all metrics into one tensor, in their order."""
    return torch.stack([value.double() for value in metrics.values()])


def on_host(metrics: Metrics) -> dict[str, float]:
    """Copy all metrics to the host at once."""
    return dict(zip(metrics, together(metrics).tolist(), strict=True))


def _std(mean: Tensor, mean_square: Tensor) -> Tensor:
    return (mean_square - mean * mean).clamp(min=0.0).sqrt()


def _moments(
    name: str, excess: Tensor, square: Tensor, mean: Callable[[Tensor], Tensor], bounds: tuple[Tensor, Tensor]
) -> Metrics:
    """Mean, standard deviation, bounds and effective sample size of ratios, given ratio - 1 and its square."""
    m, m2 = mean(excess), mean(square)
    return {
        f"{name}_mean": 1.0 + m,
        f"{name}_std": _std(m, m2),
        f"{name}_min": 1.0 + bounds[0],
        f"{name}_max": 1.0 + bounds[1],
        f"{name}_ess": (1.0 + m) ** 2 / (1.0 + 2.0 * m + m2),
    }


def correct(
    train: Tensor, rollout: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, spec: Spec
) -> tuple[Tensor | None, Tensor | None, Metrics]:
    """Compute weights, mask and metrics of one batch on its device."""
    train, rollout = train.float(), rollout.float()
    layout = layout_of(mask, cu_seqlens, train.numel())
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

    def token_bounds(x: Tensor) -> tuple[Tensor, Tensor]:
        return layout.select(x, math.inf).amin(), layout.select(x, -math.inf).amax()

    def sequence_bounds(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(some, x, math.inf).amin(), torch.where(some, x, -math.inf).amax()

    d_mean, d2_mean = over_tokens(d), over_tokens(d2)
    excess_mean, excess2_mean = over_tokens(excess), over_tokens(excess2)
    d_min, d_max = token_bounds(d)
    gap_min, gap_max = sequence_bounds(gap)
    size = sum_d.abs()
    metrics = {
        "tokens": n_tokens,
        "tokens_nonfinite": (~torch.isfinite(d)).sum(),
        "tokens_differing": (d != 0.0).sum(),
        "tokens_differing_fraction": over_tokens(d != 0.0),
        "sequences_differing": (layout.sum((d != 0.0).float()) > 0.0).sum(),
        "tokens_clamped": (abs_d > CLAMP).sum(),
        "sequences": n_sequences,
        "sequences_clamped": (size > CLAMP).sum(),
        "logratio_mean": d_mean,
        "logratio_abs_mean": over_tokens(abs_d),
        "logratio_std": _std(d_mean, d2_mean),
        "logratio_abs_max": torch.maximum(d_max, -d_min),
        "logratio_min": d_min,
        "logratio_max": d_max,
        "kl_rollout_train_k1": -d_mean,
        "kl_rollout_train_k2": 0.5 * d2_mean,
        "kl_rollout_train_k3": over_tokens(excess - clamped),
        "ratio_mean": 1.0 + excess_mean,
        "ratio_std": _std(excess_mean, excess2_mean),
        "chi2_train_rollout": excess2_mean + 2.0 * excess_mean,
        "sequence_chi2_train_rollout": over_sequences((2.0 * sum_d.clamp(-CLAMP, CLAMP)).exp() - 1.0),
        "sequence_logratio_abs_mean": over_sequences(size),
        "sequence_logratio_abs_max": torch.where(some, size, -math.inf).amax(),
        "sequence_train_ppl_mean": over_sequences(train_log_ppl.exp()),
        "sequence_rollout_ppl_mean": over_sequences(rollout_log_ppl.exp()),
        "sequence_train_log_ppl_mean": over_sequences(train_log_ppl),
        "sequence_rollout_log_ppl_mean": over_sequences(rollout_log_ppl),
        "sequence_log_ppl_diff_mean": over_sequences(gap),
        "sequence_log_ppl_diff_abs_mean": over_sequences(gap.abs()),
        "sequence_log_ppl_diff_max": gap_max,
        "sequence_log_ppl_diff_min": gap_min,
        "sequence_ppl_ratio_mean": over_sequences(gap.exp()),
    }

    weights = None
    if spec.weight is not None:
        upper = spec.weight.upper
        assert upper is not None
        weights = layout.select(ratio.clamp(max=upper), 0.0)
        bounded = layout.select(weights - 1.0, 0.0)
        for name, x, square in (("weight_before_bounds", excess, excess2), ("weight", bounded, bounded * bounded)):
            means = layout.sum(x) / counts
            metrics |= _moments(name, x, square, over_tokens, token_bounds(x))
            metrics |= _moments(f"sequence_mean_{name}", means, means.square(), over_sequences, sequence_bounds(means))
            if name == "weight_before_bounds":
                metrics["weight_above_upper_fraction"] = over_tokens(x > upper - 1.0)
                metrics["sequence_mean_weight_above_upper_fraction"] = over_sequences(means > upper - 1.0)

    keep = torch.ones_like(some)
    for criterion in spec.criteria:
        keep = _inside(criterion, sum_d / counts, some, metrics)
        lost = torch.where(keep, 0, lengths)
        metrics[f"{criterion.label}/tokens_rejected_fraction"] = lost.sum() / n_tokens
        metrics[f"{criterion.label}/sequences_rejected_fraction"] = (lost > 0).sum() / n_sequences
    if spec.criteria:
        kept = layout.spread(keep)
        mask = kept if mask is None else torch.where(kept, mask, 0)
    metrics["tokens_kept"] = torch.where(keep, lengths, 0).sum()
    metrics["sequences_kept"] = (keep & some).sum()
    metrics["tokens_kept_fraction"] = metrics["tokens_kept"] / n_tokens
    metrics["sequences_kept_fraction"] = metrics["sequences_kept"] / n_sequences
    return weights, mask, metrics


def _inside(criterion: Criterion, mean_d: Tensor, some: Tensor, metrics: Metrics) -> Tensor:
    """Return [S] bool, true where the mean ratio is in bounds or no token is valid; add metrics of that ratio."""
    assert criterion.lower is not None and criterion.upper is not None
    failed = (mean_d < math.log(criterion.lower)) | (mean_d > math.log(criterion.upper))
    ratio = mean_d.clamp(-CLAMP, CLAMP).expm1()
    n = some.sum()
    mean = torch.where(some, ratio, 0.0).sum() / n
    mean_square = torch.where(some, ratio * ratio, 0.0).sum() / n
    metrics |= {
        f"{criterion.label}/mean": 1.0 + mean,
        f"{criterion.label}/std": _std(mean, mean_square),
        f"{criterion.label}/min": 1.0 + torch.where(some, ratio, math.inf).amin(),
        f"{criterion.label}/max": 1.0 + torch.where(some, ratio, -math.inf).amax(),
    }
    return ~(failed & some)


def policy_loss(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, clip: tuple[float, float, float]
) -> tuple[Tensor, Metrics]:
    """Compute PPO's loss with clipping on both sides, dual clip and weights, averaged over the tokens that train."""
    low, high, dual = clip
    valid = mask != 0
    n = valid.sum().clamp(min=1)
    d = torch.where(valid, new.float() - old.float(), 0.0).clamp(-CLAMP, CLAMP)
    ratio = d.exp()
    inside = ratio.clamp(1.0 - low, 1.0 + high)
    clipped = torch.maximum(-ratio * advantages, -inside * advantages)
    cut = torch.minimum(-dual * advantages, clipped)
    negative = advantages < 0
    terms = torch.where(valid, torch.where(negative, cut, clipped) * weights, 0.0)
    value = terms.sum() / n
    with torch.no_grad():
        ratio, d = ratio.detach(), d.detach()

        def share(x: Tensor) -> Tensor:
            return (x & valid).sum() / n

        excess = torch.where(valid, ratio - 1.0, 0.0)
        mean, square = excess.sum() / n, excess.square().sum() / n
        metrics = {
            "tokens_trained": n,
            "surrogate_loss_mean": value.detach(),
            "clip_low_fraction": share(negative & (ratio < 1.0 - low)),
            "clip_high_fraction": share((advantages > 0) & (ratio > 1.0 + high)),
            "clip_dual_fraction": share(negative & (ratio > dual)),
            "kl_old_new_k1": -d.sum() / n,
            "kl_old_new_k3": (excess - d).sum() / n,
            "surrogate_ratio_mean": 1.0 + mean,
            "surrogate_ratio_std": _std(mean, square),
            "surrogate_ratio_min": torch.where(valid, ratio, math.inf).amin(),
            "surrogate_ratio_max": torch.where(valid, ratio, -math.inf).amax(),
        }
    return value, metrics


# --- in short ---


def correct_in_short(
    train: Tensor, rollout: Tensor, mask: Tensor, _: None, spec: Spec
) -> tuple[Tensor, Tensor, Metrics]:
    """Weights, mask and ten metrics of padded rows, by a truncated token weight and the geometric mean."""
    assert spec.weight is not None and spec.weight.upper is not None
    upper, (criterion,) = spec.weight.upper, spec.criteria
    assert criterion.lower is not None and criterion.upper is not None
    n, counts = mask.sum(), mask.sum(1)
    d = torch.where(mask, train - rollout, 0.0)
    ratio = d.exp()
    weights = torch.where(mask, ratio.clamp(max=upper), 0.0)
    mean = d.sum(1) / counts.clamp(min=1)
    keep = (mean >= math.log(criterion.lower)) & (mean <= math.log(criterion.upper))
    metrics = {
        "tokens": n,
        "logratio_mean": d.sum() / n,
        "logratio_abs_mean": d.abs().sum() / n,
        "logratio_abs_max": d.abs().amax(),
        "kl_rollout_train_k3": (ratio - 1.0 - d).sum() / n,
        "ratio_mean": torch.where(mask, ratio, 0.0).sum() / n,
        "chi2_train_rollout": torch.where(mask, ratio * ratio - 1.0, 0.0).sum() / n,
        "weight_mean": weights.sum() / n,
        "weight_above_upper_fraction": (ratio > upper).sum() / n,
        "tokens_kept_fraction": torch.where(keep, counts, 0).sum() / n,
    }
    return weights, mask & keep[:, None], metrics


def policy_loss_in_short(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, clip: tuple[float, float, float]
) -> tuple[Tensor, Metrics]:
    """PPO's loss as above, with three metrics."""
    low, high, dual = clip
    n = mask.sum()
    d = new - old
    ratio = d.exp()
    first, second = -ratio * advantages, -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    clipped = torch.maximum(first, second)
    terms = torch.where(advantages < 0, torch.minimum(-dual * advantages, clipped), clipped) * weights
    value = torch.where(mask, terms, 0.0).sum() / n
    metrics = {
        "clip_high_fraction": (mask & (ratio > 1.0 + high) & (advantages > 0)).sum() / n,
        "kl_old_new_k1": -torch.where(mask, d.detach(), 0.0).sum() / n,
        "surrogate_ratio_mean": torch.where(mask, ratio.detach(), 0.0).sum() / n,
    }
    return value, metrics


def step_in_short(
    new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, bounds: tuple[float, float, float]
) -> tuple[Tensor, Metrics]:
    """Truncated token weights and PPO's loss at once, with six metrics of the two calls above."""
    low, high, upper = bounds
    valid = mask != 0
    n = valid.sum()
    gap = torch.where(valid, old - rollout, 0.0)
    mismatch = gap.exp()
    weights = mismatch.clamp(max=upper)
    d = torch.where(valid, new - old, 0.0)
    ratio = d.exp()
    terms = torch.maximum(-ratio * advantages, -ratio.clamp(1.0 - low, 1.0 + high) * advantages) * weights
    value = torch.where(valid, terms, 0.0).sum() / n
    d, ratio = d.detach(), ratio.detach()
    metrics = {
        "kl_rollout_train_k3": (mismatch - 1.0 - gap).sum() / n,
        "logratio_abs_max": gap.abs().amax(),
        "weight_mean": torch.where(valid, weights, 0.0).sum() / n,
        "weight_above_upper_fraction": (mismatch > upper).sum() / n,
        "clip_high_fraction": (valid & (ratio > 1.0 + high) & (advantages > 0)).sum() / n,
        "kl_old_new_k1": -d.sum() / n,
    }
    return value, metrics
