"""The kernels of the policy loss as operators of torch, forward and backward; see fused.py.

On the CPU too they are the kernels, in Triton's interpreter: an operator may run where autograd is switched off, and
the reference needs it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.backends import loss_blocks
from rollout_corr.backends.loss_blocks import Done, LossTask
from rollout_corr.backends.operators import LIBRARY
from rollout_corr.spec.encode import decode, encode, encode_once

LIBRARY.define(
    "policy_loss(Tensor new_logp, Tensor? base, Tensor? ref, Tensor advantages, bool per_sequence, Tensor? weights, "
    "Tensor? trains, Tensor? mask, Tensor? cu_seqlens, Tensor? divisor, bool double, bool differentiable, "
    "str objective, float[] numbers) -> "
    "(Tensor value, Tensor gradient, Tensor inners, Tensor divisor_out, Tensor statistics)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "scale_gradient(Tensor gradient, Tensor inners, Tensor upstream, Tensor divisor, Tensor? cu_seqlens, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Found = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def run_fused(task: LossTask) -> Done:
    """Run the operator on a batch, whatever the device."""
    batch, wanted = task.batch, task.objective
    operands = (
        batch.train, task.base, task.ref, task.advantages, batch.per_sequence, task.weights, task.trains,
        batch.mask, batch.offsets, task.divisor, batch.dtype == torch.float64, task.differentiable,
    )  # fmt: skip
    text = encode(wanted) if torch.compiler.is_compiling() else encode_once(wanted)
    found = torch.ops.rollout_corr.policy_loss(*operands, *text)
    value, gradient, inners, counted, statistics = found
    return Done(value, gradient if task.differentiable else None, inners, counted, statistics)


def scaled(
    gradient: Tensor, inners: Tensor, upstream: Tensor, divisor: Tensor, offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Backward, whatever the device."""
    found: Tensor = torch.ops.rollout_corr.scale_gradient(gradient, inners, upstream, divisor, offsets, dtype)
    return found


# --- the operators ---


def _kernels(
    new: Tensor,
    base: Tensor | None,
    ref: Tensor | None,
    advantages: Tensor,
    per_sequence: bool,
    weights: Tensor | None,
    trains: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
    divisor: Tensor | None,
    double: bool,
    differentiable: bool,
    text: str,
    numbers: list[float],
) -> Found:
    from rollout_corr.kernels.policy_loss.launch import LossGiven, run

    if offsets is not None:
        offsets = offsets.to(new.device)
    given = LossGiven(new, base, ref, advantages, per_sequence, weights, trains, mask, offsets, divisor, double)
    found = run(given, decode(text, numbers), differentiable)
    gradient, inners = (new.new_empty(0) if x is None else x for x in (found.gradient, found.inners))
    return found.value, gradient, inners, found.divisor, found.statistics


def _shapes(
    new: Tensor,
    base: Tensor | None,
    ref: Tensor | None,
    advantages: Tensor,
    per_sequence: bool,
    weights: Tensor | None,
    trains: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
    divisor: Tensor | None,
    double: bool,
    differentiable: bool,
    text: str,
    numbers: list[float],
) -> Found:
    wanted = decode(text, numbers)
    kind = torch.float64 if double else torch.float32
    sequences = new.shape[0] if offsets is None else offsets.shape[0] - 1
    averages = wanted.reduced.averages

    def empty(*size: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.empty(size, dtype=dtype, device=new.device)

    return (
        empty(),
        empty(*new.shape) if differentiable else new.new_empty(0),
        empty(sequences) if averages else new.new_empty(0),
        empty(dtype=torch.float64),
        empty(loss_blocks.width_of(wanted), dtype=torch.float64),
    )


def _scale_kernel(
    gradient: Tensor, inners: Tensor, upstream: Tensor, divisor: Tensor, offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    from rollout_corr.kernels.policy_loss.launch import scale

    if offsets is not None:
        offsets = offsets.to(gradient.device)
    return scale(gradient, inners if inners.numel() else None, upstream, divisor, offsets, dtype)


def _like(
    gradient: Tensor, inners: Tensor, upstream: Tensor, divisor: Tensor, offsets: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


for _name, _kernel, _fake in (("policy_loss", _kernels, _shapes), ("scale_gradient", _scale_kernel, _like)):
    for _device in ("CUDA", "CPU"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(f"rollout_corr::{_name}", _fake, lib=LIBRARY)
