"""A dump: a file or a folder of files, of any known kind, read as chunks of whole sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_corr.diagnose.read.chunk import Chunk
from rollout_corr.diagnose.read.fields import LOG_PROBS, OFFSETS, ChosenFields, choose
from rollout_corr.diagnose.read.formats import Loaded, Npz, SafeTensors, signed
from rollout_corr.diagnose.read.json_files import json_lines, json_records
from rollout_corr.diagnose.read.label_names import Names, names_in
from rollout_corr.diagnose.read.parquet_files import parquet_rows
from rollout_corr.diagnose.read.pickles import Unread
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems, reason_of, until_damage
from rollout_corr.diagnose.read.pt_files import load_pt
from rollout_corr.diagnose.read.record_files import Numbered, RecordFile, flat, listed, transposed, unwrapped
from rollout_corr.diagnose.read.tensor_files import TensorFile

SUFFIXES = (".pt", ".pth", ".safetensors", ".npz", ".jsonl", ".jsonl.gz", ".json", ".parquet")
# Of files in a folder; a .json file beside dumps is the configuration of the run.
IN_FOLDERS = tuple(suffix for suffix in SUFFIXES if suffix != ".json")


def suffix_of(path: Path) -> str:
    """Return the end of a file's name that says its kind, such as .jsonl.gz."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


class Dump:
    """A dump of log-probs.

    Args:
        path: A file, or a folder whose files of known kinds are read in the order of their names.
        fields: Names of fields by role, where the guess is wrong: `{"train_logp": "pi_old"}`.
        by: Names of further columns to read, numbers per token or per sequence.
        limit: Read at most so many sequences.

    Attributes:
        problems: Problems that were noted so far.
        fields: The field of each role in the first file, once it was opened.
        progress: How much was read, 0 to 1.
        label_names: Names of the labels of `by`, those that a dump has first.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Mapping[str, str] | None = None,
        by: Iterable[str] = (),
        limit: int | None = None,
    ) -> None:
        self.path, self.limit = Path(path), limit
        self.wanted = ChosenFields(dict(fields or {}), tuple(by))
        self.problems = Problems()
        self.fields: dict[str, str] = {}
        self.progress = 0.0
        self.label_names: Names = {}
        self.files = self._files()

    def _files(self) -> list[Path]:
        try:
            if not self.path.exists():
                raise DumpError(f"{self.path}: no such file")
            is_folder = self.path.is_dir()
        except OSError as error:
            raise DumpError(f"{self.path}: {reason_of(error)}") from error
        if is_folder:
            # A folder may be called x.npz; what is in it is found too.
            found = sorted(file for file in self.path.rglob("*") if suffix_of(file) in IN_FOLDERS and not file.is_dir())
            if not found:
                raise DumpError(f"{self.path}: expected files that end in {', '.join(IN_FOLDERS)}, found none")
            return found
        if suffix_of(self.path) not in SUFFIXES:
            raise DumpError(f"{self.path}: expected a name that ends in {', '.join(SUFFIXES)}")
        return [self.path]

    def chunks(self) -> Iterator[Chunk]:
        """Read the dump chunk by chunk.

        Raises:
            DumpError: No sequence can be read.
        """
        sequences = 0
        for i, path in enumerate(self.files):
            for chunk in until_damage(self._read(i, path), str(path), self.problems, _last_record):
                if self.limit is not None and sequences + chunk.sequences > self.limit:
                    chunk = _first(chunk, self.limit - sequences)
                sequences += chunk.sequences
                if chunk.sequences:
                    yield chunk
                if self.limit is not None and sequences >= self.limit:
                    self.progress = 1.0
                    return
        self.progress = 1.0
        if sequences == 0:
            if self.problems.shown:
                raise self.problems.shown[0].error() from self.problems.cause
            raise DumpError(f"{self.path}: no sequence in it")

    def _read(self, i: int, path: Path) -> Iterator[Chunk]:
        """Open file i and read it chunk by chunk."""
        if not path.is_file():
            # A pipe would be waited for.
            missing = "no such file: a broken link" if path.is_symlink() else "no such file"
            raise DumpError(f"{path}: {'not a file' if path.exists() else missing}")
        # Whoever stops in the middle of a file closes it too.
        with ExitStack() as until_read:
            file = self._open(path, until_read)
            for chunk in file.chunks():
                self.fields = self.fields or file.fields
                self.label_names = file.label_names | self.label_names
                self.progress = (i + file.progress) / len(self.files)
                yield chunk

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


def _last_record(chunk: Chunk) -> int:
    return int(chunk.records[-1])


def _first(chunk: Chunk, count: int) -> Chunk:
    """Return the first sequences of a chunk."""
    tokens = int(chunk.offsets[count])
    return replace(
        chunk,
        train=chunk.train[:tokens],
        rollout=chunk.rollout[:tokens],
        mask=None if chunk.mask is None else chunk.mask[:tokens],
        offsets=chunk.offsets[: count + 1],
        records=chunk.records[:count],
        columns={name: values[:tokens] for name, values in chunk.columns.items()},
        texts=None if chunk.texts is None else chunk.texts[:count],
    )
