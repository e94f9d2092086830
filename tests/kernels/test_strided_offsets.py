"""Offsets of sequences and turns that are a column of a table: kernels have their address, and no stride."""

from __future__ import annotations

import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences
from builders.kernel_cases import INTERPRETED, assert_like_reference, unchecked
from builders.rounding import assert_near
from builders.turns import loss_of, offsets_of, random_turns

pytestmark = INTERPRETED

SPEC = rc.Spec(
    rc.Weight.product(upper=2.0), (rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.9, upper=1.1),)
)


def column(offsets: torch.Tensor) -> torch.Tensor:
    return torch.stack([offsets, offsets // 3], 1)[:, 0]


def test_a_correction(device):
    batch = random_sequences(0, (50, 1, 70, 0, 400))
    laid = lay_out(batch, "packed_gaps", torch.float32)
    given = {"turns": column(offsets_of(laid, random_turns(batch, 0)))}
    with unchecked():
        reference = laid.correct(SPEC, **given)
        laid = laid.to(device)
        laid.cu_seqlens = column(laid.cu_seqlens)
        out = laid.correct(SPEC, backend="triton", **given)
    assert_like_reference(out, reference)


def test_a_loss(device):
    """Forward, and backward, where each turn has a factor of its own."""
    batch = random_sequences(0, (50, 1, 70, 0, 400), scale=0.1, advantages="token")
    laid = lay_out(batch, "packed_gaps", torch.float32).to(device)
    given = {"surrogate": rc.GSPO(over="turn"), "mean": rc.Mean("sequence")}
    given["turns"] = column(offsets_of(laid, random_turns(batch, 0)))
    wanted, wanted_slope = loss_of(laid, "torch", **given)
    laid.cu_seqlens = column(laid.cu_seqlens)
    found, slope = loss_of(laid, "triton", **given)
    assert_near(found.value, wanted.value, torch.float32)
    assert_near(slope, wanted_slope, torch.float32)
