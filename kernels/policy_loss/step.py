"""Launch a whole step on Triton: a correction and the policy loss in one pass over the tokens, and a launch behind it.

`gradient` reads every log-prob, the mask and the advantages once, weighs and tests each token, and writes the gradient;
`close` decides about sequences and finishes. Where a token's gradient depends on what is decided about its sequence,
`read` and `decide` come first, and `gradient` weighs and tests again. Backward is the one of the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...metrics.schema import names_of
from ...specs.caches import cached_untraced
from ...specs.correction import Spec
from ...specs.operands import CorrectOperands, InStep, LossOperands, LossResult
from ...specs.terms import Objective
from ..correct.launch import prepare as prepare_correction
from ..correct.launch import tables_of
from ..correct.plan import Plan, pairs_of
from ..correct.planner import numbers_of as numbers_of_spec
from ..correct.planner import plan_of
from ..grid import SEQUENCE_THREADS, Grid, current, grid_for, over_tokens
from ..launches import Launch, Operation, Site, dtypes_of
from ..partials import groups
from ..tables import RECORDED
from ..uploads import Upload, upload_of
from .close import close_kernel
from .gradient import gradient_kernel
from .launch import CONTIGUOUS, OF_SECOND_PASS, STRIDED, Settled, flags_for
from .launch import prepare as prepare_loss
from .plan import numbers_of, plans_of, step_plan

# What only a correction that has run before leaves to `gradient`, and a table of two passes.
OF_SETTLED = ("states", "sequence_weights", "part_counter")


class StepOperation(Operation):
    """The two kernels of a step, for a Spec, an objective, a device and the dtypes of a batch."""

    def __init__(
        self, spec: Spec, objective: Objective, device: torch.device, dtypes: tuple[torch.dtype | None, ...],
        externals: tuple[torch.dtype | None, ...], per_sequence: bool, mass_of_base: bool, differentiable: bool,
        use: InStep,
    ) -> None:  # fmt: skip
        _, _, _, base, ref, _, _, mask, offsets, divisor, _, log_mass, scales, _ = dtypes
        advantages, packed = "sequence" if per_sequence else "token", offsets is not None
        of_mass = None if log_mass is None else ("rollout" if mass_of_base else "train")
        (loss,) = plans_of(
            objective, counted=divisor is None, packed=packed, based=base is not None,
            weighted=use.weighted, referred=ref is not None, trained=use.trained, masked=mask is not None,
            advantages=advantages, differentiable=differentiable, mass=of_mass if use.loss_takes_mass else None,
            has_scales=scales is not None, chosen=False, turns=False, gated=use.gated, trainer=use.trainer,
            engine=use.engine, spec_mass=log_mass is not None, spec_pairs=bool(pairs_of(spec)),
        )  # fmt: skip
        correction = plan_of(
            spec, packed=packed, masked=mask is not None, advantages=advantages,
            writes_weights=use.weighted and not use.gated, writes_mask=False, edits_mask=spec.edits_mask, mass=of_mass,
        )  # fmt: skip
        self.plan = plan = step_plan(correction, loss)
        self.averages_late, self.skips = loss.averages_late, loss.skips
        sums = len(plan.token_sums) + len(plan.sequence_sums) - plan.unreported
        self.statistics = sums + len(plan.token_maxima) + len(plan.sequence_maxima)
        self.numbers = upload_of(tuple(numbers_of(objective).values()), device)
        self.spec_numbers = upload_of(tuple(numbers_of_spec(spec).values()), device)
        adding = groups(plan)

        def closing(grid: Grid) -> tuple[int, int]:
            programs = grid.sequence_programs * (grid.shares if plan.zeroes else 1)
            return programs + grid.parts * adding, SEQUENCE_THREADS

        plans: dict[str, object] = {"PLAN": loss, "SPEC": plan}
        # `close` reads the advantages of sequences alone: their dtype would be part of its compile key.
        unread = {} if plan.advantages == "sequence" else {"advantages": None}
        sites = [
            Site(gradient_kernel, over_tokens, plans | dict.fromkeys((*OF_SECOND_PASS, *OF_SETTLED))),
            Site(close_kernel, closing, plans | unread),
        ]
        super().__init__(sites, tables_of(plan), STRIDED)


operation_for = cached_untraced(maxsize=256)(StepOperation)


def run(given: LossOperands, wanted: tuple[Spec, Objective]) -> LossResult:
    """Run the kernels on tensors that `policy_loss` has checked."""
    with current(given.new):
        found, launches = (prepare_settled if given.step.settles else prepare)(given, *wanted)
        for launch in launches:
            launch.run()
    return found


def prepare(given: LossOperands, spec: Spec, objective: Objective) -> tuple[LossResult, tuple[Launch, ...]]:
    """Allocate everything and list what has to be launched, from metadata alone; see `run`."""
    new, offsets, use = given.new, given.offsets, given.step
    device, shape = new.device, new.shape
    strided = use.train, use.rollout, new, given.base, given.ref, None, None, given.mask
    others = given.advantages, given.log_mass, given.scales, None
    externals = tuple([x.contiguous() for x in use.externals])
    operation = operation_for(
        spec, objective, device, dtypes_of((*strided, offsets, given.divisor, *others)), dtypes_of(externals),
        given.per_sequence, given.mass_of_base, given.differentiable, use.without_tensors(),
    )  # fmt: skip
    sequences, width = new.shape if offsets is None else (offsets.shape[0] - 1, None)
    logps = [x for x in strided[:5] if x is not None]
    grid = grid_for(sequences, width, [x for x in strided if x is not None], min(x.element_size() for x in logps))
    kind = torch.float32

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    gradient = empty(*shape, dtype=kind) if given.differentiable else None
    found = LossResult(
        value=empty(dtype=kind),
        gradient=gradient,
        inners=empty(sequences, dtype=kind) if operation.averages_late else None,
        divisor=empty(dtype=torch.float64),
        rest=empty(dtype=torch.float64),
        statistics=empty(operation.statistics, dtype=torch.float64),
        by_kernels=True,
        joined=True,
        flags=flags_for(operation.skips, gradient, grid),
        keep=empty(sequences, dtype=torch.bool),
    )
    tensors = dict(zip(STRIDED, strided, strict=True)) | {
        "offsets": offsets, "given": given.divisor, "numbers": operation.numbers.read(),
        "spec_numbers": operation.spec_numbers.read(), "gradient": found.gradient, "inners": found.inners,
        "value": found.value, "divisor": found.divisor, "rest": found.rest, "flags": found.flags,
        "statistics": found.statistics, "keep_out": found.keep,
    }  # fmt: skip
    for name, x in zip(CONTIGUOUS, others, strict=True):
        tensors[name] = None if x is None else x.contiguous()
    return found, operation.launches(tensors, grid, externals, sums_before=0, maxima_before=0)


# --- where sequences are decided about first ---


def correction_of(given: LossOperands, spec: Spec) -> CorrectOperands:
    """Return the correction of a step alone."""
    step = given.step
    train = {"own": step.train, "new": given.new, "base": given.base}[step.trainer or "own"]
    rollout = {"own": step.rollout, "base": given.base}[step.engine or "own"]
    assert train is not None and rollout is not None
    asks = any(criterion.when != "any" for criterion in spec.criteria)
    return CorrectOperands(
        train, rollout, given.mask, given.offsets, given.advantages if asks else None, given.per_sequence,
        list(step.externals), given.new if pairs_of(spec) else None, given.log_mass, given.mass_of_base,
    )  # fmt: skip


@cached_untraced(maxsize=256)
def settled_plan(spec: Spec, device: torch.device, **of_batch: Any) -> tuple[Plan, Upload]:
    """Make the plan of a pass that weighs and tests tokens again, once sequences are decided about; and its numbers."""
    plan = plan_of(spec, writes_mask=False, edits_mask=spec.edits_mask, **of_batch)
    columns = *RECORDED, "sequence_sums", "sequence_maxima"
    nothing: dict[str, Any] = dict.fromkeys(columns, ())
    return replace(plan, **nothing, settled=True), upload_of(tuple(numbers_of_spec(spec).values()), device)


def prepare_settled(given: LossOperands, spec: Spec, objective: Objective) -> tuple[LossResult, tuple[Launch, ...]]:
    """List the launches of a step whose tokens need what is decided about sequences: that comes first."""
    correction = correction_of(given, spec)
    decided, launches = prepare_correction(correction, spec, leaves=True)
    assert decided.states is not None
    advantages = None if correction.advantages is None else ("sequence" if given.per_sequence else "token")
    of_mass = None if given.log_mass is None else ("rollout" if given.mass_of_base else "train")
    plan, numbers = settled_plan(
        spec, given.new.device, packed=given.offsets is not None, masked=given.mask is not None, advantages=advantages,
        writes_weights=given.step.weighted and not given.step.gated, mass=of_mass,
    )  # fmt: skip
    settled = Settled(plan, numbers.read(), decided.states, decided.sequence_weights)
    found, more = prepare_loss(given, objective, (decided.statistics, len(names_of(spec)[0])), settled)
    return found._replace(keep=decided.keep), (*launches, *more)
