"""`dump`: write a training loop's log-probs to a file for `rollout-corr report`, without holding the loop up."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_corr.backends.batch import MASK_DTYPES, reader
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.definition.offsets import checked_offsets

# The number of dumps that may wait for the disk. A further one is left out, because it would only pile up memory.
MOST_WAITING = 4

RESERVED = ("train_logp", "rollout_logp", "mask", "cu_seqlens", "lengths", "step")

_waiting = threading.BoundedSemaphore(MOST_WAITING)


def dump(
    path: str | os.PathLike[str],
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    sequences: int | None = 64,
    step: int | None = None,
    seed: int | None = None,
    **columns: LogProbs,
) -> Future[int]:
    """Write some sequences to a file for `rollout-corr report`, `doctor` and `what-if`, in the background.

    The call draws the sequences and starts their copies; a thread waits for the copies and writes. A call while four
    others still wait for the disk writes nothing. Two processes must not write to one path.

    Args:
        path: "x.jsonl", to which every call appends one line a sequence; or a folder, in which every call writes a
            .pt file of its own, named after the step.
        train_logp: As for `correct`: packed, padded, jagged or a list.
        rollout_logp: The same layout.
        mask: The same layout; None: every token is valid.
        cu_seqlens: [S + 1] int32 or int64 offsets of packed log-probs. Reading them from a device would wait, so there
            all sequences are copied and the thread draws.
        sequences: The largest number of sequences to draw; None for all of them.
        step: Number of the step, written beside every sequence, so that the report can show drift over steps.
        seed: Seed of the drawing; None draws differently each time.
        **columns: More tensors of the same layout, or per sequence ([S]): `token_ids`, `advantages`, `turns`,
            `versions`, `new_logp`, or any other that `report --by` is to group by.

    Returns:
        A future of the number of sequences written, 0 where the call was left out. An error while writing is kept in
        it, and a RuntimeWarning is raised when it happens.

    Raises:
        ValueError: A wrong shape, dtype, device or path, named.
        TypeError: An argument of the wrong type.
    """
    target = Path(path)
    if target.suffix not in ("", ".jsonl"):
        raise ValueError(f"path: expected a name that ends in .jsonl or a folder's, got {str(path)!r}")
    if sequences is not None and (isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 1):
        raise ValueError(f"sequences: expected a whole number >= 1 or None, got {sequences!r}")
    fields = _fields(train_logp, rollout_logp, mask, cu_seqlens, columns)
    if not _waiting.acquire(blocking=False):
        left_out: Future[int] = Future()
        left_out.set_result(0)
        return left_out
    try:
        with torch.no_grad():
            copied, event = _copied(_drawn(fields, sequences, random.Random(seed)))
        future = _writer(os.getpid()).submit(_write, target, copied, event, sequences, step, seed)
    except BaseException:
        _waiting.release()
        raise
    future.add_done_callback(_done)
    return future


@lru_cache(maxsize=1)
def _writer(process: int) -> ThreadPoolExecutor:
    """Start the thread that writes, one a process: a fork has none of its parent's. Python waits for it at exit."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout_corr.dump")


def _done(future: Future[int]) -> None:
    _waiting.release()
    error = future.exception()
    if error is not None:
        warnings.warn(f"rollout_corr.dump: nothing was written: {error}", RuntimeWarning, stacklevel=2)


@dataclass
class _Fields:
    """The tensors to write.

    Attributes:
        tokens: By name, [N] beside offsets and [B, T] without.
        rows: By name, [S].
        offsets: [S + 1], or None.
        count: S.
    """

    tokens: dict[str, Tensor]
    rows: dict[str, Tensor]
    offsets: Tensor | None
    count: int

    def each(self, change: Callable[[Tensor], Tensor]) -> _Fields:
        """Change every tensor."""
        tokens = {name: change(x) for name, x in self.tokens.items()}
        rows = {name: change(x) for name, x in self.rows.items()}
        return _Fields(tokens, rows, None if self.offsets is None else change(self.offsets), self.count)


