"""`policy_loss` on Triton: three launches for its value, its statistics and its gradient, one for backward.

A pass over the tokens writes the gradient before it is divided, one over the sequences counts, one program for each
number ends it. GSPO and GMPO, whose gradient hangs on whole sequences, pass over the tokens twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rollout_corr.kernels.grid import Launch, as_bytes, current, cut_of, on_device, strides_of
from rollout_corr.kernels.policy_loss.gradient import gradient_kernel, scale_kernel
from rollout_corr.kernels.policy_loss.plan import LossPlan, Scaling, numbers_of, plans_of
from rollout_corr.kernels.policy_loss.sequences import finish_kernel, sequences_kernel
from rollout_corr.spec.loss import Objective


@dataclass
class LossGiven:
    """A batch as the kernels take it: [N] with offsets, or [B, T] without.

    `divisor` is a 0-d float64 tensor where the caller has counted, `double` says that float64 computes.
    """

    new: Tensor
    base: Tensor | None
    ref: Tensor | None
    advantages: Tensor
    per_sequence: bool
    weights: Tensor | None
    trains: Tensor | None
    mask: Tensor | None
    offsets: Tensor | None
    divisor: Tensor | None
    double: bool = False


@dataclass
class LossFound:
    """What the kernels give back."""

    value: Tensor
    gradient: Tensor | None  # of the value times its divisor, and times its length where a sequence is averaged
    inners: Tensor | None  # [S], what each sequence is multiplied by
    divisor: Tensor
    statistics: Tensor  # float64, the sums and then the maxima


@lru_cache(maxsize=256)
def _numbers(objective: Objective, double: bool, device: torch.device) -> Tensor:
    """All numbers on the device; copied once, and again only when one changes."""
    return on_device(tuple(numbers_of(objective, double).values()), device)


def run(given: LossGiven, objective: Objective, differentiable: bool) -> LossFound:
    """Run the kernels on tensors that `policy_loss` has checked.

    Args:
        given: The batch.
        objective: What to compute.
        differentiable: The gradient is handed back.
    """
    with current(given.new.device):
        found, launches = prepare(given, objective, differentiable)
        for launch in launches:
            launch.run()
    return found


def prepare(given: LossGiven, objective: Objective, differentiable: bool) -> tuple[LossFound, tuple[Launch, ...]]:
    """Allocate everything and say what has to be launched, from metadata alone; see `run`."""
    new, device, packed = given.new, given.new.device, given.offsets is not None
    kind = torch.float64 if given.double else torch.float32
    plans = plans_of(
        objective,
        counted=given.divisor is None,
        double=given.double,
        packed=packed,
        based=given.base is not None,
        weighted=given.weights is not None,
        referred=given.ref is not None,
        trained=given.trains is not None,
        masked=given.mask is not None,
        advantages="sequence" if given.per_sequence else "token",
        differentiable=differentiable,
    )
    first, last = plans[0], plans[-1]
    inputs = (new, given.base, given.ref, given.weights, as_bytes(given.trains), as_bytes(given.mask))
    element = min(x.element_size() for x in (new, given.base) if x is not None)
    cut = cut_of(new, given.offsets, [x for x in inputs if x is not None], element, last.halvings)
    shape, threads = cut.shape, 32 * cut.shape.warps

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def table(columns: tuple[str, ...], rows: int, dtype: torch.dtype) -> Tensor | None:
        return empty(len(columns), rows, dtype=dtype) if columns else None

    def of_sequences(wanted: bool) -> Tensor | None:
        return empty(cut.sequences, dtype=kind) if wanted else None

    gradient = empty(*new.shape, dtype=kind) if differentiable else None
    levels, pulls, inners = map(of_sequences, (last.levels, last.pulls, last.averages))
    counts = table(first.counts, cut.slots, torch.int32)
    integers, floats = table(first.integers, cut.slots, torch.int64), table(first.floats, cut.slots, kind)
    sums, maxima = (table(x, cut.readers, torch.float64) for x in (last.token_sums, last.token_maxima))
    sequence_sums = table(first.sequence_sums, cut.judges, torch.float64)
    value, divisor = empty(1, dtype=kind), empty(1, dtype=torch.float64)
    statistics = empty(len(last.sums) + len(last.maxima), dtype=torch.float64)

    numbers, offsets = _numbers(objective, last.double, device), given.offsets
    advantages = given.advantages.contiguous()
    extents = (cut.tokens, cut.sequences, cut.width, cut.tiles)
    strides = [stride for x in inputs for stride in strides_of(x, packed)]

    # One that is not there is never looked at: Triton 3.5 and 3.6 know no None within a tuple.
    pointers = [new if x is None else x for x in inputs]

    def over_tokens(plan: LossPlan) -> Launch:
        # A pass that keeps no slots, or writes nothing, is not given where.
        keeps, writes = plan.phase != "write", plan.writes
        arguments = (
            *pointers, advantages, offsets, numbers, *((levels, pulls, inners) if not keeps else (None, None, None)),
            gradient if writes else None, *((counts, integers, floats) if keeps else (None, None, None)),
            *((sums, maxima) if writes else (None, None)), *extents, cut.steps, *strides,
        )  # fmt: skip
        return Launch(
            gradient_kernel, cut.readers, arguments, {"PLAN": plan, **cut.constants, "UNIT": cut.unit}, threads
        )

    over_sequences = (
        numbers, offsets, counts, integers, floats, levels, pulls, inners, sequence_sums,
        cut.tokens, cut.sequences, cut.tiles, cut.slots,
    )  # fmt: skip
    end = (numbers, sums, sequence_sums, maxima, given.divisor, value, divisor, statistics, cut.readers, cut.judges)
    of_sequences_kernel = {"PLAN": first, "SEQUENCES": shape.sequences, "CHUNK": shape.chunk, "TILE": shape.tile}
    finishers = 1 + len(last.sums) + len(last.maxima)
    return LossFound(value.view(()), gradient, inners, divisor.view(()), statistics), (
        over_tokens(first),
        Launch(sequences_kernel, cut.judges, over_sequences, of_sequences_kernel, 128),
        *map(over_tokens, plans[1:]),
        Launch(finish_kernel, finishers, end, {"PLAN": last, "CHUNK": 256}, 128),
    )


def scale(
    gradient: Tensor,
    inners: Tensor | None,
    upstream: Tensor,
    divisor: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Backward in one launch: gradient * upstream / divisor, times each sequence's inner factor.

    Args:
        gradient: [N] or [B, T], contiguous.
        inners: [S] in its dtype, or None.
        upstream: 0-d, any floating dtype, where it lies.
        divisor: 0-d float64.
        offsets: Of a packed batch.
        dtype: Of the result.
    """
    with current(gradient.device):
        scaled, launch = prepare_scale(gradient, inners, upstream, divisor, offsets, dtype)
        launch.run()
    return scaled


def prepare_scale(
    gradient: Tensor,
    inners: Tensor | None,
    upstream: Tensor,
    divisor: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Launch]:
    """Allocate the result of `scale` and say what has to be launched."""
    # Where sequences do not matter, all tokens are one row.
    flat = gradient if inners is not None else gradient.view(1, -1)
    offsets = offsets if inners is not None else None
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    cut = cut_of(flat, offsets, [flat], min(gradient.element_size(), scaled.element_size()), 0)
    arguments = (
        gradient, inners, upstream, divisor, offsets, scaled,
        cut.tokens, cut.sequences, cut.width, cut.tiles, cut.steps,
    )  # fmt: skip
    constants = {"PLAN": Scaling(offsets is not None, inners is not None), **cut.constants}
    return scaled, Launch(scale_kernel, cut.readers, arguments, constants, 32 * cut.shape.warps)
