"""Healthy batches, and batches of garbage, for what has to stay silent and what has to speak."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Of `_surprise`: the mean of (1 - p)^2, over 10^7 tokens.
UNSURE_SQUARED = 0.2177
# Standard deviation of the logarithm of a sequence's mismatch.
SPREAD = 0.3


class Healthy(NamedTuple):
    """A packed batch whose tokens were sampled from the rollout log-probs."""

    train_logp: torch.Tensor
    rollout_logp: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    lengths: torch.Tensor


def _surprise(n, generator):
    """Minus the log-probs of a language model's tokens: most are nearly certain, the rest spread over many nats."""
    return (torch.empty(n).exponential_(generator=generator) ** 3 * 0.3).clamp(1e-6, 18.0)


def healthy(seed, sequences=32, median=500, k3=1e-3):
    """Make a batch of lognormal lengths, 8 to 32,768, with E[exp(D)] = 1 at every token and an expected k3.

    D is normal with the mean -s^2 / 2. Certain tokens agree, s is proportional to 1 - p; sequences differ, as those of
    older weights do; and a token in a hundred is three times as far off, so that tails are heavier than a normal's.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (median * torch.randn(sequences, generator=generator).mul(0.8).exp()).clamp(8, 32_768).long()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    n = int(offsets[-1])
    rollout = -_surprise(n, generator)
    each = torch.randn(sequences, generator=generator).mul(SPREAD).exp().repeat_interleave(lengths)
    rare = torch.where(torch.rand(n, generator=generator) < 0.01, 3.0, 1.0)
    mean_square = UNSURE_SQUARED * math.exp(2.0 * SPREAD**2) * (1.0 + 0.01 * 8.0)
    s = math.sqrt(2.0 * k3 / mean_square) * -rollout.expm1() * each * rare
    train = rollout + s * torch.randn(n, generator=generator) - 0.5 * s * s
    # A fifth of a sequence is its prompt.
    position = torch.arange(n) - offsets[:-1].repeat_interleave(lengths)
    mask = position >= (lengths // 5).repeat_interleave(lengths)
    return Healthy(train.clamp(max=0.0), rollout, mask, offsets, lengths)


def same_lengths(length, sequences, k3):
    """Make train and rollout log-probs, [sequences, length], as `healthy` does, of one mismatch."""
    generator = torch.Generator().manual_seed(length)
    rollout = -_surprise(sequences * length, generator)
    s = math.sqrt(2.0 * k3 / UNSURE_SQUARED) * -rollout.expm1()
    train = rollout + s * torch.randn(rollout.shape, generator=generator) - 0.5 * s * s
    return [x.view(sequences, length) for x in (train.clamp(max=0.0), rollout)]


def at_random(seed):
    """Make a healthy batch of random shape: median lengths of 8 to 8192, k3 of 1e-5 to 5e-3, both log-uniform."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    length, mismatch, count = torch.rand(3, generator=generator).tolist()
    median = 8.0 * 1024.0**length
    sequences = int(4 + 60 * count) if median < 2000 else int(4 + 12 * count)
    return healthy(seed, sequences, median, 1e-5 * 500.0**mismatch)
