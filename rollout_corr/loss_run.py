"""Running the objective over a batch: in blocks of whole sequences on the CPU, as one piece elsewhere and in compilers.

The gradient is taken in the forward pass, by autograd of the definition; backward multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_corr import blocks, objective
from rollout_corr.layout import Batch
from rollout_corr.measures import Named
from rollout_corr.objective import Operands
from rollout_corr.surrogates import Objective


@dataclass
class Tensors:
    """What a loss needs besides new_logp and the mask, in the batch's shape; advantages may be per sequence."""

    advantages: Tensor
    base: Tensor | None
    weights: Tensor | None
    ref: Tensor | None
    trains: Tensor | None


Run = tuple[Tensor, Tensor | None, Named, Named]


def run_blocks(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool) -> Run:
    """Block by block, with compaction. CPU tensors only."""
    gradient = torch.zeros(batch.train.shape, dtype=batch.dtype) if differentiable else None
    totals, sums, maxima = [], [], []
    for piece in blocks.pieces(batch):

        def take(x: Tensor | None, piece: blocks.Piece = piece) -> Tensor | None:
            return None if x is None else piece.take(x).to(batch.dtype)

        operands = Operands(
            sequences=piece.sequences,
            n_valid=piece.n_valid,
            new=piece.take(batch.train).to(batch.dtype),
            base=take(tensors.base),
            advantages=piece.advantages(tensors.advantages).token,
            weights=take(tensors.weights),
            ref=take(tensors.ref),
            valid=None,
            trains=None if tensors.trains is None else piece.take(tensors.trains) != 0,
        )
        total, slope, more_sums, more_maxima = _with_gradient(operands, wanted, differentiable, look=True)
        if gradient is not None and slope is not None:
            piece.compaction.put(gradient[piece.slots], slope)
        totals.append(total)
        sums.append(more_sums)
        maxima.append(more_maxima)
    added = {name: torch.stack([part[name].double() for part in sums]).sum(0) for name in sums[0]}
    highest = {name: torch.stack([part[name].double() for part in maxima]).amax(0) for name in maxima[0]}
    return torch.stack(totals).sum(), gradient, added, highest


def _operands(new: Tensor, batch: Batch, tensors: Tensors) -> Operands:
    sequences, valid, n_valid = blocks.whole(batch)

    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(batch.dtype)

    return Operands(
        sequences=sequences,
        n_valid=n_valid,
        new=new.to(batch.dtype),
        base=cast(tensors.base),
        advantages=blocks.whole_advantages(batch, tensors.advantages, sequences).token.to(batch.dtype),
        weights=cast(tensors.weights),
        ref=cast(tensors.ref),
        valid=valid,
        trains=None if tensors.trains is None else tensors.trains != 0,
    )


def run_whole(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool) -> Run:
    """All sequences at once, without compaction: no host sync, on any device."""
    return _with_gradient(_operands(batch.train, batch, tensors), wanted, differentiable, look=False)


def run_traced(new: Tensor, batch: Batch, tensors: Tensors, wanted: Objective) -> tuple[Tensor, Named, Named]:
    """The same for a compiler, which wants the graph to new_logp and nothing of autograd's."""
    return objective.evaluate(_operands(new, batch, tensors), wanted)


def _with_gradient(operands: Operands, wanted: Objective, differentiable: bool, look: bool) -> Run:
    """The definition, and autograd of it."""
    if not differentiable:
        with torch.no_grad():
            total, sums, maxima = objective.evaluate(operands, wanted, look)
        return total, None, sums, maxima
    with torch.enable_grad():
        # A copy of nothing: a leaf of its own, so that what the caller holds is not touched.
        operands.new = operands.new.detach().requires_grad_()
        total, sums, maxima = objective.evaluate(operands, wanted, look)
        if not total.requires_grad:
            # There was nothing to sum over.
            return total, torch.zeros_like(operands.new), sums, maxima
        (gradient,) = torch.autograd.grad(total, operands.new)
    return total.detach(), gradient, sums, maxima


class Differentiable(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, value: Tensor, gradient: Tensor, divisor: Tensor) -> Tensor:
        """Give the value a gradient.

        Args:
            ctx: Autograd's.
            new: new_logp in the batch's shape.
            value: 0-d.
            gradient: d(value * divisor) / d(new).
            divisor: 0-d.
        """
        ctx.save_for_backward(gradient, divisor)
        ctx.dtype = new.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale the gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "policy_loss: expected a backward pass without create_graph=True; its gradient is made in the forward "
                "pass and has no derivative of its own"
            )
        gradient, divisor = ctx.saved_tensors
        scale = (grad_outputs[0].double() / divisor).to(gradient.dtype)
        return (gradient * scale).to(ctx.dtype), None, None, None
