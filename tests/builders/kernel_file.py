"""Batches for rollout_corr/eject/kernel.py, the same question to the package, and what differs between two answers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import rollout_corr as rc
from builders.rounding import FORMULA, near
from rollout_corr.eject.kernel import Settings

# Every branch of the kernels, and bounds that cut the batches below.
ALL = Settings(0.8, 1.3, clamp=3.0, geometric_lower=0.98, geometric_upper=1.02, veto_lower=1e-4, veto_upper=1e3)
ZERO = Settings(0.8, 1.3, outside="zero", clamp=2.0, geometric_upper=1.02)
# Around a step of 128 tokens and a tile of 512; empty ones, also where a tile ends; more than one program decides.
LENGTHS = (7, 1, 128, 0, 376, 0, 0, 513, 3, 1300, 2, 0, *(1, 3) * 16)


class Given(NamedTuple):
    """Arguments of `correct`."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None


def batch_of(
    lengths=LENGTHS, seed=0, *, packed=True, dtype=torch.float32, mask=torch.bool, offsets=torch.int32, outside=5,
    bad=True,
) -> Given:  # fmt: skip
    """Make a batch: holes in the mask with garbage behind them, every fourth sequence off by 5 %, some of them vetoed.

    Args:
        lengths: Tokens of each sequence; rows of [B, T] have them at their end.
        seed: Of all numbers.
        packed: [N] with offsets, or [B, T].
        dtype: Of the log-probs.
        mask: Dtype of the mask; None: no mask, and so all tokens of [B, T] are valid.
        offsets: Dtype of cu_seqlens.
        outside: So many tokens before the first sequence and behind the last.
        bad: Some valid tokens are NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths, default=0) + 3
    before = outside if packed else 0
    starts = torch.tensor([0, *lengths]).cumsum(0) + before
    firsts = starts.tolist() if packed else [(s + 1) * width - n for s, n in enumerate(lengths)]
    places = [first + torch.arange(n) for first, n in zip(firsts, lengths, strict=False)]
    n = int(starts[-1]) + before if packed else width * len(lengths)
    rollout = -2.0 * torch.rand(n, generator=generator)
    train = rollout + 0.1 * torch.randn(n, generator=generator)
    valid = torch.full((n,), packed)
    for s, place in enumerate(places):
        train[place] += 0.05 * (s % 4 == 3)
        valid[place] = torch.rand(len(place), generator=generator) < (0.9 if s != 4 else 0.0)
        if len(place) > 2 and s % 5 == 1:
            train[place[1]] += 12.0 if s % 2 else -12.0
        if len(place) and s % 7 == 6 and bad:
            (train if s % 2 else rollout)[place[-1]] = (math.nan, math.inf, -math.inf)[s % 3]
    garbage = torch.tensor([math.nan, math.inf, -1e10])[torch.randint(3, (n,), generator=generator)]
    if mask is None:
        made = None
    else:
        train, rollout = torch.where(valid, train, garbage), torch.where(valid, rollout, garbage.flip(0))
        made = valid.to(mask) * (1 if mask == torch.bool else 2 if not mask.is_floating_point else 0.3)
    shape = (n,) if packed else (len(lengths), width)
    found = [None if x is None else x.reshape(shape) for x in (train.to(dtype), rollout.to(dtype), made)]
    return Given(*found, starts.to(offsets) if packed else None)


def spec_of(settings: Settings) -> rc.Spec:
    """Say the same to the package."""

    def over(label: str, reduce, **bounds) -> tuple[rc.Criterion, ...]:
        some = any(x is not None for x in bounds.values())
        return (rc.Criterion("ratio", over="sequence", reduce=reduce, label=label, **bounds),) if some else ()

    criteria = (
        *over("geometric", "mean", lower=settings.geometric_lower, upper=settings.geometric_upper),
        *over("least", "min", lower=settings.veto_lower),
        *over("most", "max", upper=settings.veto_upper),
    )
    weight = rc.Weight.token(lower=settings.lower, upper=settings.upper, outside=settings.outside)
    return rc.Spec(weight, criteria, clamp=settings.clamp)


def asked_of_the_package(given: Given, settings: Settings) -> rc.Correction:
    """Ask the package's definition the same."""
    batch = rc.Batch(mask=given.mask, cu_seqlens=given.cu_seqlens)
    return rc.correct(given.train, given.rollout, batch, spec=spec_of(settings), backend="torch")


def differing(found, wanted) -> list[str]:
    """Name what differs between two corrections: masks and keep by a bit, weights and metrics by more than rounding."""
    names = []
    if found.mask.dtype != wanted.mask.dtype or not found.mask.equal(wanted.mask):
        names.append("mask")
    if not found.keep.equal(wanted.keep):
        names.append("keep")
    one, other = found.weights, wanted.weights
    if one.shape != other.shape or one.flatten().tolist() != near(other.flatten().tolist(), torch.float32, FORMULA):
        names.append("weights")
    one, other = found.metrics(), wanted.metrics("dashboard") if isinstance(wanted, rc.Correction) else wanted.metrics()
    return names + [key for key in other if one[key] != near(other[key], torch.float32, size=max(1.0, abs(other[key])))]
