"""The Triton part of a file: the kernels of `correct`, specialized to one Spec, and their launches."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import triton.language as tl

from ..backends.operators import beyond_kernels
from ..frameworks.shared.doors import Door
from ..kernels.accumulators import kept_of
from ..kernels.correct.apply import apply_kernel
from ..kernels.correct.decide import decide_kernel
from ..kernels.correct.plan import Plan, Tables
from ..kernels.correct.planner import numbers_of, plan_of
from ..kernels.correct.read import read_kernel
from ..kernels.grid import SHAPES, Shape
from ..kernels.partials import groups
from ..kernels.tiles import Tiling
from ..metrics import native, schema
from ..specs.correction import Spec
from ..specs.weight import SMALLEST_MEAN
from .file import told, typed
from .lines import filled, reflowed, split_names
from .program import asks_advantages, bounds_of, external_inputs, power
from .record import CannotEject
from .residual import Kernel, Renamed, Renamer, cleaned, coalesced, names_in, text_of, unparsed, without_copies
from .specialize import Specializer
from .values import Dyn, UsesMissing, labeled, leaves, name

# Functions that stay functions though a plan decides some of them.
KEPT = (
    "owner_before", "exponential", "end_of", "zero_rejected", "add_up_part", "is_last", "add_up_neighbors",
    "k3_in_full", "places_of", "over_lanes", "unordered",
)  # fmt: skip
# 2,048 tokens of a program of one warp, four neighbors to a thread.
TILING = Tiling(parts=1, lanes=32, vec=4, unit=True, aligned=True)
SHAPE: Shape = dataclasses.replace(SHAPES[1][1], chunk=1)


PROGRAMS = {
    "read_kernel": "tile of tokens",
    "decide_kernel": f"{SHAPE.sequences} sequences, and more that add up what the first launch left",
    "apply_kernel": "tile of tokens",
    "sum_kernel": "tile of tokens",
    "gradient_kernel": "tile of tokens",
    "sequences_kernel": f"{SHAPE.sequences} sequences, and more that add up what the launch before left",
    "scale_kernel": "tile of tokens, in backward",
}
WIDE = ("tokens", "sequences", "slots", "owner_count")
NARROW = ("tile_bits", "steps", "sequence_programs", "token_programs", "shares", "parts", "part")

OF_BATCH = ("token_sums", "sequence_sums", "call_sums", "token_maxima", "sequence_maxima", "call_maxima")
TABLES = ("counts", "integers", "floats", "peaks")
# Columns of slots that few statistics need.
NEVER = frozenset(("differing", "train", "rollout", "ratio_m1", "weight_m1"))

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
    found = set(numbers)
    if spec.weighs_tokens and found & set(DERIVED):
        found |= {*DERIVED, *FROM}
    if spec.weight is not None and spec.weight.normalize == "batch":
        found |= set(native.batch_mean(spec)[:2])
    return tuple(name for part in schema.layout(spec) for name in part if name in found)


def plan_for(spec: Spec, numbers: tuple[str, ...], more: Collection[str] = (), never: Collection[str] = NEVER) -> Plan:
    """The plan of a Spec for a packed batch with a mask, with the columns of some statistics and of `more` alone.

    Columns of slots in `never` are left out unless they are in `more`, those that turned out to be needed.
    """
    whole = plan_of(
        spec, double=False, advantages="token", packed=True, masked=True, writes_weights=spec.returns_weights,
        writes_mask=spec.edits_mask, edits_mask=spec.edits_mask, mass=None,
    )  # fmt: skip
    names = iter([name for part in schema.layout(spec) for name in part])
    kept = {
        table: tuple(column for column in getattr(whole, table) if next(names) in numbers or column in more)
        for table in OF_BATCH
    }
    for table in TABLES:
        kept[table] = tuple(one for one in getattr(whole, table) if one not in never or one in more)
    if not any(kept.values()):
        # A pass has to keep something.
        kept["counts"] = whole.counts[:1]
    fields = {one.name: getattr(whole, one.name) for one in dataclasses.fields(whole)}
    # `_fused` divides by the mean of weights.
    return Pruned(**fields | kept | {"mean": None})


def unread(plan: Plan, kernels: Sequence[Kernel]) -> set[str]:
    """The columns of slots that kernels do not load."""
    text = unparsed(ast.Module([s for kernel in kernels for s in kernel.body], []))
    found = set()
    for table in TABLES:
        for place, column in enumerate(getattr(plan, table)):
            before = "" if place == 0 else "slots + " if place == 1 else f"slots * {place} + "
            if not re.search(rf"tl\.load\({table} \+ {re.escape(before)}slot", text):
                found.add(column)
    return found


def element(of: str) -> str:
    """The dtype that a pointer points to, where the caller decides."""
    return f"{of}.dtype.element_ty"


# What kernels point to; dtypes that the caller's tensors decide are texts.
POINTERS: dict[str, Any] = {
    **{one: element(one) for one in ("train_logp", "rollout_logp", "mask", "offsets", "advantages")},
    "mask_out": element("mask"),
    **dict.fromkeys(("weights", "floats", "sequence_weights"), tl.float32),
    **dict.fromkeys(("counts", "peaks", "counter", "states"), tl.int32), "integers": tl.int64, "keep_out": tl.int8,
    **{f"{of}_{kind}": tl.float64 for of in ("token", "part", "sequence") for kind in ("sums", "maxima")},
    "statistics": tl.float64,
}  # fmt: skip


def absent(plan: Plan) -> set[str]:
    """The parameters of kernels that a plan has no tensor for."""
    there = {"weights": plan.writes_weights, "mask_out": plan.writes_mask, "advantages": plan.advantages is not None}
    there |= {table: bool(getattr(plan, table)) for table in ("integers", "floats", "peaks")}
    gone = {name for name, is_there in there.items() if not is_there}
    return {"log_mass", "histogram", "within", "keep_turns_out", *gone}


def arguments_of(
    kernel: Any, plan: Any, pointers: dict[str, Any], gone: set[str], externals: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments of a kernel: pointers and sizes are left, the plan is known, tensors in `gone` are None."""
    known: dict[str, Any] = {"PLAN": plan, "TILING": TILING, "SHAPE": SHAPE, "BY_OWNER": False, "numbers": "numbers"}
    known |= dict.fromkeys(("width", "tiles", "sums_before", "maxima_before"), 0) | dict.fromkeys(gone)
    known["externals"] = tuple(Dyn(name(one), element(one), (), True) for one in externals)
    found: dict[str, Any] = {}
    for parameter, annotation in kernel.fn.__annotations__.items():
        if parameter == "return":
            continue
        if parameter in known:
            found[parameter] = known[parameter]
        elif parameter in pointers:
            found[parameter] = Dyn(name(parameter), pointers[parameter], (), True)
        elif parameter.endswith(("_row", "_step")):
            found[parameter] = 1
        else:
            found[parameter] = Dyn(name(parameter), tl.int64 if "int64" in annotation else tl.int32)
    return found


