"""The kernels of the policy loss as operators of torch, forward and backward; see operators.py.

On the CPU too they are the kernels, in Triton's interpreter: an operator may run where autograd is switched off, and
the reference needs it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import loss as loss_metrics
from ..specs.caches import cached
from ..specs.operands import LossOperands, ScaleOperands
from ..specs.surrogate import Surrogate
from ..specs.terms import Objective
from .loss_task import LossResult, LossTask
from .registration import OPERATORS, beside_tokens, define, encoded_once, filled, seen_by_others


class LossOutputs(NamedTuple):
    """The results of the operator; one that is not wanted is empty, [0]."""

    value: Tensor  # 0-d
    gradient: Tensor  # of the value times its divisor
    inners: Tensor  # [S], the factor of each sequence's gradient; [U] for a surrogate of turns
    divisor_out: Tensor  # 0-d float64
    statistics: Tensor  # float64, the sums and then the maxima


def _operands(task: LossTask) -> LossOperands:
    """Give a batch as the operators take it."""
    batch, wanted = task.batch, task.objective
    log_mass, of_base = (None, False) if task.mass is None else (task.mass.log_mass, task.mass.of == "train")
    chosen = None
    if task.decided is not None:
        (chosen,) = task.decided.tokens or (None,)
    return LossOperands(
        new=batch.train,
        base=task.base,
        ref=task.ref,
        advantages=task.advantages,
        per_sequence=batch.per_sequence,
        weights=task.weights,
        trains=task.trains,
        mask=batch.mask,
        offsets=batch.offsets,
        divisor=task.divisor,
        scales=task.scales,
        log_mass=log_mass,
        mass_of_base=of_base,
        double=batch.dtype == torch.float64,
        turns=None if batch.turns is None or wanted.surrogate.mean_unit != "turn" else batch.turns,
        chosen=chosen,
        differentiable=task.differentiable,
    )


def _encoded(task: LossTask) -> tuple[str, list[float]] | None:
    """Encode the objective, where something has to see the kernels as operators; else give None."""
    batch, wanted = task.batch, task.objective
    # Not a part of the operands, since the compiler of torch 2.6 cannot cut a named tuple.
    policies = batch.train, task.base, task.ref, None if task.mass is None else task.mass.log_mass
    factors = task.weights, task.trains, task.scales, *(() if task.decided is None else task.decided.tokens)
    if not seen_by_others((*policies, *factors, task.advantages, batch.mask, batch.offsets, task.divisor)):
        return None
    return encoded_once(wanted)


def beyond_kernels(surrogate: Surrogate, scaled: bool) -> str | None:
    """Say why the kernels leave a surrogate to plain torch; None if they do not.

    Args:
        surrogate: The surrogate.
        scaled: Factors of all that a token adds are given.
    """
    if type(surrogate).__module__.rpartition(".")[0] != Surrogate.__module__.rpartition(".")[0]:
        return f"{surrogate!r} has a formula of its own, which runs on plain torch"
    if surrogate.ratio_level in ("average", "geometric_average"):
        return f"{surrogate!r} takes an average of two ratios, which runs on plain torch"
    if surrogate.sees_batch and not surrogate.traits.chooses_tokens:
        units = "groups of sequences" if surrogate.traits.sees == "groups" else "the batch for bounds"
        return f"{surrogate!r} looks at {units}, which runs on plain torch"
    return f"{surrogate!r} with scale runs on plain torch" if scaled and surrogate.traits.one_loss else None


def run_fused(task: LossTask) -> LossResult:
    """Run the kernels on a batch: directly, or as the operator where something has to see that."""
    wanted, operands, text = task.objective, _operands(task), _encoded(task)
    if text is not None:
        found = OPERATORS.policy_loss(*operands, *text)
        value, gradient, inners, counted, statistics = found
        statistics = _with_decided(statistics, task)
        return LossResult(value, gradient if task.differentiable else None, inners, counted, statistics, True)
    made = kernels().run(beside_tokens(operands), wanted)
    statistics = _with_decided(made.statistics, task)
    return LossResult(made.value, made.gradient, made.inners, made.divisor, statistics, True)


def _with_decided(statistics: Tensor, task: LossTask) -> Tensor:
    """Put the sums of what the surrogate decided from the whole batch behind the others: the kernels left 0 there."""
    if task.decided is None:
        return statistics
    sums, names = task.decided.sums, loss_metrics.sum_names(task.objective)
    found = task.objective.surrogate.traits.sums
    of_batch = torch.stack([sums[name].double() for name in found])
    return torch.cat((statistics[: len(names) - len(found)], of_batch, statistics[len(names) :]))


def scaled(
    gradient: Tensor,
    inners: Tensor | None,
    upstream: Tensor,
    divisor: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Scale the gradient of the kernels in backward, directly or as the operator."""
    operands = ScaleOperands(gradient, inners, upstream, divisor, offsets, dtype)
    seen = seen_by_others((gradient, inners, upstream, divisor, offsets))
    found: Tensor = OPERATORS.scale_gradient(*operands) if seen else kernels().scale(operands)
    return found


@cached(maxsize=1)
def kernels() -> Any:
    """Import the launcher of the kernels, and with it Triton."""
    from ..kernels.policy_loss import launch

    return launch


# --- the operators ---


def _kernels(operands: LossOperands, objective: Objective) -> LossOutputs:
    found = kernels().run(beside_tokens(operands), objective)
    outputs = found.value, found.gradient, found.inners, found.divisor, found.statistics
    return filled(LossOutputs, operands.new, *outputs)


def _shapes(operands: LossOperands, objective: Objective) -> LossOutputs:
    new, offsets = operands.new, operands.offsets
    kind = torch.float64 if operands.double else torch.float32
    sequences = new.shape[0] if offsets is None else offsets.shape[0] - 1
    if operands.turns is not None:
        sequences = operands.turns.shape[0] - 1

    def empty(*size: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.empty(size, dtype=dtype, device=new.device)

    return filled(
        LossOutputs,
        new,
        empty(),
        empty(*new.shape) if operands.differentiable else None,
        empty(sequences) if objective.mean.averages else None,
        empty(dtype=torch.float64),
        empty(len(loss_metrics.sum_names(objective)) + len(loss_metrics.max_names()), dtype=torch.float64),
    )


def _scale(operands: ScaleOperands) -> Tensor:
    found: Tensor = kernels().scale(operands)
    return found


def _scaled_shape(operands: ScaleOperands) -> Tensor:
    return torch.empty_like(operands.gradient, dtype=operands.dtype)


define("policy_loss", LossOperands, LossOutputs, cuda=_kernels, cpu=_kernels, fake=_shapes, encoded="objective")
define("scale_gradient", ScaleOperands, None, cuda=_scale, cpu=_scale, fake=_scaled_shape)
