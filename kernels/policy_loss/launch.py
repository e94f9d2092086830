"""Launch `policy_loss` on Triton: three launches for value, statistics and gradient, one for backward.

A pass over the tokens writes the gradient before it is divided, a pass over the sequences counts, and one program for
each number finishes it. GSPO and GMPO, whose gradient depends on whole sequences, pass over the tokens twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rollout_corr.kernels.grid import (
    FINISH_CHUNK,
    SEQUENCE_THREADS,
    Launch,
    as_bytes,
    current,
    grid_for,
    strides_of,
)
from rollout_corr.kernels.policy_loss.gradient import gradient_kernel, scale_kernel
from rollout_corr.kernels.policy_loss.plan import LossPlan, Scaling, numbers_of, plans_of
from rollout_corr.kernels.policy_loss.sequences import finish_kernel, sequences_kernel
from rollout_corr.kernels.uploads import Upload
from rollout_corr.spec.loss import Objective


@dataclass
class LossGiven:
    """A batch as the kernels take it: per-token tensors are [N] with offsets, or [B, T] without.

    Attributes:
        new: new_logp.
        base: The log-probs that it is compared with.
        ref: Log-probs of the reference policy.
        advantages: Per token, or [S].
        per_sequence: True if advantages are [S].
        weights: Factors of the loss.
        trains: Non-zero at tokens that train.
        mask: Non-zero at valid tokens.
        offsets: [S + 1] int32 or int64, of a packed batch.
        divisor: 0-d float64, where the caller has counted.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_base: True if it is taken from the base, and not from new_logp.
        double: float64 computes.
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
    log_mass: Tensor | None = None
    mass_of_base: bool = False
    double: bool = False


@dataclass
class Buffers:
    """The tensors that the kernels write, by the name of the parameter that takes each; None: not in the plan."""

    gradient: Tensor | None
    levels: Tensor | None  # [S], and so are pulls and inners; see gradient.Shared
    pulls: Tensor | None
    inners: Tensor | None
    counts: Tensor | None  # [columns, slots] int32
    integers: Tensor | None  # [columns, slots] int64
    floats: Tensor | None  # [columns, slots] in the dtype that computes
    token_sums: Tensor | None  # [columns, token programs] float64
    token_maxima: Tensor | None  # [columns, token programs] float64
    sequence_sums: Tensor | None  # [columns, sequence programs] float64
    value: Tensor  # [1]
    divisor: Tensor  # [1] float64
    statistics: Tensor  # float64, the sums and then the maxima


@dataclass
class LossFound:
    """The results of the kernels."""

    value: Tensor
    gradient: Tensor | None  # of the value times its divisor, and times its length where a sequence is averaged
    inners: Tensor | None  # [S], the factor of each sequence's gradient
    divisor: Tensor
    statistics: Tensor  # float64, the sums and then the maxima


@lru_cache(maxsize=256)
def _upload(objective: Objective, double: bool, device: torch.device) -> Upload:
    """Bring all numbers to the device; once, and again only when one changes."""
    return Upload(tuple(numbers_of(objective, double).values()), device)


def run(given: LossGiven, objective: Objective, differentiable: bool) -> LossFound:
    """Run the kernels on tensors that `policy_loss` has checked.

    Args:
        given: The batch.
        objective: Everything that is fixed about the loss.
        differentiable: The gradient is handed back.
    """
    with current(given.new.device):
        found, launches = prepare(given, objective, differentiable)
        for launch in launches:
            launch.run()
    return found


