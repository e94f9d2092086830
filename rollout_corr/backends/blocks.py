"""Running the definition over a batch: in blocks of whole sequences on the CPU, as one piece elsewhere.

A block is small enough for its temporaries to stay in cache. Its valid tokens are compacted first, so that padding
and prompts cost one look at the mask. The statistics of the blocks merge, so there is no second definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout_corr.backends.batch import Batch
from rollout_corr.backends.compaction import Compaction
from rollout_corr.definition import correction
from rollout_corr.definition import statistics as measures
from rollout_corr.definition.correction import Advantages, Decision
from rollout_corr.definition.sequences import Packed, Rows, Sequences
from rollout_corr.definition.statistics import SequenceFacts
from rollout_corr.definition.tokens import Tokens, read_tokens
from rollout_corr.metrics import peers
from rollout_corr.metrics.statistics import Statistics, assemble
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.backends.split import Split

# Slots in a block with weights; without them it has fewer temporaries, and twice the slots. Chosen by measurement on
# one core with 1 MiB of second-level cache: `make bench ARGS=--blocks`, and beside verl, whose calls make the heap give
# its pages back: larger blocks with weights were faster only where it keeps them.
BLOCK = 262_144

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass
class Answer:
    """One block's results, before batch normalisation."""

    tokens: Tokens
    decision: Decision
    weights: Tensor | None
    facts: SequenceFacts
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def answer(
    train: Tensor,
    rollout: Tensor,
    valid: Tensor | None,
    sequences: Sequences,
    n_valid: Tensor,
    spec: Spec,
    advantages: Advantages | None,
    external: dict[str, Tensor],
    look: bool = False,
    pairs: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Answer:
    """The definition from end to end, for some whole sequences; `pairs` are further log-probs by `Criterion.of`."""
    tokens = read_tokens(train, rollout, valid, sequences, spec, look)
    n_measured = n_valid
    if tokens.nonfinite is not None and spec.nonfinite == "reject":
        n_measured = n_valid - tokens.nonfinite
    others = {of: read_tokens(one, other, valid, sequences, spec, look) for of, (one, other) in (pairs or {}).items()}
    decision = correction.decide(tokens, n_measured, spec, advantages, external, others)
    weighing = correction.weigh(tokens, decision, spec)
    weights = correction.weights_of(tokens, decision, weighing, spec)
    beyond = measures.few_beyond(tokens, weighing, spec)
    facts = measures.sequence_facts(tokens, n_valid, n_measured, decision, weighing, spec, beyond)
    sums, maxima = measures.token_statistics(tokens, n_measured, decision, weighing, spec, beyond)
    if len(spec.report) > 1:
        block = measures.Block(tokens, n_valid, n_measured, decision, weighing, facts)
        more_sums, more_maxima = peers.collect(block, spec)
        sums.update(more_sums)
        maxima.update(more_maxima)
    return Answer(tokens, decision, weights, facts, sums, maxima)


@dataclass
class Collected:
    """Statistics of the blocks so far."""

    facts: list[SequenceFacts] = field(default_factory=list)
    names: tuple[list[str], list[str]] = ([], [])
    sums: list[Tensor] = field(default_factory=list)
    maxima: list[Tensor] = field(default_factory=list)
    histograms: list[Tensor] = field(default_factory=list)

    def add(self, facts: SequenceFacts, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        self.facts.append(facts)
        if "histogram" in sums:
            self.histograms.append(sums.pop("histogram"))
        self.names = list(sums), list(maxima)
        self.sums.append(torch.stack([value.double() for value in sums.values()]))
        self.maxima.append(torch.stack([value.double() for value in maxima.values()]))

    def statistics(self, outside_tokens: Tensor, batch: Batch, spec: Spec) -> Statistics:
        sums = dict(zip(self.names[0], torch.stack(self.sums).sum(0).unbind(), strict=True))
        maxima = dict(zip(self.names[1], torch.stack(self.maxima).amax(0).unbind(), strict=True))
        if self.histograms:
            sums["histogram"] = torch.stack(self.histograms).sum(0)
        more = measures.sequence_statistics(measures.concatenate(self.facts), outside_tokens, spec)
        sums, maxima = sums | more[0], maxima | more[1]
        if len(spec.report) > 1:
            sizes = {"rows": batch.count, "slots": batch.train.numel()}
            counts = {name: torch.full((), size, device=outside_tokens.device) for name, size in sizes.items()}
            more = peers.per_call(sums | counts, maxima, spec)
            sums, maxima = sums | more[0], maxima | more[1]
        return assemble(spec, sums, maxima)


@dataclass
class Result:
    """What a backend gives back, in the batch's own shape."""

    weights: Tensor | None
    mask: Tensor | None  # None: the mask given
    keep: Tensor
    statistics: Statistics


def edits_mask(spec: Spec) -> bool:
    """Whether the mask handed back can differ from the one given."""
    rejects = len(spec.criteria) > 0 or (spec.weight is not None and spec.nonfinite == "reject")
    return spec.apply and spec.rejected != "zero" and rejects


def inside(batch: Batch) -> Tensor:
    """Bool per token: whether it belongs to a sequence."""
    if batch.offsets is None:
        return torch.ones(batch.train.shape, dtype=torch.bool, device=batch.train.device)
    offsets = whole_offsets(batch)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        found = torch.zeros(batch.train.shape, dtype=torch.bool)
        found[int(offsets[0]) : int(offsets[-1])] = True
        return found
    position = torch.arange(batch.train.numel(), device=offsets.device)
    return (position >= offsets[0]) & (position < offsets[-1])


def whole_offsets(batch: Batch) -> Tensor:
    """The offsets of a packed batch beside its tokens; on a device nobody has read them, so they are made to fit."""
    offsets = torch.zeros(1) if batch.offsets is None else batch.offsets
    offsets = offsets.to(batch.train.device, torch.int64)
    return offsets if offsets.device.type == "cpu" else offsets.clamp(0, batch.train.numel()).cummax(0).values


def whole(batch: Batch) -> tuple[Rows | Packed, Tensor | None]:
    """The sequences of a batch as one piece, and which tokens of it are valid."""
    valid = None if batch.mask is None else batch.mask != 0
    if batch.offsets is None:
        return Rows(batch.train.shape[0]), valid
    return Packed(whole_offsets(batch), batch.train.numel()), inside(batch) if valid is None else valid & inside(batch)


def split(batch: Batch, group: Any) -> tuple[Split, Tensor]:
    """The same of a batch that holds parts of sequences. All ranks have to ask the same, so there is always a mask."""
    from rollout_corr.backends.split import Split

    part, valid = whole(batch)
    return Split(part, group), inside(batch) if valid is None else valid


def count_valid(batch: Batch, sequences: Sequences, valid: Tensor | None) -> Tensor:
    """[S] int64: how many tokens of each sequence are valid."""
    return _ones(batch.train).sum(1) if valid is None else sequences.sum_integers(valid)


def whole_advantages(batch: Batch, given: Tensor, sequences: Sequences) -> Advantages:
    """The advantages of a batch as one piece."""
    if not batch.per_sequence:
        return Advantages(given.to(batch.dtype), None)
    return Advantages(sequences.spread(given).expand(batch.train.shape), given)


def run_whole(batch: Batch, spec: Spec) -> Result:
    """All sequences at once, without compaction: no host sync, on any device."""
    return _result(batch, spec, *whole(batch))


class Started:
    """The same where sequences lie on several ranks: what this rank's tokens give is on its way to the others."""

    def __init__(self, batch: Batch, spec: Spec, group: Any) -> None:
        self._batch, self._spec = batch, spec
        self._sequences, self._valid = split(batch, group)
        _answer_of_whole(batch, spec, self._sequences, self._valid)
        self._sequences.start()

    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._sequences.done()

    def finish(self) -> Result:
        """Wait for the others. Statistics are of whole sequences, and of the tokens that lie here."""
        self._sequences.wait()
        return _result(self._batch, self._spec, self._sequences, self._valid)


def _answer_of_whole(batch: Batch, spec: Spec, sequences: Sequences, valid: Tensor | None) -> Answer:
    """The answer for a batch as one piece."""
    dtype = batch.dtype
    n_valid = count_valid(batch, sequences, valid)
    advantages = None
    if batch.advantages is not None:
        advantages = whole_advantages(batch, batch.advantages, sequences)
    pairs = {of: (one.to(dtype), other.to(dtype)) for of, (one, other) in batch.pairs.items()}
    train, rollout = batch.train.to(dtype), batch.rollout.to(dtype)
    return answer(train, rollout, valid, sequences, n_valid, spec, advantages, batch.external, pairs=pairs)


def _result(batch: Batch, spec: Spec, sequences: Sequences, valid: Tensor | None) -> Result:
    found = _answer_of_whole(batch, spec, sequences, valid)
    collected = Collected()
    collected.add(found.facts, found.sums, found.maxima)
    mask = None
    if edits_mask(spec):
        kept = correction.kept_tokens(found.tokens, found.decision)
        mask = kept if batch.mask is None else torch.where(kept, batch.mask, 0).to(batch.mask.dtype)
    outside = torch.zeros((), dtype=torch.int64, device=batch.train.device)
    if batch.offsets is not None and valid is not None:
        outside = (outside + batch.train.numel() if batch.mask is None else (batch.mask != 0).sum()) - valid.sum()
    return Result(found.weights, mask, found.decision.keep, collected.statistics(outside, batch, spec))


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.int64, device=x.device)


def new_outputs(batch: Batch, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """Room for the weights and the mask of a batch on the CPU; None for what the Spec does not hand back."""
    weights = mask = None
    if spec.apply and (spec.weight is not None or spec.rejected != "mask"):
        weights = room(batch, batch.dtype)
    if edits_mask(spec):
        mask = room(batch, torch.bool if batch.mask is None else batch.mask.dtype)
    return weights, mask


def room(batch: Batch, dtype: torch.dtype) -> Tensor:
    """A tensor of the batch's shape for blocks to write all of their slots; what lies in no sequence is 0 already."""
    out = torch.empty(batch.train.shape, dtype=dtype)
    if batch.offsets is not None:
        out[: batch.offsets[0]] = 0
        out[batch.offsets[-1] :] = 0
    return out


def run_blocks(batch: Batch, spec: Spec) -> Result:
    """Block by block, with compaction. CPU tensors only: how many tokens are valid decides the shapes."""
    weights, mask = new_outputs(batch, spec)
    collected, keep = Collected(), []
    for piece in pieces(batch, BLOCK if spec.weight is not None else 2 * BLOCK):
        keep.append(_one_block(piece, spec, collected, weights, mask))
    return Result(weights, mask, torch.cat(keep), collected.statistics(tokens_outside(batch), batch, spec))


def tokens_outside(batch: Batch) -> Tensor:
    """0-d: valid tokens before the first and after the last sequence of a packed batch on the CPU."""
    if batch.offsets is None:
        return torch.zeros((), dtype=torch.int64)
    before, after = int(batch.offsets[0]), batch.train.numel() - int(batch.offsets[-1])
    if batch.mask is None:
        return torch.tensor(before + after)
    return torch.count_nonzero(batch.mask[:before]) + torch.count_nonzero(batch.mask[batch.train.numel() - after :])


def _blocks(batch: Batch, size: int) -> Iterator[tuple[slice, slice]]:
    """(sequences, slots) of each block of so many slots; at least one block, even without sequences."""
    if batch.offsets is None:
        rows, width = batch.train.shape
        step = max(1, size // max(1, width))
        for i in range(0, max(1, rows), step):
            part = slice(i, min(rows, i + step))
            yield part, part
        return
    offsets = batch.offsets.tolist()
    first, count = 0, len(offsets) - 1
    while first == 0 or first < count:
        last = min(first + 1, count)
        while last < count and offsets[last + 1] - offsets[first] <= size:
            last += 1
        yield slice(first, last), slice(offsets[first], offsets[last])
        first = max(last, 1)


@dataclass
class Piece:
    """The valid tokens of one block."""

    batch: Batch
    slots: slice
    rows: slice
    compaction: Compaction
    sequences: Packed
    n_valid: Tensor  # [S] int64

    def take(self, x: Tensor) -> Tensor:
        """The valid tokens of a tensor of the batch's shape."""
        return self.compaction.take(x[self.slots])

    def advantages(self, given: Tensor) -> Advantages:
        """The advantages of its tokens in the dtype that computes."""
        if not self.batch.per_sequence:
            return Advantages(self.take(given).to(self.batch.dtype), None)
        per_sequence = given[self.rows]
        return Advantages(self.sequences.spread(per_sequence), per_sequence)


def pieces(batch: Batch, size: int) -> Iterator[Piece]:
    """A batch on the CPU, in blocks of about `size` slots."""
    for rows, slots in _blocks(batch, size):
        shape = batch.train[slots].shape
        if batch.offsets is None:
            lengths = torch.full((shape[0],), shape[1], dtype=torch.int64)
            starts = torch.arange(shape[0]) * shape[1]
        else:
            offsets = batch.offsets[rows.start : rows.stop + 1] - slots.start
            starts, lengths = offsets[:-1], offsets.diff()
        valid, n_valid = None, lengths
        if batch.mask is not None:
            valid = batch.mask[slots].bool()
            if batch.offsets is None:
                # As int64 the mask would be copied first, eight times as large; a row has less than 2^31 slots.
                n_valid = valid.sum(1, dtype=torch.int32).long()
            else:
                n_valid = Packed(offsets, valid.shape[0]).sum_integers(valid)
            valid = valid.reshape(-1)
        compaction = Compaction(valid, starts, lengths, n_valid)
        del valid  # Not for as long as the block takes.
        yield Piece(batch, slots, rows, compaction, Packed.of_lengths(n_valid, compaction.total), n_valid)


def _one_block(piece: Piece, spec: Spec, collected: Collected, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """Correct one block: add its statistics, write its weights and mask, give back its verdicts."""
    batch, slots, compaction = piece.batch, piece.slots, piece.compaction
    train, rollout = (piece.take(x).to(batch.dtype) for x in (batch.train, batch.rollout))
    advantages = None if batch.advantages is None else piece.advantages(batch.advantages)
    external = {name: piece.take(x) for name, x in batch.external.items()}
    pairs = {of: (piece.take(a).to(batch.dtype), piece.take(b).to(batch.dtype)) for of, (a, b) in batch.pairs.items()}
    found = answer(train, rollout, None, piece.sequences, piece.n_valid, spec, advantages, external, True, pairs)
    collected.add(found.facts, found.sums, found.maxima)
    if weights is not None and found.weights is not None:
        compaction.put(weights[slots], found.weights)
    if mask is not None:
        given = None if batch.mask is None else batch.mask[slots]
        _put_mask(mask[slots], given, batch.offsets is None, compaction, found)
    return found.decision.keep


def _put_mask(out: Tensor, given: Tensor | None, padded: bool, compaction: Compaction, found: Answer) -> None:
    """The mask given, with 0 at rejected tokens."""
    if given is not None and padded and found.decision.dropped is None and given.dtype in INTEGERS:
        # One pass, in a third of the time of a copy that is then filled: -1 has all bits, 0 none.
        torch.bitwise_and(given, -found.decision.keep.to(given.dtype)[:, None], out=out)
        return
    lost = (~found.decision.keep).nonzero().squeeze(1)
    if found.decision.dropped is None and (padded or lost.numel() == 0):
        if given is None:
            out.fill_(True)
        else:
            out.copy_(given)
        out.index_fill_(0, lost, 0)
        return
    kept = correction.kept_tokens(found.tokens, found.decision)
    compaction.put(out, torch.where(kept, 1 if given is None else compaction.take(given), 0).to(out.dtype))
