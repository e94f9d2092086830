"""`dump`: write a training loop's log-probs to a file for `rollout-corr report`, without holding the loop up."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..backends.batch import FLOATS_OR_INTEGERS, MASK_DTYPES, Reader
from ..backends.given import Batch, TurnIds, batch_given
from ..backends.layouts import LogProbs
from ..backends.read import reader, turns_of
from ..backends.turns import are_offsets, read_offsets_of_turns
from ..definition.offsets import checked_offsets
from ..definition.sequences import Packed
from ..specs.operands import compute_dtype
from . import dump_thread
from .dump_files import append, json_line, write_shard

RESERVED = ("train_logp", "rollout_logp", "lengths", "step")
# Columns of a Batch, which its labels and external statistics cannot be called.
TAKEN = (*RESERVED, "mask", "cu_seqlens", "turns", "versions", "log_mass")

# Columns that a Batch brings, each with the name of its field.
OF_BATCH = {
    "turns": "turns", "versions": "versions", "current_version": "versions", "log_mass": "kept_mass",
    "entropy": "entropy", "labels": "labels", "label_names": "labels", "group_index": "groups",
}  # fmt: skip

# Versions and labels have any integer dtype, as in `correct`.
OF_COLUMNS = (*FLOATS_OR_INTEGERS, torch.int16, torch.int8, torch.uint8)

# Readers hold a step as a float64 on the way.
LAST_STEP = 2**53


def dump(
    path: str | os.PathLike[str],
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    sequences: int | None = 64,
    step: int | None = None,
    seed: int | None = None,
    **columns: LogProbs,
) -> Future[int]:
    """Write some sequences to a file for `rollout-corr report`, `doctor` and `what-if`, in the background.

    The call draws the sequences and starts their copies; a thread waits for the copies and writes. The call itself
    touches no disk, and raises nothing once its arguments are checked.

    Once the future is done, its sequences are in the file, whole and once, and survive a kill of the process; a power
    cut can lose them. Processes may write to one folder; give each its own .jsonl file.

    One thread writes, and at most eight calls wait for it; a further one writes nothing. A process that ends waits ten
    seconds for its disk and then says in a RuntimeWarning how many calls were not written. What waits is lost where a
    process is killed, or ends as `os._exit` and the processes of multiprocessing do: wait for the last future there.
    A forked process writes its own calls; those that waited at the fork are the parent's, and so are their futures.

    Args:
        path: "x.jsonl", to which every call appends one line per sequence; or a folder, in which every call writes
            a .pt file of its own, named after the step. Missing folders are made.
        train_logp: As for `correct`: packed, padded, jagged or a list.
        rollout_logp: The same layout.
        batch: Everything else about the tokens, as `Batch`: mask, offsets, turns, versions, kept mass, entropy, labels
            with their names, external statistics and the index of groups are written; labels of turns as those of
            their tokens. Reading offsets from a device would wait, so there all sequences are copied and the thread
            draws; labels of turns wait there for turns that ids make without a bound.
        mask: Short for `Batch(mask=...)`: non-zero is valid, same layout; None: every token is valid.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        sequences: The largest number of sequences to draw; None for all of them.
        step: Number of the step, from 0 to 2^53, written with every sequence, so that the report can show drift over
            steps.
        seed: Seed of the drawing; None draws differently each time.
        **columns: More tensors of the same layout, or per sequence ([S]): `token_ids`, `advantages`, `new_logp`, or any
            other that `report --by` is to group by.

    Returns:
        A future of the number of sequences written, 0 where the call was left out. An error while writing is kept in
        it, and told by a RuntimeWarning: it names the path, the reason, and what may be in the file.

    Raises:
        ValueError: A wrong shape, dtype, device or path, named.
        TypeError: An argument of the wrong type.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a file name that ends in .jsonl, or a folder, got {type(path).__name__}")
    target = Path(path)
    if target.suffix not in ("", ".jsonl"):
        raise ValueError(
            f"path: expected a file name that ends in .jsonl, or a folder, which gets .pt files; got {str(path)!r}"
        )
    if sequences is not None:
        sequences = _whole("sequences", sequences, "a whole number >= 1 or None", 1)
    if step is not None:
        step = _whole("step", step, "a whole number from 0 to 2**53 or None", 0, LAST_STEP)
    if seed is not None:
        seed = _whole("seed", seed, "a whole number or None")
    fields = _fields(train_logp, rollout_logp, batch_given(batch, mask, cu_seqlens), columns)
    future: Future[int] = Future()
    with suppress(OSError):  # a working folder that is gone: the thread will say so
        target = target.absolute()
    if not dump_thread.has_place():
        future.set_result(0)
        return future
    try:
        with torch.no_grad():
            drawn = _drawn(fields, sequences, random.Random(seed))
            copied, event = _copied(drawn, fresh=drawn is not fields)
        dump_thread.submit(partial(_write, target, copied, event, sequences, step, seed), future)
    except Exception as error:  # noqa: BLE001 - no memory, a broken device: a training step goes on without its dump
        failure = RuntimeError(f"{target}: {error}; 0 sequences of this call are in it")
        dump_thread.warn(str(failure))
        failure.__cause__ = error
        future.set_exception(failure)
    return future