def _fields(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None,
    cu_seqlens: Tensor | None,
    columns: Mapping[str, LogProbs],
) -> _Fields:
    """Read and check all arguments."""
    read = reader("train_logp", train_logp, cu_seqlens, False)
    tokens = {"train_logp": read.first.detach(), "rollout_logp": read.tensor("rollout_logp", rollout_logp)}
    if mask is not None:
        tokens["mask"] = read.tensor("mask", mask, MASK_DTYPES)
    rows: dict[str, Tensor] = {}
    for name, values in columns.items():
        if name in RESERVED:
            raise ValueError(f"{name}: this name is taken; expected a column name other than {', '.join(RESERVED)}")
        found, per_sequence = read.per_token_or_sequence(name, values)
        (rows if per_sequence else tokens)[name] = found
    return _Fields(tokens, rows, read.offsets, read.count)


def _drawn(fields: _Fields, sequences: int | None, rng: random.Random) -> _Fields:
    """Draw some of the sequences, on their device; all of them where only the device knows their bounds."""
    on_device = fields.offsets is not None and fields.offsets.device.type != "cpu"
    if sequences is None or sequences >= fields.count or on_device:
        return fields
    chosen = sorted(rng.sample(range(fields.count), sequences))
    index, device = torch.tensor(chosen), fields.tokens["train_logp"].device
    if device.type == "cuda":
        # A copy from pageable memory would wait.
        index = index.pin_memory().to(device, non_blocking=True)
    rows = {name: x.index_select(0, index) for name, x in fields.rows.items()}
    if fields.offsets is None:
        tokens = {name: x.index_select(0, index) for name, x in fields.tokens.items()}
        return _Fields(tokens, rows, None, sequences)
    bounds = fields.offsets.tolist()
    pieces = [slice(bounds[i], bounds[i + 1]) for i in chosen]
    tokens = {name: torch.cat([x[piece] for piece in pieces]) for name, x in fields.tokens.items()}
    lengths = torch.tensor([0, *(piece.stop - piece.start for piece in pieces)])
    return _Fields(tokens, rows, lengths.cumsum(0), sequences)


def _copied(fields: _Fields) -> tuple[_Fields, Any]:
    """Start copies to the CPU; the event tells when they have arrived, None: at once."""
    if fields.tokens["train_logp"].device.type != "cuda":
        return fields.each(lambda x: x.to("cpu", copy=True)), None

    def start(x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x.clone()
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

    copies = fields.each(start)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(fields.tokens["train_logp"].device))
    return copies, event


def _write(target: Path, fields: _Fields, event: Any, sequences: int | None, step: int | None, seed: int | None) -> int:
    """Wait for the copies and write them, in the thread."""
    if event is not None:
        event.synchronize()
        if fields.offsets is not None:
            # On the device nobody could look at them before.
            fields.offsets = checked_offsets(fields.offsets, fields.tokens["train_logp"].numel())
    fields = _drawn(fields, sequences, random.Random(seed))
    if step is not None:
        fields.rows["step"] = torch.full((fields.count,), step)
    if target.suffix == ".jsonl":
        _append(target, fields)
    else:
        _write_shard(target, fields, step)
    return fields.count


def _append(target: Path, fields: _Fields) -> None:
    """Append one line a sequence, by one write."""
    bounds = None if fields.offsets is None else fields.offsets.tolist()
    lines = []
    for i in range(fields.count):
        piece: Any = i if bounds is None else slice(bounds[i], bounds[i + 1])
        record = {name: x[piece].tolist() for name, x in fields.tokens.items()}
        lines.append(json.dumps(record | {name: x[i].item() for name, x in fields.rows.items()}) + "\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def _write_shard(folder: Path, fields: _Fields, step: int | None) -> None:
    """Write a file of its own under a temporary name first, so that the final name always holds a whole file."""
    folder.mkdir(parents=True, exist_ok=True)
    found = fields.tokens | fields.rows
    if fields.offsets is not None:
        found["cu_seqlens"] = fields.offsets
    number = 0 if step is None else step
    name = f"{number:08d}-{os.getpid()}-{time.time_ns()}.pt"
    part = folder / f"{name}.part"
    torch.save(found, part)
    part.replace(folder / name)
