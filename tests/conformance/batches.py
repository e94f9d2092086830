"""Random hard batches: padded log-probs of four policies, advantages and a mask, decided by kind and seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

# Kinds whose numbers are all finite where the mask is set. What is "aimed" is made for a row: see aims.py.
FINITE = (
    "mild",
    "heavy",
    "ties",
    "holes",
    "empty_rows",
    "one_token",
    "all_rejected",
    "all_masked",
    "long",
    "nan_behind_mask",
    "spread",
    "aimed",
)
KINDS = (*FINITE, "infinite", "nan_in_front", "bf16")


def without(*left_out: str) -> tuple[str, ...]:
    """Every kind but some."""
    return tuple(kind for kind in KINDS if kind not in left_out)


# For frameworks that multiply by their mask, so that what stands behind it has to be finite.
PADDED = without("nan_behind_mask")


@dataclass(frozen=True)
class Batch:
    """One batch, right-padded.

    Attributes:
        kind: One of KINDS.
        new: [B, T] log-probs of the policy being trained; old, rollout, ref: those of the others.
        advantages: [B], one a sequence.
        mask: [B, T] bool.
        group_size: Consecutive rows of one prompt; divides B.
    """

    kind: str
    seed: int
    new: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    group_size: int = 2

    @property
    def finite(self) -> bool:
        """Tell whether every number in front of the mask is finite and in full precision."""
        return self.kind in FINITE

    @property
    def token_advantages(self) -> Tensor:
        """[B, T]: each row's advantage at its tokens, 0 elsewhere."""
        return self.advantages[:, None].where(self.mask, 0.0)

    @property
    def lengths(self) -> list[int]:
        """The response of each row: up to its last valid token, and one token where there is none."""
        return (self.mask * torch.arange(1, self.mask.shape[1] + 1)).amax(1).clamp(min=1).tolist()

    def samples(self, x: Tensor) -> list[Tensor]:
        """Cut the rows of a padded tensor to their responses."""
        return [row[:n] for row, n in zip(x, self.lengths, strict=True)]

    def trains(self, **other: Tensor) -> Batch:
        """Copy the batch with log-probs that take a gradient."""
        return replace(self, new=self.new.detach().clone().requires_grad_(), **other)


def batch(kind: str, seed: int, shape: tuple[int, int] | None = None) -> Batch:
    """Make a batch of some shape. Odd seeds are in float32 and even ones in float64, but for bf16."""
    rng = Random(f"{kind}-{seed}")
    made = torch.Generator().manual_seed(rng.getrandbits(32))
    dtype = torch.bfloat16 if kind == "bf16" else (torch.float64, torch.float32)[seed % 2]
    rows, width = shape or ((2, 700) if kind == "long" else rng.choice(((4, 9), (6, 5), (2, 17), (8, 3), (2, 1))))
    lengths = [rng.randint(1, width) for _ in range(rows)]
    lengths[0] = width
    if kind == "one_token":
        lengths = [1] * rows
    if kind == "empty_rows":
        lengths[1:] = [0 if rng.random() < 0.5 else n for n in lengths[1:]]
        lengths[-1] = 0
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    if kind in ("holes", "heavy"):
        mask &= torch.rand(rows, width, generator=made) < 0.8
        mask[:, 0] = True
    if kind == "all_masked":
        mask = torch.zeros_like(mask)

    scale = {"heavy": 1.5, "all_rejected": 8.0, "long": 0.02}.get(kind, rng.choice((0.003, 0.05, 0.3)))

    def noise(size: float) -> Tensor:
        return size * torch.randn(rows, width, generator=made, dtype=torch.float64)

    rollout = -torch.empty(rows, width, dtype=torch.float64).exponential_(1.0, generator=made)
    shift = -scale if kind == "all_rejected" else 0.0
    old = rollout + noise(scale) + shift
    new, ref = old + noise(min(scale, 0.3)), old + noise(0.1)
    if kind == "spread":
        # Ratios that lie densely around all the bounds that frameworks have; those of each row are another size.
        def even(size: float | Tensor) -> Tensor:
            return size * (2 * torch.rand(rows, width, generator=made, dtype=torch.float64) - 1)

        rollout = rollout - 4.0
        old = rollout + even(torch.tensor((0.02, 0.3, 1.0, 2.5), dtype=torch.float64)[torch.arange(rows) % 4][:, None])
        new = old + even(0.45) * torch.tensor((1.0, 1.0, 4.0))[torch.arange(width) % 3]
        ref = new + even(2.2)
    policies = [new, old, rollout, ref]
    if kind == "ties":
        # Steps of 1/8, so that values, ratios and means are equal to each other and often 0.
        policies = [(x * 8).round() / 8 for x in policies]
    policies = [x.clamp(max=-1e-3 if kind != "ties" else 0.0).to(dtype) for x in policies]
    if kind in ("infinite", "nan_in_front"):
        _spoil(policies[1:3], mask, rng, (math.inf, -math.inf) if kind == "infinite" else (math.nan,))
    behind = rng.choice((math.nan, math.inf, -9999.0)) if kind == "nan_behind_mask" else 0.0
    policies = [x.where(mask, behind) for x in policies]
    advantages = torch.randn(rows, generator=made, dtype=torch.float64).to(torch.float32 if kind == "bf16" else dtype)
    if kind == "ties":
        advantages = advantages.round()
    return Batch(kind, seed, *policies, advantages, mask)


def _spoil(policies: list[Tensor], mask: Tensor, rng: Random, values: tuple[float, ...]) -> None:
    """Put a value at one valid token of some rows."""
    for row in range(mask.shape[0]):
        valid = mask[row].nonzero().flatten().tolist()
        if valid and (row == 0 or rng.random() < 0.4):
            rng.choice(policies)[row, rng.choice(valid)] = rng.choice(values)
