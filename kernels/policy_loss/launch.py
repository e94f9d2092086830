"""Launch `policy_loss` on Triton: two launches for value, statistics and gradient; backward.py has the one of backward.

A pass over the tokens writes the gradient before it is divided, a pass over the sequences counts, and its last program
finishes. GSPO and GMPO, whose gradient depends on whole sequences, pass over both twice, AveragePPO three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_corr.kernels.by_turns import by_turns
from rollout_corr.kernels.grid import (
    SEQUENCE_THREADS,
    SIZES,
    Grid,
    current,
    grid_for,
    names_of_strides,
    of_units,
    sizes_of,
    strides_of,
)
from rollout_corr.kernels.launches import (
    Field,
    Launch,
    Names,
    Operands,
    Site,
    Sized,
    Workspace,
    WorkspaceLayout,
    addresses_of,
    alignment_of,
    dtypes_of,
    picker,
)
from rollout_corr.kernels.partials import groups
from rollout_corr.kernels.policy_loss.gradient import gradient_kernel
from rollout_corr.kernels.policy_loss.plan import LossPlan, numbers_of, plans_of
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
        scales: Per token, factors of all that it adds to the loss.
        log_mass: Per token, the log of the mass that truncated sampling kept.
        mass_of_base: True if it is taken from the base, and not from new_logp.
        double: float64 computes.
        looked: Per token, what the look at the batch found of it: see `Surrogate.hands_tokens`.
        decided: [K] float64, the last numbers of the objective, which the look at the batch found.
        turns: [U + 1] int32 or int64, offsets of turns among the tokens, for a surrogate of turns.
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
    scales: Tensor | None = None
    log_mass: Tensor | None = None
    mass_of_base: bool = False
    double: bool = False
    turns: Tensor | None = None
    looked: Tensor | None = None
    decided: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order in which `recipe_of` takes their dtypes."""
        return (
            *(self.new, self.base, self.ref, self.weights, self.trains, self.mask),
            *(self.advantages, self.offsets, self.divisor, self.log_mass, self.scales, self.looked),
        )


@dataclass
class LossFound:
    """The results of the kernels."""

    value: Tensor
    gradient: Tensor | None  # of the value times its divisor, and times its length where a sequence is averaged
    inners: Tensor | None  # [S], the factor of each sequence's gradient; [U] of each turn's, where turns are given
    divisor: Tensor
    statistics: Tensor  # float64, the sums and then the maxima


class Pass(NamedTuple):
    """A launch of a loss.

    Attributes:
        site: The kernel.
        over_tokens: Its programs pass over tokens.
        over_sequences: Its programs pass over sequences.
        groups: Of the columns that programs behind those add up.
    """

    site: Site
    over_tokens: bool = False
    over_sequences: bool = False
    groups: int = 0


@dataclass(eq=False)
class LossRecipe:
    """Everything about calls that share an objective, dtypes and a device, whatever their sizes and addresses.

    Attributes:
        kind: The dtype that computes.
        averages: Sequences are averaged, so their gradients have factors.
        scratch: The tables.
        held: Picks the tensors that there are from all of `TENSORS`.
        passes: Over tokens and over sequences, and where there is a further pass over tokens both again.
        upload: The numbers of the objective.
        statistics: How many.
        constants: The plan of each pass over the tokens, and None.
    """

    kind: torch.dtype
    averages: bool
    scratch: WorkspaceLayout
    held: Callable[[Sequence[Any]], tuple[Tensor, ...]]
    passes: tuple[Pass, ...]
    upload: Upload
    statistics: int
    constants: tuple[LossPlan | None, ...]


# Every tensor of a call: given, and handed back.
TENSORS = (
    *("new_logp", "base_logp", "ref_logp", "weights", "trains", "mask", "advantages", "offsets", "given", "log_mass"),
    *("scales", "looked"),
    *("numbers", "gradient", "inners", "value", "divisor", "statistics", "within"),
)
PER_TOKEN = ("new", "base", "ref", "weights", "trains", "mask", "log_mass", "scales", "looked")
STRIDED = ("new", "base", "ref", "weights", "trains", "mask")


