"""The Triton part of a file with a loss: the kernels of the correction and of `policy_loss`, and their launches."""

from __future__ import annotations

import dataclasses
import math
from textwrap import indent
from typing import Any

import numpy as np
import triton.language as tl

from ..backends.loss_task import beyond_kernels
from ..frameworks.shared.doors import Door
from ..kernels.correct.plan import Plan
from ..kernels.partials import groups
from ..kernels.policy_loss.gradient import gradient_kernel, scale_kernel
from ..kernels.policy_loss.plan import LossPlan, Scaling, numbers_of, plans_of
from ..kernels.policy_loss.sequences import counted_as, sequences_kernel
from ..metrics import schema
from ..metrics.loss import MAXIMA
from ..specs.correction import Spec
from .fused import (
    KEPT,
    PARTS,
    POINTERS,
    ROWS,
    SHARES,
    TILED,
    arguments_of,
    divided,
    element,
    kernels_of,
    label_of,
    launched,
    programs_of,
    rows_of_decide,
    specialized_spec,
    tables_of,
    texts_of,
)
from .fused import completed as completed_of_correction
from .loss import Traced
from .program import Program
from .record import CannotEject
from .residual import Kernel, cleaned
from .specialize import Specializer
from .values import UsesMissing, labeled, unwrap


def completed(traced: Traced, numbers: tuple[str, ...]) -> set[str]:
    """The statistics that the kernels find together with those that metrics read."""
    found = set(MAXIMA) if set(MAXIMA) & set(numbers) else set()
    if traced.spec is not None:
        found |= set(completed_of_correction(traced.spec, of_correction(traced.spec, numbers)))
    return found - set(numbers)


class PrunedLoss(LossPlan):
    """A plan without the statistics that nothing reads."""

    __hash__ = LossPlan.__hash__


def plans_for(traced: Traced, numbers: tuple[str, ...], more: frozenset[str]) -> list[LossPlan]:
    """The plans of the passes of a loss, with the statistics that metrics read and `more` columns that these need."""
    plans = plans_of(
        traced.objective, counted=True, double=False, packed=True, based=traced.base is not None,
        weighted=traced.factors is not None, referred=traced.ref is not None, trained=traced.trains, masked=True,
        advantages="token", differentiable=True, mass=None, has_scales=False, chosen=False, turns=False,
    )  # fmt: skip
    wanted = {*numbers, *more, *counted_by(plans[-1]), "total"}
    found: list[LossPlan] = []
    for plan in plans:
        fields = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan)}
        for table in ("token_sums", "sequence_sums", "token_maxima", "maxima"):
            fields[table] = tuple(one for one in fields[table] if one in wanted)
        fields["sums"] = tuple(one for one in plan.sums if one in numbers)
        found.append(PrunedLoss(**fields))
    return found


def counted_by(plan: LossPlan) -> set[str]:
    """The statistic that the sum is divided by, where the kernels count it."""
    return set() if plan.over == "rows" or plan.mean == "sum" else {unwrap(counted_as(plan))}


PAIR = "train/rollout"
# Names of the kernels by the phase of their pass.
NAMES = {"sum": ("sum_kernel",), "write": ("gradient_kernel",), "whole": ("gradient_kernel", "sequences_kernel")}


def named_number(name: str, x: float) -> float:
    """A number of a loss with the name of its constant, as float32 has it where that computes; thresholds are logs."""
    if not math.isfinite(x) or (name, x) == ("max_length", 1.0):
        return x
    called = "new_ratio_clamp" if name == "clamp" else f"log_{name.replace('/', '_')}" if "/" in name else name
    found: float = labeled(x if name == "max_length" else float(np.float32(x)), called.upper())
    return found


def kernels_of_loss(
    traced: Traced, numbers: tuple[str, ...], found: Specializer
) -> tuple[list[Kernel], list[str], list[LossPlan]]:
    """The kernels of a loss: those of its passes and backward's, and the programs of each of the first.

    `found` takes in the functions that the kernels call.
    """
    values = tuple(named_number(name, x) for name, x in numbers_of(traced.objective, False).items())

    def written(into: Specializer, plans: list[LossPlan]) -> list[Kernel]:
        into.given["thresholds"] = lambda **_: values
        kernels = []
        for plan in plans:
            into.label = label_of(plan)
            for kernel, called in zip((gradient_kernel, sequences_kernel), NAMES[plan.phase], strict=False):
                one = into.specialized(kernel, arguments_of(kernel, plan, OF_LOSS, absent(plan)), top=True)
                kernels.append(dataclasses.replace(one, name=called))
        return kernels

    more: frozenset[str] = frozenset()
    while True:
        plans = plans_for(traced, numbers, more)
        try:
            written(Specializer(KEPT, {}, label_of(plans[0]), cleaned), plans)
            break
        except UsesMissing as missing:
            if (column := str(missing)) in more:
                raise
            more |= {column}
    kernels = written(found, plans)
    programs = []
    for plan in plans:
        programs += ["token_programs", f"sequence_programs + parts * {groups(plan)}"][: len(NAMES[plan.phase])]
    scaling = Scaling(packed=True, averages=plans[-1].averages_late)
    gone = set() if scaling.averages else {"inners", "offsets"}
    backward = found.specialized(scale_kernel, arguments_of(scale_kernel, scaling, OF_LOSS, gone), top=True)
    return [*kernels, backward], programs, plans