def _whole(name: str, value: object, expected: str, least: int | None = None, most: int | None = None) -> int:
    """Check a whole number of any type that is one."""
    try:
        # Reading a tensor of a device would wait for it.
        elsewhere = isinstance(value, Tensor) and value.device.type != "cpu"
        number = None if isinstance(value, bool) or elsewhere else operator.index(value)  # type: ignore[arg-type]  # raises
    except TypeError:
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return number


@dataclass(eq=False, repr=False)
class _Fields:
    """The tensors to write."""

    tokens: dict[str, Tensor]  # by name, [N] with offsets and [B, T] without
    rows: dict[str, Tensor]  # by name, [S]
    offsets: Tensor | None  # [S + 1], or None
    count: int  # s
    names: dict[str, list[str]]  # names of labels, by the names of their fields

    def each(self, change: Callable[[Tensor], Tensor]) -> _Fields:
        """Change every tensor."""
        tokens = {name: change(x) for name, x in self.tokens.items()}
        rows = {name: change(x) for name, x in self.rows.items()}
        offsets = None if self.offsets is None else change(self.offsets)
        return _Fields(tokens, rows, offsets, self.count, self.names)


def _fields(
    train_logp: LogProbs, rollout_logp: LogProbs | None, batch: Batch, columns: Mapping[str, LogProbs]
) -> _Fields:
    """Read and check all arguments."""
    read = reader("train_logp", train_logp, batch)
    tokens = {"train_logp": read.first.detach(), "rollout_logp": read.tensor("rollout_logp", rollout_logp)}
    if batch.mask is not None:
        read.mask = tokens["mask"] = read.tensor("mask", batch.mask, MASK_DTYPES)
    if batch.kept_mass is not None and batch.kept_mass.of == "train":
        # Readers take the mass from train_logp; over the whole vocabulary there is none to take.
        train = read.first.detach()
        log_mass = read.tensor("kept_mass.log_mass", batch.kept_mass.log_mass).detach()
        tokens["train_logp"] = train.to(compute_dtype(train.dtype, log_mass.dtype)) + log_mass
        batch = replace(batch, kept_mass=None)
    turns = batch.turns.ids if isinstance(batch.turns, TurnIds) else batch.turns
    # Readers take the runs of the mask where no turns are written.
    if turns is not None and not isinstance(turns, str) and _offsets_given(turns, read, batch):
        tokens["turns"] = _ids_of_turns(read, tokens, turns)
        turns = None
    rows: dict[str, Tensor] = {}
    if batch.groups is not None and batch.groups.size is not None:
        rows["group_index"] = torch.arange(read.count) // batch.groups.size
    found = _columns_of(batch, None if isinstance(turns, str) else turns)
    for name in batch.labels or {}:
        ids = _of_turns(read, tokens, batch, found.get(name))
        if ids is not None:
            tokens[name] = ids
            del found[name]
    for name in columns:
        if name in OF_BATCH or name in Batch.__dataclass_fields__:
            raise ValueError(
                f"{name}: expected it in the Batch, rc.Batch({OF_BATCH.get(name, name)}=...), got a column"
            )
        if name in RESERVED or name in tokens or name in found:
            taken = ", ".join((*RESERVED, *found))
            raise ValueError(f"{name}: this name is taken; expected a column name other than {taken}")
    for name, values in {**found, **columns}.items():
        read_values, per_sequence = read.per_token_or_sequence(name, values, OF_COLUMNS)
        (rows if per_sequence else tokens)[name] = read_values
    return _Fields(tokens, rows, read.offsets, read.count, _names_of_labels(batch))