@lru_cache(maxsize=256)
def recipe_of(
    objective: Objective,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
    double: bool,
    per_sequence: bool,
    mass_of_base: bool,
    differentiable: bool,
    turns: bool,
) -> LossRecipe:
    """Make the recipe for an objective and the dtypes of `LossGiven.tensors`, by which every argument has its type."""
    _, base, ref, weights, trains, mask, _, offsets, divisor, log_mass, scales, looked = dtypes
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
        has_scales=scales is not None,
        looked=looked is not None,
        turns=turns,
    )
    last = plans[-1]
    scratch = _scratch_of(plans, kind)
    made = {"numbers": True, "gradient": differentiable, "inners": last.averages}
    made |= {"value": True, "divisor": True, "statistics": True, "within": turns}
    held = [place for place, x in enumerate((*dtypes, *made.values())) if x]
    plan_names = [f"PLAN {number}" for number in range(len(plans))]
    others = (*names_of_strides(STRIDED), *SIZES, *plan_names, "nothing")
    names = Names([TENSORS[place] for place in held], scratch.names, others)
    absent = dict.fromkeys([name for name in (*TENSORS, *SCRATCH) if name not in names.places], "nothing")
    passes = []
    for plan, name in zip(plans, plan_names, strict=True):
        unused = [
            *OF_SEQUENCES[plan.phase],
            *(() if plan.adds_up else OF_SLOTS),
            *(() if plan.writes else OF_LAST_PASS),
        ]
        over_tokens = Site(gradient_kernel, names, absent | {"PLAN": name} | dict.fromkeys(unused, "nothing"))
        over_sequences = Site(sequences_kernel, names, absent | {"PLAN": name})
        passes.append(Pass(over_tokens, over_tokens=True))
        adding = groups(plan) if plan.writes else 0
        passes.append(Pass(over_sequences, over_sequences=plan.adds_up, groups=adding))
    return LossRecipe(
        kind=kind,
        averages=last.averages,
        scratch=scratch,
        held=picker(held),
        passes=tuple(passes),
        upload=_upload(objective, double, device),
        statistics=len(last.sums) + len(last.maxima),
        constants=(*plans, None),
    )


# Parameters of `gradient_kernel` that only some of the passes over the tokens look at. Another pass gets None: their
# dtype and alignment would be part of its compile key. Those that a phase does not read of sequences:
OF_SEQUENCES = {"pull": ("pulls", "inners"), "write": ()}
OF_SEQUENCES |= dict.fromkeys(("whole", "sum"), ("levels", "pulls", "inners"))
OF_SLOTS = ("counts", "integers", "floats")
OF_LAST_PASS = ("gradient", "token_sums", "token_maxima")

# Every table that a plan may have: of slots, of token programs, of sequence programs, of sequences (gradient.Shared).
SCRATCH = (
    *(*OF_SLOTS, "token_sums", "token_maxima", "sequence_sums", "counter", "levels", "pulls"),
    *("part_sums", "part_maxima"),
)