def plain(column: str) -> str:
    """A column without the place of its criterion."""
    return re.sub("^[0-9]+/|-", "", column)


def label_of(plan: Tables, externals: Sequence[str] = ()) -> Any:
    """Names of the accumulators, and of tensors that criteria read."""

    def label(hint: str, value: tuple[Any, ...]) -> list[str] | None:
        if hint == "externals":
            return list(externals)
        if hint in TABLES and len(value) == len(getattr(plan, hint)):
            return [f"sum_{plain(column)}" for column in getattr(plan, hint)]
        # All but `found` grow column by column.
        if len(value) == len(plan.recorded) if hint == "found" else hint in ("kept", "more", "fresh"):
            prefix = "" if hint == "found" else "kept_"
            return [f"{prefix}{plain(column)}" for _, column in plan.recorded][: len(value)]
        return None

    return label


def named_bound(x: float, called: dict[float, str]) -> Any:
    """A bound by its name, where rounding to float32 leaves it as it is."""
    exact = x in called and float(np.float32(x)) == x
    return labeled(x, called[x]) if exact and math.isfinite(x) else x


def kernels_of(spec: Spec, numbers: tuple[str, ...]) -> tuple[list[Kernel], Specializer, Plan]:
    """The kernels of a Spec, in the order of their launches, and the functions that they call."""
    more: frozenset[str] = frozenset()
    never = NEVER
    externals = [one for one, _ in external_inputs(spec)]
    called = {x: name for name, x in reversed(bounds_of(spec).items()) if " " not in name}
    while True:
        plan = plan_for(spec, numbers, more, never)
        values = tuple(named_bound(x, called) for x in numbers_of(spec, plan.double).values())
        given = {"thresholds": lambda values=values, **_: values}
        specializer = Specializer(KEPT, given, label_of(plan, externals), cleaned)
        try:
            kernels = [
                specializer.specialized(kernel, arguments_of(kernel, plan, POINTERS, absent(plan), externals), top=True)
                for kernel in (read_kernel, decide_kernel, *([apply_kernel] if plan.applies else []))
            ]
            columns = {one for table in OF_BATCH for one in getattr(plan, table)}
            if lost := columns - specializer.stored - {*DERIVED}:
                raise CannotEject(f"spec: the specialized kernels would not store {sorted(lost)}")
            if unasked := [one for one in columns if more & {one}]:
                raise CannotEject(f"spec: the kernels store {sorted(unasked)} too, which no metric of the file reads")
            if gone := unread(plan, kernels[1:]) - never:
                never |= gone
                continue
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
    body = coalesced(kernel.body, kernel.parameters)
    names = Renamer(parameters, body, kernel.types).names(reserved)
    body = without_copies([Renamed(names).visit(s) for s in body])
    if sized:
        annotated = [f"{one}: tl.int64" if one in WIDE else f"{one}: tl.int32" if one in NARROW else one
                     for one in parameters]  # fmt: skip
        head = f"def {kernel.name}({', '.join(annotated)}):"
    else:
        annotated = [f"{one}: tl.tensor" for one in parameters]
        given = ["tl.tensor" for one in leaves(kernel.returns) if isinstance(one, Dyn)]
        returned = f"tuple[{', '.join(given)}]" if isinstance(kernel.returns, tuple) else given[0] if given else "None"
        head = f"def {kernel.name}({', '.join(annotated)}) -> {returned}:"
    lines = [
        "@triton.jit(do_not_specialize=SIZES)" if sized else "@triton.jit",
        *filled(head, width),
        f'    """{kernel.doc.replace("SHAPE.sequences", str(SHAPE.sequences))}"""',
        *text_of(body, 4, width),
    ]
    return "\n".join(lines)


