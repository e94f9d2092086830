"""Launch `policy_loss` on Triton: two launches for value, statistics and gradient, one for backward.

A pass over the tokens writes the gradient before it is divided, a pass over the sequences counts, and its last program
finishes. GSPO and GMPO, whose gradient depends on whole sequences, pass over both twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.grid import (
    SEQUENCE_THREADS,
    current,
    grid_for,
    strides_of,
)
from rollout_corr.kernels.launches import (
    NOTHING,
    Field,
    Launch,
    Site,
    Workspace,
    WorkspaceLayout,
    alignment_of,
    names_of_tensors,
)
from rollout_corr.kernels.partials import groups
from rollout_corr.kernels.policy_loss.gradient import gradient_kernel, scale_kernel
from rollout_corr.kernels.policy_loss.plan import LossPlan, Scaling, numbers_of, plans_of
from rollout_corr.kernels.policy_loss.sequences import sequences_kernel
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

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order in which `recipe_of` takes their dtypes."""
        return (
            *(self.new, self.base, self.ref, self.weights, self.trains, self.mask),
            *(self.advantages, self.offsets, self.divisor, self.log_mass),
        )


@dataclass
class LossFound:
    """The results of the kernels."""

    value: Tensor
    gradient: Tensor | None  # of the value times its divisor, and times its length where a sequence is averaged
    inners: Tensor | None  # [S], the factor of each sequence's gradient
    divisor: Tensor
    statistics: Tensor  # float64, the sums and then the maxima


class Pass(NamedTuple):
    """A launch of a loss: the kernel, its plan, and what it does not look at, which would be in its compile key."""

    site: Site
    plan: LossPlan
    unused: tuple[str, ...]
    groups: int = 0  # of the columns that it adds up


@dataclass(eq=False)
class LossRecipe:
    """Everything about calls that share an objective, dtypes and a device, whatever their sizes."""

    plans: tuple[LossPlan, ...]
    kind: torch.dtype  # computes
    scratch: WorkspaceLayout
    passes: tuple[Pass, ...]  # over tokens and over sequences, and where there is a second pass over tokens both again
    upload: Upload
    statistics: int
    constants: dict[str, Any]  # arguments that are the same for every call
    pointers: Callable[[Mapping[str, Any]], tuple[Tensor, ...]] | None = None  # picks all that are tensors


@lru_cache(maxsize=256)
def recipe_of(
    objective: Objective,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    double: bool,
    per_sequence: bool,
    mass_of_base: bool,
    differentiable: bool,
) -> LossRecipe:
    """Make the recipe for an objective and the dtypes of `LossGiven.tensors`, by which every argument has its type."""
    _, base, ref, weights, trains, mask, _, offsets, divisor, log_mass = dtypes
    kind = torch.float64 if double else torch.float32
    plans = plans_of(
        objective,
        counted=divisor is None,
        double=double,
        packed=offsets is not None,
        based=base is not None,
        weighted=weights is not None,
        referred=ref is not None,
        trained=trains is not None,
        masked=mask is not None,
        advantages="sequence" if per_sequence else "token",
        differentiable=differentiable,
        mass=None if log_mass is None else ("rollout" if mass_of_base else "train"),
    )
    first, last = plans[0], plans[-1]
    scratch = _scratch_of(first, last, kind)

    def over_tokens(plan: LossPlan) -> Pass:
        unused = [*(OF_SLOTS if plan.phase == "write" else OF_SECOND_PASS), *(() if plan.writes else OF_LAST_PASS)]
        return Pass(Site(gradient_kernel), plan, tuple(unused))

    passes = [
        one
        for plan in plans
        for one in (over_tokens(plan), Pass(Site(sequences_kernel), plan, (), groups(plan) if plan.writes else 0))
    ]
    return LossRecipe(
        plans=plans,
        kind=kind,
        scratch=scratch,
        passes=tuple(passes),
        upload=_upload(objective, double, device),
        statistics=len(last.sums) + len(last.maxima),
        constants={
            # Of tables that this plan does not have.
            **dict.fromkeys(name for name in SCRATCH if name not in scratch.fields),
        },
    )


# Parameters of `gradient_kernel` that only one of two passes over the tokens looks at. The other pass gets None: their
# dtype and alignment would be part of its compile key.
OF_SECOND_PASS = ("levels", "pulls", "inners")
OF_SLOTS = ("counts", "integers", "floats")
OF_LAST_PASS = ("gradient", "token_sums", "token_maxima")

# Every table that a plan may have: of slots, of token programs, of sequence programs, of sequences (gradient.Shared).
SCRATCH = (
    *(*OF_SLOTS, "token_sums", "token_maxima", "sequence_sums", "counter", "levels", "pulls"),
    *("part_sums", "part_maxima"),
)


