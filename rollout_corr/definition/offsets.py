"""Where sequences lie in a row of tokens: offsets and lengths from outside, checked before anything is computed.

In int64 a difference or a sum of wrong values may wrap around and pass for a right one, and torch reads memory by what
it finds. So every value is known to lie within the tokens first. All that takes offsets or lengths calls this: the
public calls, the readers of dumps, the drop-ins.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Offsets up to which they are checked as a list.
LISTED = 4096


class OffsetsError(ValueError):
    """Offsets or lengths that cannot be; the message says `what` was expected and came, and where.

    `index` is the place of the first wrong value; None: all of them are wrong.
    """

    def __init__(self, name: str, index: int | None, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.index, self.what = index, what


def checked_offsets(offsets: Tensor, tokens: int, name: str = "cu_seqlens") -> Tensor:
    """Check offsets and give them as int64: every one within [0, tokens], none below the one before it.

    The first may be above 0 and the last below the number of tokens: the tokens outside belong to no sequence. Equal
    values that add up to the tokens are still refused: as offsets they hold no token, so they must be lengths.
    Values, integers or whole floating numbers, are read, so not on a device where that waits.
    """
    if offsets.dim() != 1 or not offsets.shape[0]:
        raise OffsetsError(name, None, f"expected shape [sequences + 1], got {list(offsets.shape)}")
    # Searching in a column of a table copies it every time, and torch warns of that.
    offsets = _integers(offsets, tokens, name, "offsets").contiguous()
    if offsets.shape[0] <= LISTED:
        # On few, sorting a list takes less time than three operations.
        listed = offsets.tolist()
        first, last, ascending = listed[0], listed[-1], listed == sorted(listed)
    else:
        first, last = int(offsets[0]), int(offsets[-1])
        ascending = not bool((offsets[1:] < offsets[:-1]).any())
    if not ascending:
        i = int((offsets[1:] < offsets[:-1]).nonzero()[0])
        pair = f"{name}[{i}]={int(offsets[i])} > {name}[{i + 1}]={int(offsets[i + 1])}"
        raise OffsetsError(name, i, f"expected offsets that do not decrease, got {pair}")
    # As they do not decrease, all lie within the tokens where the first and the last do.
    if first < 0 or last > tokens:
        raise _outside(offsets, tokens, name, "offsets")
    if 0 < first == last and first * offsets.shape[0] == tokens:
        what = (
            f"expected offsets, which add lengths up, got lengths: {offsets.shape[0]} times {first} of {tokens} tokens"
        )
        raise OffsetsError(name, 0, what)
    return offsets


def offsets_of(lengths: Tensor, tokens: int, name: str = "lengths") -> Tensor:
    """Add lengths up, checked as offsets are: [S + 1] int64 offsets from 0, at most `tokens`."""
    lengths = checked_lengths(lengths, tokens, name)
    ends = lengths.cumsum(0)
    # No length is above `tokens`, so a sum that wraps around is negative where it does so first.
    over = ((ends < 0) | (ends > tokens)).nonzero()
    if over.shape[0]:
        i = int(over[0])
        total = sum(lengths[: i + 1].tolist())
        what = f"expected lengths of together at most {tokens} tokens, got {total} up to {name}[{i}]={int(lengths[i])}"
        raise OffsetsError(name, i, what)
    return torch.cat([ends.new_zeros(1), ends])


def checked_lengths(lengths: Tensor, most: int, name: str = "lengths") -> Tensor:
    """Check lengths and give them as int64: none below 0, none above `most`."""
    if lengths.dim() != 1:
        raise OffsetsError(name, None, f"expected shape [sequences], got {list(lengths.shape)}")
    lengths = _integers(lengths, most, name, "lengths")
    if lengths.shape[0] and (int(lengths.amin()) < 0 or int(lengths.amax()) > most):
        raise _outside(lengths, most, name, "lengths")
    return lengths


def _integers(values: Tensor, most: int, name: str, what: str) -> Tensor:
    """The values as int64. What it cannot hold turns negative (uint64) or is refused here (floats), so none passes."""
    if values.dtype == torch.bool or values.is_complex():
        raise OffsetsError(name, None, f"expected whole numbers, got {str(values.dtype).removeprefix('torch.')}")
    if values.is_floating_point():
        values = values.double()
        wrong = ~((values >= 0) & (values <= most) & (values == values.floor()))
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            got = f"{name}[{i}]={float(values[i])!r}"
            raise OffsetsError(name, i, f"expected {what}, whole numbers within [0, {most}] tokens, got {got}")
    return values.to(torch.int64)


def _outside(values: Tensor, most: int, name: str, what: str) -> OffsetsError:
    i = int(((values < 0) | (values > most)).nonzero()[0])
    return OffsetsError(name, i, f"expected {what} within [0, {most}] tokens, got {name}[{i}]={int(values[i])}")
