"""Files that are written whole or not at all: into a temporary file of the same folder, then renamed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from secrets import token_hex


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replace a file's content; until all of the new content is on disk, the old file stays.

    A symlink stays, and its target is replaced; the old file's permissions stay. Anything but a regular file (a pipe,
    /dev/stdout) cannot be replaced and is written to directly. A process that is killed leaves at most a hidden
    file that ends in .part, in the same folder.

    Args:
        path: Where.
        content: The bytes, or a text that is written as UTF-8.

    Raises:
        OSError: It cannot be written. The old file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    old = target.stat().st_mode if target.exists() else None
    if old is not None and not stat.S_ISREG(old):
        with open(path, "wb") as special:
            special.write(data)
        return
    if old is not None and not os.access(target, os.W_OK):
        # A rename needs permission for the folder alone, and would replace a file that was made read-only on purpose.
        raise PermissionError(13, "Permission denied", str(path))
    part = target.with_name(f".rollout-corr-{token_hex(8)}.part")
    # "x" and not tempfile: a new file gets the permissions that open() gives.
    file = open(part, "xb")  # noqa: SIM115 - closed below, before the rename
    try:
        with file:
            file.write(data)
            if old is not None:
                part.chmod(stat.S_IMODE(old))
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