# A store in a row of a program over sequences, or in a column of programs over tokens.
STORED = re.compile(
    r" +tl\.store\((?:(row\w*)(?: \+ (\d+))?|(token_\w+) \+ \(?program(?: \+ (?:(\d+) \* )?(programs))?)[,)]"
)


def noted(text: str, plan: Plan, width: int) -> str:
    """A kernel that says which statistic is stored in a column, where the line has room."""
    rows = dict(re.findall(r"(row\w*) = (sequence_(?:sums|maxima)) \+", text))
    lines = text.splitlines()
    for place, line in enumerate(lines):
        found = STORED.match(line)
        if found is None or not line.endswith(")"):
            continue
        row, column, table, times, after = found.groups()
        table, at = (rows.get(row), int(column or 0)) if row else (table, int(times or (1 if after else 0)))
        columns = getattr(plan, table or "", ())[plan.derived if table == "token_maxima" else 0 :]
        if at < len(columns) and len(line) + len(columns[at]) + 4 <= width:
            lines[place] += f"  # {columns[at]}"
    return "\n".join(lines)


# How a batch is divided into programs.
TILED = """    least = 9 if tokens >= 1024 * sequences else 8
    tile_bits = min(max((tokens // 2048 - 1).bit_length(), least), 11)
    # How often `owner_before` narrows its search.
    steps, left = 0, sequences + 1
    while left > 0:
        steps, left = steps + 1, left // 32
    token_programs = (tokens >> tile_bits) + 1
    slots = token_programs + sequences + 1
    sequence_programs = triton.cdiv(sequences + 2, 32)
"""
SHARES = """    # Programs that share the zeroing of what one of them rejects.
    shares = max(1, min(tokens // 32768, 1024) // sequence_programs) if tokens > 131072 * sequence_programs else 1
"""
PARTS = """    part = max(256, triton.cdiv(token_programs, 256))
    parts = triton.cdiv(token_programs, part)
"""

# The tables of a call, which kernels leave results in for each other.
SCRATCH = """    def table(rows, columns, dtype):
        return torch.empty((rows, columns), dtype=dtype, device=device)

{tables}
    counter = torch.empty(sequence_programs + 2, dtype=torch.int32, device=device)"""

