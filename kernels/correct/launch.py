"""Launch `correct` on Triton: two launches, or three, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves sums of every slot, `decide` turns them into rejections, weights of
sequences and the statistics, `apply` brings these weights to the tokens. Only stream order hands anything over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_corr.kernels.by_turns import PartsOfTurns, by_turns, owners_here
from rollout_corr.kernels.correct.measures import COPIES
from rollout_corr.kernels.correct.plan import Plan
from rollout_corr.kernels.correct.recipe import BY_OWNER, Wanted, recipe_of, sized_for
from rollout_corr.kernels.grid import current, grid_for, of_units, strides_of
from rollout_corr.kernels.launches import Launch, Workspace, dtypes_of
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
        turns: [U + 1] int32 or int64, the offsets of turns among the tokens, where the Spec measures them; tokens of a
            padded batch are counted row after row.
        weights_out, mask_out: Where to write, contiguous and aligned to 16 bytes; None: to new tensors.
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
    turns: Tensor | None = None
    weights_out: Tensor | None = None
    mask_out: Tensor | None = None


# Those of its fields that turns make flat.
PER_TOKEN = ("train", "rollout", "mask", "new", "log_mass", "weights_out", "mask_out")


@dataclass
class TableBuffers:
    """The sums and maxima of slots by owner, [columns, S], if packed [columns, 1 + S + 1].

    The first and the last column of a packed batch are of no sequence. Owners are turns where there are any.
    """

    counts: Tensor  # int64
    integers: Tensor | None  # int64
    floats: Tensor  # float64
    peaks: Tensor | None  # int32 or int64: floats as integers of the same order


@dataclass
class Found:
    """The results of the kernels."""

    weights: Tensor | None
    mask: Tensor | None
    keep: Tensor  # [S] bool
    statistics: Tensor  # float64, the sums and then the maxima
    sums: int  # of them
    by_owner: TableBuffers | None = None  # of a split batch: the sums that ranks add up
    parts_of_turns: PartsOfTurns | None = None  # of a split batch with turns
    keep_turns: Tensor | None = None  # [U] bool


def run(given: Given, spec: Spec) -> Found:
    """Run the kernels on tensors that `backends.read.read_batch` has checked."""
    with current(given.train):
        found, launches = prepare(given, spec)
        for launch in launches:
            launch.run()
    return found


def prepare(
    given: Given, spec: Spec, wanted: Wanted | None = None, split: bool = False
) -> tuple[Found, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone.

    Without `wanted` all is handed back that the Spec asks for.

    With `split` there is one more launch, the second, which fills `Found.by_owner`: what ranks that hold parts of
    sequences have to add up before the third. So they do with the owners in `Found.parts_of_turns`, then `settle` it.
    """
    within, keep_turns, whole, turns = None, None, given, given.turns
    count = given.train.shape[0] if given.offsets is None else given.offsets.shape[0] - 1
    if turns is not None:
        wanted = wanted or Wanted.by(spec, given.mask is not None, given.offsets is not None)
        given, within = by_turns(given, turns, given.train, PER_TOKEN)
        given.externals = [x.reshape(-1) for x in given.externals]
        keep_turns = torch.empty(turns.shape[0] - 1, dtype=torch.bool, device=given.train.device)
    train, rollout, mask, offsets = given.train, given.rollout, given.mask, given.offsets
    advantages, log_mass, device = given.advantages, given.log_mass, train.device
    extras = () if not given.externals and given.new is None else contiguous_extras(given)
    recipe = recipe_of(
        spec,
        device,
        dtypes_of((train, rollout, mask, offsets, advantages, log_mass)),
        dtypes_of(extras) if extras else (),
        given.per_sequence,
        given.mass_of_rollout,
        wanted,
        split,
    )
    plan = recipe.plan
    strided = (train, rollout) if mask is None else (train, rollout, mask)
    sequences, width = train.shape if offsets is None else (offsets.shape[0] - 1, None)
    grid = grid_for(sequences, width, strided, min(train.element_size(), rollout.element_size()), plan.double)
    if within is not None:
        grid = of_units(grid, count)
    weights, mask_out, histogram, by_owner = given.weights_out, given.mask_out, None, None
    if plan.writes_weights and weights is None:
        weights = torch.empty(*train.shape, dtype=recipe.kind, device=device)
    if plan.writes_mask and mask_out is None:
        mask_out = torch.empty(*train.shape, dtype=torch.bool if mask is None else mask.dtype, device=device)
    if plan.full:
        histogram = torch.zeros(COPIES.value * HISTOGRAM_BINS, dtype=torch.int64, device=device)
    if split:
        by_owner = _by_owner(plan, grid.unit_count, device)
    keep = torch.empty(count, dtype=torch.bool, device=device)
    statistics = torch.empty(recipe.statistics, dtype=torch.float64, device=device)
    workspace = Workspace(recipe.scratch, grid.counted, device)
    log_mass = None if log_mass is None else log_mass.contiguous()
    advantages = advantages.contiguous() if plan.advantages and advantages is not None else None
    tensors = (
        train, rollout, mask, log_mass, advantages, offsets, recipe.upload.read(), weights, mask_out, keep, statistics,
        histogram, within, keep_turns, *(NO_TABLES if by_owner is None else vars(by_owner).values()),
    )  # fmt: skip
    sized = sized_for(recipe, grid)
    operands = recipe.names.operands(
        tensors, workspace, strides_of((train, rollout, mask), grid), extras, sized.values, grid.cut, device
    )
    if keep_turns is not None:
        weights, mask_out = _shaped(weights, whole.weights_out, whole), _shaped(mask_out, whole.mask_out, whole)
    found = Found(weights, mask_out, keep, statistics, recipe.sums, by_owner, None, keep_turns)
    if split and within is not None and turns is not None:
        of_sequences = (advantages, whole.advantages) if whole.per_sequence else (None, None)
        found.parts_of_turns = PartsOfTurns(owners_here(turns, within), within, *of_sequences)
    return found, sized.on(operands)


def _shaped(flat: Tensor | None, given_out: Tensor | None, given: Given) -> Tensor | None:
    """Give a result in the shape of the batch; where the caller gave a tensor for it, that tensor."""
    return flat if flat is None else flat.view(given.train.shape) if given_out is None else given_out


def contiguous_extras(given: Given) -> tuple[Tensor, ...]:
    """List the externals and the further log-probs, contiguous."""
    extras = given.externals if given.new is None else (*given.externals, given.new)
    return tuple(x.contiguous() for x in extras)


# In the place of the sums by owner of a batch that is not split.
NO_TABLES = (None,) * len(BY_OWNER)


def _by_owner(plan: Plan, many: int, device: torch.device) -> TableBuffers:
    """Allocate the tables of so many owners; those that may lack columns are None without any."""

    def table(columns: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((len(columns), many), dtype=dtype, device=device)

    keys = torch.int64 if plan.double else torch.int32
    return TableBuffers(
        counts=table(plan.counts, torch.int64),
        integers=table(plan.integers, torch.int64) if plan.integers else None,
        floats=table(plan.floats, torch.float64),
        peaks=table(plan.peaks, keys) if plan.peaks else None,
    )