def _columns_of(batch: Batch, turns: LogProbs | None) -> dict[str, LogProbs]:
    """The columns that a Batch brings, by name."""
    found: dict[str, LogProbs | None] = {"turns": turns, "entropy": batch.entropy}
    if batch.versions is not None:
        found["versions"] = batch.versions.ids
    if batch.kept_mass is not None:
        found["log_mass"] = batch.kept_mass.log_mass
    if batch.groups is not None:
        found["group_index"] = batch.groups.index
    named: tuple[tuple[str, Mapping[str, LogProbs | None]], ...] = (
        ("external", batch.external or {}),
        ("labels", {name: labels.ids for name, labels in (batch.labels or {}).items()}),
    )
    for field, columns in named:
        for name, x in columns.items():
            if name in TAKEN or found.get(name) is not None:
                raise ValueError(f"{field}[{name!r}]: expected another name, because a dump has a column of this one")
            found[name] = x
    return {name: x for name, x in found.items() if x is not None}


def _names_of_labels(batch: Batch) -> dict[str, list[str]]:
    """The names of labels, by the names of the fields that they are written under; of a count there are none."""
    found = {}
    for name, labels in (batch.labels or {}).items():
        names = labels.names
        if labels.ids is None or isinstance(names, int):
            continue
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
            raise TypeError(f"labels[{name!r}].names: expected a list of strings, got {type(names).__name__}")
        found[f"{name}/names"] = list(names)
    return found


def _offsets_given(turns: LogProbs, read: Reader, batch: Batch) -> TypeGuard[Tensor]:
    """Tell offsets from ids of tokens, as `correct` does, or of sequences: there are more of them than sequences."""
    could_be_ids = read.layout.plain and batch.ranks.sequence is None
    return isinstance(turns, Tensor) and are_offsets(turns, read.first, could_be_ids) and turns.shape[0] > read.count


def _ids_of_turns(read: Reader, tokens: dict[str, Tensor], turns: Tensor) -> Tensor:
    """Number the turns whose offsets were given, and give every token the number of its turn."""
    first = tokens["train_logp"]
    offsets = read_offsets_of_turns(turns, read, False).to(first.device, torch.int64)
    places = torch.arange(offsets.shape[0] - 1, device=first.device)
    return Packed(offsets, first.numel()).spread(places).view(first.shape)


def _of_turns(read: Reader, tokens: dict[str, Tensor], batch: Batch, ids: LogProbs | None) -> Tensor | None:
    """Give every token the label of its turn; None where labels are not of turns, by their shape."""
    if batch.turns is None or not isinstance(ids, Tensor) or ids.is_nested:
        return None
    first = tokens["train_logp"]
    if tuple(ids.shape) in ((read.count,), (read.count, 1), tuple(read.shape), tuple(first.shape)):
        return None
    offsets = turns_of(read, batch).to(first.device, torch.int64)
    count = offsets.shape[0] - 1
    if tuple(ids.shape) not in ((count,), (count, 1)):
        return None
    return Packed(offsets, first.numel()).spread(ids.reshape(-1)).view(first.shape)


