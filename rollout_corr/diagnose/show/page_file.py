"""Write a page, whole or not at all, and never over a dump that is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...whole_files import write_whole
from ..read.dump import SUFFIXES, Dump, Source, suffix_of
from ..read.problems import DumpError


def checked(page: str | os.PathLike[str], sources: Sequence[Source]) -> Path:
    """Return where a page goes.

    Raises:
        DumpError: There is a dump that is read.
    """
    path = Path(page)
    for source in sources:
        for file in source.files:
            # Not by name: the page may be a symlink or a hard link to the dump.
            if path.exists() and file.exists() and path.samefile(file):
                raise DumpError(f"page {path}: this is the dump {file}, which the page would overwrite")
        for folder in source.paths if isinstance(source, Dump) else ():
            if suffix_of(path) in SUFFIXES and folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
                raise DumpError(f"page {path}: in {folder} this would be read as a dump; name it .html")
    return path


def write(path: Path, page: str) -> None:
    """Write a page.

    Raises:
        DumpError: It cannot be written.
    """
    try:
        write_whole(path, page)
    except OSError as error:
        raise DumpError(f"page {path}: cannot be written: {error.strerror or error}") from error
