"""A dump: files or folders of files, of any known kind, read as chunks of whole sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_corr.diagnose.read.fields import LOG_PROBS, OFFSETS, ChosenFields, choose
from rollout_corr.diagnose.read.formats import Loaded, Npz, SafeTensors, signed
from rollout_corr.diagnose.read.json_files import json_lines, json_records
from rollout_corr.diagnose.read.label_names import names_in
from rollout_corr.diagnose.read.parquet_files import parquet_rows
from rollout_corr.diagnose.read.pickles import Unread
from rollout_corr.diagnose.read.problems import DumpError, Problem, reason_of
from rollout_corr.diagnose.read.pt_files import load_pt
from rollout_corr.diagnose.read.record_files import Numbered, RecordFile, flat, listed, transposed, unwrapped
from rollout_corr.diagnose.read.source import Part, Source
from rollout_corr.diagnose.read.tensor_files import TensorFile

# A file or a folder, or several of them.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

SUFFIXES = (".pt", ".pth", ".safetensors", ".npz", ".jsonl", ".jsonl.gz", ".json", ".parquet")
# Of files in a folder; a .json file beside dumps is the configuration of the run.
IN_FOLDERS = tuple(suffix for suffix in SUFFIXES if suffix != ".json")
# Paths that are named where several are read.
MOST_LISTED = 3


def suffix_of(path: Path) -> str:
    """Return the end of a file's name that says its kind, such as .jsonl.gz."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


class Dump(Source):
    """A dump of log-probs.

    Args:
        paths: A file, or a folder whose files of known kinds are read in the order of their names; or several of them.
        fields: Names of fields by role, where the guess is wrong: `{"train_logp": "pi_old"}`.
        by: Names of further columns to read, numbers per token or per sequence.
        limit: Read at most so many sequences.
    """

    def __init__(
        self,
        paths: Paths,
        fields: Mapping[str, str] | None = None,
        by: Iterable[str] = (),
        limit: int | None = None,
    ) -> None:
        super().__init__(ChosenFields(dict(fields or {}), tuple(by)), limit)
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        self.paths = tuple(Path(path) for path in several)
        if not self.paths:
            raise DumpError("expected at least one path, got none")
        self.name = _listed([path.name for path in self.paths])
        self.where = _listed([str(path) for path in self.paths])
        self.files = tuple(file for path in self.paths for file in _files(path))

    def parts(self) -> Sequence[Part]:
        """Return the files."""
        return [(str(path), partial(self._opened, path)) for path in self.files]

    @contextmanager
    def _opened(self, path: Path) -> Iterator[TensorFile | RecordFile]:
        """Open a file until it is read."""
        if not path.is_file():
            # A pipe would be waited for.
            missing = "no such file: a broken link" if path.is_symlink() else "no such file"
            raise DumpError(f"{path}: {'not a file' if path.exists() else missing}")
        with ExitStack() as until_read:
            yield self._open(path, until_read)

    def _open(self, path: Path, until_read: ExitStack) -> TensorFile | RecordFile:
        file = str(path)
        if suffix_of(path) in (".jsonl", ".jsonl.gz"):
            return RecordFile(json_lines(path), file, self.wanted, self.problems)
        if path.suffix == ".json":
            return RecordFile(json_records(path, self.wanted), file, self.wanted, self.problems)
        if path.suffix == ".parquet":
            rows = parquet_rows(path, until_read.enter_context(path.open("rb")), self.wanted, self.problems)
            return RecordFile(rows, file, self.wanted, self.problems)
        if path.suffix == ".safetensors":
            tensors = SafeTensors(path, until_read.enter_context(path.open("rb")))
            return TensorFile(tensors, file, self.wanted, self.problems)
        if path.suffix == ".npz":
            return TensorFile(Npz(path), file, self.wanted, self.problems)
        return self._open_pt(*load_pt(path, whole=self.limit is None), file)

    def _open_pt(self, found: Any, size: int, file: str) -> TensorFile | RecordFile:
        found = unwrapped(found)
        if isinstance(found, (list, tuple)):
            return RecordFile(_signed(listed(found)), file, self.wanted, self.problems)
        if not isinstance(found, Mapping):
            raise DumpError(f"{file}: expected a dict of tensors or a list of records, got {type(found).__name__}")
        fields = flat(found)
        chosen = choose(fields, self.wanted, file)
        for role, name in chosen.items():
            if isinstance(fields[name], Unread):
                what = f"as {role}: {fields[name]}; a .pt file is read for tensors, lists, dicts and numbers"
                raise Problem(file, None, name, what).error()
        train = fields[chosen["train_logp"]]
        if isinstance(train, Sequence):
            same = {name: x for name, x in fields.items() if _count(x) == len(train)}
            return RecordFile(_signed(transposed(same, len(train))), file, self.wanted, self.problems)
        for role in (*LOG_PROBS, "mask", *OFFSETS):
            value = fields[chosen[role]] if role in chosen else None
            if value is not None and not isinstance(value, Tensor):
                what = f"as {role}: expected a tensor, as the others are, got {type(value).__name__}"
                raise Problem(file, None, chosen[role], what).error()
        tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
        opened = TensorFile(Loaded(tensors, size), file, self.wanted, self.problems)
        opened.label_names = names_in(fields, self.wanted.by)
        return opened


def _files(path: Path) -> list[Path]:
    """Return the files of a path: itself, or those in a folder."""
    try:
        if not path.exists():
            raise DumpError(f"{path}: no such file")
        is_folder = path.is_dir()
    except OSError as error:
        raise DumpError(f"{path}: {reason_of(error)}") from error
    if is_folder:
        # A folder may be called x.npz; what is in it is found too.
        found = sorted(file for file in path.rglob("*") if suffix_of(file) in IN_FOLDERS and not file.is_dir())
        if not found:
            raise DumpError(f"{path}: expected files that end in {', '.join(IN_FOLDERS)}, found none")
        return found
    if suffix_of(path) not in SUFFIXES:
        raise DumpError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    return [path]


def _listed(names: Sequence[str]) -> str:
    """List the first names and count the others."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _count(value: Any) -> int | None:
    """Count the items of a list or the rows of a tensor."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, Sequence) else None


def _signed(records: Iterator[Numbered]) -> Iterator[Numbered]:
    """Replace the unsigned tensors of records."""
    for number, record, done in records:
        if isinstance(record, Mapping):
            record = {name: signed(x) if isinstance(x, Tensor) else x for name, x in record.items()}
        yield number, record, done
