"""Launch `correct` on Triton: two launches, or three, whatever the number of tokens and of sequences.

`read` takes every log-prob once and leaves sums of every slot, `decide` turns them into rejections, weights of
sequences and the statistics, `apply` brings these weights to the tokens. Only stream order hands anything over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...metrics.histogram import HISTOGRAM_BINS
from ...specs.caches import cached_untraced
from ...specs.correction import Spec
from ...specs.operands import CorrectOperands, CorrectResult
from ..by_turns import PartsOfTurns, by_turns, owners_here
from ..gather import gather_kernel
from ..grid import SEQUENCE_THREADS, Grid, current, grid_for, of_units, over_tokens, over_units
from ..launches import Launch, Operation, Site, Table, dtypes_of, tables_of_partials
from ..partials import groups
from ..tables import Tables, kept_of
from ..uploads import upload_of
from .apply import apply_kernel
from .decide import decide_kernel
from .measures import COPIES
from .plan import Plan
from .planner import numbers_of, plan_of
from .read import read_kernel

# --- what comes and goes ---


# Fields of `CorrectOperands` that turns make flat.
PER_TOKEN = ("train", "rollout", "mask", "new", "log_mass")

# Where weights and mask are written, contiguous and aligned to 16 bytes; None: to new tensors.
Outputs = tuple[Tensor | None, Tensor | None]
NEW: Outputs = (None, None)


@dataclass
class TableBuffers:
    """The sums and maxima of slots by owner, [columns, S], if packed [columns, 1 + S + 1].

    The first and the last column of a packed batch are of no sequence. Owners are turns where there are any.
    """

    counts: Tensor  # int64
    integers: Tensor | None  # int64
    floats: Tensor  # float64
    peaks: Tensor | None  # int32: floats as integers of the same order


@dataclass
class CorrectFound(CorrectResult):
    """The results of the kernels, and what they leave for what follows."""

    by_owner: TableBuffers | None = None  # of a split batch: the sums that ranks add up
    parts_of_turns: PartsOfTurns | None = None  # of a split batch with turns
    # What is left for the pass of a loss: [S] int32, the bits of units.py, and the weights of sequences.
    states: Tensor | None = None
    sequence_weights: Tensor | None = None


# --- the operation ---

STRIDED = ("train_logp", "rollout_logp", "mask")
# The tables of slots, which a split batch also has by owner.
BY_OWNER = Tables.of_slots


class CorrectOperation(Operation):
    """The kernels of `correct` for a Spec, a device and the dtypes of a batch, by which every argument has its type.

    Calls with other externals are of another operation. With `split` sequences lie on several ranks.
    """

    def __init__(
        self, spec: Spec, device: torch.device, dtypes: tuple[torch.dtype | None, ...],
        externals: tuple[torch.dtype | None, ...], per_sequence: bool, mass_of_rollout: bool,
        versions_of_sequences: bool, packed: bool, split: bool, leaves: bool = False,
    ) -> None:  # fmt: skip
        _, _, mask, offsets, advantages, log_mass, versions = dtypes
        self.plan = plan = plan_of(
            spec,
            packed=offsets is not None,
            masked=mask is not None,
            advantages=None if advantages is None else ("sequence" if per_sequence else "token"),
            writes_weights=spec.returns_weights,
            # Without a mask a packed batch gets one of its sequences' tokens.
            writes_mask=not leaves and (spec.edits_mask or (packed and mask is None)),
            edits_mask=spec.edits_mask,
            mass=None if log_mass is None else ("rollout" if mass_of_rollout else "train"),
            ages=None if versions is None else ("sequence" if versions_of_sequences else "token"),
            leaves=leaves,
        )
        maxima = len(plan.token_maxima) + len(plan.sequence_maxima) + len(plan.call_maxima)
        bins = HISTOGRAM_BINS * (plan.full + plan.bins_weights)
        sums = len(plan.token_sums) + len(plan.sequence_sums) + bins + len(plan.call_sums)
        # Those of ages are handed out apart.
        self.ages = len(plan.age_sums) + len(plan.age_maxima)
        self.statistics = sums + maxima - self.ages
        self.numbers = upload_of(tuple(numbers_of(spec).values()), device)
        # `decide` does not read the advantages of tokens, whose dtype would be part of its compile key.
        unread = {"advantages": None} if plan.advantages == "token" else {}
        gathered = {table: f"{table}_out" for table in BY_OWNER} | {"slots": "unit_count"} if split else {}

        def deciding(grid: Grid) -> tuple[int, int]:
            programs = grid.sequence_programs * (grid.shares if grid.shares > 1 and plan.zeroes else 1)
            return programs + grid.parts * groups(plan) + plan.full, SEQUENCE_THREADS

        sites = [Site(read_kernel, over_tokens, {"PLAN": plan})]
        if split:
            sites.append(Site(gather_kernel, over_units, {"PLAN": plan}))
        sites.append(Site(decide_kernel, deciding, {"PLAN": plan, "BY_OWNER": split} | unread, gathered))
        if plan.applies:
            sites.append(Site(apply_kernel, over_tokens, {"PLAN": plan}))
        super().__init__(sites, tables_of(plan), STRIDED)


def tables_of(plan: Plan) -> list[Table]:
    """List the tables of a plan. Those of programs over sequences are [rows, columns] to the kernels.

    The counter is the first of its table.
    """
    return [
        Table("counts", "slots", len(plan.counts), torch.int32),
        Table("integers", "slots", len(plan.integers), torch.int64),
        Table("floats", "slots", len(plan.floats), torch.float32),
        Table("peaks", "slots", len(plan.peaks), torch.int32),
        *tables_of_partials(len(plan.token_sums), kept_of(plan, "token_maxima")),
        Table("sequence_sums", "sequence_rows", len(plan.sequence_sums), torch.float64),
        Table("sequence_maxima", "sequence_rows", len(plan.sequence_maxima), torch.float64),
        Table("counter", "sequence_rows", None, torch.int32),
        Table("states", "sequences", None if plan.applies else 0, torch.int32),  # bits; see units.py
        Table("sequence_weights", "sequences", None if plan.spreads and plan.applies else 0, torch.float32),
    ]


operation_for = cached_untraced(maxsize=256)(CorrectOperation)


# --- a call ---


def run(given: CorrectOperands, spec: Spec, out: Outputs = NEW) -> CorrectFound:
    """Run the kernels on tensors that `backends.read.read_batch` has checked."""
    with current(given.train):
        found, launches = prepare(given, spec, out=out)
        for launch in launches:
            launch.run()
    return found


def prepare(
    given: CorrectOperands, spec: Spec, split: bool = False, out: Outputs = NEW, leaves: bool = False
) -> tuple[CorrectFound, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone.

    With `leaves` no weights and no mask are written: a loss that follows computes them again, in its own pass.

    With `split` there is one more launch, the second, which fills `by_owner` of the results: what ranks that hold parts
    of sequences have to add up before the third. So they do with the owners in `parts_of_turns`, then `settle` it.
    """
    within, keep_turns, whole, turns = None, None, given, given.turns
    count = given.train.shape[0] if given.offsets is None else given.offsets.shape[0] - 1
    if turns is not None:
        given, within = by_turns(given, turns, given.train, PER_TOKEN)
        given = replace(given, externals=[x.reshape(-1) for x in given.externals])
        keep_turns = torch.empty(turns.shape[0] - 1, dtype=torch.bool, device=given.train.device)
    train, rollout, mask, offsets = given.train, given.rollout, given.mask, given.offsets
    advantages, log_mass, device = given.advantages, given.log_mass, train.device
    ids, ages_of_sequences, current = (None, False, 0) if given.versions is None else given.versions
    externals: tuple[Tensor, ...] = ()
    if given.externals or given.new is not None:
        externals = tuple([x.contiguous() for x in (*given.externals, given.new) if x is not None])
    operation = operation_for(
        spec, device, dtypes_of((train, rollout, mask, offsets, advantages, log_mass, ids)),
        dtypes_of(externals) if externals else (), given.per_sequence, given.mass_of_rollout, ages_of_sequences,
        whole.offsets is not None, split, leaves,
    )  # fmt: skip
    plan = operation.plan
    strided = (train, rollout) if mask is None else (train, rollout, mask)
    sequences, width = train.shape if offsets is None else (offsets.shape[0] - 1, None)
    grid = grid_for(sequences, width, strided, min(train.element_size(), rollout.element_size()))
    if within is not None:
        grid = of_units(grid, count)
    weights, mask_out = out if turns is None else [None if x is None else x.reshape(-1) for x in out]
    histogram, by_owner = None, None
    states = torch.empty(count, dtype=torch.int32, device=device) if leaves else None
    of_sequences = torch.empty(count, dtype=torch.float32, device=device) if leaves and plan.spreads else None
    if plan.writes_weights and weights is None and not leaves:
        weights = torch.empty(*train.shape, dtype=torch.float32, device=device)
    if plan.writes_mask and mask_out is None:
        mask_out = torch.empty(*train.shape, dtype=torch.bool if mask is None else mask.dtype, device=device)
    if plan.full:
        histogram = torch.zeros((COPIES.value + plan.bins_weights) * HISTOGRAM_BINS, dtype=torch.int64, device=device)
    keep = torch.empty(count, dtype=torch.bool, device=device)
    many, of_ages = operation.statistics, operation.ages
    statistics = torch.empty(many + of_ages + (plan.mean is not None), dtype=torch.float64, device=device)
    tensors = {
        "train_logp": train, "rollout_logp": rollout, "mask": mask, "offsets": offsets, "within": within,
        "log_mass": None if log_mass is None else log_mass.contiguous(),
        "versions": None if ids is None else ids.contiguous(),
        "advantages": advantages.contiguous() if plan.advantages and advantages is not None else None,
        "weights": weights if plan.writes_weights and not leaves else None,
        "mask_out": mask_out if plan.writes_mask else None,
        "keep_out": keep, "keep_turns_out": keep_turns, "statistics": statistics, "histogram": histogram,
        "numbers": operation.numbers.read(),
    }  # fmt: skip
    if leaves:
        tensors |= {"states": states, "sequence_weights": of_sequences}
    if split:
        by_owner = _by_owner(plan, grid.unit_count, device)
        tensors |= {f"{table}_out": x if getattr(plan, table) else None for table, x in vars(by_owner).items()}
    launches = operation.launches(tensors, grid, externals, current=int(current))
    if keep_turns is not None:
        weights, mask_out = _shaped(weights, out[0], whole), _shaped(mask_out, out[1], whole)
    found = CorrectFound(weights, mask_out, keep, statistics, keep_turns)
    found.by_owner, found.states, found.sequence_weights = by_owner, states, of_sequences
    if of_ages:
        found.statistics, found.ages = statistics[:many], statistics[many : many + of_ages]
    if plan.mean is not None:
        found.statistics, found.mean = statistics[:many], statistics[many + of_ages]
    if split and within is not None and turns is not None:
        per_sequence = (tensors["advantages"], whole.advantages) if whole.per_sequence else (None, None)
        found.parts_of_turns = PartsOfTurns(owners_here(turns, within), within, *per_sequence)
    return found, launches


def _shaped(flat: Tensor | None, given_out: Tensor | None, given: CorrectOperands) -> Tensor | None:
    """Return a result in the shape of the batch; where the caller gave a tensor for it, that tensor."""
    return flat if flat is None else flat.view(given.train.shape) if given_out is None else given_out


def _by_owner(plan: Plan, many: int, device: torch.device) -> TableBuffers:
    """Allocate the tables of so many owners; those that may lack columns are None without any."""

    def table(columns: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((len(columns), many), dtype=dtype, device=device)

    return TableBuffers(
        counts=table(plan.counts, torch.int64),
        integers=table(plan.integers, torch.int64) if plan.integers else None,
        floats=table(plan.floats, torch.float64),
        peaks=table(plan.peaks, torch.int32) if plan.peaks else None,
    )
