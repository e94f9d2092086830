"""Launch `policy_loss` on Triton: two launches for value, statistics and gradient, and one in backward.

A pass over the tokens writes the gradient before it is divided, a pass over the sequences counts, and its last program
finishes. For GSPO, GMPO and VESPO, whose gradient depends on whole sequences, both are passes over the tokens: the
first adds up, the second writes and finishes. Backward scales the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...specs.caches import cached_untraced
from ...specs.operands import NO_STEP, InStep, LossOperands, LossResult, ScaleOperands
from ...specs.terms import Objective
from ..by_turns import by_turns
from ..correct.plan import Plan
from ..grid import SEQUENCE_THREADS, Grid, current, grid_for, of_units, over_tokens
from ..launches import Launch, Operation, Site, Table, dtypes_of, tables_of_partials
from ..partials import groups
from ..tables import kept_of
from ..uploads import upload_of
from .gradient import gradient_kernel, scale_kernel
from .plan import LossPlan, Scaling, numbers_of, plans_of
from .sequences import sequences_kernel

# --- what comes and goes ---


# Fields of `LossOperands` that turns make flat.
PER_TOKEN = ("new", "base", "ref", "weights", "trains", "mask", "log_mass", "scales", "chosen")


# --- the operation ---

STRIDED = ("train_logp", "rollout_logp", "new_logp", "base_logp", "ref_logp", "weights", "trains", "mask")
CONTIGUOUS = ("advantages", "log_mass", "scales", "chosen")
# Parameters of `gradient_kernel` that only some of the passes over the tokens look at. Another pass gets None: their
# dtype and alignment would be part of its compile key.
OF_LAST_PASS = ("gradient", "token_sums", "token_maxima", "given", "flags")
OF_SECOND_PASS = ("levels", "pulls", "inners", "within", "part_sums", "part_maxima", "value", "divisor", "rest",
                  "before", "statistics", "SHAPE")  # fmt: skip


# Those of a correction in the same pass.
OF_STEP = ("SPEC", "spec_numbers", "states", "sequence_weights", "peaks")


class Settled(NamedTuple):
    """A correction that has decided about sequences, for the pass of the loss to weigh and test tokens again."""

    plan: Plan  # without columns
    numbers: Tensor
    states: Tensor
    sequence_weights: Tensor | None


class LossOperation(Operation):
    """The two kernels of `policy_loss`, for an objective, a device and the dtypes of a batch."""

    def __init__(
        self, objective: Objective, device: torch.device, dtypes: tuple[torch.dtype | None, ...],
        per_sequence: bool, mass_of_base: bool, differentiable: bool, turns: bool, spec: Plan | None = None,
        use: InStep = NO_STEP,
    ) -> None:  # fmt: skip
        _, _, _, base, ref, weights, trains, mask, offsets, divisor, _, log_mass, scales, chosen = dtypes
        plans = plans_of(
            objective, counted=divisor is None, packed=offsets is not None, based=base is not None,
            weighted=weights is not None or use.weighted, referred=ref is not None,
            trained=trains is not None or use.trained, masked=mask is not None,
            advantages="sequence" if per_sequence else "token", differentiable=differentiable,
            mass=None if log_mass is None or not use.loss_takes_mass else ("rollout" if mass_of_base else "train"),
            has_scales=scales is not None, chosen=chosen is not None, turns=turns,
            gated=weights is torch.bool or use.gated, trainer=use.trainer, engine=use.engine,
            spec_mass=spec is not None and spec.mass is not None, spec_pairs=spec is not None and bool(spec.pairs),
        )  # fmt: skip
        last = plans[-1]
        self.averages_late, self.skips = last.averages_late, last.skips
        self.whole = plans[0].phase == "whole"  # there is one pass
        self.statistics = len(last.sums) + len(last.maxima)
        self.numbers = upload_of(tuple(numbers_of(objective).values()), device)
        adding, sites = groups(last), []

        def over_sequences(grid: Grid) -> tuple[int, int]:
            return grid.sequence_programs + grid.parts * adding, SEQUENCE_THREADS

        for plan in plans:
            unread = OF_LAST_PASS * (not plan.writes) + OF_SECOND_PASS * plan.adds_up
            of_step = dict.fromkeys(OF_STEP) if spec is None else {"SPEC": spec, "peaks": None}
            sites.append(Site(gradient_kernel, over_tokens, {"PLAN": plan} | of_step | dict.fromkeys(unread)))
        if self.whole:
            sites.append(Site(sequences_kernel, over_sequences, {"PLAN": last}))
        super().__init__(sites, _tables_of(plans), STRIDED)


def _tables_of(plans: tuple[LossPlan, ...]) -> list[Table]:
    """List the tables of a loss. Those of programs over sequences are [rows, columns] to the kernels.

    The counter is the first of its table.
    """
    last, one_pass = plans[-1], len(plans) == 1
    return [
        Table("counts", "slots", len(last.counts), torch.int32),
        Table("integers", "slots", len(last.integers), torch.int64),
        Table("floats", "slots", len(last.floats), torch.float32),
        *tables_of_partials(len(last.token_sums), kept_of(last, "token_maxima")),
        Table("sequence_sums", "sequence_rows", len(last.sequence_sums) * one_pass, torch.float64),
        Table("counter", "sequence_rows", None, torch.int32),
        Table("part_counter", "parts", 0 if one_pass else None, torch.int32),
        Table("levels", "slots", None if last.levels else 0, torch.float32),
        Table("pulls", "slots", None if last.pulls else 0, torch.float32),
        Table("inners", "slots", None if last.averages and not one_pass else 0, torch.float32),
    ]


operation_for = cached_untraced(maxsize=256)(LossOperation)


# --- a call ---


def run(given: LossOperands, objective: Objective, before: tuple[Tensor, int] | None = None) -> LossResult:
    """Run the kernels on tensors that `policy_loss` has checked.

    Args:
        given: The batch.
        objective: Everything that is fixed about the loss.
        before: A vector of sums and of maxima, and how many are sums: those of the loss stand behind each of both.
    """
    with current(given.new):
        found, launches = prepare(given, objective, before)
        for launch in launches:
            launch.run()
    return found


def prepare(
    given: LossOperands, objective: Objective, before: tuple[Tensor, int] | None = None, settled: Settled | None = None
) -> tuple[LossResult, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone; see `run`."""
    shape, device, turns, within = given.new.shape, given.new.device, given.turns, None
    if turns is not None:
        given, within = by_turns(given, turns, given.new, PER_TOKEN)
    new, base, offsets, step = given.new, given.base, given.offsets, given.step
    strided = step.train, step.rollout, new, base, given.ref, given.weights, given.trains, given.mask
    others = given.advantages, given.log_mass, given.scales, given.chosen
    operation = operation_for(
        objective, device, dtypes_of((*strided, offsets, given.divisor, *others)), given.per_sequence,
        given.mass_of_base, given.differentiable, turns is not None,
        *(() if settled is None else (settled.plan, step.without_tensors())),
    )  # fmt: skip
    sequences, width = new.shape if offsets is None else (offsets.shape[0] - 1, None)
    element = new.element_size() if base is None else min(new.element_size(), base.element_size())
    grid = grid_for(sequences, width, [x for x in strided if x is not None], element)
    if within is not None:
        grid = of_units(grid, within.shape[0] - 1)
    kind = torch.float32
    gradient = torch.empty(*shape, dtype=kind, device=device) if given.differentiable else None
    inners = torch.empty(grid.sequences, dtype=kind, device=device) if operation.averages_late else None
    value = torch.empty((), dtype=kind, device=device)
    divisor = torch.empty((), dtype=torch.float64, device=device)
    rest = torch.empty((), dtype=torch.float64, device=device)
    flags = flags_for(operation.skips, gradient, grid)
    many, sums_before = (0, 0) if before is None else (before[0].shape[0], before[1])
    statistics = torch.empty(many + operation.statistics, dtype=torch.float64, device=device)
    tensors = dict(zip(STRIDED, strided, strict=True)) | {
        "offsets": offsets, "given": given.divisor, "numbers": operation.numbers.read(), "gradient": gradient,
        "value": value, "divisor": divisor, "rest": rest, "flags": flags,
        "before": statistics if before is None else before[0], "statistics": statistics, "within": within,
    }  # fmt: skip
    for name, x in zip(CONTIGUOUS, others, strict=True):
        tensors[name] = None if x is None else x.contiguous()
    if operation.whole:
        tensors["inners"] = inners
    found = LossResult(value, gradient, inners, divisor, rest, statistics, True, before is not None, flags)
    externals = tuple([x.contiguous() for x in step.externals])
    if settled is not None:
        tensors |= {"spec_numbers": settled.numbers, "states": settled.states}
        tensors["sequence_weights"] = settled.sequence_weights
    numbers = {"sums_before": sums_before, "maxima_before": many - sums_before}
    return found, operation.launches(tensors, grid, externals, **numbers)


