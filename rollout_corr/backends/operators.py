"""The kernels as an operator of torch: a compiler sees one opaque call, and nothing of it needs a value.

Registered for CUDA (which ROCm goes by too) with the kernels, for the CPU with the reference, and with the shapes of
its results for tracing. Triton is imported by the first call that needs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics import aggregates, schema
from ..specs.caches import cached_untraced, registered
from ..specs.correction import Spec
from ..specs.operands import CorrectOperands, CorrectResult, compute_dtype
from . import blocks, whole
from .batch import OpenBatch, read_offsets
from .registration import OPERATORS, define, encoded_once, filled, flat, offsets_near_tokens, seen_by_others

if TYPE_CHECKING:
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


def run_fused(batch: OpenBatch, spec: Spec) -> CorrectResult:
    """Run the kernels on a batch: directly, or as the operator where something has to see that.

    The kernels know no labels and not all of detail="full": statistics of these are the definition's.
    """
    result = _run_fused(batch, spec)
    if batch.labels:
        from ..metrics.by_label import joined

        with torch.no_grad():
            of_labels = whole.statistics_of_labels(batch, spec)
            result.statistics = joined(result.statistics, counts(spec)[0], of_labels)
    return result


def _run_fused(batch: OpenBatch, spec: Spec) -> CorrectResult:
    if torch.compiler.is_compiling():
        # It makes the ages as it makes all else, and would compile anew for every current version.
        batch = with_ages(batch, spec)
    if is_operator(batch):
        batch = with_ages(batch, spec)
        weights, mask, keep, vector, keep_turns = OPERATORS.correct(*flat(OPERANDS, batch), *encoded_once(spec))
        return CorrectResult(
            weights if spec.returns_weights else None,
            mask if writes_mask(spec, batch) else None,
            keep,
            # On the CPU the operator is the reference, which leaves nothing.
            vector if batch.train.device.type == "cpu" else whole.diagnosed(vector, batch, spec),
            None if batch.turns is None else keep_turns,
        )
    given = offsets_near_tokens(for_kernels(batch, spec))
    made: CorrectResult = launcher().run(given, spec, (batch.weights_out, batch.mask_out))
    made.statistics = whole.diagnosed(made.statistics, batch, spec)
    return made


def with_ages(batch: OpenBatch, spec: Spec) -> OpenBatch:
    """A batch that has the ages that criteria read among its externals, in the place of its versions."""
    if batch.versions is None:
        return batch
    return replace(batch, externals=list(batch.external_of(spec).values()), versions=None)


def for_kernels(batch: OpenBatch, spec: Spec) -> OpenBatch:
    """A batch as the kernels take it."""
    versions = batch.versions
    # Where turns stand in the place of sequences, kernels look for versions of turns.
    of_turns = versions is not None and versions.per_sequence and batch.turns is not None
    return with_ages(batch, spec) if of_turns else batch


def is_operator(given: CorrectOperands) -> bool:
    """Return whether something has to see the kernels as an operator, such as a compiler."""
    versions = given.versions
    policies = given.train, given.rollout, given.new, given.log_mass
    tensors = *policies, given.mask, given.offsets, given.advantages, *given.externals
    # The operator on the CPU is the reference; there the kernels were asked for by name.
    return seen_by_others((*tensors, None if versions is None else versions.ids)) and (
        torch.compiler.is_compiling() or given.train.device.type != "cpu"
    )


@cached_untraced(maxsize=1)
def kernels() -> Any:
    """Import the launcher of the kernels, and with it Triton."""
    from ..kernels.correct import launch

    return launch


@cached_untraced(maxsize=1)
def launcher() -> Any:
    """The launcher of calls that no operator stands for, behind the comparison of the first of them."""
    from . import first_call

    return first_call.launcher_of("correct", kernels(), _results_of_kernels, _results_of_torch, launcher.cache_clear)


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


def writes_mask(spec: Spec, given: CorrectOperands) -> bool:
    """Tell whether a new mask is written: where the Spec edits it, or where none is given and sequences are packed."""
    return spec.edits_mask or (given.mask is None and given.offsets is not None)


# --- the first call ---


def _results_of_kernels(operands: CorrectOperands, spec: Spec) -> first_call.Outputs:
    return results_of(kernels().run(offsets_near_tokens(operands), spec), spec)


def _results_of_torch(operands: CorrectOperands, spec: Spec) -> first_call.Outputs:
    made = reference(operands, spec)
    return results_of(made, spec)


def results_of(made: CorrectResult, spec: Spec) -> first_call.Outputs:
    """The results of a correction as they are compared: decisions and counts exactly."""
    from . import first_call

    found = first_call.results(
        keep=(made.keep, None),
        keep_turns=(made.keep_turns, None),
        mask=(made.mask, None),
        weights=(made.weights, 0.0),
    )
    every = [name for part in schema.layout(spec) for name in part]
    values = dict(zip(every, made.statistics.tolist(), strict=True))
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
    return _filled(operands, kernels().run(offsets_near_tokens(operands), spec))


def _reference(operands: CorrectOperands, spec: Spec) -> tuple[Tensor, ...]:
    return _filled(operands, reference(operands, spec))


def _filled(operands: CorrectOperands, made: CorrectResult) -> tuple[Tensor, ...]:
    return filled(operands.train, made.weights, made.mask, made.keep, made.statistics, made.keep_turns)


def reference(operands: CorrectOperands, spec: Spec) -> CorrectResult:
    """Run a correction on plain torch, in blocks, with a mask where the kernels write one."""
    batch = OpenBatch(**vars(operands))
    if batch.offsets is not None:
        batch = replace(batch, offsets=read_offsets(batch.offsets, batch.train, False))
    if batch.turns is not None:
        from .turns import read_offsets_of_turns

        batch = replace(batch, turns=read_offsets_of_turns(batch.turns, batch, False))
    result = blocks.run_blocks(batch, spec)
    if result.mask is None and writes_mask(spec, batch):
        result.mask = whole.inside(batch)
    return result


def _shapes(operands: CorrectOperands, spec: Spec) -> tuple[Tensor, ...]:
    train, mask, offsets = operands.train, operands.mask, operands.offsets
    kind = compute_dtype(train.dtype, operands.rollout.dtype)
    sequences = train.shape[0] if offsets is None else offsets.shape[0] - 1
    mask_kind = torch.bool if mask is None else mask.dtype
    edits = writes_mask(spec, operands)

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


OPERANDS = define("correct", CorrectOperands, 5, cuda=_kernels, cpu=_reference, fake=_shapes, encoded="spec")
