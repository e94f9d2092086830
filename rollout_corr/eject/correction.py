"""Rollout correction for reinforcement learning of language models, in plain torch.

The engine that samples (vLLM, SGLang) and the trainer disagree on the log-prob of the very same token. D = train_logp -
rollout_logp is the log of their ratio. `correct` weighs tokens by exp(D), leaves out what has drifted too far, and
measures how far the two are apart. Nothing waits for the device before the metrics, and no input is modified.

The difference is taken in float32 at least; everything after it is float64, in which no rounding reaches a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Criterion:
    """A test: a token or a sequence trains if lower <= value <= upper."""

    stat: str  # "ratio" exp(D), aggregated as D; "k1" -D; "k2" D^2 / 2; "k3" e^D - 1 - D; "abs" |D|
    over: str = "token"  # or "sequence"
    reduce: str | None = None  # of a sequence: "sum", "mean", "min" or "max" over its tokens
    lower: float | None = None  # None: open
    upper: float | None = None
    drop: str = "unit"  # what fails; "sequence": a token that fails takes its whole sequence with it
    token_clamp: float | None = None  # D is clamped to +-token_clamp first


@dataclass(frozen=True)
class Settings:
    """What is corrected, and how."""

    level: str | None = "token"  # weight: "token" exp(D), "product" exp(sum of D), "geometric" exp(mean of D), or None
    lower: float | None = None  # bounds of the weight; None: open
    upper: float | None = 2.0
    outside: str = "clamp"  # a weight beyond a bound becomes the bound, or "zero"
    token_clamp: float | None = None  # D of the weight is clamped to +-token_clamp first
    clamp: float = 20.0  # log-ratios are clamped to +-clamp before exp
    criteria: tuple[Criterion, ...] = ()  # all must pass
    sums_over: str = "valid"  # sums of sequences are over valid tokens, or over those "kept" by criteria over tokens
    rejected: str = "mask"  # what fails leaves the mask, gets the weight "zero", or "both"
    nonfinite: str = "reject"  # NaN or infinite D rejects its sequence; "neutral": it reads as 0; "propagate"
    metrics: bool = False  # measure, and copy ten numbers to the host

    @property
    def rejects(self) -> bool:
        """True if anything can be rejected."""
        return len(self.criteria) > 0 or (self.nonfinite == "reject" and self.level is not None)


class Correction(NamedTuple):
    """The result of `correct`."""

    weights: Tensor | None  # like train_logp, float32 (float64 of float64), without a gradient; 0 where masked
    mask: Tensor  # what trains: shape and dtype of the mask given
    keep: Tensor  # [S] bool: False where a sequence is rejected as a whole
    metrics: dict[str, float]


class Sequences:
    """Which tokens of a batch, laid out in one dimension, belong together."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None) -> None:
        n, device = like.numel(), like.device
        if cu_seqlens is None:
            self.offsets = torch.arange(like.shape[0] + 1, device=device) * like.shape[1]
        else:
            # Wrong offsets give wrong numbers, but no access out of bounds.
            self.offsets = cu_seqlens.to(device).long().clamp(0, n).cummax(0).values
        # Sequence s is place s + 1; 0 and S + 1 are the tokens before and behind all of them.
        self.place = torch.searchsorted(self.offsets, torch.arange(n, device=device), right=True)
        self.inside = (self.place > 0) & (self.place < self.offsets.numel())

    def reduce(self, x: Tensor, how: str = "sum", initial: float = 0.0) -> Tensor:
        """[N] to [S]: the float64 sum, minimum or maximum of each sequence, in a fixed order."""
        return torch.segment_reduce(x.double(), how, offsets=self.offsets, unsafe=True, initial=initial)

    def spread(self, x: Tensor) -> Tensor:
        """[S] to [N]: the value of a sequence at each of its tokens."""
        return pad(x, (1, 1))[self.place]


