"""The definition on a whole batch at once: any device, no host sync, also where ranks hold parts of sequences.

There are no blocks and no compaction, because both need values. CPU tensors go through blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..definition.bounds import OPEN
from ..definition.correction import Advantages
from ..definition.findings import Operands, evaluate
from ..definition.sequences import Flattened, Packed, Rows, Sequences
from ..definition.tokens import Policies, policies, read_tokens
from ..definition.turns import Turns, turns_within
from ..definition.weights import kept_tokens
from ..metrics import aggregates, schema
from ..metrics.all_sequences import AllSequences
from ..metrics.collect import Collector, LabelCollector
from ..metrics.labels import Labeled
from ..metrics.statistics import Statistics
from ..specs.correction import Spec
from .batch import OpenBatch, Result
from .turns import sequence_offsets

if TYPE_CHECKING:
    from .split import Split


def split_turns(units: Packed | Flattened, sequences: Split, tokens: Tensor) -> tuple[Split, Packed]:
    """Turns whose tokens lie on several ranks, and which of them belong to which sequence.

    A rank that has no token of a turn cannot tell its sequence, so the ranks that have one say it.
    """
    from .split import Split

    turns = Split(units, sequences.exchange)
    names = torch.arange(sequences.count, dtype=torch.float64, device=tokens.device)
    owners = turns.max(sequences.spread(names).expand(tokens.shape))
    # A turn without a token on any rank goes with the one before it.
    owners = owners.clamp(min=0.0).cummax(0).values if owners.shape[0] else owners
    ends = torch.arange(sequences.count + 1, dtype=torch.float64, device=tokens.device)
    return turns, Packed(torch.searchsorted(owners, ends), units.count)


def inside(batch: OpenBatch) -> Tensor:
    """Bool per token: it belongs to a sequence."""
    found = inside_some(batch)
    return torch.ones(batch.train.shape, dtype=torch.bool, device=batch.train.device) if found is None else found


def inside_some(batch: OpenBatch) -> Tensor | None:
    """Bool per token: it belongs to a sequence; None: every one does, as far as that is known without waiting."""
    if batch.offsets is None:
        return None
    if batch.offsets.device.type == "cpu" and batch.train.device.type == "cpu" and not torch.compiler.is_compiling():
        before, after = batch.outside
        if not before + after:
            return None
        found = torch.ones(batch.train.shape, dtype=torch.bool, device="cpu")
        found[:before], found[found.shape[0] - after :] = False, False
        return found
    offsets = fitting(batch.offsets, batch)
    position = torch.arange(batch.train.numel(), device=offsets.device)
    return (position >= offsets[0]) & (position < offsets[-1])


def fitting(offsets: Tensor, batch: OpenBatch) -> Tensor:
    """Offsets on the device of the tokens, in int64; where they could not be read and checked they are made to fit."""
    offsets = offsets.to(batch.train.device, torch.int64)
    checked = offsets.device.type == "cpu" and not torch.compiler.is_compiling()
    return offsets if checked else offsets.clamp(0, batch.train.numel()).cummax(0).values


def sequences_of(batch: OpenBatch) -> tuple[Rows | Packed, Tensor | None]:
    """The sequences of a batch, and bool per token which are valid; None: all."""
    valid = None if batch.mask is None else batch.mask != 0
    if batch.offsets is None:
        return Rows(batch.train.shape[0]), valid
    return Packed(fitting(batch.offsets, batch), batch.train.numel()), inside(
        batch
    ) if valid is None else valid & inside(batch)


def split_sequences_of(batch: OpenBatch, group: Any) -> tuple[Split, Tensor]:
    """The sequences of a batch that holds parts of them, and bool per token which are valid.

    All ranks of the group have to exchange equally many sums, so all have a mask.
    """
    from .split import Exchange, Split

    part, valid = sequences_of(batch)
    return Split(part, Exchange(group)), inside(batch) if valid is None else valid


def turns_of(batch: OpenBatch, sequences: Rows | Packed | Split, valid: Tensor | None) -> Turns:
    """The turns of a batch; where their offsets could not be read and checked they are made to fit."""
    assert batch.turns is not None
    offsets, tokens = fitting(batch.turns, batch), torch.ones_like(batch.train, dtype=torch.bool)
    packed = Packed(offsets, batch.train.numel())
    here = packed if batch.train.dim() == 1 else Flattened(packed, batch.train.shape)
    units: Sequences = here
    if isinstance(sequences, (Rows, Packed)):
        within = turns_within(offsets, fitting(sequence_offsets(batch), batch))
    else:
        units, within = split_turns(here, sequences, tokens)
    return Turns(units, within, units.sum_integers(tokens if valid is None else valid))


def count_valid(batch: OpenBatch, sequences: Sequences, valid: Tensor | None) -> Tensor:
    """[S] int64: the valid tokens of each sequence."""
    if valid is None:
        return torch.ones_like(batch.train, dtype=torch.int64).sum(1)
    return sequences.sum_integers(valid)


def advantages_of(batch: OpenBatch, given: Tensor, sequences: Sequences) -> Advantages:
    """Advantages per token from those given, per token or per sequence."""
    if not batch.per_sequence:
        return Advantages(given.to(batch.dtype), None)
    return Advantages(sequences.spread(given).expand(batch.train.shape), given)


def policies_of(batch: OpenBatch, pairs: Mapping[str, Policies]) -> dict[str, Policies]:
    """The log-probs of every D in the dtype that computes, over the kept set."""
    dtype = batch.dtype
    mass = None if batch.mass is None else batch.mass.each(lambda log: log.to(dtype))
    others = {of: (one.to(dtype), other.to(dtype)) for of, (one, other) in pairs.items()}
    return policies((batch.train.to(dtype), batch.rollout.to(dtype)), others, mass)


def run_whole(batch: OpenBatch, spec: Spec) -> Result:
    """Correct all sequences at once."""
    return _result(batch, spec, *sequences_of(batch))


def statistics_of_labels(batch: OpenBatch, spec: Spec, labeled: tuple[Labeled, ...]) -> list[tuple[Tensor, Tensor]]:
    """Take only the sums and maxima of labels, for another backend that has done the rest."""
    found = evaluate(operands_of(batch, spec, *sequences_of(batch)))
    collector = LabelCollector(spec, labeled)
    collector.take(found)
    bounds = OPEN if found.weighing is None else found.weighing.bounds
    return collector.of_labels(AllSequences(found.facts, 0.0, spec, False, bounds))


def diagnosed(statistics: Statistics, batch: OpenBatch, spec: Spec) -> Statistics:
    """Fill in what kernels leave of the statistics of detail="full"."""
    if spec.detail != "full":
        return statistics
    sequences, valid = sequences_of(batch)
    tokens = read_tokens(*policies_of(batch, {})["train/rollout"], valid, sequences, spec)
    parts: list[Tensor] = []
    given = statistics.sums, statistics.maxima
    made = zip(given, schema.layout(spec), aggregates.DIAGNOSED, aggregates.diagnosis_of(tokens), strict=True)
    for vector, names, own, found in made:
        first = names.index(own[0])
        parts += [vector[:first], found, vector[first + found.shape[0] :]]
    return replace(statistics, vector=torch.cat(parts))


def start_split(batch: OpenBatch, spec: Spec, group: Any) -> tuple[Callable[[], bool], Callable[[], Result]]:
    """Start to correct parts of sequences, whose sums travel to the other ranks of the group.

    Everything is computed twice: before the all-reduce to record the sums that it needs, after it from the totals. The
    statistics are then those of whole sequences, and of the tokens that this rank holds. Returns as `start_correction`.
    """
    sequences, valid = split_sequences_of(batch, group)
    Collector(spec).take(evaluate(operands_of(batch, spec, sequences, valid)))
    sequences.start("correct: the sums of each sequence")

    def complete() -> Result:
        sequences.wait()
        return _result(batch, spec, sequences, valid)

    return sequences.done, complete


def operands_of(batch: OpenBatch, spec: Spec, sequences: Rows | Packed | Split, valid: Tensor | None) -> Operands:
    """All tokens of a batch as the definition takes them."""
    every = policies_of(batch, batch.pairs)
    turns = None if batch.turns is None else turns_of(batch, sequences, valid)
    read = {of: read_tokens(*two, valid, sequences, spec, turns) for of, two in every.items()}
    return Operands(
        tokens=read.pop("train/rollout"),
        n_valid=count_valid(batch, sequences, valid),
        spec=spec,
        advantages=None if batch.advantages is None else advantages_of(batch, batch.advantages, sequences),
        external=batch.external_of(spec),
        others=read,
        bounds=batch.bounds,
        groups=batch.groups.placed() if batch.groups is not None and spec.asks_groups else None,
    )


def _result(batch: OpenBatch, spec: Spec, sequences: Rows | Packed | Split, valid: Tensor | None) -> Result:
    found = evaluate(operands_of(batch, spec, sequences, valid))
    collector = Collector(spec, labeled=batch.labels)
    collector.take(found)
    mask = None
    if spec.edits_mask:
        kept = kept_tokens(found.tokens, found.decision)
        mask = kept if batch.mask is None else torch.where(kept, batch.mask, 0).to(batch.mask.dtype)
    outside = torch.zeros((), dtype=torch.int64, device=batch.train.device)
    if batch.offsets is not None and valid is not None:
        outside = (outside + batch.train.numel() if batch.mask is None else (batch.mask != 0).sum()) - valid.sum()
    statistics = collector.statistics(outside, batch.count, batch.train.numel())
    keep_turns = None if found.facts.turns is None else found.facts.turns.keep
    return Result(found.weights, mask, found.decision.keep, statistics, keep_turns)