def prepare(given: LossGiven, objective: Objective, differentiable: bool) -> tuple[LossFound, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone; see `run`."""
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
        mass=None if given.log_mass is None else ("rollout" if given.mass_of_base else "train"),
    )
    first, last = plans[0], plans[-1]
    inputs = {
        "new": new,
        "base": given.base,
        "ref": given.ref,
        "weights": given.weights,
        "trains": as_bytes(given.trains),
        "mask": as_bytes(given.mask),
    }
    strided = [x for x in inputs.values() if x is not None]
    element = min(x.element_size() for x in (new, given.base) if x is not None)
    grid = grid_for(new, given.offsets, strided, element, last.halvings)

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def table(columns: tuple[str, ...], rows: int, dtype: torch.dtype) -> Tensor | None:
        return empty(len(columns), rows, dtype=dtype) if columns else None

    def of_sequences(wanted: bool) -> Tensor | None:
        return empty(grid.sequences, dtype=kind) if wanted else None

    buffers = Buffers(
        gradient=empty(*new.shape, dtype=kind) if differentiable else None,
        levels=of_sequences(last.levels),
        pulls=of_sequences(last.pulls),
        inners=of_sequences(last.averages),
        counts=table(first.counts, grid.slots, torch.int32),
        integers=table(first.integers, grid.slots, torch.int64),
        floats=table(first.floats, grid.slots, kind),
        token_sums=table(last.token_sums, grid.token_programs, torch.float64),
        token_maxima=table(last.token_maxima, grid.token_programs, torch.float64),
        sequence_sums=table(first.sequence_sums, grid.sequence_programs, torch.float64),
        value=empty(1, dtype=kind),
        divisor=empty(1, dtype=torch.float64),
        statistics=empty(len(last.sums) + len(last.maxima), dtype=torch.float64),
    )
    values = {
        **vars(buffers),
        **inputs,
        "new_logp": new,
        "base_logp": given.base,
        "ref_logp": given.ref,
        "log_mass": None if given.log_mass is None else given.log_mass.contiguous(),
        "advantages": given.advantages.contiguous(),
        "offsets": given.offsets,
        "numbers": _upload(objective, last.double, device).read(),
        "given": given.divisor,
        "tokens": grid.tokens,
        "sequences": grid.sequences,
        "width": grid.width,
        "tiles": grid.tiles,
        "slots": grid.slots,
        "steps": grid.steps,
        **{name: stride for key, x in inputs.items() for name, stride in strides_of(key, x, packed).items()},
        "token_programs": grid.token_programs,
        "sequence_programs": grid.sequence_programs,
        "TILING": grid.tiling,
        "SHAPE": grid.shape,
        "CHUNK": FINISH_CHUNK,
    }

    def over_tokens(plan: LossPlan) -> Launch:
        unused = [*(OF_SLOTS if plan.phase == "write" else OF_SECOND_PASS), *(() if plan.writes else OF_LAST_PASS)]
        needed = values | {"PLAN": plan} | dict.fromkeys(unused)
        return Launch.by_name(gradient_kernel, grid.token_programs, grid.threads, needed)

    of_sequences_pass = values | {"PLAN": first}
    finishing = values | {"PLAN": last}
    finishers = 1 + len(last.sums) + len(last.maxima)
    found = LossFound(
        buffers.value.view(()), buffers.gradient, buffers.inners, buffers.divisor.view(()), buffers.statistics
    )
    return found, (
        over_tokens(first),
        Launch.by_name(sequences_kernel, grid.sequence_programs, SEQUENCE_THREADS, of_sequences_pass),
        *map(over_tokens, plans[1:]),
        Launch.by_name(finish_kernel, finishers, SEQUENCE_THREADS, finishing),
    )


# Parameters of `gradient_kernel` that only one of two passes over the tokens looks at. The other pass gets None: their
# dtype and alignment would be part of its compile key.
OF_SECOND_PASS = ("levels", "pulls", "inners")
OF_SLOTS = ("counts", "integers", "floats")
OF_LAST_PASS = ("gradient", "token_sums", "token_maxima")


def scale(
    gradient: Tensor,
    inners: Tensor | None,
    upstream: Tensor,
    divisor: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Scale the gradient in backward, in one launch: gradient * upstream / divisor, times each sequence's inner factor.

    Args:
        gradient: [N] or [B, T], contiguous.
        inners: [S] in its dtype, or None.
        upstream: 0-d, any floating dtype, on the device of the gradient.
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
    """Allocate the result of `scale` and say what has to be launched; see there."""
    # Where sequences do not matter, all tokens are one row.
    flat = gradient if inners is not None else gradient.view(1, -1)
    offsets = offsets if inners is not None else None
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    element = min(gradient.element_size(), scaled.element_size())
    grid = grid_for(flat, offsets, [flat], element, 0)
    values = {
        "gradient": gradient,
        "inners": inners,
        "upstream": upstream,
        "divisor": divisor,
        "offsets": offsets,
        "scaled": scaled,
        "tokens": grid.tokens,
        "sequences": grid.sequences,
        "width": grid.width,
        "tiles": grid.tiles,
        "steps": grid.steps,
        "PLAN": Scaling(offsets is not None, inners is not None),
        "TILING": grid.tiling,
    }
    return scaled, Launch(scale_kernel, grid.token_programs, grid.threads, values)
