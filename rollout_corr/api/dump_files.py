"""The files of `dump`: lines appended to a .jsonl file, and shards in a folder that are always whole.

What a function here was given is in the file once it is back, whatever becomes of the process: the kernel has it. It is
not forced to the disk, as a power cut would need: that waits for all else on its way there, such as a checkpoint.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

# Another process that holds a file for longer is stuck.
LOCK_SECONDS = 30.0

# A shard that is being written is younger. Some network file systems keep a lock to one machine, so a lock that is free
# does not tell that nobody writes.
OLDEST_PART_SECONDS = 60.0

# How every line of ours begins.
FIRST = b'{"train_logp": ['

_PART = re.compile(r"\d+-(\d+)-[0-9a-f]+\.pt\.part")

# Folders without a shard that a dead process left behind. Only a process that ends leaves one, so one look is enough.
_clean: set[Path] = set()

if sys.platform == "win32":

    def _lock(file: int) -> bool | None:
        return None

    def _unlock(file: int) -> None:
        pass

else:
    import fcntl

    # What file systems without locks say.
    _NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)

    def _lock(file: int) -> bool | None:
        """Take the lock of a file: False where another holds it, None where this file system has no locks."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise
        return True

    def _unlock(file: int) -> None:
        """Give the lock back: closing would not, while a forked process has the file open too."""
        with suppress(OSError):  # there was none
            fcntl.flock(file, fcntl.LOCK_UN)


def append(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines to a file: all of them, or none if that fails. An OSError says how many are in the file."""
    there = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as file:
            size, before = _mended(file)
            data = before + b"".join(lines)
            written, failure = _write(file, data)
            if failure is not None:
                if not _taken_back(file, size, written):
                    # A line that lacks its line break alone is whole.
                    ends = accumulate(map(len, lines), initial=len(before))
                    there = sum(end - 1 <= written for end in ends) - 1
                raise failure
    except OSError as error:
        raise _told(error, path, f"{there} of the {len(lines)} sequences of this call are in the file") from error


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
        _remove_parts(folder)
        with _locked(part) as file:
            _, failure = _write(file, data.getbuffer())
            if failure is not None:
                raise failure
        part.rename(folder / name)
    except OSError as error:
        with suppress(OSError):  # readers do not take it for a shard, and a later process removes it
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


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file to append to, and keep other threads and processes from it meanwhile."""
    late = time.monotonic() + LOCK_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(path))
            if _lock(file) is not False and _is_at(path, file):
                yield file
                return
        finally:
            _unlock(file)
            os.close(file)
        if time.monotonic() > late:
            raise OSError(errno.ETIMEDOUT, f"another process has held its lock for {LOCK_SECONDS:.0f} s", str(path))
        time.sleep(0.01)


def _is_at(path: Path, file: int) -> bool:
    """Return whether an open file still has its name: one may be removed or renamed before its lock is taken."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _mended(file: int) -> tuple[int, bytes]:
    """Remove the half line that a killed process left; return the file's size and what has to stand before a new line.

    Only a line that begins as ours do and is no JSON is removed. What somebody else left without a line break gets one.
    """
    size = os.fstat(file).st_size
    start = _last_line(file, size)
    if start == size:
        return size, b""
    os.lseek(file, start, os.SEEK_SET)
    head = os.read(file, len(FIRST))
    if not FIRST.startswith(head):
        return size, b"\n"
    try:
        json.loads(head + _read(file, size - start - len(head)))
    except RecursionError:
        pass  # nested as no line of ours
    except ValueError:
        os.ftruncate(file, start)
        return start, b""
    return size, b"\n"


def _last_line(file: int, size: int) -> int:
    """Return where the line begins that has no end, or the size if the last one has its end."""
    end = size
    while end > 0:
        start = max(0, end - (1 << 16)) if end < size else end - 1
        os.lseek(file, start, os.SEEK_SET)
        found = _read(file, end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _read(file: int, count: int) -> bytes:
    """Read so many bytes, fewer at the end of the file."""
    pieces = []
    while count > 0 and (piece := os.read(file, count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _write(file: int, data: bytes | memoryview) -> tuple[int, OSError | None]:
    """Write behind the end; return how many bytes were written, and why not all of them."""
    view, written = memoryview(data), 0
    try:
        while written < len(view):
            written += os.write(file, view[written:])
        # Network file systems report a full disk or a quota when a file is closed. This closes a second handle, so
        # that the first can still take it back.
        os.close(os.dup(file))
    except OSError as error:
        return written, error
    return written, None


def _taken_back(file: int, size: int, written: int) -> bool:
    """Cut what was written off again, unless somebody without a lock has written behind it."""
    try:
        if os.fstat(file).st_size != size + written:
            return False
        os.ftruncate(file, size)
    except OSError:
        return False
    return True


def _remove_parts(folder: Path) -> None:
    """Remove the shards that processes left half written when they were killed."""
    if folder in _clean:
        return
    found = False
    for entry in list(os.scandir(folder)):
        match = _PART.fullmatch(entry.name)
        if match is None:
            continue
        found = True
        if time.time() - int(match[1]) * 1e-9 < OLDEST_PART_SECONDS:
            continue
        # A part of another user, or one that another process removes at this moment, is no reason to fail this call.
        with suppress(OSError):
            file = os.open(entry.path, os.O_RDWR)
            try:
                if _lock(file):
                    os.unlink(entry.path)
            finally:
                _unlock(file)
                os.close(file)
    if not found:
        _clean.add(folder)
