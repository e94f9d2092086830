"""The files of `dump`: lines appended to a .jsonl file, and shards in a folder that are always whole.

What a function here was given is in the file once it is back: the kernel has it. It is not forced to the disk, as a
power cut would need: that waits for all else on its way there, such as a checkpoint.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor


def append(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines to a file; an OSError names the path, the reason, and what may be in the file."""
    there = f"0 of the {len(lines)} sequences of this call are in the file"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(path))
            data = _line_break(file) + b"".join(lines)
            there = f"some of the {len(lines)} sequences of this call may be in the file"
            _write(file, data)
        finally:
            # Network file systems report a full disk or a quota here.
            os.close(file)
    except OSError as error:
        raise _told(error, path, there) from error


def write_shard(folder: Path, step: int | None, tensors: Mapping[str, Tensor | list[str]], count: int) -> None:
    """Write a file of its own, under a temporary name first, so that the final name always holds a whole file.

    An OSError names the folder and the reason, and says that none of the `count` sequences is there.
    """
    # In memory first: torch writes to a path while it holds the interpreter, which would stop all threads.
    data = io.BytesIO()
    torch.save(dict(tensors), data)
    name = f"{step or 0:08d}-{time.time_ns()}-{secrets.token_hex(4)}.pt"
    part = folder / f"{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            _write(file, data.getbuffer())
        finally:
            os.close(file)
        part.rename(folder / name)
    except OSError as error:
        with suppress(OSError):  # readers do not take it for a shard
            part.unlink(missing_ok=True)
        raise _told(error, folder, f"0 of the {count} sequences of this call are in the folder") from error


def json_line(columns: Mapping[str, Tensor | float | list[str]]) -> bytes:
    """Write a sequence as a line of JSON, in pieces, between which other threads may run."""
    return ("{" + ", ".join(f"{json.dumps(name)}: {_json(x)}" for name, x in columns.items()) + "}\n").encode("ascii")


def _json(x: Tensor | float | list[str]) -> str:
    if not isinstance(x, Tensor):
        return json.dumps(x)
    return "[" + ", ".join(json.dumps(piece.tolist())[1:-1] for piece in x.split(4096)) + "]"


def _told(error: OSError, path: Path, there: str) -> OSError:
    """Name the path, and what is there, in the error of a file system."""
    reason = error.strerror or str(error)
    if error.filename is not None and str(error.filename) != str(path):
        reason += f" ({error.filename})"
    return OSError(error.errno or errno.EIO, f"{path}: {reason}; {there}")


def _line_break(file: int) -> bytes:
    """The line break that has to stand before a new line: a killed process may have left half a line."""
    size = os.fstat(file).st_size
    if not size:
        return b""
    os.lseek(file, size - 1, os.SEEK_SET)
    return b"" if os.read(file, 1) == b"\n" else b"\n"


def _write(file: int, data: bytes | memoryview) -> None:
    """Write all of some data behind the end."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
