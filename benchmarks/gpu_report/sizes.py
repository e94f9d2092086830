"""Checks of sizes beyond what 16 and 31 bits can count, for `benchmarks.gpu_report.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks.cases.batches import Batch, Case, make
from benchmarks.cases.contenders import corrected, loss_of
from benchmarks.cases.operations import BOTH, PRODUCT, TOKEN
from benchmarks.gpu.device import Gpu
from benchmarks.gpu_report.compare import Broken, hold, same
from rollout_corr.specs.terms import MeanOf


def _loss(batch: Batch, of: MeanOf, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return value and gradient of a loss."""
    loss = loss_of(batch, BOTH, batch.new, rc.Mean(of), backend=backend)
    return loss.value.detach().double(), torch.autograd.grad(loss.value, batch.new)[0]


def many_sequences(where: Gpu) -> str:
    """More sequences than a second axis of a grid could hold."""
    sequences = 1000 if where.tiny else 1_000_000
    batch = make(Case("", 8 * sequences, sequences, skew=0.3), "cuda")
    for operation in (TOKEN, PRODUCT):
        out, expected = (corrected(batch, operation.spec, backend) for backend in ("auto", "torch"))
        hold(torch.equal(out.keep, expected.keep), f"{operation.name}: keep differs from the reference")
        hold(torch.equal(out.mask, expected.mask), f"{operation.name}: the mask differs from the reference")
        hold(torch.allclose(out.weights, expected.weights, rtol=1e-6, atol=0.0), f"{operation.name}: weights differ")
    # A loss that needs sums over sequences.
    (value, gradient), (expected_value, expected_gradient) = (
        _loss(batch, "sequence", backend) for backend in ("auto", "torch")
    )
    error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    # A NaN is not <= and is refused.
    hold(error <= 1e-5, f"the gradient of the loss differs from the reference by {error:.1e}")
    off = float((value - expected_value).abs())
    hold(off <= 1e-5, f"the loss is {float(value)!r}, the reference says {float(expected_value)!r}")
    return f"{sequences:,} sequences equal the reference, in correct and in policy_loss"


def many_tokens(where: Gpu) -> str:
    """More than 2^31 tokens: a block of sequences over and over, the last copy like the first."""
    copies, tokens = (5, 4096) if where.tiny else (2049, 1 << 20)
    batch = make(Case("", tokens, 256, logp=torch.bfloat16), "cuda")
    assert batch.cu_seqlens is not None
    total = copies * tokens
    # Taken and returned by policy_loss: new, old, advantages, mask; the gradient, and the gradient scaled.
    needed = total * (2 + 2 + 4 + 1 + 2 + 2) * 1.2
    if torch.cuda.mem_get_info()[0] < needed:
        raise Broken(f"not tried: {needed / 2**30:.0f} GiB are needed")
    starts = batch.cu_seqlens[:-1].long()
    offsets = (starts + torch.arange(copies, device="cuda")[:, None] * tokens).flatten()
    offsets = torch.cat([offsets, offsets.new_tensor([total])])
    parts = [slice(which * tokens, (which + 1) * tokens) for which in (0, copies // 2, copies - 1)]
    _many_corrected(batch, copies, offsets, parts)
    where.free()
    _many_in_a_loss(batch, copies, offsets, parts)
    return f"{total:,} tokens, every copy like the first, in correct and in policy_loss"


def _many_corrected(batch: Batch, copies: int, offsets: Tensor, parts: Sequence[slice]) -> None:
    one = corrected(batch, TOKEN.spec)
    old, rollout, mask = (x.repeat(copies) for x in (batch.old, batch.rollout, batch.valid))
    out = rc.correct(old, rollout, mask=mask, cu_seqlens=offsets, spec=TOKEN.spec)
    for part in parts:
        there = [out.weights[part], out.mask[part]]
        hold(same([one.weights, one.mask], there), f"the copy from {part.start} on has other bits")
    hold(torch.equal(one.keep.repeat(copies), out.keep), "keep differs between copies")
    a, b = one.metrics(), out.metrics()
    hold(b["tokens"] == copies * a["tokens"], f"{b['tokens']} tokens were counted, not {copies * a['tokens']}")
    hold(
        abs(a["logratio_abs_mean"] - b["logratio_abs_mean"]) <= 1e-5 * a["logratio_abs_mean"], "the mean of |D| differs"
    )


def _many_in_a_loss(batch: Batch, copies: int, offsets: Tensor, parts: Sequence[slice]) -> None:
    assert batch.new is not None and batch.advantages is not None
    value, gradient = _loss(batch, "sum")
    old, advantages, mask = (x.repeat(copies) for x in (batch.old, batch.advantages, batch.valid))
    new = batch.new.detach().repeat(copies).requires_grad_()
    large = Batch(old, old, mask, offsets, batch.lengths, new, advantages)
    sums, gradients = _loss(large, "sum")
    for part in parts:
        hold(same([gradient], [gradients[part]]), f"the gradient of the copy from {part.start} on has other bits")
    # A sum of terms of both signs, compared with the size of its terms.
    scale = float(batch.advantages[batch.valid].abs().sum())
    error = abs(float(sums) / copies - float(value)) / scale
    hold(error <= 1e-5, f"the loss is {float(sums)!r}, {copies} times {float(value)!r} was expected")