LAUNCHES = '''def _fused(
    train_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
{inputs}) -> {typed}:
    """{told}, in {launches} launches.

    Programs over tokens have tiles of 2^tile_bits tokens; the part of a sequence in a tile is a slot of the tables.
    """
    if train_logp.device.type == "cpu" and isinstance(read_kernel, triton.runtime.JITFunction):
        raise RuntimeError("{where}: expected tensors on a GPU, got some on the CPU")
{rows}{contiguous}    train_logp, rollout_logp, given = train_logp.contiguous(), rollout_logp.contiguous(), mask
    mask = mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()
    device, tokens, sequences = train_logp.device, train_logp.numel(), offsets.shape[0] - 1
{sizes}
{tables}
    keep = torch.empty(sequences, dtype=torch.bool, device=device)
    keep_out = keep.view(torch.uint8)
    statistics = torch.empty({statistics}, dtype=torch.float64, device=device)
{outputs}
    launch = {{"num_warps": 1, "enable_fp_fusion": True}}
    with torch.cuda.device_of(train_logp):
{launched}
{divided}    return {returned}'''
ROWS = """    # Each row is a sequence of a packed batch.
    offsets = torch.arange(train_logp.shape[0] + 1, device=train_logp.device) * train_logp.shape[1]
"""


def fused(spec: Spec, door: Door, numbers: tuple[str, ...], gives: tuple[str, ...], eager: bool) -> list[str]:
    """Write the Triton part of a file: constants, functions, kernels and `_fused`, for batches with a mask.

    The statistics are those that `completed` gives. With `eager` the file has plain torch too.
    """
    kernels, found, plan = kernels_of(specialized_spec(spec, numbers), numbers)
    constants, *texts = texts_of(kernels, found, eager, door.width)
    texts = [noted(text, plan, door.width) for text in texts]
    return [constants, *texts, launches_of(spec, plan, numbers, kernels, door, gives, eager)]


def specialized_spec(spec: Spec, numbers: tuple[str, ...]) -> Spec:
    """The Spec without schemes that no metric of the file reads; refuse one that the kernels of a file do not run."""
    if (why := beyond_kernels(spec)) is not None:
        raise CannotEject(f"spec: the kernels do not run it: {why}")
    if spec.measures_turns:
        raise CannotEject("spec: expected no turns for the Triton part: a walk along turns would double its kernels")
    if spec.weight is not None and spec.weight.self_normalized:
        raise CannotEject(
            f"spec: expected normalize='batch' or None for the Triton part, got {spec.weight.normalize!r}, which the "
            "package divides by in plain torch"
        )
    # A scheme that no metric of the file reads has no part in the kernels.
    read = {number.partition("/")[0] for number in numbers}
    return dataclasses.replace(spec, report=tuple(one for one in spec.report if one == "native" or one in read))


def texts_of(kernels: list[Kernel], found: Specializer, eager: bool, width: int) -> list[str]:
    """Write the constants, and the kernels and what they call."""
    functions = list({one.name: one for one in found.functions.values()}.values())
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
    constants = [f"{labels[label]} = tl.constexpr({f'0x{x:X}' if label.startswith('NAN') else power(x)})"
                 for label, x in sorted(found.constants.items())
                 if any(re.search(rf"\b{labels[label]}\b", text) for text in texts)]  # fmt: skip
    read = {one for kernel in kernels for one in names_in(kernel.body)}
    sizes = split_names("SIZES", [one for one in (*WIDE, *NARROW) if one in read], width)
    return ["\n".join([*constants, "# No compiled kernel depends on the values of these.", sizes]), *texts]


def rows_of_decide(plan: Plan) -> str:
    """The programs of `decide` over sequences, as an expression."""
    return "sequence_programs * shares" if plan.zeroes else "sequence_programs"


def programs_of(plan: Plan) -> dict[str, str]:
    """The programs of the kernels of a correction, as expressions."""
    deciding = f"{rows_of_decide(plan)} + parts * {groups(plan)}"
    return {"read_kernel": "token_programs", "decide_kernel": deciding, "apply_kernel": "token_programs"}


