"""The definition under torch.compile, for CPU tensors, when asked for by name.

The functions are those of every backend, on blocks of rows, [rows, width] with their masks; the compiler fuses them
into one pass. No length is in a compile key. The first call with a Spec takes some seconds and needs a C++ compiler,
which is why `backend="auto"` never chooses this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout_corr.backends.batch import Batch
from rollout_corr.backends.blocks import new_outputs, spans, tokens_outside
from rollout_corr.backends.result import Result
from rollout_corr.definition.correction import Advantages, kept_tokens
from rollout_corr.definition.findings import CriterionFacts, SequenceFacts, evaluate
from rollout_corr.definition.sequences import Rows
from rollout_corr.definition.tokens import KeptMass, compute_dtype
from rollout_corr.metrics.collect import Collector, of_block, rows_at
from rollout_corr.metrics.rows import Aggregate
from rollout_corr.spec.correction import Spec

# Slots in a block: large enough to make the call's overhead vanish, small enough for its outputs to stay in cache.
BLOCK = 1 << 21

# By name: torch 2.11's compiler cannot follow vars().
OF_CRITERION = tuple(item.name for item in fields(CriterionFacts))
OF_SEQUENCE = tuple(item.name for item in fields(SequenceFacts) if item.name != "criteria")


class RowBlock(NamedTuple):
    """Consecutive whole sequences as rows. Every tensor is [rows, width] unless said otherwise."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    inside: Tensor | None  # bool: the slot holds a token of its sequence; None: all do
    advantages: Tensor | None
    per_sequence: Tensor | None  # [rows]
    external: dict[str, Tensor]
    mass: KeptMass | None


Outputs = tuple[Tensor | None, Tensor | None]


def _corrected(block: RowBlock, outputs: Outputs, spec: Spec, statistics: list[Aggregate]) -> tuple[Any, ...]:
    """Everything that a block contributes, as plain tensors; weights and mask go into `outputs` where there are any."""
    dtype = compute_dtype(block.train.dtype, block.rollout.dtype)
    valid = block.inside
    if block.mask is not None:
        valid = block.mask != 0 if valid is None else valid & (block.mask != 0)
    sequences = Rows(block.train.shape[0])
    every = torch.ones(block.train.shape, dtype=torch.bool, device="cpu")
    n_valid = sequences.sum_integers(every if valid is None else valid)
    advantages = None
    if block.per_sequence is not None:
        spread = block.per_sequence[:, None].expand(block.train.shape)
        advantages = Advantages(spread, block.per_sequence)
    elif block.advantages is not None:
        advantages = Advantages(block.advantages.to(dtype), None)
    train, rollout = block.train.to(dtype), block.rollout.to(dtype)
    mass = None if block.mass is None else block.mass.each(lambda log: log.to(dtype))
    found = evaluate(train, rollout, valid, sequences, n_valid, spec, advantages, block.external, mass=mass)
    sums, maxima = of_block(found, statistics)
    mask = None
    if spec.edits_mask:
        mask = kept_tokens(found.tokens, found.decision)
        if block.mask is not None:
            mask = torch.where(mask, block.mask, 0).to(block.mask.dtype)
    criteria = [[getattr(item, name) for name in OF_CRITERION] for item in found.facts.criteria]
    facts = [getattr(found.facts, name) for name in OF_SEQUENCE]
    results = [found.weights, mask]
    for i, (out, result) in enumerate(zip(outputs, results, strict=True)):
        if out is not None and result is not None:
            out.copy_(result)
            results[i] = None
    return *results, found.decision.keep, facts, criteria, sums, maxima


@lru_cache(maxsize=64)
def _compiled(spec: Spec) -> Callable[[RowBlock, Outputs], tuple[Any, ...]]:
    statistics = rows_at(spec, "tokens", "blocks")

    def corrected(block: RowBlock, outputs: Outputs) -> tuple[Any, ...]:
        return _corrected(block, outputs, spec, statistics)

    # The compiler limits recompilations per code object, and takes numbers that differed between calls of code of one
    # name for variables. A closure shares its code with those of other Specs; with code of its own under a name of its
    # own no Spec uses up another's recompilations, and its thresholds stay constants. Not dynamic=True, which would
    # make variables of them too: sizes are marked instead.
    corrected.__code__ = corrected.__code__.replace(co_name=f"corrected_{next(_SERIAL)}")
    return torch.compile(corrected, fullgraph=True)


