"""The definition under torch.compile, for CPU tensors, when asked for by name.

The same functions as everywhere, on [rows, width] pieces of the batch with their masks, fused into one pass by the
compiler. No length is in a compile key. The first call with a Spec takes some seconds and needs a C++ compiler, which
is why `backend="auto"` never chooses this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout_corr.backends.batch import Batch
from rollout_corr.backends.blocks import Collected, Result, answer, edits_mask, new_outputs, tokens_outside
from rollout_corr.definition import correction
from rollout_corr.definition.correction import Advantages
from rollout_corr.definition.sequences import Rows
from rollout_corr.definition.statistics import CriterionFacts, SequenceFacts
from rollout_corr.spec.correction import Spec

# Slots in a piece: large enough to make the call's overhead vanish, small enough for its outputs to stay in cache.
PIECE = 1 << 21


# By name: torch 2.11's compiler cannot follow vars().
OF_CRITERION = tuple(item.name for item in fields(CriterionFacts))
OF_SEQUENCE = tuple(item.name for item in fields(SequenceFacts) if item.name != "criteria")


class Piece(NamedTuple):
    """Some whole sequences as rows. Every tensor is [rows, width] unless said otherwise."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    inside: Tensor | None  # which slots are tokens at all; None: all
    advantages: Tensor | None
    per_sequence: Tensor | None  # [rows]
    external: dict[str, Tensor]


Outputs = tuple[Tensor | None, Tensor | None]


def _corrected(piece: Piece, outputs: Outputs, spec: Spec) -> tuple[Any, ...]:
    """Everything a piece contributes, as plain tensors; weights and mask go into `outputs` where there are any."""
    dtype = torch.promote_types(torch.promote_types(piece.train.dtype, piece.rollout.dtype), torch.float32)
    valid = piece.inside
    if piece.mask is not None:
        valid = piece.mask != 0 if valid is None else valid & (piece.mask != 0)
    sequences = Rows(piece.train.shape[0])
    every = torch.ones(piece.train.shape, dtype=torch.bool)
    n_valid = sequences.sum_integers(every if valid is None else valid)
    advantages = None
    if piece.per_sequence is not None:
        spread = piece.per_sequence[:, None].expand(piece.train.shape)
        advantages = Advantages(spread, piece.per_sequence)
    elif piece.advantages is not None:
        advantages = Advantages(piece.advantages.to(dtype), None)
    train, rollout = piece.train.to(dtype), piece.rollout.to(dtype)
    found = answer(train, rollout, valid, sequences, n_valid, spec, advantages, piece.external)
    mask = None
    if edits_mask(spec):
        mask = correction.kept_tokens(found.tokens, found.decision)
        if piece.mask is not None:
            mask = torch.where(mask, piece.mask, 0).to(piece.mask.dtype)
    criteria = [[getattr(item, name) for name in OF_CRITERION] for item in found.facts.criteria]
    facts = [getattr(found.facts, name) for name in OF_SEQUENCE]
    results = [found.weights, mask]
    for i, (out, result) in enumerate(zip(outputs, results, strict=True)):
        if out is not None and result is not None:
            out.copy_(result)
            results[i] = None
    return *results, found.decision.keep, facts, criteria, found.sums, found.maxima


@lru_cache(maxsize=64)
def _compiled(spec: Spec) -> Callable[[Piece, Outputs], tuple[Any, ...]]:
    def corrected(piece: Piece, outputs: Outputs) -> tuple[Any, ...]:
        return _corrected(piece, outputs, spec)

    # The compiler counts recompilations per code object and remembers by name which numbers varied; every Spec gets
    # code of its own, so that its numbers stay constants. Not dynamic=True, for the same reason: sizes are marked.
    code = corrected.__code__.replace(co_name=f"corrected_{next(_SERIAL)}")
    return torch.compile(FunctionType(code, globals(), None, None, corrected.__closure__), fullgraph=True)


_SERIAL = count()