def tables_of(plans: Sequence[Tables], kernels: list[Kernel], rows: str) -> str:
    """The lines that allocate the tables which kernels leave results in for each other."""

    def most(table: str) -> int:
        return max(len(getattr(plan, table)) for plan in plans)

    maxima = max(kept_of(plan, "token_maxima") for plan in plans)
    corrections = [plan for plan in plans if isinstance(plan, Plan)]
    in_two_passes = getattr(plans[-1], "phase", None) == "write"
    tables = [
        *((table, most(table), "slots", kind)
          for table, kind in zip(TABLES, ("int32", "int64", "float32", "int32"), strict=True)),
        ("token_sums", most("token_sums"), "token_programs", "float64"),
        ("token_maxima", maxima, "token_programs", "float64"),
        ("part_sums", most("token_sums"), "parts", "float64"),
        ("part_maxima", maxima, "parts", "float64"),
        ("sequence_sums", most("sequence_sums"), rows, "float64"),
        ("sequence_maxima", most("sequence_maxima"), rows, "float64"),
        ("states", any(plan.applies for plan in corrections), "sequences", "int32"),
        ("sequence_weights", any(plan.spreads for plan in corrections), "sequences", "float32"),
        ("part_counter", in_two_passes, "parts", "int32"),
        *((table, in_two_passes and getattr(plans[-1], there), "slots", "float32")
          for table, there in (("levels", "levels"), ("pulls", "pulls"), ("inners", "averages"))),
    ]  # fmt: skip
    read = {one for kernel in kernels for one in kernel.parameters if names_in(kernel.body)[one]}
    lines = [f"    {name} = table({int(many)}, {columns}, torch.{kind})" for name, many, columns, kind in tables
             if many and name in read]  # fmt: skip
    return SCRATCH.format(tables="\n".join(lines))


def launched(kernel: Kernel, programs: str, width: int, called: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The lines that launch a kernel; `called` has the caller's names of its parameters where they differ."""
    given = [called.get(one, one) for one in kernel.parameters if names_in(kernel.body)[one]]
    call = f"{kernel.name}[({programs},)]({', '.join(given)}, **launch)"
    return ["        " + line for line in filled(call, width - 8)]


def launches_of(
    spec: Spec, plan: Plan, numbers: tuple[str, ...], kernels: list[Kernel], door: Door, gives: tuple[str, ...],
    eager: bool,
) -> str:  # fmt: skip
    """Write the function that launches the kernels."""
    packed, width = door.layout == "packed", door.width
    outputs = ["    weights = torch.empty_like(train_logp, dtype=torch.float32)"] if plan.writes_weights else []
    outputs += ["    mask_out = torch.empty_like(mask)"] if plan.writes_mask else []
    launches = [line for kernel in kernels for line in launched(kernel, programs_of(plan)[kernel.name], width)]
    back = {
        "weights": "weights" if plan.writes_weights else "None",
        "mask": "mask_out.view(given.dtype)" if plan.writes_mask else "given",
        "keep": "keep",
        "numbers": "statistics",
    }
    more = [one for one, _ in external_inputs(spec)] + ["advantages"] * asks_advantages(spec)
    return LAUNCHES.format(
        inputs="".join(f"    {one}: torch.Tensor,\n" for one in [*["offsets"] * packed, *more]),
        contiguous="".join(f"    {one} = {one}.contiguous()\n" for one in [*["offsets"] * packed, *more]),
        divided=divided(spec, numbers, "statistics"),
        typed=typed(gives, plan.writes_weights),
        told=f"Compute {'the results of `_eager`' if eager else told(gives)}",
        where="backend='fused'" if eager else door.names["train_logp"],
        rows="" if packed else ROWS,
        launches="two" if len(kernels) == 2 else "three",
        sizes=TILED + (SHARES if plan.zeroes else "") + PARTS,
        tables=tables_of([plan], kernels, rows_of_decide(plan)),
        statistics=sum(len(getattr(plan, table)) for table in OF_BATCH),
        outputs="\n".join(outputs),
        launched="\n".join(launches),
        returned=", ".join(back[name] for name in gives),
    )


def divided(spec: Spec, numbers: tuple[str, ...], statistics: str) -> str:
    """The lines that divide weights by their mean over the batch, where the Spec says so.

    Args:
        spec: The Spec.
        numbers: Its statistics.
        statistics: The tensor that holds them.
    """
    if spec.weight is None or spec.weight.normalize is None or not spec.returns_weights:
        return ""
    *named, center = native.batch_mean(spec)
    weights, units = (f"{statistics}[{numbers.index(one)}]" for one in named)
    quotient = "weights / mean"
    if spec.nonfinite == "propagate":
        quotient = f"torch.where(weights == 0, weights, {quotient})"
    return f"""    mean = {center} + {weights} / {units}.clamp(min=1.0)
    mean = mean.masked_fill(mean <= {SMALLEST_MEAN}, 1.0)
    weights = {quotient}
"""
