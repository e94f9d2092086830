"""A source of log-probs, files or tensors in memory, which is read part by part, as chunks of whole sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollout_corr.diagnose.read.chunk import Chunk, blocks
from rollout_corr.diagnose.read.fields import ChosenFields
from rollout_corr.diagnose.read.label_names import Names
from rollout_corr.diagnose.read.problems import DumpError, Problems, until_damage
from rollout_corr.diagnose.read.record_files import RecordFile
from rollout_corr.diagnose.read.tensor_files import TensorFile

# The name of a part for messages, and what opens it.
Part = tuple[str, Callable[[], TensorFile | RecordFile]]


class Source(ABC):
    """Base class of the sources of log-probs, which are read once, as chunks of whole sequences.

    Args:
        wanted: The fields that the user names.
        limit: Read at most so many sequences.

    Attributes:
        name: Its name in a few words.
        where: Its name in full, with folders.
        files: The files that are read.
        problems: Problems that were noted so far.
        fields: The field of each role in the first part, once it was opened.
        progress: How much was read, 0 to 1.
        label_names: Names of the labels of `by`, those that were read first.

    Raises:
        DumpError: The limit is no number of sequences.
    """

    name: str
    where: str
    files: tuple[Path, ...] = ()

    def __init__(self, wanted: ChosenFields, limit: int | None) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise DumpError(f"limit: expected a number >= 1, got {limit!r}")
        self.wanted, self.limit = wanted, limit
        self.problems = Problems()
        self.fields: dict[str, str] = {}
        self.progress = 0.0
        self.label_names: Names = {}

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
        for i, (file, opened) in enumerate(parts):
            for chunk in until_damage(self._read(i, len(parts), opened), file, self.problems, _last_record):
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
            raise DumpError(f"{self.where}: no sequence in it")

    def _read(self, i: int, count: int, opened: Callable[[], TensorFile | RecordFile]) -> Iterator[Chunk]:
        """Open part i of all and read it."""
        file = opened()
        for chunk in file.chunks():
            self.fields = self.fields or file.fields
            self.label_names = file.label_names | self.label_names
            self.progress = (i + file.progress) / count
            yield chunk


def _last_record(chunk: Chunk) -> int:
    return int(chunk.records[-1])
