"""Example batches, for tests, benchmarks, the demo and users."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class ExampleBatch(NamedTuple):
    """A packed rollout batch of N tokens in S sequences.

    Attributes:
        train_logp: [N] float32.
        rollout_logp: [N] float32, rounded to bfloat16 as an engine in low precision returns them.
        mask: [N] bool, False at prompts.
        cu_seqlens: [S + 1] int64.
        lengths: [S] int64, prompt and response.
    """

    train_logp: Tensor
    rollout_logp: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    lengths: Tensor


def example_batch(
    sequences: int = 256,
    median_length: int = 500,
    mismatch: float = 0.05,
    catastrophic: float = 1e-4,
    seed: int = 0,
) -> ExampleBatch:
    """Make a realistic batch: skewed lengths, agreement on likely tokens, mismatch on unlikely ones, a few outliers.

    Args:
        sequences: Number of samples.
        median_length: Median of the lognormal lengths in tokens, prompt included; at most eight times as long.
        mismatch: Standard deviation of D for a token of probability 0; the error shrinks with 1 - p.
        catastrophic: Fraction of tokens to which the trainer gives a probability near 0.
        seed: Seed of the batch; the global generator is left alone.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    where: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    scale = torch.randn(sequences, generator=generator, **where).mul(0.7).exp()
    lengths = (median_length * scale).clamp(8, 8 * median_length).long()
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    n = int(cu_seqlens[-1])
    # Most tokens of a language model are nearly certain; the rest are spread over many nats.
    surprise = torch.empty(n, **where).exponential_(generator=generator) ** 3 * 0.3
    train = -surprise.clamp(1e-6, 18.0)
    unsure = 1.0 - train.exp()
    rollout = train + mismatch * unsure * torch.randn(n, generator=generator, **where)
    rollout = rollout.clamp(max=0.0).bfloat16().float().where(unsure > 0.01, rollout.clamp(max=0.0))
    disasters = torch.rand(n, generator=generator, **where) < catastrophic
    train = torch.where(disasters, train - 12.0, train)
    position = torch.arange(n, device="cpu") - cu_seqlens[:-1].repeat_interleave(lengths)
    mask = position >= (lengths // 5).repeat_interleave(lengths)
    return ExampleBatch(train, rollout, mask, cu_seqlens, lengths)


def pad(x: Tensor, lengths: Tensor, fill: float = 0.0) -> Tensor:
    """Turn packed [N] values into [S, longest] rows, right-padded with `fill`; `lengths` is [S] int64."""
    longest = int(lengths.max()) if lengths.numel() else 0
    inside = torch.arange(longest, device=x.device) < lengths[:, None]
    out = torch.full((lengths.shape[0], longest), fill, dtype=torch.float32, device=x.device).to(x.dtype)
    return out.masked_scatter_(inside, x)
