"""Running the objective over a batch: in blocks of whole sequences on the CPU, as one piece elsewhere and in compilers.

The gradient is taken in the forward pass, by autograd of the definition; backward multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.backends import blocks
from rollout_corr.backends.batch import Batch
from rollout_corr.definition import loss as objective
from rollout_corr.definition.loss import Operands
from rollout_corr.definition.sequences import Sequences
from rollout_corr.definition.statistics import Named
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.spec.loss import Objective


@dataclass
class Tensors:
    """What a loss needs besides new_logp and the mask, in the batch's shape; advantages may be per sequence."""

    advantages: Tensor
    base: Tensor | None
    weights: Tensor | None
    ref: Tensor | None
    trains: Tensor | None


class Done(NamedTuple):
    """What a backend gives back.

    Attributes:
        value: 0-d.
        gradient: Of value * divisor by new_logp, in the shape of the batch; None where none was wanted.
        inners: [S], by which each sequence's gradient is still to be multiplied; None or empty for nothing.
        divisor: 0-d float64.
        statistics: Sums and maxima, float64.
    """

    value: Tensor
    gradient: Tensor | None
    inners: Tensor | None
    divisor: Tensor
    statistics: Tensor


Run = tuple[Tensor, Tensor | None, Named, Named]


def width_of(wanted: Objective) -> int:
    """How many statistics there are."""
    return len(loss_metrics.sum_names(wanted)) + len(loss_metrics.max_names())


def run_blocks(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool, divisor: Tensor | None) -> Done:
    """Block by block, with compaction. CPU tensors only."""
    return _done(_blocks(batch, tensors, wanted, differentiable), wanted, divisor, batch.dtype)


def _blocks(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool) -> Run:
    gradient = blocks.room(batch, batch.dtype) if differentiable else None
    totals, sums, maxima = [], [], []
    for piece in blocks.pieces(batch, blocks.BLOCK):

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


def _operands(new: Tensor, batch: Batch, tensors: Tensors, sequences: Sequences, valid: Tensor | None) -> Operands:
    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(batch.dtype)

    return Operands(
        sequences=sequences,
        n_valid=blocks.count_valid(batch, sequences, valid),
        new=new.to(batch.dtype),
        base=cast(tensors.base),
        advantages=blocks.whole_advantages(batch, tensors.advantages, sequences).token,
        weights=cast(tensors.weights),
        ref=cast(tensors.ref),
        valid=valid,
        trains=None if tensors.trains is None else tensors.trains != 0,
    )


def run_whole(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool, divisor: Tensor | None) -> Done:
    """All sequences at once, without compaction: no host sync, on any device."""
    operands = _operands(batch.train, batch, tensors, *blocks.whole(batch))
    return _done(_with_gradient(operands, wanted, differentiable, look=False), wanted, divisor, batch.dtype)


def run_split(
    batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool, divisor: Tensor | None, group: Any
) -> Done:
    """The same where sequences lie on several ranks; see split.py.

    The value is of the tokens that lie here; what it is divided by, and the gradient, are of whole sequences.
    """
    sequences, valid = blocks.split(batch, group)
    with torch.no_grad():
        objective.evaluate(_operands(batch.train, batch, tensors, sequences, valid), wanted)
    sequences.start()
    sequences.wait()
    operands = _operands(batch.train, batch, tensors, sequences, valid)
    return _done(_with_gradient(operands, wanted, differentiable, look=False), wanted, divisor, batch.dtype)


def run_traced(new: Tensor, batch: Batch, tensors: Tensors, wanted: Objective, divisor: Tensor | None) -> Done:
    """The same for a compiler, which wants the graph to new_logp and nothing of autograd's."""
    total, sums, maxima = objective.evaluate(_operands(new, batch, tensors, *blocks.whole(batch)), wanted)
    return _done((total, None, sums, maxima), wanted, divisor, batch.dtype)


def _done(found: Run, wanted: Objective, divisor: Tensor | None, dtype: torch.dtype) -> Done:
    """Divide, and put the statistics in order."""
    total, gradient, sums, maxima = found
    divisor = _divisor(objective.divisor(sums, wanted) if divisor is None else divisor, wanted)
    named = [sums[name] for name in loss_metrics.sum_names(wanted)]
    named += [maxima[name] for name in loss_metrics.max_names()]
    return Done((total / divisor).to(dtype), gradient, None, divisor, torch.stack([x.double() for x in named]))


def _divisor(count: Tensor, wanted: Objective) -> Tensor:
    """0-d: what the sum over all tokens is divided by. 0 divides nothing."""
    divisor = torch.where(count == 0, 1.0, count)
    return divisor if wanted.max_length is None else divisor * wanted.max_length


def counted(statistics: Tensor, wanted: Objective) -> Tensor:
    """0-d float64: what the loss counts, from its statistics."""
    return objective.divisor(dict(zip(loss_metrics.sum_names(wanted), statistics.unbind(), strict=False)), wanted)


def divided_by(done: Done, count: Tensor, wanted: Objective) -> Done:
    """The same loss over another count."""
    divisor = _divisor(count, wanted)
    value = done.value.double() * (done.divisor / divisor)
    return done._replace(value=value.to(done.value.dtype), divisor=divisor)


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
        gradient = operands.sequences.gradient(total, operands.new)
    return total.detach(), gradient, sums, maxima


def scaled(gradient: Tensor, upstream: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """Backward: the gradient times what comes from upstream, over the divisor."""
    return (gradient * (upstream.double() / divisor).to(gradient.dtype)).to(dtype)


class Differentiable(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(
        ctx: Any,
        new: Tensor,
        value: Tensor,
        gradient: Tensor,
        inners: Tensor | None,
        divisor: Tensor,
        offsets: Tensor | None,
    ) -> Tensor:
        """Give the value a gradient.

        Args:
            ctx: Autograd's.
            new: new_logp in the batch's shape.
            value: 0-d.
            gradient: d(value * divisor) / d(new), but for `inners`.
            inners: Where the kernels made the gradient: [S], what each sequence's is multiplied by, or empty.
            divisor: 0-d.
            offsets: Of a packed batch.
        """
        ctx.save_for_backward(gradient, inners, divisor, offsets)
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
        gradient, inners, divisor, offsets = ctx.saved_tensors
        if inners is None:
            found = scaled(gradient, grad_outputs[0], divisor, ctx.dtype)
        else:
            from rollout_corr.backends import loss_operators

            found = loss_operators.scaled(gradient, inners, grad_outputs[0], divisor, offsets, ctx.dtype)
        return found, None, None, None, None, None