def _drawn(fields: _Fields, sequences: int | None, rng: random.Random) -> _Fields:
    """Draw some of the sequences, on their device; all of them where only the device knows their bounds."""
    on_device = fields.offsets is not None and fields.offsets.device.type != "cpu"
    if sequences is None or sequences >= fields.count or on_device:
        return fields
    chosen = torch.tensor(sorted(rng.sample(range(fields.count), sequences)), device="cpu")
    slots, offsets = chosen, None
    if fields.offsets is not None:
        starts = fields.offsets[chosen]
        lengths = fields.offsets[chosen + 1] - starts
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        slots = torch.arange(int(offsets[-1]), device="cpu")
        slots += torch.repeat_interleave(starts - offsets[:-1], lengths)
    device = fields.tokens["train_logp"].device
    slots, chosen = _moved(slots, device), _moved(chosen, device)
    tokens = {name: x.index_select(0, slots) for name, x in fields.tokens.items()}
    rows = {name: x.index_select(0, chosen) for name, x in fields.rows.items()}
    return _Fields(tokens, rows, offsets, sequences, fields.names)


def _moved(index: Tensor, device: torch.device) -> Tensor:
    """Copy an index to a device; from pageable memory that would wait."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _copied(fields: _Fields, fresh: bool) -> tuple[_Fields, Any]:
    """Start copies to the CPU, but for `fresh` ones; the event tells when they have arrived, None: at once."""
    if fields.tokens["train_logp"].device.type != "cuda":
        return fields.each(lambda x: x.to("cpu", copy=not fresh)), None

    def start(x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x if fresh else x.clone()
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        return copy.copy_(x, non_blocking=True)

    copies = fields.each(start)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(fields.tokens["train_logp"].device))
    return copies, event


def _write(target: Path, fields: _Fields, event: Any, sequences: int | None, step: int | None, seed: int | None) -> int:
    """Wait for the copies and write them, in the thread."""
    try:
        if event is not None:
            event.synchronize()
            if fields.offsets is not None:
                # On the device nobody could look at them before.
                fields.offsets = checked_offsets(fields.offsets, fields.tokens["train_logp"].numel())
        fields = _drawn(fields, sequences, random.Random(seed))
        if fields.count == 0:
            return 0
        if target.suffix == ".jsonl":
            append(target, _lines(fields, step))
        else:
            write_shard(target, step, _columns(fields, step), fields.count)
    except OSError:
        raise
    except Exception as error:  # raised again, with the path and what is in the file
        raise RuntimeError(f"{target}: {error}; 0 sequences of this call are in it") from error
    return fields.count


def _lines(fields: _Fields, step: int | None) -> list[bytes]:
    """Write each sequence as a line of JSON."""
    bounds = None if fields.offsets is None else fields.offsets.tolist()
    lines = []
    for i in range(fields.count):
        piece: Any = i if bounds is None else slice(bounds[i], bounds[i + 1])
        record: dict[str, Tensor | float | list[str]] = {name: x[piece] for name, x in fields.tokens.items()}
        record |= {name: x[i].item() for name, x in fields.rows.items()}
        record |= fields.names
        lines.append(json_line(record if step is None else record | {"step": step}))
    return lines


def _columns(fields: _Fields, step: int | None) -> dict[str, Tensor | list[str]]:
    """Collect the tensors of a shard, and the names of labels."""
    found: dict[str, Tensor | list[str]] = {**fields.tokens, **fields.rows, **fields.names}
    if step is not None:
        found["step"] = torch.full((fields.count,), step, device="cpu")
    if fields.offsets is not None:
        found["cu_seqlens"] = fields.offsets
    return found


def columns_of(
    train_logp: LogProbs, rollout_logp: LogProbs | None, batch: Batch, columns: Mapping[str, LogProbs]
) -> dict[str, Tensor | list[str]]:
    """Check the arguments of a dump, and give what a .pt file of all its sequences would hold, on the CPU.

    That is tensors of tokens, [N] or [B, T], and of sequences, [S], by name, and names of labels. Tensors that lie on
    the CPU already are not copied.
    """
    with torch.no_grad():
        fields = _fields(train_logp, rollout_logp, batch, columns)
        return _columns(fields.each(lambda x: x.detach().cpu()), None)