# What kernels of the loss point to; dtypes that the caller's tensors decide are texts.
OF_LOSS: dict[str, Any] = POINTERS | {
    **{one: element(one) for one in ("new_logp", "base_logp", "ref_logp", "mask", "trains", "offsets", "scaled")},
    **dict.fromkeys(("weights", "advantages", "inners", "levels", "pulls"), tl.float32),
    **dict.fromkeys(("gradient", "value", "upstream"), tl.float32),
    "divisor": tl.float64, "before": tl.float64, "part_counter": tl.int32,
}  # fmt: skip


def absent(plan: LossPlan) -> set[str]:
    """The parameters of kernels that a plan has no tensor for."""
    there = {
        "base_logp": plan.based, "ref_logp": plan.referred, "weights": plan.weighted, "trains": plan.trained,
        "inners": plan.averages, "levels": plan.levels, "pulls": plan.pulls,
        "integers": bool(plan.integers), "floats": bool(plan.floats),
    }  # fmt: skip
    return {"log_mass", "scales", "chosen", "within", "given", *(one for one, has in there.items() if not has)}


LAUNCHES = """def _fused(
{parameters}) -> tuple[{gives}]:
    \"""Compute the loss in {launches} launches: value, what its gradient is made of, {told}and numbers.

    Programs over tokens have tiles of 2^tile_bits tokens; what a tile has of one sequence is a slot of the tables.
    \"""
    if new_logp.device.type == "cpu" and isinstance(gradient_kernel, triton.runtime.JITFunction):
        raise RuntimeError("{where}: expected tensors on a GPU, got some on the CPU")
{rows}{contiguous}
    dtype = mask.dtype
    mask = mask.contiguous().view(torch.uint8) if dtype == torch.bool else mask.contiguous()
    device, tokens, sequences = new_logp.device, new_logp.numel(), offsets.shape[0] - 1
{sizes}
{tables}
{outputs}
    launch = {{"num_warps": 1, "enable_fp_fusion": True}}
    with torch.cuda.device_of(new_logp):
{launched}
    return {returned}"""
SCALED = """class _Scaled(torch.autograd.Function):
    \"""A value whose gradient is known: backward scales it.\"""

    @staticmethod
    def forward(ctx, new_logp, value, {saved}):
        \"""Keep the gradient of the value times the divisor.\"""
        ctx.save_for_backward({saved})
        ctx.shape, ctx.dtype = new_logp.shape, new_logp.dtype
        return value.detach()

    @staticmethod
    def backward(ctx, upstream):
        \"""Scale the gradient by what arrives from upstream.\"""
        if torch.is_grad_enabled():
            raise RuntimeError("policy_loss: expected a backward pass without create_graph=True")
        {saved} = ctx.saved_tensors
        scaled = torch.empty(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        tokens, tile_bits = gradient.numel(), 11
{sizes}        launch = {{"num_warps": 1, "enable_fp_fusion": True}}
        with torch.cuda.device_of(gradient):
{launched}
        return scaled, None, {nones}"""


