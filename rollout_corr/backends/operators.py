"""The kernels as an operator of torch: a compiler sees one opaque call, and nothing of it needs a value.

Registered for CUDA (which ROCm goes by too) with the kernels, for the CPU with the reference, and with the shapes of
its results for tracing. Triton is imported by the first call that needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..definition.tokens import KeptMass, compute_dtype
from ..metrics import aggregates, schema
from ..metrics.extra import Extra
from ..metrics.statistics import Statistics
from ..specs.caches import cached, registered
from ..specs.correction import Spec
from ..specs.criterion import AGE
from ..specs.operands import CorrectOperands
from . import blocks, whole
from .batch import OpenBatch, Result, external_names, read_offsets
from .registration import OPERATORS, beside_tokens, define, encoded_once, filled, seen_by_others
from .turns import read_offsets_of_turns

if TYPE_CHECKING:
    from ..kernels.correct.launch import CorrectFound
    from . import first_call

# Of the oldest torch that is promised.
OLDEST_TRITON = (3, 6)

DEVICES = ("cuda",)

# The state of a sequence is an int32 without a sign: two bits, and one for each criterion that thins.
MOST_THINNING = 28


def _missing_triton() -> str | None:
    needed = ".".join(map(str, OLDEST_TRITON))
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is not None and (int(found[1]), int(found[2])) >= OLDEST_TRITON:
            return None
        return f"the kernels need Triton >= {needed}, and {version} is installed"
    return f"the kernels need Triton >= {needed}, and none is installed"


# The reason why the installed Triton does not do; None if it does. Found at the import, for a millisecond: compilers
# ask too, torch 2.11's cannot follow importlib.metadata, and the mark that would spare it that imports the compiler.
MISSING_TRITON = _missing_triton()
_INTERPRETS: list[bool] = registered([])


def interprets() -> bool:
    """Return whether Triton runs in its interpreter (TRITON_INTERPRET=1 before the first kernel was imported)."""
    if not _INTERPRETS:
        # Not by the class of what is interpreted, whose module needs NumPy.
        from triton.runtime.jit import JITFunction

        from ..kernels.correct.read import read_kernel

        _INTERPRETS.append(not isinstance(read_kernel, JITFunction))
    return _INTERPRETS[0]


def why_not(device: torch.device) -> str | None:
    """Say why the kernels cannot run on a device; None if they can."""
    if MISSING_TRITON is not None:
        return MISSING_TRITON
    if device.type in DEVICES:
        return None
    try:
        if device.type == "cpu" and interprets():
            return None
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        return "TRITON_INTERPRET is set, and Triton's interpreter needs NumPy, which is not installed"
    also = (
        "; on a CPU they run only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
        if device.type == "cpu"
        else ""
    )
    return f"the kernels run on {' and '.join(DEVICES)} tensors{also}"


def run_fused(batch: OpenBatch, spec: Spec) -> Result:
    """Run the kernels on a batch: directly, or as the operator where something has to see that.

    The kernels know no labels and not all of detail="full": statistics of these are the definition's.
    """
    result = _run_fused(batch, spec)
    if batch.labels:
        with torch.no_grad():
            for one, found in zip(batch.labels, whole.statistics_of_labels(batch, spec, batch.labels), strict=True):
                result.statistics = result.statistics.followed_by(Extra((one.labels,)), *found)
    return result


def _run_fused(batch: OpenBatch, spec: Spec) -> Result:
    operands = operands_of(batch, spec, torch.compiler.is_compiling())
    if is_operator(operands):
        *of_operator, _ = operands_of(batch, spec, True)
        found = OPERATORS.correct(*of_operator, *encoded_once(spec))
        weights, mask, keep, vector, keep_turns = found
        statistics = Statistics(spec, vector)
        return Result(
            weights if spec.returns_weights else None,
            mask if writes_mask(spec, batch.mask, batch.offsets) else None,
            keep,
            # On the CPU the operator is the reference, which leaves nothing.
            statistics if batch.train.device.type == "cpu" else whole.diagnosed(statistics, batch, spec),
            None if batch.turns is None else keep_turns,
        )
    made: CorrectFound = launcher().run(beside_tokens(operands), spec, (batch.weights_out, batch.mask_out))
    statistics = whole.diagnosed(Statistics(spec, made.statistics), batch, spec)
    return Result(made.weights, made.mask, made.keep, statistics, made.keep_turns, made.mean, made.ages)


def is_operator(operands: CorrectOperands) -> bool:
    """Return whether something has to see the kernels as an operator, such as a compiler."""
    given, versions = operands, operands.versions
    policies = given.train, given.rollout, given.new, given.log_mass
    tensors = *policies, given.mask, given.offsets, given.advantages, *given.externals
    # The operator on the CPU is the reference; there the kernels were asked for by name.
    return seen_by_others((*tensors, None if versions is None else versions.ids)) and (
        torch.compiler.is_compiling() or given.train.device.type != "cpu"
    )


@cached(maxsize=1)
def kernels() -> Any:
    """Import the launcher of the kernels, and with it Triton."""
    from ..kernels.correct import launch

    return launch


@cached(maxsize=1)
def launcher() -> Any:
    """The launcher of calls that no operator stands for, behind the comparison of the first of them."""
    from . import first_call

    return first_call.launcher_of("correct", kernels(), _results_of_kernels, _results_of_torch, launcher.cache_clear)


def operands_of(batch: OpenBatch, spec: Spec, ages_of_tokens: bool = False) -> CorrectOperands:
    """Return a batch as the kernels take it: with versions, or as the operator takes it, with ages of tokens.

    A compiler makes the ages as it makes all else, and would compile anew for every current version.
    """
    known = batch.versions
    if known is not None and (ages_of_tokens or (known.per_sequence and batch.turns is not None)):
        known = None  # where turns stand in the place of sequences, kernels look for versions of turns
    external = list(batch.external_of(spec, known is None).values()) if spec.criteria else []
    new = next(one for one, _ in batch.pairs.values()) if batch.pairs else None
    log, of_rollout = (None, False) if batch.mass is None else (batch.mass.log_mass, batch.mass.of == "train")
    return CorrectOperands(
        batch.train, batch.rollout, batch.mask, batch.offsets, batch.advantages, batch.per_sequence, external, new, log,
        of_rollout, batch.turns, known,
    )  # fmt: skip


def beyond_kernels(spec: Spec) -> str | None:
    """Say what of a Spec the kernels leave to plain torch; None for nothing.

    In two places they know only the D of train/rollout: where they count the tokens that a failed sequence drops
    one by one, and in the metrics of frameworks.
    """
    if spec.has_prefixes:
        return "weights and criteria over prefixes run on plain torch"
    if spec.asks_batch:
        return "bounds that the batch decides run on plain torch"
    if len(spec.criteria) > MOST_THINNING and sum(criterion.thins for criterion in spec.criteria) > MOST_THINNING:
        return f"more than {MOST_THINNING} criteria drop single tokens of sequences"
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            thins = criterion.thins
            if thins or len(spec.report) > 1:
                why = (
                    "drops single tokens of sequences" if thins else "is used together with another framework's metrics"
                )
                return f"criterion {criterion.label!r} of {criterion.of} {why}"
    return None


def of_double(backend: str, dtype: torch.dtype) -> str | None:
    """Say that kernels leave log-probs that compute in float64 to plain torch; None of others, and on plain torch."""
    return "float64 runs on plain torch" if backend == "triton" and dtype == torch.float64 else None


def counts(spec: Spec) -> tuple[int, int]:
    """Count the sums and the maxima of the statistics."""
    sums, maxima = schema.layout(spec)
    return len(sums), len(maxima)


def writes_mask(spec: Spec, mask: Tensor | None, offsets: Tensor | None) -> bool:
    """Tell whether a new mask is written: where the Spec edits it, or where none is given and sequences are packed."""
    return spec.edits_mask or (mask is None and offsets is not None)


# --- the first call ---


def _results_of_kernels(operands: CorrectOperands, spec: Spec) -> first_call.Outputs:
    found = kernels().run(beside_tokens(operands), spec)
    return results_of(found.weights, found.mask, found.keep, found.statistics, found.keep_turns, spec)


def _results_of_torch(operands: CorrectOperands, spec: Spec) -> first_call.Outputs:
    made = reference(operands, spec)
    return results_of(made.weights, made.mask, made.keep, made.statistics.vector, made.keep_turns, spec)


def results_of(
    weights: Tensor | None, mask: Tensor | None, keep: Tensor, vector: Tensor, keep_turns: Tensor | None, spec: Spec
) -> first_call.Outputs:
    """The results of a correction as they are compared: decisions and counts exactly."""
    from . import first_call

    found = first_call.results(
        keep=(keep, None), keep_turns=(keep_turns, None), mask=(mask, None), weights=(weights, 0.0)
    )
    every = [name for part in schema.layout(spec) for name in part]
    values = dict(zip(every, vector.tolist(), strict=True))
    names = [name for name in every if not any(name in side for side in aggregates.DIAGNOSED)]
    if values["tokens_nonfinite"] and spec.nonfinite == "propagate":
        return found
    return found | first_call.statistics(values, {name: _size_of(name, values) for name in names})


def _size_of(name: str, values: Mapping[str, float]) -> float | None:
    """The size of the terms of a statistic; None for a count."""
    if name.startswith(("tokens", "sequences", "histogram_")) or name.endswith(("/tokens", "/sequences", "/units")):
        return None
    value, squares = values[name], values.get(f"{name}2", 0.0)
    # An exponential is off by what its exponent is, and that by its size.
    exponent = max(1.0, math.log(value)) if name.endswith("_ppl") and 0.0 < value < math.inf else 1.0
    return exponent * max(1.0, abs(value), math.sqrt(max(0.0, values["tokens"] * squares)))


# --- the operator ---


def _kernels(operands: CorrectOperands, spec: Spec) -> tuple[Tensor, ...]:
    found = kernels().run(beside_tokens(operands), spec)
    return filled(operands.train, found.weights, found.mask, found.keep, found.statistics, found.keep_turns)


def _reference(operands: CorrectOperands, spec: Spec) -> tuple[Tensor, ...]:
    made = reference(operands, spec)
    return filled(operands.train, made.weights, made.mask, made.keep, made.statistics.vector, made.keep_turns)


def reference(operands: CorrectOperands, spec: Spec) -> Result:
    """Run a correction on plain torch, in blocks, with a mask where the kernels write one."""
    given, train, mask, new = operands, operands.train, operands.mask, operands.new
    offsets = None if given.offsets is None else read_offsets(given.offsets, train, False)
    names = [name for name in external_names(spec) if name != AGE or given.versions is None]
    pairs = {} if new is None else {"new/rollout": (new, given.rollout), "new/old": (new, train)}
    batch = OpenBatch(
        train=train,
        rollout=given.rollout,
        mask=mask,
        offsets=offsets,
        count=train.shape[0] if offsets is None else offsets.shape[0] - 1,
        restore=lambda x: x,
        given_mask=mask,
        advantages=given.advantages,
        per_sequence=given.per_sequence,
        external=dict(zip(names, given.externals, strict=True)),
        pairs={of: pair for of, pair in pairs.items() if any(criterion.of == of for criterion in spec.criteria)},
        mass=None
        if given.log_mass is None
        else KeptMass(given.log_mass, "train" if given.mass_of_rollout else "rollout"),
        versions=given.versions,
    )
    batch.turns = None if given.turns is None else read_offsets_of_turns(given.turns, batch, False)
    result = blocks.run_blocks(batch, spec)
    if result.mask is None and writes_mask(spec, mask, offsets):
        result.mask = whole.inside(batch)
    return result


def _shapes(operands: CorrectOperands, spec: Spec) -> tuple[Tensor, ...]:
    train, mask, offsets = operands.train, operands.mask, operands.offsets
    kind = compute_dtype(train.dtype, operands.rollout.dtype)
    sequences = train.shape[0] if offsets is None else offsets.shape[0] - 1
    mask_kind = torch.bool if mask is None else mask.dtype
    edits = writes_mask(spec, mask, offsets)

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=train.device)

    return filled(
        train,
        empty(*train.shape, dtype=kind) if spec.returns_weights else None,
        empty(*train.shape, dtype=mask_kind) if edits else None,
        empty(sequences, dtype=torch.bool),
        empty(sum(counts(spec)), dtype=torch.float64),
        None if operands.turns is None else empty(operands.turns.shape[0] - 1, dtype=torch.bool),
    )


define("correct", CorrectOperands, 5, cuda=_kernels, cpu=_reference, fake=_shapes, encoded="spec")
