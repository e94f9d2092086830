"""A policy loss for reinforcement learning of language models, in plain torch.

x = new_logp - base_logp is the log-ratio of a token, r = exp(x), A the advantage. The loss of a token is a surrogate of
r and A, times a weight that comes from outside, plus a penalty for leaving a reference policy; then all become one
number. What does not count is replaced before anything is computed from it, so no NaN and no gradient comes from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Settings:
    """Which loss."""

    surrogate: str = "ppo"  # or "gspo", "score" (CISPO, truncated policy gradient), "reinforce", "sapo", "gradient"
    low: float = 0.2  # PPO, GSPO: r is clipped to 1 - low
    high: float = 0.2  # and 1 + high
    dual: float | None = None  # where A < 0 the loss is at most -dual * A
    delta: float | None = None  # r is at most delta before anything else
    through: str = "sequence"  # GSPO: the gradient goes through the mean of the "sequence", or the "token" alone
    lower: float | None = None  # score: bounds of the constant r; None: open
    upper: float | None = None
    outside: str = "clamp"  # score: r beyond a bound becomes the bound, or "zero"
    positive: float = 1.0  # SAPO: the temperature where A > 0
    negative: float = 1.05  # and elsewhere
    clamp: float = 20.0  # x is clamped to +-clamp before exp
    weights: str = "multiply"  # weights multiply the loss, or "replace" the ratio of score
    kl: str | None = None  # a penalty of k = new_logp - ref_logp: "k1" k, "k2" k^2 / 2, "k3" e^-k - 1 + k, "abs" |k|
    kl_coef: float = 0.0
    kl_clamp: float = 20.0  # k3: k is clamped to +-kl_clamp
    kl_most: float | None = None  # k3 is at most this
    kl_gradient: str | None = None  # "k2": it has the gradient of k2, whose mean is the gradient of the mean of k3
    kl_factor: str | None = None  # multiplied by the differentiable "ratio", or by the "weights"
    mean: str = "token"  # over tokens; over sequences of their means, "sequence", or sums, "sequence_sum"; or the "sum"
    over: str = "original"  # counted are all valid tokens, or those "kept" in training; of sequences also empty "rows"
    length: float | None = None  # a sum over a sequence is divided by this too
    nonfinite: str = "reject"  # NaN or infinity leaves its token out; "neutral": there x = 0; "propagate"


class Sequences:
    """Which tokens of a batch, laid out in one dimension, belong together."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None) -> None:
        n, device = like.numel(), like.device
        if cu_seqlens is None:
            self.offsets = torch.arange(like.shape[0] + 1, device=device) * like.shape[1]
        else:
            # Wrong offsets give wrong numbers, but no access out of bounds.
            self.offsets = cu_seqlens.to(device).long().clamp(0, n).cummax(0).values
        self.count = self.offsets.numel() - 1
        # Sequence s is place s + 1; 0 and S + 1 are the tokens before and behind all of them.
        self.place = torch.searchsorted(self.offsets, torch.arange(n, device=device), right=True)
        self.inside = (self.place > 0) & (self.place <= self.count)

    def sum(self, x: Tensor) -> Tensor:
        """[N] to [S]: the float64 sum of each sequence, in a fixed order."""
        return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True, initial=0.0)

    def spread(self, x: Tensor) -> Tensor:
        """[S] to [N]: the value of a sequence at each of its tokens."""
        return pad(x, (1, 1))[self.place]