def correct(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    settings: Settings = Settings(),
) -> Correction:
    """Correct the log-probs of a batch.

    Args:
        train_logp: By the policy that trains: [B, T], or packed [N] or [1, N]; any float dtype.
        rollout_logp: By the engine that sampled, of the same shape.
        mask: Non-zero at valid tokens, of the same shape and any dtype; None: all are. Whatever stands at other tokens
            is never read into a result.
        cu_seqlens: [S + 1] int32 or int64, where packed sequences begin and end. None: each row of [B, T] is one.
        settings: What to do.
    """
    _check(train_logp, rollout_logp, mask, cu_seqlens)
    sequences = Sequences(train_logp, cu_seqlens)
    mask = sequences.inside.reshape(train_logp.shape) if mask is None else mask.detach()
    dtype = torch.promote_types(torch.promote_types(train_logp.dtype, rollout_logp.dtype), torch.float32)
    train, rollout = (logp.detach().reshape(-1).to(dtype) for logp in (train_logp, rollout_logp))
    valid = (mask.reshape(-1) != 0) & sequences.inside

    d = (train - rollout).double()
    finite = d.isfinite()
    if settings.nonfinite == "reject":
        measured = valid & finite
    else:
        measured = valid
    if settings.nonfinite == "neutral":
        d = torch.where(finite, d, 0.0)
    # A log-prob of -1e10 says no more than one of -1024, and would drown the other tokens of a sum.
    if settings.nonfinite == "propagate":
        d = torch.where(d.isinf(), d, d.clamp(-1024.0, 1024.0))
    else:
        d = d.clamp(-1024.0, 1024.0)
    d = torch.where(measured, d, 0.0)

    if settings.criteria:
        passed, survivors, keep = _decide(d, measured, sequences, settings)
        kept = valid & passed
    else:
        kept, survivors, keep = valid, measured, torch.ones_like(sequences.offsets[1:], dtype=torch.bool)
    if settings.rejects:
        if settings.nonfinite == "reject":
            all_finite = sequences.reduce(valid & ~finite) == 0
            keep = keep & all_finite
        kept = kept & sequences.spread(keep)

    weights: Tensor | None
    if settings.level is not None:
        ratio = _ratio(d, survivors, sequences, settings)
        weights = torch.where(measured, ratio, 0.0)
        if settings.nonfinite == "reject":
            weights = torch.where(sequences.spread(all_finite), weights, 0.0)
        if settings.rejected != "mask":
            weights = torch.where(kept, weights, 0.0)
        weights = weights.to(dtype).reshape(mask.shape)
    else:
        ratio, weights = torch.ones_like(d), None
        if settings.rejected != "mask":
            weights = (kept & measured).to(dtype).reshape(mask.shape)
    if settings.rejects and settings.rejected != "zero":
        mask = mask.masked_fill(~kept.reshape(mask.shape), 0)
    if settings.metrics:
        metrics = _metrics(d, ratio, valid, measured, finite, kept, keep, sequences, settings)
    else:
        metrics = {}
    return Correction(weights, mask, keep, metrics)


