"""The policy loss of a batch on plain torch: in blocks of whole sequences on the CPU, as one piece elsewhere.

The gradient is computed in the forward pass, by autograd of the definition; backward multiplies it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..definition import loss
from ..definition.bounds import limits
from ..definition.loss import RATIOS, OfBackend, Operands, TokensThatTrain
from ..definition.sequences import Packed, Rows
from ..definition.tokens import Number
from ..metrics import loss as loss_metrics
from ..specs.operands import LossResult
from ..specs.statistics import log_of
from ..specs.surrogate import Decided, TokenLoss
from ..specs.terms import Objective
from . import blocks, whole
from .batch import slots_outside
from .cpu_sums import SMALL, ExactSums, k3_within
from .loss_task import LossTask

if TYPE_CHECKING:
    from .ranks import Ranks
    from .split import Split


# The sum over tokens, its gradient, and the sums and maxima of the statistics.
Run = tuple[Tensor, Tensor | None, Mapping[str, Number], Mapping[str, Number]]


def run_blocks(task: LossTask) -> LossResult:
    """Run block by block, with compaction. CPU tensors only."""
    outside = slots_outside(task)
    size = blocks.slots_with_outputs(task, outside)
    adopts, gradient = blocks.is_one_block(task, size, outside), None
    if task.differentiable and not adopts:
        gradient = blocks.new_output(task, outside, task.dtype)
    totals, sums, maxima = [], [], []
    for block in blocks.blocks_of(task, size):
        operands = _operands_of(block, task)
        if task.decided is not None:
            operands.decided = task.decided._replace(tokens=tuple(map(block.take, task.decided.tokens)))
        total, slope, more_sums, more_maxima = _of_block(operands, task)
        if gradient is not None and slope is not None:
            block.put(gradient, slope)
        gradient = slope if adopts else gradient
        totals.append(total)
        sums.append(more_sums)
        maxima.append(more_maxima)
    if not sums[1:]:
        return _result((totals[0], gradient, sums[0], maxima[0]), task)
    added = dict(zip(sums[0], torch.stack([_stacked(part.values()) for part in sums]).sum(0).unbind(), strict=True))
    highest = torch.stack([_stacked(part.values()) for part in maxima]).amax(0).unbind()
    named = dict(zip(maxima[0], highest, strict=True))
    return _result((torch.stack(totals).sum(), gradient, added, named), task)


def _operands_of(block: blocks.Block, task: LossTask) -> Operands:
    """The valid tokens of a block."""
    dtype, advantages = task.dtype, block.advantages()
    assert advantages is not None

    def take(x: Tensor | None) -> Tensor | None:
        return None if x is None else block.take(x).to(dtype)

    return Operands(
        sequences=block.sequences,
        n_valid=block.n_valid,
        new=block.take(task.new).to(dtype),
        base=take(task.base),
        advantages=advantages.token,
        weights=take(task.weights),
        ref=take(task.ref),
        valid=None,
        trains=None if task.trains is None else some_of(block.take(task.trains).bool()),
        mass=block.mass(task.mass),
        scales=take(task.scales),
        turns=None if block.turns is None else block.turns.turns.units,
        of_backend=READS_VALUES,
    )


def some_of(which: Tensor) -> Tensor | None:
    """Bools on the CPU; None where all are True."""
    # The minimum of bytes is vectorized, `all` is not.
    every = not which.numel() or bool(which.contiguous().view(torch.uint8).amin())
    return None if every else which


def by_slope(given: Operands, objective: Objective) -> loss.Evaluated | None:
    """The loss of a block on the CPU and its gradient without a graph; None where the definition needs one.

    It has the bits of autograd. No ratio is 0 or infinite, so the sum tells whether what multiplies them is finite. A
    reference, whose KL may have a mean of its own, multiplies none.
    """
    if not loss.has_slope(given, objective) or not given.new.numel():
        return None
    if given.ref is not None and not math.isfinite((given.new - given.ref).sum().item()):
        return None
    given.all_finite = given.by_slope = True
    found = loss.evaluate(given, objective)
    policy = found.sums["loss_policy"] = float(found.sums["loss_policy"])
    return found if found.gradient is not None and math.isfinite(policy) else None


def _of_block(operands: Operands, task: LossTask) -> Run:
    """The loss of a block on the CPU, and its gradient where one is wanted."""
    found = by_slope(operands, task.objective)
    if found is None:
        return _with_gradient(_read_on_host(operands), task)
    return found if task.differentiable else found._replace(gradient=None)


def _read_on_host(given: Operands) -> Operands:
    """The operands of a block on the CPU, with what their values tell.

    Where sums over all tokens are finite everything is that the loss needs. A sum takes a thirtieth of the time of
    finding what is not finite. One that overflows is not finite either.
    """
    new = given.new.detach()
    parts = [new if given.base is None else loss.gap(given, new, given.base), given.advantages]
    others = given.weights, given.scales, None if given.ref is None else new - given.ref
    parts += [x for x in others if x is not None]
    given.all_finite = all(math.isfinite(x.sum().item()) for x in parts)
    given.by_slope = False
    return given


def ends(x: Tensor) -> tuple[float, float] | None:
    """(-minimum, maximum) of log-ratios; NaN where one is NaN, None of no token."""
    if not x.numel():
        return None
    low, high = (end.item() for end in torch.aminmax(x.detach() if x.requires_grad else x))
    return -low, high


def counts(n: Tensor, tokens: int | None) -> tuple[float, float]:
    """The tokens and the non-empty sequences of n tokens each, [S] int64."""
    return float(n.sum() if tokens is None else tokens), float(torch.count_nonzero(n))


def clip(tokens: TokensThatTrain, least: float, most: float, furthest: float) -> TokenLoss | None:
    """PPO's bounded ratio and its cut tokens as floats, where nothing has a graph.

    A CPU compares into floats in half the time of bools, and selects by a product in a sixth of the time of `where`.
    """
    x, advantages = tokens.clamped, tokens.advantages
    if tokens.ends is None or not tokens.multiplies or x.requires_grad:
        return None
    low, high, ratio = -tokens.ends[0], tokens.ends[1], x.exp()
    lower, upper = limits(x.dtype, log_of(least), log_of(most))
    _, far = limits(x.dtype, None, log_of(furthest))
    cut: dict[str, Tensor] = {}
    kept = bounds = None
    for name, compare, end, limit, side, bound in (
        ("low", torch.lt, low, lower, torch.lt, least),
        ("high", torch.gt, high, upper, torch.gt, most),
        ("dual", torch.gt, high, far, torch.lt, furthest),
    ):
        # The ends tell where no token is beyond, which on the far side is the rule.
        if isinstance(limit, float) and (end < limit if compare is torch.lt else end > limit):
            which = compare(x, limit, out=torch.empty_like(x))
            cut[name] = which.mul_(side(advantages, 0.0, out=torch.empty_like(x)))
            bounds = which * bound if bounds is None else bounds.add_(which, alpha=bound)
            kept = 1.0 - which if kept is None else kept.sub_(which)
    if kept is None or bounds is None:
        return TokenLoss(ratio, slope=(-advantages, ratio))
    ratio.mul_(kept)
    return TokenLoss(bounds.add_(ratio), slope=(-advantages, ratio), **cut)


def ratios(tokens: TokensThatTrain, used: Tensor) -> dict[str, Number] | None:
    """The sums of ratios where the ends are known: exact of few tokens, by a series of many."""
    if tokens.ends is None:
        return None
    largest = max(tokens.ends)
    if tokens.by_slope and used.shape[0] <= SMALL:
        exact = ExactSums(used, largest, largest)
        return dict(zip(RATIOS, (exact.sum, exact.excess(used), exact.excess2, exact.k3), strict=True))
    return tokens.sums_by_k3(used, k3_within(used, largest))


READS_VALUES = OfBackend(ends, counts, clip, ratios)


def run_whole(task: LossTask) -> LossResult:
    """Run all sequences at once, without compaction: no host sync, on any device."""
    return _result(_with_gradient(_operands(task, task.new, *whole.sequences_of(task)), task), task)


def run_split(task: LossTask) -> LossResult:
    """Run sequences that are split over the ranks of `task.group`; see split.py.

    The value is summed over the tokens of this rank; its divisor and the gradient are of whole sequences.
    """
    sequences, valid = whole.split_sequences_of(task, task.group)
    with torch.no_grad():
        loss.evaluate(_operands(task, task.new, sequences, valid), task.objective)
    sequences.start("policy_loss: the sums of each sequence")
    sequences.wait()
    return _result(_with_gradient(_operands(task, task.new, sequences, valid), task), task)


def finite_tokens(task: LossTask) -> Tensor | None:
    """Bool per token: all that the loss needs of it is finite, so that it can train; None where NaN may pass."""
    if task.objective.nonfinite == "propagate":
        return None
    return loss.finite(_operands(task, task.new, *whole.sequences_of(task)), task.objective)


@torch.no_grad()
def see_batch(task: LossTask, ids: Tensor, ranks: Ranks) -> Decided:
    """Let the surrogate decide from the whole batch; ids, [S] int64, are the numbers of its sequences."""
    # Few surrogates see the batch, and importing what they search by takes its time.
    from . import sees_batch

    sequences, valid = whole.sequences_of(task)
    found = loss.read(_operands(task, task.new, sequences, valid), task.objective)
    return task.objective.surrogate.see_batch(sees_batch.WholeBatch(task, found, ids, ranks))


@torch.no_grad()
def see_groups(task: LossTask, ranks: Ranks) -> Decided:
    """Let the surrogate decide from the groups of sequences."""
    from . import sees_batch

    sequences, valid = whole.sequences_of(task)
    found = loss.read(_operands(task, task.new, sequences, valid), task.objective)
    assert task.groups is not None
    seen = sees_batch.WholeGroups(sees_batch.facts_of(found, sequences), task.groups, ranks)
    decided = task.objective.surrogate.see_groups(seen)
    return decided._replace(tokens=tuple([sequences.spread(x).expand(found.x.shape) for x in decided.sequences]))


def run_traced(task: LossTask) -> LossResult:
    """Run under a compiler, which takes the derivative of the graph from `task.leaf` itself."""
    operands = _operands(task, task.leaf, *whole.sequences_of(task))
    return _result(loss.evaluate(operands, task.objective), task)


def _operands(task: LossTask, new: Tensor, sequences: Rows | Packed | Split, valid: Tensor | None) -> Operands:
    """The whole batch as one block."""
    dtype, mass, advantages = task.dtype, task.mass, whole.advantages_of(task, sequences)
    assert advantages is not None
    turns = whole.turns_in(task, task.turns, sequences, valid)

    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    return Operands(
        sequences=sequences,
        n_valid=whole.count_valid(task, sequences, valid),
        new=new.to(dtype),
        base=cast(task.base),
        advantages=advantages.token,
        weights=cast(task.weights),
        ref=cast(task.ref),
        valid=valid,
        trains=None if task.trains is None else task.trains != 0,
        mass=None if mass is None else mass.each(lambda log: log.to(dtype)),
        scales=cast(task.scales),
        turns=None if turns is None else turns.units,
        decided=task.decided,
    )


def _with_gradient(operands: Operands, task: LossTask) -> Run:
    """Evaluate the definition, and autograd of it where a gradient is wanted."""
    if not task.differentiable:
        with torch.no_grad():
            return loss.evaluate(operands, task.objective)
    with torch.enable_grad():
        # detach() copies nothing; the new leaf keeps gradients off the caller's tensor.
        operands.new = operands.new.detach().requires_grad_()
        total, _, sums, maxima = loss.evaluate(operands, task.objective)
        gradient = operands.sequences.gradient(total, operands.new)
    return total.detach(), gradient, sums, maxima


def _result(found: Run, task: LossTask) -> LossResult:
    """Divide, and put the statistics in order."""
    total, gradient, sums, maxima = found
    wanted = task.objective
    if task.decided is not None:
        sums = {**sums, **task.decided.sums}
    named = [sums[name] for name in loss_metrics.sum_names(wanted)]
    named += [maxima[name] for name in loss_metrics.max_names()]
    statistics = _stacked(named)
    divided_by = loss.counted_by(wanted)
    count: Number = 1.0 if divided_by is None else sums[divided_by]
    divisor = _divisor(count if task.divisor is None else task.divisor, wanted)
    return LossResult((total / divisor).to(task.dtype), gradient, None, divisor, divisor, statistics)


def _stacked(numbers: Iterable[Number]) -> Tensor:
    """Stack 0-d numbers of any dtypes, or such as were read, in float64."""
    every = list(numbers)
    if any(isinstance(x, float) for x in every):
        return torch.frombuffer(array("d", map(float, every)), dtype=torch.float64)
    return torch.stack([x.double() for x in every if isinstance(x, Tensor)])


def _divisor(count: Number, wanted: Objective) -> Tensor:
    """0-d float64: the number that the sum over all tokens is divided by. With 0 nothing is divided."""
    if isinstance(count, Tensor):
        count = count.double()
        divisor = torch.where(count == 0, 1.0, count)
    else:
        divisor = torch.tensor(count or 1.0, dtype=torch.float64, device="cpu")
    return divisor if wanted.mean.length is None else divisor * wanted.mean.length


def counted(statistics: Tensor, wanted: Objective) -> Tensor:
    """0-d float64: the count of tokens or sequences that divides the loss, from its statistics."""
    return loss.divisor(dict(zip(loss_metrics.sum_names(wanted), statistics.unbind(), strict=False)), wanted)


def divided_by(result: LossResult, count: Tensor, wanted: Objective) -> LossResult:
    """Divide the loss by another count."""
    divisor = _divisor(count, wanted)
    value = result.value.double() * (result.divisor / divisor)
    rest = divisor if result.rest is result.divisor else result.rest * (divisor / result.divisor)
    return result._replace(value=value.to(result.value.dtype), divisor=divisor, rest=rest)