def of_correction(spec: Spec, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """The statistics of the correction among those of a file."""
    names = {name for part in schema.layout(spec) for name in part}
    return tuple(name for name in numbers if name in names)


def fused_loss(traced: Traced, program: Program, door: Door, eager: bool) -> list[str]:
    """Write the Triton part of a file with a loss: constants, functions, kernels, `_fused`, and `_Scaled`.

    The program's statistics are `completed`. With `eager` the file has plain torch too.
    """
    if (why := beyond_kernels(traced.objective.surrogate, False)) is not None:
        raise CannotEject(f"loss: the kernels do not run it: {why}")
    width, spec, plan = door.width, traced.spec, None
    kernels: list[Kernel] = []
    launches: list[str] = []
    first: tuple[str, ...] = ()
    found = Specializer(KEPT, {}, lambda *_: None, cleaned)
    if spec is not None:
        if more := [repr(criterion) for criterion in spec.criteria if criterion.of != PAIR]:
            raise CannotEject(f"spec: expected criteria of {PAIR} for the Triton part of a loss, got {', '.join(more)}")
        first = of_correction(spec, program.numbers)
        kernels, found, plan = kernels_of(specialized_spec(spec, first), first)
        called = {"train_logp": traced.train or "", "statistics": "numbers"}
        for kernel in kernels:
            launches += launched(kernel, programs_of(plan)[kernel.name], width, called)
        launches += indent(divided(spec, first, "numbers"), "    ").splitlines()
    of_loss, programs, plans = kernels_of_loss(traced, program.numbers[len(first) :], found)
    called = {
        "base_logp": traced.base or "", "ref_logp": traced.ref or "", "weights": traced.factors or "",
        "trains": "mask_out", "statistics": f"numbers[{len(first)}:]" if first else "numbers",
    }  # fmt: skip
    if traced.factors == "kept":
        launches.append("        kept = (mask_out != 0).float()")
    *forward, backward = of_loss
    for kernel, many in zip(forward, programs, strict=True):
        launches += launched(kernel, many, width, called)
    rows = "sequence_programs" if plan is None else rows_of_decide(plan)
    tables = tables_of([*([] if plan is None else [plan]), *plans], [*kernels, *forward], rows)
    constants, *texts = texts_of([*kernels, *of_loss], found, eager, width)
    function = _function(traced, program, plan, plans[-1], door.layout == "packed", eager, tables, launches)
    return [constants, *texts, function, _scaled(backward, plans[-1].averages_late, width)]


def _function(
    traced: Traced, program: Program, correction: Plan | None, last: LossPlan, packed: bool, eager: bool,
    tables: str, launches: list[str],
) -> str:  # fmt: skip
    names = ["offsets" if name == "cu_seqlens" else name for name in program.inputs]
    outputs = {
        "value": "torch.empty((), dtype=torch.float32, device=device)",
        "divisor": "torch.empty((), dtype=torch.float64, device=device)",
        "gradient": "torch.empty_like(new_logp, dtype=torch.float32)",
        "numbers": f"torch.empty({len(program.numbers)}, dtype=torch.float64, device=device)",
    }
    if last.averages_late:
        outputs["inners"] = "torch.empty(sequences, dtype=torch.float32, device=device)"
    gives = {}
    if correction is not None:
        outputs["keep"] = "torch.empty(sequences, dtype=torch.bool, device=device)"
        outputs["keep_out"] = "keep.view(torch.uint8)"
        if correction.writes_weights:
            outputs["weights"] = "torch.empty_like(new_logp, dtype=torch.float32)"
        if correction.writes_mask:
            outputs["mask_out"] = "torch.empty_like(mask)"
        weights = "weights" if correction.writes_weights else "None"
        mask = f"{'mask_out' if traced.trains else 'mask'}.view(dtype)"
        gives = {weights: weights.replace("weights", "torch.Tensor"), mask: "torch.Tensor", "keep": "torch.Tensor"}
    saved = "(gradient, divisor, inners, offsets)" if last.averages_late else "(gradient, divisor)"
    gives = {"value": "torch.Tensor", saved: "tuple[torch.Tensor, ...]", **gives, "numbers": "torch.Tensor"}
    return LAUNCHES.format(
        parameters="".join(f"    {name}: torch.Tensor,\n" for name in names),
        gives=", ".join(gives.values()),
        launches=sum("[(" in line for line in launches),
        told="weights, mask, keep, " if correction is not None else "",
        where="backend='fused'" if eager else "new_logp",
        rows="" if packed else ROWS.replace("train_logp", "new_logp"),
        contiguous="\n".join(f"    {x} = {x}.contiguous()" for x in names if x != "mask"),
        sizes=TILED + (SHARES if correction is not None and correction.zeroes else "") + PARTS,
        tables=tables,
        outputs="\n".join(f"    {name} = {made}" for name, made in outputs.items()),
        launched="\n".join(launches),
        returned=", ".join(gives),
    )


def _scaled(kernel: Kernel, averages: bool, width: int) -> str:
    sizes = ""
    if averages:
        steps = TILED[TILED.index("    # How often") : TILED.index("    token_programs")]
        sizes = indent("    sequences = offsets.shape[0] - 1\n" + steps, "    ")
    launch = launched(kernel, "(tokens >> tile_bits) + 1", width - 4)
    return SCALED.format(
        saved="gradient, divisor, inners, offsets" if averages else "gradient, divisor",
        sizes=sizes,
        launched=indent("\n".join(launch), "    "),
        nones="None, None, None, None" if averages else "None, None",
    )
