"""Launch `correct` on Triton: three launches, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves sums of every slot, `decide` turns them into rejections and weights of
sequences, `apply` brings those to the tokens and finishes the statistics. Only stream order hands anything over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rollout_corr.kernels.correct.apply import apply_kernel
from rollout_corr.kernels.correct.decide import decide_kernel
from rollout_corr.kernels.correct.measures import COPIES
from rollout_corr.kernels.correct.numbers import numbers_of
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.correct.planner import plan_of
from rollout_corr.kernels.correct.read import read_kernel
from rollout_corr.kernels.gather import gather_kernel
from rollout_corr.kernels.grid import (
    FINISH_CHUNK,
    SEQUENCE_THREADS,
    Grid,
    Launch,
    as_bytes,
    current,
    grid_for,
    strides_of,
)
from rollout_corr.kernels.uploads import Upload
from rollout_corr.metrics.histogram import HISTOGRAM_BINS
from rollout_corr.spec.correction import Spec


@dataclass
class Given:
    """A batch as the kernels take it: per-token tensors are [N] with offsets, or [B, T] without.

    Attributes:
        train: The trainer's log-probs.
        rollout: The engine's log-probs.
        mask: Non-zero at valid tokens, any dtype.
        offsets: [S + 1] int32 or int64, of a packed batch.
        advantages: Per token, or [S].
        per_sequence: True if advantages are [S].
        externals: Per-token tensors of criteria over external statistics.
        new: Log-probs of the policy that trains, for criteria that compare it.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_rollout: True if it is taken from the engine's log-probs, and not from the trainer's.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    advantages: Tensor | None
    per_sequence: bool
    externals: Sequence[Tensor]
    new: Tensor | None = None
    log_mass: Tensor | None = None
    mass_of_rollout: bool = False


@dataclass(frozen=True)
class Wanted:
    """The outputs that are handed back.

    Attributes:
        weights: Weights.
        mask: A new mask.
        edits_mask: Rejected tokens are 0 in the new mask.
    """

    weights: bool
    mask: bool
    edits_mask: bool


@dataclass
class TableBuffers:
    """The sums and maxima of slots, [columns, slots], or by owner, [columns, S], if packed [columns, 1 + S + 1].

    By owner, the first and the last column of a packed batch are of no sequence.
    """

    counts: Tensor  # int32, by owner int64
    integers: Tensor | None  # int64
    floats: Tensor  # the dtype that computes, by owner float64
    peaks: Tensor | None  # int32 or int64: floats as integers of the same order


@dataclass
class Buffers:
    """The tensors that the kernels write besides slot tables, by the name of the parameter that takes each.

    Several allocations and not slices of one: whether a pointer is aligned is part of a compile key, and must not
    depend on the number of programs.
    """

    weights: Tensor | None
    mask_out: Tensor | None
    keep_out: Tensor  # [S] bool
    owners: Tensor | None  # [slots] int32, the owner of each slot of a packed batch
    states: Tensor | None  # [S] int32, bits; see decide.py
    sequence_weights: Tensor | None  # [S]
    token_sums: Tensor  # [columns, token programs] float64, and so on
    token_maxima: Tensor
    sequence_sums: Tensor
    sequence_maxima: Tensor
    histogram: Tensor | None  # [COPIES * BINS] int64
    statistics: Tensor  # float64, the sums and then the maxima


@dataclass
class Found:
    """The results of the kernels."""

    weights: Tensor | None
    mask: Tensor | None
    keep: Tensor  # [S] bool
    statistics: Tensor  # float64, the sums and then the maxima
    by_owner: TableBuffers | None = None  # of a split batch: the sums that ranks add up


@lru_cache(maxsize=256)
def _upload(spec: Spec, double: bool, device: torch.device) -> Upload:
    """Bring the thresholds to the device; once, and again only when one changes."""
    return Upload(tuple(numbers_of(spec, double).values()), device)


def run(given: Given, spec: Spec, wanted: Wanted) -> Found:
    """Run the kernels on tensors that `backends.batch.read_batch` has checked."""
    with current(given.train.device):
        found, launches = prepare(given, spec, wanted)
        for launch in launches:
            launch.run()
    return found


