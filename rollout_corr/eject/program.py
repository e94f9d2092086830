"""A Spec as a program: which statistics its metrics read, and the plain torch that gives these and the results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..backends import run, whole
from ..backends.batch import OpenBatch, external_names
from ..backends.ranks import Ranks
from ..definition import sequences, tokens
from ..definition.findings import evaluate
from ..metrics import collect, native, peers, rows, schema
from ..metrics.all_sequences import AllSequences
from ..specs.correction import Spec
from ..specs.criterion import AGE, ENTROPY
from ..specs.thresholds import float32_at_least, float32_at_most, log_bound
from .host import Written, written
from .lines import fitted
from .record import CannotEject, Node, Recorder
from .write import Functions, Names, Writer

PACKAGE = __name__.partition(".")[0]
# Modules whose local variables give names to values.
OWN = tuple(f"{PACKAGE}.{room}" for room in ("definition", "metrics", "backends", "frameworks"))
# Functions of the definition that stay functions of the file.
KEPT = (
    tokens.k3, tokens.to_grid, tokens.sum_of_d, tokens.sum_of_statistic, tokens.binary_kl, tokens.probability,
    tokens.extrema, sequences._differences, sequences.Packed.sum, sequences.Packed.max,
)  # fmt: skip
# Sizes of the example, found nowhere else in the definition.
TOKENS, SEQUENCES, ROWS, COLUMNS, TURNS = 1009, 53, 59, 71, 83

# Endings of bounds that are rounded, and what is said of them.
ROUNDED = ("_F32", "_UP", "_DOWN")
TOLD_ROUNDED = "# Names with _F32, _UP or _DOWN: rounded to float32 so that a float32 compares as with the exact bound."

# What the functions of the definition do, for the reader of the file.
SECTIONS = {
    "sequences_of": "Which tokens count: the mask is not 0 there, and they are inside of a sequence.",
    "count_valid": "Which tokens count: the mask is not 0 there, and they are inside of a sequence.",
    "read_tokens": "D = train - rollout, 0 where a token does not count. NaN and infinity: see the top.",
    "decide": "Which tokens and sequences are rejected.",
    "weigh": "Importance weights.",
    "weights_of": "The weights that are returned, 0 where a token has none.",
    "sequence_facts": "Sums over the tokens of each sequence.",
    "of_block": "Sums over tokens.",
    "collect": "Sums and maxima over rows.",
    "kept_tokens": "The mask of what trains.",
    "loss.read": "The log-ratio of new_logp, 0 at tokens that do not train and where it is NaN or infinite.",
    "loss.evaluate": "The loss of each token, and its sum.",
    "loss_blocks._result": "The number that the sum is divided by.",
    "statistics": "Sums over sequences.",
}


class Program(NamedTuple):
    """The parts of a file that a Spec decides."""

    inputs: tuple[str, ...]  # the names of the tensors that it reads, in order
    body: list[str]  # the lines that end in a return of weights, mask, keep and numbers
    functions: list[str]  # the functions that the body calls
    constants: list[str]  # the lines that define its constants
    numbers: tuple[str, ...]  # the names of the statistics
    metrics: Written  # what makes metrics of them
    names: dict[str, str]  # what the statistics are called in the file
    gives: tuple[str, ...]  # the names of all that the body returns


def names_of_statistics(spec: Spec) -> dict[str, str]:
    """Name the statistics of a Spec for the file."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in (name for part in schema.layout(spec) for name in part):
        text = name.split("/", 1)[1] if name.split("/")[0] in peers.SCHEMES else name
        text = text.replace("-min_", "negated_min_").replace("/", "_").replace(".", "_").replace("-", "_")
        if text in taken:
            text = f"row_{text}"
        taken.add(text)
        found[name] = text
    return found


def metrics_of(spec: Spec, wanted: str, names: dict[str, str]) -> Written:
    """The formulas of some metrics: "none", "dashboard", "all", or a framework's scheme of names."""
    if wanted == "none":
        return Written()
    if wanted in peers.SCHEMES:
        module = import_module(peers.SCHEMES[wanted])
        return written(lambda v: module.metrics(v, spec), names, [rows, module])
    some = native.metrics_of(spec)
    if wanted == "dashboard":
        some = native.on_dashboard(some)
    return written(lambda v: {row.key: row.read(v) for row in some}, names, [rows, native])