def run_compiled(batch: Batch, spec: Spec) -> Result:
    """Piece by piece through the compiled definition."""
    function = _compiled(spec)
    weights, mask = new_outputs(batch, spec)
    collected, keep = Collected(), []
    for rows, slots, piece in _pieces(batch):
        n = rows.stop - rows.start
        enlarged = _at_least_two(piece)
        # Rows of the batch itself are written in place by the compiled loop.
        in_place = batch.offsets is None and enlarged is piece
        outputs = tuple(out[slots] if in_place and out is not None else None for out in (weights, mask))
        found = function(_lengths_vary(enlarged), _lengths_vary(outputs))
        piece_weights, piece_mask, piece_keep, facts, criteria, sums, maxima = found
        of_criteria = [CriterionFacts(*(x[:n] for x in item)) for item in criteria]
        of_sequences = SequenceFacts(of_criteria, *(x[:n] for x in facts))
        collected.add(of_sequences, sums, maxima)
        keep.append(piece_keep[:n])
        for out, part in ((weights, piece_weights), (mask, piece_mask)):
            if out is not None and part is not None:
                _put(out[slots], part[:n], piece)
    return Result(weights, mask, torch.cat(keep), collected.statistics(tokens_outside(batch), batch, spec))


def _put(out: Tensor, part: Tensor, piece: Piece) -> None:
    part = part[:, : piece.train.shape[1]]
    out.copy_(part if piece.inside is None else part[piece.inside])


def _pieces(batch: Batch) -> Iterator[tuple[slice, slice, Piece]]:
    """(sequences, slots, piece), whole sequences each; packed sequences are gathered into rows."""
    given = batch.advantages if batch.per_sequence else None
    per_token = None if batch.per_sequence else batch.advantages
    if batch.offsets is None:
        rows, width = batch.train.shape
        step = max(1, PIECE // max(1, width))
        for i in range(0, max(1, rows), step):
            part = slice(i, min(rows, i + step))
            yield (
                part,
                part,
                Piece(
                    batch.train[part],
                    batch.rollout[part],
                    None if batch.mask is None else batch.mask[part],
                    None,
                    None if per_token is None else per_token[part],
                    None if given is None else given[part],
                    {name: x[part] for name, x in batch.external.items()},
                ),
            )
        return
    offsets = batch.offsets.tolist()
    first, end = 0, len(offsets) - 1
    while first == 0 or first < end:
        last = min(first + 1, end)
        width = max([offsets[i + 1] - offsets[i] for i in range(first, last)], default=0)
        while last < end and max(width, offsets[last + 1] - offsets[last]) * (last + 1 - first) <= PIECE:
            width = max(width, offsets[last + 1] - offsets[last])
            last += 1
        members, slots = slice(first, last), slice(offsets[first], offsets[last])
        lengths = batch.offsets[first : last + 1].diff()
        column = torch.arange(width)
        inside = column < lengths[:, None]
        position = (batch.offsets[members][:, None] + column).clamp_(max=max(batch.train.numel() - 1, 0))
        mask = None if batch.mask is None else batch.mask[position]
        yield (
            members,
            slots,
            Piece(
                batch.train[position],
                batch.rollout[position],
                mask,
                inside,
                None if per_token is None else per_token[position],
                None if given is None else given[members],
                {name: x[position] for name, x in batch.external.items()},
            ),
        )
        first = max(last, 1)


def _at_least_two(piece: Piece) -> Piece:
    """Rows and width of at least 2: the compiler makes a variant of its own for every size of 0 or 1."""
    rows, width = piece.train.shape
    more = (0, max(0, 2 - width), 0, max(0, 2 - rows))
    if more == (0, 0, 0, 0):
        return piece
    inside = torch.ones(rows, width, dtype=torch.bool) if piece.inside is None else piece.inside
    return Piece(
        pad(piece.train, more),
        pad(piece.rollout, more),
        None if piece.mask is None else pad(piece.mask, more),
        pad(inside, more),
        None if piece.advantages is None else pad(piece.advantages, more),
        None if piece.per_sequence is None else pad(piece.per_sequence, more[2:]),
        {name: pad(x, more) for name, x in piece.external.items()},
    )


def _lengths_vary(tensors: Any) -> Any:
    """The tuple given, its tensors' sizes marked as varying, so that no length gets into a compile key."""
    for x in tensors:
        if isinstance(x, dict):
            _lengths_vary(x.values())
        elif isinstance(x, Tensor):
            for dim in range(x.dim()):
                torch._dynamo.mark_dynamic(x, dim)
    return tensors
