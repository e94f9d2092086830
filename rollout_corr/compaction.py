"""Taking the valid tokens out of a block, and putting results back where they were."""

from __future__ import annotations

import torch
from torch import Tensor

# A run costs about 1 us to slice out, a token about 2 ns to look up by index.
SHORTEST_RUN = 256


class Compaction:
    """The valid tokens of a block of whole sequences, in order.

    Most masks are one run of tokens per sequence (right padding, left padding, a prompt before a response): then the
    runs are sliced out, which costs a copy. Masks with holes are looked up by index.

    Args:
        valid: [n] bool, the block's slots; None when all are valid.
        starts: [S] int64, where each sequence begins in it.
        lengths: [S] int64, its slots.
        n_valid: [S] int64, its valid tokens.
    """

    def __init__(self, valid: Tensor | None, starts: Tensor, lengths: Tensor, n_valid: Tensor) -> None:
        self.total = int(n_valid.sum())
        self.pieces: list[int] | None = None  # lengths of what lies between runs and of runs, in turn
        self.index: Tensor | None = None
        if valid is None or self.total == valid.numel():
            return
        if self.total > 0 and self.total >= SHORTEST_RUN * starts.shape[0]:
            self.pieces = _pieces(valid, starts, lengths, n_valid)
        if self.pieces is None:
            self.index = valid.nonzero().squeeze(1)

    def take(self, x: Tensor) -> Tensor:
        """The valid tokens of a block, [total]; a view when all are valid."""
        flat = x.reshape(-1)
        if self.pieces is not None:
            return torch.cat(flat.split(self.pieces)[1::2])
        return flat if self.index is None else flat.index_select(0, self.index)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write [total] values to where their tokens are in a contiguous block."""
        flat = out.view(-1)
        if self.pieces is not None:
            runs = flat.split(self.pieces)[1::2]
            for run, part in zip(runs, values.split(self.pieces[1::2]), strict=True):
                run.copy_(part)
        elif self.index is None:
            flat.copy_(values)
        else:
            flat.index_copy_(0, self.index, values)


def _pieces(valid: Tensor, starts: Tensor, lengths: Tensor, n_valid: Tensor) -> list[int] | None:
    """Where the runs are, if every sequence has one that touches an end of it; else None."""
    some = n_valid > 0
    first, count = starts[some], n_valid[some]
    begin = torch.where(valid[first], first, first + lengths[some] - count)
    after = torch.cat([begin.new_zeros(1), begin + count])
    gaps = torch.cat([begin, begin.new_full((1,), valid.numel())]) - after
    pieces: list[int] = torch.stack([gaps, torch.cat([count, count.new_zeros(1)])], 1).flatten().tolist()
    runs = torch.cat(valid.split(pieces)[1::2])
    # The minimum of bytes is vectorised, `all` is not.
    return pieces if bool(runs.view(torch.uint8).amin()) else None