def bounds_of(spec: Spec) -> dict[str, float]:
    """The numbers that a Spec sets, by the names of constants, the clearest first."""
    found: dict[str, float] = {"CLAMP": spec.clamp}
    sides = [] if spec.weight is None else [("WEIGHT", spec.weight.low, spec.weight.high)]
    for place, criterion in enumerate(spec.criteria):
        label = "".join(sign if sign.isalnum() else "_" for sign in criterion.label.upper())
        sides.append((label if label[:1].isalpha() else f"CRITERION_{place}", criterion.low, criterion.high))
    for label, low, high in sides:
        for side, bound, rounded in (("LOWER", low, float32_at_least), ("UPPER", high, float32_at_most)):
            if bound is None:
                continue
            found[f"{label}_{side}"] = bound
            found[f"{label}_{side}_F32"] = rounded(bound)
            if bound > 0.0:
                logged = log_bound(bound)
                assert logged is not None
                found[f"LOG_{label}_{side}"] = logged
                found[f"LOG_{label}_{side}_F32"] = rounded(logged)
            found[f"{label}_{side} - 1.0"] = bound - 1.0
    return found


def refuse_details(spec: Spec) -> None:
    """Refuse a Spec whose metrics need more than sums and maxima."""
    if spec.detail == "full":
        raise CannotEject("spec: expected detail='basic', got 'full', whose percentiles need a histogram")


def program_of(
    spec: Spec,
    layout: str,
    wanted: str,
    inputs_called: Mapping[str, str],
    gives: tuple[str, ...],
    more: Collection[str] = (),
) -> Program:
    """Trace the definition under a Spec, with the metrics that `metrics_of` calls `wanted`, and `more` statistics."""
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            what = f"criterion {criterion.label!r} compares {criterion.of}, which exists only inside of a policy loss"
            raise CannotEject(f"spec: {what}")
    refuse_details(spec)
    peers.load(spec)
    called = names_of_statistics(spec)
    metrics = metrics_of(spec, wanted, {name: f"v.{text}" for name, text in called.items()})
    metrics.used |= set(more)
    undivided = run._before_division(spec)
    recorder = Recorder(KEPT, OWN)
    batch, inputs = _example(spec, layout, recorder, inputs_called)
    seen = _Seen()
    patches = (
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        mock.patch.object(whole, "evaluate", seen.findings(evaluate)),
        mock.patch.object(collect, "AllSequences", seen.view(AllSequences)),
    )
    with patches[0], patches[1], patches[2], torch.no_grad(), recorder:
        result = whole.run_whole(batch, undivided)
        vector = result.statistics.vector
        result = run._finished(result, batch, spec, Ranks())
    for name, x in seen.named.items():
        if id(x) in recorder.known:
            recorder.node_of(x).names.insert(0, name)
    stacked = recorder.node_of(vector)
    of_sums, of_maxima = schema.layout(spec)
    statistics: dict[str, Node] = dict(zip((*of_sums, *of_maxima), stacked.args[0], strict=True))
    for name, node in statistics.items():
        node.names.insert(0, called[name])
    named = {"weights": result.weights, "mask": result.mask, "keep": result.keep}
    return assembled(
        recorder, layout, inputs, metrics, called, {name: x for name, x in named.items() if x is not None},
        gives, statistics, of_sums, bounds_of(spec), spec.measures_turns, inputs[:2],
    )  # fmt: skip