def prepare(given: Given, spec: Spec, wanted: Wanted, split: bool = False) -> tuple[Found, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone.

    With `split` there is one more launch, the second, which fills `Found.by_owner`: what ranks that hold parts of
    sequences have to add up before the third.
    """
    train, device, packed = given.train, given.train.device, given.offsets is not None
    kind = torch.promote_types(torch.promote_types(train.dtype, given.rollout.dtype), torch.float32)
    plan = plan_of(
        spec,
        double=kind == torch.float64,
        packed=packed,
        masked=given.mask is not None,
        advantages=None if given.advantages is None else ("sequence" if given.per_sequence else "token"),
        writes_weights=wanted.weights,
        writes_mask=wanted.mask,
        edits_mask=wanted.edits_mask,
        mass=None if given.log_mass is None else ("rollout" if given.mass_of_rollout else "train"),
    )
    mask = as_bytes(given.mask)
    strided = [x for x in (train, given.rollout, mask) if x is not None]
    element = min(train.element_size(), given.rollout.element_size())
    grid = grid_for(train, given.offsets, strided, element, plan.halvings)
    buffers = _allocate(given, plan, grid, kind)
    slots = _slot_tables(plan, grid.slots, kind, torch.int32, device)
    advantages = given.advantages.contiguous() if plan.advantages and given.advantages is not None else None
    extras = given.externals if given.new is None else (*given.externals, given.new)
    apply_programs = grid.token_programs if plan.applies else 0
    finishers = buffers.statistics.shape[0] - len(plan.call_maxima)

    values = {
        **vars(buffers),
        **vars(slots),
        "mask_out": as_bytes(buffers.mask_out),
        "keep_out": as_bytes(buffers.keep_out),
        "train_logp": train,
        "rollout_logp": given.rollout,
        "mask": mask,
        "log_mass": None if given.log_mass is None else given.log_mass.contiguous(),
        "advantages": advantages,
        "externals": tuple(x.contiguous() for x in extras),
        "offsets": given.offsets,
        "numbers": _upload(spec, plan.double, device).read(),
        "tokens": grid.tokens,
        "sequences": grid.sequences,
        "width": grid.width,
        "tiles": grid.tiles,
        "slots": grid.slots,
        "steps": grid.steps,
        **strides_of("train", train, packed),
        **strides_of("rollout", given.rollout, packed),
        **strides_of("mask", mask, packed),
        "apply_programs": apply_programs,
        "token_programs": grid.token_programs,
        "sequence_programs": grid.sequence_programs,
        "PLAN": plan,
        "TILING": grid.tiling,
        "SHAPE": grid.shape,
        "CHUNK": FINISH_CHUNK,
    }
    read = Launch.by_name(read_kernel, grid.token_programs, grid.threads, values)
    apply = Launch.by_name(apply_kernel, apply_programs + finishers, grid.threads, values)
    found = Found(buffers.weights, buffers.mask_out, buffers.keep_out, buffers.statistics)
    if plan.advantages != "sequence":
        # `decide` does not read those of tokens, whose dtype would be part of its compile key.
        values["advantages"] = None
    if split:
        owners = grid.sequences + 2 * packed
        found.by_owner = _slot_tables(plan, owners, torch.float64, torch.int64, device)
        values |= {"owner_count": owners} | {f"{name}_out": x for name, x in vars(found.by_owner).items()}
        gather = Launch.by_name(gather_kernel, grid.sequence_programs, SEQUENCE_THREADS, values)
        # To `decide` it is a batch without tokens, whose every sequence has one slot.
        values |= vars(found.by_owner) | {"tokens": 0, "tiles": 1, "slots": owners}
        values["offsets"] = None if given.offsets is None else torch.zeros_like(given.offsets)
    decide = Launch.by_name(decide_kernel, grid.sequence_programs, SEQUENCE_THREADS, values)
    return found, (read, gather, decide, apply) if split else (read, decide, apply)


def _slot_tables(plan: Plan, many: int, kind: torch.dtype, count: torch.dtype, device: torch.device) -> TableBuffers:
    """Allocate tables of so many slots or owners; those that may lack columns are None without any."""

    def table(columns: tuple[str, ...], dtype: torch.dtype) -> Tensor | None:
        return torch.empty((len(columns), many), dtype=dtype, device=device) if columns else None

    keys = torch.int64 if plan.double else torch.int32
    return TableBuffers(
        counts=torch.empty((len(plan.counts), many), dtype=count, device=device),
        integers=table(plan.integers, torch.int64),
        floats=torch.empty((len(plan.floats), many), dtype=kind, device=device),
        peaks=table(plan.peaks, keys),
    )


def _allocate(given: Given, plan: Plan, grid: Grid, kind: torch.dtype) -> Buffers:
    device, shape, packed = given.train.device, given.train.shape, given.offsets is not None

    def empty(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    bins = HISTOGRAM_BINS if plan.full else 0
    sums = len(plan.token_sums) + len(plan.sequence_sums) + bins + len(plan.call_sums)
    maxima = len(plan.token_maxima) + len(plan.sequence_maxima) + len(plan.call_maxima)
    mask_kind = torch.bool if given.mask is None else given.mask.dtype
    return Buffers(
        weights=empty(*shape, dtype=kind) if plan.writes_weights else None,
        mask_out=empty(*shape, dtype=mask_kind) if plan.writes_mask else None,
        keep_out=empty(grid.sequences, dtype=torch.bool),
        owners=empty(grid.slots, dtype=torch.int32) if packed and plan.applies else None,
        states=empty(grid.sequences, dtype=torch.int32) if plan.applies else None,
        sequence_weights=empty(grid.sequences, dtype=kind) if plan.spreads else None,
        token_sums=empty(len(plan.token_sums), grid.token_programs),
        token_maxima=empty(len(plan.token_maxima) - plan.derived, grid.token_programs),
        sequence_sums=empty(len(plan.sequence_sums), grid.sequence_programs),
        sequence_maxima=empty(len(plan.sequence_maxima), grid.sequence_programs),
        histogram=torch.zeros(COPIES.value * bins, dtype=torch.int64, device=device) if bins else None,
        statistics=empty(sums + maxima),
    )
