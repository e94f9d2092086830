"""The definition on CPU tensors, in blocks of whole sequences.

A block is small enough for its temporaries to stay in cache. Its valid tokens are compacted first, so that padding
and prompts cost one pass over the mask. The statistics of the blocks merge, so there is no second definition.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..definition.bounds import OPEN, WeightBounds, bounds_in_numbers, with_found
from ..definition.correction import Advantages, Operands
from ..definition.findings import Findings, evaluate
from ..definition.sequences import Packed
from ..definition.tokens import KeptMass, policies
from ..definition.weights import kept_tokens
from ..metrics.collect import Collector
from ..specs.correction import Spec
from ..specs.operands import CorrectResult, LossOperands
from .batch import Laid, OpenBatch, slots_outside
from .cpu_sums import Known, read_tokens, take

if TYPE_CHECKING:
    from .turns import BlockOfTurns

# Slots in a block with weights; without them it has fewer temporaries, and twice the slots. Of 16k to 1M slots measured
# the fastest on one core with 1 MiB of second-level cache, alone and alternating with verl, whose calls make the heap
# return its pages: larger blocks with weights were faster only where the heap keeps them.
BLOCK = 262_144

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(eq=False, repr=False)
class Block:
    """Consecutive whole sequences of a batch, and their valid tokens."""

    batch: OpenBatch | LossOperands
    slots: slice  # of a packed batch its tokens, of a padded one its rows
    rows: slice  # its sequences
    index: Tensor | None  # [total] int64, where its valid tokens are in it; None when all are valid
    sequences: Packed
    n_valid: Tensor  # [S] int64
    turns: BlockOfTurns | None

    def take(self, x: Tensor) -> Tensor:
        """The valid tokens of a tensor of the batch's shape, [total]; a view when all are valid."""
        part = self.part(x)
        flat = part if part.dim() == 1 else part.reshape(-1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [total] values to its valid tokens in a contiguous tensor of the batch's shape, and 0 at its others."""
        flat = self.part(out).view(-1)
        if self.index is None:
            flat.copy_(values)
        else:
            flat.zero_().scatter_(0, self.index, values)

    def part(self, x: Tensor) -> Tensor:
        """The slots of a tensor of the batch's shape; the tensor itself where the block is the batch."""
        whole = self.slots.start == 0 and self.slots.stop == x.shape[0]
        return x if whole else x[self.slots]

    def mass(self, given: KeptMass | None) -> KeptMass | None:
        """The kept mass of its valid tokens, in the dtype that computes."""
        return None if given is None else given.each(lambda log: self.take(log).to(self.batch.dtype))

    def advantages(self) -> Advantages | None:
        """The advantages of its valid tokens, in the dtype that computes."""
        given = self.batch.advantages
        if given is None:
            return None
        if not self.batch.per_sequence:
            return Advantages(self.take(given).to(self.batch.dtype), None)
        per_sequence = given[self.rows]
        return Advantages(self.sequences.spread(per_sequence), per_sequence)


def spans(laid: Laid, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut a batch into (sequences, slots) of at most `size` slots, or one sequence; one span even without sequences."""
    if laid.offsets is None:
        rows, width = laid.first.shape
        step = max(1, size // max(1, width))
        for i in range(0, max(1, rows), step):
            part = slice(i, min(rows, i + step))
            yield part, part
        return
    offsets = laid.offsets.tolist()
    first, count = 0, len(offsets) - 1
    while first == 0 or first < count:
        last = min(count, max(first + 1, bisect_right(offsets, offsets[first] + size) - 1))
        yield slice(first, last), slice(offsets[first], offsets[last])
        first = max(last, 1)


def blocks_of(batch: OpenBatch | LossOperands, size: int) -> Iterator[Block]:
    """Cut a batch on the CPU into blocks of about `size` slots."""
    for rows, slots in spans(batch, size):
        shape = (slots.stop - slots.start, *batch.first.shape[1:])
        slots_here = math.prod(shape)
        if batch.offsets is None:
            lengths = torch.full((shape[0],), shape[1], dtype=torch.int64, device="cpu")
            starts = torch.arange(shape[0], device="cpu").mul_(shape[1])
        else:
            offsets = batch.offsets
            if rows.stop - rows.start < batch.count:
                offsets = offsets[rows.start : rows.stop + 1]
            offsets = offsets - slots.start if slots.start else offsets
            lengths = offsets.diff()
            starts = offsets[:-1] if batch.mask is not None or batch.turns is not None else offsets
        index, n_valid, total, valid = None, lengths, slots_here, None
        packed = None if batch.offsets is None else Packed(offsets, slots_here, lengths)
        if batch.mask is not None:
            valid = batch.mask[slots].bool()
            # As int64 the mask would be copied first, eight times as large; a row has less than 2^31 slots.
            n_valid = valid.sum(1, dtype=torch.int32).long() if packed is None else packed.sum_integers(valid)
            total, valid = int(n_valid.sum()), valid.reshape(-1)
        whole = Packed.of_lengths(n_valid, total) if packed is None or valid is not None else packed
        if valid is not None and total < slots_here:
            index = valid.nonzero().squeeze(1)
        turns = None
        if batch.turns is not None:
            from .turns import block_of_turns

            turns = block_of_turns(batch, batch.turns, slots, starts, valid, total)
        valid = None  # Not for as long as the block takes.
        yield Block(batch, slots, rows, index, whole, n_valid, turns)


def slots_of(batch: OpenBatch, spec: Spec, outside: tuple[int, int]) -> int:
    """The slots of a block for a Spec."""
    return slots_with_outputs(batch, outside, batch.weights_out is None) if spec.weight is not None else 2 * BLOCK


def slots_with_outputs(laid: Laid, outside: tuple[int, int], adopts: bool = True) -> int:
    """The slots of a block where weights or gradients are written.

    A batch up to an eighth larger stays one block whose results are those of the batch, if these may be `adopts`: a
    small second block would double the number of operations, and need room for results of the whole batch.
    """
    size = laid.first.numel()
    larger = BLOCK < size <= BLOCK + BLOCK // 8 and adopts
    return size if larger and is_one_block(laid, size, outside) else BLOCK


def is_one_block(laid: Laid, size: int, outside: tuple[int, int]) -> bool:
    """True if a packed batch, all of its tokens valid, is one block, whose results are those of the batch."""
    packed = laid.mask is None and laid.offsets is not None
    return packed and outside == (0, 0) and 0 < laid.first.numel() <= size


# --- outputs ---


def new_output(laid: Laid, outside: tuple[int, int], dtype: torch.dtype, given: Tensor | None = None) -> Tensor:
    """Make a tensor of the batch's shape, or take the caller's; 0 at slots in no sequence, blocks write the rest."""
    out = torch.empty(laid.first.shape, dtype=dtype, device="cpu") if given is None else given
    before, after = outside
    if before + after:
        out[:before] = 0
        out[out.shape[0] - after :] = 0
    return out


def tokens_outside(laid: Laid, outside: tuple[int, int]) -> int:
    """Count the valid tokens before the first and after the last sequence of a packed batch on the CPU."""
    before, after = outside
    if laid.mask is None or not before + after:
        return before + after
    parts = laid.mask[:before], laid.mask[laid.first.numel() - after :]
    return sum(int(torch.count_nonzero(part)) for part in parts)


# --- running ---


def run_blocks(batch: OpenBatch, spec: Spec) -> CorrectResult:
    """Correct block by block, with compaction. CPU tensors only: how many tokens are valid decides the shapes."""
    assert batch.bounds is not None or not spec.asks_batch, "a block is not the batch"
    outside, weights, mask = slots_outside(batch), None, None
    size = slots_of(batch, spec, outside)
    adopts = is_one_block(batch, size, outside) and batch.weights_out is None
    if spec.returns_weights and not adopts:
        weights = new_output(batch, outside, batch.dtype, batch.weights_out)
    if spec.edits_mask:
        kind = torch.bool if batch.mask is None else batch.mask.dtype
        mask = new_output(batch, outside, kind, batch.mask_out)
    collector, keep = Collector(spec, True, batch.labels), []
    keep_turns = None if batch.turns is None else torch.ones(batch.turns.shape[0] - 1, dtype=torch.bool, device="cpu")
    for block in blocks_of(batch, size):
        found = _run_block(block, batch, spec, collector, weights, mask)
        keep.append(found.decision.keep)
        if keep_turns is not None and block.turns is not None and found.facts.turns is not None:
            keep_turns[block.turns.which] = found.facts.turns.keep
        weights = found.weights if adopts else weights
    statistics = collector.vector(tokens_outside(batch, outside), batch.count, batch.train.numel())
    keeps = torch.cat(keep) if keep[1:] else keep[0]
    return CorrectResult(weights, mask, keeps, statistics, keep_turns)


def _run_block(
    block: Block, batch: OpenBatch, spec: Spec, collector: Collector, weights: Tensor | None, mask: Tensor | None
) -> Findings:
    """Correct one block: add its statistics, write its weights and mask."""
    operands, known = operands_of(block, batch, spec)
    found = evaluate(operands)
    collector.take(found, block.take, known)
    # Statistics need these no more, and what follows has temporaries of its own.
    found.weighing = None
    found.tokens.derived.clear()
    if weights is not None and found.weights is not None:
        block.put(weights, found.weights)
    if mask is not None:
        _put_mask(mask, block, found)
    return found


def operands_of(block: Block, batch: OpenBatch, spec: Spec) -> tuple[Operands, Known]:
    """The valid tokens of a block as the definition takes them, and the statistics that are known of them."""

    def logp(x: Tensor) -> Tensor:
        return block.take(x).to(batch.dtype)

    pairs = {of: (logp(one), logp(other)) for of, (one, other) in batch.pairs(spec).items()}
    every = policies((logp(batch.train), logp(batch.rollout)), pairs, block.mass(batch.mass))
    turns = None if block.turns is None else block.turns.turns
    others = {of: read_tokens(*two, block.sequences, spec, turns) for of, two in every.items()}
    tokens = others.pop("train/rollout")
    known = take(tokens, block.n_valid, spec, bounds_of(spec, batch))
    given = Operands(
        tokens=tokens,
        n_valid=block.n_valid,
        spec=spec,
        advantages=block.advantages(),
        external={name: block.take(x) for name, x in batch.external_of(spec).items()},
        others=others,
        bounds=batch.bounds,
        groups=batch.groups.placed()[block.rows] if batch.groups is not None and spec.asks_groups else None,
    )
    return given, known


def bounds_of(spec: Spec, batch: OpenBatch) -> WeightBounds:
    """The bounds of the weight of a Spec, as numbers."""
    weight = spec.weight
    if weight is None:
        return OPEN
    if batch.bounds is None or not weight.rules:
        return bounds_in_numbers(weight.low, weight.high)
    return with_found(weight, *batch.bounds.of_weight(weight, batch.train, None))


def _put_mask(mask: Tensor, block: Block, found: Findings) -> None:
    """Write the mask given, with 0 at rejected tokens."""
    all_given, padded, out = block.batch.mask, block.batch.offsets is None, block.part(mask)
    given = None if all_given is None else block.part(all_given)
    by_sequence = found.decision.dropped is None and found.decision.keep_turns is None
    if given is not None and padded and by_sequence and given.dtype in INTEGERS:
        # One pass, in a third of the time of a copy that is then filled: -1 has all bits, 0 none.
        torch.bitwise_and(given, -found.decision.keep.to(given.dtype)[:, None], out=out)
        return
    lost = (~found.decision.keep).nonzero().squeeze(1)
    if by_sequence and (padded or lost.numel() == 0):
        if given is None:
            out.fill_(True)
        else:
            out.copy_(given)
        out.index_fill_(0, lost, 0)
        return
    kept = kept_tokens(found.tokens, found.decision)
    if all_given is not None:
        kept = torch.where(kept, block.take(all_given), 0).to(out.dtype)
    block.put(mask, kept)
