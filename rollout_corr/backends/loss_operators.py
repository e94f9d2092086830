"""The kernels of the policy loss as operators of torch, forward and backward; see operators.py.

On the CPU too they are the kernels, in Triton's interpreter: an operator may run where autograd is switched off, and
the reference needs it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics import loss as loss_metrics
from ..specs.caches import cached_untraced
from ..specs.operands import LossOperands, LossResult, ScaleOperands
from ..specs.surrogate import Decided
from ..specs.terms import Objective
from . import loss_blocks
from .loss_task import LossTask
from .registration import OPERATORS, define, encoded_once, filled, flat, offsets_near_tokens, seen_by_others

if TYPE_CHECKING:
    from . import first_call

# Statistics that are counts.
COUNTS = frozenset((*loss_metrics.OF_SEQUENCES, "loss_tokens_nonfinite", "clip_low", "clip_high", "clip_dual"))


def repeats(advantages: Tensor) -> bool:
    """Return whether every row repeats one advantage: [B, 1] expanded to [B, T]."""
    return advantages.dim() == 2 and advantages.shape[1] > 0 and advantages.stride(1) == 0


def for_kernels(task: LossTask) -> LossTask:
    """A loss as the kernels take it: an advantage that a row repeats is read once, where a copy would be made."""
    if not repeats(task.advantages):
        return task
    return replace(task, advantages=task.advantages[:, 0], per_sequence=True)


def _encoded(task: LossTask) -> tuple[str, list[float]] | None:
    """Encode the objective, where something has to see the kernels as operators; else give None."""
    policies = task.new, task.base, task.ref, task.log_mass
    factors = task.weights, task.trains, task.scales, task.chosen
    if not seen_by_others((*policies, *factors, task.advantages, task.mask, task.offsets, task.divisor)):
        return None
    return encoded_once(task.objective)


def run_fused(task: LossTask) -> LossResult:
    """Run the kernels on a batch: directly, or as the operator where something has to see that."""
    given, text = for_kernels(task), _encoded(task)
    if text is None:
        found: LossResult = launcher().run(offsets_near_tokens(given), task.objective, task.before)
    else:
        value, gradient, inners, divisor, rest, statistics = OPERATORS.policy_loss(*flat(OPERANDS, given), *text)
        found = LossResult(value, gradient, inners, divisor, rest, statistics, by_kernels=True)
    gradient = found.gradient if task.differentiable else None
    return found._replace(gradient=gradient, statistics=_with_decided(found.statistics, task))


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
    rest: Tensor,
    offsets: Tensor | None,
    flags: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Scale the gradient of the kernels in backward, directly or as the operator.

    The product replaces the gradient where the graph is not kept for another backward pass, except in compiled code.
    """
    operands = ScaleOperands(gradient, inners, upstream, rest, offsets, flags, dtype)
    if seen_by_others((gradient, inners, upstream, rest, offsets)):
        found: Tensor = OPERATORS.scale_gradient(*operands)
        return found
    scaled: Tensor = kernels().scale(operands, not torch._C._autograd._get_current_graph_task_keep_graph())
    return scaled


@cached_untraced(maxsize=1)
def kernels() -> Any:
    """Import the launcher of the kernels, and with it Triton."""
    from ..kernels.policy_loss import launch

    return launch


@cached_untraced(maxsize=1)
def launcher() -> Any:
    """The launcher of calls that no operator stands for, behind the comparison of the first of them."""
    from . import first_call

    return first_call.launcher_of("policy_loss", kernels(), _results_of_kernels, results_of_torch, launcher.cache_clear)


# --- the first call ---


def _results_of_kernels(operands: LossOperands, objective: Objective) -> first_call.Outputs:
    found = kernels().run(replace(operands, differentiable=True), objective)
    return results_of(operands, objective, found.value, slope_of(found, operands.offsets), found.statistics)


