"""Launch `correct` on Triton: two launches, or three, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves sums of every slot, `decide` turns them into rejections, weights of
sequences and the statistics, `apply` brings these weights to the tokens. Only stream order hands anything over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Grid,
    current,
    grid_for,
    names_of_strides,
    strides_of,
)
from rollout_corr.kernels.launches import (
    Field,
    Launch,
    Names,
    Operands,
    Site,
    Workspace,
    WorkspaceLayout,
    addresses_of,
    alignment_of,
    dtypes_of,
    picker,
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
    weights_out: Tensor | None = None
    mask_out: Tensor | None = None


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
    """Everything about calls that share a Spec, dtypes and a device, whatever their sizes and addresses.

    Attributes:
        plan: The plan of the kernels.
        kind: The dtype that computes.
        scratch: The tables.
        held: Picks the tensors that there are from all of `TENSORS`.
        read, gather, decide, apply: The kernels; None for one that is not launched.
        statistics: How many.
        sums: How many of them are sums.
        upload: The thresholds.
        constants: Values of `CONSTANTS`.
        groups: Of the columns that programs of `decide` add up.
    """

    plan: Plan
    kind: torch.dtype
    scratch: WorkspaceLayout
    held: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    read: Site
    gather: Site | None
    decide: Site
    apply: Site | None
    statistics: int
    sums: int
    upload: Upload
    constants: tuple[Any, ...]
    groups: int


# Every tensor of a call: given, and handed back; the last four are the sums by owner of a split batch.
TENSORS = (
    *("train_logp", "rollout_logp", "mask", "log_mass", "advantages", "offsets", "numbers"),
    *("weights", "mask_out", "keep_out", "statistics", "histogram"),
    *("counts_out", "integers_out", "floats_out", "peaks_out"),
)
STRIDED = ("train", "rollout", "mask")
CONSTANTS = ("PLAN", "BY_OWNER", "nothing")


@lru_cache(maxsize=256)
def recipe_of(
    spec: Spec,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    extras: tuple[torch.dtype | None, ...],
    per_sequence: bool,
    mass_of_rollout: bool,
    wanted: Wanted | None,
    split: bool,
) -> Recipe:
    """Make the recipe for a Spec and the dtypes of a batch. Every argument of a launch has a type that these decide.

    Args:
        spec: The Spec.
        device: The device.
        dtypes: Of log-probs, mask, offsets, advantages and mass.
        extras: Of externals and further log-probs, which are part of the key of the cache alone.
        per_sequence: Advantages are [S].
        mass_of_rollout: As in `Given`.
        wanted: The outputs; None: all that the Spec asks for.
        split: Sequences lie on several ranks.
    """
    del extras
    train, rollout, mask, offsets, advantages, log_mass = dtypes
    assert train is not None and rollout is not None
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
    scratch = _scratch_of(plan, kind)
    missing = {
        "mask": mask is None,
        "log_mass": log_mass is None,
        "advantages": plan.advantages is None,
        "offsets": offsets is None,
        "weights": not plan.writes_weights,
        "mask_out": not plan.writes_mask,
        "histogram": not plan.full,
        "counts_out": not split,
        "integers_out": not (split and plan.integers),
        "floats_out": not split,
        "peaks_out": not (split and plan.peaks),
    }
    held = [place for place, name in enumerate(TENSORS) if not missing.get(name)]
    others = (*Grid._fields, *names_of_strides(STRIDED), "externals", *CONSTANTS)
    names = Names([TENSORS[place] for place in held], scratch.names, others)
    absent = dict.fromkeys([name for name in (*TENSORS, *SCRATCH) if name not in names.places], "nothing")
    of_decide = dict(absent)
    if plan.advantages == "token":
        # `decide` does not read the advantages of tokens, whose dtype would be part of its compile key.
        of_decide["advantages"] = "nothing"
    if split:
        of_decide |= {table: absent.get(f"{table}_out", f"{table}_out") for table in BY_OWNER}
        of_decide["slots"] = "owner_count"
    # `apply` has slots of its own.
    of_apply = absent | {"tiles": "tiles_of_apply", "steps": "steps_of_apply", "TILING": "TILING_OF_APPLY"}
    return Recipe(
        plan=plan,
        kind=kind,
        scratch=scratch,
        held=picker(held),
        read=Site(read_kernel, names, absent),
        gather=Site(gather_kernel, names, absent) if split else None,
        decide=Site(decide_kernel, names, of_decide),
        apply=Site(apply_kernel, names, of_apply) if plan.applies else None,
        statistics=statistics,
        sums=statistics - maxima,
        upload=_upload(spec, plan.double, device),
        constants=(plan, split, None),
        groups=groups(plan),
    )


# The tables of slots, which a split batch also has by owner.
BY_OWNER = ("counts", "integers", "floats", "peaks")

# Every table that a plan may have: of slots, of token programs, of sequence programs, of sequences.
SCRATCH = (
    *BY_OWNER,
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
    sequences have to add up before the third.
    """
    train, rollout, mask, offsets = given.train, given.rollout, given.mask, given.offsets
    advantages, log_mass, device = given.advantages, given.log_mass, train.device
    extras = () if not given.externals and given.new is None else _contiguous_extras(given)
    recipe = recipe_of(
        spec,
        device,
        dtypes_of((train, rollout, mask, offsets, advantages, log_mass)),
        dtypes_of(extras),
        given.per_sequence,
        given.mass_of_rollout,
        wanted,
        split,
    )
    plan = recipe.plan
    strided = (train, rollout) if mask is None else (train, rollout, mask)
    sequences, width = train.shape if offsets is None else (offsets.shape[0] - 1, None)
    grid = grid_for(sequences, width, strided, min(train.element_size(), rollout.element_size()), plan.double)
    weights, mask_out, histogram, by_owner = given.weights_out, given.mask_out, None, None
    if plan.writes_weights and weights is None:
        weights = torch.empty(*train.shape, dtype=recipe.kind, device=device)
    if plan.writes_mask and mask_out is None:
        mask_out = torch.empty(*train.shape, dtype=torch.bool if mask is None else mask.dtype, device=device)
    if plan.full:
        histogram = torch.zeros(COPIES.value * HISTOGRAM_BINS, dtype=torch.int64, device=device)
    if split:
        by_owner = _by_owner(plan, grid.owner_count, device)
    keep = torch.empty(sequences, dtype=torch.bool, device=device)
    statistics = torch.empty(recipe.statistics, dtype=torch.float64, device=device)
    workspace = Workspace(recipe.scratch, grid.counted, device)
    log_mass = None if log_mass is None else log_mass.contiguous()
    advantages = advantages.contiguous() if plan.advantages and advantages is not None else None
    tensors = recipe.held((
        train, rollout, mask, log_mass, advantages, offsets, recipe.upload.read(), weights, mask_out, keep, statistics,
        histogram, *(NO_TABLES if by_owner is None else vars(by_owner).values()),
    ))  # fmt: skip
    addresses = addresses_of(tensors)
    values = (
        *addresses, *workspace.addresses, *grid, *strides_of((train, rollout, mask), grid), extras, *recipe.constants
    )  # fmt: skip
    everywhere = (*addresses, workspace.first, *addresses_of(extras))
    alignment = alignment_of(everywhere, (*tensors, workspace.memory, *extras))
    operands = Operands(values, tensors, workspace, (grid.cut, alignment), device)
    launches = [Launch(recipe.read, grid.token_programs, grid.cut.warp, operands)]
    if recipe.gather is not None:
        launches.append(Launch(recipe.gather, grid.sequence_programs, SEQUENCE_THREADS, operands))
    adding = grid.parts * recipe.groups + plan.full
    deciding = grid.sequence_programs * (grid.shares if grid.shares > 1 and plan.zeroes else 1)
    launches.append(Launch(recipe.decide, deciding + adding, SEQUENCE_THREADS, operands))
    if recipe.apply is not None:
        launches.append(Launch(recipe.apply, grid.programs_of_apply, grid.cut.threads, operands))
    return Found(weights, mask_out, keep, statistics, recipe.sums, by_owner), tuple(launches)


def _contiguous_extras(given: Given) -> tuple[Tensor, ...]:
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