_SERIAL = count()


def run_compiled(batch: Batch, spec: Spec) -> Result:
    """Correct block by block, through the compiled definition."""
    function = _compiled(spec)
    weights, mask = new_outputs(batch, spec)
    collector, keep = Collector(spec), []
    for rows, slots, block in _row_blocks(batch):
        n = rows.stop - rows.start
        enlarged = _at_least_two(block)
        # Rows of the batch itself are written in place by the compiled loop.
        in_place = batch.offsets is None and enlarged is block
        outputs = tuple(out[slots] if in_place and out is not None else None for out in (weights, mask))
        found = function(_lengths_vary(enlarged), _lengths_vary(outputs))
        block_weights, block_mask, block_keep, facts, criteria, sums, maxima = found
        of_criteria = [CriterionFacts(*(x[:n] for x in item)) for item in criteria]
        collector.add(SequenceFacts(of_criteria, *(x[:n] for x in facts)), sums, maxima)
        keep.append(block_keep[:n])
        for out, part in ((weights, block_weights), (mask, block_mask)):
            if out is not None and part is not None:
                _put(out[slots], part[:n], block)
    statistics = collector.statistics(
        torch.tensor(tokens_outside(batch), device="cpu"), batch.count, batch.train.numel()
    )
    return Result(weights, mask, torch.cat(keep), statistics)


def _put(out: Tensor, part: Tensor, block: RowBlock) -> None:
    """Write rows to where they belong in a block's slots."""
    part = part[:, : block.train.shape[1]]
    out.copy_(part if block.inside is None else part[block.inside])


def _row_blocks(batch: Batch) -> Iterator[tuple[slice, slice, RowBlock]]:
    """Cut a batch into (sequences, slots, rows); packed sequences are gathered into rows."""
    for members, slots in spans(batch, BLOCK, as_rows=True):
        where: slice | Tensor = slots
        inside = None
        if batch.offsets is not None:
            lengths = batch.offsets[members.start : members.stop + 1].diff()
            column = torch.arange(int(lengths.amax()) if lengths.numel() else 0, device="cpu")
            inside = column < lengths[:, None]
            where = (batch.offsets[members][:, None] + column).clamp_(max=max(batch.train.numel() - 1, 0))
        given = batch.advantages
        rows = RowBlock(
            batch.train[where],
            batch.rollout[where],
            None if batch.mask is None else batch.mask[where],
            inside,
            None if given is None or batch.per_sequence else given[where],
            None if given is None or not batch.per_sequence else given[members],
            {name: x[where] for name, x in batch.external.items()},
            None if batch.mass is None else KeptMass(batch.mass.log[where], batch.mass.from_rollout),
        )
        yield members, slots, rows


def _at_least_two(block: RowBlock) -> RowBlock:
    """Pad rows and width to at least 2: the compiler makes a variant of its own for every size of 0 or 1."""
    rows, width = block.train.shape
    more = (0, max(0, 2 - width), 0, max(0, 2 - rows))
    if more == (0, 0, 0, 0):
        return block
    inside = torch.ones(rows, width, dtype=torch.bool, device="cpu") if block.inside is None else block.inside
    return RowBlock(
        pad(block.train, more),
        pad(block.rollout, more),
        None if block.mask is None else pad(block.mask, more),
        pad(inside, more),
        None if block.advantages is None else pad(block.advantages, more),
        None if block.per_sequence is None else pad(block.per_sequence, more[2:]),
        {name: pad(x, more) for name, x in block.external.items()},
        None if block.mass is None else block.mass.each(lambda log: pad(log, more)),
    )


def _lengths_vary(tensors: Any) -> Any:
    """The tuple given, its tensors' sizes marked as varying, so that no length gets into a compile key."""
    for x in tensors:
        if isinstance(x, dict | KeptMass):
            _lengths_vary(x.values() if isinstance(x, dict) else x)
        elif isinstance(x, Tensor):
            for dim in range(x.dim()):
                torch._dynamo.mark_dynamic(x, dim)
    return tensors