def assembled(
    recorder: Recorder,
    layout: str,
    inputs: tuple[str, ...],
    metrics: Written,
    called: dict[str, str],
    named: dict[str, torch.Tensor],
    order: tuple[str, ...],
    statistics: Mapping[str, Node],
    of_sums: Collection[str],
    bounds: dict[str, float],
    of_turns: bool,
    compared: tuple[str, ...],
) -> Program:
    """Write what was recorded.

    Args:
        recorder: The recorder.
        layout: "packed" or "padded".
        inputs: The names of the tensors that it reads: first log-probs, third the mask.
        metrics: What makes metrics of its statistics.
        called: What these are called in the file.
        named: Its results besides statistics, by name.
        order: The names of all results in the order of the return; those that are not in `named` are as they came in.
        statistics: Their nodes by name.
        of_sums: The names of those that are sums.
        bounds: Numbers that were set, by the names of constants.
        of_turns: Sizes of turns have a name.
        compared: The names of the log-probs whose difference D is.
    """
    numbers = tuple(name for name in statistics if name in metrics.used)
    if layout == "packed":
        sizes = {TOKENS: "tokens", SEQUENCES: "sequences"}
        shape = torch.Size([TOKENS])
    else:
        sizes = {ROWS * COLUMNS: "rows * columns", ROWS: "rows", COLUMNS: "columns", COLUMNS // 2: "columns // 2"}
        shape = torch.Size([ROWS, COLUMNS])
    if of_turns:
        sizes[TURNS] = "turns"
    sizes |= {size + more: f"{name} {sign} 1" for size, name in sizes.items() for more, sign in ((1, "+"), (-1, "-"))}
    functions = Functions(
        Names(sizes, bounds, (shape, f"{inputs[0]}.shape"), f"{inputs[0]}.device", f"{inputs[2]}.dtype")
    )
    functions.reserved |= set(sizes.values())
    writer = Writer(recorder.graph, functions.names, functions)
    results = {name: recorder.node_of(x) for name, x in named.items() if name in order}
    for name, node in results.items():
        node.names.insert(0, "kept_mask" if name == "mask" else name)
    every = writer.prepare([*results.values(), *(statistics[name] for name in numbers)])
    body = writer.body(every, _section, len(results))
    texts = {"mask": inputs[2], **dict(zip(results, map(writer.result, every), strict=False))}
    of_numbers = {called[name]: writer.result(node) for name, node in zip(numbers, every[len(results) :], strict=True)}
    words = {"D = train - rollout": f"D = {' - '.join(compared)}"}
    if layout == "padded":
        words[" there, and they are inside of a sequence"] = " there"
    for said, here in words.items():
        body = [line.replace(said, here) if line.startswith("#") else line for line in body]
    order += ("numbers",) if numbers and "numbers" not in order else ()
    given = [texts.get(name, "None" if name == "weights" else name) for name in order if name != "numbers"]
    body += _returned(given, of_numbers, "numbers" in order)
    functions_used = [function.source for function in functions.every.values()]
    text = "\n".join(
        [*body, *functions_used, *(["sequences"] if layout == "packed" else ["rows"] if "keep" in order else [])]
    )
    first = _sizes_first(layout, text, inputs[0])
    constants: list[str] = []
    for name, (value, comment) in functions.constants.items():
        constants += [line for line in comment if line not in constants] + [f"{name} = {power(value)}"]
    of_spec = [
        f"{name} = {value!r}"
        for name, value in bounds.items()
        if " " not in name and re.search(rf"\b{re.escape(name)}\b", text)
    ]
    rounded = [place for place, line in enumerate(of_spec) if line.partition(" =")[0].endswith(ROUNDED)]
    if rounded:
        of_spec.insert(rounded[0], TOLD_ROUNDED)
    constants += of_spec
    # Only a maximum asks for an element.
    if layout == "packed" or numbers or "max(" in text:
        first += _of_nothing(layout, inputs, [name in of_sums for name in numbers], order, named)
    return Program(inputs, first + body, functions_used, constants, numbers, metrics, called, order)


class _Seen:
    """Findings and columns that a trace passes; their fields name its values best."""

    def __init__(self) -> None:
        self.named: dict[str, torch.Tensor] = {}

    def findings(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the findings of the definition."""

        def call(given: Any) -> Any:
            found = evaluate(given)
            tokens, facts = found.tokens, found.facts
            fields = {"n_valid": found.n_valid, "n_measured": found.n_measured, "d": tokens.d, "sum_d": facts.d,
                      "measured": tokens.measured, "valid": tokens.valid, "n_kept": facts.kept}  # fmt: skip
            if found.weighing is not None:
                fields |= {"log_ratio": found.weighing.log_ratio, "weight_m1": found.weighing.bounded,
                           "bounded_ratio": found.weighing.weight}  # fmt: skip
            self._keep(fields)
            return found

        return call

    def view(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the columns of sequences."""

        def call(*args: Any) -> Any:
            found = view(*args)
            self._keep({**found._columns, "has_tokens": found.among})
            return found

        return call

    def _keep(self, named: dict[str, Any]) -> None:
        self.named = {**{name: x for name, x in named.items() if isinstance(x, torch.Tensor)}, **self.named}


def _example(
    spec: Spec, layout: str, recorder: Recorder, called: Mapping[str, str]
) -> tuple[OpenBatch, tuple[str, ...]]:
    """A batch to trace on."""
    shape = (TOKENS,) if layout == "packed" else (ROWS, COLUMNS)
    random = torch.Generator().manual_seed(0)
    inputs: dict[str, torch.Tensor] = {}
    for name in ("train_logp", "rollout_logp"):
        inputs[name] = -torch.rand(shape, generator=random)
    inputs["mask"] = torch.rand(shape, generator=random) > 0.25
    offsets, count = None, ROWS
    if layout == "packed":
        ends = torch.randint(0, TOKENS, (SEQUENCES - 1,), generator=random).sort().values
        offsets = inputs["cu_seqlens"] = torch.cat([torch.tensor([0]), ends, torch.tensor([TOKENS])])
        count = SEQUENCES
    named = dict(external_inputs(spec))
    for name in named:
        inputs[name] = torch.randint(0, 4, shape, generator=random).float()
    if asks_advantages(spec):
        inputs["advantages"] = torch.randn(shape, generator=random)
    if spec.measures_turns:
        ends = torch.randint(0, inputs["mask"].numel(), (TURNS - 1,), generator=random).sort().values
        inputs["cu_turns"] = torch.cat([torch.tensor([0]), ends, torch.tensor([inputs["mask"].numel()])])
    for name, x in inputs.items():
        recorder.input(called.get(name, name), x)
    batch = OpenBatch(
        inputs["train_logp"], inputs["rollout_logp"], inputs["mask"], offsets, count, lambda x: x, inputs["mask"],
        advantages=inputs.get("advantages"), turns=inputs.get("cu_turns"),
        external={key: inputs[name] for name, key in named.items()},
    )  # fmt: skip
    batch.entropy = batch.external.get(ENTROPY)
    if spec.reads_versions and AGE not in batch.external:
        raise CannotEject("spec: expected a Spec that reads versions by a criterion alone, got a decay of weights")
    return batch, tuple(called.get(name, name) for name in inputs)


def external_inputs(spec: Spec) -> list[tuple[str, str]]:
    """List the tensors that criteria read besides log-probs: their names in the file, and their keys."""
    names = {AGE: "ages", ENTROPY: "entropy"}
    return [(names.get(key, re.sub(r"\W", "_", key)), key) for key in external_names(spec)]


def asks_advantages(spec: Spec) -> bool:
    """A criterion tests the sign of advantages."""
    return any(criterion.when != "any" for criterion in spec.criteria)


def _section(node: Node) -> str | None:
    if node.names[:1] == ["kept_mask"]:
        return SECTIONS["kept_tokens"]
    where = node.where
    for code in where:
        qualified = f"{Path(code.co_filename).stem}.{code.co_name}"
        # What reads tokens for a loss is a part of its evaluation.
        if qualified == "loss.evaluate" and any(inner.co_name == "read" for inner in where):
            return SECTIONS["loss.read"]
        if qualified in SECTIONS or code.co_name in SECTIONS:
            return SECTIONS.get(qualified, SECTIONS.get(code.co_name))
    return None


def _returned(given: list[str], numbers: dict[str, str], asked: bool) -> list[str]:
    if not numbers:
        return ["", f"return {', '.join([*given, *(['torch.zeros(0)'] if asked else [])])}"]
    lines = ["", "numbers = torch.stack(", "    ["]
    for name, text in numbers.items():
        lines.append(f"        {text}," if text == name else f"        {text},  # {name}")
    lines += ["    ]", ")"]
    return [*lines, f"return {', '.join(given)}, numbers"]


def _of_nothing(
    layout: str, inputs: tuple[str, ...], sums: list[bool], order: tuple[str, ...], named: Mapping[str, Any]
) -> list[str]:
    """The lines that answer for a batch without tokens or sequences, which has no maximum."""
    logp, mask = inputs[0], inputs[2]
    count, empty = "sequences", f"{logp}.numel() == 0 or sequences == 0"
    if layout == "padded":
        count, empty = "rows", f"{logp}.numel() == 0"
    nothing = f"torch.zeros({len(sums)}, dtype=torch.float64, device={logp}.device)"
    if not all(sums):
        runs = [("0.0" if of_sum else "-torch.inf", len([*run])) for of_sum, run in groupby(sums)]
        values = " + ".join(f"[{value}] * {many}" for value, many in runs)
        nothing = f"torch.tensor({values}, dtype=torch.float64, device={logp}.device)"
    given = {
        "total": "total", "divisor": "divisor", "mask": f"torch.zeros_like({mask})",
        "weights": f"torch.zeros_like({logp})" if "weights" in named else "None", "keep": "keep", "numbers": "nothing",
    }  # fmt: skip
    return [
        f"if {empty}:",
        *([f"    keep = torch.ones({count}, dtype=torch.bool, device={logp}.device)"] if "keep" in order else []),
        *([f"    total = (0.0 * {logp}).sum(dtype=torch.float64)"] if "total" in order else []),
        *(["    divisor = torch.ones_like(total)"] if "divisor" in order else []),
        *([f"    nothing = {nothing}"] if "numbers" in order else []),
        *("    " + line for line in fitted(f"return {', '.join(given[name] for name in order)}")),
        "",
    ]


def power(x: float) -> str:
    """A number, as a power of 2 where it is a large one."""
    if isinstance(x, int):
        return repr(x)
    mantissa, exponent = math.frexp(x)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and exponent > 8 else repr(x)


def _sizes_first(layout: str, text: str, logp: str) -> list[str]:
    """The lines that name the sizes of the batch which a text reads."""
    lines = {"tokens": f"{logp}.numel()", "sequences": "cu_seqlens.shape[0] - 1"}
    if layout == "padded":
        lines = {"rows": f"{logp}.shape[0]", "columns": f"{logp}.shape[1]"}
    lines["turns"] = "cu_turns.shape[0] - 1"
    found = [f"{name} = {size}" for name, size in lines.items() if re.search(rf"\b{name}\b", text)]
    return [*found, ""] if found else []
