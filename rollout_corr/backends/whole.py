"""The definition on a whole batch at once: any device, no host sync, also where ranks hold parts of sequences.

There are no blocks and no compaction, because both need values. CPU tensors go through blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..definition.bounds import OPEN
from ..definition.correction import Advantages, Operands
from ..definition.findings import evaluate
from ..definition.sequences import Packed, Rows, Sequences
from ..definition.tokens import Policies, policies, read_tokens
from ..definition.weights import kept_tokens
from ..metrics import aggregates, schema
from ..metrics.all_sequences import AllSequences
from ..metrics.collect import Collector
from ..specs.correction import Spec
from ..specs.operands import CorrectResult, LossOperands
from .batch import Laid, OpenBatch, fitting, slots_outside

if TYPE_CHECKING:
    from ..definition.turns import Turns
    from .split import Split


def inside(laid: Laid) -> Tensor:
    """Bool per token: it belongs to a sequence."""
    found = inside_some(laid)
    return torch.ones(laid.first.shape, dtype=torch.bool, device=laid.first.device) if found is None else found


def inside_some(laid: Laid) -> Tensor | None:
    """Bool per token: it belongs to a sequence; None: every one does, as far as that is known without waiting."""
    first, offsets = laid.first, laid.offsets
    if offsets is None:
        return None
    if offsets.device.type == "cpu" and first.device.type == "cpu" and not torch.compiler.is_compiling():
        before, after = slots_outside(laid)
        if not before + after:
            return None
        found = torch.ones(first.shape, dtype=torch.bool, device="cpu")
        found[:before], found[found.shape[0] - after :] = False, False
        return found
    offsets = fitting(offsets, laid)
    position = torch.arange(first.numel(), device=offsets.device)
    return (position >= offsets[0]) & (position < offsets[-1])


def sequences_of(laid: Laid) -> tuple[Rows | Packed, Tensor | None]:
    """The sequences of a batch, and bool per token which are valid; None: all."""
    valid = None if laid.mask is None else laid.mask != 0
    if laid.offsets is None:
        return Rows(laid.first.shape[0]), valid
    sequences = Packed(fitting(laid.offsets, laid), laid.first.numel())
    return sequences, inside(laid) if valid is None else valid & inside(laid)


def split_sequences_of(laid: Laid, group: Any) -> tuple[Split, Tensor]:
    """The sequences of a batch that holds parts of them, and bool per token which are valid.

    All ranks of the group have to exchange equally many sums, so all have a mask.
    """
    from .split import Exchange, Split

    part, valid = sequences_of(laid)
    return Split(part, Exchange(group)), inside(laid) if valid is None else valid


def turns_in(laid: Laid, turns: Tensor | None, sequences: Rows | Packed | Split, valid: Tensor | None) -> Turns | None:
    """The turns of a batch, from their offsets; None where it has none."""
    if turns is None:
        return None
    from .turns import turns_of

    return turns_of(laid, turns, sequences, valid)


def count_valid(laid: Laid, sequences: Sequences, valid: Tensor | None) -> Tensor:
    """[S] int64: the valid tokens of each sequence."""
    if valid is None:
        return torch.ones_like(laid.first, dtype=torch.int64).sum(1)
    return sequences.sum_integers(valid)


def advantages_of(batch: OpenBatch | LossOperands, sequences: Sequences) -> Advantages | None:
    """Advantages per token from those given, per token or per sequence."""
    given = batch.advantages
    if given is None or not batch.per_sequence:
        return None if given is None else Advantages(given.to(batch.dtype), None)
    return Advantages(sequences.spread(given).expand(batch.first.shape), given)


def policies_of(batch: OpenBatch, pairs: Mapping[str, Policies]) -> dict[str, Policies]:
    """The log-probs of every D in the dtype that computes, over the kept set."""
    dtype = batch.dtype
    mass = None if batch.mass is None else batch.mass.each(lambda log: log.to(dtype))
    others = {of: (one.to(dtype), other.to(dtype)) for of, (one, other) in pairs.items()}
    return policies((batch.train.to(dtype), batch.rollout.to(dtype)), others, mass)


def run_whole(batch: OpenBatch, spec: Spec) -> CorrectResult:
    """Correct all sequences at once."""
    return _result(batch, spec, *sequences_of(batch))


def statistics_of_labels(batch: OpenBatch, spec: Spec) -> list[tuple[Tensor, Tensor]]:
    """Take only the sums and maxima of labels, for another backend that has done the rest."""
    from ..metrics.by_label import LabelCollector

    found = evaluate(operands_of(batch, spec, *sequences_of(batch)))
    collector = LabelCollector(spec, batch.labels)
    collector.take(found)
    bounds = OPEN if found.weighing is None else found.weighing.bounds
    return collector.of_labels(AllSequences(found.facts, 0.0, spec, False, bounds))


def diagnosed(vector: Tensor, batch: OpenBatch, spec: Spec) -> Tensor:
    """Fill in what kernels leave of the statistics of detail="full"."""
    if spec.detail != "full":
        return vector
    sequences, valid = sequences_of(batch)
    tokens = read_tokens(*policies_of(batch, {})["train/rollout"], valid, sequences, spec)
    parts: list[Tensor] = []
    layout = schema.layout(spec)
    given = vector.split([len(names) for names in layout])
    made = zip(given, layout, aggregates.DIAGNOSED, aggregates.diagnosis_of(tokens), strict=True)
    for side, names, own, found in made:
        first = names.index(own[0])
        parts += [side[:first], found, side[first + found.shape[0] :]]
    return torch.cat(parts)


def start_split(batch: OpenBatch, spec: Spec, group: Any) -> tuple[Callable[[], bool], Callable[[], CorrectResult]]:
    """Start to correct parts of sequences, whose sums travel to the other ranks of the group.

    Everything is computed twice: before the all-reduce to record the sums that it needs, after it from the totals. The
    statistics are then those of whole sequences, and of the tokens that this rank holds. Returns as `start_correction`.
    """
    sequences, valid = split_sequences_of(batch, group)
    Collector(spec).take(evaluate(operands_of(batch, spec, sequences, valid)))
    sequences.start("correct: the sums of each sequence")

    def complete() -> CorrectResult:
        sequences.wait()
        return _result(batch, spec, sequences, valid)

    return sequences.done, complete


def operands_of(batch: OpenBatch, spec: Spec, sequences: Rows | Packed | Split, valid: Tensor | None) -> Operands:
    """All tokens of a batch as the definition takes them."""
    every = policies_of(batch, batch.pairs(spec))
    turns = turns_in(batch, batch.turns, sequences, valid)
    read = {of: read_tokens(*two, valid, sequences, spec, turns) for of, two in every.items()}
    return Operands(
        tokens=read.pop("train/rollout"),
        n_valid=count_valid(batch, sequences, valid),
        spec=spec,
        advantages=advantages_of(batch, sequences),
        external=batch.external_of(spec),
        others=read,
        bounds=batch.bounds,
        groups=batch.groups.placed() if batch.groups is not None and spec.asks_groups else None,
    )


def _result(batch: OpenBatch, spec: Spec, sequences: Rows | Packed | Split, valid: Tensor | None) -> CorrectResult:
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
    statistics = collector.vector(outside, batch.count, batch.train.numel())
    keep_turns = None if found.facts.turns is None else found.facts.turns.keep
    return CorrectResult(found.weights, mask, found.decision.keep, statistics, keep_turns)
