"""Sizes beyond what 16 and 31 bits can count: checks of `benchmarks.gpu_report.checks`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import batches
from benchmarks.batches import Batch, Case
from benchmarks.device import Host
from benchmarks.gpu_report.compare import Broken, hold, same
from benchmarks.operations import PRODUCT, SURROGATE, TOKEN


def many_sequences(where: Host, sequences: int | None = None) -> str:
    """More sequences than a second axis of a grid could hold."""
    if sequences is None:
        sequences = 1_000_000 if where.name == "cuda" else 1000
    batch = batches.make(Case("", "", 8 * sequences, sequences, skew=0.3), where.name)
    for operation in (TOKEN, PRODUCT):
        out, expected = (
            rc.correct(
                batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend=b
            )
            for b in ("auto", "torch")
        )
        hold(torch.equal(out.keep, expected.keep), f"{operation.name}: verdicts differ from the reference")
        hold(torch.equal(out.mask, expected.mask), f"{operation.name}: the mask differs from the reference")
        hold(torch.allclose(out.weights, expected.weights, rtol=1e-6, atol=0.0), f"{operation.name}: weights differ")
    value, gradient = _mean_of_sequences(batch, "auto")
    expected_value, expected_gradient = _mean_of_sequences(batch, "torch")
    error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    # NaN is no error that is small.
    hold(error <= 1e-5, f"the gradient of the loss differs from the reference by {error:.1e}")
    hold(abs(value - expected_value) <= 1e-5, f"the loss is {value!r}, the reference says {expected_value!r}")
    return f"{sequences:,} sequences equal the reference, in correct and in policy_loss"


def _mean_of_sequences(batch: Batch, backend: str) -> tuple[float, Tensor]:
    """Value and gradient of a loss that needs sums over sequences."""
    loss = rc.policy_loss(
        batch.new,
        batch.advantages,
        batch.mask,
        old_logp=batch.old,
        cu_seqlens=batch.cu_seqlens,
        surrogate=SURROGATE,
        reduction="sequence_mean_token_mean",
        backend=backend,
    )
    return float(loss.value.detach()), torch.autograd.grad(loss.value, batch.new)[0]


def many_tokens(where: Host, copies: int | None = None, tokens: int | None = None) -> str:
    """More than 2^31 tokens: a block of sequences over and over, the last copy like the first."""
    on_gpu = where.name == "cuda"
    copies = (2049 if on_gpu else 5) if copies is None else copies
    tokens = (1 << 20 if on_gpu else 4096) if tokens is None else tokens
    batch = batches.make(Case("", "", tokens, 256, logp=torch.bfloat16), where.name)
    assert batch.cu_seqlens is not None and batch.mask is not None
    total = copies * tokens
    # What policy_loss takes and gives back: new, old, advantages, mask; the gradient, and the gradient scaled.
    needed = total * (2 + 2 + 4 + 1 + 2 + 2) * 1.2
    if on_gpu and torch.cuda.mem_get_info()[0] < needed:
        raise Broken(f"not tried: {needed / 2**30:.0f} GiB are needed")
    starts = batch.cu_seqlens[:-1].long()
    offsets = (starts + torch.arange(copies, device=where.name)[:, None] * tokens).flatten()
    offsets = torch.cat([offsets, offsets.new_tensor([total])])
    parts = [slice(which * tokens, (which + 1) * tokens) for which in (0, copies // 2, copies - 1)]
    _many_corrected(batch, copies, offsets, parts)
    where.free()
    _many_in_a_loss(batch, copies, offsets, parts)
    return f"{total:,} tokens, every copy like the first, in correct and in policy_loss"


def _many_corrected(batch: Batch, copies: int, offsets: Tensor, parts: Sequence[slice]) -> None:
    assert batch.mask is not None
    one = rc.correct(batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=TOKEN.spec)
    old, rollout, mask = (x.repeat(copies) for x in (batch.old, batch.rollout, batch.mask))
    out = rc.correct(old, rollout, mask, cu_seqlens=offsets, spec=TOKEN.spec)
    for part in parts:
        there = [out.weights[part], out.mask[part]]
        hold(same([one.weights, one.mask], there), f"the copy from {part.start} on has other bits")
    hold(torch.equal(one.keep.repeat(copies), out.keep), "verdicts differ between copies")
    a, b = one.metrics(), out.metrics()
    hold(b["tokens"] == copies * a["tokens"], f"{b['tokens']} tokens were counted, not {copies * a['tokens']}")
    hold(abs(a["d_abs_mean"] - b["d_abs_mean"]) <= 1e-5 * a["d_abs_mean"], "the mean of |D| differs")


def _many_in_a_loss(batch: Batch, copies: int, offsets: Tensor, parts: Sequence[slice]) -> None:
    assert batch.mask is not None and batch.cu_seqlens is not None

    def loss_of(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
        loss = rc.policy_loss(
            new, advantages, mask, old_logp=old, cu_seqlens=cu_seqlens, surrogate=SURROGATE, reduction="sum"
        )
        return [loss.value.detach().double(), torch.autograd.grad(loss.value, new)[0]]

    value, gradient = loss_of(batch.new, batch.old, batch.advantages, batch.mask, batch.cu_seqlens)
    new = batch.new.detach().repeat(copies).requires_grad_()
    old, advantages, mask = (x.repeat(copies) for x in (batch.old, batch.advantages, batch.mask))
    sums, gradients = loss_of(new, old, advantages, mask, offsets)
    for part in parts:
        hold(same([gradient], [gradients[part]]), f"the gradient of the copy from {part.start} on has other bits")
    # A sum of terms of both signs: beside the size of its terms.
    scale = float(batch.advantages[batch.valid].abs().sum())
    error = abs(float(sums) / copies - float(value)) / scale
    hold(error <= 1e-5, f"the loss is {float(sums)!r}, {copies} times {float(value)!r} was expected")
