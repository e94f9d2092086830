"""The kernels as an operator of torch: a compiler sees one opaque call, and nothing of it needs a value.

Registered for CUDA (which ROCm goes by too) with the kernels, for the CPU with the reference, and with the shapes of
its results for tracing. Triton is imported by the first call that needs it.
"""

from __future__ import annotations

import re
from importlib import metadata

import torch
from torch import Tensor

from rollout_corr.backends import blocks, whole
from rollout_corr.backends.batch import Batch, checked_offsets, external_names
from rollout_corr.backends.result import Result
from rollout_corr.definition.tokens import compute_dtype
from rollout_corr.metrics import schema
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.encode import decode, encode, encode_once

# The first Triton with functions of constants, by which the kernels find their columns.
OLDEST_TRITON = (3, 5)

DEVICES = ("cuda",)

LIBRARY = torch.library.Library("rollout_corr", "DEF")
LIBRARY.define(
    "correct(Tensor train_logp, Tensor rollout_logp, Tensor? mask, Tensor? cu_seqlens, Tensor? advantages, "
    "bool per_sequence, Tensor[] external, Tensor? new_logp, str spec, "
    "float[] numbers) -> (Tensor weights, Tensor mask, Tensor keep, Tensor statistics)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Found = tuple[Tensor, Tensor, Tensor, Tensor]


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


# What is wrong with the Triton that is installed; None if nothing is. Asked at the import, for a millisecond: compilers
# ask too, torch 2.11's cannot follow importlib.metadata, and the mark that would spare it that imports the compiler.
MISSING_TRITON = _missing_triton()
_INTERPRETS: list[bool] = []


def interprets() -> bool:
    """Whether Triton runs in its interpreter (TRITON_INTERPRET=1 before the first kernel was imported)."""
    if not _INTERPRETS:
        from triton.runtime.interpreter import InterpretedFunction

        from rollout_corr.kernels.correct.read import read_kernel

        _INTERPRETS.append(isinstance(read_kernel, InterpretedFunction))
    return _INTERPRETS[0]


def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None if they can."""
    if MISSING_TRITON is not None:
        return MISSING_TRITON
    if device.type in DEVICES:
        return None
    if device.type == "cpu" and interprets():
        return None
    also = "; on the CPU they run in Triton's interpreter alone, for tests" if device.type == "cpu" else ""
    return f"the kernels run on {' and '.join(DEVICES)} tensors{also}"


def run_fused(batch: Batch, spec: Spec) -> Result:
    """The operator on a batch, whatever the device."""
    operands = operands_of(batch, spec)
    if batch.train.device.type == "cpu" and not torch.compiler.is_compiling():
        # The operator on the CPU is the reference; the kernels were asked for by name.
        found = _kernels(*operands, *encode_once(spec))
    else:
        text = encode(spec) if torch.compiler.is_compiling() else encode_once(spec)
        found = torch.ops.rollout_corr.correct(*operands, *text)
    weights, mask, keep, statistics = found
    return Result(
        weights if spec.returns_weights else None,
        mask if writes_mask(spec, batch.mask, batch.offsets) else None,
        keep,
        statistics_of(statistics, spec),
    )


Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool, list[Tensor], Tensor | None]


def operands_of(batch: Batch, spec: Spec) -> Operands:
    """A batch as the operator takes it."""
    external = [batch.external[name] for name in external_names(spec)]
    new = [one for one, _ in batch.pairs.values()]
    tensors = batch.train, batch.rollout, batch.mask, batch.offsets, batch.advantages
    return *tensors, batch.per_sequence, external, new[0] if new else None


def statistics_of(vector: Tensor, spec: Spec) -> Statistics:
    """Sums and maxima from the one vector that the kernels fill."""
    sums, maxima = counts(spec)
    return Statistics(spec, vector[:sums], vector[sums : sums + maxima])


def beyond_kernels(spec: Spec) -> str | None:
    """The criterion that the kernels leave to plain torch, in words; None without one.

    What a criterion of sequences drops token by token is counted by the sign of one D; peers' metrics are of one too.
    """
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            late = criterion.thins_sequences
            if late or len(spec.report) > 1:
                why = "drops single tokens of sequences" if late else "stands beside a peer's metrics"
                return f"criterion {criterion.label!r} of {criterion.of} {why}"
    return None


def counts(spec: Spec) -> tuple[int, int]:
    """How many sums and maxima the statistics have."""
    sums, maxima = schema.layout(spec)
    return len(sums), len(maxima)


def writes_mask(spec: Spec, mask: Tensor | None, offsets: Tensor | None) -> bool:
    """Whether a new mask is written; one of all ones is not, but one that ends where the sequences do is."""
    return spec.edits_mask or (mask is None and offsets is not None)


# --- the operator ---


def _kernels(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    advantages: Tensor | None,
    per_sequence: bool,
    external: list[Tensor],
    new: Tensor | None,
    text: str,
    numbers: list[float],
) -> Found:
    from rollout_corr.kernels.correct.launch import Given, Wanted, run

    spec = decode(text, numbers)
    if offsets is not None:
        offsets = offsets.to(train.device)
    given = Given(train, rollout, mask, offsets, advantages, per_sequence, external, new)
    wanted = Wanted(spec.returns_weights, writes_mask(spec, mask, offsets), spec.edits_mask)
    found = run(given, spec, wanted)
    nothing = train.new_empty(0)
    return (
        nothing if found.weights is None else found.weights,
        train.new_empty(0) if found.mask is None else found.mask,
        found.keep,
        found.statistics,
    )


def _reference(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    advantages: Tensor | None,
    per_sequence: bool,
    external: list[Tensor],
    new: Tensor | None,
    text: str,
    numbers: list[float],
) -> Found:
    spec = decode(text, numbers)
    if offsets is not None:
        offsets = checked_offsets(offsets, train, False)
    count = train.shape[0] if offsets is None else offsets.shape[0] - 1
    named = dict(zip(external_names(spec), external, strict=True))
    pairs = {} if new is None else {"new/rollout": (new, rollout), "new/old": (new, train)}
    pairs = {of: pair for of, pair in pairs.items() if any(criterion.of == of for criterion in spec.criteria)}
    batch = Batch(train, rollout, mask, offsets, count, lambda x: x, mask, advantages, per_sequence, named, pairs)
    result = blocks.run_blocks(batch, spec)
    edited = result.mask
    if edited is None and writes_mask(spec, mask, offsets):
        edited = whole.inside(batch)
    return (
        train.new_empty(0) if result.weights is None else result.weights,
        train.new_empty(0) if edited is None else edited,
        result.keep,
        torch.cat([result.statistics.sums, result.statistics.maxima]),
    )


def _shapes(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    advantages: Tensor | None,
    per_sequence: bool,
    external: list[Tensor],
    new: Tensor | None,
    text: str,
    numbers: list[float],
) -> Found:
    spec = decode(text, numbers)
    kind = compute_dtype(train.dtype, rollout.dtype)
    sequences = train.shape[0] if offsets is None else offsets.shape[0] - 1
    mask_kind = torch.bool if mask is None else mask.dtype

    def like_tokens(wanted: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty(train.shape, dtype=dtype, device=train.device) if wanted else train.new_empty(0)

    return (
        like_tokens(spec.returns_weights, kind),
        like_tokens(writes_mask(spec, mask, offsets), mask_kind),
        torch.empty(sequences, dtype=torch.bool, device=train.device),
        torch.empty(sum(counts(spec)), dtype=torch.float64, device=train.device),
    )


LIBRARY.impl("correct", _kernels, "CUDA")
LIBRARY.impl("correct", _reference, "CPU")
torch.library.register_fake("rollout_corr::correct", _shapes, lib=LIBRARY)
