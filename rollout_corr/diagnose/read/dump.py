"""Sources of log-probs that are read in chunks of whole sequences: a dump in files of any known kind, or tensors."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .chunk import Chunk, blocks
from .fields import ChosenFields, Names, choose
from .formats import load_pt
from .job import Job, find_job
from .json_files import json_lines
from .problems import DumpError, Problem, Problems, reason_of
from .ranks import assembled, is_of_a_rank
from .record_files import RecordFile, flat, listed, transposed, unwrapped
from .tensor_files import TensorFile
from .traces import joined_traces
from .writers import Writer, writer_of

# A file or a folder, or several of them.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

SUFFIXES = (".pt", ".pth", ".jsonl", ".jsonl.gz")
# Paths that are named where several are read.
MOST_LISTED = 3


def suffix_of(path: Path) -> str:
    """Return the end of a file's name that says its kind, such as .jsonl.gz."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


# Files that are opened together, their writer, and the step that their names say.
Group = tuple[tuple[Path, ...], Writer | None, int | None]


class Part(NamedTuple):
    """A part of a source."""

    name: str  # what messages call it
    open: Callable[[], TensorFile | RecordFile]  # opens it
    step: int | None = None  # the step of the training that all of it is of, where its name says so


class Source(ABC):
    """Base class of the sources of log-probs, which are read once, as chunks of whole sequences.

    Args:
        wanted: The fields that the user names.
        limit: Read at most so many sequences.

    Raises:
        DumpError: The limit is no number of sequences.
    """

    name: str  # in a few words
    where: str  # its name in full, with folders
    files: tuple[Path, ...] = ()  # the files that are read

    @property
    def about(self) -> str:
        """The recognized jobs, in a line."""
        return ""

    def __init__(self, wanted: ChosenFields, limit: int | None) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise DumpError(f"limit: expected a number >= 1, got {limit!r}")
        self.wanted, self.limit = wanted, limit
        self.problems = Problems()  # noted so far
        self.fields: dict[str, str] = {}  # the field of each role in the first part, once it was opened
        self.progress = 0.0  # how much was read, 0 to 1
        self.reading = ""  # the name of the part that is being read
        self.label_names: Names = {}  # names of the labels of `by`, those that were read first
        self.unused: dict[str, str] = {}  # columns of the first part without a role, and what they look like

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the parts, to be opened one after another."""

    def chunks(self) -> Iterator[Chunk]:
        """Read everything, in chunks that depend on the sequences alone.

        Raises:
            DumpError: No sequence can be read.
        """
        yield from blocks(self._pieces())

    def _pieces(self) -> Iterator[Chunk]:
        """Read what each part returns at a time."""
        sequences = 0
        parts = self.parts()
        for i, part in enumerate(parts):
            self.reading = Path(part.name).name
            for chunk in self._until_damage(part.name, self._read(i, len(parts), part)):
                if self.limit is not None and sequences + chunk.sequences > self.limit:
                    chunk = chunk.part(0, self.limit - sequences)
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
            raise DumpError(f"{self.where}: contains no sequences")

    def _read(self, i: int, count: int, part: Part) -> Iterator[Chunk]:
        """Open part i of all and read it."""
        file = part.open()
        for chunk in file.chunks():
            if part.step is not None and "steps" not in chunk.columns:
                chunk.columns["steps"] = torch.full(chunk.train.shape, part.step)
            self.fields, self.unused = self.fields or file.fields, self.unused or file.unused
            self.label_names = file.label_names | self.label_names
            self.progress = (i + file.progress) / count
            yield chunk

    def _until_damage(self, file: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield what is read of a file until reading it fails: the failure becomes a problem, and other files are read.

        Exceptions of who uses the chunks do not pass here.
        """
        read = None
        try:
            for chunk in chunks:
                read = int(chunk.records[-1])
                yield chunk
        except DumpError as error:
            unread = Problem(file, None, None, str(error).removeprefix(f"{file}: "))
            self.problems.add(
                error.problem or unread, error.__cause__ if isinstance(error.__cause__, Exception) else error
            )
        except Exception as error:  # noqa: BLE001  # parsers of damaged files raise anything: KeyError, zlib.error, MemoryError
            what = "cannot be read" if read is None else "cannot be read from here on"
            record = None if read is None else read + 1
            self.problems.add(Problem(file, record, None, f"{what}: {reason_of(error)}"), error)