def _scratch_of(first: LossPlan, last: LossPlan, kind: torch.dtype) -> WorkspaceLayout:
    """List the tables of a loss: [columns, slots], [columns, programs] of programs over tokens.

    Those of programs over sequences and of parts are [rows, columns] to the kernels. The counter is the first of its
    table.
    """

    def tables(*named: tuple[str, tuple[str, ...], torch.dtype]) -> list[Field]:
        return [Field(name, len(columns), dtype) for name, columns, dtype in named if columns]

    return WorkspaceLayout(
        tables(
            ("counts", first.counts, torch.int32),
            ("integers", first.integers, torch.int64),
            ("floats", first.floats, kind),
        ),
        tables(("token_sums", last.token_sums, torch.float64), ("token_maxima", last.token_maxima, torch.float64)),
        [*tables(("sequence_sums", first.sequence_sums, torch.float64)), Field("counter", None, torch.int32)],
        [Field(name, None, kind) for name, wanted in (("levels", last.levels), ("pulls", last.pulls)) if wanted],
        tables(("part_sums", last.token_sums, torch.float64), ("part_maxima", last.token_maxima, torch.float64)),
    )


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
    new, base, offsets = given.new, given.base, given.offsets
    device, tensors = new.device, given.tensors
    dtypes = tuple([None if x is None else x.dtype for x in tensors])
    recipe = recipe_of(objective, device, dtypes, given.double, given.per_sequence, given.mass_of_base, differentiable)
    kind, last = recipe.kind, recipe.plans[-1]
    inputs = {
        "new": new,
        "base": base,
        "ref": given.ref,
        "weights": given.weights,
        "trains": given.trains,
        "mask": given.mask,
    }
    strided = [x for x in inputs.values() if x is not None]
    element = new.element_size() if base is None else min(new.element_size(), base.element_size())
    grid = grid_for(new, offsets, strided, element)

    def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    gradient = empty(new.shape, kind) if differentiable else None
    inners = empty((grid.sequences,), kind) if last.averages else None
    value, divisor = empty((), kind), empty((), torch.float64)
    statistics = empty((recipe.statistics,), torch.float64)
    workspace = Workspace(recipe.scratch, grid.counts, device)
    held: dict[str, Tensor | None] = {
        "new_logp": new,
        "base_logp": base,
        "ref_logp": given.ref,
        "weights": given.weights,
        "trains": given.trains,
        "mask": given.mask,
        "advantages": given.advantages.contiguous(),
        "offsets": offsets,
        "given": given.divisor,
        "log_mass": None if given.log_mass is None else given.log_mass.contiguous(),
        "numbers": recipe.upload.read(),
        "gradient": gradient,
        "inners": inners,
        "value": value,
        "divisor": divisor,
        "statistics": statistics,
    }
    values = {
        **recipe.constants,
        **workspace.addresses,
        **held,
        **strides_of(inputs, grid),
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
    if recipe.pointers is None:
        recipe.pointers = names_of_tensors(held)
    key = grid.cut, alignment_of((workspace.memory, *recipe.pointers(held)))

    def launch(one: Pass, programs: int, threads: int) -> Launch:
        needed = {**values, "PLAN": one.plan, **dict.fromkeys(one.unused)}
        return Launch(one.site, programs, threads, needed, key, workspace, device)

    found = LossFound(value, gradient, inners, divisor, statistics)
    launches = []
    for one in recipe.passes:
        if one.site.kernel is gradient_kernel:
            programs, threads = grid.token_programs, grid.cut.warp
        else:
            programs = grid.sequence_programs if one.plan.phase != "write" else 0
            programs += grid.parts * one.groups
            threads = SEQUENCE_THREADS
        launches.append(launch(one, programs, threads))
    return found, tuple(launches)


class Slope(NamedTuple):
    """The operands of `scale`."""

    gradient: Tensor  # [N] or [B, T], contiguous
    inners: Tensor | None  # [S] in its dtype; None or empty: sequences do not matter
    upstream: Tensor  # 0-d, any floating dtype, on the device of the gradient
    divisor: Tensor  # 0-d float64
    offsets: Tensor | None  # of a packed batch
    dtype: torch.dtype  # of the result


def scale(slope: Slope) -> Tensor:
    """Scale the gradient, in one launch: gradient * upstream / divisor, times each sequence's inner factor."""
    with current(slope.gradient.device):
        scaled, launch = prepare_scale(slope)
        launch.run()
    return scaled


def prepare_scale(slope: Slope) -> tuple[Tensor, Launch]:
    """Allocate the result of `scale` and say what has to be launched; see there."""
    gradient, inners, upstream, divisor, offsets, dtype = slope
    device = gradient.device
    if inners is None or not inners.numel():
        # All tokens are one row.
        flat, inners, offsets = gradient.view(1, -1), None, None
    else:
        flat = gradient
        if offsets is not None and offsets.device != device:
            offsets = offsets.to(device)
    scaled = torch.empty(gradient.shape, dtype=dtype, device=device)
    element = min(gradient.element_size(), scaled.element_size())
    grid = grid_for(flat, offsets, [flat], element)
    held = {
        "gradient": gradient,
        "inners": inners,
        "upstream": upstream,
        "divisor": divisor,
        "offsets": offsets,
        "scaled": scaled,
    }
    values = {
        **held,
        "tokens": grid.tokens,
        "sequences": grid.sequences,
        "width": grid.width,
        "tiles": grid.tiles,
        "steps": grid.steps,
        "PLAN": Scaling(offsets is not None, inners is not None),
        "TILING": grid.cut.tiling,
    }
    dtypes = tuple([None if x is None else x.dtype for x in held.values()])
    site = _site_of_scaling(device, dtypes)
    key = grid.cut, alignment_of([x for x in held.values() if x is not None])
    return scaled, Launch(site, grid.token_programs, grid.cut.warp, values, key, NOTHING, device)


@lru_cache(maxsize=256)
def _site_of_scaling(device: torch.device, dtypes: tuple[torch.dtype | None, ...]) -> Site:
    del device, dtypes  # all launches of a site share them
    return Site(scale_kernel)