def _scratch_of(plans: tuple[LossPlan, ...], kind: torch.dtype) -> WorkspaceLayout:
    """List the tables of a loss: [columns, slots], [columns, programs] of programs over tokens.

    Those of programs over sequences and of parts are [rows, columns] to the kernels. The counter is the first of its
    table.
    """

    def tables(*named: tuple[str, tuple[str, ...], torch.dtype]) -> list[Field]:
        return [Field(name, len(columns), dtype) for name, columns, dtype in named if columns]

    first, last = plans[0], plans[-1]
    # Passes use them one after the other, and some need more columns.
    integers, floats = (max((getattr(plan, name) for plan in plans), key=len) for name in ("integers", "floats"))
    of_sequences = ("levels", last.levels), ("pulls", last.pulls or last.pulls_too)
    return WorkspaceLayout(
        tables(("counts", first.counts, torch.int32), ("integers", integers, torch.int64), ("floats", floats, kind)),
        tables(("token_sums", last.token_sums, torch.float64), ("token_maxima", last.token_maxima, torch.float64)),
        [*tables(("sequence_sums", first.sequence_sums, torch.float64)), Field("counter", None, torch.int32)],
        [Field(name, None, kind) for name, wanted in of_sequences if wanted],
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
    with current(given.new):
        found, launches = prepare(given, objective, differentiable)
        for launch in launches:
            launch.run()
    return found


def prepare(given: LossGiven, objective: Objective, differentiable: bool) -> tuple[LossFound, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone; see `run`."""
    shape, turns, within = given.new.shape, given.turns, None
    count = shape[0] if given.offsets is None else given.offsets.shape[0] - 1
    if turns is not None:
        given, within = by_turns(given, turns, given.new, PER_TOKEN)
    new, base, offsets = given.new, given.base, given.offsets
    device = new.device
    recipe = recipe_of(
        objective,
        device,
        dtypes_of(given.tensors),
        given.double,
        given.per_sequence,
        given.mass_of_base,
        differentiable,
        turns is not None,
    )
    kind = recipe.kind
    strided = new, base, given.ref, given.weights, given.trains, given.mask
    element = new.element_size() if base is None else min(new.element_size(), base.element_size())
    sequences, width = new.shape if offsets is None else (offsets.shape[0] - 1, None)
    grid = grid_for(sequences, width, [x for x in strided if x is not None], element, given.double)
    grid = grid if within is None else of_units(grid, count, beside=True)
    gradient = torch.empty(*shape, dtype=kind, device=device) if differentiable else None
    inners = torch.empty(sequences, dtype=kind, device=device) if recipe.averages else None
    value = torch.empty((), dtype=kind, device=device)
    divisor = torch.empty((), dtype=torch.float64, device=device)
    statistics = torch.empty(recipe.statistics, dtype=torch.float64, device=device)
    workspace = Workspace(recipe.scratch, grid.counted, device)
    log_mass = None if given.log_mass is None else given.log_mass.contiguous()
    scales = None if given.scales is None else given.scales.contiguous()
    looked = None if given.looked is None else given.looked.contiguous()
    held = recipe.held((
        *strided, given.advantages.contiguous(), offsets, given.divisor, log_mass, scales, looked,
        recipe.upload.read() if given.decided is None else _with(recipe.upload.read(), given.decided),
        gradient, inners, value, divisor, statistics, within,
    ))  # fmt: skip
    addresses = addresses_of(held)
    sized = _sized(recipe, grid)
    operands = Operands(
        values=(*addresses, *workspace.addresses, *strides_of(strided, grid), *sized.values),
        tensors=held,
        workspace=workspace,
        key=(grid.cut, alignment_of((*addresses, workspace.first), (*held, workspace.memory))),
        device=device,
    )
    return LossFound(value, gradient, inners, divisor, statistics), sized.on(operands)


def _with(numbers: Tensor, decided: Tensor) -> Tensor:
    """Copy the numbers with those that the look at the batch found, which come last; nothing is read."""
    return torch.cat((numbers[: -decided.shape[0]], decided))


@lru_cache(maxsize=1024)
def _sized(recipe: LossRecipe, grid: Grid) -> Sized:
    """List the launches of a recipe on batches of a size."""
    launches = []
    for site, over_tokens, over_sequences, adding in recipe.passes:
        if over_tokens:
            launches.append((site, grid.token_programs, grid.cut.warp))
        else:
            programs = grid.parts * adding + (grid.sequence_programs if over_sequences else 0)
            launches.append((site, programs, SEQUENCE_THREADS))
    return Sized((*sizes_of(grid), *recipe.constants), tuple(launches))