class Dump(Source):
    """A dump of log-probs.

    Args:
        paths: A file; the folder of a job, whose dumps are read step by step; a folder whose files of known kinds are
            read in the order of their names; or several of them.
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
        self.jobs: tuple[Job, ...] = ()  # what was found in each folder
        self.name = _listed([path.name for path in self.paths])
        self.where = _listed([str(path) for path in self.paths])
        self._groups = [group for path in self.paths for group in self._groups_of(path)]
        self.files = tuple(file for files, _, _ in self._groups for file in files)

    def _groups_of(self, path: Path) -> list[Group]:
        """Return the files of a path that are opened together: itself, or the dumps in a folder."""
        try:
            if not path.exists():
                raise DumpError(f"{path}: no such file")
            is_folder = path.is_dir()
        except OSError as error:
            raise DumpError(f"{path}: {reason_of(error)}") from error
        if not is_folder:
            if suffix_of(path) not in SUFFIXES:
                raise DumpError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
            return [((path,), *writer_of(path))]
        job = find_job(path, SUFFIXES)
        self.jobs = (*self.jobs, job)
        by_rank = job.writer is not None and job.writer.by_rank
        return [
            (files, job.writer, step)
            for step, of_step in job.dumps.items()
            for files in ([of_step] if by_rank else [(file,) for file in of_step])
        ]

    @property
    def about(self) -> str:
        """The recognized jobs, in a line."""
        return "; ".join(filter(None, map(str, self.jobs)))

    def parts(self) -> Sequence[Part]:
        """Return the files."""
        return [Part(str(files[0]), partial(self._opened, files, writer), step) for files, writer, step in self._groups]

    def _opened(self, files: tuple[Path, ...], writer: Writer | None) -> TensorFile | RecordFile:
        """Open a file by the package for its kind, or the files of several ranks."""
        wanted = self.wanted if writer is None else replace(self.wanted, first=writer.roles)
        if len(files) == 1:
            return self._opened_one(files[0], wanted, writer is not None and writer.traces)
        ranks = [load_pt(path, whole=self.limit is None)[0] for path in files]
        strange = next((path for path, rank in zip(files, ranks, strict=True) if not is_of_a_rank(rank)), None)
        if strange is not None:
            raise DumpError(f"{strange}: expected the samples of a rank with their lengths, as the other ranks have")
        return RecordFile(assembled(ranks), str(files[0]), wanted, self.problems)

    def _opened_one(self, path: Path, wanted: ChosenFields, traces: bool) -> TensorFile | RecordFile:
        file = str(path)
        if not path.is_file():
            # A pipe would be waited for.
            missing = "no such file: a broken link" if path.is_symlink() else "no such file"
            raise DumpError(f"{file}: {'not a file' if path.exists() else missing}")
        suffix = suffix_of(path)
        if suffix in (".pt", ".pth"):
            return self._opened_pt(*load_pt(path, whole=self.limit is None), file, wanted)
        return RecordFile(joined_traces(path) if traces else json_lines(path), file, wanted, self.problems)

    def _opened_pt(self, found: Any, size: int, file: str, wanted: ChosenFields) -> TensorFile | RecordFile:
        """Tell records, lists of a field each, and tensors apart."""
        found = unwrapped(found, wanted)
        if isinstance(found, list):
            return RecordFile(listed(found), file, wanted, self.problems)
        if not isinstance(found, dict):
            raise DumpError(f"{file}: expected a dict of tensors or a list of records, got {type(found).__name__}")
        if is_of_a_rank(found):
            return RecordFile(assembled([found]), file, wanted, self.problems)
        fields = flat(found)
        train = fields[choose(fields, wanted, file, values=fields)["train_logp"]]
        if isinstance(train, list):
            return RecordFile(transposed(fields, len(train)), file, wanted, self.problems)
        return TensorFile(fields, size, file, wanted)


def _listed(names: Sequence[str]) -> str:
    """List the first names and count the others."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more
