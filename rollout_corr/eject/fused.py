"""The Triton part of a file: the kernels of `correct`, specialized to one Spec, and their launches."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import triton.language as tl

from ..backends.operators import beyond_kernels
from ..frameworks.shared.doors import Door
from ..kernels.correct.apply import apply_kernel
from ..kernels.correct.decide import decide_kernel
from ..kernels.correct.plan import Plan
from ..kernels.correct.planner import numbers_of, plan_of
from ..kernels.correct.read import read_kernel
from ..kernels.grid import SHAPES, Shape
from ..kernels.partials import groups, kept_maxima
from ..kernels.tiles import Tiling
from ..metrics import schema
from ..specs.correction import Spec
from .lines import fitted, reflowed
from .program import power
from .record import CannotEject
from .residual import Kernel, Renamed, Renamer, cleaned, coalesced, names_in, text_of, without_copies
from .specialize import Specializer
from .values import Dyn, UsesMissing, name

# Functions that stay functions though a plan decides some of them.
KEPT = (
    "owner_before", "exponential", "end_of", "zero_rejected", "add_up_part", "is_last", "add_up_neighbors",
    "k3_in_full", "places_of",
)  # fmt: skip
# 2,048 tokens of a program of one warp, four neighbors to a thread.
TILING = Tiling(parts=1, lanes=32, vec=4, unit=True, aligned=True)
SHAPE: Shape = dataclasses.replace(SHAPES[1][1], chunk=2)


PROGRAMS = {
    "read_kernel": "tile of tokens",
    "decide_kernel": f"{SHAPE.sequences} sequences, and more that add up what the first launch left",
    "apply_kernel": "tile of tokens",
}
WIDE = ("tokens", "sequences", "slots", "owner_count")
NARROW = ("tile_bits", "steps", "sequence_programs", "token_programs", "shares", "parts", "part")

# Maxima of token weights, and the maxima of D that they follow from.
DERIVED, FROM = ("max_raw", "-min_raw", "max_weight", "-min_weight"), ("max_d", "-min_d")


class Pruned(Plan):
    """A plan without the columns that nothing reads."""

    @property
    def derived(self) -> int:
        """The maxima of token weights that follow from the maxima of D: all of them, or none."""
        return super().derived if DERIVED[0] in self.token_maxima else 0

    __hash__ = Plan.__hash__


def completed(spec: Spec, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """The statistics that the kernels find together with some of them."""
    if spec.weighs_tokens and set(DERIVED) & set(numbers):
        found = {*numbers, *DERIVED, *FROM}
        return tuple(name for part in schema.layout(spec) for name in part if name in found)
    return numbers


def plan_for(spec: Spec, numbers: tuple[str, ...], more: frozenset[str] = frozenset()) -> Plan:
    """The plan of a Spec for a packed batch with a mask, with the columns of some statistics alone.

    Args:
        spec: The Spec.
        numbers: The statistics.
        more: Further columns that turned out to be needed.
    """
    whole = plan_of(
        spec, double=False, advantages=None, packed=True, masked=True, writes_weights=spec.returns_weights,
        writes_mask=spec.edits_mask, edits_mask=spec.edits_mask, mass=None,
    )  # fmt: skip
    names = iter([name for part in schema.layout(spec) for name in part])
    kept = {
        table: tuple(column for column in getattr(whole, table) if next(names) in numbers or column in more)
        for table in OF_BATCH
    }
    needed = {"differing"} & more
    kept["counts"] = tuple(one for one in whole.counts if one not in NEVER or one in needed or one in more)
    kept["floats"] = tuple(one for one in whole.floats if one not in NEVER or one in more)
    fields = {one.name: getattr(whole, one.name) for one in dataclasses.fields(whole)}
    return Pruned(**fields | kept)


OF_BATCH = ("token_sums", "sequence_sums", "call_sums", "token_maxima", "sequence_maxima", "call_maxima")
TABLES = ("counts", "integers", "floats", "peaks")
# Columns of slots that few statistics need.
NEVER = ("differing", "train", "rollout", "ratio_m1", "weight_m1")


def pointer(text: str, dtype: Any) -> Dyn:
    """A parameter that points to elements."""
    return Dyn(name(text), dtype, (), True)


def element(of: str) -> str:
    """The dtype that a pointer points to, where the caller decides."""
    return f"{of}.dtype.element_ty"


def arguments_of(kernel: Any, plan: Plan) -> dict[str, Any]:
    """The arguments of a kernel: pointers and sizes are left, the plan is known."""
    pointers = {
        "train_logp": element("train_logp"), "rollout_logp": element("rollout_logp"), "mask": element("mask"),
        "offsets": element("offsets"), "weights": tl.float32, "mask_out": element("mask"), "counts": tl.int32,
        "integers": tl.int64, "floats": tl.float32, "peaks": tl.int32, "token_sums": tl.float64,
        "token_maxima": tl.float64, "part_sums": tl.float64, "part_maxima": tl.float64, "sequence_sums": tl.float64,
        "sequence_maxima": tl.float64, "counter": tl.int32, "keep_out": tl.int8, "states": tl.int32,
        "sequence_weights": tl.float32, "statistics": tl.float64,
    }  # fmt: skip
    absent = {"log_mass", "advantages", "histogram", "within", "keep_turns_out"}
    absent |= {table for table in ("integers", "floats", "peaks") if not getattr(plan, table)}
    if not plan.writes_weights:
        absent.add("weights")
    if not plan.writes_mask:
        absent.add("mask_out")
    found: dict[str, Any] = {"PLAN": plan, "TILING": TILING, "SHAPE": SHAPE, "BY_OWNER": False, "externals": (),
                             "numbers": "numbers", "width": 0, "tiles": 0}  # fmt: skip
    for parameter, annotation in kernel.fn.__annotations__.items():
        if parameter in found or parameter == "return":
            continue
        if parameter in absent:
            found[parameter] = None
        elif parameter in pointers:
            found[parameter] = pointer(parameter, pointers[parameter])
        elif parameter.endswith(("_row", "_step")):
            found[parameter] = 1
        else:
            found[parameter] = Dyn(name(parameter), tl.int64 if "int64" in annotation else tl.int32)
    return {key: found[key] for key in kernel.fn.__annotations__ if key != "return"}


def label_of(plan: Plan) -> Any:
    """Names of the accumulators."""

    def label(hint: str, value: tuple[Any, ...]) -> list[str] | None:
        if len(value) == len(plan.recorded) and hint in ("found", "kept", "more", "fresh"):
            return [f"{'' if hint == 'found' else 'kept_'}{column.replace('-', '')}" for _, column in plan.recorded]
        if hint in TABLES and len(value) == len(getattr(plan, hint)):
            return [f"sum_{re.sub('^[0-9]+/', '', column)}" for column in getattr(plan, hint)]
        return None

    return label


def kernels_of(spec: Spec, numbers: tuple[str, ...]) -> tuple[list[Kernel], Specializer, Plan]:
    """The kernels of a Spec, in the order of their launches, and the functions that they call."""
    more: frozenset[str] = frozenset()
    while True:
        plan = plan_for(spec, numbers, more)
        values = tuple(numbers_of(spec, plan.double).values())
        specializer = Specializer(KEPT, {"thresholds": lambda values=values, **_: values}, label_of(plan), cleaned)
        try:
            kernels = [
                specializer.specialized(kernel, arguments_of(kernel, plan), top=True)
                for kernel in (read_kernel, decide_kernel, *([apply_kernel] if plan.applies else []))
            ]
            columns = {one for table in OF_BATCH for one in getattr(plan, table)}
            if lost := columns - specializer.stored - {*DERIVED}:
                raise CannotEject(f"spec: the specialized kernels would not store {sorted(lost)}")
            if unasked := [one for one in columns if more & {one}]:
                raise CannotEject(f"spec: the kernels store {sorted(unasked)} too, which no metric of the file reads")
            return kernels, specializer, plan
        except UsesMissing as missing:
            column = str(missing)
            if column in more:
                raise
            more |= {column}


# --- the whole part ---


def source_of(kernel: Kernel, sized: bool, width: int, reserved: set[str]) -> str:
    """A kernel or a function as text."""
    read = names_in(kernel.body)
    parameters = [one for one in kernel.parameters if read[one]]
    body = coalesced(kernel.body, kernel.body)
    names = Renamer(parameters, body).names(reserved)
    body = without_copies([Renamed(names).visit(s) for s in body])
    annotated = [f"{one}: tl.int64" if sized and one in WIDE else f"{one}: tl.int32" if sized and one in NARROW else one
                 for one in parameters]  # fmt: skip
    sizes = [one for one in parameters if one in WIDE or one in NARROW]
    decorator = f"@triton.jit(do_not_specialize={sizes!r})".replace("'", '"') if sized and sizes else "@triton.jit"
    head = fitted(f"def {kernel.name}({', '.join(annotated)}):", width)
    lines = [
        *fitted(decorator, width),
        *head,
        f'    """{kernel.doc.replace("SHAPE.sequences", str(SHAPE.sequences))}"""',
        *text_of(body, 4, width),
    ]
    return "\n".join(lines)


LAUNCHES = '''def _fused(
    train_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
{offsets}) -> tuple[{gives}, torch.Tensor, torch.Tensor, torch.Tensor]:
    """{told}, in {launches} launches.

    Programs over tokens have tiles of 2^tile_bits tokens; what a tile has of one sequence is a slot of the tables.
    """
    if train_logp.device.type == "cpu" and isinstance(read_kernel, triton.runtime.JITFunction):
        raise RuntimeError("{where}: expected tensors on a GPU, got some on the CPU")
{rows}    train_logp, rollout_logp, given = train_logp.contiguous(), rollout_logp.contiguous(), mask
    mask = mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()
    device, tokens, sequences = train_logp.device, train_logp.numel(), offsets.shape[0] - 1
    least = 9 if tokens >= 1024 * sequences else 8
    tile_bits = min(max((tokens // 2048 - 1).bit_length(), least), 11)
    # How often `owner_before` narrows its search.
    steps, left = 0, sequences + 1
    while left > 0:
        steps, left = steps + 1, left // 32
    token_programs = (tokens >> tile_bits) + 1
    slots = token_programs + sequences + 1
    sequence_programs = triton.cdiv(sequences + 2, 32)
{shares}    part = max(256, triton.cdiv(token_programs, 256))
    parts = triton.cdiv(token_programs, part)

    def table(rows, columns, dtype):
        return torch.empty((rows, columns), dtype=dtype, device=device)

{tables}
    counter = torch.empty(sequence_programs + 2, dtype=torch.int32, device=device)
    keep = torch.empty(sequences, dtype=torch.bool, device=device)
    keep_out = keep.view(torch.uint8)
    statistics = torch.empty({statistics}, dtype=torch.float64, device=device)
{outputs}
    launch = {{"num_warps": 1, "enable_fp_fusion": True}}
{launched}
    return {returned}, keep, statistics'''
ROWS = """    # Each row is a sequence of a packed batch.
    offsets = torch.arange(train_logp.shape[0] + 1, device=train_logp.device) * train_logp.shape[1]
