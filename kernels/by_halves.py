"""The host side of zigzags: two stretches of each sequence, or of its turns, stand in its place, packed.

A rank of a zigzag holds the tokens of a stretch near the beginning of a sequence, and behind them those of one near its
end, of equal lengths. What runs along the sequence begins in each with another carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rollout_corr.kernels.by_turns import owners_of, rows_as_offsets

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Given = TypeVar("Given", bound="DataclassInstance")


def middles_of(given: DataclassInstance) -> Tensor:
    """[S] int64: where the second stretch of each sequence begins among the tokens, row after row."""
    fields: dict[str, Any] = vars(given)
    offsets = fields["offsets"]
    offsets = rows_as_offsets(fields["train"]) if offsets is None else offsets.to(torch.int64)
    return offsets[:-1] + offsets.diff() // 2


def by_halves(given: Given, middles: Tensor, within: Tensor | None, names: Sequence[str]) -> Given:
    """Put the halves of sequences, or of turns, in their place: flat, [2 U + 1] offsets, advantages of each twice.

    Args:
        given: A batch as the kernels take it, with offsets and advantages; of turns if there are any.
        middles: [S] int64, of `middles_of`.
        within: [S + 1] int64, which turns a sequence has; None without turns.
        names: All fields with a per-token tensor but for the advantages.
    """
    fields: dict[str, Any] = vars(given)
    train, offsets, advantages = fields["train"], fields["offsets"], fields["advantages"]
    offsets = rows_as_offsets(train) if offsets is None else offsets.to(torch.int64)
    if within is not None:
        middles = _of_turns(middles, within, offsets)
    cut = torch.stack([offsets[:-1], middles], 1).reshape(-1)
    if advantages is not None:
        advantages = advantages.repeat_interleave(2) if fields["per_sequence"] else advantages.reshape(-1)
    flat = {name: x.reshape(-1) for name in names if (x := fields[name]) is not None}
    flat["externals"] = [x.reshape(-1) for x in fields["externals"]]
    return replace(given, offsets=torch.cat([cut, offsets[-1:]]), advantages=advantages, **flat)


def _of_turns(middles: Tensor, within: Tensor, offsets: Tensor) -> Tensor:
    """[U]: where each turn is cut; one that lies in one half of its sequence, at its own end."""
    if not middles.shape[0]:
        return offsets[:-1]
    owners = owners_of(within, offsets.shape[0] - 1).clamp(max=middles.shape[0] - 1)
    return torch.minimum(torch.maximum(middles.index_select(0, owners), offsets[:-1]), offsets[1:])


def heads_of_halves(heads: Tensor, turns: Tensor | None, middles: Tensor, within: Tensor) -> Tensor:
    """[2 U + 2] int64: of each half of a turn the number of the one that its half of the sequence begins with.

    Args:
        heads: [U + 2] int64, of `by_turns.heads_of`.
        turns: [U + 1] int64, their offsets.
        middles: [S] int64, of `middles_of`.
        within: [S + 1] int64, which turns a sequence has.
    """
    assert turns is not None
    many = turns.shape[0] - 1
    inner = heads[1:-1]
    later = inner
    if middles.shape[0]:
        # The second half begins in the turn that the middle lies in.
        begins = torch.searchsorted(turns[1:].contiguous(), middles, right=True)
        begins = torch.minimum(begins, within[1:] - 1)
        owners = owners_of(within, many).clamp(max=middles.shape[0] - 1)
        later = begins.index_select(0, owners) + 1
    halves = torch.stack([2 * inner - 1, 2 * later], 1).reshape(-1)
    return torch.cat([heads[:1], halves, heads.new_tensor([2 * many + 1])])