def policy_loss(
    new_logp: Tensor,
    base_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    weights: Tensor | None = None,
    train_mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    total: Tensor | float | None = None,
    settings: Settings = Settings(),
) -> Tensor:
    """The loss of a batch, 0-d float32 (float64 of float64), differentiable in new_logp.

    Args:
        new_logp: By the policy that trains: [B, T], or packed [N] or [1, N]; any float dtype.
        base_logp: By the policy that it is compared with, of the same shape; None: new_logp itself, without a gradient.
        advantages: Of the same shape, or one a sequence, [S] or [S, 1].
        mask: Non-zero at generated tokens, of the same shape and any dtype; None: all are.
        cu_seqlens: [S + 1] int32 or int64, where packed sequences begin and end. None: each row of [B, T] is one.
        weights: Factors of the loss, of the same shape; None: 1.
        train_mask: Non-zero at tokens that train, where a correction has left some out; None: all of the mask.
        ref_logp: By the reference policy, of the same shape, for the KL.
        total: What the sum is divided by in place of the tokens or sequences of this batch, counted over a whole step.
        settings: Which loss.
    """
    sequences = Sequences(new_logp, cu_seqlens)
    logps = [logp for logp in (new_logp, base_logp, ref_logp) if logp is not None]
    dtype = torch.float64 if any(logp.dtype == torch.float64 for logp in logps) else torch.float32

    def flat(x: Tensor) -> Tensor:
        if x.shape != new_logp.shape:
            raise ValueError(f"expected shape {list(new_logp.shape)} like new_logp, got {list(x.shape)}")
        return x.reshape(-1).to(dtype)

    if advantages.shape == new_logp.shape:
        advantages = flat(advantages.detach())
    else:
        advantages = sequences.spread(advantages.detach().reshape(sequences.count).to(dtype))
    new = flat(new_logp)
    base = new.detach() if base_logp is None else flat(base_logp.detach())
    valid = sequences.inside
    if mask is not None:
        valid = valid & (mask.detach().reshape(-1) != 0)

    # Which tokens train. Those with NaN or infinity in what they need do not.
    if settings.nonfinite == "neutral":
        base = torch.where((new - base).isfinite(), base, new).detach()
    trains = valid
    if train_mask is not None:
        trains = trains & (train_mask.detach().reshape(-1) != 0)
    if weights is not None:
        weights = flat(weights.detach())
    if settings.kl is not None:
        if ref_logp is None:
            raise ValueError("ref_logp: expected log-probs for the KL, got None")
        ref = flat(ref_logp.detach())
    if settings.nonfinite != "propagate":
        trains = trains & (new - base).isfinite() & advantages.isfinite()
        if weights is not None:
            trains = trains & weights.isfinite()
        if settings.kl is not None:
            trains = trains & (new - ref).isfinite()
    new, base, advantages = (torch.where(trains, x, 0.0) for x in (new, base, advantages))

    # A log-prob of -1e4 says no more than one of -1024, and would drown the other tokens of a sum.
    x = (new - base).clamp(-1024.0, 1024.0)
    loss = _surrogate(new, x, advantages, trains, sequences, weights is not None, settings)
    if weights is not None:
        weights = torch.where(trains, weights, 0.0)
        loss = loss * weights
    if settings.kl is not None:
        penalty = settings.kl_coef * _kl((new - torch.where(trains, ref, 0.0)).clamp(-1024.0, 1024.0), settings)
        if settings.kl_factor == "ratio":
            penalty = penalty * x.clamp(-settings.clamp, settings.clamp).exp()
        if settings.kl_factor == "weights" and weights is not None:
            penalty = penalty * weights
        loss = loss + penalty
    return _mean(torch.where(trains, loss, 0.0), valid, trains, sequences, total, settings).to(dtype)


def _surrogate(
    new: Tensor, x: Tensor, advantages: Tensor, trains: Tensor, sequences: Sequences, weighted: bool, settings: Settings
) -> Tensor:
    """The loss of each token before weights."""
    if settings.surrogate == "gradient":
        return -advantages * new
    if settings.surrogate == "gspo":
        mean = sequences.sum(x) / sequences.sum(trains).clamp(min=1)
        mean = sequences.spread(mean).to(x.dtype)
        if settings.through == "token":
            mean = mean.detach() + (x - x.detach())
        x = mean
    x = x.clamp(-settings.clamp, settings.clamp)
    ratio = x.exp()
    if settings.surrogate == "score":
        x, ratio = x.detach(), ratio.detach()
        if settings.weights == "replace" and weighted:
            ratio = torch.ones_like(ratio)
        if settings.lower is not None or settings.upper is not None:
            if settings.outside == "zero":
                inside = (x >= _log(settings.lower, -math.inf)) & (x <= _log(settings.upper, math.inf))
                ratio = torch.where(inside, ratio, 0.0)
            else:
                ratio = ratio.clamp(settings.lower, settings.upper)
        return -ratio * advantages * new
    if settings.surrogate == "reinforce":
        return -ratio * advantages
    if settings.surrogate == "sapo":
        tau = torch.where(advantages > 0, settings.positive, torch.full_like(x, settings.negative))
        return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    clipped = ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if settings.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual * advantages), loss)
    return loss


def _log(bound: float | None, otherwise: float) -> float:
    """The bound of a log-ratio from the bound of a ratio; None is open."""
    if bound is None:
        return otherwise
    return math.log(bound) if bound > 0.0 else -math.inf


def _kl(k: Tensor, settings: Settings) -> Tensor:
    """The penalty of each token."""
    value = k
    if settings.kl == "k2":
        value = 0.5 * k * k
    if settings.kl == "k3":
        limited = k.clamp(-settings.kl_clamp, settings.kl_clamp)
        value = (-limited).expm1() + limited
        if settings.kl_most is not None:
            value = value.clamp(max=settings.kl_most)
    if settings.kl == "abs":
        value = k.abs()
    if settings.kl_gradient == "k2":
        straight = 0.5 * k * k
        value = value.detach() + (straight - straight.detach())
    return value


def _mean(
    loss: Tensor, valid: Tensor, trains: Tensor, sequences: Sequences, total: Tensor | float | None, settings: Settings
) -> Tensor:
    """One number from the losses of tokens, float64; 0 where there is nothing to count."""
    counted = valid
    if settings.over == "kept":
        counted = trains
    if settings.mean == "sequence":
        loss = loss / sequences.spread(sequences.sum(counted)).clamp(min=1).to(loss.dtype)
    value = loss.sum(dtype=torch.float64)
    if settings.length is not None:
        value = value / settings.length
    if settings.mean == "sum":
        return value
    if total is not None:
        return value / total
    if settings.over == "rows":
        return value / max(sequences.count, 1)
    if settings.mean == "token":
        return value / counted.sum().clamp(min=1)
    return value / (sequences.sum(counted) > 0).sum().clamp(min=1)
