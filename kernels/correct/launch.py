"""Launch `correct` on Triton: two launches, or three, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves sums of every slot, `decide` turns them into rejections, weights of
sequences and the statistics, `apply` brings these weights to the tokens. Only stream order hands anything over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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
    SEQUENCE_THREADS,
    current,
    grid_for,
    strides_of,
)
from rollout_corr.kernels.launches import (
    Field,
    Launch,
    Site,
    Workspace,
    WorkspaceLayout,
    alignment_of,
    names_of_tensors,
)
from rollout_corr.kernels.partials import groups
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


class Wanted(NamedTuple):
    """The outputs that are handed back.

    Attributes:
        weights: Weights.
        mask: A new mask.
        edits_mask: Rejected tokens are 0 in the new mask.
    """

    weights: bool
    mask: bool
    edits_mask: bool

    @classmethod
    def by(cls, spec: Spec, masked: bool, packed: bool) -> Wanted:
        """Name the outputs that a Spec asks for. Without a mask a packed batch gets one of its sequences' tokens."""
        return cls(spec.returns_weights, spec.edits_mask or (packed and not masked), spec.edits_mask)


@dataclass
class TableBuffers:
    """The sums and maxima of slots by owner, [columns, S], if packed [columns, 1 + S + 1].

    The first and the last column of a packed batch are of no sequence.
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


@dataclass(eq=False)
class Recipe:
    """Everything about calls that share a Spec, dtypes and a device, whatever their sizes."""

    plan: Plan
    kind: torch.dtype  # computes
    scratch: WorkspaceLayout
    sites: tuple[Site | None, ...]  # read, gather, decide, apply; None where it is not launched
    statistics: int
    sums: int  # of the statistics
    upload: Upload
    constants: dict[str, Any]  # arguments that are the same for every call
    groups: int  # of the columns that programs of `decide` add up
    pointers: Callable[[Mapping[str, Any]], tuple[Tensor, ...]] | None = None  # picks all that are tensors


@lru_cache(maxsize=256)
def recipe_of(
    spec: Spec,
    device: torch.device,
    train: torch.dtype,
    rollout: torch.dtype,
    mask: torch.dtype | None,
    offsets: torch.dtype | None,
    advantages: torch.dtype | None,
    per_sequence: bool,
    extras: tuple[torch.dtype, ...],
    log_mass: torch.dtype | None,
    mass_of_rollout: bool,
    wanted: Wanted | None,
    split: bool,
) -> Recipe:
    """Make the recipe for a Spec and the dtypes of a batch. Every argument of a launch has a type that these decide."""
    del extras  # their dtypes are part of the key of the cache alone
    kind = torch.promote_types(torch.promote_types(train, rollout), torch.float32)
    wanted = Wanted.by(spec, mask is not None, offsets is not None) if wanted is None else wanted
    plan = plan_of(
        spec,
        double=kind == torch.float64,
        packed=offsets is not None,
        masked=mask is not None,
        advantages=None if advantages is None else ("sequence" if per_sequence else "token"),
        writes_weights=wanted.weights,
        writes_mask=wanted.mask,
        edits_mask=wanted.edits_mask,
        mass=None if log_mass is None else ("rollout" if mass_of_rollout else "train"),
    )
    maxima = len(plan.token_maxima) + len(plan.sequence_maxima) + len(plan.call_maxima)
    bins = HISTOGRAM_BINS if plan.full else 0
    statistics = len(plan.token_sums) + len(plan.sequence_sums) + bins + len(plan.call_sums) + maxima
    kernels = (read_kernel, gather_kernel if split else None, decide_kernel, apply_kernel if plan.applies else None)
    scratch = _scratch_of(plan, kind)
    return Recipe(
        plan=plan,
        kind=kind,
        scratch=scratch,
        sites=tuple(None if kernel is None else Site(kernel) for kernel in kernels),
        statistics=statistics,
        sums=statistics - maxima,
        upload=_upload(spec, plan.double, device),
        constants={
            # Of tables that this plan does not have.
            **dict.fromkeys(name for name in SCRATCH if name not in scratch.fields),
            "PLAN": plan,
            "BY_OWNER": split,
        },
        groups=groups(plan),
    )


# Every table that a plan may have: of slots, of token programs, of sequence programs, of sequences.
SCRATCH = (
    *("counts", "integers", "floats", "peaks"),
    *("token_sums", "token_maxima", "part_sums", "part_maxima", "sequence_sums", "sequence_maxima", "counter"),
    *("states", "sequence_weights"),
)


def _scratch_of(plan: Plan, kind: torch.dtype) -> WorkspaceLayout:
    """List the tables of a plan: [columns, slots], [columns, programs] of programs over tokens.

    Those of programs over sequences and of parts are [rows, columns] to the kernels. The counter is the first of its
    table.
    """
    keys, exact = torch.int64 if plan.double else torch.int32, torch.float64
    slots = [
        Field("counts", len(plan.counts), torch.int32),
        Field("integers", len(plan.integers), torch.int64) if plan.integers else None,
        Field("floats", len(plan.floats), kind),
        Field("peaks", len(plan.peaks), keys) if plan.peaks else None,
    ]
    sequences = [
        Field("states", None, torch.int32) if plan.applies else None,  # bits; see decide.py
        Field("sequence_weights", None, kind) if plan.spreads else None,
    ]
    return WorkspaceLayout(
        [field for field in slots if field is not None],
        [
            Field("token_sums", len(plan.token_sums), exact),
            Field("token_maxima", len(plan.token_maxima) - plan.derived, exact),
        ],
        [
            Field("sequence_sums", len(plan.sequence_sums), exact),
            Field("sequence_maxima", len(plan.sequence_maxima), exact),
            Field("counter", None, torch.int32),
        ],
        [field for field in sequences if field is not None],
        [
            Field("part_sums", len(plan.token_sums), exact),
            Field("part_maxima", len(plan.token_maxima) - plan.derived, exact),
        ],
    )


@lru_cache(maxsize=256)
def _upload(spec: Spec, double: bool, device: torch.device) -> Upload:
    """Bring the thresholds to the device; once, and again only when one changes."""
    return Upload(tuple(numbers_of(spec, double).values()), device)


def run(given: Given, spec: Spec) -> Found:
    """Run the kernels on tensors that `backends.batch.read_batch` has checked."""
    with current(given.train.device):
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
    sequences have to add up before the third.
    """
    train, rollout, mask, offsets, log_mass = given.train, given.rollout, given.mask, given.offsets, given.log_mass
    device, advantages = train.device, given.advantages
    extras = () if not given.externals and given.new is None else _contiguous_extras(given)
    recipe = recipe_of(
        spec,
        device,
        train.dtype,
        rollout.dtype,
        None if mask is None else mask.dtype,
        None if offsets is None else offsets.dtype,
        None if advantages is None else advantages.dtype,
        given.per_sequence,
        tuple([x.dtype for x in extras]),
        None if log_mass is None else log_mass.dtype,
        given.mass_of_rollout,
        wanted,
        split,
    )
    plan = recipe.plan
    advantages = advantages.contiguous() if plan.advantages and advantages is not None else None
    log_mass = None if log_mass is None else log_mass.contiguous()
    strided = [train, rollout] if mask is None else [train, rollout, mask]
    grid = grid_for(train, offsets, strided, min(train.element_size(), rollout.element_size()))

    def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    mask_kind = torch.bool if mask is None else mask.dtype
    weights = empty(train.shape, recipe.kind) if plan.writes_weights else None
    mask_out = empty(train.shape, mask_kind) if plan.writes_mask else None
    keep = empty((grid.sequences,), torch.bool)
    statistics = empty((recipe.statistics,), torch.float64)
    workspace = Workspace(recipe.scratch, grid.counts, device)
    histogram = torch.zeros(COPIES.value * HISTOGRAM_BINS, dtype=torch.int64, device=device) if plan.full else None
    found = Found(weights, mask_out, keep, statistics, recipe.sums)
    tensors: dict[str, Tensor | None] = {
        "train_logp": train,
        "rollout_logp": rollout,
        "mask": mask,
        "log_mass": log_mass,
        "advantages": advantages,
        "offsets": offsets,
        "numbers": recipe.upload.read(),
        "weights": weights,
        "mask_out": mask_out,
        "keep_out": keep,
        "statistics": statistics,
        "histogram": histogram,
    }
    values = {
        **recipe.constants,
        **workspace.addresses,
        **tensors,
        **strides_of({"train": train, "rollout": rollout, "mask": mask}, grid),
        "externals": extras,
        "tokens": grid.tokens,
        "sequences": grid.sequences,
        "width": grid.width,
        "tiles": grid.tiles,
        "slots": grid.slots,
        "steps": grid.steps,
        "token_programs": grid.token_programs,
        "sequence_programs": grid.sequence_programs,
        "parts": grid.parts,
        "part": grid.part,
        "TILING": grid.cut.tiling,
        "SHAPE": grid.cut.shape,
    }
    # `apply` has slots of its own.
    of_apply = values | {"tiles": grid.tiles_of_apply, "steps": grid.steps_of_apply, "TILING": grid.cut.spread}
    # `decide` does not read the advantages of tokens, whose dtype would be part of its compile key.
    of_decide = values if plan.advantages in (None, "sequence") else values | {"advantages": None}
    of_gather: dict[str, Any] = {}
    if split:
        owners = grid.sequences + 2 * plan.packed
        found.by_owner = _by_owner(plan, owners, device)
        tables = vars(found.by_owner)
        of_gather = values | {"owner_count": owners} | {f"{name}_out": x for name, x in tables.items()}
        of_decide = of_decide | tables | {"slots": owners}
        tensors |= {f"{name}_out": x for name, x in tables.items()}
    if recipe.pointers is None:
        recipe.pointers = names_of_tensors(tensors)
    where = (grid.cut, alignment_of((workspace.memory, *extras, *recipe.pointers(tensors)))), workspace, device
    adding = grid.parts * recipe.groups + plan.full
    launches = (
        (grid.token_programs, grid.cut.warp, values),
        (grid.sequence_programs, SEQUENCE_THREADS, of_gather),
        (grid.sequence_programs + adding, SEQUENCE_THREADS, of_decide),
        (grid.programs_of_apply, grid.cut.threads, of_apply),
    )
    sites = zip(recipe.sites, launches, strict=True)
    return found, tuple([Launch(site, *one, *where) for site, one in sites if site is not None])


def _contiguous_extras(given: Given) -> tuple[Tensor, ...]:
    extras = given.externals if given.new is None else (*given.externals, given.new)
    return tuple(x.contiguous() for x in extras)


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