def slope_of(found: LossResult, offsets: Tensor | None) -> Tensor:
    """Return the gradient of what the kernels have found, as backward gives it for an upstream gradient of 1."""
    assert found.gradient is not None
    one = torch.ones((), dtype=found.gradient.dtype, device=found.gradient.device)
    slope: Tensor = kernels().scale(
        ScaleOperands(found.gradient, found.inners, one, found.rest, offsets, found.flags, one.dtype)
    )
    return slope


def results_of_torch(operands: LossOperands, objective: Objective) -> first_call.Outputs:
    """Compute the loss of operands on the CPU on plain torch, as results to compare."""
    decided, divisor, offsets = None, operands.divisor, operands.offsets
    if operands.chosen is not None:
        nothing = torch.zeros((), device="cpu")
        decided = Decided((operands.chosen,), dict.fromkeys(objective.surrogate.traits.sums, nothing))
    if divisor is None and objective.mean.over == "rows":
        divisor = torch.tensor(float(operands.count), dtype=torch.float64, device="cpu")
    changed = {"divisor": divisor, "offsets": None if offsets is None else offsets.long(), "differentiable": True}
    task = LossTask(**vars(operands) | changed, leaf=operands.new, objective=objective, decided=decided)
    found = loss_blocks.run_blocks(task)
    assert found.gradient is not None
    slope = found.gradient / found.divisor.to(found.gradient.dtype)
    return results_of(operands, objective, found.value, slope, found.statistics)


def results_of(
    operands: LossOperands, objective: Objective, value: Tensor, slope: Tensor, vector: Tensor
) -> first_call.Outputs:
    """The results of a loss as they are compared: counts exactly."""
    size = 1.0
    for x in (operands.advantages, operands.weights, operands.scales):
        if x is not None:
            size *= max(1.0, float(torch.where(x.isfinite(), x, 0).abs().max()))
    names = (*loss_metrics.sum_names(objective), *loss_metrics.max_names())
    values = dict(zip(names, vector.tolist(), strict=True))
    of_sums = size * max(1.0, math.sqrt(values["loss_valid_tokens"]))
    # What a surrogate found in the whole batch is no result of the kernels.
    sizes = {name: None if name in COUNTS else of_sums for name in names if name not in objective.surrogate.traits.sums}
    largest = float(torch.where(slope.isfinite(), slope, 0).abs().max())
    from . import first_call

    found = first_call.results(value=(value, size), gradient=(slope, 0.01 * largest))
    return found | first_call.statistics(values, sizes)


# --- the operators ---


def _kernels(operands: LossOperands, objective: Objective) -> tuple[Tensor, ...]:
    return filled(operands.new, *kernels().run(offsets_near_tokens(operands), objective)[:6])


def _shapes(operands: LossOperands, objective: Objective) -> tuple[Tensor, ...]:
    new, offsets = operands.new, operands.offsets
    kind = torch.float64 if operands.double else torch.float32
    sequences = new.shape[0] if offsets is None else offsets.shape[0] - 1
    averages_late = objective.mean.averages and not objective.surrogate.reads_sequences

    def empty(*size: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.empty(size, dtype=dtype, device=new.device)

    return filled(
        new, empty(), empty(*new.shape) if operands.differentiable else None,
        empty(sequences) if averages_late else None, empty(dtype=torch.float64), empty(dtype=torch.float64),
        empty(len(loss_metrics.sum_names(objective)) + len(loss_metrics.max_names()), dtype=torch.float64),
    )  # fmt: skip


def _scale(operands: ScaleOperands) -> tuple[Tensor, ...]:
    return (kernels().scale(operands),)


def _scaled_shape(operands: ScaleOperands) -> tuple[Tensor, ...]:
    return (torch.empty_like(operands.gradient, dtype=operands.dtype),)


OPERANDS = define("policy_loss", LossOperands, 6, cuda=_kernels, cpu=_kernels, fake=_shapes, encoded="objective")
define("scale_gradient", ScaleOperands, 1, cuda=_scale, cpu=_scale, fake=_scaled_shape)