def _decide(d: Tensor, measured: Tensor, sequences: Sequences, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Run the criteria: tokens that pass, tokens that sums of sequences run over, and [S] sequences that pass."""
    passed, keep = torch.ones_like(measured), torch.ones_like(sequences.offsets[1:], dtype=torch.bool)
    for criterion in settings.criteria:
        if criterion.over == "token":
            fails = measured & ~_passes(criterion, _statistic(criterion, d, settings))
            if criterion.drop == "sequence":
                keep = keep & (sequences.reduce(fails) == 0)
            else:
                passed = passed & ~fails
    if settings.sums_over == "kept":
        survivors = measured & passed & sequences.spread(keep)
    else:
        survivors = measured
    for criterion in settings.criteria:
        if criterion.over == "sequence":
            n, x = sequences.reduce(survivors), _statistic(criterion, d, settings)
            if criterion.reduce == "min":
                value = sequences.reduce(torch.where(survivors, x, math.inf), "min", math.inf)
            elif criterion.reduce == "max":
                value = sequences.reduce(torch.where(survivors, x, -math.inf), "max", -math.inf)
            else:
                value = sequences.reduce(torch.where(survivors, x, 0.0))
            if criterion.reduce == "mean":
                value = value / n.clamp(min=1)
            keep = keep & (_passes(criterion, value) | (n == 0))
    return passed, survivors, keep


def _statistic(criterion: Criterion, d: Tensor, settings: Settings) -> Tensor:
    """The statistic of each token; of a ratio its logarithm."""
    if criterion.token_clamp is not None:
        d = d.clamp(-criterion.token_clamp, criterion.token_clamp)
    if criterion.stat == "k1":
        d = -d
    elif criterion.stat == "k2":
        d = 0.5 * d * d
    elif criterion.stat == "k3":
        d = d.clamp(-settings.clamp, settings.clamp)
        d = d.expm1() - d
    elif criterion.stat == "abs":
        d = d.abs()
    return d


def _passes(criterion: Criterion, x: Tensor) -> Tensor:
    """Test a statistic of tokens or sequences; of a ratio its logarithm."""
    if criterion.stat == "ratio":
        return _within(x, _log(criterion.lower), _log(criterion.upper))
    return _within(x, criterion.lower, criterion.upper)


def _within(x: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """lower <= x <= upper; NaN is not."""
    return (x >= (-math.inf if lower is None else lower)) & (x <= (math.inf if upper is None else upper))


def _log(bound: float | None) -> float | None:
    """The bound of a log-ratio from the bound of a ratio."""
    if bound is None:
        return None
    return math.log(bound) if bound > 0.0 else -math.inf


def _ratio(d: Tensor, survivors: Tensor, sequences: Sequences, settings: Settings) -> Tensor:
    """The bounded weight of each token, before any becomes 0."""
    if settings.token_clamp is not None:
        d = d.clamp(-settings.token_clamp, settings.token_clamp)
    if settings.level != "token":
        total = sequences.reduce(torch.where(survivors, d, 0.0))
        if settings.level == "geometric":
            total = total / sequences.reduce(survivors).clamp(min=1)
        d = sequences.spread(total)
    d = d.clamp(-settings.clamp, settings.clamp)
    ratio = d.exp()
    if settings.lower is not None or settings.upper is not None:
        if settings.outside == "zero":
            ratio = torch.where(_within(d, _log(settings.lower), _log(settings.upper)), ratio, 0.0)
        else:
            ratio = ratio.clamp(settings.lower, settings.upper)
    return ratio


def _metrics(
    d: Tensor,
    ratio: Tensor,
    valid: Tensor,
    measured: Tensor,
    finite: Tensor,
    kept: Tensor,
    keep: Tensor,
    sequences: Sequences,
    settings: Settings,
) -> dict[str, float]:
    """Ten numbers that say how far the two policies are apart, in one copy to the host; 0 where nothing counts."""
    n, n_valid = measured.sum(), valid.sum()
    tokens, of_sequences = sequences.reduce(measured), sequences.reduce(valid) > 0
    x = d.clamp(-settings.clamp, settings.clamp)
    gap = -sequences.reduce(d) / tokens.clamp(min=1)
    metrics = {
        "kl_rollout_train_k3": (x.expm1() - x).sum() / n.clamp(min=1),
        "ratio_mean": torch.where(measured, x.exp(), 0.0).sum() / n.clamp(min=1),
        "logratio_abs_max": pad(d.abs(), (0, 1)).amax(),
        "logratio_abs_mean": d.abs().clamp(max=1024.0).sum() / n.clamp(min=1),
        "chi2_train_rollout": (2.0 * x).expm1().sum() / n.clamp(min=1),
        "sequence_log_ppl_diff_mean": gap.sum() / (tokens > 0).sum().clamp(min=1),
        "tokens_kept_fraction": kept.sum() / n_valid.clamp(min=1),
        "sequences_kept_fraction": (keep & of_sequences).sum() / of_sequences.sum().clamp(min=1),
        "tokens_nonfinite": (valid & ~finite).sum(),
    }
    if settings.level is not None:
        weights = torch.where(measured, ratio, 0.0)
        metrics["weight_ess"] = weights.sum().square() / (n * weights.square().sum()).clamp(min=1e-300)
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def _check(train_logp: Tensor, rollout_logp: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Refuse what would give wrong numbers, from shapes and dtypes alone."""
    shape = train_logp.shape
    for name, x in (("rollout_logp", rollout_logp), ("mask", mask)):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)} like train_logp, got {list(x.shape)}")
    for name, x in (("train_logp", train_logp), ("rollout_logp", rollout_logp)):
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected floats, got {x.dtype}")
    if cu_seqlens is None:
        if len(shape) != 2:
            raise ValueError(f"train_logp: expected [B, T] without cu_seqlens, got {list(shape)}")
    elif len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
        raise ValueError(f"train_logp: expected [N] or [1, N] with cu_seqlens, got {list(shape)}")
    elif not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens: expected [S + 1] int32 or int64, got {type(cu_seqlens).__name__}")
    elif cu_seqlens.dim() != 1 or not cu_seqlens.numel() or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens: expected [S + 1] int32 or int64, got {got}")
