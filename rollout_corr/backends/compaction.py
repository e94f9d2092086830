"""Taking the valid tokens out of a block, and putting results back where they were."""

from __future__ import annotations

import torch
from torch import Tensor


class Compaction:
    """The valid tokens of a block of whole sequences, in order.

    Args:
        valid: [n] bool, the block's slots; None when all are valid.
        starts: [S] int64, where each sequence begins in it.
        lengths: [S] int64, its slots.
        n_valid: [S] int64, its valid tokens.
    """

    def __init__(self, valid: Tensor | None, starts: Tensor, lengths: Tensor, n_valid: Tensor) -> None:
        self.total = int(n_valid.sum())
        self.index: Tensor | None = None
        if valid is None or self.total == valid.numel():
            return
        self.index = _index_of_runs(valid, starts, lengths, n_valid, self.total)
        if self.index is None:
            self.index = valid.nonzero().squeeze(1)

    def take(self, x: Tensor) -> Tensor:
        """The valid tokens of a block, [total]; a view when all are valid."""
        flat = x.reshape(-1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [total] values to where their tokens are in a contiguous block, and 0 elsewhere in it."""
        if self.index is None:
            out.view(-1).copy_(values)
        else:
            out.view(-1).zero_().scatter_(0, self.index.long(), values)


def _index_of_runs(valid: Tensor, starts: Tensor, lengths: Tensor, n_valid: Tensor, total: int) -> Tensor | None:
    """Where the valid tokens are, if each sequence has one run of them that touches an end of it; else None.

    Most masks are so: right padding, left padding, a prompt before a response. This costs half of looking at all slots.
    """
    if not total:
        return None
    if not int(n_valid.amin()):
        some = n_valid > 0
        starts, lengths, n_valid = starts[some], lengths[some], n_valid[some]
    begin = torch.where(valid.index_select(0, starts), starts, starts + lengths - n_valid)
    # The index stays as long as its block does, so it is as small as it can be.
    index = torch.ones(total, dtype=torch.int32 if valid.shape[0] < 2**31 else torch.int64)
    index[0] = begin[0]
    index.scatter_(0, n_valid.cumsum(0)[:-1], (begin[1:] - begin[:-1] - n_valid[:-1] + 1).to(index.dtype))
    index.cumsum_(0)
    # The minimum of bytes is vectorised, `all` is not.
    return index if bool(valid.index_select(0, index).view(torch.uint8).amin()) else None
