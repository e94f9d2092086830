"""Checks that must hold on a GPU beyond the tests: `python -m benchmarks.gpu checks NAME ... --json FILE`.

Each check raises `Broken`, or returns a sentence about what it saw. The file is written after every check.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import machine
from benchmarks.cases import operations
from benchmarks.cases.batches import CASES, Batch, Case, make
from benchmarks.cases.contenders import corrected, loss_of, ours
from benchmarks.cases.operations import BOTH, METRICS, PRODUCT, SURROGATE, TOKEN, XTUNER
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.measure import KEPT_LINES, first_line


class Broken(Exception):
    """A check found that something does not hold."""


def hold(so: bool, otherwise: str) -> None:
    """Raise Broken unless a condition is true."""
    if not so:
        raise Broken(otherwise)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Compare bit by bit, so that a NaN equals the same NaN."""

    def bits(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).view(torch.uint8)

    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


# --- the checks -------------------------------------------------------------------------------------------------------


def compiles(where: Gpu) -> str:
    """Under torch.compile(fullgraph=True) the bits are those of a call."""

    def step(
        new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        out = rc.correct(old, rollout, mask=mask, cu_seqlens=offsets, spec=operations.TOKEN_SPEC)
        loss = rc.policy_loss(
            new,
            advantages,
            loss=rc.Loss(SURROGATE),
            mask=mask,
            cu_seqlens=offsets,
            old_logp=old,
            correction=rc.Factors(weights=out.weights, mask=out.mask),
        )
        return out.weights, out.mask, out.keep, out.statistics.sums, loss.value, loss.statistics.sums

    compiled = torch.compile(step, fullgraph=True)
    for name in ("32k in 256", "1M"):
        batch = make(CASES[name].tiny() if where.tiny else CASES[name], "cuda")
        given = (batch.new, batch.old, batch.rollout, batch.advantages, batch.mask, batch.cu_seqlens)
        found = []
        for call in (step, compiled):
            out = call(*given)
            found.append([*(x.detach() for x in out), *torch.autograd.grad(out[4], batch.new)])
        hold(same(*found), f"{name}: the compiled step gave other bits")
    return "a step of correct and policy_loss, forward and backward, no graph break, bit by bit"


def sanitized(where: Gpu) -> str:
    """Every kind of kernel once, on small batches, aligned and not: for compute-sanitizer to watch."""
    seen = 0
    for case, operation in operations.planned(tiny=True):
        if operation in (METRICS, TOKEN, PRODUCT, BOTH, XTUNER):
            ours(make(case, "cuda"), operation)[1]()
            seen += 1
    batch = make(operations.CASES["32k in 256"].tiny(), "cuda")
    assert batch.cu_seqlens is not None
    # No address is a multiple of 16 bytes.
    shifted = [torch.cat([x[:1], x])[1:] for x in (batch.old, batch.rollout, batch.valid)]
    # Offsets that a CPU refuses. On a device they are not checked, and the numbers are wrong.
    garbage = torch.tensor([7, -5, 1 << 30, 3, 3, 900, 0, -(1 << 30)], dtype=torch.int32, device="cuda")
    layouts = [batch.cu_seqlens, garbage, garbage.long() << 20]
    for offsets in layouts:
        for operation in (TOKEN, PRODUCT):
            rc.correct(*shifted[:2], mask=shifted[2], cu_seqlens=offsets, spec=operation.spec).metrics()
    where.synchronize()
    return f"{seen} calls of the plan, {2 * len(layouts)} with other offsets"


# --- sizes beyond what 31 bits can count


def _loss(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return value and gradient of a loss that sums over tokens."""
    loss = loss_of(batch, BOTH, batch.new, rc.Mean("sum"))
    return loss.value.detach().double(), torch.autograd.grad(loss.value, batch.new)[0]


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
    value, gradient = _loss(batch)
    old, advantages, mask = (x.repeat(copies) for x in (batch.old, batch.advantages, batch.valid))
    new = batch.new.detach().repeat(copies).requires_grad_()
    large = Batch(old, old, mask, offsets, batch.lengths, new, advantages)
    sums, gradients = _loss(large)
    for part in parts:
        hold(same([gradient], [gradients[part]]), f"the gradient of the copy from {part.start} on has other bits")
    # A sum of terms of both signs, compared with the size of its terms.
    scale = float(batch.advantages[batch.valid].abs().sum())
    error = abs(float(sums) / copies - float(value)) / scale
    hold(error <= 1e-5, f"the loss is {float(sums)!r}, {copies} times {float(value)!r} was expected")


# --- running them -----------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Gpu], str]] = {
    "compiles": compiles,
    "many_tokens": many_tokens,
    "sanitized": sanitized,
}


def run(where: Gpu, options: argparse.Namespace) -> int:
    """Run checks; return the exit status, 1 if one does not hold."""
    found = dict[str, dict[str, Any]]()

    def save() -> None:
        if options.json is not None:
            machine.write(options.json, found)

    for name in options.names or CHECKS:
        check = CHECKS[name]
        answer: dict[str, Any] = {"what": (check.__doc__ or "").splitlines()[0], "held": None, "said": "under way"}
        found[name] = answer
        save()
        try:
            answer |= {"said": check(where), "held": True}
        except Broken as problem:
            answer |= {"said": str(problem), "held": False}
        except Exception as problem:  # noqa: BLE001  (said below)
            # A check that fails in whatever way must not lose those behind it: it does not hold, is in the report with
            # its message, is printed with its traceback, and the exit status tells.
            traceback.print_exc()
            end = traceback.format_exc().splitlines()[-KEPT_LINES:]
            answer |= {"said": first_line(problem), "held": False, "traceback": end}
        save()
        print(f"{name}: {'holds' if answer['held'] else 'BROKEN'}: {answer['said']}", flush=True)
        where.free()
    return 0 if all(one["held"] for one in found.values()) else 1
