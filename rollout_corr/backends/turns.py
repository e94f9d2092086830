"""Turns of a batch: read from offsets, from ids or from the runs of the mask, and cut into blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..definition.offsets import OffsetsError, checked_offsets
from ..definition.sequences import Flattened, Packed, Rows, Sequences
from ..definition.turns import Turns, turns_within
from ..specs.validate import shown
from .batch import INTEGERS, OFFSETS, Laid, Reader, checked_tensor, fitting
from .layouts import shape_of

if TYPE_CHECKING:
    from .split import Split


class BlockOfTurns(NamedTuple):
    """The turns of a block."""

    turns: Turns  # of its sequences, over its valid tokens
    which: slice  # their places among the turns of the batch


def block_of_turns(
    laid: Laid, turns: Tensor, slots: slice, starts: Tensor, valid: Tensor | None, total: int
) -> BlockOfTurns:
    """Cut the turns of a block of whole sequences out of those of its batch, on the CPU.

    Its sequences begin at `starts`; of its slots, tokens or rows of a padded batch, those in `valid` are valid, or all.
    """
    width = 1 if laid.offsets is not None else laid.first.shape[1]
    first, last = slots.start * width, slots.stop * width
    begin, end = torch.searchsorted(turns, torch.tensor([first, last], device="cpu")).tolist()
    offsets = turns[begin : end + 1] - first
    n_valid = offsets.diff() if valid is None else Packed(offsets, last - first).sum_integers(valid)
    within = turns_within(offsets, torch.cat([starts, starts.new_tensor([last - first])]))
    return BlockOfTurns(Turns(Packed.of_lengths(n_valid, total), within, n_valid), slice(begin, end))


def turns_of(laid: Laid, turns: Tensor, sequences: Rows | Packed | Split, valid: Tensor | None) -> Turns:
    """The turns of a batch; where their offsets could not be read and checked they are made to fit."""
    offsets, tokens = fitting(turns, laid), torch.ones_like(laid.first, dtype=torch.bool)
    packed = Packed(offsets, laid.first.numel())
    here = packed if laid.first.dim() == 1 else Flattened(packed, laid.first.shape)
    units: Sequences = here
    if isinstance(sequences, (Rows, Packed)):
        within = turns_within(offsets, fitting(sequence_offsets(laid), laid))
    else:
        units, within = split_turns(here, sequences, tokens)
    return Turns(units, within, units.sum_integers(tokens if valid is None else valid))


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


# --- reading ---


def read_turns(read: Reader, turns: object, max_turns: object, validate: bool, split: bool) -> Tensor:
    """Read turns of any kind, as `Batch` takes them, as offsets among the tokens of a batch, [U + 1].

    With `split` the tokens of a sequence lie on several ranks.
    """
    first = read.first
    if max_turns is not None and (isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1):
        raise ValueError(f"turns.at_most: expected an integer above 0, got {shown(max_turns)}")
    if isinstance(turns, Tensor) and are_offsets(turns, first, could_be_ids=read.layout.plain and not split):
        if max_turns is not None:
            raise ValueError(f"turns.ids: expected ids or 'runs', got offsets {shape_of(turns)}; pass them as turns=")
        return read_offsets_of_turns(turns, read, validate)
    if split:
        raise ValueError("turns: expected offsets with ranks.sequence, whose ranks hold parts of turns, got others")
    if max_turns is None and torch.compiler.is_compiling():
        raise ValueError(
            "turns: expected offsets or rc.TurnIds(ids, at_most=...) in a compiled function, got no bound on the turns"
        )
    reads = validate or (first.device.type == "cpu" and not torch.compiler.is_compiling())
    if isinstance(turns, str):
        if turns != "runs":
            raise ValueError(f"turns: expected offsets, ids or 'runs', got {shown(turns)}")
        begins = _begins_of_runs(read)
    else:
        # Only a 1-D tensor may be offsets or ids: a padded or a nested tensor is ids.
        row = turns if isinstance(turns, Tensor) and turns.dim() == 1 and turns.dtype in OFFSETS else None
        if row is not None and reads and _could_be_offsets(row, read):
            raise ValueError(
                f"turns: expected ids or offsets, got {first.shape[0]} values for as many tokens, which can be either; "
                "repeat the last value at the end to make them offsets, add 1 to make them ids"
            )
        # A list of no samples is opened in the dtype of log-probs.
        nothing = isinstance(turns, (list, tuple)) and not turns
        dtypes = (*INTEGERS, torch.float32) if nothing else INTEGERS
        ids = checked_tensor("turns", read.in_one_row(read.layout.open("turns", turns)), dtypes, first, read.leader)
        ids = ids.detach().reshape(-1)
        begins = torch.cat([ids.new_zeros(min(1, ids.shape[0]), dtype=torch.bool), ids[1:] != ids[:-1]])
    return _offsets_of(begins, read, max_turns, reads)


def are_offsets(turns: Tensor, first: Tensor, could_be_ids: bool) -> bool:
    """Return whether, by dtype and shape, turns are offsets, for log-probs of shape [N] or [B, T]."""
    plain = not turns.is_nested and turns.dim() == 1 and turns.dtype in OFFSETS
    return plain and not (could_be_ids and turns.shape == first.shape)


def sequence_offsets(laid: Laid) -> Tensor:
    """[S + 1] int64: where the sequences of a batch lie among its tokens, row after row."""
    if laid.offsets is not None:
        return laid.offsets.to(torch.int64)
    return torch.arange(laid.count + 1, device=laid.first.device) * laid.first.shape[1]


def _could_be_offsets(turns: Tensor, laid: Laid) -> bool:
    """Tell of turns on the CPU, or where values may be read, whether they pass for offsets."""
    given, sequences = turns.reshape(-1).to("cpu", torch.int64), sequence_offsets(laid).cpu()
    if not given.shape[0] or bool((given[1:] < given[:-1]).any()):
        return False
    ends = int(given[0]) == int(sequences[0]) and int(given[-1]) == int(sequences[-1])
    return ends and bool(torch.isin(sequences, given).all())


def read_offsets_of_turns(turns: Tensor, laid: Laid, validate: bool) -> Tensor:
    """Check offsets where values can be read."""
    checked_tensor("turns", turns, OFFSETS)
    device = laid.first.device
    if turns.device.type != "cpu" and turns.device != device:
        raise ValueError(f"turns: expected the CPU or {device} (of train_logp), got {turns.device}")
    if not turns.shape[0]:
        raise ValueError(f"turns: expected shape [turns + 1], got {shape_of(turns)}")
    given, sequences = turns.detach(), sequence_offsets(laid)
    readable = turns.device.type == "cpu" and (laid.offsets is None or sequences.device.type == "cpu")
    if torch.compiler.is_compiling() or not (readable or validate):
        return given
    try:
        given = checked_offsets(given.cpu(), laid.first.numel(), "turns")
    except OffsetsError as error:
        shape = shape_of(laid.first)
        what = f"{error.what}; ids, one for each token, have the shape of the log-probs, {shape}, not {shape_of(turns)}"
        raise OffsetsError("turns", error.index, what) from None
    sequences = sequences.cpu()
    for i in (0, -1):
        if int(given[i]) != int(sequences[i]):
            end, where = ("first", "begins") if i == 0 else ("last", "ends")
            raise ValueError(
                f"turns: expected offsets whose {end} is {int(sequences[i])}, where the {end} sequence {where}, got "
                f"{int(given[i])}"
            )
    missing = (~torch.isin(sequences, given)).nonzero()
    if missing.shape[0]:
        i = int(missing[0])
        raise ValueError(
            f"turns: expected every sequence to begin with a turn, got none at {int(sequences[i])}, where sequence {i} "
            "begins"
        )
    return given if turns.device.type == "cpu" else turns.detach()


def _begins_of_runs(laid: Laid) -> Tensor:
    """[N] bool: a run of valid tokens begins, and it is not the first of its sequence."""
    tokens = laid.first.numel()
    device = laid.first.device
    valid = torch.ones(tokens, dtype=torch.bool, device=device)
    if laid.mask is not None:
        valid = laid.mask.reshape(-1) != 0
    begins = _sequence_begins(laid)[:-1]
    before = torch.cat([valid.new_zeros(min(1, tokens)), valid[:-1]])
    runs = valid & (~before | begins)
    places = torch.arange(tokens, device=device)
    sequence = torch.where(begins, places, -1).cummax(0).values
    run = torch.where(runs, places, -1).cummax(0).values
    earlier = torch.cat([run.new_full((min(1, tokens),), -1), run[:-1]])
    return runs & (earlier >= sequence) & (earlier >= 0)


def _sequence_begins(laid: Laid) -> Tensor:
    """[N + 1] bool: a sequence begins or ends here."""
    tokens, device = laid.first.numel(), laid.first.device
    found = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
    return found.index_fill_(0, sequence_offsets(laid).to(device).clamp(0, tokens), True)


def _offsets_of(begins: Tensor, laid: Laid, max_turns: int | None, reads: bool) -> Tensor:
    """[U + 1] int64: the places where turns begin, [N] bool within sequences, and where the last ends.

    With `max_turns` there are so many, and those that are not there are empty. Without, a device has to be asked.
    """
    found = _sequence_begins(laid)
    sequences = sequence_offsets(laid).to(found.device)
    places = torch.arange(found.shape[0], device=found.device)
    found[:-1] |= begins
    found &= (places >= sequences[0]) & (places <= sequences[-1])
    if max_turns is None:
        return found.nonzero().squeeze(1)
    order = found.cumsum(0) - 1
    if reads and int(order[-1]) > max_turns:
        raise ValueError(f"turns.at_most: expected at least the {int(order[-1])} turns of the batch, got {max_turns}")
    offsets = sequences[-1].repeat(max_turns + 2)
    offsets.scatter_(0, torch.where(found, order, max_turns + 1).clamp(max=max_turns + 1), places)
    return torch.cat([offsets[:max_turns], sequences[-1:]])