def flags_for(skips: bool, gradient: Tensor | None, grid: Grid) -> Tensor | None:
    """Allocate a flag for each step of the tokens, where a plan skips some and writes a gradient."""
    if not skips or gradient is None:
        return None
    return torch.empty(steps_of(grid), dtype=torch.bool, device=gradient.device)


def steps_of(grid: Grid) -> int:
    """Count the steps of all programs over tokens."""
    return grid.token_programs * ((1 << grid.tile_bits) // grid.TILING.step)


# --- backward ---


def scale(slope: ScaleOperands, in_place: bool = False) -> Tensor:
    """Scale the gradient, in one launch: gradient * upstream / rest, times each sequence's inner factor.

    With `in_place` the result may be the tensor that held the gradient, which a factor of 1 leaves as it is.
    """
    with current(slope.gradient):
        scaled, launch = prepare_scale(slope, in_place)
        launch.run()
    return scaled


def prepare_scale(slope: ScaleOperands, in_place: bool = False) -> tuple[Tensor, Launch]:
    """Allocate the result of `scale` and say what has to be launched; see there."""
    gradient, inners, upstream, rest, offsets, flags, dtype = slope
    device = gradient.device
    if inners is not None and not inners.numel():
        inners = None
    if inners is None and flags is None:
        # All tokens are one row.
        sequences, width, offsets = 1, gradient.numel(), None
    elif offsets is None:
        sequences, width = gradient.shape
    else:
        # The kernel goes on from the address of the first.
        offsets = (offsets if offsets.device == device else offsets.to(device)).contiguous()
        sequences, width = offsets.shape[0] - 1, None
    in_place = in_place and gradient.dtype == dtype
    scaled = gradient if in_place else torch.empty(*gradient.shape, dtype=dtype, device=device)
    grid = grid_for(sequences, width, (gradient,), min(gradient.element_size(), scaled.element_size()))
    if flags is not None and flags.numel() != steps_of(grid):
        flags = None  # they are of other steps
    tensors = {
        "gradient": gradient, "inners": inners, "upstream": upstream, "rest": rest, "offsets": offsets,
        "flags": flags, "scaled": scaled,
    }  # fmt: skip
    (launch,) = _scaling_for(device, dtypes_of(tuple(tensors.values())), in_place).launches(tensors, grid)
    return scaled, launch


@cached_untraced(maxsize=256)
def _scaling_for(device: torch.device, dtypes: tuple[torch.dtype | None, ...], in_place: bool) -> Operation:
    """Make the operation of backward for the dtypes of gradient, inners, upstream, rest, offsets, flags, result."""
    _, inners, _, _, offsets, flags, _ = dtypes
    plan = Scaling(offsets is not None, averages=inners is not None, in_place=in_place, flagged=flags is not None)
    return Operation([Site(scale_kernel, over_tokens, {"PLAN": plan})])
