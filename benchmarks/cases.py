"""What is measured: sizes, inputs, workloads, and the bytes that each cannot do without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_corr import Criterion, Spec, Weight

# Rows x width. The last one is the largest that a shipped recipe of verl uses, and the one that hurts: a step's worth
# of 2048 answers of up to 8192 tokens. The first fits into a second-level cache, the third has few long rows.
SHAPES = ((64, 1024), (256, 2048), (64, 16384), (1024, 8192), (2048, 8192))
# The longest sequence as a part of the width, where that is not 1: 1024 x 8192 is verl's driver, a quarter full.
LONGEST = {(1024, 8192): 0.4}
LAYOUTS = ("padded", "packed")


@dataclass(frozen=True)
class Workload:
    """A correction, in our words and in verl's.

    Args:
        name: What it is called in tables.
        spec: What `rollout_corr.correct` is given.
        verl: What verl's `compute_rollout_correction_and_rejection_mask` is given.
        preset: The recipe of the same name as verl's classmethod, for the row with verl's own metrics.
    """

    name: str
    spec: Spec
    verl: Mapping[str, Any]
    preset: str


METRICS_ONLY = Workload("metrics only", Spec(), {"rollout_is": None, "rollout_rs": None}, "verl.disabled")

# verl compares -D with [log 0.999, log 1.001], so the ratios that it keeps lie in [1/1.001, 1/0.999].
GEOMETRIC = Criterion(
    "ratio", over="sequence", reduce="mean", lower=1.0 / 1.001, upper=1.0 / 0.999, label="seq_mean_k1"
)
WEIGHTS_AND_REJECTION = Workload(
    "weights + rejection",
    Spec(weight=Weight("token", upper=2.0), criteria=(GEOMETRIC,)),
    {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
    },
    "verl.decoupled_geo_rs_token_tis",
)
WORKLOADS = (METRICS_ONLY, WEIGHTS_AND_REJECTION)


@dataclass
class Inputs:
    """One batch in both layouts.

    Attributes:
        train: [B, T] fp32.
        rollout: [B, T] fp32.
        mask: [B, T] int64, right-padded, as verl's driver has it.
        lengths: [B] int64.
        packed_train: [N] fp32, the valid tokens alone.
        packed_rollout: [N] fp32.
        cu_seqlens: [B + 1] int64.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    lengths: Tensor
    packed_train: Tensor
    packed_rollout: Tensor
    cu_seqlens: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.train.shape[0], self.train.shape[1]

    @property
    def tokens(self) -> int:
        return self.packed_train.numel()


def make_inputs(rows: int, width: int, seed: int = 0) -> Inputs:
    """Lengths uniform from 10 % to 100 % of the width, or to what LONGEST says.

    D has a standard deviation of 0.02, and of 1 at one token in 1000: enough for weights to meet their bound and for
    short sequences to be rejected, so that no way through the code stays untouched.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    longest = LONGEST.get((rows, width), 1.0)
    lengths = (width * (0.1 + (longest - 0.1) * uniform(rows))).long().clamp(1, width)
    valid = torch.arange(width) < lengths[:, None]
    rollout = uniform(rows, width).clamp(min=1e-4).log()
    scale = torch.where(uniform(rows, width) < 1e-3, 1.0, 0.02)
    train = (rollout + scale * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    train, rollout = torch.where(valid, train, 0.0), torch.where(valid, rollout, 0.0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Inputs(train, rollout, valid.long(), lengths, train[valid], rollout[valid], offsets)


def required_bytes(inputs: Inputs, layout: str, workload: Workload) -> int:
    """Each input read once, each output written once; what is smaller than one number a token is left out.

    Padded: two fp32 log-probs and an int64 mask, and if there is anything to write, an fp32 weight and an int64 mask.
    Packed: two log-probs at the tokens, and an fp32 weight and a bool mask.
    """
    slots = inputs.train.numel() if layout == "padded" else inputs.tokens
    mask = 8 if layout == "padded" else 0
    written = 0
    if workload.spec.weight is not None:
        written += 4
    if workload.spec.criteria:
        written += 8 if layout == "padded" else 1
    return slots * (4 + 4 + mask + written)


def log_bounds(criterion: Criterion) -> tuple[float, float]:
    """A ratio criterion's bounds in log space."""
    low = -math.inf if not criterion.lower else math.log(criterion.lower)
    return low, math.inf if criterion.upper is None else math.log(criterion.upper)
