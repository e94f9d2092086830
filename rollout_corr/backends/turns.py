"""Turns of a batch: read from offsets, from ids or from the runs of the mask, and cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..definition.offsets import OffsetsError, checked_offsets
from ..definition.sequences import Packed
from ..definition.turns import Turns, turns_within
from ..specs.caches import cached
from ..specs.checked import keywords_meant
from ..specs.correction import Spec
from ..specs.validate import shown
from .batch import INTEGERS, OFFSETS, OpenBatch, Reader, checked_tensor
from .layouts import LogProbs, shape_of


@keywords_meant(max_turns="at_most=", turns="ids=")
@dataclass(frozen=True, eq=False)
class TurnIds:
    """Turns that ids or the runs of the mask make, with a bound on their number.

    Attributes:
        ids: An integer for each token, in the layout of the log-probs, or "runs".
        at_most: The largest number of turns. Pass it on a device: otherwise counting the turns costs a host sync.
            Surplus turns are empty; if there are more turns than this, the last one takes the rest.
    """

    ids: LogProbs | Literal["runs"]
    at_most: int


class BlockOfTurns(NamedTuple):
    """The turns of a block."""

    turns: Turns  # of its sequences, over its valid tokens
    which: slice  # their places among the turns of the batch


def block_of_turns(batch: OpenBatch, slots: slice, starts: Tensor, valid: Tensor | None, total: int) -> BlockOfTurns:
    """Cut the turns of a block of whole sequences out of those of its batch, on the CPU.

    Its sequences begin at `starts`; of its slots, tokens or rows of a padded batch, those in `valid` are valid, or all.
    """
    assert batch.turns is not None
    width = 1 if batch.offsets is not None else batch.train.shape[1]
    first, last = slots.start * width, slots.stop * width
    begin, end = torch.searchsorted(batch.turns, torch.tensor([first, last], device="cpu")).tolist()
    offsets = batch.turns[begin : end + 1] - first
    n_valid = offsets.diff() if valid is None else Packed(offsets, last - first).sum_integers(valid)
    within = turns_within(offsets, torch.cat([starts, starts.new_tensor([last - first])]))
    return BlockOfTurns(Turns(Packed.of_lengths(n_valid, total), within, n_valid), slice(begin, end))


# --- reading ---


@cached(maxsize=256)
def measuring_turns(spec: Spec) -> Spec:
    """The Spec of a call that brings turns."""
    return spec if spec.measures_turns else replace(spec, turns=True)


def check_turns(spec: Spec, turns: object) -> None:
    """Refuse a Spec without the turns that it needs."""
    if turns is None and spec.measures_turns:
        raise ValueError(
            "turns: expected offsets [turns + 1], an id for each token or 'runs' for a Spec that weighs, tests or "
            "measures turns, got None"
        )


def read_turns(read: Reader, batch: OpenBatch, given: object, validate: bool, split: bool) -> Tensor:
    """Read turns of any kind, as `Batch` takes them, as offsets among the tokens of a batch, [U + 1].

    With `split` the tokens of a sequence lie on several ranks.
    """
    first = batch.train
    turns, max_turns = (given.ids, given.at_most) if isinstance(given, TurnIds) else (given, None)
    if max_turns is not None and (isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1):
        raise ValueError(f"turns.at_most: expected an integer above 0, got {shown(max_turns)}")
    if isinstance(turns, Tensor) and are_offsets(turns, first, could_be_ids=read.layout.plain and not split):
        if max_turns is not None:
            raise ValueError(f"turns.ids: expected ids or 'runs', got offsets {shape_of(turns)}; pass them as turns=")
        return read_offsets_of_turns(turns, batch, validate)
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
        begins = _begins_of_runs(batch)
    else:
        # Only a 1-D tensor may be offsets or ids: a padded or a nested tensor is ids.
        row = turns if isinstance(turns, Tensor) and turns.dim() == 1 and turns.dtype in OFFSETS else None
        if row is not None and reads and _could_be_offsets(row, batch):
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
    return _offsets_of(begins, batch, max_turns, reads)


def are_offsets(turns: Tensor, first: Tensor, could_be_ids: bool) -> bool:
    """Return whether, by dtype and shape, turns are offsets, for log-probs of shape [N] or [B, T]."""
    plain = not turns.is_nested and turns.dim() == 1 and turns.dtype in OFFSETS
    return plain and not (could_be_ids and turns.shape == first.shape)


def sequence_offsets(batch: OpenBatch) -> Tensor:
    """[S + 1] int64: where the sequences of a batch lie among its tokens, row after row."""
    if batch.offsets is not None:
        return batch.offsets.to(torch.int64)
    return torch.arange(batch.count + 1, device=batch.train.device) * batch.train.shape[1]


def _could_be_offsets(turns: Tensor, batch: OpenBatch) -> bool:
    """Tell of turns on the CPU, or where values may be read, whether they pass for offsets."""
    given, sequences = turns.reshape(-1).to("cpu", torch.int64), sequence_offsets(batch).cpu()
    if not given.shape[0] or bool((given[1:] < given[:-1]).any()):
        return False
    ends = int(given[0]) == int(sequences[0]) and int(given[-1]) == int(sequences[-1])
    return ends and bool(torch.isin(sequences, given).all())


def read_offsets_of_turns(turns: Tensor, batch: OpenBatch, validate: bool) -> Tensor:
    """Check offsets where values can be read."""
    checked_tensor("turns", turns, OFFSETS)
    device = batch.train.device
    if turns.device.type != "cpu" and turns.device != device:
        raise ValueError(f"turns: expected the CPU or {device} (of train_logp), got {turns.device}")
    if not turns.shape[0]:
        raise ValueError(f"turns: expected shape [turns + 1], got {shape_of(turns)}")
    given, sequences = turns.detach(), sequence_offsets(batch)
    readable = turns.device.type == "cpu" and (batch.offsets is None or sequences.device.type == "cpu")
    if torch.compiler.is_compiling() or not (readable or validate):
        return given
    try:
        given = checked_offsets(given.cpu(), batch.train.numel(), "turns")
    except OffsetsError as error:
        shape = shape_of(batch.train)
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


def _begins_of_runs(batch: OpenBatch) -> Tensor:
    """[N] bool: a run of valid tokens begins, and it is not the first of its sequence."""
    tokens = batch.train.numel()
    device = batch.train.device
    valid = torch.ones(tokens, dtype=torch.bool, device=device)
    if batch.mask is not None:
        valid = batch.mask.reshape(-1) != 0
    begins = _sequence_begins(batch)[:-1]
    before = torch.cat([valid.new_zeros(min(1, tokens)), valid[:-1]])
    runs = valid & (~before | begins)
    places = torch.arange(tokens, device=device)
    sequence = torch.where(begins, places, -1).cummax(0).values
    run = torch.where(runs, places, -1).cummax(0).values
    earlier = torch.cat([run.new_full((min(1, tokens),), -1), run[:-1]])
    return runs & (earlier >= sequence) & (earlier >= 0)


def _sequence_begins(batch: OpenBatch) -> Tensor:
    """[N + 1] bool: a sequence begins or ends here."""
    tokens, device = batch.train.numel(), batch.train.device
    found = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
    return found.index_fill_(0, sequence_offsets(batch).to(device).clamp(0, tokens), True)


def _offsets_of(begins: Tensor, batch: OpenBatch, max_turns: int | None, reads: bool) -> Tensor:
    """[U + 1] int64: the places where turns begin, [N] bool within sequences, and where the last ends.

    With `max_turns` there are so many, and those that are not there are empty. Without, a device has to be asked.
    """
    found = _sequence_begins(batch)
    sequences = sequence_offsets(batch).to(found.device)
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
