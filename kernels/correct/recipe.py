"""Recipes of `correct`: all about its launches that follows from a Spec, dtypes and a device, and not from a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rollout_corr.kernels.correct.apply import apply_kernel
from rollout_corr.kernels.correct.decide import decide_kernel
from rollout_corr.kernels.correct.numbers import numbers_of
from rollout_corr.kernels.correct.plan import Plan, Tables
from rollout_corr.kernels.correct.planner import plan_of
from rollout_corr.kernels.correct.read import read_kernel
from rollout_corr.kernels.gather import gather_kernel
from rollout_corr.kernels.grid import SEQUENCE_THREADS, SIZES, Grid, sizes_of
from rollout_corr.kernels.launches import Field, Names, Site, Sized, WorkspaceLayout
from rollout_corr.kernels.partials import groups
from rollout_corr.kernels.uploads import Upload, upload_of
from rollout_corr.metrics.histogram import HISTOGRAM_BINS
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec


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


@dataclass(eq=False)
class Recipe:
    """Everything about calls that share a Spec, dtypes and a device, whatever their sizes and addresses.

    Attributes:
        plan: The plan of the kernels.
        kind: The dtype that computes.
        scratch: The tables.
        names: Names what launches take: `prepare` lists the tensors in the same order.
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
    names: Names
    read: Site
    gather: Site | None
    decide: Site
    apply: Site | None
    statistics: int
    sums: int
    upload: Upload
    constants: tuple[Any, ...]
    groups: int


STRIDED = ("train", "rollout", "mask")
CONSTANTS = ("PLAN", "BY_OWNER")
# The tables of slots, which a split batch also has by owner.
BY_OWNER = Tables.of_slots


def kind_and_plan(
    spec: Spec,
    dtypes: tuple[torch.dtype | None, ...],
    per_sequence: bool,
    mass_of_rollout: bool,
    wanted: Wanted | None = None,
) -> tuple[torch.dtype, Plan]:
    """Choose the dtype that computes, and the plan; arguments are those of `recipe_of`."""
    train, rollout, mask, offsets, advantages, log_mass = dtypes
    assert train is not None and rollout is not None
    kind = torch.promote_types(torch.promote_types(train, rollout), torch.float32)
    wanted = Wanted.by(spec, mask is not None, offsets is not None) if wanted is None else wanted
    return kind, plan_of(
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


@cached(maxsize=256)
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
    kind, plan = kind_and_plan(spec, dtypes, per_sequence, mass_of_rollout, wanted)
    maxima = len(plan.token_maxima) + len(plan.sequence_maxima) + len(plan.call_maxima)
    bins = HISTOGRAM_BINS if plan.full else 0
    statistics = len(plan.token_sums) + len(plan.sequence_sums) + bins + len(plan.call_sums) + maxima
    scratch = _scratch_of(plan, kind)
    _, _, mask, offsets, _, log_mass = dtypes
    # Given, and handed back; two of turns.
    tensors: dict[str, object] = {"train_logp": True, "rollout_logp": True, "mask": mask, "log_mass": log_mass}
    tensors |= {"advantages": plan.advantages, "offsets": offsets, "numbers": True, "weights": plan.writes_weights}
    tensors |= {"mask_out": plan.writes_mask, "keep_out": True, "statistics": True, "histogram": plan.full}
    tensors |= {"within": plan.turns, "keep_turns_out": plan.turns}
    # Of a split batch its sums by owner.
    tensors |= {f"{table}_out": split and getattr(plan, table) for table in BY_OWNER}
    names = Names(tensors, scratch.names, STRIDED, (*SIZES, *CONSTANTS))
    # `decide` does not read the advantages of tokens, whose dtype would be part of its compile key.
    of_decide = {"advantages": "nothing"} if plan.advantages == "token" else {}
    if split:
        of_decide |= {table: f"{table}_out" for table in BY_OWNER} | {"slots": "unit_count"}
    # `apply` has slots of its own.
    of_apply = {"tiles": "tiles_of_apply", "steps": "steps_of_apply", "TILING": "TILING_OF_APPLY"}
    return Recipe(
        plan=plan,
        kind=kind,
        scratch=scratch,
        names=names,
        read=Site(read_kernel, names),
        gather=Site(gather_kernel, names) if split else None,
        decide=Site(decide_kernel, names, of_decide),
        apply=Site(apply_kernel, names, of_apply) if plan.applies else None,
        statistics=statistics,
        sums=statistics - maxima,
        upload=upload_of(tuple(numbers_of(spec, plan.double).values()), device),
        constants=(plan, split),
        groups=groups(plan),
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
        Field("floats", len(plan.floats), kind) if plan.floats else None,
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


@cached(maxsize=1024)
def sized_for(recipe: Recipe, grid: Grid) -> Sized:
    """List the launches of a recipe on batches of a size."""
    launches = [(recipe.read, grid.token_programs, grid.cut.warp)]
    if recipe.gather is not None:
        launches.append((recipe.gather, grid.unit_programs, SEQUENCE_THREADS))
    adding = grid.parts * recipe.groups + recipe.plan.full
    deciding = grid.sequence_programs * (grid.shares if grid.shares > 1 and recipe.plan.zeroes else 1)
    launches.append((recipe.decide, deciding + adding, SEQUENCE_THREADS))
    if recipe.apply is not None:
        launches.append((recipe.apply, grid.programs_of_apply, grid.cut.threads))
    return Sized((*sizes_of(grid), *recipe.constants), tuple(launches))