"""


def fused(spec: Spec, door: Door, numbers: tuple[str, ...], eager: bool) -> list[str]:
    """Write the Triton part of a file: constants, functions, kernels and `_fused`, for batches with a mask.

    Args:
        spec: The Spec.
        door: How the file is called.
        numbers: The statistics that `_fused` gives, as `completed` has them.
        eager: The file has plain torch too.

    Raises:
        CannotEject: The kernels do not run it.
    """
    if (why := beyond_kernels(spec)) is not None:
        raise CannotEject(f"spec: the kernels do not run it: {why}")
    width = door.width
    more = [repr(c) for c in spec.criteria if c.tensor_name is not None or c.when != "any"]
    more += ["turns"] if spec.measures_turns else []
    more += ["normalize"] if spec.weight is not None and spec.weight.normalize is not None else []
    more += ["detail='full'"] if spec.detail == "full" else []
    if more:
        raise CannotEject(
            f"spec: expected log-probs, mask and cu_seqlens alone for the Triton part, got {', '.join(more)}"
        )
    # A scheme that no metric of the file reads has no part in the kernels.
    read = {number.partition("/")[0] for number in numbers}
    spec = dataclasses.replace(spec, report=tuple(one for one in spec.report if one == "native" or one in read))
    kernels, found, plan = kernels_of(spec, numbers)
    functions = list(found.functions.values())
    reserved = {*found.verbatim, *(one.name for one in (*functions, *kernels)), *found.constants, "tl", "triton"}
    written = {one: reflowed(text, width) for one, text in found.verbatim.items()}
    written |= {one.name: source_of(one, False, width, reserved) for one in functions}
    texts: list[str] = []
    for place, kernel in reversed(list(enumerate(kernels, 1))):
        launch = f"# Launch {place} of {len(kernels)}, a program for each {PROGRAMS[kernel.name]}.\n"
        texts.insert(0, launch + source_of(kernel, True, width, reserved))
    for one, text in reversed(written.items()):
        # What a plan has made of its callers may have left none.
        if any(re.search(rf"\b{one}\b", caller) for caller in texts):
            texts.insert(0, text)
    # Plain torch has constants of the same names, which are floats.
    labels = {label: f"TL_{label}" if eager else label for label in found.constants}
    if eager and labels:
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, labels))})\b")
        texts = [pattern.sub(lambda match: labels[match[0]], text) for text in texts]
    constants = [f"{labels[label]} = tl.constexpr({power(x)})" for label, x in sorted(found.constants.items())
                 if any(re.search(rf"\b{labels[label]}\b", text) for text in texts)]  # fmt: skip
    parts = [
        "\n".join(constants) or "# The kernels have no constants.",
        *texts,
        launches_of(plan, kernels, door, eager),
    ]
    return [part for part in parts if part]


def launches_of(plan: Plan, kernels: list[Kernel], door: Door, eager: bool) -> str:
    """Write the function that launches the kernels."""
    packed, width = door.layout == "packed", door.width
    sharing, rows_of_decide = "", "sequence_programs"
    if plan.zeroes:
        rows_of_decide += " * shares"
        sharing = """    # Programs that share the zeroing of what one of them rejects.
    shares = max(1, min(tokens // 32768, 1024) // sequence_programs) if tokens > 131072 * sequence_programs else 1
"""
    tables = [
        ("counts", len(plan.counts), "slots", "int32"), ("integers", len(plan.integers), "slots", "int64"),
        ("floats", len(plan.floats), "slots", "float32"), ("peaks", len(plan.peaks), "slots", "int32"),
        ("token_sums", len(plan.token_sums), "token_programs", "float64"),
        ("token_maxima", kept_maxima(plan), "token_programs", "float64"),
        ("part_sums", len(plan.token_sums), "parts", "float64"), ("part_maxima", kept_maxima(plan), "parts", "float64"),
        ("sequence_sums", len(plan.sequence_sums), rows_of_decide, "float64"),
        ("sequence_maxima", len(plan.sequence_maxima), rows_of_decide, "float64"),
        ("states", 1 if plan.applies else 0, "sequences", "int32"),
        ("sequence_weights", 1 if plan.spreads else 0, "sequences", "float32"),
    ]  # fmt: skip
    used = {one: names_in(kernel.body) for kernel in kernels for one in kernel.parameters}
    read = {one for one, body in used.items() if any(names_in(kernel.body)[one] for kernel in kernels)}
    lines = [f"    {name} = table({rows}, {columns}, torch.{kind})" for name, rows, columns, kind in tables
             if rows and name in read]  # fmt: skip
    outputs = ["    weights = torch.empty_like(train_logp, dtype=torch.float32)"] if plan.writes_weights else []
    outputs += ["    mask_out = torch.empty_like(mask)"] if plan.writes_mask else []
    programs = {
        "read_kernel": "token_programs",
        "decide_kernel": f"{rows_of_decide} + parts * {groups(plan)}",
        "apply_kernel": "token_programs",
    }
    launched = []
    for kernel in kernels:
        given = [one for one in kernel.parameters if names_in(kernel.body)[one]]
        call = f"{kernel.name}[({programs[kernel.name]},)]({', '.join(given)}, **launch)"
        launched += ["    " + line for line in fitted(call, width - 4)]
    back = "mask_out.view(given.dtype)" if plan.writes_mask else "given"
    return LAUNCHES.format(
        offsets="    offsets: torch.Tensor,\n" if packed else "",
        gives="torch.Tensor" if plan.writes_weights else "None",
        told="Compute the results of `_eager`" if eager else "Compute weights, mask, keep, and the numbers of metrics",
        where="backend='fused'" if eager else door.names["train_logp"],
        rows="" if packed else ROWS,
        launches="two" if len(kernels) == 2 else "three",
        shares=sharing,
        tables="\n".join(lines),
        statistics=sum(len(getattr(plan, table)) for table in OF_BATCH),
        outputs="\n".join(outputs),
        launched="\n".join(launched),
        returned=f"{'weights' if plan.writes_weights else 'None'}, {back}",
    )
